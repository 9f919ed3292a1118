"""Programs over our propagator: under every schedule several threads get the answers that one thread gets alone."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from localtensor.concurrency import Program, ScheduledSync
from localtensor.layout import Mesh, Spec, parse
from strategies.ops.semantics.rule_registry import PlacementRule, RuleQuery, RuleRegistry, rules
from strategies.propagation import propagator
from strategies.propagation.propagator import Propagator
from strategies.propagation.races import explore as races
from strategies.propagation.races.cache_programs import require

MESH = Mesh.of(dp=2)


def _same(query: RuleQuery) -> Iterator[PlacementRule]:
    for dim in range(2):
        cut = parse(f"S({dim})")
        yield PlacementRule((cut,), (cut,))


BOOK = RuleRegistry.of(
    *rules("pointwise", "each element goes by itself", ["aten.neg.default", "aten.abs.default"], _same)
)
KEYS = {
    "neg, rows": ("aten.neg.default", "S(0)"),
    "neg, columns": ("aten.neg.default", "S(1)"),
    "abs": ("aten.abs.default", "S(0)"),
}


def _ask(propagator: Propagator, key: str) -> str:
    op, placement = KEYS[key]
    return repr(propagator.propagate(op, [Spec(MESH, (parse(placement),), (4, 2), torch.float32)]))


ALONE = {key: _ask(Propagator(BOOK), key) for key in KEYS}


def same_key(sync: ScheduledSync) -> Program:
    """Three threads ask the same: one computes, all get what one thread gets alone."""
    propagator = Propagator(BOOK, sync=sync)

    def ask() -> None:
        require(_ask(propagator, "neg, rows") == ALONE["neg, rows"], "another answer than alone")

    def check() -> None:
        stats = propagator.stats()
        require(stats.misses == 1, f"computed {stats.misses} times: {stats}")

    return Program([ask] * 3, check)


def other_keys(sync: ScheduledSync) -> Program:
    """Keys that differ in the op or in a placement: each is computed once, and none is taken for another."""
    propagator = Propagator(BOOK, sync=sync)

    def ask(*keys: str) -> None:
        for key in keys:
            require(_ask(propagator, key) == ALONE[key], f"{key}: another answer than alone")

    def check() -> None:
        stats = propagator.stats()
        require(stats.misses == len(KEYS), f"{len(KEYS)} keys computed {stats.misses} times: {stats}")

    first, second, third = KEYS
    return Program([lambda: ask(first, second), lambda: ask(second, third), lambda: ask(third, first)], check)


def cleared(sync: ScheduledSync) -> Program:
    """A clear while others compute: no deadlock, and the same answers."""
    propagator = Propagator(BOOK, sync=sync)

    def ask() -> None:
        require(_ask(propagator, "abs") == ALONE["abs"], "another answer than alone")

    return Program([ask, propagator.clear, ask])


WITHIN = (propagator, *races.WITHIN)
PROGRAMS = (same_key, other_keys, cleared)
