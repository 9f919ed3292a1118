"""Functions that train DTensor parameters with torch's optimizers, and clip and unscale gradients, beside their plain twins.

Each takes the tensor `x`, plain or distributed, and returns a list of tensors to be compared.  Scripts that reproduce a
finding contain their source: they need torch alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from strategies.programs.public_api.tensor_calls import eighths, leaf_of, on_mesh, pulled_back
from strategies.programs.run.step_functions import whole


def parameters_of(x: Any, first: Sequence[Placement], others: Sequence[Placement]) -> list[Any]:
    """A parameter like x in the first layout, and some whose shapes a mesh cuts unevenly in the other."""
    moved = (x.redistribute(placements=first) if isinstance(x, DTensor) else x).detach()
    more = [on_mesh(eighths(shape, x), x, others) for shape in ((5, 4), (3,), (1, 2))]
    return [nn.Parameter(v.clone()) for v in (moved, *more)]


def given_gradients(parameters: Sequence[Any], factor: float) -> None:
    """Give each parameter a gradient in its own layout: no zeros, and none in two steps alike."""
    for number, p in enumerate(parameters):
        values = (eighths(p.shape, p) + 1 / 16) * (factor - number / 2)
        p.grad = on_mesh(values, p, p.placements if isinstance(p, DTensor) else ())


def optimized(x: Any, first: Sequence[Placement], others: Sequence[Placement], make: Callable[[Any], Any]) -> list[Any]:
    """Parameters of several layouts after two steps of an optimizer, each with other gradients."""
    parameters = parameters_of(x, first, others)
    optimizer = make(parameters)
    for factor in (1.0, -0.75):
        given_gradients(parameters, factor)
        optimizer.step()
    return [p.detach() for p in parameters]


def clipped(x: Any, first: Sequence[Placement], others: Sequence[Placement], clip: Callable[[Any], Any]) -> list[Any]:
    """The gradients of parameters of several layouts after they are clipped, and the norm that it gives."""
    parameters = parameters_of(x, first, others)
    given_gradients(parameters, 4.0)
    norm = clip(parameters)
    return [*([] if norm is None else [norm.detach()]), *(p.grad for p in parameters)]


def autocast(x: Any, function: Callable[[Any, Any], Any], placements: Sequence[Placement]) -> list[Any]:
    """A function of numbers from 1 to 3, and of such a weight in this layout, under `torch.autocast` to bfloat16, and the gradients.

    In few bits the sums of these numbers are exact.  What is computed in more bits is compared in these.
    """
    n, placed = x.shape[-1], x.placements if isinstance(x, DTensor) else ()
    steps = torch.arange(x.numel(), device=x.device).reshape(tuple(x.shape)) % 3 + 1
    weight = torch.arange(4 * n, device=x.device).reshape(n, 4) % 3 + 1
    leaves = [leaf_of(on_mesh(v.float(), x, p)) for v, p in ((steps, placed), (weight, placements))]
    with torch.enable_grad(), torch.autocast(x.device.type, torch.bfloat16):
        out = function(*leaves)
    with torch.enable_grad():
        return [str(out.dtype), *(whole(v).to(torch.bfloat16) for v in pulled_back(out, leaves) if v is not None)]


def unscaled_parts(x: Any) -> list[Any]:
    """A parameter after a step by a GradScaler, and the scale: each rank's part of the gradient is finite, and their sum is not."""
    mesh: Any = x.device_mesh if isinstance(x, DTensor) else None
    p = nn.Parameter(on_mesh(whole(x.detach()).to(torch.float32), x, [Replicate()] * mesh.ndim if mesh else ()))
    scaler = torch.amp.GradScaler(x.device.type, init_scale=4.0, growth_interval=1)
    scaler.scale(torch.ones((), device=x.device))
    p.grad = torch.full(p.shape, torch.inf, device=x.device)
    if mesh:
        part = torch.full(p.shape, 3e38, device=x.device)
        p.grad = DTensor.from_local(part, mesh, [Partial()] * mesh.ndim, shape=p.shape, stride=part.stride())
    scaler.step(torch.optim.SGD([p], lr=0.5))
    scaler.update()
    return [torch.tensor(scaler.get_scale()), p.detach()]


def unscaled(
    x: Any, first: Sequence[Placement], others: Sequence[Placement], value: float, number: int, place: int
) -> list[Any]:
    """Parameters after a step by a GradScaler, and its scale: one element of one gradient has a value that may be no number."""
    parameters = parameters_of(x, first, others)
    scaler = torch.amp.GradScaler(x.device.type, init_scale=4.0, growth_interval=1)
    scaler.scale(torch.ones((), device=x.device))
    given_gradients(parameters, 1.0)
    one = parameters[number]
    marked = torch.ones(one.shape, dtype=one.dtype, device=one.device)
    marked.view(-1)[place % marked.numel()] = value
    one.grad = one.grad * on_mesh(marked, one, one.placements if isinstance(one, DTensor) else ())
    scaler.step(torch.optim.SGD(parameters, lr=0.5))
    scaler.update()
    return [torch.tensor(scaler.get_scale()), *(p.detach() for p in parameters)]
