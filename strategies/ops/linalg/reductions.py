"""Reductions: sums, means, products, extremes, truth values, counts; and those of which pieces say nothing.

`sum` of a piece is a part of the sum, `amax` one of the maximum.  A mean of means is the mean only if all ranks have as
much, and a variance, a median or a place (`argmax`) of pieces is a part of nothing: there only dims that stay are cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.distributed.tensor import Partial, Shard

from strategies.ops.lib.dim_maps import LINEAR, cuts, folds, mapped, passes, pending
from strategies.ops.lib.dim_maps import dims_after_reduction as kept
from strategies.ops.lib.dim_maps import other_dims as untouched
from strategies.ops.lib.elementwise import linear, through
from strategies.ops.lib.overload_variants import with_variants
from strategies.ops.semantics.rulebook import Ask, Cut, Entry, Line, rules

SUM, PRODUCT, MAX, MIN, AVG = (Partial(kind) for kind in ("sum", "product", "max", "min", "avg"))


# Norms of vectors: which are made of the pieces' norms.
#
# Of the p-norms those of 0 (how many are not zero) and of 1 are sums, and those of the infinities extremes.  A root of a
# sum is no sum of roots: of the others no piece is a part.  None is linear.


def norm(ask: Ask, order: str = "ord") -> Iterator[Line]:
    """The norm over some dims; of no order given it is 2."""
    places = kept(ask)
    yield from cuts(ask, places)
    value = ask.get(order)
    part, cut = norm_part(2.0 if value is None else value)
    if part is not None:
        yield from folds(ask, places, [part], cut=cut)


def norm_part(order: float) -> tuple[Partial | None, Cut]:
    """What the norm of a piece is of the whole one, and the cut that it takes: nothing at all has no extreme.

    >>> norm_part(1), norm_part(math.inf), norm_part(2)
    ((Partial(sum), 'any'), (Partial(max), 'filled'), (None, 'any'))
    """
    if order in (0, 1):
        return SUM, "any"
    if math.isinf(order):
        return (MAX if order > 0 else MIN), "filled"
    return None, "any"


def powers(ask: Ask) -> Iterator[Line]:
    """The sum of the elements' powers, without the root: a sum, if the power is finite.

    Asked for complex numbers in a real dtype, torch 2.13 drops the imaginary part first if there is one row only.
    """
    places = kept(ask)
    yield from cuts(ask, places)
    if math.isfinite(ask["ord"]) and not (ask.tensors[0].dtype.is_complex and ask["dtype"] is not None):
        yield from folds(ask, places, [SUM])


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


# Softmax and its kin: every row goes by itself, so any dim but that of the rows may be cut.
#
# None is linear in its input.  The gradients are linear in the gradient that comes in, given the result of the forward.


def rows(ask: Ask) -> Iterator[Line]:
    """All tensors and the result have one shape, and are cut alike."""
    normalised = ask.dims("dim") if ask["dim"] is not None else ()
    for dim in range(ask.tensors[0].ndim):
        if dim not in normalised:
            yield ask.line(dict.fromkeys(range(len(ask.tensors)), Shard(dim)), [Shard(dim)])


def gradients(ask: Ask) -> Iterator[Line]:
    """The same, and what is linear in the gradient: grad * y - y * sum(grad * y), and grad - exp(y) * sum(grad)."""
    yield from rows(ask)
    yield from linear(ask, ask.leaf("grad_output"))


# Running sums, products and extremes: a row hangs on all rows before it, so the scanned dim is whole.

FAMILY = "scans"


def scanned(*kinds: str) -> Callable[[Ask], Iterator[Line]]:
    """The lines of a scan that goes with these reductions, where it does not change the dtype.

    The running sum of parts is a part of the running sum; but what is widened first, as booleans and small integers are,
    may have wrapped before.
    """

    def lines(ask: Ask) -> Iterator[Line]:
        given = ask.tensors[0]
        yield from pending(ask, [0], kinds)
        yield from mapped(ask, untouched(given.ndim, ask["dim"] % max(given.ndim, 1)))

    return lines


_WHOLE = "the scanned dim is whole"

RULES: tuple[Entry, ...] = with_variants(
    rules("reductions", "a sum of sums, and linear", ["aten.sum.default", "aten.sum.dim_IntList"], adds),
    rules("reductions", "a sum of sums, and linear", ["prims.sum.default"], partial(adds, dims="dims")),
    rules("reductions", "an average of averages of as many, and linear", _of("aten.mean", "default", "dim"), averages),
    rules("reductions", "a product of products", _of("aten.prod", "default", "dim_int"), multiplies),
    rules("reductions", "a product of products", ["prims.prod.default"], partial(multiplies, dims="dims", none_is_none=True)),
    rules("reductions", "the maximum of maxima", ["aten.amax.default", "aten.max.default"], partial(extremes, part=MAX)),
    rules("reductions", "the minimum of minima", ["aten.amin.default", "aten.min.default"], partial(extremes, part=MIN)),
    rules("reductions", "the maximum of maxima", ["prims.amax.default"], partial(extremes, part=MAX, dims="dims")),
    rules("reductions", "the minimum of minima", ["prims.amin.default"], partial(extremes, part=MIN, dims="dims")),
    rules("reductions", "extremes of extremes", ["aten.aminmax.default"], both_extremes),
    rules("reductions", "or of ors", _of("aten.any", "default", "dim", "dims"), partial(decides, part=MAX, alike=SUM)),
    rules("reductions", "or of ors", ["aten._is_any_true.default"], partial(decides, part=MAX, alike=SUM)),
    rules("reductions", "and of ands", ["aten._is_all_true.default"], partial(decides, part=MIN, alike=PRODUCT)),
    rules("reductions", "and of ands", _of("aten.all", "default", "dim", "dims"), partial(decides, part=MIN, alike=PRODUCT)),
    rules("reductions", "what counts in a piece counts in the whole",
          ["aten.nansum.default", *_of("aten.count_nonzero", "default", "dim_IntList")], counts),
    rules("reductions", "it hangs on all elements of a row", _CHOOSING, chooses),
    rules("reductions", "it hangs on all elements of a row", ["prims.var.default"], partial(chooses, dims="dims")),
    rules("reductions", "linear", ["aten.trace.default"], lambda ask: linear(ask, 0)),
    rules("reductions", "norms of order 0 and 1 add up", ["aten.linalg_vector_norm.default"], norm),
    rules("reductions", "norms of order 0 and 1 add up",
          [f"aten.norm.{w}" for w in ("Scalar", "ScalarOpt_dim", "ScalarOpt_dim_dtype", "ScalarOpt_dtype")],
          partial(norm, order="p")),
    rules("reductions", "powers add up", ["aten.linalg__powsum.default"], powers),
    rules("softmax", "each row is normalised by itself",
          ["aten._softmax.default", "aten._log_softmax.default", "aten._safe_softmax.default",
           "aten.softmax.int", "aten.log_softmax.int"], rows),
    rules("softmax", "each row has its own gradient, linear in that of the result",
          ["aten._softmax_backward_data.default", "aten._log_softmax_backward_data.default"], gradients),
    rules(FAMILY, _WHOLE, ["aten.cumsum.default"], scanned(*LINEAR)),
    rules(FAMILY, _WHOLE, ["aten.cumprod.default"], scanned("product")),
    rules(FAMILY, _WHOLE, ["aten.cummax.default", "aten.cummin.default"], scanned()),
    rules(FAMILY, _WHOLE, ["aten.logcumsumexp.default", "aten._logcumsumexp.default"], scanned()),
)  # fmt: skip
