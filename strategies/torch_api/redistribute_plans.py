"""DTensor's own plan for a redistribution, computed without a process group: its transforms, in its order.

And the same redistribution without a plan, on running ranks: a gather of the whole tensor, and a new cut.

| torch part (under torch.distributed)                    | why                            | read on     | run on |
|---------------------------------------------------------|--------------------------------|-------------|--------|
| device_mesh.DeviceMesh(_init_backend=False, _rank=r)    | a mesh without processes       | 2.11 - 2.15 | 2.13   |
| device_mesh.DeviceMesh._flatten_mapping                 | a flattened submesh            | by feature  | 2.13   |
| device_mesh.DeviceMesh._get_slice_mesh_layout           | the layout of one              | by feature  | 2.13   |
| tensor._redistribute._gen_transform_infos_non_cached    | the plan                       | 2.11 - 2.15 | 2.13   |
| tensor._redistribute._optimize_transform_infos          | steps merged on submeshes      | by feature  | 2.13   |
| tensor._redistribute._TransformInfo                     | one step                       | 2.11 - 2.15 | 2.13   |
| tensor._redistribute._FlattenedTransformInfo            | a merged step                  | by feature  | 2.13   |
| tensor._redistribute.clear_redistribute_planner_cache   | a plan depends on earlier ones | 2.11 - 2.15 | 2.13   |
| tensor._utils.assert_no_mixed_partial_types             | its own refusal                | by feature  | 2.13   |
| tensor._dtensor_spec.DTensorSpec                        | the planner's arguments        | 2.11 - 2.15 | 2.13   |
| tensor._dtensor_spec.TensorMeta                         | the tensor                     | 2.11 - 2.15 | 2.13   |
| tensor._dtensor_spec.ShardOrderEntry                    | a shard order                  | 2.11 - 2.15 | 2.13   |
| tensor.placement_types.Partial._partition_value         | whether R turns into it        | 2.11 - 2.15 | 2.13   |
| tensor.placement_types.Shard._to_partial_tensor         | whether a shard turns into P   | by feature  | none   |

`tests/strategies/torch_api/test_redistribute_plans.py` checks each part by name.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import tensor as dtensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard, _redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

from localtensor.errors import TorchChanged, error_in_one_line
from localtensor.layout import Mesh, Spec, assemble, is_supported, short, split
from strategies.model.kernels import REJECTIONS
from strategies.torch_api.mesh_and_caches import gathered_on_mesh, number_in_mesh
from strategies.torch_api.specs import of_torch, rank_mesh, to_torch

Axes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Transform:
    """One step of DTensor's plan: along one axis, or along several axes with a flattened submesh."""

    axes: Axes
    was: Placement
    now: Placement

    def __str__(self) -> str:
        return f"{','.join(map(str, self.axes))}: {short(self.was)} -> {short(self.now)}"


class PlannerRefusal(Exception):
    """DTensor refuses the redistribution, in planning or at one of the steps.  The message is the first line of its own."""


def planned_transforms(src: Spec, dst: Spec, *, graph: bool, flattened: Sequence[Axes] = ()) -> tuple[Transform, ...]:
    """The steps that DTensor would take, planned without its cache.

    `graph` selects its graph-based planner, else its greedy one.  `flattened` are the sets of axes that have a flattened
    submesh.  DTensor logs each submesh that might have been flattened: `strategies.base.signals.quiet` suppresses that.

    Raises `PlannerRefusal` if DTensor refuses, and `TorchChanged` if a part of the table above is missing or has
    another signature.
    """
    try:
        mesh = planning_mesh(src.mesh, tuple(map(tuple, flattened)))
        infos = _transform_infos(dtensor_spec_of(src, mesh), dtensor_spec_of(dst, mesh), graph, merges=bool(flattened))
        axes = [tuple(getattr(info, "original_mesh_dims", ())) or (info.mesh_dim,) for info in infos]
        found = tuple(Transform(along, *info.src_dst_placements) for along, info in zip(axes, infos, strict=True))
        for transform in found:
            _check(transform, mesh, src)
    except (TypeError, AttributeError) as error:
        if _is_raised_here(error):
            problem = f"its planner has another signature ({error_in_one_line(error)})"
            raise TorchChanged("tensor._redistribute", problem) from error
        raise
    return found


def _transform_infos(have: DTensorSpec, want: DTensorSpec, graph: bool, *, merges: bool) -> Sequence[Any]:
    """DTensor's own list of steps.  Raises `PlannerRefusal`, and a TypeError of our call unchanged."""
    check = getattr(getattr(dtensor, "_utils", None), "assert_no_mixed_partial_types", lambda placements: None)
    _redistribute.clear_redistribute_planner_cache()
    try:
        check(have.placements)
        check(want.placements)
        infos = _redistribute._gen_transform_infos_non_cached(have, want, graph)
        if merges and can_flatten():
            infos = _redistribute._optimize_transform_infos(list(infos), have.mesh, have.placements, want.placements)
    except REJECTIONS as error:
        if isinstance(error, TypeError) and _is_raised_here(error):
            raise
        raise PlannerRefusal(error_in_one_line(error)) from error
    finally:
        _redistribute.clear_redistribute_planner_cache()
    return infos


def _is_raised_here(error: BaseException) -> bool:
    """Whether our own code raised it: then our call does not fit torch, which has not refused anything."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals["__name__"] in (__name__, to_torch.__module__)


def dtensor_spec_of(spec: Spec, mesh: DeviceMesh) -> Any:  # a DTensorSpec, with `tensor_meta` optional by its type only
    """The spec as DTensor writes it: with a shard order, or with strided shards, which encode one."""
    return to_torch(spec, mesh, reading="cuts" if spec.shard_order else "order")


@functools.lru_cache(maxsize=256)
def planning_mesh(mesh: Mesh, flattened: tuple[Axes, ...] = ()) -> DeviceMesh:
    """The mesh as seen by rank 0, without a process group; with flattened submeshes of these axes."""
    made = rank_mesh(mesh, 0)
    for axes in flattened:
        _flatten(made, [mesh.names[axis] for axis in sorted(axes)], math.prod(mesh.sizes[axis] for axis in axes))
    return made


def can_flatten() -> bool:
    """Whether this torch merges steps along flattened submeshes."""
    return hasattr(_redistribute, "_optimize_transform_infos") and hasattr(DeviceMesh, "_get_slice_mesh_layout")


def _flatten(mesh: Any, names: list[str], ranks: int) -> None:
    """`mesh._flatten(names)` without its process group."""
    if not can_flatten():
        return
    layout = mesh._get_slice_mesh_layout(tuple(names))
    if hasattr(layout, "collapse"):
        whole = type(mesh._layout)([layout.collapse()])
    else:  # 2.11 and 2.12
        whole = layout.coalesce()
        whole = whole.nest() if len(whole) > 1 else whole
    mesh._get_root_mesh()._flatten_mapping["_".join(names)] = SimpleNamespace(_layout=whole, size=lambda: ranks)


def _check(transform: Transform, mesh: DeviceMesh, src: Spec) -> None:
    """Raise `PlannerRefusal` for a step that DTensor refuses only when it executes it."""
    was, now = transform.was, transform.now
    if not isinstance(now, Partial) or all(src.mesh.sizes[axis] == 1 for axis in transform.axes):
        return
    if isinstance(was, Replicate):
        try:
            now._partition_value(torch.ones(1), mesh, transform.axes[0])
        except (ValueError, RuntimeError, AssertionError) as error:
            raise PlannerRefusal(error_in_one_line(error)) from error
    elif isinstance(was, Partial):
        raise PlannerRefusal(f"it turns no Partial into another: {was} to {now}")
    elif not (hasattr(Shard, "_to_partial_tensor") and type(was) is Shard and now.reduce_op == "sum"):
        raise PlannerRefusal(f"RuntimeError: redistribute from {was} to {now} not supported yet")


def gathered(local: Tensor, spec: DTensorSpec) -> Tensor:
    """The whole tensor, from the pieces of all ranks of its mesh.  Raises where these do not have the shapes of the spec."""
    meta: Any = spec.tensor_meta
    return assemble(gathered_on_mesh(local.detach().contiguous(), spec.mesh), of_torch(spec)).to(meta.dtype)


def piece(whole: Tensor, spec: DTensorSpec) -> Tensor:
    """The piece of the whole tensor on this rank; a partial value is drawn, the same way on all ranks."""
    meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
    here = DTensorSpec(spec.mesh, spec.placements, meta, spec.shard_order)
    rng = torch.Generator().manual_seed(0)
    return split(whole, of_torch(here), rng)[number_in_mesh(spec.mesh) or 0].clone()


def redistributed(local: Tensor, source: DTensorSpec, target: DTensorSpec) -> Tensor | None:
    """The piece under `target`, by a plain gather; None of a value that would be partial, of other placements, on other ranks."""
    known = all(map(is_supported, source.placements)) and not any(p.is_partial() for p in target.placements)
    if not known or number_in_mesh(source.mesh) is None:
        return None
    return piece(gathered(local, source), target)


def parts(out: Tensor, local: Tensor, source: DTensorSpec, target: DTensorSpec) -> Tensor | None:
    """Where the target is partial: right parts, if `out` has another dtype than the value, or does not add up to it; else None."""
    known = all(map(is_supported, (*source.placements, *target.placements)))
    if not known or not any(p.is_partial() for p in target.placements) or number_in_mesh(source.mesh) is None:
        return None
    whole, made = gathered(local, source), gathered(out, target)
    return None if out.dtype == local.dtype and alike(made, whole) else piece(whole, target)


def alike(out: Tensor, right: Tensor) -> bool:
    """Whether the tensors are equal but for rounding, with one shape and dtype."""
    if out.shape != right.shape or out.dtype != right.dtype:
        return False
    if not (out.dtype.is_floating_point or out.dtype.is_complex):
        return bool(torch.equal(out, right))
    return bool(torch.allclose(out.to(right.dtype), right, rtol=1e-3, atol=1e-5, equal_nan=True))
