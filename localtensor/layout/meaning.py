"""What a layout means: a placement for each axis of a mesh, for one tensor, where torch gives that one meaning.

* Two kinds of Partial on the axes of one tensor mean something only if the order in which the axes are reduced does
  not matter: torch refuses every mixture but that of "sum" and "avg", and so do we.
* A dim that several axes shard is cut from left to right.  Any other order is written with strided shards, for which
  torch has two readings: `distribute_tensor` cuts from left to right, into strides, and `redistribute` undoes the
  cuts in the order that the split factors encode, if they encode one.  Where the pieces are uneven the two may
  differ; then the layout has no meaning that a result could be held to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.placement_types import Placement

from localtensor.layout.partials import reducible
from localtensor.layout.row_intervals import cut_alike
from localtensor.layout.spec import StridedShard, cuts

Layout = tuple[Placement, ...]
"""One placement for each axis of a mesh, for one tensor."""
COMMUTING = frozenset({"sum", "avg"})
"""The kinds of Partial that may be mixed: a sum of averages is the average of the sums."""


def has_meaning(layout: Sequence[Placement], shape: Sequence[int], dtype: torch.dtype, mesh: Sequence[int]) -> bool:
    """Whether torch gives this layout of such a tensor exactly one meaning.

    >>> fsdp_over_tp = (StridedShard(0, split_factor=2), Shard(0))
    >>> [has_meaning(fsdp_over_tp, (rows,), torch.float32, (3, 2)) for rows in (6, 5, 7)]
    [True, True, False]
    """
    kinds = {p.reduce_op for p in layout if isinstance(p, Partial)}
    if any(not reducible(kind, dtype) for kind in kinds) or (len(kinds) > 1 and kinds != COMMUTING):
        return False
    cut = [c for c in map(cuts, layout) if c is not None]
    if any(not 0 <= dim < len(shape) for dim, _ in cut):
        return False
    strided = sorted({dim for dim, factor in cut if factor > 1})
    return all(_read_alike(shape[dim], factors_of(layout, dim), tuple(mesh)) for dim in strided)


def factors_of(layout: Sequence[Placement], dim: int) -> tuple[int, ...]:
    """The split factor by which each axis cuts this dim, 0 for one that does not.

    >>> factors_of((StridedShard(0, split_factor=2), Shard(1), Shard(0)), 0)
    (2, 0, 1)
    """
    return tuple(cut[1] if cut is not None and cut[0] == dim else 0 for cut in map(cuts, layout))


def order_of(factors: Sequence[int], mesh: Sequence[int]) -> tuple[int, ...] | None:
    """The order in which the axes cut a dim, from their split factors; None if there is no such order.

    >>> order_of((3, 1), (2, 3)), order_of((1, 1), (2, 3)), order_of((2, 1), (2, 3))
    ((1, 0), (0, 1), None)
    """
    order: list[int] = []
    for axis in reversed(range(len(factors))):
        if factors[axis]:
            before = [math.prod(mesh[a] for a in order[:place]) for place in range(len(order) + 1)]
            if factors[axis] not in before:
                return None
            order.insert(before.index(factors[axis]), axis)
    return tuple(order)


def in_order(dim: int, order: Sequence[int], mesh: Sequence[int]) -> dict[int, Placement]:
    """The placement of each axis where the axes cut a dim in this order.

    The factor of a strided shard is the number of pieces that axes further to the right have made before it.

    >>> in_order(0, (1, 0), (2, 3))
    {1: Shard(dim=0), 0: _StridedShard(dim=0, sf=3)}
    """
    found: dict[int, Placement] = {}
    for place, axis in enumerate(order):
        factor = math.prod(mesh[earlier] for earlier in order[:place] if earlier > axis)
        found[axis] = Shard(dim) if factor == 1 else StridedShard(dim, split_factor=factor)
    return found


def _read_alike(size: int, factors: tuple[int, ...], mesh: tuple[int, ...]) -> bool:
    order = order_of(factors, mesh)
    if order is None:  # made by views: of several such cuts torch does not say how they nest
        return sum(map(bool, factors)) == 1
    from_the_left = tuple((axis, factor) for axis, factor in enumerate(factors) if factor)
    return cut_alike(size, from_the_left, tuple((axis, 1) for axis in order), mesh)
