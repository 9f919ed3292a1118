"""Steps that mean the same for a plain tensor and for a DTensor, so that both runs of a program are one code.

The text of these functions is also written into the scripts that show a finding: they stand alone, on torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor


def whole(x: Any) -> Any:
    """The whole tensor, a copy, where it is spread over ranks; else the tensor itself."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def laid(x: Any, placement: Any) -> Any:
    """The same tensor with this placement on each mesh axis, or with these, one for each axis."""
    if not isinstance(x, DTensor):
        return x
    return x.redistribute(placements=placement if isinstance(placement, list) else [placement] * x.device_mesh.ndim)


def spread(values: Tensor, like: Any, placement: Any) -> Any:
    """These values on the mesh of a DTensor, with this placement on its first axis and replicas on the others."""
    if not isinstance(like, DTensor):
        return values
    first = placement if values.ndim else Replicate()
    placements = [first, *[Replicate() for _ in range(like.device_mesh.ndim - 1)]]
    return distribute_tensor(values, like.device_mesh, placements, src_data_rank=None)


def uneven(shape: Any, dtype: torch.dtype, device: Any) -> Tensor:
    """Values of both signs, of which no two are alike: what a gradient should come in with."""
    count = torch.Size(shape).numel()
    steps = torch.arange(count, dtype=torch.float64, device=device)
    return (torch.cos(steps * 1.7 + 0.3) + steps * 0.01).reshape(shape).to(dtype)
