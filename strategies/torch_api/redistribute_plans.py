"""What DTensor itself plans for a redistribution, asked without a process group: its transforms, as it gives them.

| torch part (under torch.distributed)                    | why                            | read on     | run on |
|---------------------------------------------------------|--------------------------------|-------------|--------|
| device_mesh.DeviceMesh(_init_backend=False, _rank=r)    | a mesh nobody talks on         | 2.11 - 2.15 | 2.13   |
| device_mesh.DeviceMesh._flatten_mapping                 | a flattened submesh            | by feature  | 2.13   |
| device_mesh.DeviceMesh._get_slice_mesh_layout           | the layout of one              | by feature  | 2.13   |
| tensor._redistribute._gen_transform_infos_non_cached    | the plan                       | 2.11 - 2.15 | 2.13   |
| tensor._redistribute._optimize_transform_infos          | steps merged on submeshes      | by feature  | 2.13   |
| tensor._redistribute._TransformInfo                     | one step                       | 2.11 - 2.15 | 2.13   |
| tensor._redistribute._FlattenedTransformInfo            | a merged step                  | by feature  | 2.13   |
| tensor._redistribute.clear_redistribute_planner_cache   | a plan depends on earlier ones | 2.11 - 2.15 | 2.13   |
| tensor._utils.assert_no_mixed_partial_types             | its own refusal                | by feature  | 2.13   |
| tensor._dtensor_spec.DTensorSpec                        | what it is asked with          | 2.11 - 2.15 | 2.13   |
| tensor._dtensor_spec.TensorMeta                         | the tensor                     | 2.11 - 2.15 | 2.13   |
| tensor._dtensor_spec.ShardOrderEntry                    | a shard order                  | 2.11 - 2.15 | 2.13   |
| tensor.placement_types.Partial._partition_value         | whether R turns into it        | 2.11 - 2.15 | 2.13   |
| tensor.placement_types.Shard._to_partial_tensor         | whether a shard turns into P   | by feature  | none   |

`tests/strategies/torch_api/test_redistribute_plans.py` names each part.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed import tensor as dtensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard, _redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor.placement_types import Placement

from localtensor.errors import TorchChanged, in_a_line
from localtensor.layout import Mesh, Spec, StridedShard, cuts, short

Axes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Transform:
    """One step as DTensor plans it: along one axis, or along several that a flattened submesh joins."""

    axes: Axes
    was: Placement
    now: Placement

    def __str__(self) -> str:
        return f"{','.join(map(str, self.axes))}: {short(self.was)} -> {short(self.now)}"


class Refusal(Exception):
    """DTensor's refusal, or what it would raise when it came to that step: its first line."""


def transforms(src: Spec, dst: Spec, *, graph: bool, flattened: Sequence[Axes] = ()) -> tuple[Transform, ...]:
    """The steps that DTensor would take, asked afresh.

    With `graph` by its graph-based planner, else by its greedy one, where it lets one choose.  It logs each submesh that
    might have been flattened: `strategies.base.signals.quiet` keeps that from the user.

    Raises `Refusal` with the first line of what DTensor raises, and `TorchChanged` where a part of the table above is not
    there, or is called in another way: that is no word of DTensor's on these specs.
    """
    try:
        mesh = mesh_seen(src.mesh, tuple(map(tuple, flattened)))
        infos = _infos(spec_seen(src, mesh), spec_seen(dst, mesh), mesh, graph, merges=bool(flattened))
        found = tuple(Transform(_axes(info), *info.src_dst_placements) for info in infos)
        for transform in found:
            _check(transform, mesh, src)
    except (TypeError, AttributeError) as error:
        if _is_of_our_call(error):
            raise TorchChanged(
                "tensor._redistribute", f"its planner is asked in another way ({in_a_line(error)})"
            ) from error
        raise
    return found


def _infos(have: Any, want: Any, mesh: DeviceMesh, graph: bool, *, merges: bool) -> Sequence[Any]:
    """DTensor's own list of steps.  Raises `Refusal`, and a TypeError of ours as it is."""
    check = getattr(getattr(dtensor, "_utils", None), "assert_no_mixed_partial_types", lambda placements: None)
    _redistribute.clear_redistribute_planner_cache()
    try:
        check(have.placements)
        check(want.placements)
        infos = _redistribute._gen_transform_infos_non_cached(have, want, graph)
        return _merged(infos, mesh, have, want) if merges else infos
    except (RuntimeError, ValueError, AssertionError, NotImplementedError, IndexError, KeyError, TypeError) as error:
        if isinstance(error, TypeError) and _is_of_our_call(error):
            raise
        raise Refusal(in_a_line(error)) from error
    finally:
        _redistribute.clear_redistribute_planner_cache()


def _is_of_our_call(error: BaseException) -> bool:
    """Whether it was raised in this room: then what we ask for, or how, is wrong, and torch has not said a word."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals is globals()


def spec_seen(spec: Spec, mesh: DeviceMesh) -> Any:
    """The spec as DTensor writes it: a shard order where there are no strided shards, else what these encode."""
    shape = torch.Size(spec.shape)
    meta = TensorMeta(shape, torch.empty(shape, dtype=spec.dtype, device="meta").stride(), spec.dtype)
    if any(isinstance(p, StridedShard) for p in spec.placements) and not spec.shard_order:
        return DTensorSpec(mesh, spec.placements, tensor_meta=meta)
    dims = sorted({cut[0] for cut in map(cuts, spec.placements) if cut is not None})
    order = tuple(ShardOrderEntry(dim, spec.cut_by(dim)) for dim in dims)
    return DTensorSpec(mesh, spec.placements, meta, order, use_strided_shard_as_shard_order=False)


@functools.lru_cache(maxsize=256)
def mesh_seen(mesh: Mesh, flattened: tuple[Axes, ...] = (), rank: int = 0) -> DeviceMesh:
    """The mesh as that rank sees it, without a process group; with the submeshes of these axes flattened."""
    ranks = torch.arange(mesh.ranks).reshape(mesh.sizes)
    made = DeviceMesh("cpu", ranks, mesh_dim_names=mesh.names, _init_backend=False, _rank=rank)
    for axes in flattened:
        _flatten(made, [mesh.names[axis] for axis in sorted(axes)], math.prod(mesh.sizes[axis] for axis in axes))
    return made


def can_flatten() -> bool:
    """Whether this torch merges steps along flattened submeshes."""
    return hasattr(_redistribute, "_optimize_transform_infos") and hasattr(DeviceMesh, "_get_slice_mesh_layout")


def _flatten(mesh: Any, names: list[str], ranks: int) -> None:
    """As `mesh._flatten(names)`, but for the process group, which there is none to make it of."""
    if not can_flatten():
        return
    layout = mesh._get_slice_mesh_layout(tuple(names))
    if hasattr(layout, "collapse"):
        whole = type(mesh._layout)([layout.collapse()])
    else:  # 2.11 and 2.12
        whole = layout.coalesce()
        whole = whole.nest() if len(whole) > 1 else whole
    mesh._get_root_mesh()._flatten_mapping["_".join(names)] = SimpleNamespace(_layout=whole, size=lambda: ranks)


def _merged(infos: Sequence[Any], mesh: DeviceMesh, have: Any, want: Any) -> Sequence[Any]:
    if not can_flatten():
        return infos
    return _redistribute._optimize_transform_infos(list(infos), mesh, have.placements, want.placements)


def _axes(info: Any) -> Axes:
    return tuple(getattr(info, "original_mesh_dims", ())) or (info.mesh_dim,)


def _check(transform: Transform, mesh: DeviceMesh, src: Spec) -> None:
    """Raises for a step that DTensor refuses only when it comes to it."""
    was, now = transform.was, transform.now
    if not isinstance(now, Partial) or all(src.mesh.sizes[axis] == 1 for axis in transform.axes):
        return
    if isinstance(was, Replicate):
        try:
            now._partition_value(torch.ones(1), mesh, transform.axes[0])
        except (ValueError, RuntimeError, AssertionError) as error:
            raise Refusal(in_a_line(error)) from error
    elif isinstance(was, Partial):
        raise Refusal(f"it turns no Partial into another: {was} to {now}")
    elif not (hasattr(Shard, "_to_partial_tensor") and type(was) is Shard and now.reduce_op == "sum"):
        raise Refusal(f"RuntimeError: redistribute from {was} to {now} not supported yet")
