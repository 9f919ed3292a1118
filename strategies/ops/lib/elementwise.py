"""Ops whose every element is made of the elements at the same place, after broadcasting: how they may be cut."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from localtensor.layout import agreed
from strategies.ops.semantics.rulebook import Ask, Line, Meta, RuleFunction

Maker = Callable[[Ask], Iterable[Line]]


def shards(ask: Ask) -> Iterator[Line]:
    """Each dim of the result cut: so is every operand that has the dim at its full size, and the others stay whole.

    A dim of size 1 is cut where the result has size 1, too: then all operands that have it are empty on the same ranks.
    """
    result = next((meta for meta in ask.outputs if meta is not None), None)
    if result is None or any(meta is not None and meta.shape != result.shape for meta in ask.outputs):
        return
    for dim in range(result.ndim):
        inputs: dict[int, Placement] = {
            leaf: Shard(own) for leaf, meta in enumerate(ask.tensors) for own in _own_dim(meta, result, dim)
        }
        if inputs:
            yield ask.line(inputs, [None if meta is None else Shard(dim) for meta in ask.outputs])


def _own_dim(meta: Meta, result: Meta, dim: int) -> Iterator[int]:
    """The operand's dim that runs along this dim of the result, if it has one of that size."""
    own = dim - result.ndim + meta.ndim
    if own >= 0 and meta.shape[own] == result.shape[dim]:
        yield own


def elementwise(*makers: Maker) -> RuleFunction:
    """The rule with a line for each dim, and the lines that these make, whose inputs or results are partial."""

    def lines(ask: Ask) -> Iterator[Line]:
        yield from shards(ask)
        for maker in makers:
            yield from maker(ask)

    return lines


def partial(ask: Ask, leaves: Iterable[int], kind: str, gives: str | None = None) -> Line:
    """These tensors partial, the others replicated, and each result partial of this kind or of the one it `gives`."""
    inputs: dict[int, Placement] = {leaf: Partial(kind) for leaf in leaves}
    return ask.line(inputs, [None if meta is None else Partial(gives or kind) for meta in ask.outputs])


def operands(ask: Ask, names: Iterable[str]) -> tuple[list[int], bool]:
    """The tensors among these arguments by leaf number, and whether another of them is a number.

    What a schema calls a tensor may be given as a number.
    """
    given = [(ask.leaf(name), ask.get(name)) for name in names]
    return [leaf for leaf, _ in given if leaf is not None], any(leaf is None and v is not None for leaf, v in given)


# Which reductions a change of dtype goes with: may each part be cast by itself?

RANGES = {torch.uint8: (0, 8), torch.int8: (1, 8), torch.int16: (1, 16), torch.int32: (1, 32), torch.int64: (1, 64)}
"""Integers: whether they have a sign, and of how many bits they are.  Others are not cast while they are partial."""
NUMBERS = (torch.int32, torch.int64)
"""Integers whose sums are taken for sums of numbers.  Those of fewer bits wrap in daily use, as `uint8` images do."""


def real(dtype: torch.dtype) -> bool:
    """Whether it stands for numbers that divide: floats of two bytes or more, and complex numbers."""
    return (dtype.is_floating_point and dtype.itemsize > 1) or dtype.is_complex


def carries(kind: str, source: torch.dtype, target: torch.dtype) -> bool:
    """Whether the cast of what parts make together is what their casts make together; never of an average of integers.

    >>> carries("sum", torch.float32, torch.bfloat16), carries("sum", torch.int64, torch.uint8)
    (True, True)
    >>> carries("sum", torch.float32, torch.int64), carries("sum", torch.uint8, torch.int64)  # cut off; wrapped before
    (False, False)
    >>> carries("sum", torch.bool, torch.int64), carries("max", torch.bool, torch.int64)  # the sum of booleans is "or"
    (False, True)
    >>> carries("sum", torch.bfloat16, torch.float32), carries("max", torch.float32, torch.float64)
    (True, True)
    >>> carries("max", torch.int64, torch.uint8), carries("avg", torch.int64, torch.float32)  # 256 is 0; rounded before
    (False, False)
    """
    if not (agreed(kind, source) and agreed(kind, target)):
        return False
    if source == target:
        return True
    if source == torch.bool:
        return kind in ("min", "max", "product") and (target in RANGES or real(target))
    if real(source):
        turns = kind == "product" and source.is_complex and not target.is_complex  # a factor keeps its phase
        return real(target) and not turns
    return source in RANGES and _integers(kind, source, target)


def _integers(kind: str, source: torch.dtype, target: torch.dtype) -> bool:
    (signed, bits), (wider, most) = RANGES[source], RANGES.get(target, (1, 0))
    if not (most or real(target)):
        return False
    if kind in ("min", "max"):
        return real(target) or (wider >= signed and most - wider >= bits - signed)
    return source in NUMBERS if real(target) or most > bits else True


# Ops that are linear in a tensor: which parts of it go through, and where they must not.
#
# `f(a + b) = f(a) + f(b)` lets a sum through, and an average.  It holds for numbers that wrap as they add, too, unless the
# result is of a wider dtype than the parts: those had wrapped, or were rounded.  Averages of integers round, before the op or after it, and
# booleans add as "or": no op here is linear in those.

SUM, AVG = Partial("sum"), Partial("avg")


def through(before: torch.dtype, after: torch.dtype) -> tuple[Partial, ...]:
    """The Partials that an op which is linear takes from a dtype to another.

    >>> through(torch.float32, torch.float32), through(torch.int64, torch.int64), through(torch.int32, torch.int64)
    ((Partial(sum), Partial(avg)), (Partial(sum),), ())
    """
    if before != after or before == torch.bool:
        return ()
    return (SUM, AVG) if before.is_floating_point or before.is_complex else (SUM,)


def linear(ask: Ask, leaf: int | None, outputs: Sequence[bool] | None = None) -> Iterator[Line]:
    """The lines of an op that is linear in one tensor, all others replicated.

    `outputs` says which results are linear in it, all if not given; the others are then the same on every rank.
    """
    if leaf is None:
        return
    linearly = [True] * len(ask.outputs) if outputs is None else outputs
    made = [meta for meta, holds in zip(ask.outputs, linearly, strict=True) if holds and meta is not None]
    allowed = [through(ask.tensors[leaf].dtype, meta.dtype) for meta in made]
    for part in (SUM, AVG):
        if allowed and all(part in parts for parts in allowed):
            yield ask.line({leaf: part}, ask.masked([part if holds else Replicate() for holds in linearly]))
