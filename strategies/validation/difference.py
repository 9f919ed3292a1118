"""How what the ranks gave differs from what the op gives: as a value, which the validator and `assert_rule` put in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial
from torch.distributed.tensor.placement_types import Placement

from localtensor.layout import GENEROUS, close, rounds

ADDED = ("sum", "avg")
"""Kinds whose parts are split with a loss: factors are powers of two, and an extreme is one of the parts."""
SPLIT = 32.0
"""How many units in the last place splitting and adding up again may lose: some for each rank, and not `GENEROUS`,
for a thousand units of bfloat16 are eight times the number."""


@dataclass(frozen=True, slots=True)
class Apart:
    """The first element that differs: what is there and what should be, and how many differ, in words."""

    got: str
    want: str
    place: list[int]
    share: str

    @classmethod
    def of(cls, got: Tensor, want: Tensor, slack: Tensor) -> Apart:
        """Of two tensors that differ by more than the slack."""
        wrong = ~close(got, want, slack)
        place = tuple(wrong.nonzero()[0].tolist())
        share = f"{int(wrong.sum())} of {wrong.numel()} elements differ"
        return cls(f"{got[place].item():.6g}", f"{want[place].item():.6g}", list(place), share)


@dataclass(frozen=True, slots=True)
class Difference:
    """What is wrong with result `output`: on `rank`, or of all ranks together; `problem` says it in words."""

    problem: str
    output: int = -1
    rank: int | None = None
    got: Any = ""
    want: Any = ""
    apart: Apart | None = None
    bare: bool = False
    """Whether the words name the result already."""

    @property
    def shown(self) -> bool:
        """Whether there are values to show beside the words."""
        return not isinstance(self.want, str)


def misshapen(
    held: Sequence[Any], want: Tensor, shapes: Sequence[tuple[int, ...] | None], output: int
) -> Difference | None:
    """The first rank whose piece has not its shape among `shapes`, or another dtype than the whole."""
    for rank, (piece, shape) in enumerate(zip(held, shapes, strict=True)):
        if not isinstance(piece, Tensor) or tuple(piece.shape) != shape:
            got = tuple(piece.shape) if isinstance(piece, Tensor) else piece
            return Difference(f"rank {rank} has shape {got}, the placement asks for {shape}", output, rank, got, shape)
        if piece.dtype != want.dtype:
            problem = f"rank {rank} has {piece.dtype}, not {want.dtype}"
            return Difference(problem, output, rank, piece.dtype, want.dtype)
    return None


def odd(held: Sequence[Any], want: Any, i: int) -> Difference | None:
    """The first rank with another number, which is no tensor; NaN is the same as NaN."""
    for rank, got in enumerate(held):
        if got != want and not (isinstance(got, float) and math.isnan(got) and math.isnan(want)):
            return Difference(f"output {i} is {got} on rank {rank}, the op gives {want}", i, rank, got, want, bare=True)
    return None


def coarsest(tensors: Sequence[Tensor], placements: Sequence[Sequence[Placement | None]]) -> float:
    """The unit in the last place of the coarsest of these that are split into addends: as much is lost there.

    `placements` are those of each tensor, one for each mesh axis; 0 where none is split so.
    """
    pairs = zip(tensors, placements, strict=False)
    added = [x.dtype for x, row in pairs if rounds(x) and any(_adds(p) for p in row)]
    return max((torch.finfo(dtype).eps for dtype in added), default=0.0)


def _adds(placement: Placement | None) -> bool:
    return isinstance(placement, Partial) and placement.reduce_op in ADDED


def rounding(held: Sequence[Tensor], coarse: float = 0.0) -> float:
    """What folding these parts may lose: they can be far larger than their total.

    `coarse` is the unit in the last place of numbers that were split before, of fewer digits perhaps than these have.
    """
    if not (held[0].dtype.is_floating_point or held[0].dtype.is_complex):
        return 0.0
    largest = max(float(h.detach().abs().nan_to_num(0.0, 0.0, 0.0).amax()) if h.numel() else 0.0 for h in held)
    return max(GENEROUS * torch.finfo(held[0].dtype).eps, SPLIT * coarse) * largest
