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
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, _redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._sharding_prop import LocalLRUCache
from torch.distributed.tensor.placement_types import _StridedShard

from localtensor._util.patching import replaced, wrapped
from localtensor.concurrency import Same, rare_key, value_key
from localtensor.layout import Mesh
from localtensor.threads import ambient


def mesh_of(device: str, shape: tuple[int, ...], flattened: bool) -> DeviceMesh:
    """A mesh of all ranks; with `flattened`, the submesh of all its axes in one exists too."""
    mesh = Mesh.of(*shape)
    return mesh_on(mesh, (mesh.names,) if flattened and len(shape) > 1 else (), device)


def mesh_on(mesh: Mesh, flattened: tuple[tuple[str, ...], ...], device: str = "cpu") -> DeviceMesh:
    """A mesh of all ranks, where these sets of axes have a flattened submesh."""
    made = init_device_mesh(device, mesh.sizes, mesh_dim_names=mesh.names)
    for names in flattened:
        part = made if names == mesh.names else made[names]
        part._flatten("_".join(names))
    return made


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
    with contextlib.ExitStack() as stack:
        for name in _REDUCING:
            if hasattr(functional, name):
                stack.enter_context(wrapped(functional, name, divided))
        yield


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


# DTensor's answers about a call, kept from one program to the next of one simulation, by all that they depend on.
#
# torch keeps them too, by a key of its own, and whether that key tells all calls apart is among what programs are to
# find out: so torch's caches are emptied before each program.  Asking afresh each time would cost most of a sweep: on
# three axes DTensor looks at every combination of the placements of each axis.  The key here is the whole question,
# each value with its type.
#
# | torch part (under torch.distributed.tensor)                               | read on     | run on |
# |---------------------------------------------------------------------------|-------------|--------|
# | DTensor._op_dispatcher.sharding_propagator: propagate_op_sharding,        |             |        |
# | propagate_op_sharding_non_cached, _propagate_tensor_meta_non_cached        |             |        |
# | (replaced for a while)                                                    | 2.11 - 2.15 | 2.13   |
# | _sharding_prop.LocalLRUCache                                              | 2.11 - 2.15 | 2.13   |
# | _op_schema.OpSchema: op, args_schema, kwargs_schema                       | 2.11 - 2.15 | 2.13   |
# | _op_schema.OutputSharding: output_spec                                    | 2.11 - 2.15 | 2.13   |
# | _dtensor_spec.DTensorSpec: mesh, placements, tensor_meta, shard_order     | 2.11 - 2.15 | 2.13   |
# | placement_types._StridedShard                                             | 2.11 - 2.15 | 2.13   |

_STATELESS = (Shard, Replicate, Partial, _StridedShard)


class NotKept(Exception):
    """The question holds something that is no plain value, or the answer has a placement with a state of its own."""


@contextlib.contextmanager
def remembering() -> Iterator[dict[Any, Any]]:
    """While inside, the same question about a call is answered once; yields the answers by question.

    For simulations in which one thread asks for all ranks: an answer may depend on the rank.
    """
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    known: dict[Any, Any] = {}
    ask = _kept(known, question, propagator.propagate_op_sharding_non_cached)
    # What the result looks like does not depend on placements.
    shape = _kept({}, functools.partial(question, placed=False), propagator._propagate_tensor_meta_non_cached)
    with (
        replaced(propagator, "_propagate_tensor_meta_non_cached", shape),
        replaced(propagator, "propagate_op_sharding_non_cached", ask),
        replaced(propagator, "propagate_op_sharding", LocalLRUCache(ask)),
    ):
        yield known


def _kept(known: dict[Any, Any], key: Callable[[Any], Any], compute: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`compute`, which is asked once for each key; each time where there is none, or the answer is not to be kept."""

    def answer(schema: Any) -> Any:
        try:
            asked = key(schema)
        except NotKept:
            return compute(schema)
        if asked not in known:
            found = compute(schema)
            if not _stateless(getattr(found, "output_spec", None)):
                return found
            known[asked] = found
        return known[asked]

    return answer


def question(schema: Any, *, placed: bool = True) -> Any:
    """All that an answer depends on, or all but how the tensors are placed.  Raises `NotKept`."""
    leaf = _placed if placed else _looks
    return schema.op, value_key(schema.args_schema, leaf), value_key(schema.kwargs_schema, leaf), ambient()


def _looks(value: Any) -> Any:
    if not isinstance(value, DTensorSpec):
        return rare_key(value, _looks, NotKept)
    meta = value.tensor_meta
    if meta is None:
        raise NotKept
    return DTensorSpec, meta.shape, meta.stride, meta.dtype


def _placed(value: Any) -> Any:
    if not isinstance(value, DTensorSpec):
        return rare_key(value, _placed, NotKept)
    if not _stateless(value):
        raise NotKept
    return (_looks(value), Same(value.mesh), value.placements, getattr(value, "shard_order", None))


def _stateless(specs: Any) -> bool:
    listed = specs if isinstance(specs, (list, tuple)) else [specs]
    return all(type(p) in _STATELESS for spec in listed if isinstance(spec, DTensorSpec) for p in spec.placements)
