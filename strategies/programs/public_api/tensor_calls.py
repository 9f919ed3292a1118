"""Functions that use the public calls of DTensor which make, convert and move tensors, each beside its plain twin.

Each takes the tensor `x`, plain or distributed, and returns a list of tensors to be compared.  Scripts that reproduce a
finding contain their source: they need torch alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import tensor as dtensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, experimental
from torch.distributed.tensor.placement_types import Placement

from strategies.programs.run.step_functions import whole


def eighths(shape: Sequence[int], like: Any) -> Tensor:
    """Multiples of 1/8 of both signs, in the dtype of a tensor of floats, else in float32: their products add up exactly."""
    steps = torch.arange(torch.Size(shape).numel(), device=like.device)
    dtype = like.dtype if like.dtype.is_floating_point else torch.float32
    return ((steps * 7 + 3) % 17 - 8).div(8).reshape(tuple(shape)).to(dtype)


def leaf_of(x: Any) -> Any:
    """The tensor as a leaf, which requires a gradient if it has floats."""
    return x.detach().requires_grad_(x.dtype.is_floating_point)


def number_along(mesh: Any, axis: int) -> Tensor:
    """The number of this rank along an axis of the mesh, as a tensor of one element."""
    cut = [Shard(0) if a == axis else Replicate() for a in range(mesh.ndim)]
    return distribute_tensor(torch.arange(mesh.size(axis)), mesh, cut, src_data_rank=None).to_local()


def piece_of(values: Tensor, mesh: Any, placements: Sequence[Placement]) -> Tensor:
    """The piece of this rank of values that all ranks have, in this layout; no two ranks have equal parts of a partial value."""
    cut = [Replicate() if p.is_partial() else p for p in placements]
    piece = distribute_tensor(values, mesh, cut, src_data_rank=None).to_local()
    for axis, placement in enumerate(placements):
        if not isinstance(placement, Partial):
            continue
        number, size, kind = number_along(mesh, axis), mesh.size(axis), placement.reduce_op
        if kind in ("min", "max"):
            piece = piece + (number if kind == "min" else -number).to(piece.dtype)
        elif kind == "product":
            piece = torch.where(number == 0, -piece, torch.where(number == 1, -1, 1).to(piece.dtype))
        else:
            piece = piece * torch.where(number == 0, size if kind == "sum" else 2 * size - 1, -1)
    return piece


def is_even(x: Any) -> bool:
    """Whether all ranks hold pieces of one shape."""
    pieces = [1] * x.ndim
    for axis, placement in enumerate(x.placements):
        if placement.is_shard():
            pieces[placement.dim] *= x.device_mesh.size(axis)
    return all(size % count == 0 for size, count in zip(x.shape, pieces, strict=True))


def on_mesh(values: Tensor, like: Any, placements: Sequence[Placement]) -> Any:
    """The values on the mesh of a DTensor in this layout; beside a plain tensor the values themselves."""
    if not isinstance(like, DTensor):
        return values
    mesh = like.device_mesh
    if not any(p.is_partial() for p in placements):
        return distribute_tensor(values, mesh, placements, src_data_rank=None)
    piece = piece_of(values, mesh, placements)
    return DTensor.from_local(piece, mesh, placements, shape=values.shape, stride=values.stride())


def layout_text(x: Any, placements: Sequence[Placement]) -> str:
    """The layout of a DTensor, dims counted from the front; of a plain tensor the layout that it would have, `placements`.

    Raises IndexError for a shard of a dim that the tensor does not have.
    """
    named = [Shard(range(x.ndim)[p.dim]) if isinstance(p, Shard) else p for p in placements]
    found = list(x.placements) if isinstance(x, DTensor) else named
    return f"placements {found if len(set(found)) > 1 else found[:1]}"  # one that is the same on each axis stands once


def held(x: Any, placements: Sequence[Placement]) -> list[Any]:
    """The tensor held in these placements, and those that DTensor names, dims counted from the front."""
    made = on_mesh(whole(x), x, placements)
    return [made, layout_text(made, placements)]


def pulled_back(out: Any, leaves: Sequence[Any], placements: Sequence[Placement] | None = None) -> list[Any]:
    """The result and the gradient of each leaf; what comes in is a DTensor with this layout, by default replicated."""
    if not out.requires_grad:
        return [out]
    coming = eighths(out.shape, out)
    if isinstance(out, DTensor):
        coming = on_mesh(coming, out, placements or [Replicate()] * out.device_mesh.ndim)
    gradients = torch.autograd.grad([out], [x for x in leaves if x.requires_grad], [coming], allow_unused=True)
    return [out.detach(), *gradients]


def distributed(x: Any, placements: Sequence[Placement], **options: Any) -> list[Any]:
    """`distribute_tensor` of the whole tensor, the first rank's unless `src_data_rank` is None, and the gradient of its result."""
    given = whole(x.detach()).clone()
    if not isinstance(x, DTensor):
        out = given.requires_grad_(x.dtype.is_floating_point)
    else:
        mesh = x.device_mesh
        if options.get("src_data_rank", 0) is not None:  # only the first rank's values may count
            for axis in range(mesh.ndim):
                given = given + number_along(mesh, axis).to(given.dtype)
        out = distribute_tensor(given.requires_grad_(x.dtype.is_floating_point), mesh, placements, **options)
    with torch.enable_grad():
        return pulled_back(out * 2, [out]) if out.requires_grad else [out]


def from_local(x: Any, sized: bool = False, coming: Sequence[Placement] | None = None, **options: Any) -> list[Any]:
    """`DTensor.from_local` of the tensor's pieces, and the gradient of the pieces, put together by its placements.

    The pieces are `sized` by the shape and the stride of the whole, as they have to be where they are uneven.
    """
    if not isinstance(x, DTensor):
        return [x, eighths(x.shape, x)] if x.dtype.is_floating_point else [x]
    size: dict[str, Any] = {"shape": x.shape, "stride": x.stride()}
    mesh, placements = x.device_mesh, x.placements
    local = leaf_of(x).to_local().detach().clone()
    for axis, placement in enumerate(placements if options.get("run_check") else ()):
        if placement.is_replicate():  # only the first rank's values may count
            local = local + number_along(mesh, axis).to(local.dtype)
    local.requires_grad_(x.dtype.is_floating_point)
    with torch.enable_grad():
        out = DTensor.from_local(local, mesh, placements, **options, **(size if sized or not is_even(x) else {}))
        found = pulled_back(out, [local], coming)
    whole_gradient = options.get("grad_placements") or [Replicate() if p.is_partial() else p for p in placements]
    return [found[0], *(DTensor.from_local(g, mesh, whole_gradient, **size) for g in found[1:])]


def reduced_pieces(x: Any) -> list[Any]:
    """`DTensor.from_local` of the pieces of a pending reduction along one axis, and whether their gradient is that of the reduction, as text.

    Where several pieces hold the maximum, or the minimum, any of them may have the gradient.
    """
    right = "the gradient of each piece is that of the reduction"
    if not isinstance(x, DTensor) or not any(p.is_partial() for p in x.placements):
        return [x, right]
    mesh, layout = x.device_mesh, x.placements
    axis, kind = next((a, p) for a, p in enumerate(layout) if isinstance(p, Partial))
    given = x.to_local().detach().clone().requires_grad_()
    every: list[Any] = [None] * mesh.size(axis)
    dist.all_gather_object(every, given.detach(), group=mesh.get_group(axis))
    with torch.enable_grad():
        out = DTensor.from_local(given, mesh, layout, shape=x.shape, stride=x.stride())
        made, found = pulled_back(out, [given])
        pieces = torch.stack(every).requires_grad_()
        reduce = {"sum": "sum", "avg": "mean", "max": "amax", "min": "amin", "product": "prod"}[kind.reduce_op]
        reduced = getattr(pieces, reduce)(0)
        coming = piece_of(eighths(x.shape, x), mesh, [Replicate() if p.is_partial() else p for p in layout])
        (wanted,) = torch.autograd.grad(reduced, pieces, coming)
    want = wanted[mesh.get_local_rank(axis)]
    tied = ((pieces == reduced).sum(0) > 1) & (reduce in ("amax", "amin"))
    wrong = ~torch.isclose(found, want, rtol=1e-4, atol=1e-6) & ~tied
    if wrong.any():
        right = f"an element has the gradient {found[wrong][0].item():g}, and in {reduce}() {want[wrong][0].item():g}"
    return [made, right]


def to_local(x: Any, **options: Any) -> list[Any]:
    """`to_local`: the pieces, put together again, and the gradient where that of the pieces has the layout `grad_placements`."""
    if not isinstance(x, DTensor):
        return [x, eighths(x.shape, x)] if x.dtype.is_floating_point else [x]
    mesh, given = x.device_mesh, leaf_of(x)
    with torch.enable_grad():
        local = given.to_local(**options)
    out = DTensor.from_local(local.detach(), mesh, x.placements, shape=x.shape, stride=x.stride())
    if not local.requires_grad:
        return [out]
    default = [Replicate() if p.is_partial() else p for p in x.placements]
    coming = piece_of(eighths(x.shape, x), mesh, options.get("grad_placements") or default)
    return [out, *torch.autograd.grad([local], [given], [coming])]


def full_tensor(x: Any, **options: Any) -> list[Any]:
    """`full_tensor`, and the gradient where that of the full tensor has the layout `grad_placements`."""
    given = leaf_of(x)
    coming = eighths(x.shape, x)
    with torch.enable_grad():
        out = given.full_tensor(**options) if isinstance(x, DTensor) else given.clone()
    if isinstance(x, DTensor):
        default = [Replicate()] * x.device_mesh.ndim
        coming = piece_of(coming, x.device_mesh, options.get("grad_placements") or default)
    return [out.detach(), *(torch.autograd.grad([out], [given], [coming]) if out.requires_grad else ())]


def redistributed(
    x: Any, placements: Sequence[Placement], coming: Sequence[Placement] | None = None, **options: Any
) -> list[Any]:
    """`redistribute`, and the gradient, where what comes in has the layout `coming`."""
    given = leaf_of(x)
    with torch.enable_grad():
        if isinstance(x, DTensor):
            out = given.redistribute(placements=placements, **options)
        else:
            out = given.to(options.get("forward_dtype") or x.dtype, copy=True)
        return [layout_text(out, placements), *pulled_back(out, [given], coming)]


def sliced(mesh: Any, sizes: Sequence[int], first: int) -> Any:
    """The axes from `first` on, as many as the mesh has, of a mesh of these sizes with names."""
    names = tuple("abc"[: len(sizes)])
    return init_device_mesh(mesh.device_type, tuple(sizes), mesh_dim_names=names)[names[first : first + mesh.ndim]]


def on_another_mesh(x: Any, make: Callable[[Any], Any], placements: Sequence[Placement]) -> list[Any]:
    """The tensor on another mesh of the same ranks, by `distribute_tensor` and by `redistribute`, and whether both give equal pieces.

    `make` takes the mesh of x.  A piece belongs to the coordinate of its rank in the mesh, whatever the number of that rank.
    """
    if not isinstance(x, DTensor):
        return [x, x, torch.tensor(True)]
    mesh, values = make(x.device_mesh), whole(x.detach())
    cut = distribute_tensor(values, mesh, placements)
    moved = DTensor.from_local(values, mesh, [Replicate()] * mesh.ndim).redistribute(placements=placements)
    return [cut.full_tensor(), moved.full_tensor(), torch.tensor(torch.equal(cut.to_local(), moved.to_local()))]


def created(x: Any, factory: str, placements: Sequence[Placement] | None, *values: Any, **options: Any) -> list[Any]:
    """A tensor of a factory function in the shape of x; of one that is not initialised shape and dtype."""
    if isinstance(x, DTensor):
        mesh = {"device_mesh": x.device_mesh} | ({} if placements is None else {"placements": placements})
        out = getattr(dtensor, factory)(tuple(x.shape), *values, **options, **mesh)
    else:
        out = getattr(torch, factory)(tuple(x.shape), *values, **options)
    out = out.detach().fill_(2) if factory == "empty" else out
    with torch.enable_grad():
        return pulled_back(out * 2, [out]) if out.requires_grad else [out]


def drawn_at_random(x: Any, factory: str, placements: Sequence[Placement]) -> list[Any]:
    """Of random numbers: which are in range, whether all of them differ, and whether ranks that hold the same agree."""
    if not isinstance(x, DTensor):
        yes = torch.ones(x.shape, dtype=torch.bool)
        return [yes, torch.tensor(True), yes]
    mesh = x.device_mesh
    out = getattr(dtensor, factory)(tuple(x.shape), dtype=torch.float64, device_mesh=mesh, placements=placements)
    every = out.full_tensor()
    in_range = (every >= 0) & (every < 1) if factory == "rand" else every.isfinite()
    most = [Partial("max") if p.is_replicate() else p for p in placements]
    largest = DTensor.from_local(out.to_local(), mesh, most, shape=out.shape, stride=out.stride()).full_tensor()
    return [in_range, torch.tensor(every.unique().numel() == every.numel()), largest == every]


def mapped(x: Any, function: Callable[..., Any], others: Callable[..., Sequence[Any]], **options: Any) -> list[Any]:
    """`local_map` of a function of the tensor and of `others(x)`, with the gradients of all tensors.

    The function runs on whole tensors where pieces are uneven, which `local_map` does not support.
    """
    given = [leaf_of(x), *others(x)]
    given = [leaf_of(v) if isinstance(v, Tensor) else v for v in given]
    with torch.enable_grad():
        if not isinstance(x, DTensor):
            out = function(*given)
        elif all(is_even(v.redistribute(placements=p)) for v, p in zip(given, options["in_placements"]) if p):
            out = experimental.local_map(function, redistribute_inputs=True, **options)(*given)
        else:
            out = function(*(replicated(v) for v in given))
        return pulled_back(out, [v for v in given if isinstance(v, Tensor)])


def replicated(v: Any) -> Any:
    """A DTensor replicated on all axes; any other value itself."""
    return v.redistribute(placements=[Replicate()] * v.device_mesh.ndim) if isinstance(v, DTensor) else v


def replicated_implicitly(x: Any, function: Callable[..., Any]) -> list[Any]:
    """A function of the tensor and of a plain one under `implicit_replication`; after it mixing them is an error again."""
    given, plain = leaf_of(x), eighths(x.shape[-1:], x)
    with torch.enable_grad(), experimental.implicit_replication():
        found = pulled_back(function(given, plain), [given])
    refused = not isinstance(x, DTensor)
    try:
        torch.add(given.detach(), torch.ones((2, *x.shape), dtype=x.dtype, device=x.device))
    except RuntimeError:
        refused = True
    return [*found, torch.tensor(refused)]


def registered(x: Any, name: str, schema: str, function: Callable[..., Any], rules: Callable[..., Any]) -> list[Any]:
    """An op of the user's own, whose rules `register_sharding` registers."""
    if not hasattr(torch.ops.public_calls, name):
        torch.library.define(f"public_calls::{name}", schema)
        torch.library.impl(f"public_calls::{name}", "CompositeExplicitAutograd")(function)
    experimental.register_sharding(getattr(torch.ops.public_calls, name).default)(rules)
    other = on_mesh(eighths(x.shape, x), x, [Shard(0)] * (x.device_mesh.ndim if isinstance(x, DTensor) else 1))
    return [getattr(torch.ops.public_calls, name)(x.detach(), other)]
