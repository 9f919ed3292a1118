"""Planted ops of neural networks: convolution, pooling, sampling, norms, losses, embeddings, attention, dropout."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tests.tools.bench.claims import EVEN, Base
from tests.tools.bench.ops import with_indices

CONV = (
    Base("conv2d", "ab66,cb33,c", "ac44", functional.conv2d, along="ac", integers=False,
         partials=("S(1), S(1), P(sum) -> P(sum)", "P(avg), R, R -> P(avg)"),
         wrongs=("S(1), S(1), R -> P(sum)", "S(2), R, R -> S(2)", "P(sum), R, R -> P(sum)")),
    Base("conv_transpose1d", "ab8,bc3", "acz", functional.conv_transpose1d, along="ac", folds={"b": "sum"}, integers=False,
         partials=("P(sum), R -> P(sum)",), wrongs=("S(0), S(0) -> P(sum)", "R, S(0) -> S(1)")),
    Base("conv_depthwise", "ab8,b13", "abz", lambda x, w: functional.conv1d(x, w, groups=w.shape[0]), along="ab", integers=False,
         partials=("R, P(sum) -> P(sum)",), wrongs=("S(0), S(0) -> S(0)",)),
)  # fmt: skip


def pool_with_indices(x: Tensor) -> tuple[Tensor, Tensor]:
    out, index = functional.max_pool1d(x, 3, 2, return_indices=True)
    return out, index


POOLING = (
    Base("max_pool1d", "ab9", "ab4", functional.max_pool1d, "int kernel, int stride", (3, 2), along="ab", integers=False,
         partials=("P(max) -> P(max)",), wrongs=("P(min) -> P(min)", "P(sum) -> P(sum)")),
    Base("avg_pool1d", "ab9", "ab4", functional.avg_pool1d, "int kernel, int stride", (3, 2), along="ab", integers=False,
         partials=("P(sum) -> P(sum)",), wrongs=("P(max) -> P(max)",)),
    Base("max_pool_indices", "ab9", "ab4,ab4", pool_with_indices, along="ab", integers=False,
         wrongs=("P(max) -> P(max), R", "P(max) -> P(max), P(max)")),
    Base("adaptive_pool", "abc", "ab3", functional.adaptive_avg_pool1d, "int size", (3,), along="ab", integers=False,
         partials=("P(avg) -> P(avg)",), wrongs=("S(2) -> P(avg)", "S(2) -> S(2)")),
)  # fmt: skip

SAMPLING = (
    Base("upsample_nearest", "ab5", "abz", lambda x: functional.interpolate(x, scale_factor=2.0), along="ab", integers=False,
         partials=("P(max) -> P(max)", "P(sum) -> P(sum)")),
    Base("upsample_linear", "abc", "abz", lambda x: functional.interpolate(x, scale_factor=2.0, mode="linear"), along="ab",
         integers=False, partials=("P(sum) -> P(sum)",), wrongs=("P(max) -> P(max)", "S(2) -> S(2)")),
    Base("pixel_shuffle", "a4bc", "a1yz", functional.pixel_shuffle, "int factor", (2,), along="a", partials=("P(min) -> P(min)",)),
)  # fmt: skip


def batch_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return functional.batch_norm(x, None, None, weight, bias, True, 0.1, eps), x.mean((0, 2))


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def affine_by_channel(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x * weight[:, None] + bias[:, None]


NORMS = (
    Base("batch_norm", "abc,b,b", "abc,b", batch_norm, "float eps", (1e-5,), along="b", integers=False,
         wrongs=("S(0), R, R -> S(0), P(avg)", "R, P(sum), P(sum) -> P(sum), P(sum)", "S(1), S(0), S(0) -> S(1), R",
                 "P(avg), R, R -> P(avg), P(avg)")),
    Base("channel_affine", "abc,b,b", "abc", affine_by_channel, along="abc", integers=False,
         partials=("P(sum), R, P(sum) -> P(sum)", "R, P(avg), R -> P(avg)"), wrongs=("P(sum), R, R -> P(sum)",)),
    Base("group_norm", "a6c", "a6c", functional.group_norm, "int groups", (2,), along="a", integers=False,
         wrongs=("S(1) -> S(1)",)),
    Base("rms_norm", "abc,c", "abc", rms_norm, along="ab", integers=False, partials=("R, P(sum) -> P(sum)",),
         wrongs=("S(2), S(0) -> S(2)", "P(sum), R -> P(sum)", "P(product), R -> P(product)")),
    Base("instance_norm", "abc", "abc", functional.instance_norm, along="ab", integers=False),
)  # fmt: skip


def weighted_nll(x: Tensor, target: Tensor, weight: Tensor, reduction: str) -> Tensor:
    return functional.nll_loss(x, target, weight, reduction=reduction)


def nll_ignoring(x: Tensor, target: Tensor) -> Tensor:
    return functional.nll_loss(x, target, ignore_index=1)


def kl_batchmean(x: Tensor, y: Tensor) -> Tensor:
    return functional.kl_div(x, y, reduction="batchmean")


def mean_squared(x: Tensor, y: Tensor) -> Tensor:
    return (x - y).square().mean()


def huber(x: Tensor, y: Tensor) -> Tensor:
    far = (x - y).abs()
    return torch.where(far < 1, 0.5 * far * far, far - 0.5).sum()


AVERAGED = ("S(0), S(0) -> P(avg)",)
LOSSES = (
    Base("nll_sum", "ab,a<b,+b", "", weighted_nll, "str reduction", ("sum",), integers=False, folds={"a": "sum"},
         partials=("P(sum), R, R -> P(sum)",), wrongs=("S(0), S(0), R -> P(avg)", "S(1), R, S(0) -> P(sum)")),
    Base("nll_none", "ab,a<b,+b", "a", weighted_nll, "str reduction", ("none",), integers=False, along="a",
         partials=("R, R, P(avg) -> P(avg)",), wrongs=("P(sum), R, P(sum) -> P(sum)",)),
    Base("nll_weighted_mean", "ab,a<b,+b", "", weighted_nll, "str reduction", ("mean",), integers=False, sizes=EVEN,
         partials=("P(sum), R, R -> P(sum)",), wrongs=("S(0), S(0), R -> P(avg)", "S(0), S(0), R -> P(sum)", "R, R, P(avg) -> P(avg)")),
    Base("nll_ignoring_mean", "ab,a<4", "", nll_ignoring, integers=False, sizes=EVEN, partials=("P(avg), R -> P(avg)",),
         wrongs=("S(0), S(0) -> P(avg)",)),
    Base("mse_mean_even", "ab,ab", "", mean_squared, integers=False, sizes=EVEN, folds={"a": "avg", "b": "avg"}),
    Base("mse_mean", "ab,ab", "", mean_squared, integers=False, wrongs=(*AVERAGED, "S(0), S(0) -> P(sum)", "S(1), S(1) -> P(avg)")),
    Base("kl_batchmean", "ab,+ab", "", kl_batchmean, integers=False, folds={"b": "sum"},
         wrongs=(*AVERAGED, "S(0), S(0) -> P(sum)", "S(1), S(1) -> P(avg)")),
    Base("huber_sum", "ab,ab", "", huber, integers=False,
         folds={"a": "sum", "b": "sum"}, wrongs=("P(sum), P(sum) -> P(sum)",)),
)  # fmt: skip


def wrapped_lookup(weight: Tensor, index: Tensor) -> Tensor:
    """An index past the end begins anew, so that no piece of the weight refuses it."""
    return weight[index % weight.shape[0]]


def embedding_backward(grad: Tensor, index: Tensor, count: int) -> Tensor:
    return grad.new_zeros((count, grad.shape[1])).index_add(0, index, grad)


EMBEDDING = (
    Base("wrapped_lookup", "ab,c<a", "cb", wrapped_lookup, along="bc", partials=("P(sum), R -> P(sum)",),
         wrongs=("S(0), R -> P(sum)", "S(0), R -> P(max)", "S(0), R -> R")),
    Base("embedding_bag", "ab,cd<a", "cb", lambda weight, index: weight[index].sum(1), along="bc", folds={"d": "sum"},
         partials=("P(avg), R -> P(avg)",), wrongs=("R, S(1) -> P(avg)", "P(max), R -> P(max)")),
    Base("embedding_backward", "ab,a<5", "5b", embedding_backward, "int count", (5,), along="b", folds={"a": "sum"},
         partials=("P(sum), R -> P(sum)",), wrongs=("S(0), S(0) -> P(avg)", "P(max), R -> P(max)")),
)  # fmt: skip


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    later = torch.arange(k.shape[0])[None] > torch.arange(q.shape[0])[:, None]
    return torch.softmax(scores.masked_fill(later, -torch.inf), -1) @ v


def with_logsumexp(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    scores = q @ k.mT
    return torch.softmax(scores, -1) @ v, scores.logsumexp(-1)


ATTENTION = (
    Base("causal_attention", "ab,cb,cd", "ad", causal, along="d", integers=False, partials=("R, R, P(sum) -> P(sum)",),
         wrongs=("S(0), R, R -> S(0)", "R, S(0), S(0) -> P(sum)", "R, S(0), S(0) -> P(avg)")),
    Base("batched_attention", "eab,ecb,ecd", "ead,ea", with_logsumexp, along="ea", integers=False,
         wrongs=("R, R, S(2) -> S(2), S(1)", "R, R, P(sum) -> P(sum), P(sum)", "R, S(1), S(1) -> P(sum), P(sum)"),
         sizes=({"a": 7, "b": 4, "c": 5, "d": 6, "e": 5}, {"a": 6, "b": 4, "c": 6, "d": 4, "e": 4})),
    Base("dropout_with", "ab,?ab", "ab", lambda x, keep, p: x * keep / (1 - p), "float p", (0.25,), along="ab", integers=False,
         partials=("P(sum), R -> P(sum)", "P(max), R -> P(max)")),
)  # fmt: skip

INDEXED_RESULTS = (
    Base("median_dim1", "ab", "a,a", lambda x, dim: with_indices(torch.median(x, dim)), "int dim", (1,), along="a"),
    Base("kthvalue_dim0", "ab", "b,b", lambda x, k, dim: with_indices(torch.kthvalue(x, k, dim)), "int k, int dim", (2, 0), along="b"),
    Base("cummax_dim1", "abc", "abc,abc", lambda x, dim: with_indices(torch.cummax(x, dim)), "int dim", (1,), along="ac",
         wrongs=("P(max) -> P(max), R", "P(max) -> P(max), P(max)")),
    Base("argsort_dim0", "ab", "ab", torch.argsort, "int dim", (0,), along="b"),
    Base("histc", "ab", "6", lambda x: torch.histc(x, 6, -4.0, 4.0), integers=False, folds={"a": "sum", "b": "sum"}),
)  # fmt: skip
