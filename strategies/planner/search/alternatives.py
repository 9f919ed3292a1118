"""What else could be done: the ways worth telling beside the cheapest, each the best in something else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from localtensor.layout.spec import Spec
from strategies.planner.search.api import NoPlan, plan
from strategies.planner.steps.legal_steps import changes, targets
from strategies.planner.steps.plan import Move, Plan, Price, Step
from strategies.planner.steps.prices import TOPOLOGY, Sent, Time, Topology, step_of

CHEAPEST, SOONEST, LIGHTEST, LEANEST, SHORTEST, OTHER = (
    "the cheapest", "least time", "fewest bytes", "least memory", "fewest steps", "another beginning",
)  # fmt: skip
OUTWEIGHS = 10**30
"""By how much the first price of `Then` counts more: no plan costs as much by the price that breaks ties."""
TRIES = 32
"""How many first steps are tried at most."""


@dataclass(frozen=True, slots=True)
class Way:
    """A plan, and in what it is the best."""

    names: tuple[str, ...]
    plan: Plan
    """Its `price` is what it costs by the price that was asked for, whatever it was searched by."""

    def ratio(self, best: int) -> float:
        """How many times dearer than the best; 1 where both cost nothing.

        >>> from strategies.planner.text.parser import read
        >>> dear = plan(*read("f32[8] @ dp=2: S(0) -> R"))
        >>> Way(("slow",), replace(dear, price=3)).ratio(2)
        1.5
        """
        return self.plan.price / best if best else 1.0 if not self.plan.price else float("inf")


@dataclass(frozen=True, slots=True)
class Steps:
    """The number of steps."""

    name: str = "steps"
    grows: bool = True

    def __call__(self, move: Move) -> int:
        return 1


@dataclass(frozen=True, slots=True)
class Then:
    """One price, and among equals what another says."""

    first: Price
    tie: Price
    grows: bool = True

    @property
    def name(self) -> str:
        return f"{self.first.name}, then {self.tie.name}"

    def __call__(self, move: Move) -> int:
        return OUTWEIGHS * self.first(move) + self.tie(move)


def ways(
    best: Plan,
    price: Price | None = None,
    *,
    topology: Topology = TOPOLOGY,
    memory: int | None = None,
    flattened: Sequence[Sequence[str]] = (),
) -> tuple[Way, ...]:
    """The best plan and others of the same ends, each once, the cheapest first; all within the memory.

    `best` is what `plan` gives for these arguments.

    >>> from strategies.planner.text.parser import read
    >>> best = plan(*read("f32[64,64] @ dp=2,tp=2: S(0),P(sum) -> R,S(0)"))
    >>> for way in ways(best):
    ...     print(f"{way.ratio(best.price):.2f}", ", ".join(way.names))
    1.00 the cheapest, fewest steps
    1.41 fewest bytes, another beginning
    2.06 least memory
    """
    if not best.steps:
        return (Way((CHEAPEST,), best),)
    price = price or Time(topology)
    found: dict[tuple[str, ...], tuple[list[str], Plan]] = {}
    for name, one, measure in _all(best, price, topology, memory, flattened):
        own = replace(one, price=priced(one, price), by=price.name)
        known = [other for _, other in found.values() if other.price <= own.price and measure(other) <= measure(own)]
        names, _ = found.setdefault(steps_of((known or [own])[0]), ([], own))
        names.append(name)
    made = [Way(tuple(names), one) for names, one in found.values()]
    return tuple(sorted(made, key=lambda way: (CHEAPEST not in way.names, way.plan.price)))


def steps_of(plan: Plan) -> tuple[str, ...]:
    """What tells a plan from another: its collectives, and the layout after each."""
    return tuple(f"{step.kind} {step.axes} {step.now}" for step in plan.steps)


def priced(plan: Plan, price: Price) -> int:
    """What a plan costs by another price than its own."""
    return sum(price(step.move) for step in plan.steps)


def _all(
    best: Plan, price: Price, topology: Topology, memory: int | None, flattened: Sequence[Sequence[str]]
) -> Iterator[tuple[str, Plan, Callable[[Plan], int]]]:
    """Each name with the best plan of that kind, and how it is measured: the least is the best."""

    def by(price: Price, src: Spec = best.src, memory: int | None = memory) -> Plan:
        return plan(src, best.dst, price, topology=topology, memory=memory, flattened=flattened)

    yield CHEAPEST, best, lambda one: one.price
    soon = Time(topology)
    for name, first in ((SOONEST, soon), (LIGHTEST, Sent()), (SHORTEST, Steps())):
        if first.name != price.name:
            other = by(soon if first == soon else Then(first, soon))
            yield name, best if priced(best, first) == priced(other, first) else other, partial(priced, price=first)
    yield LEANEST, _leanest(best, lambda memory: by(price, memory=memory)), lambda one: one.memory
    began = best.steps[0].was  # strided shards that are an order are planned as that order
    axes = [tuple(best.src.mesh.axis(name) for name in names) for names in flattened]
    firsts = [
        step_of(change.kind, change.axes, began, change.now, topology)
        for change in changes(began, targets(began, best.dst), axes)
    ]
    allowed = [step for step in firsts if memory is None or step.memory <= memory]
    if (other_first := _begun_otherwise(best, price, allowed, lambda now: by(price, now))) is not None:
        yield OTHER, other_first, lambda one: one.steps[0].now == best.steps[0].now


def _leanest(best: Plan, within: Callable[[int], Plan]) -> Plan:
    """The plan that has least in use at once: it is told where nothing at all is allowed."""
    try:
        found = within(0)
    except NoPlan as error:
        found = error.leanest or best
    return found if found.memory < best.memory else best


def _begun_otherwise(best: Plan, price: Price, firsts: list[Step], onwards: Callable[[Spec], Plan]) -> Plan | None:
    """The cheapest plan with another first step than the best one, which does not come back to where it began."""
    found: Plan | None = None
    firsts.sort(key=lambda step: price(step.move))
    for step in firsts[:TRIES]:
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
