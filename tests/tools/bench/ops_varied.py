"""Ops whose rule depends on a scalar, and the typical mistakes about it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.tools.bench.claims import EVEN, Base
from tests.tools.bench.varied import Mistake, Varied

ABC = "abc"


def without(dims: Sequence[int], keep: bool = False, letters: str = ABC) -> str:
    """The letters of a result from which these dims went, or stayed with one element."""
    gone = {dim % len(letters) for dim in dims} or set(range(len(letters)))
    return "".join("1" * keep if i in gone else letter for i, letter in enumerate(letters))


def reduced(
    how: str, func: Callable[..., Any], scalars: str, args: tuple[Any, ...], dims: Sequence[int], keep: bool = False
) -> Base:
    left = without(dims, keep)
    gone = {letter: how for letter in ABC if letter not in left and how}
    return Base("reduced", ABC, left, func, scalars, args, along="".join(c for c in ABC if c in left), folds=gone)


def sums(x: Tensor, dim: int, keepdim: bool) -> Tensor:
    return x.sum(dim, keepdim=keepdim)


def maxima(x: Tensor, dims: list[int]) -> Tensor:
    return x.amax(dims)


def arg(x: Tensor, dim: int | None) -> Tensor:
    return x.argmax(dim)


DIMS = (
    Varied("sum_of", tuple(reduced("sum", sums, "int dim, bool keepdim", (d, k), [d], k)
                           for d, k in ((0, False), (1, False), (-1, False), (0, True), (-2, True))), (
        Mistake("a negative dim is compared as it is spelled", {4: ("S(0) -> S(0)", "S(1) -> S(1)")}),
        Mistake("a negative dim is taken for the first one", {2: 0}),
        Mistake("keepdim is ignored", {3: 0, 4: 1}),
        Mistake("keepdim is taken for granted", {0: 3, 1: 4}),
        Mistake("the dims after the removed one keep their number", {0: ("S(0) -> P(sum)", "S(1) -> S(1)")}))),
    Varied("amax_of", tuple(reduced("max", maxima, "int[] dims", (d,), d) for d in ([0], [0, 2], [-1], [])), (
        Mistake("only the first of the dims counts", {1: ("S(0) -> P(max)", "S(2) -> S(0)")}),
        Mistake("an empty list means no dim", {3: ("S(0) -> R", "S(2) -> R")}),
        Mistake("a negative dim is compared as it is spelled", {2: ("S(0) -> S(0)", "S(1) -> S(1)", "S(2) -> S(1)")}))),
    Varied("argmax_of", tuple(reduced("", arg, "int? dim", (d,), [] if d is None else [d]) for d in (0, None, -1)), (
        Mistake("dim=None is taken for the first dim", {1: ("S(1) -> R", "S(2) -> P(max)")}),
        Mistake("a negative dim is taken for another", {2: 0}))),
)  # fmt: skip


def scanned(dim: int) -> Base:
    kept = "".join(c for i, c in enumerate(ABC) if i != dim % 3)
    return Base("cumsum_of", ABC, ABC, torch.cumsum, "int dim", (dim,), along=kept, partials=("P(sum) -> P(sum)",))


def flipped(dims: list[int]) -> Base:
    kept = "".join(c for i, c in enumerate(ABC) if i not in {d % 3 for d in dims})
    return Base("flip_of", ABC, ABC, torch.flip, "int[] dims", (dims,), along=kept, partials=("P(max) -> P(max)",))


def swapped(first: int, second: int) -> Base:
    letters = [*ABC]
    letters[first], letters[second] = letters[second], letters[first]
    run = torch.transpose
    return Base("transpose_of", ABC, "".join(letters), run, "int d, int e", (first, second), along=ABC)


def unsqueezed(dim: int) -> Base:
    letters = ["a", "b"]
    letters.insert(dim % 3, "1")
    return Base("unsqueeze_of", "ab", "".join(letters), lambda x, d: x.unsqueeze(d), "int dim", (dim,), along="ab")


def joined(dim: int) -> Base:
    tensors, outs = ("ab,cb", "zb") if dim % 2 == 0 else ("ab,ac", "az")
    along = "b" if dim % 2 == 0 else "a"
    return Base("cat_of", tensors, outs, torch.cat, "int dim", (dim,), along=along, listed=True)


PLACES = (
    Varied("cumsum_of", tuple(map(scanned, (0, 1, -1))), (
        Mistake("a negative dim is compared as it is spelled", {2: ("S(0) -> S(0)", "S(2) -> S(2)")}),
        Mistake("every dim is taken for the first", {1: 0, 2: 0}))),
    Varied("flip_of", tuple(map(flipped, ([0], [0, 1], [-1]))), (
        Mistake("only the first of the dims counts", {1: 0}),
        Mistake("a negative dim is compared as it is spelled", {2: ("S(1) -> S(1)", "S(2) -> S(2)")}))),
    Varied("transpose_of", tuple(swapped(*pair) for pair in ((0, 1), (1, 2), (0, -1))), (
        Mistake("a negative dim is compared as it is spelled", {2: ("S(0) -> S(0)", "S(2) -> S(2)")}),
        Mistake("the dims are ignored", {1: 0, 2: 0}))),
    Varied("unsqueeze_of", tuple(map(unsqueezed, (0, 1, -1))), (
        Mistake("a negative dim counts the dims before", {2: 1}),
        Mistake("the dims after the new one keep their number", {0: 2}))),
    Varied("cat_of", tuple(map(joined, (0, 1, -1))), (
        Mistake("a negative dim is compared as it is spelled", {2: ("S(0), S(0) -> S(0)", "S(1), S(1) -> S(1)")}),
        Mistake("the dim is ignored", {1: 0}))),
)  # fmt: skip


def normed(order: float, how: str) -> Base:
    run = torch.linalg.vector_norm
    return Base(
        "norm_of",
        "ab",
        "a",
        lambda x, order: run(x, order, 1),
        "float order",
        (order,),
        along="a",
        integers=False,
        folds={"b": how} if how else {},
    )


def powered(exponent: int, partials: tuple[str, ...]) -> Base:
    return Base("pow_of", "ab", "ab", torch.pow, "int exponent", (exponent,), along="ab", partials=partials)


def scaled(factor: float, partials: tuple[str, ...]) -> Base:
    return Base(
        "mul_of", "ab", "ab", torch.mul, "float factor", (factor,), along="ab", integers=False, partials=partials
    )


def added(alpha: int, partials: tuple[str, ...]) -> Base:
    return Base(
        "add_of", "ab,ab", "ab", torch.add, "*, int alpha", kwargs={"alpha": alpha}, along="ab", partials=partials
    )


def padded(value: float, partials: tuple[str, ...]) -> Base:
    return Base(
        "pad_of",
        "ab",
        "az",
        lambda x, value: torch.nn.functional.pad(x, [1, 2], value=value),
        "float value",
        (value,),
        along="a",
        integers=False,
        partials=partials,
    )


def lost(reduction: str, outs: str, folds: dict[str, str]) -> Base:
    run = torch.nn.functional.l1_loss

    def loss(x: Tensor, y: Tensor, reduction: str) -> Tensor:
        return (x - y).abs().flatten() if reduction == "flat" else run(x, y.expand_as(x), reduction=reduction)

    return Base(
        "loss_of",
        "ab,1b",
        outs,
        loss,
        "str reduction",
        (reduction,),
        along="" if folds else "ab",
        integers=False,
        sizes=EVEN,
        partials=tuple(f"S({'ab'.index(c)}), {'R' if c == 'a' else 'S(1)'} -> P({how})" for c, how in folds.items())
        if folds
        else (),
    )


def put(reduce: str, kind: str) -> Base:
    def run(x: Tensor, index: Tensor, y: Tensor, reduce: str) -> Tensor:
        return x.scatter_reduce(0, index, y, reduce)

    return Base(
        "reduce_of",
        "ab,cb<a,cb",
        "ab",
        run,
        "str reduce",
        (reduce,),
        along="b",
        partials=(f"P({kind}), S(0), S(0) -> P({kind})",),
    )


SUMS, UP, DOWN = ("P(sum) -> P(sum)",), ("P(max) -> P(max)",), ("P(max) -> P(min)", "P(min) -> P(max)")
VALUES = (
    Varied("norm_of", (normed(1.0, "sum"), normed(float("inf"), "max"), normed(float("-inf"), "min"), normed(2.0, "")), (
        Mistake("an infinite order is taken for 1", {1: 0}),
        Mistake("any order is taken for 1", {3: 0}),
        Mistake("the sign of infinity is ignored", {2: 1}))),
    Varied("pow_of", (powered(1, SUMS), powered(2, ("P(product) -> P(product)",)), powered(3, UP)), (
        Mistake("the exponent is taken for 1", {1: 0}),
        Mistake("an even exponent is taken for an odd one", {1: 2}))),
    Varied("mul_of", (scaled(2.0, (*SUMS, *UP)), scaled(-3.0, (*SUMS, *DOWN))), (
        Mistake("the sign of the factor is ignored", {1: 0}),)),
    Varied("add_of", (added(1, ("R, P(max) -> P(max)",)), added(-2, ("R, P(max) -> P(min)",)), added(0, ("P(sum), R -> P(sum)",))), (
        Mistake("the sign of alpha is ignored", {1: 0}),
        Mistake("alpha is taken for 0", {0: 2}),
        Mistake("alpha is ignored", {0: 1, 2: 1}))),
    Varied("pad_of", (padded(0.0, SUMS), padded(1.5, ("P(avg) -> P(avg)",))), (
        Mistake("the value that is filled in is taken for 0", {1: 0}),)),
    Varied("loss_of", (lost("mean", "", {"a": "avg", "b": "avg"}), lost("sum", "", {"a": "sum", "b": "sum"})), (
        Mistake("a mean is taken for a sum", {0: 1}),
        Mistake("a sum is taken for a mean", {1: 0}))),
    Varied("reduce_of", (put("sum", "sum"), put("amax", "max"), put("amin", "min"), put("prod", "product")), (
        Mistake("the greatest are taken for sums", {1: 0}),
        Mistake("the reduction is ignored", {0: 1, 2: 1, 3: 1}),
        Mistake("a product is taken for a sum", {3: 0}))),
)  # fmt: skip

VARIED_FAMILIES: dict[str, tuple[Varied, ...]] = {
    "dims as called": DIMS,
    "places as called": PLACES,
    "scalars as called": VALUES,
}
VARIED: tuple[Varied, ...] = tuple(one for some in VARIED_FAMILIES.values() for one in some)
