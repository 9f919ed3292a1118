"""Measured tolerances: the distance from the exact result that a correct result may have.

A function runs again with its inputs moved by one ulp, and in double precision; the differences of its results are
their rounding noise.  Dtypes that do not round are exact.  An element that jumps under such noise (a tie broken
otherwise) shows nothing.

A slack is float64: a scalar, or one number for each element of a result, infinite where it jumps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

NOISE_FACTOR = 1000.0
"""The tolerance as a multiple of the measured noise; wrong values differ by far more."""
HALF_NOISE_FACTOR = 8.0
"""The same for dtypes of two bytes: a thousand units of bfloat16 are eight times the number, and every value would pass."""
JUMP_SHARE = 1e-3
"""A response to one-ulp noise above this share of the scale is a jump, not rounding."""
MAX_JUMP_SHARE = 0.5
"""If more than this share of a result jumps, the call shows nothing."""
DOUBLE_OF = {
    torch.float32: torch.float64, torch.complex64: torch.complex128, torch.bfloat16: torch.float64,
    torch.float16: torch.float64,
}  # fmt: skip
"""Dtypes of less than double precision, and the double precision dtypes that measure their errors."""


def noise_factor(eps: float) -> float:
    """The multiple of the measured noise that is tolerated in a dtype of this epsilon."""
    return NOISE_FACTOR if eps < 1e-5 else HALF_NOISE_FACTOR


def is_inexact(x: Tensor) -> bool:
    """Whether its dtype rounds.  torch does not compute with floats of one byte: they are exact."""
    return (x.dtype.is_floating_point and not is_float8(x.dtype)) or x.dtype.is_complex


def is_float8(dtype: torch.dtype) -> bool:
    """Whether it is a float of one byte, for which torch has next to no kernels."""
    return dtype.is_floating_point and dtype.itemsize == 1


def all_finite(x: Tensor) -> bool:
    """Whether no element is infinite or NaN; floats of one byte are converted first."""
    return bool((x.double() if is_float8(x.dtype) else x).isfinite().all())


def max_abs(x: Tensor) -> Tensor:
    """The largest finite absolute value, at least 1e-30; float64 without dims."""
    size = x.detach().abs()
    if size.numel() and bool((largest := size.amax().double()).isfinite()):
        return largest.clamp_min(1e-30)
    size = size.double().nan_to_num(0.0, 0.0, 0.0)
    return (size.amax() if size.numel() else size.sum()).clamp_min(1e-30)


def measured_slack(value: object, others: Sequence[object], coarse: float = 0.0) -> Tensor | None:
    """The slack of a result, from the results for moved inputs; None if it is no tensor.  A text that is always the same has none, 0.

    `coarse` is the unit in the last place of a number near 1 of the coarsest dtype on the way, if that is not the result's.
    """
    if isinstance(value, str) and all(o == value for o in others):
        return torch.zeros(())
    if not isinstance(value, Tensor):
        return None
    tensors = [o for o in others if isinstance(o, Tensor)]
    alike = [o for o in tensors if o.shape == value.shape and o.dtype == value.dtype]
    if not is_inexact(value):
        jumped = [jump for jump in (o != value for o in alike) if bool(jump.any())]
        if not jumped:
            return torch.zeros((), device=value.device)
        return torch.where(torch.stack(jumped).any(0), torch.inf, 0.0)
    scale, eps = max_abs(value), torch.finfo(value.dtype).eps
    floor, eps = noise_factor(eps) * eps * scale, max(eps, coarse)
    factor = noise_factor(eps)
    if not alike or not value.numel():
        return floor
    limit = max(JUMP_SHARE, 8 * eps) * scale  # one ulp of bfloat16 is more than JUMP
    farthest = torch.stack([(o - value).abs().amax() for o in alike]).amax().double()
    if bool(farthest <= limit):  # not so if it is NaN
        return factor * farthest + floor
    moved = torch.stack([_distance(o, value) for o in alike]).amax(0)
    stable = moved <= limit
    if bool(stable.all()):
        return factor * moved.amax() + floor
    return torch.where(stable, factor * torch.where(stable, moved, 0.0).amax() + floor, torch.inf)


def _distance(other: Tensor, value: Tensor) -> Tensor:
    alike = (other == value) | (other.isnan() & value.isnan())
    return torch.where(alike, 0.0, (other - value).abs().double().nan_to_num(torch.inf))


def widen_slack(slack: Tensor | None, value: object, best: object) -> Tensor | None:
    """The slack plus the dtype's own distance from `best`, the result in double precision; None for a text that is another one there."""
    if not isinstance(value, Tensor):
        return slack if best is None or best == value else None
    if slack is None or not isinstance(best, Tensor) or best.shape != value.shape or not best.numel():
        return slack
    if not is_inexact(value):
        return torch.where(best == value, slack, torch.inf)
    apart = (value.to(best.dtype) - best).abs()
    near = max(JUMP_SHARE, 8 * torch.finfo(value.dtype).eps) * max_abs(value)
    if bool((farthest := apart.amax().double()) <= near):  # not so if it is NaN
        return slack + 4 * farthest
    apart = apart.double().nan_to_num(0.0, 0.0, 0.0)
    return slack + 4 * torch.where(apart <= near, apart, 0.0).amax()


def within_slack(got: Tensor, want: Tensor, slack: Tensor) -> Tensor:
    """For each element, whether it is equal, both are NaN, or it is within the slack."""
    same = (got == want) | slack.isinf()
    if is_inexact(want):
        same = same | ((got - want).abs() <= slack)
    return same | (got.isnan() & want.isnan()) if want.dtype.is_floating_point or want.dtype.is_complex else same


def all_within_slack(got: Tensor, want: Tensor, slack: Tensor) -> bool:
    """Whether all elements are as `within_slack` says."""
    if torch.equal(got, want):
        return True
    if slack.dim() == 0 and is_inexact(want) and got.numel() and got.shape == want.shape:
        farthest = (got - want).abs().amax()
        if bool(farthest.isfinite()):
            return bool(farthest[None] <= slack)
    return bool(within_slack(got, want, slack).all())
