"""Rows of a table looked up by number, and their gradients put back: the rows of the table are whole.

A cut of the rows would need each rank to answer for its own rows alone, with zeros for the others: no arrangement of
the pieces says that, so there is no such line.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.distributed.tensor import Partial, Replicate, Shard

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


EMBEDDING_RULES: tuple[Entry, ...] = with_variants(
    (
        *rules(FAMILY, "rows of the table are whole", ["aten.embedding.default"], embedding),
        *rules(FAMILY, "gradients of rows add up", ["aten.embedding_dense_backward.default"], embedding_backward),
    )
)


# Rows of a table looked up and folded, bag by bag: columns of the table go by themselves.
#
# Where a bag begins is a number in `offsets` that speaks of all indices, so neither is cut.

MAX = 2
"""The mode that keeps the largest row, and its place."""


def bags(ask: Ask) -> Iterator[Line]:
    """Results are the bags, then which bag each index is in, how large each bag is, and the places of the largest."""
    places = Shard(1) if ask["mode"] == MAX else Replicate()
    yield ask.line({0: Shard(1)}, [Shard(1), Replicate(), Replicate(), places])
    if ask["mode"] != MAX:
        for kind in LINEAR:
            yield ask.line({0: Partial(kind)}, [Partial(kind), Replicate(), Replicate(), Replicate()])


def bags_backward(ask: Ask) -> Iterator[Line]:
    """Each column of a gradient goes to that column of the table.  A sparse gradient has no dims to cut."""
    if ask.get("sparse"):
        return
    places = ask.leaf("maximum_indices")
    largest = {places: Shard(1)} if ask["mode"] == MAX and places is not None else {}
    yield ask.line({0: Shard(1), **largest}, [Shard(1)])
    for kind in LINEAR:
        yield ask.line({0: Partial(kind)}, [Partial(kind)])


_BAGS = ["aten._embedding_bag.default", "aten._embedding_bag_forward_only.default"]

EMBEDDING_BAGS_RULES: tuple[Entry, ...] = with_variants(
    (
        *rules(FAMILY, "columns of the table go by themselves", _BAGS, bags),
        *rules(
            FAMILY,
            "columns of the table go by themselves",
            ["aten._embedding_bag_dense_backward.default", "aten._embedding_bag_backward.default"],
            bags_backward,
        ),
    )
)

RULES: tuple[Entry, ...] = (*EMBEDDING_RULES, *EMBEDDING_BAGS_RULES)
