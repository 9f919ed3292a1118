"""Indexing with tensors, one for each dim or none: `x[i, :, j]`, and writing there.

The index tensors are broadcast together.  Their dims stand in the result where the indexed dims stood, if those are
neighbours, and in front if not; a mask stands for as many dims as it has, and gives one, whose size its values decide.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.placement_types import Placement

from strategies.model.rule import Leaf
from strategies.ops.lib.dim_maps import KINDS, LINEAR, mapped, pending
from strategies.ops.lib.overload_variants import with_variants
from strategies.ops.semantics.rulebook import Ask, Entry, Line, rules

FAMILY = "indexing"


@dataclass(frozen=True, slots=True)
class Layout:
    """Where dims go: `free` pairs a dim that is not indexed with its place in what is read; `at` is the place of the
    first dim of the broadcast index, which has `ndim` dims; `masks` says whether any index is a mask."""

    free: tuple[tuple[int, int], ...]
    at: int
    ndim: int
    masks: bool


def layout(ask: Ask) -> Layout:
    """How the indices of this call lie on the dims of the first tensor."""
    given = ask.meta("self")
    dim, indexed, ndim, masks = 0, list[int](), 0, False
    for index in ask["indices"]:
        if not isinstance(index, Leaf):
            dim += 1
            continue
        meta = ask.tensors[index.index]
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
    return Layout(tuple(places), at, ndim, masks)


def _cut_indices(ask: Ask, where: Layout, b: int, size: int) -> dict[int, Placement]:
    """Each index tensor that has dim b of the broadcast index, counted from the front, cut on it."""
    found: dict[int, Placement] = {}
    for leaf in ask.leaves("indices"):
        meta = ask.tensors[leaf]
        own = b - (where.ndim - meta.ndim)
        if own >= 0 and meta.shape[own] == size:
            found[leaf] = Shard(own)
    return found


def _knowable(ask: Ask) -> bool:
    """A mask of no dims gives a dim without taking one, and what is written may be a row of booleans: left alone."""
    metas = [ask.tensors[leaf] for leaf in ask.leaves("indices")]
    return all(meta.ndim > 0 or meta.dtype not in (torch.bool, torch.uint8) for meta in metas)


def index(ask: Ask) -> Iterator[Line]:
    yield from pending(ask, [0])
    result = ask.outputs[0]
    if result is None or not _knowable(ask):
        return
    where = layout(ask)
    yield from mapped(ask, where.free)
    for b in range(0 if where.masks else where.ndim):
        place = where.at + b
        yield ask.line(_cut_indices(ask, where, b, result.shape[place]), [Shard(place)])


def index_put(ask: Ask) -> Iterator[Line]:
    """Values are broadcast to what would be read there.  Where they are added, parts of the places add to parts."""
    values = ask.leaf("values")
    if values is None:
        return
    adds = bool(ask["accumulate"])
    yield from pending(ask, [0, values], LINEAR if adds else KINDS)
    if not _knowable(ask):
        return
    where, given = layout(ask), ask.tensors[values]
    ndim = len(where.free) + where.ndim

    def cut(place: int, size: int) -> dict[int, Placement]:
        own = place - (ndim - given.ndim)
        return {values: Shard(own)} if own >= 0 and given.shape[own] == size else {}

    for dim, place in where.free:
        yield ask.line({0: Shard(dim)} | cut(place, ask.tensors[0].shape[dim]), [Shard(dim)])
    for b in range(where.ndim if adds and not where.masks else 0):
        size = _broadcast(ask, where, b)
        inputs = _cut_indices(ask, where, b, size) | cut(where.at + b, size)
        yield ask.line({0: Partial("sum")} | inputs, [Partial("sum")])


def _broadcast(ask: Ask, where: Layout, b: int) -> int:
    metas = [ask.tensors[leaf] for leaf in ask.leaves("indices")]
    sizes = [meta.shape[own] for meta in metas if (own := b - (where.ndim - meta.ndim)) >= 0]
    return next((size for size in sizes if size != 1), 1)


_FREE = "dims that are not indexed go by themselves; places may be cut where the tensor is whole"
_PUTS = ("index_put", "_unsafe_index_put", "_index_put_impl")
_PUT = "dims that are not indexed go by themselves; what is added may be added in parts"

RULES: tuple[Entry, ...] = with_variants(
    (
        *rules(FAMILY, _FREE, ["aten.index.Tensor", "aten._unsafe_index.Tensor"], index),
        *rules(FAMILY, _PUT, [f"aten.{name}.default" for name in _PUTS], index_put),
    )
)
