"""The mesh that a program runs on, and DTensor's memory of what it ran before, on one rank or in lockstep.

| torch part (under torch.distributed)                                | read on     | run on |
|---------------------------------------------------------------------|-------------|--------|
| device_mesh.DeviceMesh._flatten                                     | 2.11 - 2.15 | 2.13   |
| tensor.debug._clear_sharding_prop_cache: where the next are not     | 2.11 - 2.15 | 2.13   |
| DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding,   |             |        |
| torch._C._clear_DTensor_sharding_propagator_cache: all that the     |             |        |
| former calls; to import it takes half a second in every process     | by feature  | 2.13   |
| tensor._redistribute._gen_transform_infos.cache_clear               | 2.11 - 2.15 | 2.13   |
| tensor._redistribute.clear_redistribute_planner_cache               | 2.11 - 2.15 | 2.13   |
| _functional_collectives.all_reduce, .reduce_scatter_tensor,         |             |        |
| .reduce_scatter_single (by feature): replaced where gloo has no avg | 2.11 - 2.15 | 2.13   |
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, _redistribute

NAMES = "abcdefgh"


def mesh_of(device: str, shape: tuple[int, ...], flattened: bool) -> DeviceMesh:
    """A mesh of all ranks; with `flattened`, the submesh of all its axes in one exists too."""
    mesh = init_device_mesh(device, shape, mesh_dim_names=tuple(NAMES[: len(shape)]))
    if flattened and len(shape) > 1:
        mesh._flatten(NAMES[: len(shape)])
    return mesh


def forget() -> None:
    """What DTensor has kept of earlier calls in this thread is gone, so that programs do not depend on their order."""
    _forget_rules()
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute.clear_redistribute_planner_cache()


def _forget_rules() -> None:
    propagate = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding
    native = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if native is None or not hasattr(propagate, "cache_clear"):
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()
        return
    propagate.cache_clear()
    native()


@contextlib.contextmanager
def averages(backend: str) -> Iterator[None]:
    """gloo has no average, and simulated ranks have none of integers; while inside, DTensor's averages are sums that
    are divided.  nccl has its own."""
    if "nccl" in backend:
        yield
        return
    own = {name: getattr(functional, name) for name in _REDUCING if hasattr(functional, name)}
    try:
        for name, original in own.items():
            setattr(functional, name, functools.partial(divided, original))
        yield
    finally:
        for name, original in own.items():
            setattr(functional, name, original)


_REDUCING = ("all_reduce", "reduce_scatter_tensor", "reduce_scatter_single")


def divided(original: Any, *args: Any, **kwargs: Any) -> Any:
    """A collective that averages as one that adds, and a division.  Scripts take it over as it stands: torch is all it needs.

    Of complex numbers each part is divided by itself: the division of the whole is not exact.
    """
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    if given["reduceOp"] != "avg":
        return original(*args, **kwargs)
    total = original(**{**given, "reduceOp": "sum"})
    group = given["group"]
    ranks = group[0].size(group[1]) if isinstance(group, tuple) else dist.get_world_size(group)
    if total.dtype.is_complex:
        return torch.view_as_complex(torch.view_as_real(total.resolve_conj()) / ranks)
    return total / ranks if total.dtype.is_floating_point else (total.double() / ranks).to(total.dtype)
