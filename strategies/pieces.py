"""What each rank of a mesh of one or more axes holds of each tensor of a program, before the op runs.

Axes apply from left to right, as in DTensor; so does a strided shard: it cuts the dim into `split_factor` pieces
first, and a rank holds a chunk of each.

| torch part                                              | read on     | run on |
|---------------------------------------------------------|-------------|--------|
| torch.distributed.tensor.placement_types.StridedShard  | 2.11 - 2.15 | 2.13   |
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.placement_types import Placement

from localtensor.errors import BadPlacement, NoSuchDim
from localtensor.partials import parts
from localtensor.placement import StridedShard, is_plain, shorts
from localtensor.shards import bounds, split_axis
from strategies.programs import Program

COMMUTE = ({"sum", "avg"},)
"""Kinds of partial values that one tensor may have on several axes: it does not matter which is reduced first."""


def held_of(program: Program) -> tuple[tuple[Tensor, ...], ...]:
    """`held[leaf][rank]`, ranks numbered row by row: each rank's piece of each tensor.

    The same program gives the same pieces, whatever else was asked.  Raises `NotReducible` for a partial value that
    means nothing for the dtype, `NoSuchDim` for a shard of a dim that is not there, and `BadPlacement` for a
    placement of DTensor's own, or two kinds of partial values of which it matters which is reduced first.
    """
    return tuple(_held(program, leaf, x) for leaf, x in enumerate(program.sample.tensors))


def _held(program: Program, leaf: int, x: Tensor) -> tuple[Tensor, ...]:
    placements = program.inputs[leaf]
    _check(placements, program.mesh, x)
    mesh = "x".join(map(str, program.mesh))
    # On one axis this is the name that `probe` gives to the same split, so that both see the same values.
    name = f"{program.seed} {program.sample.op} {leaf} {shorts(placements)} {mesh} {program.draw}"
    rng = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    held = [x]
    for size, placement in zip(program.mesh, placements, strict=True):
        cut: dict[int, list[Tensor]] = {}
        for whole in held:  # replicas are one object, and stay replicas when they are cut again
            if id(whole) not in cut:
                cut[id(whole)] = _cut(whole, placement, size, rng, sparse=program.draw % 2 == 1)
        held = [piece for whole in held for piece in cut[id(whole)]]
    return tuple(held)


def _check(placements: Sequence[Placement], mesh: Sequence[int], x: Tensor) -> None:
    if len(placements) != len(mesh):
        raise BadPlacement("held_of", shorts(placements), f"{len(placements)} placements for {len(mesh)} mesh axes")
    partial = [p.reduce_op for p in placements if isinstance(p, Partial)]
    kinds = set(partial)
    if len(partial) > 1 and "avg" in kinds and not (x.dtype.is_floating_point or x.dtype.is_complex):
        raise BadPlacement("held_of", shorts(placements), f"averages of {x.dtype} round, so the order of axes matters")
    if len(kinds) > 1 and not any(kinds <= alike for alike in COMMUTE):
        raise BadPlacement("held_of", shorts(placements), f"{' and '.join(sorted(kinds))} do not commute")


def _cut(x: Tensor, placement: Placement, ranks: int, rng: torch.Generator, *, sparse: bool) -> list[Tensor]:
    if isinstance(placement, Partial) and is_plain(placement):
        return list(parts(x, placement.reduce_op, ranks, rng, sparse=sparse).unbind())
    if isinstance(placement, StridedShard):
        return _strided(x, placement.dim, int(placement.split_factor), ranks)
    return split_axis(x, placement, ranks)


def _strided(x: Tensor, dim: int, factor: int, ranks: int) -> list[Tensor]:
    if not 0 <= dim < x.ndim:
        raise NoSuchDim("held_of", dim, x.shape)
    blocks = [x.narrow(dim, *block) for block in bounds(x.shape[dim], factor)]
    chunks = [[block.narrow(dim, *chunk) for chunk in bounds(block.shape[dim], ranks)] for block in blocks]
    return [torch.cat([block[rank] for block in chunks], dim) for rank in range(ranks)]


def shapes_on(shape: Sequence[int], placements: Sequence[Placement], mesh: Sequence[int]) -> list[tuple[int, ...]]:
    """Each rank's local shape, by rank number.  Raises `NoSuchDim`."""
    shapes = [tuple(shape)]
    for size, placement in zip(mesh, placements, strict=True):
        shapes = [_local(whole, placement, size, place) for whole in shapes for place in range(size)]
    return shapes


def _local(shape: tuple[int, ...], placement: Placement, ranks: int, place: int) -> tuple[int, ...]:
    if not isinstance(placement, (Shard, StridedShard)):
        return shape
    if not 0 <= placement.dim < len(shape):
        raise NoSuchDim("shapes_on", placement.dim, shape)
    factor = int(placement.split_factor) if isinstance(placement, StridedShard) else 1
    blocks = [length for _, length in bounds(shape[placement.dim], factor)]
    size = sum(bounds(block, ranks)[place][1] for block in blocks)
    return (*shape[: placement.dim], size, *shape[placement.dim + 1 :])
