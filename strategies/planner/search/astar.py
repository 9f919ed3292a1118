"""The cheapest way from one layout to another: A* over the integers of a `Table`, led by a `Bound`."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from strategies.planner.search.edges import DONE, FAR, Bound, Edge, Edges, need
from strategies.planner.search.state_table import Sort, Table


@dataclass(frozen=True, slots=True)
class Found:
    """A cheapest way."""

    states: tuple[int, ...]
    """The layouts from the source to the destination."""
    sorts: tuple[Sort, ...]
    """The steps between them."""
    cost: int
    looked: int
    """How many layouts were looked at."""
    met: int
    """How many were found beside those: the bound says that no cheaper way leads through them."""
    other: int
    """No way that begins with another step costs less than this."""


class Search:
    """From `src` to `dst`, both integers of the table, by steps that need no more than `limit` bytes."""

    def __init__(self, table: Table, src: int, dst: int, limit: int | None = None) -> None:
        self.table, self.src, self.dst = table, src, dst
        self.bound = Bound(table, dst)
        self.edges = Edges(table, self.bound, limit).of

    def cheapest(self) -> Found | None:
        """The same in every process: equal costs are settled by the layouts' numbers.  None if there is no way."""
        bound, grows, values = self.bound, self.table.grows, self.values(self.src)
        at = bound.at
        best, came = {self.src: 0}, dict[int, tuple[int, Sort]]()
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
                if cost < best.get(there, FAR):
                    best[there] = cost
                    came[there] = state, sort
                    heapq.heappush(queue, (cost + at(its), -cost, there, its))
        return None

    def leanest(self) -> int:
        """The least memory with which there is a way: that of the step which needs most, on the way where it is least."""
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
                more = max(most, need(self.table, sort, self.table.piece(state), self.table.piece(there)))
                if more < best.get(there, FAR):
                    best[there] = more
                    heapq.heappush(queue, (more, there, its))
        return FAR

    def _found(
        self, came: dict[int, tuple[int, Sort]], cost: int, looked: int, met: int, edges: list[Edge]
    ) -> Found:  # fmt: skip
        states, sorts = [self.dst], []
        while states[-1] != self.src:
            state, sort = came[states[-1]]
            states.append(state)
            sorts.append(sort)
        first, at = states[-2] if sorts else self.src, self.bound.at
        others = [more + at(its) for there, its, more, _ in edges if there != first]
        return Found(tuple(states[::-1]), tuple(sorts[::-1]), cost, looked, met - looked, min(others, default=FAR))

    def values(self, state: int) -> int:
        """The values of a layout, for the bound."""
        table, found, beneath = self.table, 0, dict[tuple[int, int], int]()
        fields = [(*table.field(state, i), i) for i in range(table.count)]
        for p, turn, i in sorted(fields, key=_turn):
            value = self.bound.value(i, p, turn, beneath.get((table.dims[p], turn - 1), DONE))
            beneath[table.dims[p], turn] = value
            found += value << self.bound.width * i
        return found


def _turn(field: tuple[int, int, int]) -> int:
    return field[1]
