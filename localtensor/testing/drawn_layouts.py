"""Where a tensor may lie on a mesh, so that it has one meaning: placements for one axis, and for all of them.

* Two kinds of Partial on the axes of one tensor mean something only if the order in which the axes are reduced does
  not matter: of different kinds, "sum" and "avg" alone may be mixed.
* A dim that several axes shard is cut from left to right.  Any other order is written with strided shards, for which
  torch has two readings: `distribute_tensor` cuts from left to right, into strides, and `redistribute` undoes the
  cuts in the order that the split factors encode, if they encode one.  Where the pieces are uneven the two may
  differ; then the layout has no meaning that a result could be held to.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from localtensor.partials import reducible
from localtensor.placement import KINDS as REDUCTIONS
from localtensor.placement import StridedShard
from localtensor.shards import bounds

Layout = tuple[Placement, ...]
"""One placement for each axis of a mesh, for one tensor."""
COMMUTING = frozenset({"sum", "avg"})
"""The kinds of Partial that may be mixed: a sum of averages is the average of the sums."""
FACTORS = (2, 3)
"""The split factors of a strided shard that stands alone."""


@functools.lru_cache(1024)
def options(ndim: int, dtype: torch.dtype | None, kinds: tuple[str, ...], pending: str = "") -> Layout:
    """All that a tensor of `ndim` dims can be on one axis, the simplest first; `pending` is what it already waits for.

    An average of integers is left out: nobody agrees on what it rounds to.
    """
    found: list[Placement] = [Replicate()] if "R" in kinds else []
    if "S" in kinds:
        found += map(Shard, range(ndim))
    wanted = [kind for kind in REDUCTIONS if "P" in kinds or f"P({kind})" in kinds]
    beside = COMMUTING if pending in COMMUTING else frozenset({pending})
    found += [Partial(kind) for kind in wanted if _pends(kind, dtype) and (not pending or kind in beside)]
    if "SS" in kinds:
        found += [StridedShard(dim, split_factor=factor) for dim in range(ndim) for factor in FACTORS]
    return tuple(found)


@functools.lru_cache(1024)
def steady(ndim: int, dtype: torch.dtype | None, kinds: tuple[str, ...], pending: str, most: int) -> Layout:
    """The options, each in the place that it has among those of a tensor of `most` dims that can be anything.

    Where another would stand stands the one before it.  So a place means the same if the tensor loses a dim, or gets
    another dtype: counterexamples shrink by one number after the other.

    >>> steady(1, torch.float32, ("R", "S", "P(max)"), "", 3)
    (Replicate(), Shard(dim=0), Shard(dim=0), Shard(dim=0), Partial(max))
    """
    here, found = options(ndim, dtype, kinds, pending), list[Placement]()
    for option in options(most, None, kinds):
        found += [option] if option in here else found[-1:]
    return tuple(found)


def _pends(kind: str, dtype: torch.dtype | None) -> bool:
    if dtype is None:
        return True
    return reducible(kind, dtype) and (kind != "avg" or dtype.is_floating_point or dtype.is_complex)


def has_meaning(layout: Sequence[Placement], shape: Sequence[int], dtype: torch.dtype, mesh: Sequence[int]) -> bool:
    """Whether torch gives this layout of such a tensor exactly one meaning.

    >>> fsdp_over_tp = (StridedShard(0, split_factor=2), Shard(0))
    >>> [has_meaning(fsdp_over_tp, (rows,), torch.float32, (3, 2)) for rows in (6, 5, 7)]
    [True, True, False]
    """
    waits = {p.reduce_op for p in layout if isinstance(p, Partial)}
    if any(not reducible(kind, dtype) for kind in waits) or (len(waits) > 1 and waits != COMMUTING):
        return False
    cut = [cuts(p) for p in layout]
    if any(c is not None and not 0 <= c[0] < len(shape) for c in cut):
        return False
    strided = {c[0] for c in cut if c is not None and c[1] > 1}
    return all(_read_alike(shape[dim], _factors(cut, dim), tuple(mesh)) for dim in sorted(strided))


def cuts(placement: Placement) -> tuple[int, int] | None:
    """The dim that a placement cuts and its split factor, which is 1 but for strided shards; None if it cuts none.

    >>> cuts(Shard(1)), cuts(StridedShard(0, split_factor=3)), cuts(Partial())
    ((1, 1), (0, 3), None)
    """
    if isinstance(placement, StridedShard):
        return placement.dim, int(placement.split_factor)
    return (placement.dim, 1) if isinstance(placement, Shard) else None


def orders(layout: Sequence[Placement]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Each other order in which several axes may cut the dim that they share: (dim, axes), but for left to right.

    >>> orders((Shard(0), Replicate(), Shard(0)))
    ((0, (2, 0)),)
    """
    shared: dict[int, list[int]] = {}
    for axis, placement in enumerate(layout):
        if isinstance(placement, Shard) and not isinstance(placement, StridedShard):
            shared.setdefault(placement.dim, []).append(axis)
    return tuple((dim, order) for dim, axes in shared.items() for order in list(itertools.permutations(axes))[1:])


def in_order(layout: Sequence[Placement], dim: int, order: Sequence[int], mesh: Sequence[int]) -> Layout:
    """The layout with the dim cut in this order of axes.

    The factor of a strided shard is the number of pieces that axes further to the right have made before it.

    >>> in_order((Shard(0), Shard(0)), 0, (1, 0), (2, 3))
    (_StridedShard(dim=0, sf=3), Shard(dim=0))
    """
    found = list(layout)
    for place, axis in enumerate(order):
        factor = math.prod(mesh[earlier] for earlier in order[:place] if earlier > axis)
        found[axis] = Shard(dim) if factor == 1 else StridedShard(dim, split_factor=factor)
    return tuple(found)


def mended(layout: Layout, shape: Sequence[int], dtype: torch.dtype, mesh: Sequence[int]) -> Layout:
    """The layout itself, or with plain shards instead of strided ones that would have two meanings."""
    if has_meaning(layout, shape, dtype, mesh):
        return layout
    return tuple(Shard(p.dim) if isinstance(p, StridedShard) else p for p in layout)


def order_of(factors: Sequence[int], mesh: Sequence[int]) -> tuple[int, ...] | None:
    """The order in which the axes cut, from their split factors (0 for an axis that does not cut); None if there is none.

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


def _factors(cut: Sequence[tuple[int, int] | None], dim: int) -> tuple[int, ...]:
    return tuple(c[1] if c is not None and c[0] == dim else 0 for c in cut)


@functools.lru_cache(maxsize=4096)
def _read_alike(size: int, factors: tuple[int, ...], mesh: tuple[int, ...]) -> bool:
    order = order_of(factors, mesh)
    if order is None:  # made by views: of several such cuts torch does not say how they nest
        return sum(map(bool, factors)) == 1
    return _from_left_to_right(size, factors, mesh) == _in_that_order(size, order, mesh)


def _from_left_to_right(size: int, factors: Sequence[int], mesh: Sequence[int]) -> list[list[int]]:
    """The rows of each rank, by rank number, if every axis cuts what the axes to its left have left it."""
    held = [list(range(size))]
    for factor, ranks in zip(factors, mesh, strict=True):
        held = [piece for rows in held for piece in (_strided(rows, factor, ranks) if factor else [rows] * ranks)]
    return held


def _strided(rows: list[int], factor: int, ranks: int) -> list[list[int]]:
    blocks = [_cut(block, ranks) for block in _cut(rows, factor)]
    return [[row for block in blocks for row in block[rank]] for rank in range(ranks)]


def _in_that_order(size: int, order: Sequence[int], mesh: Sequence[int]) -> list[list[int]]:
    """The same, if the axes cut in that order."""

    def rows(rank: int) -> list[int]:
        held = list(range(size))
        for axis in order:
            held = _cut(held, mesh[axis])[rank // math.prod(mesh[axis + 1 :]) % mesh[axis]]
        return held

    return [rows(rank) for rank in range(math.prod(mesh))]


def _cut(rows: list[int], pieces: int) -> list[list[int]]:
    return [rows[start : start + length] for start, length in bounds(len(rows), pieces)]
