"""Placements as arithmetic: what each rank holds of a tensor, and the tensor that they hold.

`assemble(split(x, spec, rng), spec) == x` is both the documentation and the law.  Pieces follow
torch.chunk, as DTensor's Shard does: every rank gets ceil(size / ranks) rows until none are left,
so the last pieces may be short or empty.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from localtensor.errors import BadPlacement, NoSuchDim, WrongPieces
from localtensor.partials import fold, parts
from localtensor.placement import Spec, is_plain, short


def bounds(size: int, ranks: int) -> tuple[tuple[int, int], ...]:
    """The (start, length) of each rank's piece of one dim.

    >>> bounds(5, 4)
    ((0, 2), (2, 2), (4, 1), (5, 0))
    """
    step = -(-size // ranks)
    starts = [min(step * rank, size) for rank in range(ranks)]
    return tuple((start, min(step, size - start)) for start in starts)


def local_shape(shape: Sequence[int], placement: Placement, ranks: int, rank: int) -> tuple[int, ...]:
    """The shape of one rank's piece along one mesh axis of `ranks` ranks."""
    if not isinstance(placement, Shard):
        return tuple(shape)
    _check_dim("shards.local_shape", placement.dim, shape)
    held = list(shape)
    held[placement.dim] = bounds(shape[placement.dim], ranks)[rank][1]
    return tuple(held)


def split_axis(x: Tensor, placement: Placement, ranks: int, rng: torch.Generator | None = None) -> list[Tensor]:
    """What each rank of one axis holds, in rank order; shards and replicas are views of x.

    A Partial needs `rng`, a torch.Generator: there are many ways to split a sum.
    Raises `BadPlacement` for a placement that is none of R, S and the five P.
    """
    _check_plain("shards.split_axis", placement)
    if isinstance(placement, Shard):
        _check_dim("shards.split_axis", placement.dim, x.shape)
        return [x.narrow(placement.dim, *piece) for piece in bounds(x.shape[placement.dim], ranks)]
    if isinstance(placement, Partial):
        if rng is None:
            raise BadPlacement("shards.split_axis", short(placement), "a Partial needs a generator to split with")
        return list(parts(x, placement.reduce_op, ranks, rng).unbind())
    return [x] * ranks


def assemble_axis(held: Sequence[Tensor], placement: Placement) -> Tensor:
    """The tensor that the ranks of one axis hold together.  A replica is rank 0's."""
    _check_plain("shards.assemble_axis", placement)
    if isinstance(placement, Shard):
        return torch.cat(list(held), placement.dim)
    return fold(torch.stack(list(held)), placement.reduce_op) if isinstance(placement, Partial) else held[0]


def local_shapes(spec: Spec) -> list[tuple[int, ...]]:
    """Each rank's local shape, by rank number."""
    shapes = [tuple(spec.shape)]
    for size, placement in zip(spec.mesh.sizes, spec.placements, strict=True):
        shapes = [local_shape(shape, placement, size, i) for shape in shapes for i in range(size)]
    return shapes


def split(x: Tensor, spec: Spec, rng: torch.Generator | None = None) -> list[Tensor]:
    """Every rank's piece, by rank number.  Axes apply from left to right, as in DTensor."""
    if tuple(x.shape) != tuple(spec.shape):
        raise WrongPieces("shards.split", [tuple(x.shape)], [spec.shape])
    held = [x]
    for size, placement in zip(spec.mesh.sizes, spec.placements, strict=True):
        held = [piece for whole in held for piece in split_axis(whole, placement, size, rng)]
    return held


def assemble(held: Sequence[Tensor], spec: Spec) -> Tensor:
    """The whole tensor from every rank's piece; raises `WrongPieces` if a local shape is not the spec's."""
    want, got = local_shapes(spec), [tuple(piece.shape) for piece in held]
    if got != want:
        raise WrongPieces("shards.assemble", got, want)
    level = list(held)
    for size, placement in reversed(list(zip(spec.mesh.sizes, spec.placements, strict=True))):
        level = [assemble_axis(level[i : i + size], placement) for i in range(0, len(level), size)]
    return level[0]


def _check_dim(call: str, dim: int, shape: Sequence[int]) -> None:
    if not 0 <= dim < len(shape):
        raise NoSuchDim(call, dim, shape)


def _check_plain(call: str, placement: Placement) -> None:
    if not is_plain(placement) and not isinstance(placement, Replicate):
        raise BadPlacement(call, short(placement), "only R, S(dim) and the five P have a definition here")
