"""The legal steps from a layout with their costs, in integers, and an admissible heuristic for A*.

The steps are those of `legal_steps.changes`, the costs those of `prices.step_of`, computed incrementally.

The heuristic of a layout is a lower bound on the price of any plan from it to the destination. It is the exact price of
a relaxed problem that ignores the order in which the axes shard a dim. In the relaxed problem an axis has one of these
values:

| value | meaning |
|-------|---------|
| DONE  | as in the destination; if it shards, the axes that shard before it are as in the destination, too |
| WHOLE | replicated |
| PART  | partial |
| a bit | shards a dim: each dim that is sharded in the destination has a bit, all other dims share one |

An axis goes from one value to another along the table of legal steps. A step of the relaxed problem costs what it costs
to move the fewest bytes that a layout with the same sharding axes can have: even pieces, `bytes / ranks` of the axes.

Every layout has values, and every legal step between layouts is a step of the relaxed problem between their values:

* It changes the values of its own axes only: the last cut is undone first, so an axis beneath another cut keeps its
  position, and so does every axis beneath it.
* An axis that shards becomes DONE, or leaves DONE, only while its dim is sharded by just the axes that come before it
  in the destination. So the relaxed problem also requires those to be DONE, the ones after it not to be DONE, and no
  axis to have the bit of that dim. (Steps of several axes at once are exempt.)
* It costs no less than there: the largest piece is never smaller than the even one, and the price grows with the bytes.

So the heuristic never exceeds the price of a plan, and no step lowers it by more than the step costs: A* finds a
cheapest plan and expands no layout twice. The relaxed problem is solved backwards from the destination, no farther than
the search needs: values not reached yet are farther away than all values that are reached.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Iterator, Sequence

from strategies.planner.search.state_table import STEP_PAIRS, StateTable, StepKind
from strategies.planner.steps.prices import peak_memory

DONE, WHOLE, PART, CUT = 0, 1, 2, 4
CUTTING = ("S", "SS")
INF = 1 << 200
"""A cost above that of any path."""
BackwardStep = tuple[int, int, StepKind, dict[int, int]]
"""A backward step: what it adds to the values, the axes that start or stop sharding, its kind, its known costs."""
BackwardSteps = tuple[list[BackwardStep], list[BackwardStep]]
"""The steps of one axis to one value: those that neither make it DONE nor leave DONE, and all of them."""
AxisOption = tuple[int, str, bool]
"""An option for an axis: a value, a placement letter, and whether that is its placement in the destination."""


class AdmissibleHeuristic:
    """The admissible heuristic: `at(values)` is a lower bound on `Table.cost` for all layouts with these values.

    `solve` computes the exact bound.
    """

    def __init__(self, table: StateTable, dst: int) -> None:
        self._table = table
        self.goal = [table.field(dst, i) for i in range(table.count)]
        wanted = {table.dims[p]: None for p, _ in self.goal if table.dims[p] >= 0}
        slots = {dim: CUT << place for place, dim in enumerate(wanted)}
        self._slots = [slots.get(dim, CUT << len(slots)) for dim in range(len(table.shape))]
        self.width = len(slots) + 3
        self.mask = (1 << self.width) - 1
        self._values = [self._slots[dim] if dim >= 0 else PART if p else WHOLE for p, dim in enumerate(table.dims)]
        self._known: dict[int, int] = {}
        self._best = {0: 0}
        self._reached = 0
        self._queue: list[tuple[int, int, int, int]] = []
        self._axis_bounds: list[tuple[int, dict[int, int]]] = []
        self._per_axis: list[tuple[int, int, int, dict[int, BackwardSteps], tuple[AxisOption, ...]]] = []
        self._groups: list[tuple[int, dict[int, list[BackwardStep]]]] = []

    def at(self, values: int) -> int:
        known = self._known.get(values)
        return known if known is not None else self._reached - self._source_bound(values) if self._reached else 0

    def _source_bound(self, values: int) -> int:
        """A lower bound on the cost from the source to these values: the sum over the axes, each taken alone."""
        mask, total = self.mask, 0
        for shift, costs in self._axis_bounds:
            total += costs[values >> shift & mask]
        return total

    def value(self, i: int, p: int, turn: int, beneath: int) -> int:
        """The value of an axis with this placement; `beneath` is the value of the axis that shards just before it."""
        if self.goal[i] == (p, turn) and beneath == DONE:
            return DONE
        return self._values[p]

    def solve(self, values: int, enough: int = INF) -> int:
        """The bound of these values: exact, or anything above `enough`. All nearer values are then solved, too."""
        if values in self._known:
            return self._known[values]
        if not self._per_axis:
            self._start_backwards(values)
        known, best, queue, mask, source_bound = self._known, self._best, self._queue, self.mask, self._source_bound
        enough, axiswise = enough + source_bound(values), bool(self._axis_bounds)
        while queue and values not in known and self._reached <= enough:
            total, cost, here, cutting = heapq.heappop(queue)
            if here in known:
                continue
            known[here], self._reached = cost, total
            near = [ways.get(here & of, ()) for of, ways in self._groups]
            for i, (shift, clear, above, ways, _) in enumerate(self._per_axis):
                value = here >> shift & mask
                found = ways.get(value) or self._steps_into(i, value)
                near.append(found[not here & clear and (not above or here & above != 0)])
            for added, flipped, sort, costs in itertools.chain.from_iterable(near):
                there = here + added
                if there not in known:
                    more = costs.get(cutting)
                    if more is None:
                        even, was = self._table.even, cutting ^ flipped
                        more = costs[cutting] = self._table.cost(sort, was, even[was], even[cutting])
                    more += cost
                    if more < best.get(there, INF):
                        best[there] = more
                        bound = more + source_bound(there) if axiswise else more
                        heapq.heappush(queue, (bound, more, there, cutting ^ flipped))
        return self.at(values) if queue else known.get(values, INF)

    def _start_backwards(self, values: int) -> None:
        """Prepares the backward search from the destination to these values."""
        axes = range(self._table.count)
        self._per_axis = [(self.width * i, *self._order_masks(i), {}, self._options_of(i)) for i in axes]
        self._groups = self._group_steps()
        self._queue = [(0, 0, 0, sum(1 << i for i, (p, _) in enumerate(self.goal) if self._table.dims[p] >= 0))]
        if self._table.count > 2 and not self._groups:
            self._axis_bounds = [(self.width * i, self._axis_costs(i, values)) for i in axes]

    def _axis_costs(self, i: int, values: int) -> dict[int, int]:
        """The least cost for one axis to get from its source value to each value, while all other axes shard."""
        table, mine = self._table, 1 << i
        others = (1 << table.count) - 1 ^ mine
        edges, all_of = [], {value for value, _, _ in self._per_axis[i][4]}
        for now in all_of:
            for added, flipped, sort, _ in self._steps_into(i, now)[1]:
                after = others | (mine if sort.now in CUTTING else 0)
                cost = table.cost(sort, after ^ flipped, table.even[after ^ flipped], table.even[after])
                edges.append((now + (added >> self.width * i), now, cost))
        costs = dict.fromkeys(all_of, INF)
        costs[values >> self.width * i & self.mask] = 0
        for _ in all_of:
            for was, now, cost in edges:
                costs[now] = min(costs[now], costs[was] + cost)
        return costs

    def _order_masks(self, i: int) -> tuple[int, int]:
        """Masks of the values while an axis may become or leave DONE: bits that are all 0, bits of which one is set."""
        p, turn = self.goal[i]
        dim, clear, above = self._table.dims[p], 0, 0
        for other, (q, place) in enumerate(self.goal):
            if other != i and dim >= 0:
                beneath = place == turn - 1 and self._table.dims[q] == dim
                clear |= (self.mask if beneath else self._slots[dim]) << self.width * other
                above |= self.mask << self.width * other if place == turn + 1 and self._table.dims[q] == dim else 0
        return clear, above

    def _options_of(self, i: int) -> tuple[AxisOption, ...]:
        table, goal = self._table, self.goal[i][0]
        found = dict.fromkeys([(DONE, table.letters[goal], True)])
        for p in (*table.offered, table.held[i]):
            if p != goal or table.dims[p] >= 0:
                found[self._values[p], table.letters[p], p == goal] = None
        return tuple(found)

    def _steps_into(self, i: int, now: int) -> BackwardSteps:
        shift, _, _, known, may = self._per_axis[i]
        table, made = self._table, self._table.singles[i]
        every: list[BackwardStep] = []
        for added, flipped, pair in _steps_to(may, now):
            sort = made.get(pair) or table.sort((i,), pair)
            every.append((added << shift, flipped << i, sort, sort.relaxed_costs))
        found = known[now] = ([way for way in every if way[0] + (now << shift)] if now else [], every)
        return found

    def _group_steps(self) -> list[tuple[int, dict[int, list[BackwardStep]]]]:
        """The steps of several axes at once: the bits of their values, and the steps by the values after them."""
        found = []
        for group in self._table.groups:
            ends = [(letter, self._group_values(group, letter, -1)) for letter in ("R", "P", "X")]
            ends += [("S", self._group_values(group, "S", dim)) for dim in range(len(self._table.shape))]
            ways: dict[int, dict[tuple[int, str], BackwardStep]] = {}
            for (old, before), (new, after) in itertools.product(ends[1:], (ends[0], *ends[3:])):
                sort = self._table.sort(group, f"{old}>{new}")
                flipped = sum(1 << i for i in group) if (old == "S") != (new == "S") else 0
                for was, now in itertools.product(before, after):
                    ways.setdefault(now, {})[was - now, f"{old}>{new}"] = (was - now, flipped, sort, sort.relaxed_costs)
            mask = sum(self.mask << self.width * i for i in group)
            found.append((mask, {now: list(by.values()) for now, by in ways.items()}))
        return found

    def _group_values(self, group: tuple[int, ...], letter: str, dim: int) -> list[int]:
        """The values that these axes can have while all have this letter and shard this dim, if they shard."""
        table, options = self._table, []
        other = {"R": WHOLE, "P": PART, "X": PART, "S": self._slots[dim] if dim >= 0 else 0}[letter]
        for i in group:
            p = self.goal[i][0]
            same = table.letters[p] == letter and table.dims[p] == dim
            options.append([value << self.width * i for value in ((DONE, other) if same else (other,))])
        return [sum(values) for values in itertools.product(*options)]


@functools.lru_cache(maxsize=1024)
def _steps_to(may: tuple[AxisOption, ...], now: int) -> tuple[tuple[int, int, str], ...]:
    """The steps of an axis to a value: the difference of the values, 1 if it starts or stops sharding, its letters."""
    found = []
    for (was, old, here), (value, new, there) in itertools.product(may, may):
        pair = f"{old}>{new}"
        if pair in STEP_PAIRS and value == now and was != now and not (here and there):
            found.append((was - now, int((old in CUTTING) ^ (new in CUTTING)), pair))
    return tuple(found)


Edge = tuple[int, int, int, StepKind]
"""A step: the layout after it, its values for the heuristic, its cost, and its kind."""


class DecodedLayout:
    """A decoded layout: for each axis its field and placement, for each dim its axes in order and the sizes left."""

    __slots__ = ("cutting", "fields", "held", "lengths", "order")

    def __init__(self, table: StateTable, state: int) -> None:
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


class LegalEdges:
    """`of(state, values)` lists every legal step from a layout, always in the same order.

    With a `limit`, steps that need more bytes in use are left out.
    """

    def __init__(self, table: StateTable, bound: AdmissibleHeuristic, limit: int | None = None) -> None:
        self._table, self._bound, self._limit = table, bound, limit
        self._steps: dict[tuple[int, int], list[tuple[int, StepKind]]] = {}

    def of(self, state: int, values: int) -> list[Edge]:
        table, here, found = self._table, DecodedLayout(self._table, state), []
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
                elif (clashes := table.clashes[q]) and any(
                    j != i and other in clashes for j, other in enumerate(here.held)
                ):
                    continue
                if sort.priced_after or self._limit is not None:
                    now = small.copy()
                    if d >= 0:
                        now[d] = here.lengths[d][-2]
                    if e >= 0:
                        now[e] = table.cut(here.lengths[e][turn], table.factors[q], table.sizes[i])
                    after = math.prod(now) * table.itemsize
                if self._limit is None or edge_memory(table, sort, before, after) <= self._limit:
                    its = kept | self._bound.value(i, q, turn, beneath) << width * i
                    cost = table.cost(sort, here.cutting, before, after)
                    found.append((base + ((q << table.turns | turn) << table.shifts[i]), its, cost, sort))
        for group in table.groups:
            found.extend(self._flattened_steps(here, group, state, values))
        return found

    def _steps_of(self, i: int, p: int) -> list[tuple[int, StepKind]]:
        table, known = self._table, self._table.singles[i]
        found = self._steps[i, p] = [(q, known.get(pair) or table.sort((i,), pair)) for q, pair in table.follows[p]]
        return found

    def _flattened_steps(self, here: DecodedLayout, group: tuple[int, ...], state: int, values: int) -> Iterator[Edge]:
        """The steps along these axes at once, as `legal_steps.changes` lists them."""
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
                yield from self._flattened_step(here, group, sort, q, state, values)
            elif new == "S":
                sort = table.sort(group, f"{old}>S")
                for order in itertools.permutations(group):
                    if table.dims[q] != d or order != stack:
                        yield from self._flattened_step(here, order, sort, q, state, values)

    def _flattened_step(
        self, here: DecodedLayout, order: Sequence[int], sort: StepKind, q: int, state: int, values: int
    ) -> Iterator[Edge]:
        """One step along several axes, which shard, if they do, in this order."""
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
        if self._limit is None or edge_memory(table, sort, before, after) <= self._limit:
            yield state, values, table.cost(sort, here.cutting, before, after), sort


def edge_memory(table: StateTable, sort: StepKind, before: int, after: int) -> int:
    """The peak memory of a step between layouts with largest pieces of so many bytes."""
    return peak_memory(table.move(sort, 0, sort.nbytes(before, after)), before, after)
