"""How a tensor may lie on a mesh of several axes, where torch gives that one meaning.

* Two kinds of Partial on the axes of one tensor mean something only if the order in which the axes are reduced
  does not matter: torch refuses every mixture but that of "sum" and "avg", and so do we.
* A dim that several axes shard is cut axis by axis, from left to right.  Any other order is written with strided
  shards, for which torch has two readings: `distribute_tensor` cuts from left to right, into strides, while
  `redistribute` undoes the cuts in the order that the split factors encode, if they encode one.  Where the
  pieces are uneven the two may differ; then the layout has no meaning that a result could be held to.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence

from torch import Tensor
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.placement_types import Placement

from localtensor.partials import reducible
from localtensor.placement import parse, short
from localtensor.shards import bounds

Layout = tuple[Placement, ...]
"""One placement for each axis of a mesh, for one tensor."""
_BETWEEN = re.compile(r", (?![^()]*\))")
"""The commas between placements, and not those within one."""
COMMUTING = frozenset({"sum", "avg"})
"""The kinds of Partial that may be mixed: a sum of averages is the average of the sums."""


def has_meaning(layout: Layout, x: Tensor, mesh: Sequence[int]) -> bool:
    """Whether torch gives this layout of x exactly one meaning."""
    kinds = {p.reduce_op for p in layout if isinstance(p, Partial)}
    if any(not reducible(kind, x.dtype) for kind in kinds) or (len(kinds) > 1 and kinds != COMMUTING):
        return False
    cut = [cuts(p) for p in layout]
    if any(c is not None and c[0] >= x.ndim for c in cut):
        return False
    strided = {c[0] for c in cut if c is not None and c[1] > 1}
    return all(_read_alike(x.shape[dim], _factors(cut, dim), tuple(mesh)) for dim in sorted(strided))


def read_layout(text: str) -> Layout:
    """The layout that a text stands for: `S(0)` on one axis, `(S(0), R)` on two.  Raises `BadPlacement`.

    >>> read_layout("(S(0), SS(1,2), R)")
    (Shard(dim=0), _StridedShard(dim=1, sf=2), Replicate())
    """
    inner = text[1:-1] if text.startswith("(") else text
    return tuple(parse(part) for part in _BETWEEN.split(inner))


def cuts(placement: Placement) -> tuple[int, int] | None:
    """The dim that a placement cuts and its split factor, which is 1 but for strided shards; None if it cuts none.

    >>> cuts(Shard(1)), cuts(parse("SS(0,3)")), cuts(Partial())
    ((1, 1), (0, 3), None)
    """
    text = short(placement)
    if text.startswith("SS("):
        dim, factor = text[3:-1].split(",")
        return int(dim), int(factor)
    return (placement.dim, 1) if isinstance(placement, Shard) else None


def in_order(dim: int, order: Sequence[int], mesh: Sequence[int]) -> dict[int, Placement]:
    """The placement of each axis where the axes cut a dim in this order.

    The factor of a strided shard is the number of pieces that axes further to the right have made before it.

    >>> in_order(0, (1, 0), (2, 3))
    {1: Shard(dim=0), 0: _StridedShard(dim=0, sf=3)}
    """
    found: dict[int, Placement] = {}
    for place, axis in enumerate(order):
        factor = math.prod(mesh[earlier] for earlier in order[:place] if earlier > axis)
        found[axis] = Shard(dim) if factor == 1 else parse(f"SS({dim},{factor})")
    return found


def order_of(factors: Sequence[int], mesh: Sequence[int]) -> tuple[int, ...] | None:
    """The order in which the axes cut, from their split factors (0 for an axis that does not cut); None if
    there is no such order.

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


def on_axes(layout: Layout, mesh: Sequence[int], axes: Sequence[int], sizes: Sequence[int]) -> Layout:
    """The layout on some of the axes alone, which now have these sizes; a dim is cut in the order in which it was.

    >>> on_axes((parse("SS(0,3)"), Shard(0)), (2, 3), (0, 1), (2, 2)), on_axes((parse("SS(0,3)"), Shard(0)), (2, 3), (0,), (2,))
    ((_StridedShard(dim=0, sf=2), Shard(dim=0)), (Shard(dim=0),))
    """
    cut = [cuts(p) for p in layout]
    made = [layout[axis] for axis in axes]
    for dim in sorted({c[0] for c in cut if c is not None}):
        order = order_of(_factors(cut, dim), mesh)
        left = [axes.index(axis) for axis in order or () if axis in axes]
        for axis, placement in in_order(dim, left, sizes).items():
            made[axis] = placement
    return tuple(made)


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
