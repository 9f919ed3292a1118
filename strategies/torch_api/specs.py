"""Conversion between `Spec` and torch's `DTensorSpec`: sizes, shard order, and the reading of strided shards.

Torch reads strided shards in two ways.  `distribute_tensor` cuts from left to right, as a `Spec` does.  `redistribute`
undoes the cuts in the order that the split factors encode, if `use_strided_shard_as_shard_order` is true, which is the
default.  Where pieces are uneven the two differ.  So callers choose one of `READINGS`.

| torch part (under torch.distributed)                                      | needed for                | read on     | run on |
|---------------------------------------------------------------------------|---------------------------|-------------|--------|
| tensor._dtensor_spec.DTensorSpec(mesh, placements, tensor_meta,           | torch's spec              | 2.11 - 2.15 | 2.13   |
| shard_order, use_strided_shard_as_shard_order)                            |                           |             |        |
| tensor._dtensor_spec.TensorMeta(shape, stride, dtype)                     | the sizes of a spec       | 2.11 - 2.15 | 2.13   |
| tensor._op_schema.OpSchema.args_spec, OutputSharding.needs_redistribute,  | views of copies           | 2.11 - 2.15 | 2.13   |
| .redistribute_schema                                                      |                           |             |        |
| tensor._dtensor_spec.ShardOrderEntry(tensor_dim, mesh_dims)               | the shard order           | 2.11 - 2.15 | 2.13   |
| device_mesh.DeviceMesh(_init_backend=False, _rank=r)                      | a mesh without processes  | 2.11 - 2.15 | 2.13   |
| tensor.experimental._func_map._local_map_wrapped(func, out_placements,    | a declaration             | 2.13        | 2.13   |
| in_placements, in_grad_placements, ...) in a functools.partial            |                           |             |        |
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _pytree as pytree

from localtensor.errors import Refusal, WrongType
from localtensor.layout import Mesh, Spec, StridedShard, check_spec, cut_order, lies_alike, split_factors

READINGS = ("cuts", "order")
"""Strided shards as cuts from left to right, or as the order that their split factors encode."""


class NoSuchSpec(Refusal):
    """A spec that has no counterpart on the other side, or an ambiguous one."""


def to_torch(spec: Spec, mesh: DeviceMesh, *, reading: str | None = None) -> DTensorSpec:
    """Torch's spec of a contiguous tensor with this spec, on a mesh of the same sizes.

    With `reading="cuts"` torch reads each strided shard as a cut of its own, which is the meaning of our spec; with
    "order" it decodes a shard order from them, as it does with the result of `distribute_tensor`.  By default, "order"
    if both mean the same for this tensor, else "cuts".  Raises `NoSuchSpec`, also for symbolic sizes.

    >>> mesh = Mesh.of(dp=2, tp=2)
    >>> spec = Spec(mesh, (Shard(0), Shard(0)), (8, 4), torch.float32, ((0, (1, 0)),))
    >>> str(to_torch(spec, device_mesh(mesh)))
    'Spec(f32[8, 4](S(0)[1]S(0)[0]))'
    """
    _check_reading("to_torch", reading)
    check_spec("to_torch", spec)
    if not isinstance(mesh, DeviceMesh):
        raise WrongType("to_torch", "mesh", mesh, "it is no DeviceMesh", "Pass init_device_mesh('cpu', (2, 2)), say.")
    if tuple(mesh.shape) != spec.mesh.sizes:
        problem = f"it has the sizes {tuple(mesh.shape)}, and the spec is on {spec.mesh}"
        raise NoSuchSpec("to_torch", "mesh", str(mesh), problem, "Give a mesh of the same sizes.")
    if any(isinstance(size, torch.SymInt) for size in spec.shape):
        raise NoSuchSpec("to_torch", "spec", repr(spec), "a size is a symbol", "Give sizes in numbers.")
    some = any(isinstance(p, StridedShard) for p in spec.placements)
    if some and reading is None:
        reading = "order" if not spec.shard_order and _means_one(spec) else "cuts"
    if some and reading == "order" and spec.shard_order:
        problem = "torch takes a shard order, or strided shards that encode one, but not both"
        raise NoSuchSpec("to_torch", "spec", repr(spec), problem, "Pass reading='cuts'.")
    # Torch's shard order has an entry for every sharded dim, and not only for those in another order.
    cuts = [(dim, spec.cut_by(dim)) for dim in range(len(spec.shape))]
    order = None if some and reading == "order" else tuple(ShardOrderEntry(dim, axes) for dim, axes in cuts if axes)
    meta = TensorMeta(torch.Size(spec.shape), contiguous_strides(spec.shape), spec.dtype)
    return DTensorSpec(mesh, spec.placements, meta, order, some and reading == "order")  # type: ignore[arg-type]  # None: torch's own default


def of_torch(spec: DTensorSpec, mesh: Mesh | None = None, *, reading: str | None = None) -> Spec:
    """Our spec of a tensor with torch's spec; `mesh` names the axes, by default as in torch's mesh, or a, b, c ...

    Strided shards stay as they are with `reading="cuts"`, and become a shard order with "order".  By default they stay
    if torch does not decode them, or if both readings are the same.  Raises `NoSuchSpec` for missing or symbolic sizes,
    for strided shards whose two readings differ, and as `with_decoded_order`.

    >>> mesh = Mesh.of(dp=2, tp=2)
    >>> spec = Spec(mesh, (StridedShard(0, split_factor=2), Shard(0)), (8, 4), torch.float32)
    >>> of_torch(to_torch(spec, device_mesh(mesh)), mesh)
    f32[8,4] @ dp:SS(0,2), tp:S(0)
    >>> of_torch(to_torch(spec, device_mesh(mesh)), mesh, reading="order")
    f32[8,4] @ dp:S(0)[1], tp:S(0)[0]
    """
    _check_reading("of_torch", reading)
    if not isinstance(spec, DTensorSpec):
        raise WrongType("of_torch", "spec", spec, "it is no spec of torch's", "Pass a DTensor's _spec.")
    meta = spec.tensor_meta
    if meta is None or any(type(size) is not int for size in meta.shape):
        remedy = "Give a DTensorSpec with tensor_meta of plain integers."
        raise NoSuchSpec("of_torch", "spec", str(spec), "its sizes are not known", remedy)
    named = mesh_of(spec.mesh) if mesh is None else mesh
    if named.sizes != tuple(spec.mesh.shape):
        problem = f"the spec is on a mesh of the sizes {tuple(spec.mesh.shape)}"
        raise NoSuchSpec("of_torch", "mesh", repr(named), problem, "Give a mesh of the same sizes.")
    order = tuple((entry.tensor_dim, tuple(entry.mesh_dims)) for entry in spec.shard_order or ())
    made = Spec(named, tuple(spec.placements), tuple(meta.shape), meta.dtype, order)
    if not any(isinstance(p, StridedShard) for p in made.placements):
        return made
    if reading == "cuts" or (reading is None and not spec.use_strided_shard_as_shard_order):
        return made
    if reading == "order":
        return with_decoded_order(made)
    if not _means_one(made):
        problem = "distribute_tensor cuts it from left to right, and redistribute reads it in another order"
        raise NoSuchSpec("of_torch", "spec", str(spec), problem, "Pass reading='cuts' or reading='order'.")
    return made


def with_decoded_order(spec: Spec) -> Spec:
    """The spec as torch's `redistribute` reads it: plain shards in the order that the split factors encode.

    Where pieces are uneven, ranks may hold other rows than under the spec itself.  Raises `NoSuchSpec` if the split
    factors of a dim encode no order.

    >>> with_decoded_order(Spec(Mesh.of(dp=3, tp=2), (StridedShard(0, split_factor=2), Shard(0)), (7,), torch.float32))
    f32[7] @ dp:S(0)[1], tp:S(0)[0]
    """
    placements, orders = list(spec.placements), dict(spec.shard_order)
    for dim in dict.fromkeys(p.dim for p in spec.placements if isinstance(p, StridedShard)):
        order = None if dim in orders else cut_order(split_factors(spec.placements, dim), spec.mesh.sizes)
        if order is None:
            problem = f"the split factors of dim {dim} encode no order of its axes, and torch's redistribute finds none"
            raise NoSuchSpec("decoded", "spec", repr(spec), problem, "Read it from left to right: reading='cuts'.")
        orders[dim] = order
        for axis in order:
            placements[axis] = Shard(dim)
    return replace(spec, placements=tuple(placements), shard_order=tuple(orders.items()))


def mesh_of(mesh: DeviceMesh) -> Mesh:
    """The mesh with the axes and sizes of torch's; axes without a name are a, b, c ...

    >>> mesh_of(device_mesh(Mesh.of(dp=2, tp=3)))
    Mesh(dp=2, tp=3)
    """
    sizes, names = tuple(mesh.shape), mesh.mesh_dim_names
    return Mesh.of(*sizes) if names is None else Mesh(sizes, tuple(names))


def rank_mesh(mesh: Mesh, rank: int) -> DeviceMesh:
    """A new CPU mesh of torch's as seen by that rank, without a process group."""
    ranks: Any = torch.arange(mesh.ranks).reshape(mesh.sizes)
    return DeviceMesh("cpu", ranks, mesh_dim_names=mesh.names, _init_backend=False, _rank=rank)


@functools.lru_cache(maxsize=256)
def device_mesh(mesh: Mesh, rank: int = 0) -> DeviceMesh:
    """The same, cached: for planning, which does not change it."""
    return rank_mesh(mesh, rank)


def _check_reading(call: str, reading: str | None) -> None:
    if reading is not None and reading not in READINGS:
        problem = f"strided shards are read as {' or as '.join(READINGS)}"
        raise NoSuchSpec(call, "reading", repr(reading), problem, "Pass one of these, or None.")


def _means_one(spec: Spec) -> bool:
    """Whether both readings of the spec's strided shards are the same: a dim cut by one axis has no order to decode."""
    alone = [placement.dim for placement in spec.placements if isinstance(placement, StridedShard)]
    if all(len(spec.cut_by(dim)) == 1 for dim in alone):
        return True
    try:
        return lies_alike(spec, with_decoded_order(spec))
    except NoSuchSpec:
        return False


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of this shape."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


@dataclass(frozen=True)
class LocalMapDeclaration:
    """What `torch.distributed.tensor.experimental.local_map` was given: the function and its placements on one mesh axis.

    `inputs`, `gradients` and `outputs` have a placement for each argument or result, None for one that is no DTensor.
    `gradients` is None where they were not given.  `axes` is the number of mesh axes; with another number than one only that
    is meant.
    """

    function: Callable[..., Any]
    inputs: tuple[Placement | None, ...]
    outputs: tuple[Placement | None, ...]
    gradients: tuple[Placement | None, ...] | None
    axes: int


def local_map_declaration(value: object) -> LocalMapDeclaration | None:
    """The declaration of a function that `local_map` wraps; None for anything else, and without declared inputs."""
    if not isinstance(value, functools.partial) or getattr(value.func, "__name__", "") != "_local_map_wrapped":
        return None
    function, outputs, inputs, gradients = (*value.args, None, None, None)[:4]
    if inputs is None or outputs is None:
        return None
    if isinstance(outputs, (list, tuple)) and all(isinstance(one, Placement) for one in outputs):
        outputs = (outputs,)
    every = [one for one in (*inputs, *outputs) if one is not None]

    def first(layouts: Sequence[Any] | None) -> tuple[Placement | None, ...]:
        return tuple(None if one is None else one[0] for one in layouts or ())

    axes = {len(one) for one in every}
    given = None if gradients is None else first(gradients)
    return LocalMapDeclaration(function, first(inputs), first(outputs), given, axes.pop() if len(axes) == 1 else 0)


def makes_view_of_copy(schema: OpSchema, answer: OutputSharding) -> bool:
    """Whether an op that makes views, and writes nothing, gets a redistributed copy of what it makes them of."""
    returns = schema.op._schema.returns
    views = bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    moved = answer.redistribute_schema if views and answer.needs_redistribute else None
    return moved is not None and any(
        before.placements != after.placements for before, after in zip(schema.args_spec, moved.args_spec, strict=True)
    )


def sums_bools(specs: Any) -> bool:
    """Whether one of these layouts is a pending sum, or a mean, of booleans."""
    placed = [x for x in pytree.tree_leaves(specs) if isinstance(x, DTensorSpec)]
    bools = [x for x in placed if x.tensor_meta is not None and x.tensor_meta.dtype == torch.bool]
    return any(one.is_partial("sum") or one.is_partial("avg") for x in bools for one in x.placements)
