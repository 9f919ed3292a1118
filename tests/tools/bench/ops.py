"""The planted ops and what is right about each, in the words of `claims.Base`."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, combinations
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.tools.bench.claims import EVEN, Base

Because = tuple[str, tuple[str, ...]]
ADDING = ("sum", "avg")
IDEMPOTENT = ("avg", "min", "max")
EVERY = ("sum", "avg", "min", "max", "product")


def _rows(count: int, kinds: Iterable[str], chosen: Iterable[tuple[int, ...]]) -> tuple[str, ...]:
    spots = list(chosen)
    return tuple(
        f"{', '.join(f'P({kind})' if i in some else 'R' for i in range(count))} -> P({kind})"
        for kind in kinds
        for some in spots
    )


def each(why: str, count: int, kinds: Iterable[str], slots: Iterable[int]) -> Because:
    """P of one kind in one of these arguments, the rest replicated."""
    return why, _rows(count, kinds, [(slot,) for slot in slots])


def joint(why: str, count: int, kinds: Iterable[str], slots: Iterable[int]) -> Because:
    """P of one kind in all of these arguments at once."""
    return why, _rows(count, kinds, [tuple(slots)])


def any_of(why: str, count: int, kinds: Iterable[str], slots: Iterable[int]) -> Because:
    """P of one kind in some of these arguments."""
    slots = list(slots)
    return why, _rows(count, kinds, chain(*(combinations(slots, n + 1) for n in range(len(slots)))))


LINEAR = each("linear: f(x + y) = f(x) + f(y)", 1, ADDING, [0])
MOVES = each("each element of the result is one element of the argument", 1, EVERY, [0])
ZEROS = each("elements move or become 0, and 0 is its own sum, product, least and greatest", 1, EVERY, [0])
RISES = each("increasing: f(max(x, y)) = max(f(x), f(y))", 1, ("max", "min"), [0])
FACTORS = each("f(x y) = f(x) f(y)", 1, ("product",), [0])
BILINEAR = each("linear in each argument alone", 2, ADDING, [0, 1])
SHIFTS = "adding what all ranks share moves averages, minima and maxima along"
AFFINE = "an average of equal addends is that addend"


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return functional.layer_norm(x, weight.shape, weight, bias, eps)


def variance(x: Tensor, dim: int, correction: int = 1) -> Tensor:
    return (x - x.mean(dim, keepdim=True)).square().sum(dim) / (x.shape[dim] - correction)


def standardise(x: Tensor, dim: int) -> Tensor:
    return (x - x.mean(dim, keepdim=True)) / variance(x, dim).sqrt().unsqueeze(dim)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2), -1) @ v


def gather(x: Tensor, index: Tensor, dim: int) -> Tensor:
    """As torch.gather, but an index that is shorter than x is refused: there, rows that belong together part."""
    if x.shape[1 - dim] != index.shape[1 - dim]:
        raise IndexError(f"{tuple(index.shape)} does not fit {tuple(x.shape)} beside dim {dim}")
    return x.gather(dim, index)


def scatter_add(x: Tensor, index: Tensor, src: Tensor, dim: int) -> Tensor:
    if index.shape != src.shape or x.shape[1 - dim] != index.shape[1 - dim]:
        raise IndexError(f"{tuple(index.shape)} does not fit {tuple(x.shape)} and {tuple(src.shape)}")
    return x.scatter_add(dim, index, src)


def with_indices(found: Any) -> tuple[Tensor, Tensor]:
    return found.values, found.indices


POINTWISE = (
    Base("neg", "ab", "ab", torch.neg, along="ab", partials=("P(sum) -> P(sum)", "P(max) -> P(min)"),
         because=(LINEAR, ("the greatest becomes the least", ("P(min) -> P(max)",)))),
    Base("relu", "ab", "ab", torch.relu, along="ab", partials=("P(max) -> P(max)",), because=(RISES,)),
    Base("exp", "ab", "ab", torch.exp, along="ab", integers=False,
         partials=("P(sum) -> P(product)", "P(max) -> P(max)"), because=(RISES,)),
    Base("tanh", "ab", "ab", torch.tanh, along="ab", integers=False, partials=("P(min) -> P(min)",), because=(RISES,)),
    Base("abs", "ab", "ab", torch.abs, along="ab", partials=("P(product) -> P(product)",), because=(FACTORS,)),
    Base("square", "abc", "abc", torch.square, along="abc", partials=("P(product) -> P(product)",), because=(FACTORS,)),
    Base("clamp", "ab", "ab", torch.clamp, "*, Scalar min, Scalar max", kwargs={"min": -2, "max": 3}, along="ab",
         partials=("P(min) -> P(min)",), because=(RISES,)),
    Base("add", "ab,ab", "ab", torch.add, "*, Scalar alpha=1", kwargs={"alpha": 2}, along="ab",
         partials=("P(sum), P(sum) -> P(sum)", "P(avg), R -> P(avg)", "P(max), R -> P(max)"), because=(
         any_of(AFFINE, 2, ("avg",), [0, 1]), each(SHIFTS, 2, ("min", "max"), [0, 1]))),
    Base("add_row", "ab,b", "ab", torch.add, along="ab", because=(
         any_of(AFFINE, 2, ("avg",), [0, 1]), each(SHIFTS, 2, ("min", "max"), [0, 1]),
         joint("linear in both together", 2, ("sum",), [0, 1]))),
    Base("sub", "ab,ab", "ab", torch.sub, along="ab", partials=("P(sum), P(sum) -> P(sum)", "R, P(max) -> P(min)"), because=(
         any_of(AFFINE, 2, ("avg",), [0, 1]), each(SHIFTS, 2, ("min", "max"), [0]),
         ("what is taken away turns greatest and least around", ("R, P(min) -> P(max)",)))),
    Base("mul", "ab,ab", "ab", torch.mul, along="ab",
         partials=("P(sum), R -> P(sum)", "R, P(avg) -> P(avg)", "P(product), P(product) -> P(product)"), because=(BILINEAR,)),
    Base("div", "ab,!ab", "ab", torch.div, along="ab", integers=False,
         partials=("P(sum), R -> P(sum)", "P(product), P(product) -> P(product)"), because=(
         each("linear in the numerator", 2, ADDING, [0]),)),
    Base("maximum", "ab,ab", "ab", torch.maximum, along="ab", partials=("P(max), P(max) -> P(max)", "P(min), R -> P(min)"),
         because=(any_of("max is associative and idempotent", 2, ("max",), [0, 1]),
                  each("increasing in each argument alone", 2, ("min", "max"), [0, 1]))),
    Base("where", "?ab,ab,ab", "ab", torch.where, along="ab", partials=("R, P(sum), P(sum) -> P(sum)", "R, P(max), R -> P(max)"),
         because=(joint("each element of the result is one of an argument", 3, EVERY, [1, 2]),
                  any_of("and the mean, least or greatest of equal values is that value", 3, IDEMPOTENT, [1, 2]))),
    Base("lerp", "ab,ab", "ab", torch.lerp, "*, Scalar weight", kwargs={"weight": 0.25}, along="ab", integers=False,
         partials=("P(sum), P(sum) -> P(sum)", "P(avg), R -> P(avg)"), because=(
         any_of(AFFINE, 2, ("avg",), [0, 1]), each("increasing in each argument alone", 2, ("min", "max"), [0, 1]))),
)  # fmt: skip

REDUCTIONS = (
    Base("sum_dim1", "ab", "a", torch.sum, "int dim", (1,), along="a", folds={"b": "sum"}, partials=("P(sum) -> P(sum)",),
         because=(LINEAR,)),
    Base("sum_keep", "ab", "1b", lambda x, dim, keepdim: x.sum(dim, keepdim=keepdim), "int dim, *, bool keepdim", (0,),
         {"keepdim": True}, along="b", folds={"a": "sum"}, because=(LINEAR,)),
    Base("mean_dim1", "ab", "a", torch.mean, "int dim", (1,), along="a", integers=False,
         partials=("P(sum) -> P(sum)", "P(avg) -> P(avg)"), because=(LINEAR,)),
    Base("mean_even", "ab", "b", torch.mean, "int dim", (0,), along="b", folds={"a": "avg"}, integers=False, sizes=EVEN,
         because=(LINEAR,)),
    Base("amax_dim0", "ab", "b", torch.amax, "int dim", (0,), along="b", folds={"a": "max"}, partials=("P(max) -> P(max)",)),
    Base("amin_dim1", "abc", "ac", torch.amin, "int dim", (1,), along="ac", folds={"b": "min"}, partials=("P(min) -> P(min)",)),
    Base("amax_keep", "ab", "a1", lambda x, dim, keepdim: x.amax(dim, keepdim=keepdim), "int dim, *, bool keepdim", (1,),
         {"keepdim": True}, along="a", folds={"b": "max"}, because=(("a maximum of maxima", ("P(max) -> P(max)",)),)),
    Base("prod_dim0", "ab", "b", torch.prod, "int dim", (0,), along="b", folds={"a": "product"},
         partials=("P(product) -> P(product)",)),
    Base("norm1_dim1", "ab", "a", lambda x, dim: x.abs().sum(dim), "int dim", (1,), along="a", folds={"b": "sum"}),
    Base("norm2_dim0", "ab", "b", lambda x, dim: torch.linalg.vector_norm(x, 2, dim), "int dim", (0,), along="b", integers=False),
    Base("var_dim0", "ab", "b", variance, "int dim, *, int correction",
         (0,), {"correction": 1}, along="b", integers=False),
    Base("logsumexp_dim1", "ab", "a", torch.logsumexp, "int dim", (1,), along="a", integers=False),
    Base("argmax_dim1", "ab", "a", torch.argmax, "int dim", (1,), along="a"),
    Base("any_dim1", "?ab", "a", torch.any, "int dim", (1,), along="a", folds={"b": "max"}, because=(
         ("a sum of booleans is their `or`, as gloo and nccl reduce them", ("S(1) -> P(sum)",)),)),
    Base("squared_error", "ab,ab", "", lambda x, y: (x - y).square().sum(), folds={"a": "sum", "b": "sum"}),
    Base("bincount", "a<5", "5", lambda x, bins: functional.one_hot(x, bins).sum(0), "int bins", (5,), folds={"a": "sum"}),
)  # fmt: skip

SCANS = (
    Base("cumsum_dim1", "ab", "ab", torch.cumsum, "int dim", (1,), along="a", partials=("P(sum) -> P(sum)",), because=(LINEAR,)),
    Base("cumsum_dim0", "abc", "abc", torch.cumsum, "int dim", (0,), along="bc", because=(LINEAR,)),
    Base("cumprod_dim0", "ab", "ab", torch.cumprod, "int dim", (0,), along="b", partials=("P(product) -> P(product)",)),
    Base("softmax_dim1", "abc", "abc", torch.softmax, "int dim", (1,), along="ac", integers=False),
    Base("standardise_dim0", "ab", "ab", standardise, "int dim", (0,), along="b", integers=False),
    Base("layer_norm", "abc,c,c", "abc", layer_norm, "float eps", (1e-5,), along="ab", integers=False,
         partials=("R, P(sum), P(sum) -> P(sum)",), because=(
         any_of("linear in weight and bias together, and equal means stay", 3, ("avg",), [1, 2]), each(SHIFTS, 3, ("min", "max"), [2]))),
    Base("flip_dim0", "ab", "ab", lambda x, dims: torch.flip(x, [dims]), "int dims", (0,), along="b",
         partials=("P(min) -> P(min)",), because=(MOVES,)),
    Base("roll_dim1", "ab", "ab", torch.roll, "int shifts, int dims", (3, 1), along="a",
         partials=("P(sum) -> P(sum)",), because=(MOVES,)),
    Base("diff_dim1", "ab", "az", lambda x, dim: torch.diff(x, dim=dim), "int dim", (1,), along="a", because=(LINEAR,)),
    Base("tril", "ab", "ab", torch.tril, partials=("P(sum) -> P(sum)", "P(max) -> P(max)"), because=(ZEROS,)),
    Base("pad_dim1", "ab", "az", functional.pad, "int[] pad", ([1, 2],), along="a",
         partials=("P(avg) -> P(avg)",), because=(ZEROS,)),
)  # fmt: skip

SEVERAL = (
    Base("max_dim1", "ab", "a,a", lambda x, dim: with_indices(torch.max(x, dim)), "int dim", (1,), along="a"),
    Base("sort_dim1", "ab", "ab,ab", lambda x, dim: with_indices(torch.sort(x, dim)), "int dim", (1,), along="a"),
    Base("topk_dim0", "ab", "3b,3b", lambda x, k, dim: with_indices(torch.topk(x, k, dim)), "int k, int dim", (3, 0), along="b"),
    Base("aminmax_dim0", "ab", "b,b", lambda x, dim: tuple(torch.aminmax(x, dim=dim)), "int dim", (0,), along="b",
         folds={"a": "min,max"}),
    Base("var_mean_dim1", "ab", "a,a", lambda x, dim: (variance(x, dim), x.mean(dim)), "int dim", (1,), along="a", integers=False),
    Base("sum_and_max_dim1", "ab", "a,a", lambda x, dim: (x.sum(dim), x.amax(dim)), "int dim", (1,), along="a",
         folds={"b": "sum,max"}),
)  # fmt: skip

PRODUCTS = (
    Base("matmul", "ab,bc", "ac", torch.matmul, along="ac", folds={"b": "sum"}, partials=("P(sum), R -> P(sum)", "R, P(avg) -> P(avg)"),
         because=(BILINEAR,)),
    Base("bmm", "abc,acd", "abd", torch.bmm, along="abd", folds={"c": "sum"}, because=(BILINEAR,)),
    Base("outer", "a,b", "ab", torch.outer, along="ab", partials=("R, P(sum) -> P(sum)",), because=(
         BILINEAR, joint("a product of products", 2, ("product",), [0, 1]))),
    Base("linear", "ab,cb,c", "ac", functional.linear, along="ac", partials=("S(1), S(1), P(sum) -> P(sum)", "P(sum), R, P(sum) -> P(sum)"),
         because=(joint("linear in weight and bias together", 3, ("sum",), [1, 2]), any_of(AFFINE, 3, ("avg",), [0, 2]),
                  any_of(AFFINE, 3, ("avg",), [1, 2]), each(SHIFTS, 3, ("min", "max"), [2]))),
    Base("conv1d", "ab8,cb3,c", "acz", functional.conv1d, along="ac", integers=False, partials=("S(1), S(1), P(sum) -> P(sum)",),
         because=(joint("linear in input and bias together", 3, ("sum",), [0, 2]),
                  joint("linear in weight and bias together", 3, ("sum",), [1, 2]), any_of(AFFINE, 3, ("avg",), [0, 2]),
                  any_of(AFFINE, 3, ("avg",), [1, 2]), each(SHIFTS, 3, ("min", "max"), [2]))),
    Base("attention", "ab,cb,cd", "ad", attention, along="ad", integers=False, partials=("R, R, P(sum) -> P(sum)",),
         because=(each("linear in the values", 3, ADDING, [2]),)),
)  # fmt: skip

MOVERS = (
    Base("transpose", "ab", "ba", lambda x, dim0, dim1: x.transpose(dim0, dim1), "int dim0, int dim1", (0, 1), along="ab",
         partials=("P(max) -> P(max)",), because=(MOVES,)),
    Base("permute", "abc", "cab", lambda x, dims: x.permute(dims), "int[] dims", ([2, 0, 1],), along="abc",
         partials=("P(sum) -> P(sum)",), because=(MOVES,)),
    Base("cat_dim0", "ab,cb", "zb", torch.cat, "int dim", (0,), along="b", listed=True,
         partials=("P(sum), P(sum) -> P(sum)", "P(avg), R -> P(avg)"), because=(
         joint("each element of the result is one of an argument", 2, EVERY, [0, 1]),
         any_of("and the mean, least or greatest of equal values is that value", 2, IDEMPOTENT, [0, 1]))),
    Base("stack_dim0", "ab,ab", "2ab", torch.stack, "int dim", (0,), along="ab", listed=True, partials=("R, P(min) -> P(min)",),
         because=(joint("each element of the result is one of an argument", 2, EVERY, [0, 1]),
                  any_of("and the mean, least or greatest of equal values is that value", 2, IDEMPOTENT, [0, 1]))),
    Base("index_select_dim0", "ab,c<a", "cb", lambda x, index, dim: x.index_select(dim, index), "int dim", (0,), along="bc",
         partials=("P(sum), R -> P(sum)",), because=(each("each element of the result is one of x", 2, EVERY, [0]),)),
    Base("gather_dim1", "ab,ac<b", "ac", gather, "int dim", (1,), along="ac",
         partials=("P(min), R -> P(min)",), because=(each("each element of the result is one of x", 2, EVERY, [0]),)),
    Base("embedding", "ab,cd<a", "cdb", lambda weight, index: functional.embedding(index, weight), along="bcd", integers=False,
         partials=("P(avg), R -> P(avg)",), because=(each("each element of the result is one of the weight", 2, EVERY, [0]),)),
    Base("scatter_add_dim0", "ab,cb<a,cb", "ab", scatter_add, "int dim", (0,), along="b",
         partials=("P(sum), S(0), S(0) -> P(sum)", "P(sum), R, P(sum) -> P(sum)"), because=(
         any_of(AFFINE, 3, ("avg",), [0, 2]), each(SHIFTS, 3, ("min", "max"), [0]))),
    Base("one_hot", "a<5", "a5", functional.one_hot, "int classes", (5,), along="a"),
)  # fmt: skip

BASES: tuple[Base, ...] = (*POINTWISE, *REDUCTIONS, *SCANS, *SEVERAL, *PRODUCTS, *MOVERS)
