"""Functions that follow-up steps use: gradients, an optimizer, writes through views, a way through local tensors.

Each means the same for plain tensors and for DTensors, so that both runs of a program use the same code.  Scripts that
reproduce a finding contain their source: they need torch alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from strategies.programs.run.local_inputs import spread, uneven


def coming_gradients(outs: Sequence[Tensor], placement: Placement) -> list[Tensor]:
    """For each result a gradient that is not uniform, and a DTensor with this placement where the result is one."""
    return [spread(uneven(out.shape, out.dtype, out.device), out, placement) for out in outs]


def gradients(
    op: Callable[[Sequence[Any]], list[Any]],
    tensors: Sequence[Any],
    placement: Placement,
    writes: bool,
    twice: bool = False,
    only: int | None = None,
) -> list[Any]:
    """The gradient of each tensor that can have one; None where the result does not depend on it.

    What comes in has this placement.  With `twice`, the gradients of the gradients are appended.  With `only`, no tensor but
    that of this number requires a gradient.  An op that `writes` to its arguments gets copies.  Raises RuntimeError where
    the call has no gradient, as autograd does.
    """
    real = [x.dtype.is_floating_point or x.dtype.is_complex for x in tensors]
    real = [has and only in (None, i) for i, has in enumerate(real)]
    leaves = [x.detach().requires_grad_(has) for x, has in zip(tensors, real, strict=True)]
    asked = [x for x in leaves if x.requires_grad]
    with torch.enable_grad():
        outs = op([x.clone() if writes else x for x in leaves])
        outs = [out for out in outs if isinstance(out, Tensor) and out.requires_grad]
        if not outs:
            raise RuntimeError("no result of this call has a gradient")
        coming = coming_gradients(outs, placement)
        first = list(torch.autograd.grad(outs, asked, coming, allow_unused=True, create_graph=twice))
        if not twice:
            return first
        again = [g for g in first if g is not None and g.requires_grad]
        if not again:
            raise RuntimeError("no gradient of this call has a gradient")
        return first + list(torch.autograd.grad(again, asked, coming_gradients(again, placement), allow_unused=True))


def trained(
    op: Callable[[Sequence[Any]], list[Any]], tensors: Sequence[Any], writes: bool, optimizer: Callable[..., Any]
) -> list[Any]:
    """The tensors as parameters after two steps of the optimizer.  Raises RuntimeError where the call has no gradient."""
    given = [torch.nn.Parameter(x.detach().clone(), x.dtype.is_floating_point) for x in tensors]
    steps = optimizer([x for x in given if x.requires_grad])
    for _ in range(2):
        steps.zero_grad()
        with torch.enable_grad():
            outs = op([x.clone() if writes else x for x in given])
        outs = [out for out in outs if isinstance(out, Tensor) and out.requires_grad]
        torch.autograd.backward(outs, coming_gradients(outs, Replicate()))
        steps.step()
    return [x.detach() for x in given]


def written(x: Any, view: Callable[[Any], Any], write: Callable[[Any], Any]) -> list[Any]:
    """A copy of x and a view of it, after the view was written in place."""
    base = x.clone()
    part = view(base)
    write(part)
    return [base, part]


def with_base_written(x: Any, view: Callable[[Any], Any]) -> list[Any]:
    """A view of a copy of x, after the copy was written in place."""
    base = x.clone()
    part = view(base)
    base.mul_(-2)
    return [part]


def through_local(x: Any) -> Any:
    """The tensor by way of its local tensors."""
    if not isinstance(x, DTensor):
        return x
    return DTensor.from_local(x.to_local(), x.device_mesh, x.placements, shape=x.shape, stride=x.stride())
