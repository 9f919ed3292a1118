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
from localtensor.errors import in_a_line
from localtensor.layout import Spec
from strategies.base.signals import quiet
from strategies.torch_api.mesh_and_caches import averages, forget, mesh_on
from strategies.torch_api.redistribute_plans import spec_seen


@dataclass(frozen=True, slots=True)
class RankTask:
    """The task of one rank: its piece of the source, and the whole tensor, for comparison with `distribute_tensor`."""

    src: Spec
    dst: Spec
    flattened: tuple[tuple[str, ...], ...]
    mode: str
    piece: Any
    whole: Tensor | None = None


@dataclass(frozen=True, slots=True)
class RankResult:
    """The result of one rank: an error in one line, or its piece.

    `dealt` is the piece that `distribute_tensor` deals to the rank by the destination spec, `given` the one by the
    source.
    """

    error: str
    piece: Any = None
    dealt: Tensor | None = None
    given: Tensor | None = None


def users(src: Spec, dst: Spec) -> bool:
    """Whether the public API offers it: no shard order, and no new Partial."""
    made = any(isinstance(now, Partial) and now != was for was, now in zip(src.placements, dst.placements, strict=True))
    return not (src.shard_order or dst.shard_order or made)


_mesh = functools.cache(mesh_on)


@contextlib.contextmanager
def planner(mode: str) -> Iterator[None]:
    """Selects DTensor's greedy or graph-based planner for the whole process; so ranks must not enter it themselves."""
    with _redistribute.use_min_cost_redistribution_plan(enabled=mode == "graph"):
        yield


def redistributed(part: RankTask, mesh: DeviceMesh) -> Any:
    """The piece after DTensor's redistribution; raises whatever DTensor raises."""
    have = spec_seen(part.src, mesh)
    if users(part.src, part.dst):
        meta = have.tensor_meta
        given = DTensor.from_local(
            part.piece, mesh, part.src.placements, run_check=False, shape=meta.shape, stride=meta.stride
        )
        return given.redistribute(placements=part.dst.placements).to_local()
    found = _redistribute.redistribute_local_tensor(part.piece, have, spec_seen(part.dst, mesh))
    return found.wait() if hasattr(found, "wait") else found


def play(sent: bytes) -> bytes:
    """Runs the part of one rank of a real run: takes a pickled `RankTask`, returns a pickled `RankResult`."""
    part: RankTask = pickling.loads(sent)
    with quiet(), averages(dist.get_backend()):
        mesh = _mesh(part.src.mesh, part.flattened)
        forget()
        with planner(part.mode):
            told = heard(part, mesh)
        flags = torch.tensor([float(bool(told.error))])
        dist.all_reduce(flags)  # a barrier: all ranks are done, or have raised
        if not flags.item() and part.whole is not None:
            told = replace(
                told, dealt=_dealt_or_none(part.whole, part.dst, mesh), given=_dealt_or_none(part.whole, part.src, mesh)
            )
        return pickling.dumps(told)


def _dealt_or_none(whole: Tensor, spec: Spec, mesh: DeviceMesh) -> Tensor | None:
    try:
        return dealt(whole, spec, mesh)
    except (RuntimeError, ValueError, AssertionError, NotImplementedError):
        return None  # torch deals no such spec


def dealt(whole: Tensor, dst: Spec, mesh: DeviceMesh) -> Tensor | None:
    """The rank's piece of the whole tensor as torch deals it, by local slices only; None for a partial spec."""
    if any(isinstance(p, Partial) for p in dst.placements):
        return None
    if not dst.shard_order:
        return distribute_tensor(whole, mesh, dst.placements, src_data_rank=None).to_local().clone()
    everywhere = replace(dst, placements=tuple(Replicate() for _ in dst.placements), shard_order=())
    cut: Tensor = _redistribute.redistribute_local_tensor(whole, spec_seen(everywhere, mesh), spec_seen(dst, mesh))
    return cut.clone()


def heard(part: RankTask, mesh: DeviceMesh) -> RankResult:
    """The result of one rank."""
    try:
        return RankResult("", redistributed(part, mesh).detach().clone())
    except Exception as error:  # why: DTensor may raise anything, and the error is the result of this rank
        return RankResult(in_a_line(error))
