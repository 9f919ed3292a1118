"""More planted pointwise ops: casts that overflow or round, ties, what depends on the dtype, comparisons, random ones."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.tools.bench.claims import Base


def halves(x: Tensor) -> Tensor:
    """Linear in floating point, and rounded down among the integers."""
    return x / 2 if x.is_floating_point() else x // 2


def to_bytes(x: Tensor) -> Tensor:
    """A cast that wraps: what was least need not be the least afterwards."""
    return (x * 40).to(torch.int64).to(torch.uint8).to(torch.int64)


CASTS = (
    Base("to_int", "ab", "ab", lambda x: x.to(torch.int64), along="ab", integers=False, partials=("P(max) -> P(max)", "P(min) -> P(min)"),
         wrongs=("P(sum) -> P(sum)", "P(avg) -> P(avg)")),
    Base("to_bytes", "ab", "ab", to_bytes, along="ab", integers=False,
         wrongs=("P(max) -> P(max)", "P(min) -> P(min)", "P(sum) -> P(sum)")),
    Base("to_bool", "ab", "ab", lambda x: x.to(torch.bool), along="ab", wrongs=("P(sum) -> P(sum)", "P(max) -> P(max)")),
    Base("halves", "ab", "ab", halves, along="ab", partials=("P(max) -> P(max)",), wrongs=("P(sum) -> P(sum)",)),
    Base("round", "ab", "ab", torch.round, along="ab", integers=False, partials=("P(min) -> P(min)",), wrongs=("P(sum) -> P(sum)",)),
    Base("sign", "abc", "abc", torch.sign, along="abc", partials=("P(product) -> P(product)",),
         wrongs=("P(sum) -> P(sum)", "P(max) -> P(max)")),  # the sign of NaN is 0, which is below that of the other parts
)  # fmt: skip

COMPARED = (
    Base("greater", "ab,ab", "ab", torch.gt, along="ab", wrongs=("P(sum), P(sum) -> P(sum)", "P(max), P(max) -> P(max)",
         "P(min), R -> P(max)", "S(0), S(0) -> R")),
    Base("equals", "ab,b", "ab", torch.eq, along="ab", wrongs=("P(avg), R -> P(max)", "S(0), R -> S(1)")),
    Base("pow_scalar", "ab", "ab", torch.pow, "Scalar exponent", (3,), along="ab",
         partials=("P(max) -> P(max)", "P(product) -> P(product)"), wrongs=("P(sum) -> P(sum)",)),
    Base("remainder", "ab", "ab", torch.remainder, "Scalar other", (3,), along="ab",
         wrongs=("P(sum) -> P(sum)", "P(max) -> P(max)", "P(min) -> P(min)")),
    Base("rsub", "ab", "ab", lambda x, other, alpha: other - alpha * x, "Scalar other, Scalar alpha", (1, 2), along="ab",
         partials=("P(avg) -> P(avg)", "P(max) -> P(min)"), wrongs=("P(sum) -> P(sum)", "P(max) -> P(max)")),
    Base("nan_to_num", "ab", "ab", torch.nan_to_num, along="ab", integers=False),
    Base("hypot", "ab,ab", "ab", torch.hypot, along="ab", integers=False, wrongs=("P(sum), P(sum) -> P(sum)", "P(max), P(max) -> P(max)")),
    Base("addcdiv", "ab,ab,!ab", "ab", lambda x, y, z: x + y / z, along="ab", integers=False,
         partials=("P(sum), P(sum), R -> P(sum)",), wrongs=("P(sum), R, R -> P(sum)", "R, R, P(sum) -> P(sum)")),
)  # fmt: skip

RANDOM = (
    Base("noise_like", "ab", "ab", torch.rand_like, along="ab", integers=False, random=True,
         wrongs=("S(0) -> S(1)", "S(1) -> R", "S(0) -> P(sum)")),
    Base("drawn_rows", "+ab", "a3", lambda x, count: torch.multinomial(x, count, True), "int count", (3,), along="a", integers=False,
         random=True, wrongs=("S(0) -> R", "S(0) -> P(sum)")),
    Base("dropout", "abc", "abc", torch.nn.functional.dropout, "float p", (0.5,), along="abc", integers=False,
         random=True, wrongs=("S(2) -> S(1)", "S(0) -> R")),
)  # fmt: skip
