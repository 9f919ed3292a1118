"""Device meshes of all ranks, and control of DTensor's caches of propagation and redistribution.

torch caches what DTensor propagates by a key of its own, and whether that key distinguishes all calls is among the
things that programs test.  So torch's caches are emptied before each program.  Without any cache a sweep would take
most of its time for propagation: on three axes DTensor looks at every combination of the placements of each axis.
`cached_propagation` therefore keeps answers from program to program of one simulation, by a key of everything that they
depend on, each value with its type.

| torch part (under torch.distributed)                                | read on     | run on |
|---------------------------------------------------------------------|-------------|--------|
| device_mesh.DeviceMesh._flatten                                     | 2.11 - 2.15 | 2.13   |
| tensor.debug._clear_sharding_prop_cache: where the next are not     | 2.11 - 2.15 | 2.13   |
| DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding,   |             |        |
| torch._C._clear_DTensor_sharding_propagator_cache: all that         |             |        |
| tensor.debug calls, whose import takes half a second                | by feature  | 2.13   |
| tensor._redistribute._gen_transform_infos.cache_clear               | 2.11 - 2.15 | 2.13   |
| tensor._redistribute.clear_redistribute_planner_cache               | 2.11 - 2.15 | 2.13   |
| _functional_collectives.all_reduce, .reduce_scatter_tensor,         |             |        |
| .reduce_scatter_single (by feature): replaced where gloo has no avg | 2.11 - 2.15 | 2.13   |
| DTensor._op_dispatcher.sharding_propagator:                         |             |        |
| propagate_op_sharding, propagate_op_sharding_non_cached,            |             |        |
| _propagate_tensor_meta_non_cached (replaced for a while)            | 2.11 - 2.15 | 2.13   |
| tensor._sharding_prop.LocalLRUCache                                 | 2.11 - 2.15 | 2.13   |
| tensor._decompositions.DecompShardingStrategy:                      |             |        |
| _propagate_through_decomp (replaced for a while, where it has the   |             |        |
| parameters of torch 2.13)                                           | by feature  | 2.13   |
| sharding_propagator: op_strategy_funcs, op_to_rules,                |             |        |
| op_single_dim_strategy_funcs                                        | 2.11 - 2.15 | 2.13   |
| tensor._op_schema.OpSchema: op, args_schema, kwargs_schema          | 2.11 - 2.15 | 2.13   |
| tensor._op_schema.OutputSharding: output_spec                       | 2.11 - 2.15 | 2.13   |
| tensor._dtensor_spec.DTensorSpec: mesh, placements, tensor_meta,    |             |        |
| shard_order                                                         | 2.11 - 2.15 | 2.13   |
| tensor.placement_types._StridedShard                                | 2.11 - 2.15 | 2.13   |
| tensor._dispatch: the words of its check of plain tensors           | by feature  | 2.13   |
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import traceback
from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, _redistribute, _sharding_prop
from torch.distributed.tensor._decompositions import DecompShardingStrategy
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor._sharding_prop import LocalLRUCache
from torch.distributed.tensor.placement_types import _StridedShard

from localtensor._util.patching import replaced, wrapped
from localtensor.concurrency import IdentityKey, uncommon_value_key, value_key
from localtensor.errors import LocalTensorError
from localtensor.layout import Mesh
from localtensor.threads import ambient_settings

T = TypeVar("T")


def world_mesh(device: str, shape: tuple[int, ...], flattened: bool) -> DeviceMesh:
    """A mesh of all ranks; with `flattened`, the flattened submesh of all its axes exists too."""
    mesh = Mesh.of(*shape)
    return world_mesh_with_submeshes(mesh, (mesh.names,) if flattened and len(shape) > 1 else (), device)


def world_mesh_with_submeshes(mesh: Mesh, flattened: tuple[tuple[str, ...], ...], device: str = "cpu") -> DeviceMesh:
    """A mesh of all ranks, with a flattened submesh for each of these sets of axes."""
    made = init_device_mesh(device, mesh.sizes, mesh_dim_names=mesh.names)
    for names in flattened:
        part = made if names == mesh.names else made[names]
        part._flatten("_".join(names))
    return made


def number_in_mesh(mesh: DeviceMesh) -> int | None:
    """The number of this rank among those of the mesh, row by row; None if it is none of them."""
    place = mesh.get_coordinate()
    if place is None:
        return None
    return functools.reduce(lambda number, axis: number * mesh.size(axis) + place[axis], range(mesh.ndim), 0)


def gathered_on_mesh(value: object, mesh: DeviceMesh) -> list[Any]:
    """What each rank of the mesh gives, row by row; all ranks of the mesh call it, and no other.

    A process group has its ranks in the order of their numbers, a mesh may have them in any.
    """
    found = [(number_in_mesh(mesh), value)]
    for axis in range(mesh.ndim):
        lists: list[Any] = [None] * mesh.size(axis)
        dist.all_gather_object(lists, found, group=mesh.get_group(axis))
        found = [one for part in lists for one in part]
    return [value for _, value in sorted(found, key=lambda pair: pair[0] or 0)]


def clear_dtensor_caches() -> None:
    """Clear DTensor's caches of this thread, so that the results of programs do not depend on their order."""
    propagate = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding
    native = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if native is None or not hasattr(propagate, "cache_clear"):
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()
    else:
        propagate.cache_clear()
        native()
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute.clear_redistribute_planner_cache()


@contextlib.contextmanager
def averages_as_sums(backend: str) -> Iterator[None]:
    """While active, DTensor's averages are sums that are divided; nccl keeps its own.

    gloo has no average, and simulated ranks have none of integers.
    """
    if "nccl" in backend:
        yield
        return
    with contextlib.ExitStack() as stack:
        for name in ("all_reduce", "reduce_scatter_tensor", "reduce_scatter_single"):
            if hasattr(functional, name):
                stack.enter_context(wrapped(functional, name, divided))
        yield


def divided(original: Any, *args: Any, **kwargs: Any) -> Any:
    """A collective with an average made of a sum and a division.  Scripts contain its source: it needs torch alone.

    Real and imaginary parts are divided separately: complex division is not exact.
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


def averages_code() -> str:
    """Python text that replaces DTensor's averages, which gloo does not have, by sums that are divided."""
    return f"""
{inspect.getsource(divided)}

for each in ("all_reduce", "reduce_scatter_single", "reduce_scatter_tensor"):  # gloo has no average
    if hasattr(functional, each):
        own = inspect.unwrap(getattr(functional, each))
        setattr(functional, each, functools.update_wrapper(functools.partial(divided, own), own))
"""


_STATELESS = (Shard, Replicate, Partial, _StridedShard)


MOST_KEPT = 1 << 15
"""Answers and traces that a table keeps; then all are forgotten: most are of ops that are done."""


class NotCacheable(Exception):
    """The call has an argument that is no plain value, or a placement with a state of its own."""


class Answers:
    """What DTensor has propagated, by key: shardings on certain meshes, and the metadata of results."""

    def __init__(self) -> None:
        self.shardings: dict[Hashable, Any] = {}
        self.metadata: dict[Hashable, Any] = {}
        self._rules = registered_rules()

    def hold(self) -> bool:
        """Whether the rules are those of these answers."""
        return self._rules == registered_rules()


@contextlib.contextmanager
def cached_propagation(answers: Answers | None = None) -> Iterator[dict[Any, Any]]:
    """While active, DTensor propagates each call once, also one that `answers` have; yields the shardings by key.

    For simulations in which one thread propagates for all ranks: an answer may depend on the rank.
    """
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    answers = answers or Answers()
    known = answers.shardings
    sharding = _cached(known, propagation_key, propagator.propagate_op_sharding_non_cached)
    metadata = _cached(answers.metadata, _unplaced_key, propagator._propagate_tensor_meta_non_cached)
    with (
        replaced(propagator, "_propagate_tensor_meta_non_cached", metadata),
        replaced(propagator, "propagate_op_sharding_non_cached", sharding),
        replaced(propagator, "propagate_op_sharding", LocalLRUCache(sharding)),
    ):
        yield known


def _cached(
    known: dict[Hashable, T], key_of: Callable[[OpSchema], Hashable], compute: Callable[[OpSchema], T]
) -> Callable[[OpSchema], T]:
    """`compute`, called once for each key, and each time for a call without a key or with an answer not to be kept."""

    def answer(schema: OpSchema) -> T:
        try:
            key = key_of(schema)
        except NotCacheable:
            return compute(schema)
        if key not in known:
            found = compute(schema)
            if not _stateless(getattr(found, "output_spec", None)):
                return found
            if len(known) >= MOST_KEPT:
                known.clear()
            known[key] = found
        return known[key]

    return answer


_MIXED = "got mixed torch.Tensor and DTensor"
"""What the check of plain tensors says; where another torch says it otherwise, such a call is run on rank threads."""


def is_refusal_of_rules(error: BaseException) -> bool:
    """Whether DTensor's propagation, or its check of plain tensors, has raised an error, which is that of every rank.

    They see sizes and placements of whole tensors; where they ask for a number that differs between ranks, lockstep raises
    an error of this package.
    """
    chain: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in chain:
        chain.append(following)
        following = following.__cause__ or following.__context__
    if any(isinstance(one, LocalTensorError) for one in chain):
        return False
    files = (frame.f_code.co_filename for one in chain for frame, _ in traceback.walk_tb(one.__traceback__))
    return _MIXED in str(error) or _sharding_prop.__file__ in files  # autograd's engine drops the frames beneath it


_TRACE_PARAMETERS = ["self", "op_schema", "placement", "mesh"]
_UNTRACEABLE = (RuntimeError, KeyError, IndexError)
"""What a trace raises where the decomposition has no such placements: DTensor then tries the next ones."""


@contextlib.contextmanager
def cached_traces() -> Iterator[dict[Any, Any]]:
    """While active, each decomposition is traced once for the same arguments and input placements; yields the results by key.

    The metadata of the results of the ops that it enters, which need a mode of fake tensors each time, are found once, too.
    A trace sees one axis of a mesh of one rank, so it is the same for every mesh and rank.  It depends on the rules of the
    ops that it enters: rules that are registered meanwhile begin a new table.  Within another such block its tables serve.
    """
    known: dict[Hashable, Any] = {}
    original: Any = getattr(DecompShardingStrategy, "_propagate_through_decomp", None)
    outer = getattr(original, "known", None)
    if outer is not None:
        yield outer
        return
    if original is None or list(inspect.signature(original).parameters) != _TRACE_PARAMETERS:
        yield known  # another torch: each trace is made anew
        return

    @functools.wraps(original)
    def traced(self: Any, op_schema: OpSchema, placement: tuple[Any, ...], mesh: DeviceMesh) -> Any:
        try:
            call = _unplaced_key(op_schema)
        except NotCacheable:
            return original(self, op_schema, placement, mesh)
        if not all(p is None or type(p) in _STATELESS for p in placement):
            return original(self, op_schema, placement, mesh)
        key = call, tuple(placement), registered_rules()
        if key not in known:
            if len(known) >= MOST_KEPT:
                known.clear()
            try:
                known[key] = original(self, op_schema, placement, mesh)
            except _UNTRACEABLE as error:
                if type(error) not in _UNTRACEABLE:
                    raise
                known[key] = error
        found = known[key]
        if isinstance(found, Exception):
            raise type(found)(*found.args)
        return found

    traced.known = known  # type: ignore[attr-defined]
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    metadata = _cached({}, _unplaced_key, propagator._propagate_tensor_meta_non_cached)
    with (
        replaced(DecompShardingStrategy, "_propagate_through_decomp", traced),
        replaced(propagator, "_propagate_tensor_meta_non_cached", metadata),
    ):
        yield known


class _Registered:
    """The functions that are registered with DTensor's propagator, as they were when this was last asked.

    Lists are compared by identity first, which takes a fifth of the time of a hash.
    """

    TABLES = ("op_strategy_funcs", "op_single_dim_strategy_funcs", "op_to_rules")

    def __init__(self) -> None:
        self._functions: list[list[Any]] = []
        self._changes = 0

    def number(self) -> int:
        """A number that changes when the functions do."""
        prop = DTensor._op_dispatcher.sharding_propagator
        functions = [list(getattr(prop, name, {}).values()) for name in self.TABLES]
        if functions != self._functions:
            self._functions, self._changes = functions, self._changes + 1
        return self._changes


registered_rules = _Registered().number
"""A number that changes when a rule is registered with DTensor's propagator, or put back."""


def propagation_key(schema: OpSchema, *, placed: bool = True) -> Hashable:
    """All that an answer depends on, without the placements if not `placed`.  Raises `NotCacheable`."""
    leaf = _spec_key if placed else _metadata_key
    return schema.op, value_key(schema.args_schema, leaf), value_key(schema.kwargs_schema, leaf), ambient_settings()


def _unplaced_key(schema: OpSchema) -> Hashable:
    """The key of the metadata of results, which do not depend on placements."""
    return propagation_key(schema, placed=False)


def _metadata_key(value: object) -> Hashable:
    if not isinstance(value, DTensorSpec):
        return uncommon_value_key(value, _metadata_key, NotCacheable)
    meta = value.tensor_meta
    if meta is None:
        raise NotCacheable
    return DTensorSpec, meta.shape, meta.stride, meta.dtype


def _spec_key(value: object) -> Hashable:
    if not isinstance(value, DTensorSpec):
        return uncommon_value_key(value, _spec_key, NotCacheable)
    if not _stateless(value):
        raise NotCacheable
    return (_metadata_key(value), IdentityKey(value.mesh), value.placements, getattr(value, "shard_order", None))


def _stateless(specs: object) -> bool:
    """Whether no spec among these has a placement of an unknown class, which may have a state of its own."""
    listed = specs if isinstance(specs, (list, tuple)) else [specs]
    return all(type(p) in _STATELESS for spec in listed if isinstance(spec, DTensorSpec) for p in spec.placements)
