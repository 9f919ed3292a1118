"""Reductions: sums, means, products, extremes, truth values, counts; and those of which pieces say nothing.

`sum` of a piece is a part of the sum, `amax` one of the maximum.  A mean of means is the mean only if all ranks have as
much, and a variance, a median or a place (`argmax`) of pieces is a part of nothing: there only dims that stay are cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch.distributed.tensor import Partial

from strategies.ops.lib.linear_parts import linear, through
from strategies.ops.lib.overload_variants import with_variants
from strategies.ops.lib.reduced_dims import cuts, folds, kept, passes
from strategies.ops.reduce.vector_norms import NORMS
from strategies.ops.semantics.rulebook import Ask, Entry, Line, rules

SUM, PRODUCT, MAX, MIN, AVG = (Partial(kind) for kind in ("sum", "product", "max", "min", "avg"))


def adds(ask: Ask, dims: str = "dim") -> Iterator[Line]:
    """sum: the pieces' sums are parts of it, and it is linear."""
    places = kept(ask, dims)
    yield from cuts(ask, places)
    yield from folds(ask, places, [SUM])
    yield from linear(ask, 0)


def averages(ask: Ask) -> Iterator[Line]:
    """mean: the average of averages, if all are of as many."""
    places = kept(ask)
    yield from cuts(ask, places)
    yield from folds(ask, places, [AVG], cut="even")
    yield from linear(ask, 0)


def multiplies(ask: Ask, dims: str = "dim", *, none_is_none: bool = False) -> Iterator[Line]:
    """prod: factors may come in any order, those of one element, too; booleans are 0 and 1 in every dtype.

    Not so complex ones: where a product overflows, it hangs on the order whether it is infinite or NaN.
    """
    places = kept(ask, dims, none_is_none=none_is_none)
    yield from cuts(ask, places)
    before, after = ask.tensors[0].dtype, _after(ask)
    if not after.is_complex:
        yield from folds(ask, places, [PRODUCT])
        if before in (torch.bool, after):
            yield from passes(ask, [PRODUCT])


def extremes(ask: Ask, part: Partial, dims: str = "dim") -> Iterator[Line]:
    """amax and amin: the extreme of extremes.  A rank without any element to choose from raises."""
    places = kept(ask, dims)
    yield from cuts(ask, places)
    yield from folds(ask, places, [part], cut="filled")
    yield from passes(ask, [part])


def both_extremes(ask: Ask) -> Iterator[Line]:
    """aminmax: each result is a part of its own; no part of the input serves both."""
    places = kept(ask)
    yield from cuts(ask, places)
    yield from folds(ask, places, [MIN, MAX], cut="filled")


def decides(ask: Ask, part: Partial, alike: Partial) -> Iterator[Line]:
    """any and all: of booleans "or" is both P(max) and P(sum), and "and" both P(min) and P(product).

    Of `uint8` torch gives 0 or 1 in `uint8`, which add up to 2.  An empty list of dims is no dim.
    """
    places = kept(ask, none_is_none=ask.op.endswith(".dims"))
    yield from cuts(ask, places)
    yield from folds(ask, places, [part], *([[alike]] if _after(ask) == torch.bool else []))
    if ask.tensors[0].dtype == torch.bool:
        yield from passes(ask, [part, alike])


def counts(ask: Ask) -> Iterator[Line]:
    """nansum and count_nonzero: the pieces' results add up.  The parts of a sum do not know what is NaN, or zero."""
    places = kept(ask)
    yield from cuts(ask, places)
    yield from folds(ask, places, [SUM])
    before = ask.tensors[0].dtype
    if ask.op.startswith("aten.nansum") and not (before.is_floating_point or before.is_complex):
        yield from passes(ask, through(before, _after(ask)))


def chooses(ask: Ask, dims: str = "dim") -> Iterator[Line]:
    """Results that hang on all elements of a row at once: only dims that stay are cut."""
    yield from cuts(ask, kept(ask, dims))


def _after(ask: Ask) -> torch.dtype:
    (meta, *_) = ask.outputs
    assert meta is not None
    return meta.dtype


def _of(packet: str, *which: str) -> list[str]:
    return [f"{packet}.{name}" for name in which]


_CHOOSING = (
    *(f"aten.{name}.{which}" for name in ("std", "var", "var_mean", "std_mean") for which in ("default", "dim", "correction")),
    *(f"aten.{name}.{which}" for name in ("median", "nanmedian") for which in ("default", "dim")),
    *_of("aten.max", "dim"), *_of("aten.min", "dim"), "aten.mode.default", "aten.argmax.default", "aten.argmin.default",
    "aten.logsumexp.default",
)  # fmt: skip

RULES: tuple[Entry, ...] = with_variants((
    *rules("reductions", "a sum of sums, and linear", ["aten.sum.default", "aten.sum.dim_IntList"], adds),
    *rules("reductions", "a sum of sums, and linear", ["prims.sum.default"], partial(adds, dims="dims")),
    *rules("reductions", "an average of averages of as many, and linear", _of("aten.mean", "default", "dim"), averages),
    *rules("reductions", "a product of products", _of("aten.prod", "default", "dim_int"), multiplies),
    *rules("reductions", "a product of products", ["prims.prod.default"], partial(multiplies, dims="dims", none_is_none=True)),
    *rules("reductions", "the maximum of maxima", ["aten.amax.default", "aten.max.default"], partial(extremes, part=MAX)),
    *rules("reductions", "the minimum of minima", ["aten.amin.default", "aten.min.default"], partial(extremes, part=MIN)),
    *rules("reductions", "the maximum of maxima", ["prims.amax.default"], partial(extremes, part=MAX, dims="dims")),
    *rules("reductions", "the minimum of minima", ["prims.amin.default"], partial(extremes, part=MIN, dims="dims")),
    *rules("reductions", "extremes of extremes", ["aten.aminmax.default"], both_extremes),
    *rules("reductions", "or of ors", _of("aten.any", "default", "dim", "dims"), partial(decides, part=MAX, alike=SUM)),
    *rules("reductions", "or of ors", ["aten._is_any_true.default"], partial(decides, part=MAX, alike=SUM)),
    *rules("reductions", "and of ands", ["aten._is_all_true.default"], partial(decides, part=MIN, alike=PRODUCT)),
    *rules("reductions", "and of ands", _of("aten.all", "default", "dim", "dims"), partial(decides, part=MIN, alike=PRODUCT)),
    *rules("reductions", "what counts in a piece counts in the whole",
           ["aten.nansum.default", *_of("aten.count_nonzero", "default", "dim_IntList")], counts),
    *rules("reductions", "it hangs on all elements of a row", _CHOOSING, chooses),
    *rules("reductions", "it hangs on all elements of a row", ["prims.var.default"], partial(chooses, dims="dims")),
    *rules("reductions", "linear", ["aten.trace.default"], lambda ask: linear(ask, 0)),
    *NORMS,
))  # fmt: skip
