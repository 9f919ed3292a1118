"""Rules of scatter and its relatives: values written, added or reduced into indexed positions.

The indexed dim is replicated.  Along the other dims, index, tensor and values are sharded together if they are equally long.
If values are reduced (sum, product, max, min), each rank may scatter its own, and the results are partial.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from strategies.ops.lib.dim_maps import KINDS, LINEAR, filled_with, other_dims, pending, sharded
from strategies.ops.lib.overload_variants import with_variants
from strategies.ops.semantics.rulebook import Ask, Entry, Line, rules

FAMILY = "indexing"
FOLDS: Mapping[str, str] = {
    "sum": "sum", "add": "sum", "prod": "product", "multiply": "product", "amax": "max", "amin": "min",
}  # fmt: skip
"""The kind of partial value for each `reduce` mode."""


def beside(query: Ask) -> Iterator[Line]:
    """Each dim but the indexed one, sharded in all tensors if they are equally long."""
    ndim = query.tensors[0].ndim
    dim = query["dim"] % max(ndim, 1)
    if all(meta.ndim == ndim for meta in query.tensors):
        for other, _ in other_dims(ndim, dim):
            if len({meta.shape[other] for meta in query.tensors}) == 1:
                yield sharded(query, dict.fromkeys(range(len(query.tensors)), other), other)


def dealt(query: Ask, values: str, first: Placement, folded: str) -> Iterator[Line]:
    """Index and values sharded along the indexed dim: each rank scatters its own, and the results are partial."""
    ndim, leaf = query.tensors[0].ndim, query.leaf(values)
    if leaf is None or ndim == 0 or query.meta("index").ndim == 0:
        return
    given, index = query.tensors[leaf], query.meta("index")
    dim = query["dim"] % ndim
    own = dim if index.ndim == ndim and index.ndim > 1 else 0
    if given.ndim > dim and given.shape[dim] == index.shape[own]:
        yield query.line({0: first, 1: Shard(own), leaf: Shard(dim)}, [Partial(folded)])


def scatter(query: Ask) -> Iterator[Line]:
    source = query.leaf("src")
    if source is None:
        yield from pending(query, [0], filled_with(query["value"]))
    else:
        yield from pending(query, [0, source])
    yield from beside(query)


def scatter_by(query: Ask) -> Iterator[Line]:
    """`scatter` with `reduce`: adds or multiplies, by one number or by values."""
    source, adds = query.leaf("src"), query["reduce"] == "add"
    if source is None:
        yield from pending(query, [0], _with_number(query["value"], adds))
    elif adds:
        yield from pending(query, [0, source], LINEAR)
        yield from dealt(query, "src", Partial("sum"), "sum")
    else:
        yield from pending(query, [0, source], ["product"])
        yield from pending(query, [0], LINEAR)
    yield from beside(query)


def _with_number(value: Any, adds: bool) -> tuple[str, ...]:
    if adds:
        return LINEAR if value == 0 else ("avg",)
    return (*LINEAR, "product") if value in (0, 1) else LINEAR


def scatter_add(query: Ask) -> Iterator[Line]:
    yield from pending(query, [0, 2], LINEAR)
    yield from beside(query)
    yield from dealt(query, "src", Partial("sum"), "sum")


def scatter_reduce(query: Ask) -> Iterator[Line]:
    """A mean is linear for floats only, since integers are rounded."""
    values = "src" if "src" in query.arguments else "source"
    reduce, dtype = query["reduce"], query.tensors[0].dtype
    folded = FOLDS.get(reduce)
    linear = folded == "sum" or (reduce == "mean" and dtype.is_floating_point)
    kinds = LINEAR if linear else (folded,) if folded else ()
    yield from pending(query, [0, query.leaf(values) or 2], kinds)
    yield from beside(query) if values == "src" else rows_beside(query, values)
    if folded and query["include_self"]:
        yield from dealt(query, values, Partial(folded), folded)
        if folded in ("max", "min"):
            yield from dealt(query, values, Replicate(), folded)


def rows_beside(query: Ask, values: str = "source") -> Iterator[Line]:
    """Each dim but the indexed one, sharded in the tensor and the values; the index has one dim."""
    given, leaf = query.tensors[0], query.leaf(values)
    if leaf is not None and query.tensors[leaf].ndim == given.ndim:
        for other, _ in other_dims(given.ndim, query["dim"] % max(given.ndim, 1)):
            yield sharded(query, {0: other, leaf: other}, other)


def index_add(query: Ask) -> Iterator[Line]:
    """Booleans add as "or", which does not commute with `alpha`."""
    if query.tensors[0].dtype != torch.bool:
        yield from pending(query, [0, 2], LINEAR)
        yield from dealt(query, "source", Partial("sum"), "sum")
    yield from rows_beside(query)


def index_copy(query: Ask) -> Iterator[Line]:
    yield from pending(query, [0, 2], KINDS)
    yield from rows_beside(query)


def put(query: Ask) -> Iterator[Line]:
    """Positions in the flattened tensor; positions and values are paired in the order of their elements."""
    adds = bool(query["accumulate"])
    yield from pending(query, [0, 2], LINEAR if adds else KINDS)
    index, source = query.meta("index"), query.meta("source")
    for dim in range(index.ndim if adds and index.shape == source.shape else 0):
        yield query.line({0: Partial("sum"), 1: Shard(dim), 2: Shard(dim)}, [Partial("sum")])


def masked_scatter(query: Ask) -> Iterator[Line]:
    """The position of a value depends on all mask elements before it, so the mask is replicated."""
    yield from pending(query, [0, 2], KINDS)


_PLACES = "the dim of the places is whole; the others are cut together"

RULES: tuple[Entry, ...] = with_variants(
    rules(FAMILY, _PLACES, ["aten.scatter.src", "aten.scatter.value"], scatter),
    rules(FAMILY, _PLACES, ["aten.scatter.reduce", "aten.scatter.value_reduce"], scatter_by),
    rules(FAMILY, _PLACES, ["aten.scatter_add.default"], scatter_add),
    rules(FAMILY, _PLACES, ["aten.scatter_reduce.two", "aten.index_reduce.default"], scatter_reduce),
    rules(FAMILY, _PLACES, ["aten.index_add.default"], index_add),
    rules(FAMILY, _PLACES, ["aten.index_copy.default"], index_copy),
    rules(FAMILY, "any place may be written to", ["aten.put.default"], put),
    rules(FAMILY, "the mask is the same on all ranks", ["aten.masked_scatter.default"], masked_scatter),
)  # fmt: skip
