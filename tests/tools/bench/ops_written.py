"""Planted ops that write to what they are given, and those that work on lists: in place, out=, foreach, fused."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.tools.bench.claims import Base

Tensors = Sequence[Tensor]

IN_PLACE = (
    Base("add_", "ab,ab", "ab", torch.add, "*, Scalar alpha", kwargs={"alpha": 3}, along="ab", style="inplace",
         partials=("P(sum), P(sum) -> P(sum)", "P(max), R -> P(max)")),
    Base("mul_", "ab,b", "ab", torch.mul, along="ab", style="inplace", partials=("P(avg), R -> P(avg)",)),
    Base("relu_", "abc", "abc", torch.relu, along="abc", style="inplace", partials=("P(max) -> P(max)",)),
    Base("cumsum_", "ab", "ab", torch.cumsum, "int dim", (0,), along="b", style="inplace", partials=("P(sum) -> P(sum)",)),
    Base("accumulate_", "ab,ab", "ab", torch.add, along="ab", style="void", partials=("P(sum), P(sum) -> P(sum)",)),
    Base("running_max_", "ab,ab", "ab", torch.maximum, along="ab", style="void", partials=("P(max), P(max) -> P(max)",)),
    Base("moments_", "b,b,ab", "b,b", lambda m, s, x: (m + x.sum(0), s + x.square().sum(0)), along="b", style="void",
         partials=("P(sum), P(sum), S(0) -> P(sum), P(sum)",)),
)  # fmt: skip

OUT = (
    Base("sub_out", "ab,ab", "ab", torch.sub, along="ab", style="out", partials=("P(sum), P(sum) -> P(sum)", "R, P(max) -> P(min)")),
    Base("matmul_out", "ab,bc", "ac", torch.matmul, along="ac", folds={"b": "sum"}, style="out",
         partials=("P(sum), R -> P(sum)",)),
    Base("amax_out", "ab", "b", torch.amax, "int dim", (0,), along="b", folds={"a": "max"}, style="out"),
    Base("exp_out", "ab", "ab", torch.exp, along="ab", integers=False, style="out", partials=("P(min) -> P(min)",)),
    Base("cumsum_out", "abc", "abc", torch.cumsum, "int dim", (1,), along="ac", style="out"),
)  # fmt: skip


def each_add(xs: Tensors, ys: Tensors) -> list[Tensor]:
    return [x + y for x, y in zip(xs, ys, strict=True)]


def each_mul(xs: Tensors, ys: Tensors) -> list[Tensor]:
    return [x * y for x, y in zip(xs, ys, strict=True)]


def mixed(xs: Tensors) -> list[Tensor]:
    """One element is kept, one is squared: what holds of one is not what holds of the other."""
    return [xs[0] * 2, xs[1].square()]


def each_norm(xs: Tensors) -> list[Tensor]:
    return [x.abs().sum() for x in xs]


FOREACH = (
    Base("foreach_add", "ab,cb,ab,cb", "ab,cb", each_add, along="abc", lists=(2, 2), many=True,
         partials=("P(sum), R, P(sum), R -> P(sum), R", "P(max), P(avg), R, P(avg) -> P(max), P(avg)")),
    Base("foreach_mul", "ab,ab,ab,ab", "ab,ab", each_mul, along="ab", lists=(2, 2), many=True,
         partials=("P(sum), S(0), R, S(0) -> P(sum), S(0)", "R, P(avg), R, R -> R, P(avg)")),
    Base("foreach_mixed", "ab,ab", "ab,ab", mixed, along="ab", listed=True, many=True,
         partials=("P(sum), P(product) -> P(sum), P(product)", "S(1), S(0) -> S(1), S(0)"),
         wrongs=("P(sum), P(sum) -> P(sum), P(sum)", "P(avg), S(0) -> S(0), P(avg)")),
    Base("foreach_norm", "ab,bc", ",", each_norm, listed=True, many=True,
         partials=("S(0), R -> P(sum), R", "R, S(1) -> R, P(sum)", "S(1), S(0) -> P(sum), P(sum)"), wrongs=("S(0), S(1) -> P(sum), R", "S(0), R -> R, P(sum)")),
)  # fmt: skip


def momentum(p: Tensor, buffer: Tensor, grad: Tensor, lr: float, mu: float) -> tuple[Tensor, Tensor]:
    moved = mu * buffer + grad
    return p - lr * moved, moved


def adam(p: Tensor, m: Tensor, v: Tensor, grad: Tensor, lr: float) -> tuple[Tensor, Tensor, Tensor]:
    first, second = 0.9 * m + 0.1 * grad, 0.99 * v + 0.01 * grad.square()
    return p - lr * first / (second.sqrt() + 1e-3), first, second


def fused_momentum(ps: Tensors, buffers: Tensors, grads: Tensors, lr: float) -> list[Tensor]:
    moved = [0.9 * b + g for b, g in zip(buffers, grads, strict=True)]
    return [*(p - lr * m for p, m in zip(ps, moved, strict=True)), *moved]


FUSED = (
    Base("momentum_", "ab,ab,ab", "ab,ab", momentum, "float lr, float mu", (0.5, 0.9), along="ab", integers=False, style="void",
         partials=("P(sum), P(sum), P(sum) -> P(sum), P(sum)",)),
    Base("adam_", "ab,ab,+ab,ab", "ab,ab,ab", adam, "float lr", (0.5,), along="ab", integers=False, style="void",
         wrongs=("P(sum), P(sum), R, P(sum) -> P(sum), P(sum), R", "R, P(avg), R, P(avg) -> R, P(avg), R")),
    Base("fused_momentum_", "ab,cb,ab,cb,ab,cb", "ab,cb,ab,cb", fused_momentum, "float lr", (0.25,), along="abc", integers=False,
         lists=(2, 2, 2), style="void", partials=("S(0), R, S(0), R, S(0), R -> S(0), R, S(0), R",),
         wrongs=("P(sum), R, P(sum), R, P(sum), P(sum) -> P(sum), R, P(sum), R", "R, R, P(sum), R, P(sum), R -> R, R, P(sum), R")),
    Base("fused_lerp_", "ab,ab,ab,ab", "ab,ab", lambda xs, ys: [torch.lerp(x, y, 0.25) for x, y in zip(xs, ys, strict=True)],
         along="ab", integers=False, lists=(2, 2), style="void", partials=("P(avg), S(1), R, S(1) -> P(avg), S(1)",),
         wrongs=("P(sum), R, R, R -> P(sum), R", "R, P(product), R, R -> R, P(product)")),
)  # fmt: skip
