"""Functions of torch beside their plain twins: with each of their flags, on a submesh whose rows differ, and under what torch's own modules offer.

Each takes the tensor `x`, plain or distributed, and returns a list of tensors to be compared.  Scripts that reproduce a
finding contain their source: they need torch alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, parallel
from torch.distributed.tensor.parallel.input_reshard import input_reshard
from torch.distributed.tensor.placement_types import Placement

from strategies.programs.public_api.module_calls import module_for, trained_once
from strategies.programs.public_api.tensor_calls import leaf_of, number_along, on_mesh, piece_of, pulled_back
from strategies.programs.run.step_functions import whole


def cut_along(values: Tensor, like: Any, dim: int | None, axis: int) -> Any:
    """The values on the mesh of a DTensor: cut along that dim, counted round, on one mesh axis, and replicated on the others."""
    if not isinstance(like, DTensor):
        return values
    cut: list[Placement] = [Replicate()] * like.device_mesh.ndim
    if dim is not None and values.ndim:
        cut[axis % len(cut)] = Shard(dim % values.ndim)
    return on_mesh(values, like, cut)


def flagged(
    x: Any, function: Callable[..., Any], others: Sequence[Tensor] = (), cuts: Sequence[int | None] = (), axis: int = 0
) -> list[Any]:
    """The results of a function of the tensor and of others, each cut along its own dim, and the gradient of each with floats."""
    given = [leaf_of(x), *(leaf_of(cut_along(v, x, dim, axis)) for v, dim in zip(others, cuts, strict=True))]
    with torch.enable_grad():
        outs = function(*(v * 1 if v.requires_grad else v for v in given))  # no leaf, which no function may write to
        first, *rest = outs if isinstance(outs, (tuple, list)) else [outs]
        return [*pulled_back(first, given), *(v.detach() for v in rest)]


def inferred(
    x: Any, function: Callable[..., Any], others: Sequence[Tensor] = (), cuts: Sequence[int | None] = (), axis: int = 0
) -> list[Any]:
    """The results of a function under `torch.inference_mode()`, where torch takes no composite op apart.

    The tensors are made there: torch 2.13 refuses those that were made before.
    """
    values = whole(x.detach())
    with torch.inference_mode():
        given = [on_mesh(values.clone(), x, x.placements) if isinstance(x, DTensor) else values.clone()]
        given += [cut_along(v.clone(), x, dim, axis) for v, dim in zip(others, cuts, strict=True)]
        outs = function(*given)
        return [whole(v).clone() for v in (outs if isinstance(outs, (tuple, list)) else [outs])]


def row_values(values: Tensor, row: int) -> Tensor:
    """What the rows with even numbers hold, or those with odd ones: floats that are larger than those of the others."""
    if row % 2 == 0:
        return values
    return 30 - values.flip(0) * 2 if values.dtype.is_floating_point else (values.flip(0) * 2 + 1) % 5


def on_rows(x: Any, axis: int, placement: Placement, use: Callable[[Any], Sequence[Any]]) -> list[Any]:
    """What a use gives on each row of ranks along an axis: a submesh of its own, with other values than the row beside it."""
    values = [row_values(whole(x.detach()).clone(), row) for row in range(2)]
    if not isinstance(x, DTensor):
        return [torch.stack(both) for both in zip(*map(use, values), strict=True)]
    names = ("first", "second")
    mesh = DeviceMesh(x.device_mesh.device_type, x.device_mesh.mesh, mesh_dim_names=names)
    number = number_along(mesh, 1 - axis) % 2
    mine, row = torch.where(number == 0, values[0], values[1]), mesh[names[axis]]
    piece = piece_of(mine, row, [placement])
    given = DTensor.from_local(piece, row, [placement], shape=mine.shape, stride=mine.stride())
    return [by_row(whole(out), mesh, 1 - axis) for out in use(given)]


def by_row(value: Tensor | None, mesh: Any, axis: int) -> Tensor | None:
    """The values of the first two ranks along an axis of the mesh, one after the other; None of a gradient that is missing."""
    if value is None:
        return None
    count, lanes = mesh.size(axis), [Shard(0) if a == axis else Replicate() for a in range(mesh.ndim)]
    shape = torch.Size([count, *value.shape])
    stride = torch.empty(shape, device="meta").stride()
    piece = value.detach().contiguous()[None]
    return DTensor.from_local(piece, mesh, lanes, shape=shape, stride=stride).full_tensor()[:2]


def across(
    x: Any, function: Callable[..., Any], others: Sequence[Tensor] = (), cuts: Sequence[int | None] = (), axis: int = 0
) -> list[Any]:
    """The results of a function of the tensor on a submesh along an axis, and of others on the submesh across it."""
    values = whole(x.detach()).clone()
    given = [values, *(v.clone() for v in others)]
    if isinstance(x, DTensor):
        names = ("first", "second")
        mesh = DeviceMesh(x.device_mesh.device_type, x.device_mesh.mesh, mesh_dim_names=names)
        lanes = [mesh[names[axis % 2]], *[mesh[names[1 - axis % 2]]] * len(others)]
        laid = [Replicate() if dim is None else Shard(dim % v.ndim) for dim, v in zip((0, *cuts), given, strict=True)]
        given = [distribute_tensor(v, m, [p], src_data_rank=None) for v, m, p in zip(given, lanes, laid, strict=True)]
    outs = function(*given)
    return [whole(v) for v in (outs if isinstance(outs, (tuple, list)) else [outs])]


def of_parameters(given: Sequence[Any], use: Callable[[Any], Any]) -> list[Any]:
    """What a use of parameters with these values gives, then the parameters and their gradients."""
    parameters = [nn.Parameter(v.detach().clone()) for v in given]
    for p in parameters:
        p.grad = p.detach() * 2 + 1
    out = use(parameters)
    return [*([] if out is None else [out.detach()]), *(v for p in parameters for v in (p.detach(), p.grad))]


def on_ranks(
    x: Any, chosen: Callable[[Tensor], Tensor], placement: Placement, use: Callable[[Any], Sequence[Any]]
) -> list[Any]:
    """What a use gives on a mesh of the ranks that are chosen of all, in their order, as rank 0 has it: others hold nothing."""
    values = whole(x.detach()).clone()
    if not isinstance(x, DTensor):
        return list(use(values))
    every, device = x.device_mesh.mesh.flatten(), x.device_mesh.device_type
    given = distribute_tensor(values, DeviceMesh(device, chosen(every)), [placement])
    lane, found = DeviceMesh(device, every), []
    for out in use(given):
        outside = isinstance(out, DTensor) and given.device_mesh.get_coordinate() is None
        rows = by_row(torch.zeros(out.shape, dtype=out.dtype) if outside else whole(out), lane, 0)
        found.append(None if rows is None else rows[0])
    return found


def row_source(v: Any, placement: Placement) -> Any:
    """The tensor, distributed anew from the first rank of the row, and replicas of it from `from_local`, checked."""
    if not isinstance(v, DTensor):
        return [v, v]
    mesh, mine = v.device_mesh, whole(v).clone()
    mine = mine + number_along(mesh, 0).to(mine.dtype)
    return [distribute_tensor(mine, mesh, [placement]), DTensor.from_local(mine, mesh, [Replicate()], run_check=True)]


def row_trained(v: Any, make: Callable[[int], nn.Module], plan: Any) -> list[Any]:
    """A step of training of a module under a plan on the row's mesh."""
    module, given = module_for(v, make), leaf_of(whole(v))
    with torch.enable_grad():
        if isinstance(v, DTensor):
            module = parallel.parallelize_module(module, v.device_mesh, plan)
        return trained_once(module, module(given), [given])


def row_scaled(v: Any) -> list[Any]:
    """A step by a GradScaler, where the gradients of one row alone are infinite: the parameter and the scale."""
    p = nn.Parameter(v.detach().clone())
    scaler = torch.amp.GradScaler(p.device.type, init_scale=4.0, growth_interval=1)
    scaler.scale(torch.ones((), device=p.device))
    p.grad = 1 / (v.detach() < 12).to(v.dtype)
    scaler.step(torch.optim.SGD([p], lr=0.5))
    scaler.update()
    return [p.detach(), torch.tensor(scaler.get_scale())]


def row_clipped(v: Any, **options: Any) -> list[Any]:
    """The gradients of parameters of the row after they are clipped by their norm, and the norm."""
    p, q = nn.Parameter(v.detach().clone()), nn.Parameter(v.detach().clone())
    p.grad, q.grad = v.detach() * 2, v.detach() + 1
    norm = nn.utils.clip_grad_norm_([p, q], 1.0, **options)
    return [norm.detach(), p.grad, q.grad]


def row_optimized(v: Any, make: Callable[[Any], Any]) -> list[Any]:
    """A parameter of the row after two steps of an optimizer."""
    p = nn.Parameter(v.detach().clone())
    optimizer = make([p])
    for factor in (1.0, -0.5):
        p.grad = v.detach() * factor
        optimizer.step()
    return [p.detach()]


def resharded(x: Any, make: Callable[[int], nn.Module], dim: int | None, plan: Any = None) -> list[Any]:
    """A step of training of a module whose saved tensors `input_reshard` cuts along a dim, of a plain tensor."""
    module, given = module_for(x, make), leaf_of(whole(x))
    out = None
    with torch.enable_grad():
        if not isinstance(x, DTensor):
            return trained_once(module, module(given), [given])
        module = module if plan is None else parallel.parallelize_module(module, x.device_mesh, plan)
        module = input_reshard(module, x.device_mesh, dim)
        try:
            out = module(given)
        finally:  # torch 2.13 leaves its hooks on after an error, for all later programs
            for hook in module._forward_hooks.values() if out is None else ():
                hook(module, (), None)
        return trained_once(module, out, [given])
