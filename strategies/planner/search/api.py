"""The cheapest redistribution plan from one spec to another: a shortest path over the specs that legal steps connect.

`plan` first looks in the `PlanCache` (`plan_cache`). On a miss, `_search` encodes layouts as integers (`state_table`),
enumerates the legal steps and an admissible heuristic (`edges`), and runs A* (`plan_cache`). `_plan_of` turns the path found
into steps between specs.

The search runs between layouts; a spec is one way of writing a layout. Strided shards that encode a shard order are
read as that order, and placements on axes of one rank are ignored. So the first step starts from a spec that is
equivalent to `src` on every rank, and the last step ends at one that is equivalent to `dst`. Layouts that coincide only
because the tensor has few rows stay distinct: merging some of them and not others would make the price violate the
triangle inequality.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch.distributed.tensor import Partial, Replicate, Shard

from localtensor._util.units import bytes_text, time_text
from localtensor.errors import OtherRows, WrongType
from localtensor.layout import Spec, StridedShard, is_standard, is_unambiguous, ordered, short
from strategies.planner.search.edges import INF
from strategies.planner.search.plan_cache import AStarSearch, NoPlan, PlanCache, SearchResult
from strategies.planner.search.state_table import STEP_BITS, StateTable, StepKind, price_name
from strategies.planner.steps.alpha_beta import partials_commute
from strategies.planner.steps.legal_steps import legal_changes, usable_placements, with_placement
from strategies.planner.steps.plan import PICO, Move, Plan, Price, RedistributionStep
from strategies.planner.steps.prices import TOPOLOGY, Sent, Time, Topology, TorchPrice, priced_step, step_of_move

__all__ = ["NoPlan", "clear", "plan", "plan_uncached"]
PLAN_CACHE = PlanCache()
"""The plans computed so far, shared by all threads of this process."""


def plan(
    src: Spec,
    dst: Spec,
    price: Price | None = None,
    *,
    topology: Topology = TOPOLOGY,
    memory: int | None = None,
    flattened: Sequence[Sequence[str]] = (),
) -> Plan:
    """The cheapest steps from one spec to another of one tensor on one mesh; of equally cheap plans the shortest.

    The result is deterministic across threads and processes: remaining ties are broken by the layouts' numbers. It is
    cached until `clear`, keyed by everything it depends on; a price without value equality is keyed by identity.

    `memory` limits the bytes that a rank may have in use; `flattened` names sets of axes that have one process
    group of all their ranks. Raises `NoPlan`; `BadPrice` for a price that is no whole number; `BadMesh` for an unknown
    axis. Two specs that coincide only because there are few rows, such as `f32[1]` sharded by `a` and then `b`, or by
    `b` and then `a`, are different specs, and the plan has steps.

    >>> import torch
    >>> from localtensor.layout import Mesh, parse
    >>> src, dst = (Spec(Mesh.of(dp=4), (parse(p),), (1024, 1024), torch.float32) for p in ("S(0)", "S(1)"))
    >>> print(plan(src, dst))
    dp: all-to-all S(0) -> S(1)  786.4 kB  77.9 us
    """
    if not flattened:
        known = PLAN_CACHE.same.get((id(src), id(dst), id(price), id(topology), memory))
        if known is not None:
            return known[0]  # type: ignore[no-any-return]  # what is held beside it are the owners of these ids
    _check(src, dst, topology, memory)
    return PLAN_CACHE.get(_search, src, dst, price, topology, memory, tuple([tuple(names) for names in flattened]))


def clear() -> None:
    """Empties the plan cache."""
    PLAN_CACHE.clear()


def plan_uncached(
    src: Spec,
    dst: Spec,
    price: Price | None = None,
    *,
    topology: Topology = TOPOLOGY,
    memory: int | None = None,
    flattened: Sequence[Sequence[str]] = (),
    make: Callable[..., StateTable] = StateTable,
) -> Plan:
    """As `plan`, without the plan cache; `make` returns the state table to search on."""
    _check(src, dst, topology, memory)
    return _search(src, dst, price, topology, memory, flattened, make)


def _search(
    src: Spec, dst: Spec, price: Price | None, topology: Topology, memory: int | None,
    flattened: Sequence[Sequence[str]], make: Callable[..., StateTable] = PLAN_CACHE.table,
) -> Plan:  # fmt: skip
    price = Time(topology) if price is None else price
    was, now = _read_as_order(src), _read_as_order(dst)
    axes = [_flattened_axes(src, names) for names in flattened]
    table = make(was, usable_placements(was, now), axes, price)
    start, goal = table.state(was), table.state(now)
    found = AStarSearch(table, start, goal, memory).cheapest()
    if found is not None:
        return _plan_of(src, dst, was, now, table, found, topology)
    need = AStarSearch(table, start, goal).leanest()
    lean = AStarSearch(table, start, goal, need).cheapest() if need < INF else None
    shown = f"{src} -> {dst}"
    if lean is None:
        raise NoPlan("src, dst", shown, "no legal steps lead there", "Plan to R first, and from there.")
    leanest = _plan_of(src, dst, was, now, table, lean, topology)
    steps = "; ".join(map(str, leanest.steps))
    problem = f"no plan stays within {bytes_text(memory or 0)}, and the leanest needs {bytes_text(need)} ({steps})"
    raise NoPlan("memory", shown, problem, f"Allow {need} bytes, or more.", leanest)


def _read_as_order(spec: Spec) -> Spec:
    """The spec with strided shards written as the shard order that they encode, if they encode one for this shape."""
    try:
        return ordered(spec)
    except OtherRows:
        return spec


def _plan_of(
    src: Spec, dst: Spec, was: Spec, goal: Spec, table: StateTable, found: SearchResult, topology: Topology
) -> Plan:
    steps, whole, last = [], table.count == len(src.placements), found.states[-1]
    turned = any(type(one) is not type(other) for one, other in zip(src.placements, was.placements, strict=True))
    before = table.piece(found.states[0])
    for state, there, sort in zip(found.states, found.states[1:], found.sorts, strict=False):
        after = table.piece(there)
        cutting = sum([1 << i for i in range(table.count) if table.dims[table.field(state, i)[0]] >= 0])
        move = table.move(sort, cutting, sort.nbytes(before, after))
        now = (goal if there == last else table.spec(there)) if whole else _spec_after(was, table, there, sort)
        steps.append(step_of_move(move, was, now, before, after, topology))
        was, before = now, after
    name, why = price_name(table.price), _explanation(found, table, turned)
    return Plan(src, dst, tuple(steps), found.cost >> STEP_BITS, name, why, found.expanded)


def _spec_after(was: Spec, table: StateTable, there: int, sort: StepKind) -> Spec:
    """The spec after a step that leaves axes of one rank unchanged."""
    fields = [(*table.field(there, i), i) for i in sort.group]
    in_turn = [table.axes[i] for _, _, i in sorted(fields, key=lambda field: field[1])]
    return with_placement(was, in_turn, table.placements[fields[0][0]])


def _explanation(found: SearchResult, table: StateTable, turned: bool) -> str:
    """How the plan was found, in words; `turned` if strided shards of the source were read as a shard order."""
    if not found.sorts:
        return "both are equal on every rank"
    looked = f"{found.expanded} layouts looked at"
    if found.pruned:
        looked += f", {found.pruned} more ruled out"
    whose = "of all ways in the order that its strided shards are" if turned else "of all ways"
    if found.other_cost >= INF:
        return f"the cheapest {whose}, and the only first step; {looked}"
    least = _cost_text(max(found.other_cost, found.cost) >> STEP_BITS, table.price)
    return f"the cheapest {whose}: with another first step {least} or more; {looked}"


def _cost_text(cost: int, price: Price) -> str:
    """A price in its own unit: time if it counts picoseconds, bytes, or the bare number of a user's own price."""
    if isinstance(price, Time | TorchPrice):
        return time_text(cost / PICO)
    return bytes_text(cost) if isinstance(price, Sent) else f"{cost:,}"


def _flattened_axes(src: Spec, names: Sequence[str]) -> tuple[int, ...]:
    """The axes of a flattened group. Raises `NoPlan` for an axis named twice."""
    if len(set(names)) != len(names):
        problem = "an axis is named twice, and has one group only"
        raise NoPlan("flattened", repr(tuple(names)), problem, "Name each axis of a group once.")
    return tuple(src.mesh.axis(name) for name in names)


def _check(src: Spec, dst: Spec, topology: Topology, memory: int | None) -> None:
    """Raises `NoPlan` for two specs between which there can be no plan, or that are undefined; `WrongType` for another type."""
    if memory is not None and not (isinstance(memory, int | float) and not math.isnan(memory)):
        raise WrongType("plan", "memory", memory, "it is no number of bytes", "Pass an int, as 2 * 10**9.")
    if not isinstance(topology, Topology):
        remedy = "Pass Topology(links), with a link for each axis."
        raise WrongType("plan", "topology", topology, "it is no Topology", remedy)
    for name, spec in (("src", src), ("dst", dst)):
        if not isinstance(spec, Spec):
            raise WrongType("plan", name, spec, "it is no Spec", "Pass Spec(mesh, placements, shape, dtype).")
    if (src.mesh, src.shape, src.dtype) != (dst.mesh, dst.shape, dst.dtype):
        problem = "they are not of one tensor on one mesh"
        raise NoPlan("src, dst", f"{src} -> {dst}", problem, "Give both the same of these.")
    partial = [_check_placements("src", src), _check_placements("dst", dst)]
    if all(partial):
        for was, now in zip(src.placements, dst.placements, strict=True):
            if type(was) is Partial and type(now) is Partial and was.reduce_op != now.reduce_op:
                problem = f"{short(was)} does not turn into {short(now)}: these are parts of different things"
                raise NoPlan("dst", f"{src} -> {dst}", problem, "Plan to R first, and from there.")


def _check_placements(name: str, spec: Spec) -> bool:
    """Whether any placement is partial. Raises `NoPlan` for placements that are undefined."""
    partials: list[Partial] = []
    for placement in spec.placements:
        kind = type(placement)
        if kind is Partial:
            if not is_standard(placement) or not is_unambiguous(placement.reduce_op, spec.dtype):  # type: ignore[attr-defined]
                problem = f"{short(placement)} is undefined for {spec.dtype}"
                raise NoPlan(name, str(spec), problem, "Reduce it before, or use another dtype.")
            partials.append(placement)  # type: ignore[arg-type]
        elif kind is not Shard and kind is not Replicate and kind is not StridedShard:
            problem = f"{short(placement)} is of a class that the planner does not know"
            raise NoPlan(name, str(spec), problem, "Use R, S, SS or a plain Partial.")
    for one, other in itertools.combinations(partials, 2):
        if not partials_commute(one, other, spec.dtype):
            problem = f"{short(one)} and {short(other)} do not commute: which is reduced first would matter"
            raise NoPlan(name, str(spec), problem, "Reduce one of them first.")
    return bool(partials)


CHEAPEST, FASTEST, FEWEST_BYTES, LEAST_MEMORY, FEWEST_STEPS, OTHER_FIRST_STEP = (
    "the cheapest", "least time", "fewest bytes", "least memory", "fewest steps", "another beginning",
)  # fmt: skip
TIE_WEIGHT = 10**30
"""The weight of the first price in `Then`: larger than the price of any plan by the tie-breaking price."""
MOST_FIRST_STEPS = 32
"""The largest number of alternative first steps that are tried."""


@dataclass(frozen=True, slots=True)
class RankedPlan:
    """A plan, and the criteria by which it is the best one."""

    names: tuple[str, ...]
    plan: Plan
    """Its `price` is by the price the user chose, whatever price it was searched by."""

    def ratio(self, best: int) -> float:
        """The price divided by the best price; 1 where both are free, infinite where only the best is free.

        >>> from strategies.planner.text.parser import read
        >>> dear = plan(*read("f32[8] @ dp=2: S(0) -> R"))
        >>> RankedPlan(("slow",), replace(dear, price=3)).ratio(2)
        1.5
        """
        return self.plan.price / best if best else 1.0 if not self.plan.price else float("inf")


@dataclass(frozen=True, slots=True)
class StepCount:
    """A price that counts steps."""

    name: str = "steps"
    grows: bool = True

    def __call__(self, move: Move) -> int:
        return 1


@dataclass(frozen=True, slots=True)
class TieBreak:
    """One price, with ties broken by another."""

    first: Price
    tie: Price
    grows: bool = True

    @property
    def name(self) -> str:
        return f"{self.first.name}, then {self.tie.name}"

    def __call__(self, move: Move) -> int:
        return TIE_WEIGHT * self.first(move) + self.tie(move)


def alternatives(
    best: Plan,
    price: Price | None = None,
    *,
    topology: Topology = TOPOLOGY,
    memory: int | None = None,
    flattened: Sequence[Sequence[str]] = (),
) -> tuple[RankedPlan, ...]:
    """The best plan and its alternatives, each once, the cheapest first; all within the memory limit.

    `best` is the result of `plan` for the same arguments.

    >>> from strategies.planner.text.parser import read
    >>> best = plan(*read("f32[64,64] @ dp=2,tp=2: S(0),P(sum) -> R,S(0)"))
    >>> for way in alternatives(best):
    ...     print(f"{way.ratio(best.price):.2f}", ", ".join(way.names))
    1.00 the cheapest, fewest steps
    1.41 fewest bytes, another beginning
    2.06 least memory
    """
    if not best.steps:
        return (RankedPlan((CHEAPEST,), best),)
    price = price or Time(topology)
    found: dict[tuple[str, ...], tuple[list[str], Plan]] = {}
    for name, one, measure in _candidates(best, price, topology, memory, flattened):
        own = replace(one, price=price_of(one, price), by=price.name)
        known = [other for _, other in found.values() if other.price <= own.price and measure(other) <= measure(own)]
        names, _ = found.setdefault(step_texts((known or [own])[0]), ([], own))
        names.append(name)
    made = [RankedPlan(tuple(names), one) for names, one in found.values()]
    return tuple(sorted(made, key=lambda way: (CHEAPEST not in way.names, way.plan.price)))


def step_texts(plan: Plan) -> tuple[str, ...]:
    """What identifies a plan: its collectives, and the layout after each."""
    return tuple(f"{step.kind} {step.axes} {step.now}" for step in plan.steps)


def price_of(plan: Plan, price: Price) -> int:
    """The cost of a plan by a price other than its own."""
    return sum(price(step.move) for step in plan.steps)


def _candidates(
    best: Plan, price: Price, topology: Topology, memory: int | None, flattened: Sequence[Sequence[str]]
) -> Iterator[tuple[str, Plan, Callable[[Plan], int]]]:
    """The best plan by each criterion: its name, the plan, and the measure that it minimizes."""

    def by(price: Price, src: Spec = best.src, memory: int | None = memory) -> Plan:
        return plan(src, best.dst, price, topology=topology, memory=memory, flattened=flattened)

    yield CHEAPEST, best, lambda one: one.price
    soon = Time(topology)
    for name, first in ((FASTEST, soon), (FEWEST_BYTES, Sent()), (FEWEST_STEPS, StepCount())):
        if first.name != price.name:
            other = by(soon if first == soon else TieBreak(first, soon))
            same = price_of(best, first) == price_of(other, first)
            yield name, best if same else other, partial(price_of, price=first)
    try:
        lean = by(price, memory=0)
    except NoPlan as error:
        lean = error.leanest or best
    yield LEAST_MEMORY, lean if lean.memory < best.memory else best, lambda one: one.memory
    began = best.steps[0].was  # strided shards that are an order are planned as that order
    axes = [tuple(best.src.mesh.axis(name) for name in names) for names in flattened]
    changes = legal_changes(began, usable_placements(began, best.dst), axes)
    firsts = (priced_step(change.kind, change.axes, began, change.now, topology) for change in changes)
    allowed = [step for step in firsts if memory is None or step.memory <= memory]
    if (other_first := _with_other_first_step(best, price, allowed, lambda now: by(price, now))) is not None:
        yield OTHER_FIRST_STEP, other_first, lambda one: one.steps[0].now == best.steps[0].now


def _with_other_first_step(
    best: Plan, price: Price, firsts: list[RedistributionStep], onwards: Callable[[Spec], Plan]
) -> Plan | None:
    """The cheapest plan with another first step than the best plan's, which does not return to its start."""
    found: Plan | None = None
    firsts.sort(key=lambda step: price(step.move))
    for step in firsts[:MOST_FIRST_STEPS]:
        cost = price(step.move)
        if found is not None and cost >= found.price:
            break
        if step.now == best.steps[0].now:
            continue
        try:
            rest = onwards(step.now)
        except NoPlan:
            continue
        if (found is None or cost + rest.price < found.price) and all(later.now != step.was for later in rest.steps):
            found = replace(best, steps=(step, *rest.steps), price=cost + rest.price)
    return found
