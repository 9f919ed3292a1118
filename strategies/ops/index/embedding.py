"""Rows of a table looked up by number, and their gradients put back: the rows of the table are whole.

A cut of the rows would need each rank to answer for its own rows alone, with zeros for the others: no arrangement of
the pieces says that, so there is no such line.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.distributed.tensor import Partial, Shard

from strategies.ops.lib.dim_maps import LINEAR, mapped, pending, sharded
from strategies.ops.lib.overload_variants import with_variants
from strategies.ops.semantics.rulebook import Ask, Entry, Line, rules

FAMILY = "embedding"


def embedding(ask: Ask) -> Iterator[Line]:
    """`padding_idx` and `scale_grad_by_freq` change the gradient only."""
    yield from pending(ask, [0])
    result = ask.outputs[0]
    if result is None:
        return
    yield from mapped(ask, [(1, result.ndim - 1)])
    yield from mapped(ask, [(dim, dim) for dim in range(ask.meta("indices").ndim)], leaf=1)


def embedding_backward(ask: Ask) -> Iterator[Line]:
    """Gradients of the same row add up, also those of several ranks; but not where each is divided by how often
    its row was asked for, of which a rank that has some of the indices knows only a part."""
    grad = ask.meta("grad_output")
    yield from pending(ask, [0], LINEAR)
    yield sharded(ask, {0: grad.ndim - 1}, 1)
    for dim in range(0 if ask["scale_grad_by_freq"] else grad.ndim - 1):
        yield ask.line({0: Shard(dim), 1: Shard(dim)}, [Partial("sum")])


RULES: tuple[Entry, ...] = with_variants(
    (
        *rules(FAMILY, "rows of the table are whole", ["aten.embedding.default"], embedding),
        *rules(FAMILY, "gradients of rows add up", ["aten.embedding_dense_backward.default"], embedding_backward),
    )
)
