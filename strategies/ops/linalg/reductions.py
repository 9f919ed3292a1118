"""Rules of reductions, norms, softmax and scans.

The sum of a shard is a partial sum, its `amax` a partial maximum.  A mean of means is the mean only for even shards.  The
variance, the median or the position (`argmax`) of a shard is no partial result: then only the remaining dims are sharded.

* Norms: those of order 0 and 1 add up, and those of infinite order are extremes.  The root of a sum is not a sum of
  roots, so there are no partial results for other orders.  No norm is linear.
* Softmax and its relatives: each row is independent, so any dim but that of the rows may be sharded.  None is linear in
  its input; the gradients are linear in the incoming gradient, given the result of the forward.
* Scans: an element depends on all before it, so the scanned dim is replicated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from localtensor.layout import PARTIAL_KINDS, is_unambiguous
from strategies.ops.lib import elementwise
from strategies.ops.lib.elementwise import linear_in, linear_partials
from strategies.ops.lib.overload_variants import with_variants
from strategies.ops.semantics.rule_registry import Cut, Meta, OpRule, PlacementRule, RuleQuery, rules

SUM, PRODUCT, MAX, MIN, AVG = (Partial(kind) for kind in ("sum", "product", "max", "min", "avg"))


def norm(query: RuleQuery, order: str = "ord") -> Iterator[PlacementRule]:
    """The norm over some dims; the default order is 2."""
    places = elementwise.dims_after_reduction(query)
    yield from elementwise.kept_dim_rules(query, places)
    value = query.get(order)
    part, cut = norm_part(2.0 if value is None else value)
    if part is not None:
        yield from elementwise.reduced_dim_rules(query, places, [part], cut=cut)


def norm_part(order: float) -> tuple[Partial | None, Cut]:
    """The partial placement of the norm of a shard, if any, and its cut: an empty shard has no extreme.

    >>> norm_part(1), norm_part(math.inf), norm_part(2)
    ((Partial(sum), 'any'), (Partial(max), 'filled'), (None, 'any'))
    """
    if order in (0, 1):
        return SUM, "any"
    if math.isinf(order):
        return (MAX if order > 0 else MIN), "filled"
    return None, "any"


def distance(query: RuleQuery) -> Iterator[PlacementRule]:
    """dist: the norm of the difference of two tensors, broadcast against each other."""
    whole = Meta(tuple(torch.broadcast_shapes(*(x.shape for x in query.tensors))), _after(query))
    part, cut = norm_part(query["p"])
    for dim in range(whole.ndim) if part is not None else ():
        yield query.line(elementwise.sharded_operands(query, whole, dim), [part], cut)


def powers(query: RuleQuery) -> Iterator[PlacementRule]:
    """The sum of powers without the root, for a finite order.

    torch 2.13, complex input and a real dtype: the imaginary part is dropped before the power if there is only one row.
    """
    places = elementwise.dims_after_reduction(query)
    yield from elementwise.kept_dim_rules(query, places)
    if math.isfinite(query["ord"]) and not (query.tensors[0].dtype.is_complex and query["dtype"] is not None):
        yield from elementwise.reduced_dim_rules(query, places, [SUM])


def sum_rule(query: RuleQuery, dims: str = "dim") -> Iterator[PlacementRule]:
    """sum: the sums of shards are partial sums, and it is linear."""
    places = elementwise.dims_after_reduction(query, dims)
    yield from elementwise.kept_dim_rules(query, places)
    yield from elementwise.reduced_dim_rules(query, places, [SUM])
    yield from linear_in(query, 0)


def mean_rule(query: RuleQuery) -> Iterator[PlacementRule]:
    """mean: the average of the averages of even shards."""
    places = elementwise.dims_after_reduction(query)
    yield from elementwise.kept_dim_rules(query, places)
    yield from elementwise.reduced_dim_rules(query, places, [AVG], cut="even")
    yield from linear_in(query, 0)


def prod_rule(query: RuleQuery, dims: str = "dim", *, none_is_none: bool = False) -> Iterator[PlacementRule]:
    """prod: factors commute, those of partial products, too; booleans are 0 and 1 in every dtype.

    Complex results are excluded: whether an overflowing product is infinite or NaN depends on the order.
    """
    places = elementwise.dims_after_reduction(query, dims, none_is_none=none_is_none)
    yield from elementwise.kept_dim_rules(query, places)
    before, after = query.tensors[0].dtype, _after(query)
    if not after.is_complex:
        yield from elementwise.reduced_dim_rules(query, places, [PRODUCT])
        if before in (torch.bool, after):
            yield from elementwise.passthrough_rules(query, [PRODUCT])


def extremes(query: RuleQuery, part: Partial, dims: str = "dim") -> Iterator[PlacementRule]:
    """amax and amin: the extreme of extremes.  An empty shard raises."""
    places = elementwise.dims_after_reduction(query, dims)
    yield from elementwise.kept_dim_rules(query, places)
    yield from elementwise.reduced_dim_rules(query, places, [part], cut="filled")
    yield from elementwise.passthrough_rules(query, [part])


def aminmax(query: RuleQuery) -> Iterator[PlacementRule]:
    """aminmax: each result has its own reduction, so no partial input suits both."""
    places = elementwise.dims_after_reduction(query)
    yield from elementwise.kept_dim_rules(query, places)
    yield from elementwise.reduced_dim_rules(query, places, [MIN, MAX], cut="filled")


def any_or_all(query: RuleQuery, part: Partial, alike: Partial) -> Iterator[PlacementRule]:
    """any and all: for booleans, "or" is both P(max) and P(sum), and "and" both P(min) and P(product).

    For `uint8`, torch returns 0 or 1 in `uint8`, which add up to 2.  An empty list of dims reduces none.
    """
    places = elementwise.dims_after_reduction(query, none_is_none=query.op.endswith(".dims"))
    yield from elementwise.kept_dim_rules(query, places)
    yield from elementwise.reduced_dim_rules(query, places, [part], *([[alike]] if _after(query) == torch.bool else []))
    if query.tensors[0].dtype == torch.bool:
        yield from elementwise.passthrough_rules(query, [part, alike])


def sum_of_counts(query: RuleQuery) -> Iterator[PlacementRule]:
    """nansum and count_nonzero: the results of shards add up.  Which elements of a sum are NaN or zero, its parts do not tell."""
    places = elementwise.dims_after_reduction(query)
    yield from elementwise.kept_dim_rules(query, places)
    yield from elementwise.reduced_dim_rules(query, places, [SUM])
    before = query.tensors[0].dtype
    if query.op.startswith("aten.nansum") and not (before.is_floating_point or before.is_complex):
        yield from elementwise.passthrough_rules(query, linear_partials(before, _after(query)))


def kept_dims_only(query: RuleQuery, dims: str = "dim") -> Iterator[PlacementRule]:
    """Ops whose result depends on all elements of a row at once: only the remaining dims are sharded."""
    yield from elementwise.kept_dim_rules(query, elementwise.dims_after_reduction(query, dims))


def _after(query: RuleQuery) -> torch.dtype:
    (meta, *_) = query.outputs
    assert meta is not None, f"{query.op} returns a tensor"
    return meta.dtype


def _of(packet: str, *which: str) -> list[str]:
    return [f"{packet}.{name}" for name in which]


_SPREADS = ("std", "var", "var_mean", "std_mean")
_CHOOSING = (
    *(f"aten.{name}.{which}" for name in _SPREADS for which in ("default", "dim", "correction")),
    *(f"aten.{name}.{which}" for name in ("median", "nanmedian") for which in ("default", "dim")),
    *_of("aten.max", "dim"), *_of("aten.min", "dim"), "aten.mode.default", "aten.argmax.default", "aten.argmin.default",
    "aten.logsumexp.default",
)  # fmt: skip


def rows(query: RuleQuery) -> Iterator[PlacementRule]:
    """Softmax: all tensors and the result have one shape, and are sharded alike."""
    normalised = query.dims("dim") if query["dim"] is not None else ()
    for dim in range(query.tensors[0].ndim):
        if dim not in normalised:
            yield query.line(dict.fromkeys(range(len(query.tensors)), Shard(dim)), [Shard(dim)])


def gradients(query: RuleQuery) -> Iterator[PlacementRule]:
    """The backward, linear in the gradient: grad * y - y * sum(grad * y), or grad - exp(y) * sum(grad)."""
    yield from rows(query)
    yield from linear_in(query, query.leaf("grad_output"))


def scan(*kinds: str) -> Callable[[RuleQuery], Iterator[PlacementRule]]:
    """The rule of a scan that commutes with these reductions if it keeps the dtype.

    Booleans and small integers are widened first, and may have wrapped before.
    """

    def lines(query: RuleQuery) -> Iterator[PlacementRule]:
        given = query.tensors[0]
        yield from elementwise.partial_rules(query, [0], kinds)
        yield from elementwise.dim_map_rules(
            query, elementwise.unchanged_dims(given.ndim, query["dim"] % max(given.ndim, 1))
        )

    return lines


_WHOLE = "the scanned dim is whole"


def of_other_shapes(query: RuleQuery) -> Iterator[PlacementRule]:
    """The rule of a comparison that is false because a dim differs: any other dim may be sharded."""
    one, two = query.tensors
    differ = [dim for dim, sizes in enumerate(zip(one.shape, two.shape, strict=False)) if sizes[0] != sizes[1]]
    for dim in range(min(one.ndim, two.ndim)):
        if one.ndim != two.ndim or set(differ) - {dim}:
            yield query.line({0: Shard(dim), 1: Shard(dim)}, query.on_each(Replicate()))


def same_size(query: RuleQuery) -> Iterator[PlacementRule]:
    """The rule of a comparison of shapes: shards of equal shapes have equal shapes, and values do not matter."""
    yield from of_other_shapes(query)
    one, two = query.tensors
    if one.shape == two.shape:
        yield from (query.line({0: Shard(dim), 1: Shard(dim)}, query.on_each(Replicate())) for dim in range(one.ndim))
    for leaf, meta in enumerate(query.tensors):
        for kind in PARTIAL_KINDS:
            if is_unambiguous(kind, meta.dtype):
                yield query.line({leaf: Partial(kind)}, query.on_each(Replicate()))


RULES: tuple[OpRule, ...] = with_variants(
    rules("reductions", "a sum of sums, and linear", ["aten.sum.default", "aten.sum.dim_IntList"], sum_rule),
    rules("reductions", "a sum of sums, and linear", ["prims.sum.default"], partial(sum_rule, dims="dims")),
    rules("reductions", "an average of averages of as many, and linear", _of("aten.mean", "default", "dim"), mean_rule),
    rules("reductions", "a product of products", _of("aten.prod", "default", "dim_int"), prod_rule),
    rules("reductions", "a product of products",
          ["prims.prod.default"], partial(prod_rule, dims="dims", none_is_none=True)),
    rules("reductions", "the maximum of maxima",
          ["aten.amax.default", "aten.max.default"], partial(extremes, part=MAX)),
    rules("reductions", "the minimum of minima",
          ["aten.amin.default", "aten.min.default"], partial(extremes, part=MIN)),
    rules("reductions", "the maximum of maxima", ["prims.amax.default"], partial(extremes, part=MAX, dims="dims")),
    rules("reductions", "the minimum of minima", ["prims.amin.default"], partial(extremes, part=MIN, dims="dims")),
    rules("reductions", "extremes of extremes", ["aten.aminmax.default"], aminmax),
    rules("reductions", "or of ors",
          _of("aten.any", "default", "dim", "dims"), partial(any_or_all, part=MAX, alike=SUM)),
    rules("reductions", "or of ors", ["aten._is_any_true.default"], partial(any_or_all, part=MAX, alike=SUM)),
    rules("reductions", "and of ands", ["aten._is_all_true.default"], partial(any_or_all, part=MIN, alike=PRODUCT)),
    rules("reductions", "and of ands",
          _of("aten.all", "default", "dim", "dims"), partial(any_or_all, part=MIN, alike=PRODUCT)),
    rules("reductions", "what counts in a piece counts in the whole",
          ["aten.nansum.default", *_of("aten.count_nonzero", "default", "dim_IntList")], sum_of_counts),
    rules("reductions", "it depends on all elements of a row", _CHOOSING, kept_dims_only),
    rules("reductions", "it depends on all elements of a row",
          ["prims.var.default"], partial(kept_dims_only, dims="dims")),
    rules("reductions", "linear", ["aten.trace.default"], lambda query: linear_in(query, 0)),
    rules("reductions", "norms of order 0 and 1 add up", ["aten.linalg_vector_norm.default"], norm),
    rules("reductions", "norms of order 0 and 1 add up",
          [f"aten.norm.{w}" for w in ("Scalar", "ScalarOpt_dim", "ScalarOpt_dim_dtype", "ScalarOpt_dtype")],
          partial(norm, order="p")),
    rules("reductions", "norms of order 0 and 1 add up", ["aten.dist.default"], distance),
    rules("reductions", "powers add up", ["aten.linalg__powsum.default"], powers),
    rules("softmax", "each row is normalised by itself",
          ["aten._softmax.default", "aten._log_softmax.default", "aten._safe_softmax.default",
           "aten.softmax.int", "aten.log_softmax.int"], rows),
    rules("softmax", "each row has its own gradient, linear in that of the result",
          ["aten._softmax_backward_data.default", "aten._log_softmax_backward_data.default"], gradients),
    rules("whole", "two tensors of other shapes differ, whatever they hold", ["aten.equal.default"], of_other_shapes),
    rules("whole", "the same of shapes alone", ["aten.is_same_size.default"], same_size),
    rules("whole", "the one number, and whether none is finite in a list, are of whole tensors",
          ["aten._local_scalar_dense.default", "aten._amp_foreach_non_finite_check_and_unscale_.default"],
          lambda query: ()),
    rules("scans", _WHOLE, ["aten.cumsum.default"], scan(*elementwise.LINEAR)),
    rules("scans", _WHOLE, ["aten.cumprod.default"], scan("product")),
    rules("scans", _WHOLE, ["aten.cummax.default", "aten.cummin.default"], scan()),
    rules("scans", _WHOLE, ["aten.logcumsumexp.default", "aten._logcumsumexp.default"], scan()),
)  # fmt: skip
