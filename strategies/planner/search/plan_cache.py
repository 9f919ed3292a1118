"""A* search for the cheapest path between two layouts, over the integers of a state table; and the cache of plans found.

A plan is keyed by everything it depends on: both specs with their exact classes, shard orders and axis names, the
price, the topology, the memory limit, and the flattened axes. A price or topology that is a frozen dataclass is keyed
by its class and its fields; any other by identity, since names need not be unique. A table by identity stands in front,
so that a call with the same objects returns at once.

The state tables of a search are kept for later searches of the same tensor on the same mesh: they hold prices of steps
and no plans. They are not kept for a price that is keyed by identity: such a price may change.

All state belongs to an object that `localtensor._util.ambient` knows. It is bounded, it is cleared with the other
caches, and any number of threads may use it: concurrent writers of one entry write equal values.
"""

from __future__ import annotations

import dataclasses
import heapq
import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.tensor.placement_types import Placement

from localtensor._util import ambient
from localtensor.concurrency import THREAD_SYNC, IdentityKey, SingleFlightCache, Stats, Sync
from localtensor.errors import LocalTensorError, refusal_sentence
from localtensor.layout import Spec
from strategies.model.call_signature import spec_key
from strategies.planner.search.edges import DONE, INF, AdmissibleHeuristic, Edge, LegalEdges, edge_memory
from strategies.planner.search.state_table import StateTable, StepKind, placement_key
from strategies.planner.steps.plan import Plan, Price
from strategies.planner.steps.prices import Topology


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The cheapest path."""

    states: tuple[int, ...]
    """The layouts from the source to the destination."""
    sorts: tuple[StepKind, ...]
    """The steps between them."""
    cost: int
    expanded: int
    """The number of layouts expanded."""
    pruned: int
    """The number of layouts reached but not expanded: the heuristic rules out a cheaper path through them."""
    other_cost: int
    """A lower bound on the cost of any path with another first step."""


class AStarSearch:
    """A search from `src` to `dst`, both integers of the table, by steps that need no more than `limit` bytes."""

    def __init__(self, table: StateTable, src: int, dst: int, limit: int | None = None) -> None:
        self.table, self.src, self.dst = table, src, dst
        self.bound = AdmissibleHeuristic(table, dst)
        self.edges = LegalEdges(table, self.bound, limit).of

    def cheapest(self) -> SearchResult | None:
        """The cheapest path, or None. Ties are broken by the layouts' numbers, so it is the same in every process."""
        bound, grows, values = self.bound, self.table.grows, self.values(self.src)
        at = bound.at
        best, came = {self.src: 0}, dict[int, tuple[int, StepKind]]()
        first: list[Edge] = []
        grows = grows and self.table.count > 1  # along one axis all is near
        queue = [(bound.solve(values) if grows else 0, 0, self.src, values)]
        done = set()
        while queue:
            total, below, state, values = heapq.heappop(queue)
            if state in done:
                continue
            if grows:  # the bound may have grown since this was put here
                better = bound.solve(values, total + below) - below
                if better > total:
                    heapq.heappush(queue, (better, below, state, values))
                    continue
            done.add(state)
            if state == self.dst:
                return self._found(came, total, len(done), len(best), first)
            edges = self.edges(state, values)
            first = first or edges
            for there, its, more, sort in edges:
                cost = more - below
                if cost < best.get(there, INF):
                    best[there] = cost
                    came[there] = state, sort
                    heapq.heappush(queue, (cost + at(its), -cost, there, its))
        return None

    def leanest(self) -> int:
        """The least memory limit with which a path exists: the smallest possible maximum over the steps of a path."""
        best, done = {self.src: 0}, set()
        queue = [(0, self.src, self.values(self.src))]
        while queue:
            most, state, values = heapq.heappop(queue)
            if state == self.dst:
                return most
            if state in done:
                continue
            done.add(state)
            for there, its, _, sort in self.edges(state, values):
                more = max(most, edge_memory(self.table, sort, self.table.piece(state), self.table.piece(there)))
                if more < best.get(there, INF):
                    best[there] = more
                    heapq.heappush(queue, (more, there, its))
        return INF

    def _found(
        self, came: dict[int, tuple[int, StepKind]], cost: int, expanded: int, reached: int, edges: list[Edge]
    ) -> SearchResult:
        states, sorts = [self.dst], []
        while states[-1] != self.src:
            state, sort = came[states[-1]]
            states.append(state)
            sorts.append(sort)
        first, at = states[-2] if sorts else self.src, self.bound.at
        others = [more + at(its) for there, its, more, _ in edges if there != first]
        least = min(others, default=INF)
        return SearchResult(tuple(states[::-1]), tuple(sorts[::-1]), cost, expanded, reached - expanded, least)

    def values(self, state: int) -> int:
        """The abstract values of a layout, as the heuristic reads them."""
        table, found, beneath = self.table, 0, dict[tuple[int, int], int]()
        fields = [(*table.field(state, i), i) for i in range(table.count)]
        for p, turn, i in sorted(fields, key=operator.itemgetter(1)):
            value = self.bound.value(i, p, turn, beneath.get((table.dims[p], turn - 1), DONE))
            beneath[table.dims[p], turn] = value
            found += value << self.bound.width * i
        return found


MOST_PLANS, MOST_TABLES = 4096, 64
"""The most plans keyed by identity, and the most tables. Beyond that they are dropped, which costs time only."""


class NoPlan(LocalTensorError):
    """There is no path, or none within the memory limit; then `leanest` is the plan that needs least memory."""

    def __init__(self, argument: str, values: str, problem: str, remedy: str, leanest: Plan | None = None) -> None:
        super().__init__(refusal_sentence("plan", argument, values, problem, remedy))
        self.leanest = leanest


class PlanCache:
    """The plan cache; any number of threads may use one object."""

    __slots__ = ("__weakref__", "_cache", "_tables", "same")

    def __init__(self, sync: Sync = THREAD_SYNC) -> None:
        self._cache: SingleFlightCache[Plan] = SingleFlightCache(name="plans", sync=sync)
        # `clear` replaces both, so that a call already in progress does not fill the new ones.
        self.same: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self._tables: dict[Hashable, StateTable] = {}
        ambient.add_cache(self)

    def get(
        self, search: Callable[..., Plan], src: Spec, dst: Spec, price: Price | None, topology: Topology,
        memory: int | None, flattened: tuple[tuple[str, ...], ...],
    ) -> Plan:  # fmt: skip
        """The plan, keyed by the values of everything it depends on. Errors of `search` are not cached."""
        same = self.same
        ends = src.mesh, spec_key(src), dst.mesh, spec_key(dst)
        key = *ends, value_key(price), value_key(topology), memory, flattened
        found = self._cache.get(key, search, src, dst, price, topology, memory, flattened)
        if not flattened:
            if len(same) >= MOST_PLANS:
                same.clear()
            # What is named by identity is held, so that no identity is used twice.
            same[id(src), id(dst), id(price), id(topology), memory] = (found, src, dst, price, topology)
        return found

    def table(self, src: Spec, offered: Sequence[Placement], axes: Sequence[Sequence[int]], price: Price) -> StateTable:
        """The state table for searches from specs like this one."""
        by = value_key(price)
        if isinstance(by, IdentityKey):
            return StateTable(src, offered, axes, price)
        tables = self._tables
        held = tuple(map(placement_key, src.placements))
        key = src.mesh, src.shape, src.dtype, held, tuple(map(placement_key, offered)), tuple(map(tuple, axes)), by
        found = tables.get(key)
        if found is None:
            if len(tables) >= MOST_TABLES:
                tables.clear()
            found = tables[key] = StateTable(src, offered, axes, price)
        return found

    def clear(self) -> None:
        """Drops all plans and tables; a search in progress is not cached."""
        self._cache.clear()
        self.same, self._tables = {}, {}

    def after_fork(self) -> None:
        """Nothing to repair in a forked child: `SingleFlightCache` handles its searches in progress, and the rest is values."""

    def stats(self) -> Stats:
        """Statistics of the lookups by value; lookups by identity are not counted."""
        return self._cache.stats()


def value_key(thing: object) -> Hashable:
    """A key for an object: a frozen dataclass by class and value, any other object by identity.

    >>> from strategies.planner.steps.prices import Sent, bytes_sent
    >>> value_key(Sent()) == value_key(Sent()), value_key(bytes_sent) == value_key(bytes_sent), value_key(bytes_sent) == value_key(len)
    (True, True, False)
    """
    parameters = getattr(type(thing), "__dataclass_params__", None)
    if parameters is not None and parameters.frozen and parameters.eq and dataclasses.is_dataclass(thing):
        try:
            hash(thing)
        except TypeError:  # a field is a list, say, which may change
            return IdentityKey(thing)
        return type(thing), thing
    return IdentityKey(thing)
