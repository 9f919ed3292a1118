"""Plans that were asked for before, and the refusal where there is none.

A plan is known by all that it depends on: both specs with their exact classes, turns and axis names, the price, the
topology, the memory that is allowed, and the flattened axes.  A price or topology that is a frozen dataclass is known
by its class and its fields; any other by the object, since a name may be anybody's.  In front of that stands a
table by identity: who asks for the same objects again is answered at once.

The tables of integers that a search begins with are kept, too, for the next search for the same tensor on the same
mesh: they hold prices of steps and no answers.  Not for a price that is known by the object alone: it may change.

All of it is an object's, which `localtensor._util.ambient` can find: it is bounded, cleared with the other caches, and any
number of threads may use it, since what two of them put in one place at the same time is the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch.distributed.tensor.placement_types import Placement

from localtensor._util import ambient
from localtensor.concurrency import THREADS, Same, SingleFlightCache, Stats, Sync
from localtensor.errors import LocalTensorError, refusal
from localtensor.layout import Spec
from strategies.model.call_signature import spec_token
from strategies.planner.search.state_table import Table, facts
from strategies.planner.steps.plan import Plan, Price
from strategies.planner.steps.prices import Topology

LIMIT, TABLES = 4096, 64
"""So many plans are known by identity, and so many tables; then these are forgotten, which costs time only."""


class NoPlan(LocalTensorError):
    """There is no way from one spec to another, or none within the memory that is allowed; then there is a `leanest`."""

    def __init__(self, argument: str, values: str, problem: str, remedy: str, leanest: Plan | None = None) -> None:
        super().__init__(refusal("plan", argument, values, problem, remedy))
        self.leanest = leanest


class Known:
    """What was planned; one object may be used by any number of threads."""

    __slots__ = ("__weakref__", "_cache", "_tables", "same")

    def __init__(self, sync: Sync = THREADS) -> None:
        self._cache: SingleFlightCache[Plan] = SingleFlightCache(name="plans", sync=sync)
        # Both are replaced by `clear`, so that who asked before does not fill the new ones.
        self.same: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self._tables: dict[Hashable, Table] = {}
        ambient.add_cache(self)

    def get(
        self, search: Callable[..., Plan], src: Spec, dst: Spec, price: Price | None, topology: Topology,
        memory: int | None, flattened: tuple[tuple[str, ...], ...],
    ) -> Plan:  # fmt: skip
        """The plan, by the values of all that it depends on; what `search` raises is raised, and not kept."""
        same = self.same
        key = (
            src.mesh, spec_token(src), dst.mesh, spec_token(dst), by_value(price), by_value(topology),
            memory, flattened,
        )  # fmt: skip
        found = self._cache.get(key, search, src, dst, price, topology, memory, flattened)
        if not flattened:
            if len(same) >= LIMIT:
                same.clear()
            # What is named by identity is held, so that no identity is used twice.
            same[id(src), id(dst), id(price), id(topology), memory] = (found, src, dst, price, topology)
        return found

    def table(self, src: Spec, offered: Sequence[Placement], axes: Sequence[Sequence[int]], price: Price) -> Table:
        """The table for searches from specs like this one."""
        by = by_value(price)
        if isinstance(by, Same):
            return Table(src, offered, axes, price)
        tables = self._tables
        held = tuple(map(facts, src.placements))
        key = src.mesh, src.shape, src.dtype, held, tuple(map(facts, offered)), tuple(map(tuple, axes)), by
        found = tables.get(key)
        if found is None:
            if len(tables) >= TABLES:
                tables.clear()
            found = tables[key] = Table(src, offered, axes, price)
        return found

    def clear(self) -> None:
        """Nothing is known; what is being searched is not kept."""
        self._cache.clear()
        self.same, self._tables = {}, {}

    def after_fork(self) -> None:
        """Nothing is lost to those who are gone: what they were searching is `SingleFlightCache`'s matter, and the rest is values."""

    def stats(self) -> Stats:
        """Those of the plans by value; who was answered by identity is not counted."""
        return self._cache.stats()


def by_value(thing: object) -> Hashable:
    """A frozen dataclass with its class, or the very object.

    >>> from strategies.planner.steps.prices import Sent, sent
    >>> by_value(Sent()) == by_value(Sent()), by_value(sent) == by_value(sent), by_value(sent) == by_value(len)
    (True, True, False)
    """
    parameters = getattr(type(thing), "__dataclass_params__", None)
    if parameters is not None and parameters.frozen and parameters.eq and dataclasses.is_dataclass(thing):
        try:
            hash(thing)
        except TypeError:  # a field is a list, say, which may change
            return Same(thing)
        return type(thing), thing
    return Same(thing)
