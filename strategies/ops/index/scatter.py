"""Rules of scatter and its relatives: values written, added or reduced into indexed positions.

The indexed dim is replicated.  Along the other dims, index, tensor and values are sharded together if they are equally
long.  If values are reduced (sum, product, max, min), each rank may scatter its own, and the results are partial.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from strategies.ops.lib.elementwise import KINDS, LINEAR, partial_rules, reductions_keeping, shard_rule, unchanged_dims
from strategies.ops.lib.overload_variants import with_variants
from strategies.ops.semantics.rule_registry import OpRule, PlacementRule, RuleQuery, rules

FAMILY = "indexing"
REDUCTION_KINDS: Mapping[str, str] = {
    "sum": "sum", "add": "sum", "prod": "product", "multiply": "product", "amax": "max", "amin": "min",
}  # fmt: skip
"""The kind of partial value for each `reduce` mode."""


def other_dims_together(query: RuleQuery) -> Iterator[PlacementRule]:
    """Each dim but the indexed one, sharded in all tensors if they are equally long."""
    ndim = query.tensors[0].ndim
    dim = query["dim"] % max(ndim, 1)
    if all(meta.ndim == ndim for meta in query.tensors):
        for other, _ in unchanged_dims(ndim, dim):
            if len({meta.shape[other] for meta in query.tensors}) == 1:
                yield shard_rule(query, dict.fromkeys(range(len(query.tensors)), other), other)


def scattered_dim_rules(query: RuleQuery, values: str, first: Placement, folded: str) -> Iterator[PlacementRule]:
    """Index and values sharded along the indexed dim: each rank scatters its own, and the results are partial."""
    ndim, leaf = query.tensors[0].ndim, query.leaf(values)
    if leaf is None or ndim == 0 or query.meta("index").ndim == 0:
        return
    given, index = query.tensors[leaf], query.meta("index")
    dim = query["dim"] % ndim
    own = dim if index.ndim == ndim and index.ndim > 1 else 0
    if given.ndim > dim and given.shape[dim] == index.shape[own]:
        yield query.line({0: first, 1: Shard(own), leaf: Shard(dim)}, [Partial(folded)])


def scatter(query: RuleQuery) -> Iterator[PlacementRule]:
    source = query.leaf("src")
    if source is None:
        yield from partial_rules(query, [0], reductions_keeping(query["value"]))
    else:
        yield from partial_rules(query, [0, source])
    yield from other_dims_together(query)


def scatter_with_reduce(query: RuleQuery) -> Iterator[PlacementRule]:
    """`scatter` with `reduce`: adds or multiplies, by one number or by values."""
    source, adds = query.leaf("src"), query["reduce"] == "add"
    if source is None and adds:
        yield from partial_rules(query, [0], LINEAR if query["value"] == 0 else ("avg",))
    elif source is None:
        yield from partial_rules(query, [0], (*LINEAR, "product") if query["value"] in (0, 1) else LINEAR)
    elif adds:
        yield from partial_rules(query, [0, source], LINEAR)
        yield from scattered_dim_rules(query, "src", Partial("sum"), "sum")
    else:
        yield from partial_rules(query, [0, source], ["product"])
        yield from partial_rules(query, [0], LINEAR)
    yield from other_dims_together(query)


def scatter_add(query: RuleQuery) -> Iterator[PlacementRule]:
    yield from partial_rules(query, [0, 2], LINEAR)
    yield from other_dims_together(query)
    yield from scattered_dim_rules(query, "src", Partial("sum"), "sum")


def scatter_reduce(query: RuleQuery) -> Iterator[PlacementRule]:
    """A mean is linear for floats only, since integers are rounded."""
    values = "src" if "src" in query.arguments else "source"
    reduce, dtype = query["reduce"], query.tensors[0].dtype
    folded = REDUCTION_KINDS.get(reduce)
    linear = folded == "sum" or (reduce == "mean" and dtype.is_floating_point)
    kinds = LINEAR if linear else (folded,) if folded else ()
    yield from partial_rules(query, [0, query.leaf(values) or 2], kinds)
    yield from other_dims_together(query) if values == "src" else other_dims_of_rows(query, values)
    if folded and query["include_self"]:
        yield from scattered_dim_rules(query, values, Partial(folded), folded)
        if folded in ("max", "min"):
            yield from scattered_dim_rules(query, values, Replicate(), folded)


def other_dims_of_rows(query: RuleQuery, values: str = "source") -> Iterator[PlacementRule]:
    """Each dim but the indexed one, sharded in the tensor and the values; the index has one dim."""
    given, leaf = query.tensors[0], query.leaf(values)
    if leaf is not None and query.tensors[leaf].ndim == given.ndim:
        for other, _ in unchanged_dims(given.ndim, query["dim"] % max(given.ndim, 1)):
            yield shard_rule(query, {0: other, leaf: other}, other)


def index_add(query: RuleQuery) -> Iterator[PlacementRule]:
    """Booleans add as "or", which does not commute with `alpha`."""
    if query.tensors[0].dtype != torch.bool:
        yield from partial_rules(query, [0, 2], LINEAR)
        yield from scattered_dim_rules(query, "source", Partial("sum"), "sum")
    yield from other_dims_of_rows(query)


def index_copy(query: RuleQuery) -> Iterator[PlacementRule]:
    yield from partial_rules(query, [0, 2], KINDS)
    yield from other_dims_of_rows(query)


def put(query: RuleQuery) -> Iterator[PlacementRule]:
    """Positions in the flattened tensor; positions and values are paired in the order of their elements."""
    adds = bool(query["accumulate"])
    yield from partial_rules(query, [0, 2], LINEAR if adds else KINDS)
    index, source = query.meta("index"), query.meta("source")
    for dim in range(index.ndim if adds and index.shape == source.shape else 0):
        yield query.line({0: Partial("sum"), 1: Shard(dim), 2: Shard(dim)}, [Partial("sum")])


def masked_scatter(query: RuleQuery) -> Iterator[PlacementRule]:
    """The position of a value depends on all mask elements before it, so the mask is replicated."""
    yield from partial_rules(query, [0, 2], KINDS)


_PLACES = "the dim of the places is whole; the others are cut together"

RULES: tuple[OpRule, ...] = with_variants(
    rules(FAMILY, _PLACES, ["aten.scatter.src", "aten.scatter.value"], scatter),
    rules(FAMILY, _PLACES, ["aten.scatter.reduce", "aten.scatter.value_reduce"], scatter_with_reduce),
    rules(FAMILY, _PLACES, ["aten.scatter_add.default"], scatter_add),
    rules(FAMILY, _PLACES, ["aten.scatter_reduce.two", "aten.index_reduce.default"], scatter_reduce),
    rules(FAMILY, _PLACES, ["aten.index_add.default"], index_add),
    rules(FAMILY, _PLACES, ["aten.index_copy.default"], index_copy),
    rules(FAMILY, "any place may be written to", ["aten.put.default"], put),
    rules(FAMILY, "the mask is the same on all ranks", ["aten.masked_scatter.default"], masked_scatter),
)  # fmt: skip
