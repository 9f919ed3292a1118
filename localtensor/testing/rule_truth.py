"""What a function gives for whole tensors, and how far from that a right answer may be.

The tolerance is measured, not guessed: the function's own response to one-ulp noise in its inputs and to gaps between
their elements, for which torch takes other kernels; for single precision also the distance from the same in double.
Integers and booleans are exact.  An element that jumps under such noise (a tie broken the other way) says nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from localtensor.testing.rule_ops import REFUSALS

GENEROUS = 1000.0
"""How many times the measured noise a value may be off; what is wrong is off by far more."""
JUMP = 1e-3
"""A response to one-ulp noise above this share of the scale is a jump, not rounding."""
UNSTABLE = 0.5
"""If more than this share of a result jumps, the call says nothing."""
_WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}
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
    if any(map(is_real, tensors)):
        others += [_again(function, [_nudged(x, turn) for x in tensors], len(values)) for turn in (0, 1)]
    slack = [_slack(value, [o[i] for o in others if o]) for i, value in enumerate(values)]
    if any(x.dtype in _WIDER for x in tensors):
        best = _again(function, [x.to(_WIDER.get(x.dtype, x.dtype)) for x in tensors], len(values))
        slack = [_widened(s, v, best[i] if best else None) for i, (s, v) in enumerate(zip(slack, values, strict=True))]
    return Truth(tuple(values), tuple(slack))


def close(got: Tensor, want: Tensor, slack: Tensor) -> Tensor:
    """Element by element: equal, both NaN, or within the slack."""
    same = (got == want) | slack.isinf()
    if is_real(want):
        same = same | ((got - want).abs() <= slack) | (got.isnan() & want.isnan())
    return same


def rounding(pieces: Sequence[Tensor]) -> float:
    """What it may cost to reduce these: parts can be far larger than their total."""
    if not is_real(pieces[0]):
        return 0.0
    largest = max(float(scale_of(piece)) for piece in pieces)
    return GENEROUS * torch.finfo(pieces[0].dtype).eps * largest


def is_real(x: Tensor) -> bool:
    """Whether its numbers round."""
    return x.dtype.is_floating_point or x.dtype.is_complex


def scale_of(x: Tensor) -> Tensor:
    """The size of the largest finite element, never quite zero."""
    size = x.detach().abs().double().nan_to_num(0.0, 0.0, 0.0)
    return (size.amax() if size.numel() else size.sum()).clamp_min(1e-30)


def _apart(x: Tensor) -> Tensor:
    return torch.stack([x, x], -1)[..., 0]


def _nudged(x: Tensor, turn: int) -> Tensor:
    """Each element up or down by at most one unit in the last place; the other way round in the other turn."""
    if not is_real(x):
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


def _slack(value: Any, others: Sequence[Any]) -> Tensor | None:
    if not isinstance(value, Tensor):
        return None
    others = [o for o in others if isinstance(o, Tensor) and o.shape == value.shape and o.dtype == value.dtype]
    if not is_real(value):
        jumped = [o != value for o in others if not torch.equal(o, value)]
        return torch.where(torch.stack(jumped).any(0), torch.inf, 0.0) if jumped else torch.zeros(())
    scale, eps = scale_of(value), torch.finfo(value.dtype).eps
    floor = GENEROUS * eps * scale
    if not others or not value.numel():
        return floor
    moved = torch.stack([_moved(o, value) for o in others]).amax(0)
    stable = moved <= max(JUMP, 8 * eps) * scale  # one ulp of bfloat16 is more than JUMP
    if bool(stable.all()):
        return GENEROUS * moved.amax() + floor
    return torch.where(stable, GENEROUS * torch.where(stable, moved, 0.0).amax() + floor, torch.inf)


def _moved(other: Tensor, value: Tensor) -> Tensor:
    alike = (other == value) | (other.isnan() & value.isnan())
    return torch.where(alike, 0.0, (other - value).abs().double().nan_to_num(torch.inf))


def _widened(slack: Tensor | None, value: Any, best: Any) -> Tensor | None:
    """Room for single precision's own distance from double."""
    if slack is None or not isinstance(best, Tensor) or best.shape != value.shape or not best.numel():
        return slack
    if not is_real(value):
        return torch.where(best == value, slack, torch.inf)
    apart = (value.to(best.dtype) - best).abs().double().nan_to_num(0.0, 0.0, 0.0)
    return slack + 4 * torch.where(apart <= JUMP * scale_of(value), apart, 0.0).amax()
