"""Planted ops that seem to treat a dim element by element until a value comes that is rare: a tie, a zero, something
large, NaN, infinity; or an operand of another length."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.tools.bench.claims import Base


def tied(x: Tensor) -> Tensor:
    """How many elements of the row are equal to each: 1 where there are no ties."""
    return (x[:, :, None] == x[:, None, :]).sum(-1)


def max_shared(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of a row's greatest element, shared among those that are equally great."""
    best = x == x.amax(1, keepdim=True)
    return grad[:, None] * best / best.sum(1, keepdim=True)


def filled(x: Tensor) -> Tensor:
    """Zeros are replaced by the mean of their column."""
    return torch.where(x == 0, x.mean(0, keepdim=True).expand_as(x), x)


def scaled_down(x: Tensor) -> Tensor:
    """Divided by what makes the greatest of the row 1000, if it is greater."""
    return x / (x.abs().amax(1, keepdim=True) / 1000).clamp(min=1)


def saturated(x: Tensor) -> Tensor:
    return x.clamp(-1e5, 1e5)


def poisoned(x: Tensor) -> Tensor:
    """As a product with a mask of zeros spreads what is not finite over its column."""
    return x + (x * 0).sum(0, keepdim=True)


def any_nan(x: Tensor) -> Tensor:
    return x.isnan().any(1, keepdim=True) | (x > 0)


def gather_any(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(1, index)


TIES = (
    Base("tied", "ab", "ab", tied, along="a", wrongs=("S(1) -> S(1)",)),
    Base("max_shared", "a,ab", "ab", max_shared, along="a", integers=False, partials=("P(sum), R -> P(sum)",),
         wrongs=("R, P(max) -> P(max)", "P(sum), P(avg) -> P(sum)")),
    Base("filled", "ab", "ab", filled, along="b", integers=False, wrongs=("S(0) -> S(0)",)),
    Base("equal_pairs", "ab,ab", "a", lambda x, y: (x == y).all(1), along="a", wrongs=("S(1), S(1) -> P(sum)", "S(1), S(1) -> P(max)")),
)  # fmt: skip
LARGE = (
    Base("scaled_down", "ab", "ab", scaled_down, along="a", integers=False, wrongs=("S(1) -> S(1)",)),
    Base("saturated", "ab", "ab", saturated, along="ab", partials=("P(max) -> P(max)",), wrongs=("P(sum) -> P(sum)",)),
    Base("to_short", "ab", "ab", lambda x: x.to(torch.int16).to(torch.int64), along="ab",
         wrongs=("P(max) -> P(max)", "P(min) -> P(min)")),
)  # fmt: skip
NOT_FINITE = (
    Base("poisoned", "ab", "ab", poisoned, along="b", integers=False, partials=("P(sum) -> P(sum)",), wrongs=("S(0) -> S(0)",)),
    Base("any_nan", "ab", "ab", any_nan, along="a", integers=False, wrongs=("S(1) -> S(1)",)),
)  # fmt: skip
LENGTHS = (
    Base("gather_short", "ab,5c<b", "5c", gather_any, along="c", partials=("P(max), R -> P(max)",),
         wrongs=("S(0), S(0) -> S(0)", "S(0), R -> S(0)", "R, S(0) -> S(0)")),
    Base("add_longer", "ab,3b", "ab", lambda x, y: torch.cat([x[:3] + y, x[3:]]), along="b", partials=("P(sum), P(sum) -> P(sum)",),
         wrongs=("S(0), S(0) -> S(0)", "P(sum), R -> P(sum)", "S(0), R -> S(0)")),
)  # fmt: skip
