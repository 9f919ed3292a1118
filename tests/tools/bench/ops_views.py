"""Planted ops that move elements or pick some: views, slices, factories, lists of results, indices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.tools.bench.claims import EVEN, Base

TWOS = ({"a": 6, "b": 8, "c": 7}, {"a": 10, "b": 6, "c": 8})

VIEWS = (
    Base("flatten_even", "ab", "z", lambda x: x.flatten(), sizes=EVEN, partials=("S(0) -> S(0)", "P(sum) -> P(sum)"),
         wrongs=("S(1) -> S(0)",)),
    Base("flatten", "abc", "zc", lambda x: x.flatten(0, 1), along="c", partials=("P(max) -> P(max)",),
         wrongs=("S(0) -> S(0)", "S(1) -> S(0)", "S(2) -> S(0)")),
    Base("unflatten", "ab", "2yb", lambda x, dim: x.unflatten(dim, (2, -1)), "int dim", (0,), along="b", sizes=TWOS,
         partials=("P(avg) -> P(avg)",), wrongs=("S(0) -> S(1)", "S(0) -> S(0)", "S(1) -> S(1)")),
    Base("squeeze", "a1b", "ab", lambda x, dim: x.squeeze(dim), "int dim", (1,), along="ab", partials=("P(product) -> P(product)",),
         wrongs=("S(2) -> S(0)",)),
    Base("unsqueeze_neg", "ab", "a1b", lambda x, dim: x.unsqueeze(dim), "int dim", (-2,), along="ab", partials=("P(min) -> P(min)",),
         wrongs=("S(1) -> S(1)", "S(0) -> S(2)")),
    Base("select", "abc", "ac", lambda x, dim, at: x.select(dim, at), "int dim, int at", (1, -1), along="ac",
         partials=("P(sum) -> P(sum)", "P(max) -> P(max)"), wrongs=("S(1) -> R", "S(1) -> P(sum)", "S(2) -> S(0)")),
    Base("narrow", "ab", "5b", torch.narrow, "int dim, int start, int length", (0, 1, 5), along="b", partials=("P(avg) -> P(avg)",)),
    Base("every_second", "ab", "az", lambda x: x[:, ::2], along="a", partials=("P(product) -> P(product)",), wrongs=("S(1) -> S(1)",)),
    Base("diagonal", "aab", "ba", lambda x: x.diagonal(0, 0, 1), along="b", partials=("P(sum) -> P(sum)",),
         wrongs=("S(0) -> S(1)", "S(2) -> S(1)")),
    Base("repeat_rows", "ab", "zb", lambda x: x.repeat(2, 1), along="b", partials=("P(max) -> P(max)",), wrongs=("S(0) -> S(0)",)),
    Base("interleave", "ab", "zb", lambda x: x.repeat_interleave(2, 0), along="b", sizes=EVEN, partials=("S(0) -> S(0)",),
         wrongs=("S(0) -> S(1)",)),
    Base("rot90", "abc", "bac", torch.rot90, along="ac", partials=("P(sum) -> P(sum)",), wrongs=("S(1) -> S(0)",)),
    Base("broadcast_row", "1b,ab", "ab", torch.mul, along="b", partials=("R, S(0) -> S(0)", "P(sum), R -> P(sum)"),
         wrongs=("P(sum), S(0) -> S(0)", "R, S(1) -> S(1)")),
)  # fmt: skip


def counted(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0])[:, None] + torch.zeros_like(x)


FACTORIES = (
    Base("ones_like", "ab", "ab", torch.ones_like, along="ab", partials=("P(max) -> R", "P(sum) -> P(avg)"),
         wrongs=("P(sum) -> P(sum)", "P(max) -> P(sum)", "S(0) -> R")),
    Base("zeros_like", "ab", "ab", torch.zeros_like, along="ab", partials=("P(sum) -> P(sum)",), wrongs=("S(1) -> P(sum)",)),
    Base("full_like", "abc", "abc", torch.full_like, "Scalar fill", (3,), along="abc", partials=("P(avg) -> R", "P(sum) -> P(min)"),
         wrongs=("P(sum) -> P(sum)", "P(product) -> P(product)")),
    Base("arange_like", "ab", "ab", counted, along="b", wrongs=("S(0) -> S(0)", "P(sum) -> P(sum)")),
)  # fmt: skip


def split_at_three(x: Tensor, dim: int) -> list[Tensor]:
    return [x.narrow(dim, 0, 3), x.narrow(dim, 3, x.shape[dim] - 3)]


def interleaved(xs: Sequence[Tensor]) -> list[Tensor]:
    return [xs[1], xs[0]]


LISTS = (
    Base("split_dim1", "ab", "a3,az", split_at_three, "int dim", (1,), along="a", many=True, partials=("P(sum) -> P(sum), P(sum)",),
         wrongs=("S(1) -> S(1), S(1)", "P(sum) -> P(sum), R", "S(0) -> S(0), R")),
    Base("unbind_dim0", "3ab", "ab,ab,ab", lambda x: [*x.unbind(0)], along="ab", many=True,
         partials=("P(max) -> P(max), P(max), P(max)",),
         wrongs=("S(1) -> S(0), S(1), S(0)", "P(sum) -> P(sum), R, P(sum)", "S(2) -> S(1), S(1), S(0)")),
    Base("swap", "ab,cb", "cb,ab", interleaved, along="abc", listed=True, many=True,
         partials=("P(sum), R -> R, P(sum)", "S(1), P(max) -> P(max), S(1)"),
         wrongs=("P(sum), R -> P(sum), R", "S(0), S(1) -> S(0), S(1)")),
    Base("chunk_even", "ab", "yb,zb", lambda x: [*x.chunk(2)], along="b", many=True, sizes=EVEN,
         wrongs=("S(0) -> S(0), S(0)", "P(sum) -> P(sum), P(max)")),
)  # fmt: skip


def index_put(x: Tensor, index: Tensor, values: Tensor) -> Tensor:
    return x.index_copy(0, index[:1], values[:1])


def take_shifted(x: Tensor, index: Tensor) -> Tensor:
    """Positions past the end are the last row: no piece refuses them."""
    return x[index.clamp(max=x.shape[0] - 1)]


INDEXED = (
    Base("index_add", "ab,c<a,cb", "ab", lambda x, i, y, dim: x.index_add(dim, i, y), "int dim", (0,), along="b",
         partials=("P(sum), S(0), S(0) -> P(sum)", "P(avg), R, R -> P(avg)"),
         wrongs=("R, S(0), S(0) -> P(sum)", "R, R, P(sum) -> P(sum)", "R, S(0), S(0) -> R")),
    Base("index_fill", "ab,c<a", "ab", lambda x, i, dim, value: x.index_fill(dim, i, value), "int dim, Scalar value", (0, 2), along="b",
         partials=("P(max), R -> P(max)",), wrongs=("P(sum), R -> P(sum)", "R, S(0) -> P(max)", "P(product), R -> P(product)")),
    Base("masked_fill", "ab,?ab", "ab", torch.masked_fill, "Scalar value", (-1,), along="ab", partials=("P(avg), R -> P(avg)",),
         wrongs=("P(sum), R -> P(sum)",)),
    Base("clamped_take", "ab,c<a", "cb", take_shifted, along="bc", partials=("P(product), R -> P(product)",),
         wrongs=("S(0), R -> P(sum)", "S(0), R -> P(max)", "S(0), S(0) -> S(0)")),
    Base("bucketize", "ab,c", "ab", lambda x, bounds: (x[..., None] > bounds).sum(-1), along="ab", folds={"c": "sum"},
         wrongs=("R, S(0) -> P(max)", "P(max), R -> P(sum)")),
    Base("select_scatter", "ab,b", "ab", lambda x, y, at: x.select_scatter(y, 0, at), "int at", (1,), along="b",
         partials=("P(sum), P(sum) -> P(sum)", "P(avg), R -> P(avg)"), wrongs=("P(sum), R -> P(sum)", "S(0), R -> S(0)")),
    Base("slice_scatter", "ab,3b", "ab", lambda x, y: x.slice_scatter(y, 0, 1, 4), along="b", partials=("P(max), R -> P(max)",),
         wrongs=("R, P(sum) -> P(sum)", "S(0), R -> S(0)")),
    Base("scatter_max", "ab,cb<a,cb", "ab", lambda x, i, y: x.scatter_reduce(0, i, y, "amax"), along="b",
         partials=("P(max), S(0), S(0) -> P(max)", "P(max), R, P(max) -> P(max)"), wrongs=("R, S(0), S(0) -> P(sum)", "P(min), R, P(min) -> P(min)")),
)  # fmt: skip
