"""Rules of fused attention and of gated linear units.

Attention is sharded by batch, by head, and by query if no causal mask depends on its position.  All kernels share one
rule: they differ in the names of the mask and in further results.  The random state is equal on all ranks; with
dropout, the dropped elements differ by rank as they differ by run.  A gated linear unit is `a * sigmoid(b)` of the two
halves of a dim; every other dim is a batch.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from strategies.ops.lib.elementwise import linear_partial_rules, named_shard_rule
from strategies.ops.lib.overload_variants import with_variants
from strategies.ops.semantics.rule_registry import Cut, OpRule, PlacementRule, RuleQuery, rules

BATCH, HEADS, QUERIES = 0, 1, 2
ROWS = ("grad_out", "grad_out_", "query", "out", "logsumexp")
"""Arguments with a row for each query, after the batch and the heads."""


def _mask(query: RuleQuery) -> int | None:
    given = query.leaf("attn_mask")
    return query.leaf("attn_bias") if given is None else given


def _mask_dim(query: RuleQuery, dim: int) -> int | None:
    """The mask's dim for this dim of the scores; None if it is missing or of size 1."""
    leaf = _mask(query)
    if leaf is None:
        return None
    mask = query.tensors[leaf]
    own = dim - 4 + mask.ndim
    return own if own >= 0 and mask.shape[own] != 1 else None


def _inputs(query: RuleQuery, dim: int) -> dict[int, Placement]:
    """The inputs that are sharded with this dim of the scores: keys and values have no dim of queries."""
    names = ROWS if dim == QUERIES else (*ROWS, "key", "value")
    made: dict[int, Placement] = {leaf: Shard(dim) for name in names for leaf in query.leaves(name)}
    own = _mask_dim(query, dim)
    leaf = _mask(query)
    return made if own is None or leaf is None else {**made, leaf: Shard(own)}


def _dims(query: RuleQuery) -> Iterator[tuple[int, Cut]]:
    yield BATCH, "filled"
    yield HEADS, "filled" if query.meta("query").shape[HEADS] == query.meta("key").shape[HEADS] else "even"


def _shards_queries(query: RuleQuery) -> bool:
    """Whether queries may be sharded: only the CPU kernels have an unpadded logsumexp for each query."""
    return "for_cpu" in query.op and not query["is_causal"] and not query["dropout_p"]


def forward(query: RuleQuery) -> Iterator[PlacementRule]:
    if query.get("return_debug_mask"):
        return
    rest = [Replicate()] * (len(query.outputs) - 2)
    for dim, cut in _dims(query):
        yield query.line(_inputs(query, dim), query.masked([Shard(dim), Shard(dim), *rest]), cut)
    if _shards_queries(query):
        yield query.line(_inputs(query, QUERIES), query.masked([Shard(QUERIES), Shard(QUERIES), *rest]), "filled")


def backward(query: RuleQuery) -> Iterator[PlacementRule]:
    """The gradient of a replicated mask is a partial sum."""
    for dim, cut in _dims(query):
        yield query.line(_inputs(query, dim), query.masked(_gradients(query, [Shard(dim)] * 3, dim)), cut)
    if _shards_queries(query):
        made = [Shard(QUERIES), Partial("sum"), Partial("sum")]
        yield query.line(_inputs(query, QUERIES), query.masked(_gradients(query, made, QUERIES)), "filled")


def _gradients(query: RuleQuery, made: list[Placement], dim: int) -> list[Placement]:
    if len(query.outputs) == len(made):
        return made
    own = _mask_dim(query, dim)
    return [*made, Partial("sum") if own is None else Shard(own)]


KERNELS = [
    "flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention",
    "fused_attention_overrideable",
]  # fmt: skip


def glu(query: RuleQuery) -> Iterator[PlacementRule]:
    (halved,) = query.dims("dim", query.leaf("self") or 0)
    for dim in range(query.meta("self").ndim):
        if dim != halved:
            yield named_shard_rule(query, {"self": dim}, [dim])


def glu_backward(query: RuleQuery) -> Iterator[PlacementRule]:
    """The backward, linear in the gradient."""
    (halved,) = query.dims("dim", query.leaf("self") or 0)
    for dim in range(query.meta("self").ndim):
        if dim != halved:
            yield named_shard_rule(query, {"grad_output": dim, "self": dim}, [dim])
    yield from linear_partial_rules(query, ["grad_output"])


RULES: tuple[OpRule, ...] = with_variants(
    rules("attention", "each head of each sequence attends to itself",
          [f"aten._scaled_dot_product_{name}.default" for name in KERNELS], forward),
    rules("attention", "each head of each sequence attends to itself, forwards and back",
          [f"aten._scaled_dot_product_{name}_backward.default" for name in KERNELS], backward),
    rules("gates", "the two halves meet element by element", ["aten.glu.default"], glu),
    rules("gates", "the two halves meet element by element", ["aten.glu_backward.default"], glu_backward),
)  # fmt: skip
