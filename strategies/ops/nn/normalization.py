"""Rules of normalization.

Layer and RMS norm normalise the last dims, so the dims before may be sharded; the gradients of weight and bias are
partial sums.  Batch norm has statistics for each channel, so channels may be sharded with all per-channel tensors.  The
other dims determine the statistics in training, and may be sharded only if the statistics are given.  Group norm has
statistics for each row, and an argument for the number of rows, which is local.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from strategies.ops.lib.elementwise import linear_in
from strategies.ops.lib.overload_variants import with_variants
from strategies.ops.semantics.rule_registry import Meta, OpRule, PlacementRule, RuleQuery, rules

SUM = Partial("sum")
CHANNEL = 1
TRAINS_BY_DEFAULT = ("aten._batch_norm_with_update.default", "aten._batch_norm_with_update_functional.default")
"""Overloads without a flag that train."""


def layer_norm(query: RuleQuery) -> Iterator[PlacementRule]:
    """Forward of layer norm; weight and bias are replicated."""
    learned = [query.tensors[leaf].shape for name in ("weight", "bias") for leaf in query.leaves(name)]
    if any(shape != tuple(query["normalized_shape"]) for shape in learned):
        return  # RMS norm broadcasts weights of another shape
    for dim in range(_front(query)):
        yield query.line({0: Shard(dim)}, [Shard(dim)] * len(query.outputs))


def layer_norm_backward(query: RuleQuery) -> Iterator[PlacementRule]:
    """The gradient of the input is sharded like the incoming one; those of weight and bias are partial sums."""
    saved = [leaf for name in ("grad_out", "input", "mean", "rstd") for leaf in query.leaves(name)]
    for dim in range(_front(query)):
        grads: list[Placement] = [Shard(dim), *[SUM] * (len(query.outputs) - 1)]
        yield query.line(dict.fromkeys(saved, Shard(dim)), query.masked(grads))
    yield from linear_in(query, query.leaf("grad_out"))


def _front(query: RuleQuery) -> int:
    return query.meta("input").ndim - len(query["normalized_shape"])


def batch_norm(query: RuleQuery) -> Iterator[PlacementRule]:
    """Forward of batch norm: by channel; if statistics are given, by all other dims, too."""
    if _opaque(query):
        return
    training = uses_batch_statistics(query)
    yield query.line(_by_channel(query), _channels(query), "filled" if training else "any")
    if not training:
        rest = query.on_each(Replicate())[1:]
        yield from (query.line({0: Shard(dim)}, [Shard(dim), *rest]) for dim in _others(query))


def batch_norm_backward(query: RuleQuery) -> Iterator[PlacementRule]:
    """By channel; if statistics were given, by all other dims, with partial gradients of weight and bias.

    No shard may be empty: torch 2.13 divides by the number of channels, and crashes without any.
    """
    if not _opaque(query):
        yield query.line(_by_channel(query), _channels(query), "filled")
        big = [leaf for name in ("grad_out", "input") for leaf in query.leaves(name)]
        for dim in _others(query) if not uses_batch_statistics(query) else ():
            yield query.line(dict.fromkeys(big, Shard(dim)), query.masked([Shard(dim), SUM, SUM]), "filled")
    yield from linear_in(query, query.leaf("grad_out"))


def uses_batch_statistics(query: RuleQuery) -> bool:
    """Whether the statistics are those of the batch."""
    return any(query.get(name) for name in ("training", "train", "update")) or query.op in TRAINS_BY_DEFAULT


def group_norm(query: RuleQuery) -> Iterator[PlacementRule]:
    """Group norm by row, not by group of channels: its kernel rejects strided pieces."""
    if query["N"] == rows(query)["N"]:
        yield query.line({0: Shard(0)}, [Shard(0)] * 3)


def group_norm_backward(query: RuleQuery) -> Iterator[PlacementRule]:
    """By row; the gradients of weight and bias are partial sums."""
    if query["N"] == rows(query)["N"]:
        big = [leaf for name in ("grad_out", "input", "mean", "rstd") for leaf in query.leaves(name)]
        yield query.line(dict.fromkeys(big, Shard(0)), query.masked([Shard(0), SUM, SUM]))
    yield from linear_in(query, query.leaf("grad_out"))


def rows(query: RuleQuery) -> dict[str, int]:
    """The own arguments of group norm: the number of rows."""
    return {"N": query.meta("input").shape[0]}


def _by_channel(query: RuleQuery) -> dict[int, Placement]:
    """Every tensor with channels sharded by them; empty ones, such as statistics that were not saved, are replicated."""
    channels = query.meta("input").shape[CHANNEL]
    return {leaf: _channel(meta) for leaf, meta in enumerate(query.tensors) if meta.shape != (0,) or not channels}


def _channels(query: RuleQuery) -> list[Placement | None]:
    return [None if meta is None else _channel(meta) for meta in query.outputs]


def _channel(meta: Meta) -> Placement:
    """The shard of channels: dim 1 of the input and its like, dim 0 of per-channel tensors; none of a kernel's bytes."""
    if meta.dtype == torch.uint8:
        return Replicate()
    return Shard(CHANNEL if meta.ndim > 1 else 0)


def _others(query: RuleQuery) -> list[int]:
    return [dim for dim in range(query.meta("input").ndim) if dim != CHANNEL]


def _opaque(query: RuleQuery) -> bool:
    """Whether a kernel passes its own bytes from forward to backward, which cannot be sharded."""
    metas = filter(None, (*query.tensors, *query.outputs))
    return any(meta.dtype == torch.uint8 and meta.shape != (0,) for meta in metas)


def renorm(query: RuleQuery) -> Iterator[PlacementRule]:
    """renorm: each slice along a dim is scaled by its own norm."""
    (dim,) = query.dims("dim")
    yield query.line({0: Shard(dim)}, [Shard(dim)])


RULES: tuple[OpRule, ...] = with_variants(
    rules("norms", "the last dims are normalised together",
          ["aten.native_layer_norm.default", "aten._fused_rms_norm.default"], layer_norm),
    rules("norms", "rows are normalised one by one; what is learned is summed over them",
          ["aten.native_layer_norm_backward.default", "aten._fused_rms_norm_backward.default"], layer_norm_backward),
    rules("norms", "each channel has statistics of its own",
          ["aten.native_batch_norm.default", "aten._native_batch_norm_legit.default",
           "aten._native_batch_norm_legit.no_stats", "aten._native_batch_norm_legit_functional.default",
           "aten._native_batch_norm_legit_no_training.default", "aten._batch_norm_with_update.default",
           "aten._batch_norm_with_update_functional.default"], batch_norm),
    rules("norms", "each channel has statistics of its own",
          ["aten.native_batch_norm_backward.default", "aten.batch_norm_backward.default"], batch_norm_backward),
    rules("norms", "each row has statistics of its own for each group of channels",
          ["aten.native_group_norm.default"], group_norm, own=rows),
    rules("norms", "each row has statistics of its own; what is learned is summed over them",
          ["aten.native_group_norm_backward.default"], group_norm_backward, own=rows),
    rules("norms", "one norm for each place along a dim", ["aten.renorm.default"], renorm),
)  # fmt: skip
