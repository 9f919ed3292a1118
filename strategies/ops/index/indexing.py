"""Rules of indexing and embeddings: the dim from which rows are picked is replicated.

The index may be sharded instead: each rank looks up some positions in the whole tensor.

* Indexing with tensors, `x[i, :, j]`: the index tensors are broadcast together.  Their dims take the place of the indexed dims
  if those are adjacent, else they come first.  A mask indexes as many dims as it has, and gives one of data-dependent size.
* Ops whose result has a data-dependent size, or that address memory, have no placement rule but the all-replicated one:
  the length of a piece's result does not determine the offsets of the others.
* Embeddings: a shard of the rows of the table would have to look up its own rows and return zeros for the others, which
  no placement expresses.  The `offsets` of embedding bags refer to all indices, so neither is sharded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from strategies.model.rule import Leaf
from strategies.ops.lib import elementwise
from strategies.ops.lib.overload_variants import with_variants
from strategies.ops.semantics.rule_registry import OpRule, PlacementRule, RuleQuery, rules
from strategies.ops.shape.views import Lines, diagonal, only_partial_rules, select, slice_dim

FAMILY, EMBEDDING_FAMILY = "indexing", "embedding"
MAX_MODE = 2
"""The mode of embedding bags that returns the maximum of the rows, and its position."""


def index_select(query: RuleQuery) -> Iterator[PlacementRule]:
    given, index = query.meta("self"), query.meta("index")
    dim = query["dim"] % max(given.ndim, 1)
    yield from elementwise.partial_rules(query, [0])
    yield from elementwise.dim_map_rules(query, elementwise.unchanged_dims(given.ndim, dim))
    if given.ndim and index.ndim:
        yield elementwise.shard_rule(query, {1: 0}, dim)


def gather(query: RuleQuery) -> Iterator[PlacementRule]:
    """Along the other dims, index and tensor are sharded together if they are equally long; else their shards differ."""
    given, index = query.meta("self"), query.meta("index")
    dim = query["dim"] % max(given.ndim, 1)
    yield from elementwise.partial_rules(query, [0])
    if given.ndim != index.ndim:
        return
    for other, _ in elementwise.unchanged_dims(given.ndim, dim):
        if given.shape[other] == index.shape[other]:
            yield elementwise.shard_rule(query, {0: other, 1: other}, other)
    if index.ndim:
        yield elementwise.shard_rule(query, {1: dim}, dim)


def take(query: RuleQuery) -> Iterator[PlacementRule]:
    yield from elementwise.partial_rules(query, [0])
    yield from elementwise.dim_map_rules(query, elementwise.unchanged_dims(query.meta("index").ndim), leaf=1)


def index_fill(query: RuleQuery) -> Iterator[PlacementRule]:
    """The value is an equal number on every rank, or a tensor that is partial like the first one."""
    given = query.meta("self")
    value = query.leaf("value")
    kinds = elementwise.reductions_keeping(query["value"]) if value is None else ("avg", "max", "min")
    yield from elementwise.partial_rules(query, [0], kinds)
    if value is not None:
        yield from elementwise.partial_rules(query, [0, value])
    yield from elementwise.dim_map_rules(
        query, elementwise.unchanged_dims(given.ndim, query["dim"] % max(given.ndim, 1))
    )


def write_into_view(view: Lines) -> Lines:
    """The rule of writing a tensor into a view: both are sharded where the view maps a dim to a dim."""

    def lines(query: RuleQuery) -> Iterator[PlacementRule]:
        source = query.leaf("src")
        if source is None:
            return
        yield from elementwise.partial_rules(query, [0, source], elementwise.KINDS)
        read = RuleQuery(query.op, query.arguments, query.tensors[:1], (query.tensors[source],))
        for line in view(read):
            (before,), (after,) = line.inputs, line.outputs
            if isinstance(before, Shard) and isinstance(after, Shard):
                yield elementwise.shard_rule(query, {0: before.dim, source: after.dim}, before.dim, line.cut)

    lines.__wrapped__ = view  # type: ignore[attr-defined]
    return lines


_PICKED = "the dim from which rows are picked is whole"
_WRITTEN = "both are cut where the view that is written to has a dim of the tensor"


def only_replicated(query: RuleQuery) -> Iterator[PlacementRule]:
    """No placement rule but the all-replicated one."""
    yield from ()


_COUNTED = [
    "aten.nonzero.default", "aten._unique2.default", "aten.unique_dim.default", "aten.unique_consecutive.default",
    "aten.bincount.default", "aten.repeat_interleave.Tensor",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class IndexLayout:
    """The dims of the result of an indexing call: `free` pairs each dim that is not indexed with its dim in the result.

    `at` is the dim in the result of the first dim of the broadcast index, which has `ndim` dims.  `masks` tells whether
    any index is a mask.
    """

    free: tuple[tuple[int, int], ...]
    at: int
    ndim: int
    masks: bool


def index_layout(query: RuleQuery) -> IndexLayout:
    """The dims of the result of an indexing call."""
    given = query.meta("self")
    dim, indexed, ndim, masks = 0, list[int](), 0, False
    for index in query["indices"]:
        if not isinstance(index, Leaf):
            dim += 1
            continue
        meta = query.tensors[index.index]
        mask = meta.dtype in (torch.bool, torch.uint8)
        span = max(meta.ndim, 1) if mask else 1
        if mask and meta.ndim == 0:
            span = 0
        indexed += range(dim, dim + span)
        dim += span
        ndim = max(ndim, 1 if mask else meta.ndim)
        masks = masks or mask
    free = [dim for dim in range(given.ndim) if dim not in indexed]
    together = indexed == list(range(indexed[0], indexed[0] + len(indexed))) if indexed else True
    at = indexed[0] if indexed and together else 0
    places = [(dim, place + (ndim if not together or place >= at else 0)) for place, dim in enumerate(free)]
    return IndexLayout(tuple(places), at, ndim, masks)


def _sharded_indices(query: RuleQuery, where: IndexLayout, b: int, size: int) -> dict[int, Placement]:
    """The index tensors that have dim b of the broadcast index, by leaf number, sharded on it."""
    found: dict[int, Placement] = {}
    for leaf in query.leaves("indices"):
        meta = query.tensors[leaf]
        own = b - (where.ndim - meta.ndim)
        if own >= 0 and meta.shape[own] == size:
            found[leaf] = Shard(own)
    return found


def _is_supported(query: RuleQuery) -> bool:
    """Whether no index is a mask without dims, which adds a dim to the result."""
    metas = [query.tensors[leaf] for leaf in query.leaves("indices")]
    return all(meta.ndim > 0 or meta.dtype not in (torch.bool, torch.uint8) for meta in metas)


def index(query: RuleQuery) -> Iterator[PlacementRule]:
    yield from elementwise.partial_rules(query, [0])
    result = query.outputs[0]
    if result is None or not _is_supported(query):
        return
    where = index_layout(query)
    yield from elementwise.dim_map_rules(query, where.free)
    for b in range(0 if where.masks else where.ndim):
        place = where.at + b
        yield query.line(_sharded_indices(query, where, b, result.shape[place]), [Shard(place)])


def index_put(query: RuleQuery) -> Iterator[PlacementRule]:
    """The values are broadcast to the indexed shape.  If they are accumulated, shards of the index give partial sums."""
    values = query.leaf("values")
    if values is None:
        return
    adds = bool(query["accumulate"])
    yield from elementwise.partial_rules(query, [0, values], elementwise.LINEAR if adds else elementwise.KINDS)
    if not _is_supported(query):
        return
    where, given = index_layout(query), query.tensors[values]
    ndim = len(where.free) + where.ndim

    def cut(place: int, size: int) -> dict[int, Placement]:
        own = place - (ndim - given.ndim)
        return {values: Shard(own)} if own >= 0 and given.shape[own] == size else {}

    for dim, place in where.free:
        yield query.line({0: Shard(dim)} | cut(place, query.tensors[0].shape[dim]), [Shard(dim)])
    for b in range(where.ndim if adds and not where.masks else 0):
        metas = [query.tensors[leaf] for leaf in query.leaves("indices")]
        sizes = [meta.shape[own] for meta in metas if (own := b - (where.ndim - meta.ndim)) >= 0]
        size = next((size for size in sizes if size != 1), 1)
        inputs = _sharded_indices(query, where, b, size) | cut(where.at + b, size)
        yield query.line({0: Partial("sum")} | inputs, [Partial("sum")])


_FREE = "dims that are not indexed go by themselves; places may be cut where the tensor is whole"
_PUTS = ("index_put", "_unsafe_index_put", "_index_put_impl")
_PUT = "dims that are not indexed go by themselves; what is added may be added in parts"


def embedding(query: RuleQuery) -> Iterator[PlacementRule]:
    """The lookup; `padding_idx` and `scale_grad_by_freq` affect the gradient only."""
    yield from elementwise.partial_rules(query, [0])
    result = query.outputs[0]
    if result is None:
        return
    yield from elementwise.dim_map_rules(query, [(1, result.ndim - 1)])
    yield from elementwise.dim_map_rules(query, [(dim, dim) for dim in range(query.meta("indices").ndim)], leaf=1)


def embedding_backward(query: RuleQuery) -> Iterator[PlacementRule]:
    """Gradients of a row add up over ranks, unless they are divided by the frequency of the row among all indices."""
    grad = query.meta("grad_output")
    yield from elementwise.partial_rules(query, [0], elementwise.LINEAR)
    yield elementwise.shard_rule(query, {0: grad.ndim - 1}, 1)
    for dim in range(0 if query["scale_grad_by_freq"] else grad.ndim - 1):
        yield query.line({0: Shard(dim), 1: Shard(dim)}, [Partial("sum")])


def bags(query: RuleQuery) -> Iterator[PlacementRule]:
    """The results are the bags, the bag of each index, the size of each bag, and the positions of the maxima."""
    places = Shard(1) if query["mode"] == MAX_MODE else Replicate()
    yield query.line({0: Shard(1)}, [Shard(1), Replicate(), Replicate(), places])
    if query["mode"] != MAX_MODE:
        for kind in elementwise.LINEAR:
            yield query.line({0: Partial(kind)}, [Partial(kind), Replicate(), Replicate(), Replicate()])


def bags_backward(query: RuleQuery) -> Iterator[PlacementRule]:
    """Each column of a gradient belongs to that column of the table.  A sparse gradient has no dims to shard."""
    if query.get("sparse"):
        return
    places = query.leaf("maximum_indices")
    largest = {places: Shard(1)} if query["mode"] == MAX_MODE and places is not None else {}
    if all(query.tensors[leaf].ndim == 2 for leaf in (0, *largest)):  # torch takes others, too, and reads them as such
        yield query.line({0: Shard(1), **largest}, [Shard(1)])
    for kind in elementwise.LINEAR:
        yield query.line({0: Partial(kind)}, [Partial(kind)])


_BAGS = ["aten._embedding_bag.default", "aten._embedding_bag_forward_only.default"]

RULES: tuple[OpRule, ...] = with_variants(
    rules(FAMILY, _PICKED, ["aten.index_select.default"], index_select),
    rules(FAMILY, _PICKED, ["aten.gather.default"], gather),
    rules(FAMILY, "any place may be looked up in the whole tensor", ["aten.take.default"], take),
    rules(FAMILY, "the mask is the same on all ranks", ["aten.masked_select.default"], only_partial_rules),
    rules(FAMILY, "the mask is the same on all ranks", ["aten.masked_scatter_backward.default"], only_partial_rules),
    rules(FAMILY, _PICKED, ["aten.index_fill.int_Scalar", "aten.index_fill.int_Tensor"], index_fill),
    rules(FAMILY, _WRITTEN, ["aten.select_scatter.default"], write_into_view(select)),
    rules(FAMILY, _WRITTEN, ["aten.slice_scatter.default"], write_into_view(slice_dim)),
    rules(FAMILY, _WRITTEN, ["aten.diagonal_scatter.default"], write_into_view(diagonal)),
    rules(FAMILY, "values decide how long the result is", _COUNTED, only_replicated),
    rules(FAMILY, "steps and offsets are those of the whole in memory", ["aten.as_strided.default"], only_replicated),
    rules(FAMILY, _FREE, ["aten.index.Tensor", "aten._unsafe_index.Tensor"], index),
    rules(FAMILY, _PUT, [f"aten.{name}.default" for name in _PUTS], index_put),
    rules(EMBEDDING_FAMILY, "rows of the table are whole", ["aten.embedding.default"], embedding),
    rules(EMBEDDING_FAMILY, "gradients of rows add up", ["aten.embedding_dense_backward.default"], embedding_backward),
    rules(EMBEDDING_FAMILY, "columns of the table go by themselves", _BAGS, bags),
    rules(EMBEDDING_FAMILY, "columns of the table go by themselves",
          ["aten._embedding_bag_dense_backward.default", "aten._embedding_bag_backward.default"], bags_backward),
)  # fmt: skip
