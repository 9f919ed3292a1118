"""Partial values that make their total to the last bit, in whatever order the ranks are folded, and no easier for it.

The parts cancel, change sign, tie, and are zero where the total is not, as those of `partials.parts`; but every number
of a sum or an average is a multiple of the unit of the dtype, where the total is one, so that no sum is rounded.
Where the total is no multiple of it, infinite or NaN, one rank alone holds it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from localtensor.layout.partials import parts
from localtensor.testing.hypothesis_strategies.values import bound, real_dtype, unit


def exact_parts(x: Tensor, kind: str, ranks: int, rng: torch.Generator, *, sparse: bool = False) -> Tensor:
    """`ranks` partial values of x, stacked as [ranks, *x.shape], that fold to x exactly.

    `sparse` asks for the second form: zeros of the parts that are not zeros of the total (sum, avg), ties (min, max),
    ones (product).  An average of a number that is near the end of its dtype has no exact parts, nor has one of
    integers.  Raises `NotReducible` where the reduction has no meaning for the dtype.
    """
    if kind in ("min", "max") or not (x.dtype.is_floating_point or x.dtype.is_complex):
        return parts(x, kind, ranks, rng, sparse=sparse)
    if kind == "product":
        return _factors(x, ranks, rng, sparse)
    if x.is_complex():
        both = exact_parts(torch.view_as_real(x.resolve_conj()), kind, ranks, rng, sparse=sparse)
        return torch.view_as_complex(both)
    return _addends(x * ranks if kind == "avg" else x, ranks, rng, sparse)


def _addends(x: Tensor, ranks: int, rng: torch.Generator, sparse: bool) -> Tensor:
    step = unit(x.dtype)
    units = (x.double() / step).nan_to_num(0.5, 0.5, 0.5)
    tame = (units == units.round()) & (units.abs() <= bound(x.dtype) * ranks / step)
    stack = parts(units.where(tame, 0).long(), "sum", ranks, rng, sparse=sparse, far=step == 2.0**-10)
    stack = (stack * step).to(x.dtype)
    if bool(tame.all()):
        return stack
    alone = torch.arange(ranks).reshape(ranks, *[1] * x.ndim) == torch.randint(0, ranks, x.shape, generator=rng)
    return torch.where(tame, stack, torch.where(alone, x, 0).to(x.dtype))


def _factors(x: Tensor, ranks: int, rng: torch.Generator, sparse: bool) -> Tensor:
    """Signs, and powers of two where no number can leave its range by them; one rank holds what they leave of x."""
    shape = (ranks - 1, *x.shape)
    minus = torch.rand(shape, generator=rng) < 0.5
    powers = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)[torch.randint(0, 3, shape, generator=rng)]
    size = torch.view_as_real(x).abs().amax(-1) if x.is_complex() else x.abs()
    fits = (size <= bound(x.dtype)) & ((size == 0) | (size >= unit(x.dtype))) & (not sparse) & (ranks <= 8)
    powers = torch.where(fits, powers, 1.0)
    others = torch.where(minus, -powers, powers)
    left = (1 / powers.prod(0)).to(real_dtype(x.dtype))
    signed = torch.where(minus.sum(0) % 2 == 1, -x, x)
    stack = torch.cat([others.to(x.dtype), (signed * left)[None]])
    order = torch.rand(stack.shape, generator=rng).argsort(0)
    return stack.gather(0, order)
