"""torch's own search for a plan, to stand beside ours.

| torch part                                                                       | why                     | tried on |
|----------------------------------------------------------------------------------|-------------------------|----------|
| torch.testing._internal.distributed.fake_pg.FakeStore                            | a mesh without ranks    | 2.13     |
| torch.distributed.tensor._dtensor_spec.DTensorSpec, TensorMeta, ShardOrderEntry  | what it is asked with   | 2.13     |
| torch.distributed.tensor._redistribute.DTensorRedistributePlanner                | the search              | 2.13     |
| torch.distributed.tensor._redistribute._gen_transform_infos_non_cached           | the door to both ways   | 2.13     |
| torch.distributed.tensor._redistribute.clear_redistribute_planner_cache          | each time from nothing  | 2.13     |
| torch.distributed.tensor._collective_utils.one_step_redistribute_cost            | its own price           | 2.13     |
| torch.distributed.tensor.device_mesh._mesh_resources                             | the devices of a host   | 2.13     |
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import _redistribute
from torch.distributed.tensor._collective_utils import one_step_redistribute_cost
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta

from localtensor.layout.mesh import Mesh
from localtensor.layout.spec import Spec


@contextmanager
def fake_ranks(ranks: int) -> Iterator[None]:
    """A process group of so many ranks, of which there is one, and which sends nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        _redistribute.clear_redistribute_planner_cache()
        dist.destroy_process_group()


def devices_in_a_host() -> int:
    from torch.distributed.device_mesh import _mesh_resources

    return int(_mesh_resources.num_devices_per_host("cpu"))


def mesh_of(mesh: Mesh) -> DeviceMesh:
    return DeviceMesh("cpu", torch.arange(mesh.ranks).view(mesh.sizes))


def their_spec(spec: Spec, mesh: DeviceMesh) -> DTensorSpec:
    strides, count = [], 1
    for size in reversed(spec.shape):
        strides.append(count)
        count *= size
    meta = TensorMeta(torch.Size(spec.shape), tuple(reversed(strides)), spec.dtype)
    orders = [(dim, spec.cut_by(dim)) for dim in range(len(spec.shape))]
    entries = tuple(ShardOrderEntry(tensor_dim=dim, mesh_dims=axes) for dim, axes in orders if axes)
    return DTensorSpec(mesh, spec.placements, meta, shard_order=entries)


def search(src: DTensorSpec, dst: DTensorSpec, *, graph: bool = True, afresh: bool = True) -> Sequence[Any]:
    """Its plan, found from nothing; or not `afresh`, by the planner that it keeps for a mesh and a tensor."""
    if afresh:
        _redistribute.clear_redistribute_planner_cache()
    return _redistribute._gen_transform_infos_non_cached(src, dst, graph)


def states(src: Spec, dst: Spec) -> list[DTensorSpec]:
    """The specs along its graph-based plan."""
    mesh = mesh_of(src.mesh)
    return along(their_spec(src, mesh), search(*(their_spec(spec, mesh) for spec in (src, dst))))


def along(src: DTensorSpec, plan: Sequence[Any]) -> list[DTensorSpec]:
    found, stacks = [src], {entry.tensor_dim: list(entry.mesh_dims) for entry in src.shard_order}
    placements = list(src.placements)
    for info in plan:
        was, now = info.src_dst_placements
        if was.is_shard():
            stacks[was.dim].remove(info.mesh_dim)
        if now.is_shard():
            stacks.setdefault(now.dim, []).append(info.mesh_dim)
        placements[info.mesh_dim] = now
        order = tuple(
            ShardOrderEntry(tensor_dim=d, mesh_dims=tuple(axes)) for d, axes in sorted(stacks.items()) if axes
        )
        found.append(DTensorSpec(src.mesh, tuple(placements), src.tensor_meta, shard_order=order))
    return found


def microseconds(path: Sequence[DTensorSpec]) -> float:
    """What its own price says of the steps between these specs."""
    return sum(float(one_step_redistribute_cost(was, now)) for was, now in itertools.pairwise(path))
