"""Planted ops of backward passes: linear in the gradient that comes in, in nothing else."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.tools.bench.claims import Base


def softmax_backward(grad: Tensor, out: Tensor, dim: int) -> Tensor:
    return out * (grad - (grad * out).sum(dim, keepdim=True))


def matmul_backward(grad: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return grad @ y.mT, x.mT @ grad


def affine_backward(grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return (grad * x).sum(0), grad.sum(0)


def linear_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return grad @ weight, grad.mT @ x, grad.sum(0)


def nll_backward(grad: Tensor, x: Tensor, target: Tensor) -> Tensor:
    return torch.zeros_like(x).scatter(1, target[:, None], -grad[:, None])


def mean_backward(grad: Tensor, x: Tensor) -> Tensor:
    """The mean over dim 1: each gradient goes to a whole row, divided by its length."""
    return (grad[:, None] / x.shape[1]).expand_as(x)


def layer_norm_backward(grad: Tensor, x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    y = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    inner = grad - grad.mean(-1, keepdim=True) - y * (grad * y).mean(-1, keepdim=True)
    return inner / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def conv1d_weight(grad: Tensor, x: Tensor) -> Tensor:
    return torch.nn.grad.conv1d_weight(x, (grad.shape[1], x.shape[1], 3), grad)


def max_backward(grad: Tensor, x: Tensor) -> Tensor:
    """The greatest of each row gets the gradient."""
    return torch.zeros_like(x).scatter(1, x.argmax(1, keepdim=True), grad[:, None])


LINEAR = ("P(sum), R -> P(sum)", "P(avg), R -> P(avg)")
BOTH = ("P(sum), P(sum) -> P(sum)", "R, P(sum) -> P(sum)", "P(max), R -> P(max)")
BACKWARD = (
    Base("threshold_backward", "ab,ab", "ab", lambda g, x: torch.where(x > 0, g, 0), along="ab", partials=LINEAR, wrongs=BOTH[:2]),
    Base("tanh_backward", "ab,ab", "ab", lambda g, y: g * (1 - y * y), along="ab", integers=False, partials=LINEAR, wrongs=BOTH),
    Base("softmax_backward", "ab,ab", "ab", softmax_backward, "int dim", (1,), along="a", integers=False, partials=LINEAR, wrongs=BOTH),
    Base("layer_norm_backward", "abc,abc", "abc", layer_norm_backward, along="ab", integers=False, partials=LINEAR, wrongs=BOTH),
    Base("matmul_backward", "ac,ab,bc", "ab,bc", matmul_backward, along="b",
         partials=("S(0), S(0), R -> S(0), P(sum)", "S(1), R, S(1) -> P(sum), S(1)", "P(sum), R, R -> P(sum), P(sum)"),
         wrongs=("S(0), S(0), R -> S(0), R", "S(0), S(0), R -> S(0), P(avg)", "R, P(sum), R -> P(sum), P(sum)",
                 "S(1), R, S(1) -> S(1), P(sum)")),
    Base("linear_backward", "ac,ab,cb", "ab,cb,c", linear_backward,
         partials=("S(0), S(0), R -> S(0), P(sum), P(sum)", "S(1), R, S(0) -> P(sum), S(0), S(0)", "R, S(1), S(1) -> S(1), S(1), R",
                   "P(avg), R, R -> P(avg), P(avg), P(avg)"),
         wrongs=("S(0), S(0), R -> S(0), P(sum), R", "S(0), S(0), R -> S(0), P(sum), P(avg)", "R, S(1), S(1) -> S(1), S(1), P(sum)",
                 "S(1), R, S(0) -> P(sum), S(0), P(sum)")),
    Base("affine_backward", "ab,ab", "b,b", affine_backward, along="b", folds={"a": "sum"},
         partials=("P(sum), R -> P(sum), P(sum)",), wrongs=("S(0), S(0) -> P(sum), R", "R, P(sum) -> P(sum), P(sum)",
                                                            "S(0), S(0) -> P(avg), P(sum)")),
    Base("nll_backward", "a,ab,a<b", "ab", nll_backward, along="a", partials=("P(sum), R, R -> P(sum)",),
         wrongs=("R, P(sum), R -> P(sum)", "P(max), R, R -> P(max)")),
    Base("mean_backward", "a,ab", "ab", mean_backward, along="a", integers=False, partials=LINEAR, wrongs=("R, S(1) -> S(1)",
         "R, P(sum) -> P(sum)")),
    Base("conv1d_weight", "ac6,ab8", "cb3", conv1d_weight, along="bc", folds={"a": "sum"}, integers=False, partials=LINEAR,
         wrongs=("S(0), S(0) -> P(avg)", "P(sum), P(sum) -> P(sum)")),
    Base("max_backward", "a,ab", "ab", max_backward, along="a", partials=("P(sum), R -> P(sum)", "P(max), R -> P(max)"),
         wrongs=("R, S(1) -> S(1)", "R, P(max) -> P(max)")),
)  # fmt: skip
