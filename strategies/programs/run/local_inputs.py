"""What each rank of a mesh of one or more axes holds of each tensor of a program, before the op runs."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import Partial
from torch.distributed.tensor.placement_types import Placement

from localtensor.errors import BadPlacement
from localtensor.layout.meaning import COMMUTING
from localtensor.layout.partials import parts
from localtensor.layout.shards import split_axis, spread
from localtensor.layout.spec import is_plain, shorts
from strategies.model.program import Program


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
    sparse = program.draw % 2 == 1

    def cut(whole: Tensor, placement: Placement, ranks: int) -> Sequence[Tensor]:
        if isinstance(placement, Partial) and is_plain(placement):
            return parts(whole, placement.reduce_op, ranks, rng, sparse=sparse).unbind()
        return split_axis(whole, placement, ranks)

    return tuple(spread(x, placements, program.mesh, cut))


def _check(placements: Sequence[Placement], mesh: Sequence[int], x: Tensor) -> None:
    if len(placements) != len(mesh):
        raise BadPlacement("held_of", shorts(placements), f"{len(placements)} placements for {len(mesh)} mesh axes")
    partial = [p.reduce_op for p in placements if isinstance(p, Partial)]
    kinds = set(partial)
    if len(partial) > 1 and "avg" in kinds and not (x.dtype.is_floating_point or x.dtype.is_complex):
        raise BadPlacement("held_of", shorts(placements), f"averages of {x.dtype} round, so the order of axes matters")
    if len(kinds) > 1 and kinds != COMMUTING:
        raise BadPlacement("held_of", shorts(placements), f"{' and '.join(sorted(kinds))} do not commute")
