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


def beside(ask: Ask) -> Iterator[Line]:
    """Each dim but the indexed one, sharded in all tensors if they are equally long."""
    ndim = ask.tensors[0].ndim
    dim = ask["dim"] % max(ndim, 1)
    if all(meta.ndim == ndim for meta in ask.tensors):
        for other, _ in other_dims(ndim, dim):
            if len({meta.shape[other] for meta in ask.tensors}) == 1:
                yield sharded(ask, dict.fromkeys(range(len(ask.tensors)), other), other)


def dealt(ask: Ask, values: str, first: Placement, folded: str) -> Iterator[Line]:
    """Index and values sharded along the indexed dim: each rank scatters its own, and the results are partial."""
    ndim, leaf = ask.tensors[0].ndim, ask.leaf(values)
    if leaf is None or ndim == 0 or ask.meta("index").ndim == 0:
        return
    given, index = ask.tensors[leaf], ask.meta("index")
    dim = ask["dim"] % ndim
    own = dim if index.ndim == ndim and index.ndim > 1 else 0
    if given.ndim > dim and given.shape[dim] == index.shape[own]:
        yield ask.line({0: first, 1: Shard(own), leaf: Shard(dim)}, [Partial(folded)])


def scatter(ask: Ask) -> Iterator[Line]:
    source = ask.leaf("src")
    if source is None:
        yield from pending(ask, [0], filled_with(ask["value"]))
    else:
        yield from pending(ask, [0, source])
    yield from beside(ask)


def scatter_by(ask: Ask) -> Iterator[Line]:
    """`scatter` with `reduce`: adds or multiplies, by one number or by values."""
    source, adds = ask.leaf("src"), ask["reduce"] == "add"
    if source is None:
        yield from pending(ask, [0], _with_number(ask["value"], adds))
    elif adds:
        yield from pending(ask, [0, source], LINEAR)
        yield from dealt(ask, "src", Partial("sum"), "sum")
    else:
        yield from pending(ask, [0, source], ["product"])
        yield from pending(ask, [0], LINEAR)
    yield from beside(ask)


def _with_number(value: Any, adds: bool) -> tuple[str, ...]:
    if adds:
        return LINEAR if value == 0 else ("avg",)
    return (*LINEAR, "product") if value in (0, 1) else LINEAR


def scatter_add(ask: Ask) -> Iterator[Line]:
    yield from pending(ask, [0, 2], LINEAR)
    yield from beside(ask)
    yield from dealt(ask, "src", Partial("sum"), "sum")


def scatter_reduce(ask: Ask) -> Iterator[Line]:
    """A mean is linear for floats only, since integers are rounded."""
    values = "src" if "src" in ask.arguments else "source"
    reduce, dtype = ask["reduce"], ask.tensors[0].dtype
    folded = FOLDS.get(reduce)
    linear = folded == "sum" or (reduce == "mean" and dtype.is_floating_point)
    kinds = LINEAR if linear else (folded,) if folded else ()
    yield from pending(ask, [0, ask.leaf(values) or 2], kinds)
    yield from beside(ask) if values == "src" else rows_beside(ask, values)
    if folded and ask["include_self"]:
        yield from dealt(ask, values, Partial(folded), folded)
        if folded in ("max", "min"):
            yield from dealt(ask, values, Replicate(), folded)


def rows_beside(ask: Ask, values: str = "source") -> Iterator[Line]:
    """Each dim but the indexed one, sharded in the tensor and the values; the index has one dim."""
    given, leaf = ask.tensors[0], ask.leaf(values)
    if leaf is not None and ask.tensors[leaf].ndim == given.ndim:
        for other, _ in other_dims(given.ndim, ask["dim"] % max(given.ndim, 1)):
            yield sharded(ask, {0: other, leaf: other}, other)


def index_add(ask: Ask) -> Iterator[Line]:
    """Booleans add as "or", which does not commute with `alpha`."""
    if ask.tensors[0].dtype != torch.bool:
        yield from pending(ask, [0, 2], LINEAR)
        yield from dealt(ask, "source", Partial("sum"), "sum")
    yield from rows_beside(ask)


def index_copy(ask: Ask) -> Iterator[Line]:
    yield from pending(ask, [0, 2], KINDS)
    yield from rows_beside(ask)


def put(ask: Ask) -> Iterator[Line]:
    """Positions in the flattened tensor; positions and values are paired in the order of their elements."""
    adds = bool(ask["accumulate"])
    yield from pending(ask, [0, 2], LINEAR if adds else KINDS)
    index, source = ask.meta("index"), ask.meta("source")
    for dim in range(index.ndim if adds and index.shape == source.shape else 0):
        yield ask.line({0: Partial("sum"), 1: Shard(dim), 2: Shard(dim)}, [Partial("sum")])


def masked_scatter(ask: Ask) -> Iterator[Line]:
    """The position of a value depends on all mask elements before it, so the mask is replicated."""
    yield from pending(ask, [0, 2], KINDS)


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
