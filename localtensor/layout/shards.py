"""Splitting a tensor into the pieces of all ranks by a spec, assembling it, and layouts with exactly one meaning.

`assemble(split(x, spec, rng), spec) == x`.  Pieces follow torch.chunk, as DTensor's Shard does: every rank gets
ceil(size / ranks) rows until none are left, so the last pieces may be short or empty.  A strided shard cuts the dim
into `split_factor` blocks in this way first, and each rank holds its chunk of every block.  Axes apply from left to
right, as in `distribute_tensor`, unless the spec has a shard order.

A layout, a placement for each mesh axis, has exactly one meaning for a tensor unless one of these holds:

* Two kinds of Partial depend on the order in which axes are reduced: torch refuses all but "sum" with "avg".
* Several axes shard a dim with strided shards and uneven pieces.  `distribute_tensor` cuts from left to right, into
  strides; `redistribute` undoes the cuts in the order that the split factors encode, if they encode one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from localtensor.errors import BadPlacement, NoSuchDim, WrongPieces, WrongShape, WrongType
from localtensor.layout.mesh import Mesh
from localtensor.layout.partial_splits import partial_values
from localtensor.layout.reductions import fold_partials as fold
from localtensor.layout.reductions import is_reducible
from localtensor.layout.row_intervals import same_rows
from localtensor.layout.spec import Spec, StridedShard, check_spec, is_supported, shard_cut, short

T = TypeVar("T")


def chunk_bounds(size: int, ranks: int) -> tuple[tuple[int, int], ...]:
    """The (start, length) of each rank's piece of one dim.

    >>> chunk_bounds(5, 4)
    ((0, 2), (2, 2), (4, 1), (5, 0))
    """
    step = -(-size // ranks)
    starts = [min(step * rank, size) for rank in range(ranks)]
    return tuple((start, min(step, size - start)) for start in starts)


def strided_chunk_bounds(size: int, factor: int, ranks: int) -> list[tuple[tuple[int, int], ...]]:
    """For each of the `factor` blocks of one dim, the (start, length) of each rank's chunk of it.

    >>> strided_chunk_bounds(5, 2, 2)
    [((0, 2), (2, 1)), ((3, 1), (4, 1))]
    """
    return [
        tuple((start + inner, count) for inner, count in chunk_bounds(length, ranks))
        for start, length in chunk_bounds(size, factor)
    ]


def local_shape(shape: Sequence[int], placement: Placement, ranks: int, rank: int) -> tuple[int, ...]:
    """The shape of one rank's piece along one mesh axis of `ranks` ranks.  Raises `NoSuchDim`."""
    cut = shard_cut(placement)
    if cut is None:
        return tuple(shape)
    dim, factor = cut
    _check_dim("shards.local_shape", dim, shape)
    return (*shape[:dim], local_length(shape[dim], factor, ranks, rank), *shape[dim + 1 :])


def local_length(size: int, factor: int, ranks: int, rank: int) -> int:
    """The number of rows of one dim on a rank, its chunks of all `factor` blocks: the sum of `strided_chunk_bounds`.

    >>> [local_length(5, 2, 2, rank) for rank in range(2)]
    [3, 2]
    """
    if size % (factor * ranks) == 0:
        return size // ranks
    block = -(-size // factor)
    step, (whole, rest) = -(-block // ranks), divmod(size, block)
    last = -(-rest // ranks)
    return whole * max(0, min(step, block - step * rank)) + max(0, min(last, rest - last * rank))


def split_axis(x: Tensor, placement: Placement, ranks: int, rng: torch.Generator | None = None) -> list[Tensor]:
    """The piece of each rank of one axis, in rank order; shards and replicas are views of x, strided shards are copies.

    A Partial needs `rng`, a torch.Generator: a sum can be split in many ways.
    Raises `BadPlacement` for a placement that is none of R, S, SS and the five P, and `NoSuchDim`.

    >>> from localtensor.layout.spec import parse
    >>> split_axis(torch.arange(5), parse("SS(0,2)"), 2)  # of the blocks 0, 1, 2 and 3, 4
    [tensor([0, 1, 3]), tensor([2, 4])]
    """
    _check_defined("shards.split_axis", placement)
    if isinstance(placement, Partial):
        if rng is None:
            problem = "there are many ways to split a sum, and no generator says which"
            raise BadPlacement("shards.split_axis", short(placement), problem, "Pass rng=torch.Generator().")
        return list(partial_values(x, placement.reduce_op, ranks, rng).unbind())
    cut = shard_cut(placement)
    if cut is None:
        return [x] * ranks
    dim, factor = cut
    _check_dim("shards.split_axis", dim, x.shape)
    pieces = [[x.narrow(dim, *chunk) for chunk in block] for block in strided_chunk_bounds(x.shape[dim], factor, ranks)]
    return pieces[0] if factor == 1 else [torch.cat(held, dim) for held in zip(*pieces, strict=True)]


def assemble_axis(held: Sequence[Tensor], placement: Placement) -> Tensor:
    """The tensor of the pieces of one axis, in rank order.  Of replicas it is rank 0's.  Raises `BadPlacement`."""
    _check_defined("shards.assemble_axis", placement)
    if isinstance(placement, Partial):
        return fold(torch.stack(list(held)), placement.reduce_op)
    cut = shard_cut(placement)
    if cut is None:
        return held[0]
    dim, factor = cut
    if factor == 1:
        return torch.cat(list(held), dim)
    blocks = strided_chunk_bounds(sum(x.shape[dim] for x in held), factor, len(held))
    pieces = [x.split([block[rank][1] for block in blocks], dim) for rank, x in enumerate(held)]
    return torch.cat([piece for block in zip(*pieces, strict=True) for piece in block], dim)


def local_shapes_on(
    shape: Sequence[int], placements: Sequence[Placement], mesh: Sequence[int]
) -> list[tuple[int, ...]]:
    """Each rank's local shape on a mesh of these sizes, by rank number.  Raises `NoSuchDim`.

    >>> from localtensor.layout.spec import parse
    >>> local_shapes_on((5,), (parse("S(0)"), parse("SS(0,2)")), (2, 2))
    [(2,), (1,), (2,), (0,)]
    """
    shapes = [tuple(shape)]
    for size, placement in zip(mesh, placements, strict=True):
        if shard_cut(placement) is None:
            shapes = [whole for whole in shapes for _ in range(size)]
            continue
        known = {whole: [local_shape(whole, placement, size, place) for place in range(size)] for whole in set(shapes)}
        shapes = [piece for whole in shapes for piece in known[whole]]
    return shapes


def local_shapes(spec: Spec) -> list[tuple[int, ...]]:
    """Each rank's local shape, by rank number."""
    return in_rank_order(local_shapes_on(spec.shape, *in_axis_order(spec)), spec)


def in_axis_order(spec: Spec) -> tuple[Sequence[Placement], Sequence[int]]:
    """The placements and the sizes of the axes, in the order in which they apply."""
    if not spec.shard_order:
        return spec.placements, spec.mesh.sizes
    return [spec.placements[axis] for axis in spec.sequence], [spec.mesh.sizes[axis] for axis in spec.sequence]


def in_rank_order(held: list[T], spec: Spec) -> list[T]:
    """Items by rank number, from items in the order of the axes as they apply, the last one fastest."""
    return [held[place] for place in _positions_in_sequence(spec)] if spec.shard_order else held


def _positions_in_sequence(spec: Spec) -> list[int]:
    """For each rank its position if the axes are in the order in which they apply."""
    applied = Mesh(tuple(in_axis_order(spec)[1]), tuple(map(str, spec.sequence)))
    at = map(spec.mesh.coordinate, range(spec.mesh.ranks))
    return [applied.rank(tuple(where[axis] for axis in spec.sequence)) for where in at]


def split_by_axes(
    x: Tensor,
    placements: Sequence[Placement],
    mesh: Sequence[int],
    cut: Callable[[Tensor, Placement, int], Sequence[Tensor]],
) -> list[Tensor]:
    """Every rank's piece, by rank number; `cut(whole, placement, ranks)` returns the pieces along one axis.

    Replicas are one object, and stay so: each object is cut once.
    """
    held = [x]
    for ranks, placement in zip(mesh, placements, strict=True):
        pieces: dict[int, Sequence[Tensor]] = {}
        for whole in held:
            if id(whole) not in pieces:
                pieces[id(whole)] = cut(whole, placement, ranks)
        held = [piece for whole in held for piece in pieces[id(whole)]]
    return held


def split(x: Tensor, spec: Spec, rng: torch.Generator | None = None) -> list[Tensor]:
    """Every rank's piece, by rank number.  Raises `WrongShape` for another shape, and the errors of `split_axis`."""
    check_spec("split", spec)
    if not isinstance(x, Tensor):
        raise WrongType("split", "x", x, "it is no tensor", "Pass the whole tensor.")
    if tuple(x.shape) != tuple(spec.shape):
        raise WrongShape("shards.split", x.shape, spec.shape)
    held = split_by_axes(x, *in_axis_order(spec), lambda x, placement, ranks: split_axis(x, placement, ranks, rng))
    return in_rank_order(held, spec)


def assemble(held: Sequence[Tensor], spec: Spec) -> Tensor:
    """The whole tensor from every rank's piece, of the pieces' dtype.  Raises `WrongPieces` if a local shape differs."""
    check_spec("assemble", spec)
    if not isinstance(held, Sequence) or not all(isinstance(piece, Tensor) for piece in held):
        raise WrongType("assemble", "held", held, "it is no list of tensors", "Pass the piece of every rank.")
    want, got = local_shapes(spec), [tuple(piece.shape) for piece in held]
    if got != want:
        raise WrongPieces("shards.assemble", got, want)
    level = list(held)
    if spec.shard_order:
        for rank, place in enumerate(_positions_in_sequence(spec)):
            level[place] = held[rank]
    for placement, size in reversed(list(zip(*in_axis_order(spec), strict=True))):
        level = [assemble_axis(level[i : i + size], placement) for i in range(0, len(level), size)]
    return level[0]


def _check_dim(call: str, dim: int, shape: Sequence[int]) -> None:
    if not 0 <= dim < len(shape):
        raise NoSuchDim(call, dim, shape)


def _check_defined(call: str, placement: Placement) -> None:
    if not is_supported(placement) and not isinstance(placement, Replicate):
        problem = "only R, S(dim), SS(dim,factor) and the five P have a definition here"
        raise BadPlacement(call, short(placement), problem)


Layout = tuple[Placement, ...]
"""One placement for each axis of a mesh, for one tensor."""
COMMUTING_KINDS = frozenset({"sum", "avg"})
"""The kinds of Partial that may be mixed: a sum of averages is the average of the sums."""


def has_one_meaning(layout: Sequence[Placement], shape: Sequence[int], dtype: torch.dtype, mesh: Sequence[int]) -> bool:
    """Whether torch gives this layout of such a tensor exactly one meaning.

    >>> fsdp_over_tp = (StridedShard(0, split_factor=2), Shard(0))
    >>> [has_one_meaning(fsdp_over_tp, (rows,), torch.float32, (3, 2)) for rows in (6, 5, 7)]
    [True, True, False]
    """
    kinds = {p.reduce_op for p in layout if isinstance(p, Partial)}
    if any(not is_reducible(kind, dtype) for kind in kinds) or (len(kinds) > 1 and kinds != COMMUTING_KINDS):
        return False
    cut = [c for c in map(shard_cut, layout) if c is not None]
    if any(not 0 <= dim < len(shape) for dim, _ in cut):
        return False
    strided = sorted({dim for dim, factor in cut if factor > 1})
    return all(_have_one_reading(shape[dim], split_factors(layout, dim), tuple(mesh)) for dim in strided)


def split_factors(layout: Sequence[Placement], dim: int) -> tuple[int, ...]:
    """The split factor by which each axis cuts this dim, 0 for one that does not.

    >>> split_factors((StridedShard(0, split_factor=2), Shard(1), Shard(0)), 0)
    (2, 0, 1)
    """
    return tuple(cut[1] if cut is not None and cut[0] == dim else 0 for cut in map(shard_cut, layout))


def cut_order(factors: Sequence[int], mesh: Sequence[int]) -> tuple[int, ...] | None:
    """The order in which the axes cut a dim, from their split factors; None if there is no such order.

    >>> cut_order((3, 1), (2, 3)), cut_order((1, 1), (2, 3)), cut_order((2, 1), (2, 3))
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


def placements_in_order(dim: int, order: Sequence[int], mesh: Sequence[int]) -> dict[int, Placement]:
    """The placement of each axis if the axes cut a dim in this order.

    The factor of a strided shard is the number of pieces made before it by axes further to the right.

    >>> placements_in_order(0, (1, 0), (2, 3))
    {1: Shard(dim=0), 0: _StridedShard(dim=0, sf=3)}
    """
    found: dict[int, Placement] = {}
    for place, axis in enumerate(order):
        factor = math.prod(mesh[earlier] for earlier in order[:place] if earlier > axis)
        found[axis] = Shard(dim) if factor == 1 else StridedShard(dim, split_factor=factor)
    return found


def _have_one_reading(size: int, factors: tuple[int, ...], mesh: tuple[int, ...]) -> bool:
    order = cut_order(factors, mesh)
    if order is None:  # made by views: torch does not define how several such cuts nest
        return sum(map(bool, factors)) == 1
    from_the_left = tuple((axis, factor) for axis, factor in enumerate(factors) if factor)
    return same_rows(size, from_the_left, tuple((axis, 1) for axis in order), mesh)
