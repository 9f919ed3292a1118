"""Planted ops of linear algebra and of Fourier transforms, and products with scalars that matter."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.tools.bench.claims import Base


def hartley(x: Tensor, dim: int) -> Tensor:
    made = torch.fft.fft(x, dim=dim)
    return made.real - made.imag


def rfft(x: Tensor, dim: int) -> Tensor:
    return torch.view_as_real(torch.fft.rfft(x, dim=dim))


def cross(x: Tensor, y: Tensor, dim: int) -> Tensor:
    return torch.linalg.cross(x, y, dim=dim)


def slogdet(x: Tensor) -> tuple[Tensor, Tensor]:
    sign, size = torch.linalg.slogdet(x)
    return sign, size


LINALG = (
    Base("cholesky", "^abb", "abb", torch.linalg.cholesky, along="a", integers=False,
         wrongs=("S(1) -> S(1)", "P(sum) -> P(sum)", "P(max) -> P(max)")),
    Base("inverse", "^abb", "abb", torch.linalg.inv, along="a", integers=False, wrongs=("P(avg) -> P(avg)",)),
    Base("det", "^abb", "a", torch.linalg.det, along="a", integers=False, wrongs=("P(sum) -> P(sum)", "P(product) -> P(product)")),
    Base("solve", "^abb,abc", "abc", torch.linalg.solve, along="ac", integers=False, partials=("R, P(sum) -> P(sum)",),
         wrongs=("P(sum), R -> P(sum)", "R, P(max) -> P(max)")),
    Base("slogdet", "^abb", "a,a", slogdet, along="a", integers=False, wrongs=("P(product) -> P(product), P(sum)",)),
    Base("eigvalsh", "^abb", "ab", torch.linalg.eigvalsh, along="a", integers=False, wrongs=("S(1) -> S(1)", "P(avg) -> P(avg)")),
    Base("matrix_norm", "abc", "a", torch.linalg.matrix_norm, along="a", integers=False,
         wrongs=("S(1) -> P(sum)", "S(2) -> P(max)")),
    Base("trace", "abb", "a", lambda x: x.diagonal(0, 1, 2).sum(-1), along="a", partials=("P(sum) -> P(sum)",),
         wrongs=("S(1) -> P(sum)", "S(2) -> P(sum)")),
    Base("cross", "a3,a3", "a3", cross, "int dim", (1,), along="a", partials=("P(sum), R -> P(sum)", "R, P(avg) -> P(avg)")),
    Base("tri_solve", "^bb,bc", "bc", lambda m, y: torch.linalg.solve_triangular(m.triu(), y, upper=True), along="c", integers=False,
         partials=("R, P(avg) -> P(avg)",), wrongs=("P(sum), R -> P(sum)", "R, P(max) -> P(max)")),
)  # fmt: skip

FOURIER = (
    Base("hartley_dim0", "ab", "ab", hartley, "int dim", (0,), along="b", integers=False, partials=("P(sum) -> P(sum)",)),
    Base("hartley_neg", "abc", "abc", hartley, "int dim", (-1,), along="ab", integers=False, partials=("P(avg) -> P(avg)",)),
    Base("rfft_dim1", "ab", "az2", rfft, "int dim", (1,), along="a", integers=False, partials=("P(sum) -> P(sum)",)),
    Base("fft2_real", "abb", "abb", lambda x: torch.fft.fft2(x).real, along="a", integers=False, partials=("P(avg) -> P(avg)",),
         wrongs=("S(1) -> S(1)", "S(2) -> S(2)")),
)  # fmt: skip


def addmm(bias: Tensor, x: Tensor, y: Tensor, beta: float, alpha: float) -> Tensor:
    return beta * bias + alpha * (x @ y)


SCALED = (
    Base("addmm", "c,ab,bc", "ac", addmm, "float beta, float alpha", (0.5, 2.0), along="ac", integers=False,
         partials=("P(sum), S(1), S(0) -> P(sum)", "P(sum), P(sum), R -> P(sum)"),
         wrongs=("R, S(1), S(0) -> P(sum)", "R, P(sum), R -> P(sum)", "P(avg), S(1), S(0) -> P(avg)")),
    Base("baddbmm", "abd,abc,acd", "abd", addmm, "float beta, float alpha", (-1.0, 3.0), along="abd", integers=False,
         partials=("P(sum), S(2), S(1) -> P(sum)",), wrongs=("R, S(2), S(1) -> P(sum)", "P(sum), R, R -> P(sum)")),
    Base("addmv", "a,ab,b", "a", lambda x, m, v, beta, alpha: beta * x + alpha * (m @ v), "float beta, float alpha", (0.2, 0.6),
         along="a", integers=False, partials=("P(sum), S(1), S(0) -> P(sum)",), wrongs=("R, S(0), R -> S(0)", "R, S(1), S(0) -> P(sum)")),
    Base("dot", "a,a", "", torch.dot, folds={"a": "sum"}, partials=("P(sum), R -> P(sum)",), wrongs=("S(0), S(0) -> P(avg)",)),
    Base("einsum", "abc,cd", "bad", lambda x, y: torch.einsum("abc,cd->bad", x, y), along="abd", folds={"c": "sum"},
         partials=("R, P(avg) -> P(avg)",)),
    Base("addcmul", "ab,ab,b", "ab", lambda x, y, z, value: x + value * y * z, "*, float value", kwargs={"value": -2.0}, along="ab",
         integers=False, partials=("P(sum), P(sum), R -> P(sum)", "P(avg), R, P(avg) -> P(avg)"), wrongs=("R, P(sum), R -> P(sum)",)),
)  # fmt: skip
