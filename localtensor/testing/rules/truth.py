"""What a function gives for whole tensors, and how far from that a right answer may be (`localtensor.layout.tolerance`).

It is asked again with noise of one ulp in its inputs, with gaps between their elements, for which torch takes other
kernels, and for single precision in double.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from localtensor.layout.tolerance import GENEROUS, UNSTABLE, WIDER, rounds, scale_of, slack_of, widened
from localtensor.testing.rules.ops import REFUSALS

Function = Callable[[Sequence[Tensor]], list[Any]]


@dataclass(frozen=True, slots=True)
class Truth:
    """The flat results on whole tensors; `slack[i]` is a number for result i, infinite for elements that jump."""

    values: tuple[Any, ...]
    slack: tuple[Tensor | None, ...]

    @property
    def stable(self) -> bool:
        """Whether enough of every result stands still to be compared."""
        shares = [float(s.isinf().double().mean()) for s in self.slack if s is not None and s.ndim and s.numel()]
        return max(shares, default=0.0) <= UNSTABLE


def tell(function: Function, tensors: Sequence[Tensor]) -> Truth:
    """The truth; the function gets copies.  Raises what the function raises."""
    values = function([x.clone() for x in tensors])
    others = [_again(function, [_apart(x) for x in tensors], len(values))]
    if any(map(rounds, tensors)):
        others += [_again(function, [_nudged(x, turn) for x in tensors], len(values)) for turn in (0, 1)]
    slack = [slack_of(value, [o[i] for o in others if o]) for i, value in enumerate(values)]
    if any(x.dtype in WIDER for x in tensors):
        best = _again(function, [x.to(WIDER.get(x.dtype, x.dtype)) for x in tensors], len(values))
        slack = [widened(s, v, best[i] if best else None) for i, (s, v) in enumerate(zip(slack, values, strict=True))]
    return Truth(tuple(values), tuple(slack))


def rounding(pieces: Sequence[Tensor]) -> float:
    """What it may cost to reduce these: parts can be far larger than their total."""
    if not rounds(pieces[0]):
        return 0.0
    largest = max(float(scale_of(piece)) for piece in pieces)
    return GENEROUS * torch.finfo(pieces[0].dtype).eps * largest


def _apart(x: Tensor) -> Tensor:
    return torch.stack([x, x], -1)[..., 0]


def _nudged(x: Tensor, turn: int) -> Tensor:
    """Each element up or down by at most one unit in the last place; the other way round in the other turn."""
    if not rounds(x):
        return x.clone()
    place = torch.arange(x.numel()).reshape(x.shape)
    ways = ((place * (3 + turn) + place // 5 + turn) % 2 * 2 - 1).to(x.device, x.dtype)
    return x * (1 + torch.finfo(x.dtype).eps * ways)


def _again(function: Function, tensors: Sequence[Tensor], count: int) -> Sequence[Any]:
    """The results once more, or nothing where the moved inputs are refused: they have left its domain."""
    try:
        values = function(tensors)
    except REFUSALS:
        return ()
    return values if len(values) == count else ()
