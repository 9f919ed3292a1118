"""A* search for the cheapest path between two layouts, over the integers of a `StateTable`, guided by a `AdmissibleHeuristic`."""

from __future__ import annotations

import heapq
import operator
from dataclasses import dataclass

from strategies.planner.search.edges import DONE, INF, AdmissibleHeuristic, Edge, LegalEdges, edge_memory
from strategies.planner.search.state_table import StateTable, StepKind


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
