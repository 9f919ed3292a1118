"""A price of single steps on trial: whether plans can be searched by it, and what the cheapest of them cost then."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from localtensor.layout.spec import Spec
from strategies.planner.metric_check.report import Odd
from strategies.planner.search.api import plan
from strategies.planner.steps.legal_steps import changes, targets
from strategies.planner.steps.plan import PICO, Move, axes_text
from strategies.planner.steps.prices import move_of

LARGER = (2, 1000, 1_000_000)
"""How many times more bytes a move is asked with: the same move must not cost less."""
FALLS = "the same step with fewer bytes costs more"


@dataclass(frozen=True, slots=True)
class Plugged:
    """A user's function as a price: whole numbers as they are, seconds as picoseconds, rounded up."""

    name: str
    grows: bool
    seconds: bool
    ask: Callable[[Move], float]

    def __call__(self, move: Move) -> int:
        got = self.ask(move)
        return math.ceil(got * PICO) if self.seconds else int(got)


@dataclass(frozen=True, slots=True)
class Tried:
    """What a price of steps answered."""

    ask: Callable[[Move], float]
    odd: tuple[Odd, ...]
    seconds: bool
    """Whether some answer was a float: then all are seconds."""

    @property
    def unit(self) -> str:
        return "s" if self.seconds else ""

    @property
    def searchable(self) -> bool:
        return all(odd.what == FALLS for odd in self.odd)

    def price(self, name: str) -> Plugged:
        """As a price for the planner, which keeps the plans of each of these for itself: `ask` equals itself alone."""
        return Plugged(name, not self.odd, self.seconds, self.ask)


def trials(price: Callable[[Move], float], specs: Sequence[Spec], ask: Callable[..., float]) -> Tried:
    """The answers for every step between these specs, with their own bytes and with more."""
    odd: list[Odd] = []
    seconds = False
    for move in _moves(specs):
        larger = [replace(move, nbytes=times * move.nbytes, even=times * move.even) for times in LARGER]
        answers = [ask(price, each) for each in (move, *larger)]
        along = axes_text(specs[0], move.axes)
        where = f"{along}: {move.kind} {move.was} -> {move.now} of {move.nbytes} bytes"
        seconds = seconds or any(isinstance(got, float) for got in answers)
        odd += _odd_answers(where, answers, ask(price, move))
    return Tried(lambda move: ask(price, move), tuple(odd), seconds)


def distances(specs: Sequence[Spec], price: Plugged) -> list[list[float]]:
    """What the cheapest plan from each spec to each other costs."""
    found = [[plan(src, dst, price).price for dst in specs] for src in specs]
    return [[cost / PICO if price.seconds else cost for cost in row] for row in found]


def _moves(specs: Sequence[Spec]) -> Iterator[Move]:
    """Every move from one of these specs to another, each once, in an order that is always the same."""
    seen: dict[Move, None] = {}
    for spec in specs:
        for offered in dict.fromkeys(targets(spec, dst) for dst in specs):
            for change in changes(spec, offered):
                seen[move_of(change.kind, change.axes, spec, change.now)] = None
    return iter(seen)


def _odd_answers(where: str, answers: list[float], again: float) -> Iterator[Odd]:
    first = answers[0]
    for got in answers:
        if math.isnan(got):
            yield Odd("this is no number", where, got)
            return
        if math.isinf(got):
            yield Odd("the price of a step is finite; a step that there is not is no step", where, got)
            return
        if got < 0:
            yield Odd("a price is never negative", where, got)
            return
    if again != first:
        yield Odd("asked again, it answers something else", where, again)
    if answers != sorted(answers):
        yield Odd(FALLS, where, first)
