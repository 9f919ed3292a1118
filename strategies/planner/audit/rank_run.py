"""DTensor's own redistribution of one pair, as each rank runs it: on simulated ranks, and on real ones.

What a user may ask for goes through `DTensor.redistribute`.  A shard order, or a Partial that was not there, he may not
ask for: then it is `redistribute_local_tensor`, which DTensor calls for its own use.

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
    """One rank's share: its piece of the source, and the whole tensor, for a referee."""

    src: Spec
    dst: Spec
    flattened: tuple[tuple[str, ...], ...]
    mode: str
    piece: Any
    whole: Tensor | None = None


@dataclass(frozen=True, slots=True)
class RankResult:
    """What one rank has of it: an error in one line, or its piece; and what `distribute_tensor` gives it of the whole."""

    error: str
    piece: Any = None
    dealt: Tensor | None = None
    given: Tensor | None = None
    """The same by the source: what it would have been given by a user."""


def users(src: Spec, dst: Spec) -> bool:
    """Whether a user can ask for it: no shard order, and no Partial that is not there."""
    made = any(isinstance(now, Partial) and now != was for was, now in zip(src.placements, dst.placements, strict=True))
    return not (src.shard_order or dst.shard_order or made)


_mesh = functools.cache(mesh_on)


@contextlib.contextmanager
def planner(mode: str) -> Iterator[None]:
    """DTensor's greedy planner, or its graph-based one: for all ranks of this process, so it is no rank's to enter."""
    with _redistribute.use_min_cost_redistribution_plan(enabled=mode == "graph"):
        yield


def redistributed(part: RankTask, mesh: DeviceMesh) -> Any:
    """The piece afterwards, by DTensor itself; raises whatever it raises."""
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
    """A rank of a real run does its part, and sends back what it was `RankResult`."""
    part: RankTask = pickling.loads(sent)
    with quiet(), averages(dist.get_backend()):
        mesh = _mesh(part.src.mesh, part.flattened)
        forget()
        with planner(part.mode):
            told = heard(part, mesh)
        flags = torch.tensor([float(bool(told.error))])
        dist.all_reduce(flags)  # nobody goes on before all are through, or have raised
        if not flags.item() and part.whole is not None:
            told = replace(told, dealt=_dealt(part.whole, part.dst, mesh), given=_dealt(part.whole, part.src, mesh))
        return pickling.dumps(told)


def _dealt(whole: Tensor, spec: Spec, mesh: DeviceMesh) -> Tensor | None:
    try:
        return dealt(whole, spec, mesh)
    except (RuntimeError, ValueError, AssertionError, NotImplementedError):
        return None  # torch deals no such spec


def dealt(whole: Tensor, dst: Spec, mesh: DeviceMesh) -> Tensor | None:
    """The piece of this rank, as torch deals it from the whole tensor, by local cuts alone; None for a partial one."""
    if any(isinstance(p, Partial) for p in dst.placements):
        return None
    if not dst.shard_order:
        return distribute_tensor(whole, mesh, dst.placements, src_data_rank=None).to_local().clone()
    everywhere = replace(dst, placements=tuple(Replicate() for _ in dst.placements), shard_order=())
    cut: Tensor = _redistribute.redistribute_local_tensor(whole, spec_seen(everywhere, mesh), spec_seen(dst, mesh))
    return cut.clone()


def heard(part: RankTask, mesh: DeviceMesh) -> RankResult:
    """What one rank has of it."""
    try:
        return RankResult("", redistributed(part, mesh).detach().clone())
    except Exception as error:  # why: whatever DTensor raises is the answer that this rank was asked for
        return RankResult(in_a_line(error))
