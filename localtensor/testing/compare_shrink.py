"""Smaller programs that show the same divergence: fewer steps, ranks, layers and rows, and shorter rows."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from localtensor.testing.compare import programs
from localtensor.testing.compare.divergence import Divergence

SHRINK_SECONDS = 60.0  # for all attempts at a smaller program together


@dataclass(frozen=True)
class Smaller:
    """A program that was made smaller, by `words`, and what it shows."""

    program: programs.TrainingProgram
    words: tuple[str, ...] = ()
    found: Divergence | None = None

    def __str__(self) -> str:
        return ", ".join(self.words)


@dataclass(frozen=True)
class _Shortened:
    """`build` with lists of layers cut to one layer."""

    build: Callable[[], nn.Module]

    def __call__(self) -> nn.Module:
        model = self.build()
        for module in list(model.modules()):
            if isinstance(module, nn.ModuleList | nn.Sequential) and _is_stack(module):
                del module[1:]
        return model


@dataclass(frozen=True)
class _Narrowed:
    """`batch` with the first `length` places of dim `dim` of each tensor that has `before`."""

    batch: Callable[[], Any]
    dim: int
    before: int
    length: int

    def __call__(self) -> Any:
        def cut(x: Any) -> Any:
            fits = isinstance(x, Tensor) and x.dim() > self.dim and x.shape[self.dim] == self.before
            return x.narrow(self.dim, 0, self.length).clone() if fits else x

        return tree_map(cut, self.batch())


def smallest(
    program: programs.TrainingProgram,
    start: programs.Start,
    found: Divergence,
    divergence_of: Callable[[programs.TrainingProgram], Divergence | None],
) -> Smaller:
    """The smallest of the programs tried for which `divergence_of` finds the same divergence as `found`."""
    best, until, progress = Smaller(program, (), found), time.monotonic() + SHRINK_SECONDS, True
    while progress and time.monotonic() < until:
        progress = False
        for attempt in _attempts(best, programs.start_of(best.program) if best.words else start, found):
            if time.monotonic() > until:
                break
            shown = _shown(attempt.program, found, divergence_of)
            if shown is not None:
                best, progress = replace(attempt, found=shown), True
                break
    return best


def _shown(
    program: programs.TrainingProgram,
    found: Divergence,
    divergence_of: Callable[[programs.TrainingProgram], Divergence | None],
) -> Divergence | None:
    """The divergence of the program, if it is the same."""
    try:
        other = divergence_of(program)
    except Exception:  # why: a program that was cut may fail in any way, and is not taken then
        return None
    return other if other is not None and _what_counts(other) == _what_counts(found) else None


def _what_counts(found: Divergence) -> tuple[str, str, str]:
    """What has to be the same: the kind of value, the module but for its number, and the reason but for numbers."""
    return (found.key.kind, re.sub(r"\d+", "#", found.key.name), re.sub(r"\d+", "#", found.what))


def _attempts(best: Smaller, start: programs.Start, found: Divergence) -> Iterator[Smaller]:
    """Programs that are a step smaller, those that save most first."""
    program = best.program
    if program.steps > found.key.step + 1:
        yield _with(best, f"steps={found.key.step + 1}", steps=found.key.step + 1)
    if program.steps > 1:
        yield _with(best, "steps=1", steps=1)
    for axis, size in program.mesh.items():
        for less in (1, 2):
            if less < size:
                yield _with(best, f"{axis}={less}", mesh={**program.mesh, axis: less})
    stacks = [len(m) for m in start.model.modules() if isinstance(m, nn.ModuleList | nn.Sequential) and _is_stack(m)]
    if stacks and not isinstance(program.build, _Shortened):
        yield _with(best, f"1 layer of {max(stacks)}", build=_Shortened(program.build))
    tensors = [x for x in tree_leaves(start.batches[:1]) if isinstance(x, Tensor)]
    for dim, what, least in ((0, "row", program.parts), (1, "place", 1)):
        for length in sorted({x.shape[dim] for x in tensors if x.dim() > dim}):
            half = max(least, length // 2)
            if half < length:
                of = " of each row" if dim else ""
                yield _with(
                    best, f"{half} {what}{'s' * (half > 1)}{of}", batch=_Narrowed(program.batch, dim, length, half)
                )


def _with(best: Smaller, words: str, **changes: Any) -> Smaller:
    kept = [one for one in best.words if _kind_of(one) != _kind_of(words)]
    return Smaller(replace(best.program, **changes), (*kept, words))


def _kind_of(words: str) -> str:
    """What is smaller, without the number.

    >>> _kind_of("8 rows") == _kind_of("1 row"), _kind_of("dp=2")
    (True, 'dp')
    """
    return words.lstrip("0123456789 ").partition("=")[0].partition(" ")[0].removesuffix("s")


def _is_stack(module: nn.ModuleList | nn.Sequential) -> bool:
    """Whether it has several layers of one class."""
    return len(module) > 1 and len({type(one) for one in module}) == 1
