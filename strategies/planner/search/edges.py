"""The legal steps from a layout and their costs, in integers: what `steps.changes` and `pricing.step_of` say, but fast."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from strategies.planner.search.bound import DONE, Bound
from strategies.planner.search.state_table import Sort, Table
from strategies.planner.steps.prices import memory

Edge = tuple[int, int, int, Sort]
"""A step: the layout after it, its values for the bound, its cost, and its sort."""


class Layout:
    """A layout taken apart: for each axis its field and placement, for each dim its axes in turn and what each leaves."""

    __slots__ = ("cutting", "fields", "held", "lengths", "order")

    def __init__(self, table: Table, state: int) -> None:
        self.cutting = 0
        self.held: list[int] = []
        self.fields: list[int] = []
        self.order: list[list[int]] = [[] for _ in table.shape]
        turns = table.mask >> table.width - table.turns
        for i, shift in enumerate(table.shifts):
            field = state >> shift & table.mask
            p = field >> table.turns
            self.fields.append(field)
            self.held.append(p)
            if table.dims[p] >= 0:
                self.order[table.dims[p]].append((field & turns) << 8 | i)
                self.cutting |= 1 << i
        self.lengths = []
        for d, size in enumerate(table.shape):
            lengths = [size]
            if self.order[d]:
                self.order[d].sort()
                self.order[d] = [key & 255 for key in self.order[d]]
                for i in self.order[d]:
                    lengths.append(table.cut(lengths[-1], table.factors[self.held[i]], table.sizes[i]))
            self.lengths.append(lengths)


class Edges:
    """`of(state, values)` is every legal step from a layout, always in the same order.

    With a `limit` those that need more bytes in use are none.
    """

    def __init__(self, table: Table, bound: Bound, limit: int | None = None) -> None:
        self._table, self._bound, self._limit = table, bound, limit
        self._steps: dict[tuple[int, int], list[tuple[int, Sort]]] = {}

    def of(self, state: int, values: int) -> list[Edge]:
        table, here, found = self._table, Layout(self._table, state), []
        width, mask = self._bound.width, self._bound.mask
        small = [lengths[-1] for lengths in here.lengths]
        before = after = math.prod(small) * table.itemsize
        for i, p in enumerate(here.held):
            d = table.dims[p]
            if d >= 0 and here.order[d][-1] != i:
                continue
            base, kept = state - (here.fields[i] << table.shifts[i]), values & ~(mask << width * i)
            for q, sort in self._steps.get((i, p)) or self._steps_of(i, p):
                e, turn, beneath = table.dims[q], 0, DONE
                if e >= 0:
                    turn = len(here.order[e]) - (d == e)
                    beneath = values >> width * here.order[e][turn - 1] & mask if turn else DONE
                elif table.clashes[q] and any(
                    j != i and other in table.clashes[q] for j, other in enumerate(here.held)
                ):
                    continue
                if sort.late or self._limit is not None:
                    now = small.copy()
                    if d >= 0:
                        now[d] = here.lengths[d][-2]
                    if e >= 0:
                        now[e] = table.cut(here.lengths[e][turn], table.factors[q], table.sizes[i])
                    after = math.prod(now) * table.itemsize
                if self._limit is None or need(table, sort, before, after) <= self._limit:
                    its = kept | self._bound.value(i, q, turn, beneath) << width * i
                    cost = table.cost(sort, here.cutting, before, after)
                    found.append((base + ((q << table.turns | turn) << table.shifts[i]), its, cost, sort))
        for group in table.groups:
            found.extend(self._flat(here, group, state, values))
        return found

    def _steps_of(self, i: int, p: int) -> list[tuple[int, Sort]]:
        table, known = self._table, self._table.singles[i]
        found = self._steps[i, p] = [(q, known.get(pair) or table.sort((i,), pair)) for q, pair in table.follows[p]]
        return found

    # -- several axes at once

    def _flat(self, here: Layout, group: tuple[int, ...], state: int, values: int) -> Iterator[Edge]:
        """The steps along these axes at once: as `steps.changes` has them."""
        table = self._table
        letters = {table.letters[here.held[i]] for i in group}
        d = table.dims[here.held[group[0]]]
        stack = tuple(here.order[d][-len(group) :]) if letters == {"S"} else ()
        old = letters.pop()
        if letters or (old not in ("P", "X") and set(stack) != set(group)):
            return
        for q in table.offered:
            new = table.letters[q]
            if new == "R":
                sort = table.sort(group, f"{old}>R")
                yield from self._together(here, group, sort, q, state, values)
            elif new == "S":
                sort = table.sort(group, f"{old}>S")
                for order in itertools.permutations(group):
                    if table.dims[q] != d or order != stack:
                        yield from self._together(here, order, sort, q, state, values)

    def _together(
        self, here: Layout, order: Sequence[int], sort: Sort, q: int, state: int, values: int
    ) -> Iterator[Edge]:  # fmt: skip
        """One step along several axes, which cut, if they do, in this order."""
        table = self._table
        width, mask = self._bound.width, self._bound.mask
        d, e = table.dims[here.held[order[0]]], table.dims[q]
        now = [lengths[-1] for lengths in here.lengths]
        before = math.prod(now) * table.itemsize
        if d >= 0:
            now[d] = here.lengths[d][-1 - len(order)]
        turn = len(here.order[e]) - (len(order) if d == e else 0) if e >= 0 else 0
        beneath = values >> width * here.order[e][turn - 1] & mask if turn else DONE
        for i in order:
            if e >= 0:
                now[e] = table.cut(now[e], 1, table.sizes[i])
            beneath = self._bound.value(i, q, turn, beneath if e >= 0 else DONE)
            values += beneath - (values >> width * i & mask) << width * i
            state += ((q << table.turns | turn) - here.fields[i]) << table.shifts[i]
            turn += e >= 0
        after = math.prod(now) * table.itemsize
        if self._limit is None or need(table, sort, before, after) <= self._limit:
            yield state, values, table.cost(sort, here.cutting, before, after), sort


def need(table: Table, sort: Sort, before: int, after: int) -> int:
    """The memory of a step between layouts whose largest pieces have so many bytes."""
    return memory(table.move(sort, 0, sort.nbytes(before, after)), before, after)
