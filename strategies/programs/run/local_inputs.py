"""Each rank's piece of each tensor of a program, on a mesh of one or more axes, and steps on tensors or DTensors.

`whole`, `laid`, `split_by_axes` and `uneven` mean the same for a plain tensor and for a DTensor, so both runs of a
program use the same code.  Scripts that reproduce a finding contain their source: they need torch alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from localtensor.errors import BadPlacement
from localtensor.layout import COMMUTING_KINDS, is_standard, partial_values, shorts, split_axis
from localtensor.layout import split_by_axes as spread_shards
from strategies.model.rule import Program


def local_inputs_of(program: Program) -> tuple[tuple[Tensor, ...], ...]:
    """`held[leaf][rank]`, ranks numbered row by row: each rank's piece of each tensor.

    The pieces depend on the program alone.  Raises `NotReducible` for a partial placement that is not defined for the
    dtype, `NoSuchDim` for a shard of a dim that does not exist, and `BadPlacement` for a placement of DTensor's own, or
    two kinds of partial placements that do not commute.
    """
    return tuple(_held(program, leaf, x) for leaf, x in enumerate(program.sample.tensors))


def _held(program: Program, leaf: int, x: Tensor) -> tuple[Tensor, ...]:
    placements = program.inputs[leaf]
    _check(placements, program.mesh, x)
    mesh = "x".join(map(str, program.mesh))
    # On one axis `probe` uses the same name for the same split, so that both have the same values.
    name = f"{program.seed} {program.sample.op} {leaf} {shorts(placements)} {mesh} {program.draw}"
    rng = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    sparse = program.draw % 2 == 1

    def cut(whole: Tensor, placement: Placement, ranks: int) -> Sequence[Tensor]:
        if isinstance(placement, Partial) and is_standard(placement):
            return partial_values(whole, placement.reduce_op, ranks, rng, sparse=sparse).unbind()
        return split_axis(whole, placement, ranks)

    return tuple(spread_shards(x, placements, program.mesh, cut))


def _check(placements: Sequence[Placement], mesh: Sequence[int], x: Tensor) -> None:
    if len(placements) != len(mesh):
        raise BadPlacement("held_of", shorts(placements), f"{len(placements)} placements for {len(mesh)} mesh axes")
    partial = [p.reduce_op for p in placements if isinstance(p, Partial)]
    kinds = set(partial)
    if len(partial) > 1 and "avg" in kinds and not (x.dtype.is_floating_point or x.dtype.is_complex):
        raise BadPlacement("held_of", shorts(placements), f"averages of {x.dtype} round, so the order of axes matters")
    if len(kinds) > 1 and kinds != COMMUTING_KINDS:
        raise BadPlacement("held_of", shorts(placements), f"{' and '.join(sorted(kinds))} do not commute")


def whole(x: Tensor) -> Tensor:
    """The whole tensor, a copy, where it is spread over ranks; else the tensor itself."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def laid(x: Tensor, placement: Placement | list[Placement]) -> Tensor:
    """The same tensor with this placement on each mesh axis, or with these, one for each axis."""
    if not isinstance(x, DTensor):
        return x
    return x.redistribute(placements=placement if isinstance(placement, list) else [placement] * x.device_mesh.ndim)


def spread(values: Tensor, like: Tensor, placement: Placement) -> Tensor:
    """These values on the mesh of a DTensor, with this placement on its first axis and replicas on the others."""
    if not isinstance(like, DTensor):
        return values
    first = placement if values.ndim else Replicate()
    placements = [first, *[Replicate() for _ in range(like.device_mesh.ndim - 1)]]
    return distribute_tensor(values, like.device_mesh, placements, src_data_rank=None)


def uneven(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Values of both signs, of which no two are alike: what a gradient should come in with."""
    count = torch.Size(shape).numel()
    steps = torch.arange(count, dtype=torch.float64, device=device)
    return (torch.cos(steps * 1.7 + 0.3) + steps * 0.01).reshape(shape).to(dtype)
