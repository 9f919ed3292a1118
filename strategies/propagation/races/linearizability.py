"""Linearizability of a shared cache's histories, and the findings of a search for races.

A history is linearizable if its calls have an order in which each call lies between its begin and its end, and every
answer is that of a plain dict: M. P. Herlihy, J. M. Wing, "Linearizability: A Correctness Condition for Concurrent
Objects", TOPLAS 1990.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from localtensor.concurrency import Failure, Program, ScheduledSync
from strategies.propagation.races.cache_programs import CacheUnderTest, require

CALLS = ("get a", "get b", "clear")


@dataclass(frozen=True, slots=True)
class CacheCall:
    """One call of a cache.

    `begin` and `end` are logical times; `answer` is the number of the computation whose value it returned, None for a
    clear.
    """

    name: str
    begin: int
    end: int
    answer: int | None = None


def is_linearizable(history: Sequence[CacheCall]) -> bool:
    """Whether a plain dict could have given the answers: a get returns what is kept, or makes a new computation.

    >>> is_linearizable([CacheCall("get a", 0, 3, answer=1), CacheCall("get a", 1, 2, answer=1)])
    True
    >>> is_linearizable([CacheCall("get a", 0, 1, answer=1), CacheCall("clear", 2, 3), CacheCall("get a", 4, 5, answer=1)])
    False
    """
    return _explained(tuple(history), (), frozenset())


def _explained(left: tuple[CacheCall, ...], kept: tuple[tuple[str, int], ...], used: frozenset[int]) -> bool:
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


def calls(sync: ScheduledSync, kind: type[CacheUnderTest] = CacheUnderTest) -> Program:
    """Three threads, two calls each, which the schedule draws; their history must be linearizable."""
    world = kind(sync)
    moments, numbers = itertools.count(1), itertools.count(1)
    history: list[CacheCall] = []

    def compute() -> int:
        number = next(numbers)
        sync.step("computes")
        return number

    def call() -> None:
        name = CALLS[sync.number(len(CALLS))]
        begin, answer = next(moments), None
        if name == "clear":
            world.cache.clear()
        else:
            answer = world.cache.get(world.key(name), compute)
        history.append(CacheCall(name, begin, next(moments), answer))

    def two() -> None:
        call()
        call()

    def check() -> None:
        ordered = sorted(history, key=lambda one: one.begin)
        require(is_linearizable(ordered), f"no order of these calls explains their answers: {_history_text(ordered)}")

    return Program([two] * 3, check)


def _history_text(history: Sequence[CacheCall]) -> str:
    return "; ".join(
        f"{call.name} [{call.begin}-{call.end}]" + ("" if call.answer is None else f" -> {call.answer}")
        for call in history
    )


MEANINGS: Mapping[str, str] = MappingProxyType({
    "computed once per thread": "DTensor's cache of propagation belongs to a thread: each thread computes every key again, "
    "and a thread that ends takes its answers along.",
    "answer of another rank": "The key holds no rank, and the local shapes in the answer depend on it. A thread that serves a "
    "second rank (a pool, a simulator) hands the op the first rank's shape. One rank per process is safe.",
    "plan of another rank": "`_gen_transform_infos` and the planners are kept once per process, by a mesh that is equal on "
    "all ranks, and hold shapes of the rank that was first. One rank per process is safe; rank threads are not, unless "
    "their backend is called \"threaded\" and both caches are cleared between simulations.",
    "plan of no rank": "A plan that no rank would make alone: the planner was used by two threads at once.",
    "wrong numbers, in silence": "The redistribution used another rank's shapes, and no rank noticed.",
    "other answer": "Under many threads the propagator answers otherwise than alone.",
    "exception": "What works alone raised under several threads.",
    "stale after a clear": "Clearing the cache clears that of the thread that asks for it. Other threads go on with answers "
    "of rules that are no longer there.",
    "setting of another thread": "The switch is one variable of the process: a thread that enters it changes what all "
    "threads do. Ranks that plan other collectives than their peers wait for each other for ever.",
    "setting not in the key": "The plan that was made under the setting is kept, and found again when the setting is over.",
    "key without the argument": "Python takes 1, 1.0 and True for one key, and the answers differ, in dtype for one: the "
    "second call is answered with the first one's. This is the propagator's Python cache; mul, pow and add through "
    "DTensor's native one gave right dtypes.",
    "time-out": "It did not end in time: the stacks say where each thread stood.",
    "crash": "The process ended without a report.",
})  # fmt: skip
"""What each kind of finding means."""


@dataclass(frozen=True, slots=True)
class ExploredProgram:
    """A program of ours: how many schedules were run, and the first failure, with its yield points."""

    name: str
    promise: str
    schedules: int
    seconds: float
    failure: Failure | None
    yields: str = "marked"


@dataclass(frozen=True, slots=True)
class RaceFinding:
    """A race of one program or script: its kind, its count, the first example, and the text of a script that repeats it."""

    part: str
    kind: str
    count: int
    example: str
    script: str

    @property
    def meaning(self) -> str:
        return MEANINGS.get(self.kind, "")


@dataclass(frozen=True, slots=True)
class ProgramSummary:
    """The findings of one program or script.  `tried` counts schedules or calls; 0 with `trouble` if nothing was run."""

    name: str
    asks: str
    tried: int
    seconds: float
    findings: tuple[RaceFinding, ...] = ()
    figures: Mapping[str, int] = field(default_factory=dict)
    trouble: str = ""
