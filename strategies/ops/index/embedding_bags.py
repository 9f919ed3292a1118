"""Rows of a table looked up and folded, bag by bag: columns of the table go by themselves.

Where a bag begins is a number in `offsets` that speaks of all indices, so neither is cut.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.distributed.tensor import Partial, Replicate, Shard

from strategies.ops.lib.dim_maps import LINEAR
from strategies.ops.lib.overload_variants import with_variants
from strategies.ops.semantics.rulebook import Ask, Entry, Line, rules

FAMILY = "embedding"
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

RULES: tuple[Entry, ...] = with_variants(
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
