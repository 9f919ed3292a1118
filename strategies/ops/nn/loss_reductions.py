"""What a loss does with the losses of its elements, and what that makes of pieces."""

from __future__ import annotations

from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.placement_types import Placement

from strategies.ops.semantics.rulebook import Cut

NONE, MEAN, SUMMED = 0, 1, 2
"""How torch writes `reduction` in its schemas."""


def reduced(reduction: int, dim: int) -> tuple[Placement, Cut]:
    """Where the loss lies if its elements are cut along a dim, and the cut that it takes.

    >>> reduced(NONE, 1), reduced(SUMMED, 1), reduced(MEAN, 1)
    ((Shard(dim=1), 'any'), (Partial(sum), 'any'), (Partial(avg), 'even'))
    """
    if reduction == NONE:
        return Shard(dim), "any"
    return (Partial("sum"), "any") if reduction == SUMMED else (Partial("avg"), "even")
