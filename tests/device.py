"""The device that these programs run on: the CPU, or what LOCALTENSOR_TEST_DEVICE says (`make cuda` runs them on "cuda")."""

import os
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor

DEVICE = os.environ.get("LOCALTENSOR_TEST_DEVICE")
"""The argument `device` of `lt.run`; None leaves torch's default as it is."""
MESH = DEVICE or "cpu"
ON_CPU = pytest.mark.skipif(DEVICE is not None, reason="of the CPU's own kernels or generators")


def here() -> AbstractContextManager[object]:
    """Makes `DEVICE` the default device, as `lt.run(..., device=DEVICE)` does on each rank."""
    return torch.device(DEVICE) if DEVICE else nullcontext()


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """The same numbers on every device: drawn on the CPU from a generator of their own."""
    source = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=source, dtype=dtype, device="cpu").to(MESH)


def integers(low: int, high: int, shape: tuple[int, ...], seed: int) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, generator=source, device="cpu").to(MESH)
