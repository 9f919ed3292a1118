"""Conversion of strided shards to shard orders and back, and equivalence of specs.

| from                                | to                      | by        | equivalent if                           |
|-------------------------------------|-------------------------|-----------|-----------------------------------------|
| strided shards that encode an order | plain, a shard order    | `ordered` | pieces are even, or agree by chance     |
| a single strided shard              | plain                   | `ordered` | its blocks do not matter, as of 1 rank  |
| a shard order                       | strided shards          | `strided` | pieces are even, or agree by chance     |
| a shard order of strided shards     | strided, in more blocks | `strided` | pieces are even, or agree by chance     |

The rows of all ranks are compared for the spec's shape and mesh: a conversion that would move a row is refused.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from localtensor.errors import OtherRows
from localtensor.layout import row_intervals
from localtensor.layout.reductions import is_reducible
from localtensor.layout.row_intervals import RowIntervals, cuts_by_dim, rows_by_rank, same_rows
from localtensor.layout.shards import cut_order
from localtensor.layout.spec import Spec, StridedShard, check_spec, is_standard, is_supported, shard_cut, short

_VALUES = frozenset({Replicate, Shard, Partial, StridedShard})
"""Placement types whose equality is equivalence; for other types torch's equality ignores differences."""


def ordered(spec: Spec) -> Spec:
    """The spec with plain shards and a shard order instead of strided shards, with the same rows on every rank.

    Raises `OtherRows` if no order of plain shards has those rows, and for symbolic sizes.

    >>> import torch
    >>> from localtensor.layout.mesh import Mesh
    >>> from localtensor.layout.spec import parse
    >>> ordered(Spec(Mesh.of(dp=2, tp=3), (parse("SS(0,3)"), Shard(0)), (12,), torch.float32))
    f32[12] @ dp:S(0)[1], tp:S(0)[0]
    """
    check_spec("ordered", spec)
    for placement in spec.placements:
        if isinstance(placement, StridedShard):
            break
    else:
        return spec
    check_concrete_sizes("orders.ordered", spec)
    made = spec
    for dim in dict.fromkeys(p.dim for p in spec.placements if isinstance(p, StridedShard)):
        made = _plain_shards_on(made, dim)
    return made


def strided(spec: Spec) -> Spec:
    """The spec with strided shards instead of a shard order, with the same rows on every rank.

    Raises `OtherRows` if strided shards, read from left to right, have other rows, and for symbolic sizes.

    >>> import torch
    >>> from localtensor.layout.mesh import Mesh
    >>> strided(Spec(Mesh.of(dp=2, tp=3), (Shard(0), Shard(0)), (12,), torch.float32, ((0, (1, 0)),)))
    f32[12] @ dp:SS(0,3), tp:S(0)
    """
    check_spec("strided", spec)
    if not spec.shard_order:
        return spec
    check_concrete_sizes("orders.strided", spec)
    placements = list(spec.placements)
    for dim, axes in spec.shard_order:
        for place, axis in enumerate(axes):
            _, factor = shard_cut(placements[axis]) or (dim, 1)
            factor *= math.prod(spec.mesh.sizes[earlier] for earlier in axes[:place] if earlier > axis)
            placements[axis] = Shard(dim) if factor == 1 else StridedShard(dim, split_factor=factor)
    made = replace(spec, placements=tuple(placements), shard_order=())
    for dim, axes in spec.shard_order:
        how = ", ".join(short(made.placements[axis]) for axis in sorted(axes))
        _check_rows("strided", spec, made, dim, f"in {how}, read from left to right,", "keep the shard order")
    return made


def lies_alike(one: Spec, other: Spec) -> bool:
    """Whether two specs are equivalent: the same rows on every rank, and the same pending reductions.

    An axis of one rank cuts nothing, and a Partial on it is the value.  Names of axes do not matter.  Raises
    `OtherRows` where rows must be compared and sizes are symbolic.

    >>> import torch
    >>> from localtensor.layout.mesh import Mesh
    >>> from localtensor.layout.spec import parse
    >>> def spec(rows, *placements, order=()):
    ...     return Spec(Mesh.of(3, 2), tuple(map(parse, placements)), (rows,), torch.float32, order)
    >>> [lies_alike(spec(rows, "SS(0,2)", "S(0)"), spec(rows, "S(0)", "S(0)", order=((0, (1, 0)),))) for rows in (6, 7)]
    [True, False]
    """
    check_spec("lies_alike", one)
    check_spec("lies_alike", other)
    if one is other or (one == other and _VALUES.issuperset(map(type, (*one.placements, *other.placements)))):
        return True
    sizes = one.mesh.sizes
    if sizes != other.mesh.sizes or tuple(one.shape) != tuple(other.shape) or one.dtype != other.dtype:
        return False
    for size, mine, theirs in zip(sizes, one.placements, other.placements, strict=True):
        if not _same_pending_reduction(size, mine, theirs, one):
            return False
    one_cut, other_cut = cuts_by_dim(one), cuts_by_dim(other)
    if one_cut == other_cut:
        return True
    check_concrete_sizes("orders.lies_alike", one)
    if all(same_rows(*case, sizes) for case in zip(one.shape, one_cut, other_cut, strict=True)):
        return True
    for place in row_intervals.probe_coordinates(sizes):
        if _pieces_differ(*(_rows_of_rank(one.shape, cut, sizes, place) for cut in (one_cut, other_cut))):
            return False
    if all(row_intervals.surely_nonempty(size, cut, sizes) for size, cut in zip(one.shape, one_cut, strict=True)):
        return False
    return first_differing_rank(one, other) is None


def check_concrete_sizes(call: str, spec: Spec) -> None:
    """Raises `OtherRows` if a size is symbolic: its rows cannot be compared."""
    if any(isinstance(size, torch.SymInt) for size in spec.shape):
        problem = "a size is a symbol, and its rows cannot be compared"
        raise OtherRows(call, repr(spec), problem, "Give sizes in numbers.")


def _same_pending_reduction(size: int, mine: Placement, theirs: Placement, spec: Spec) -> bool:
    """Whether an axis of `size` ranks has the same pending reduction under both placements, or none."""
    if all(_is_not_pending(size, placement, spec) for placement in (mine, theirs)):
        return True
    if mine is theirs or type(mine) is not type(theirs):
        return mine is theirs
    # An inherited equality may ignore fields that the class adds.
    return (is_standard(mine) or "__eq__" in vars(type(mine))) and bool(mine == theirs)


def _is_not_pending(size: int, placement: Placement, spec: Spec) -> bool:
    """Whether the ranks of an axis hold values, without a pending reduction."""
    if isinstance(placement, Partial):
        return size == 1 and is_standard(placement) and is_reducible(placement.reduce_op, spec.dtype)
    return is_supported(placement)


def _plain_shards_on(spec: Spec, dim: int) -> Spec:
    """The spec with plain shards on that dim, in an order with the same rows.  Raises `OtherRows`."""
    sizes, cut = spec.mesh.sizes, cuts_by_dim(spec)[dim]
    places = cut_order([factor for _, factor in cut], [sizes[axis] for axis, _ in cut])
    encoded = None if places is None else tuple(cut[place][0] for place in places)
    for order in (encoded, tuple(axis for axis, _ in cut)):
        if order is not None and same_rows(spec.shape[dim], cut, tuple((axis, 1) for axis in order), sizes):
            return _with_plain_shards(spec, dim, order)
    for order in itertools.permutations(axis for axis, _ in cut):  # rows may be too few for the factors to matter
        made = _with_plain_shards(spec, dim, order)
        if lies_alike(spec, made):
            return made
    shown = ", ".join(f"{spec.mesh.names[axis]}:{short(spec.placements[axis])}" for axis, _ in cut)
    if encoded is not None and len(cut) > 1:
        how = f"cut by {', '.join(spec.mesh.names[axis] for axis in encoded)} in this order"
        _check_rows("ordered", spec, _with_plain_shards(spec, dim, encoded), dim, how, "keep the strided shards")
    problem = f"{shown} stands alone on dim {dim}, and no order of one axis makes blocks"
    if len(cut) > 1:
        problem = f"no order of the axes makes the blocks of {shown} on dim {dim}"
    raise OtherRows("orders.ordered", repr(spec), problem, "Keep the strided shards.")


def _with_plain_shards(spec: Spec, dim: int, order: Sequence[int]) -> Spec:
    """The spec with plain shards on that dim in this order, which omits axes of one rank."""
    axes = spec.cut_by(dim)
    every = sorted(axes) if list(order) == sorted(order) else (*order, *(axis for axis in axes if axis not in order))
    placements = tuple(Shard(dim) if axis in axes else held for axis, held in enumerate(spec.placements))
    orders = dict(spec.shard_order) | {dim: tuple(every)}
    return Spec(spec.mesh, placements, spec.shape, spec.dtype, tuple(orders.items()))


def _check_rows(call: str, spec: Spec, made: Spec, dim: int, how: str, keep: str) -> None:
    size, sizes = spec.shape[dim], spec.mesh.sizes
    was, now = cuts_by_dim(spec)[dim], cuts_by_dim(made)[dim]
    if not same_rows(size, was, now, sizes):
        rank = row_intervals.first_differing(size, was, now, sizes) or 0
        mine, theirs = (row_intervals.format_rows(rows_by_rank(size, cut, sizes)[rank]) for cut in (was, now))
        problem = f"rank {rank} holds {mine} of dim {dim}, and {how} it would hold {theirs}"
        raise OtherRows(f"orders.{call}", repr(spec), problem, rows_remedy(spec, made, dim, keep))


def rows_remedy(spec: Spec, made: Spec, dim: int, keep: str) -> str:
    """The advice of the error for rows of a dim that differ: pad it, if that helps, or `keep`."""
    even = math.prod(
        spec.mesh.sizes[axis] * (shard_cut(spec.placements[axis]) or (0, 1))[1] for axis in spec.cut_by(dim)
    )
    rows = -(-spec.shape[dim] // even) * even  # a multiple of all pieces and blocks: all are even
    one, other = (rows_by_rank(rows, cuts_by_dim(lying)[dim], lying.mesh.sizes) for lying in (spec, made))
    return f"Pad dim {dim} to {rows} rows, or {keep}." if one == other else f"{keep[0].upper()}{keep[1:]}."


def first_differing_rank(one: Spec, other: Spec) -> int | None:
    """The first rank whose rows differ between two specs, on meshes of one size; None if there is none."""
    every = zip(zip(*rows_by_dim(one), strict=True), zip(*rows_by_dim(other), strict=True), strict=True)
    return next((rank for rank, (mine, theirs) in enumerate(every) if _pieces_differ(mine, theirs)), None)


def _pieces_differ(mine: tuple[RowIntervals, ...], theirs: tuple[RowIntervals, ...]) -> bool:
    """Whether two pieces, by the rows of each dim, differ in shape or, if not empty, in rows."""
    if mine == theirs:
        return False
    shapes = [[sum(length for _, length in runs) for runs in held] for held in (mine, theirs)]
    return shapes[0] != shapes[1] or 0 not in shapes[0]


def _rows_of_rank(
    shape: Sequence[int], cut: Sequence[row_intervals.DimCuts], sizes: Sequence[int], place: Sequence[int]
) -> tuple[RowIntervals, ...]:
    return tuple(row_intervals.rows_at(size, by, sizes, place) for size, by in zip(shape, cut, strict=True))


def rows_by_dim(spec: Spec) -> list[tuple[RowIntervals, ...]]:
    """The rows of every rank, by rank number, for each dim."""
    sizes = spec.mesh.sizes
    return [rows_by_rank(size, cut, sizes) for size, cut in zip(spec.shape, cuts_by_dim(spec), strict=True)]
