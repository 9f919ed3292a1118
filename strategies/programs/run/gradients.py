"""The gradient of a call with respect to its floating-point tensors, through autograd's own way of each tensor kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from strategies.programs.run.tensor_or_dtensor import spread, uneven


def gradients(
    op: Callable[[Sequence[Any]], list[Any]], tensors: Sequence[Any], placement: Any, writes: bool
) -> list[Any]:
    """One for each tensor that can have one, None where the result does not depend on it.

    What comes in is not uniform, and comes as a DTensor with this placement where the result is one.  An op that
    `writes` to its arguments gets copies.  Raises RuntimeError where the call has no gradient, as autograd does.
    """
    real = [x.dtype.is_floating_point or x.dtype.is_complex for x in tensors]
    leaves = [x.detach().requires_grad_(has) for x, has in zip(tensors, real, strict=True)]
    with torch.enable_grad():
        outs = op([x.clone() if writes else x for x in leaves])
    outs = [out for out in outs if isinstance(out, Tensor) and out.requires_grad]
    if not outs:
        raise RuntimeError("no result of this call has a gradient")
    coming = [spread(uneven(out.shape, out.dtype, out.device), out, placement) for out in outs]
    asked = [x for x in leaves if x.requires_grad]
    return list(torch.autograd.grad(outs, asked, coming, allow_unused=True))
