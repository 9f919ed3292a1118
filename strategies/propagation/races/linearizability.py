"""Is a history of a shared cache one that a plain dict could have had, one call after the other?

M. P. Herlihy, J. M. Wing, "Linearizability: A Correctness Condition for Concurrent Objects", TOPLAS 1990: there must be
an order of the calls in which each call stands between its begin and its end, and every answer is the dict's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from localtensor.concurrency.controlled_sync import Scheduled
from localtensor.concurrency.results import Program
from strategies.propagation.races.races_world import World, hold

CALLS = ("get a", "get b", "clear")


@dataclass(frozen=True, slots=True)
class Call:
    """begin, end: moments.  answer: the number of the computation whose value came back; None for a clear."""

    name: str
    begin: int
    end: int
    answer: int | None = None


def explained(history: Sequence[Call]) -> bool:
    """A plain dict could have answered so: a get tells what is kept, or computes what nobody computed before.

    >>> explained([Call("get a", 0, 3, answer=1), Call("get a", 1, 2, answer=1)])
    True
    >>> explained([Call("get a", 0, 1, answer=1), Call("clear", 2, 3), Call("get a", 4, 5, answer=1)])
    False
    """
    return _explained(tuple(history), (), frozenset())


def _explained(left: tuple[Call, ...], kept: tuple[tuple[str, int], ...], used: frozenset[int]) -> bool:
    if not left:
        return True
    first_end = min(call.end for call in left)
    for place, call in enumerate(left):
        if call.begin > first_end:
            continue
        rest = (*left[:place], *left[place + 1 :])
        if call.answer is None:
            if _explained(rest, (), used):
                return True
            continue
        now = dict(kept).get(call.name)
        if now == call.answer and _explained(rest, kept, used):
            return True
        new = now is None and call.answer not in used
        if new and _explained(rest, (*kept, (call.name, call.answer)), used | {call.answer}):
            return True
    return False


def calls(sync: Scheduled, kind: type[World] = World) -> Program:
    """Three threads, two calls each, which the schedule draws; their history must be one that a dict explains."""
    world = kind(sync)
    moments: list[int] = []
    computed: list[int] = []
    history: list[Call] = []

    def moment() -> int:
        moments.append(0)
        return len(moments)

    def compute() -> int:
        computed.append(0)
        number = len(computed)
        sync.step("computes")
        return number

    def call() -> None:
        name = CALLS[sync.number(len(CALLS))]
        begin, answer = moment(), None
        if name == "clear":
            world.cache.clear()
        else:
            answer = world.cache.get(world.key(name), compute)
        history.append(Call(name, begin, moment(), answer))

    def two() -> None:
        call()
        call()

    def check() -> None:
        ordered = sorted(history, key=lambda one: one.begin)
        hold(explained(ordered), f"no order of these calls explains their answers: {_told(ordered)}")

    return Program([two] * 3, check)


def _told(history: Sequence[Call]) -> str:
    return "; ".join(
        f"{call.name} [{call.begin}-{call.end}]" + ("" if call.answer is None else f" -> {call.answer}")
        for call in history
    )
