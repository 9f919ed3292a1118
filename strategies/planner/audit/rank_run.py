"""DTensor's own redistribution of one pair, as run by each rank, simulated or real.

Redistributions that the public API offers go through `DTensor.redistribute`. A shard order, or a Partial that was not
there before, is not available to users: then `redistribute_local_tensor` is called, which DTensor calls internally.

| torch part (under torch.distributed)                             | read on     | run on |
|------------------------------------------------------------------|-------------|--------|
| tensor._redistribute.redistribute_local_tensor                   | 2.11 - 2.15 | 2.13   |
| tensor._redistribute.use_min_cost_redistribution_plan            | 2.11 - 2.15 | 2.13   |
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, _redistribute, distribute_tensor

from localtensor._util import pickling
from localtensor.errors import error_in_one_line
from localtensor.layout import Spec
from strategies.base.signals import quiet
from strategies.torch_api.mesh_and_caches import averages_as_sums, clear_dtensor_caches, world_mesh_with_submeshes
from strategies.torch_api.redistribute_plans import dtensor_spec_of


@dataclass(frozen=True, slots=True)
class RedistributionTask:
    """The task of one rank: its piece of the source, and the whole tensor, for comparison with `distribute_tensor`."""

    src: Spec
    dst: Spec
    flattened: tuple[tuple[str, ...], ...]
    mode: str
    piece: Any
    whole: Tensor | None = None


@dataclass(frozen=True, slots=True)
class RedistributionResult:
    """The result of one rank: an error in one line, or its piece.

    `distributed_piece` is the piece that `distribute_tensor` deals to the rank by the destination spec, `given` the one
    by the source.
    """

    error: str
    piece: Any = None
    dealt: Tensor | None = None
    given: Tensor | None = None


def is_public(src: Spec, dst: Spec) -> bool:
    """Whether the public API offers it: no shard order, and no new Partial."""
    made = any(isinstance(now, Partial) and now != was for was, now in zip(src.placements, dst.placements, strict=True))
    return not (src.shard_order or dst.shard_order or made)


_mesh = functools.cache(world_mesh_with_submeshes)


@contextlib.contextmanager
def dtensor_planner(mode: str) -> Iterator[None]:
    """Selects DTensor's greedy or graph-based planner for the whole process; so ranks must not enter it themselves."""
    with _redistribute.use_min_cost_redistribution_plan(enabled=mode == "graph"):
        yield


def redistribute_piece(part: RedistributionTask, mesh: DeviceMesh) -> Tensor:
    """The piece after DTensor's redistribution; raises whatever DTensor raises."""
    have = dtensor_spec_of(part.src, mesh)
    if is_public(part.src, part.dst):
        meta = have.tensor_meta
        sizes = {"shape": meta.shape, "stride": meta.stride}
        given = DTensor.from_local(part.piece, mesh, part.src.placements, run_check=False, **sizes)
        return given.redistribute(placements=part.dst.placements).to_local()
    found = _redistribute.redistribute_local_tensor(part.piece, have, dtensor_spec_of(part.dst, mesh))
    return found.wait() if hasattr(found, "wait") else found


def run_task(sent: bytes) -> bytes:
    """Runs the part of one rank of a real run: takes a pickled `RedistributionTask`, returns a pickled `RedistributionResult`."""
    part: RedistributionTask = pickling.loads(sent)
    with quiet(), averages_as_sums(dist.get_backend()):
        mesh = _mesh(part.src.mesh, part.flattened)
        clear_dtensor_caches()
        with dtensor_planner(part.mode):
            result = result_of_rank(part, mesh)
        flags = torch.tensor([float(bool(result.error))])
        dist.all_reduce(flags)  # a barrier: all ranks are done, or have raised
        if not flags.item() and part.whole is not None:
            dealt, given = (_dealt_or_none(part.whole, spec, mesh) for spec in (part.dst, part.src))
            result = replace(result, dealt=dealt, given=given)
        return pickling.dumps(result)


def _dealt_or_none(whole: Tensor, spec: Spec, mesh: DeviceMesh) -> Tensor | None:
    try:
        return distributed_piece(whole, spec, mesh)
    except (RuntimeError, ValueError, AssertionError, NotImplementedError):
        return None  # torch deals no such spec


def distributed_piece(whole: Tensor, dst: Spec, mesh: DeviceMesh) -> Tensor | None:
    """The rank's piece of the whole tensor as torch deals it, by local slices only; None for a partial spec."""
    if any(isinstance(p, Partial) for p in dst.placements):
        return None
    if not dst.shard_order:
        return distribute_tensor(whole, mesh, dst.placements, src_data_rank=None).to_local().clone()
    everywhere = replace(dst, placements=tuple(Replicate() for _ in dst.placements), shard_order=())
    have, need = dtensor_spec_of(everywhere, mesh), dtensor_spec_of(dst, mesh)
    cut: Tensor = _redistribute.redistribute_local_tensor(whole, have, need)
    return cut.clone()


def result_of_rank(part: RedistributionTask, mesh: DeviceMesh) -> RedistributionResult:
    """The result of one rank."""
    try:
        return RedistributionResult("", redistribute_piece(part, mesh).detach().clone())
    except Exception as error:  # why: DTensor may raise anything, and the error is the result of this rank
        return RedistributionResult(error_in_one_line(error))
