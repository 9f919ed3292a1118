"""Ops that are linear in a tensor: which parts of it go through, and where they must not.

`f(a + b) = f(a) + f(b)` lets a sum through, and an average.  It holds for numbers that wrap as they add, too, unless the
result is of a wider dtype than the parts: those had wrapped, or were rounded.  Averages of integers round, before the op or after it, and
booleans add as "or": no op here is linear in those.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.distributed.tensor import Partial, Replicate

from strategies.ops.semantics.rulebook import Ask, Line

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
