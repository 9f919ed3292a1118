"""The words of which rank programs make use: numbers out of the accumulator, and results into it.

A program prints them with itself, so they name what they need and nothing of this project.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from localtensor.testing.programs.model import PRIME


def feed(acc: Tensor, shape: Sequence[int], dtype: str, by: int, plus: int, times: int = 1) -> Tensor:
    """A fresh tensor of small numbers that depend on the accumulator; of both signs, if the dtype has them."""
    count = torch.Size(shape).numel()
    numbers = (acc[:count] * by + plus).remainder(11) - (0 if dtype == "uint8" else 5)
    return (numbers * times).to(getattr(torch, dtype)).reshape(shape)


def mix(acc: Tensor, got: Sequence[Any]) -> Tensor:
    """The accumulator, changed by everything that has been got."""
    numbers = [x.reshape(-1).to(torch.int64) if isinstance(x, Tensor) else torch.tensor(x) for x in got]
    flat = torch.cat(numbers)
    return torch.cat([acc[: len(flat)] * 3 + flat, acc[len(flat) :]]).remainder(PRIME)


def blank(shape: Sequence[int], dtype: str) -> Tensor:
    return torch.full(tuple(shape), 99, dtype=getattr(torch, dtype))


class Planted(Exception):
    """What a program with a fault raises."""
