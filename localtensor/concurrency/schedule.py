"""Schedules: the policies that choose which rank runs next, and the one line of text that repeats a run.

One rank thread runs at a time.  At each yield point (a collective, a wait, a lock of this project) the scheduler queries a
`Schedule`.  Every policy is a short class with a row in `_MAKERS`; `RecordedSchedule` wraps one and writes the text, and
`replay` reads it.

    round_robin                  the rank that ran goes on while it can, then the next higher one
    shuffled:42                  any rank that can run, by the seed 42
    pct:7:3:1000                 random priorities, changed twice within 1000 steps, by the seed 7
    shuffled:42=4:1,0x2,n3       the same, with its answers for 4 ranks: rank 1, rank 0 twice, the number 3
    shuffled:42@900#1c0ffee5     900 answers, too many to list, and their digest
    bounded:12:1:30:0            round robin, but rank 1 at the choice 12, and rank 0 at the choice 30

A schedule has no lock: only the thread that runs uses it.  The functions below check the settings of a policy.
"""

import random
import re
import secrets
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, repeat
from typing import Protocol
from zlib import crc32

from localtensor.concurrency.bounded import read_bounded
from localtensor.errors import BadSchedule, ReplayDiverged


class RoundRobinSchedule:
    text = "round_robin"

    def begin(self, ranks: int) -> None:
        pass

    def next(self, runnable: Sequence[int], current: int | None) -> int:
        if current is None:
            return runnable[0]
        place = bisect_left(runnable, current)
        return runnable[place] if place < len(runnable) else runnable[0]

    def number(self, below: int) -> int:
        return 0


class ShuffledSchedule:
    def __init__(self, seed: int) -> None:
        self.text = f"shuffled:{seed}"
        self._seed = seed

    def begin(self, ranks: int) -> None:
        self._rng = random.Random(self._seed)

    def next(self, runnable: Sequence[int], current: int | None) -> int:
        return runnable[_draw(self._rng, len(runnable))]

    def number(self, below: int) -> int:
        return _draw(self._rng, below)


class PctSchedule:
    def __init__(self, seed: int, depth: int, steps: int) -> None:
        self.text = f"pct:{seed}:{depth}:{steps}"
        self._seed, self._depth, self._steps = seed, depth, steps

    def begin(self, ranks: int) -> None:
        rng = self._rng = random.Random(self._seed)
        order = sorted(range(ranks), key=lambda _: rng.random())
        self._priority: dict[int, float] = {rank: self._depth + place for place, rank in enumerate(order)}
        self._falls = {1 + _draw(rng, self._steps): low for low in range(self._depth - 1)}  # after which step, to what
        self._step = 0

    def next(self, runnable: Sequence[int], current: int | None) -> int:
        for number in runnable:
            if number not in self._priority:  # a helper thread, between two ranks
                self._priority[number] = self._depth + self._rng.random() * len(self._priority)
        rank = max(runnable, key=self._priority.__getitem__)
        self._step += 1
        if self._step in self._falls:
            self._priority[rank] = self._falls[self._step]
        return rank

    def number(self, below: int) -> int:
        return _draw(self._rng, below)


def _draw(rng: random.Random, below: int) -> int:
    """From 0 to below - 1.  By random() alone, whose values Python promises to keep: a text outlives an upgrade."""
    return min(int(rng.random() * below), below - 1)


MOST_TEXT = 160  # characters in a text: with the words around it, a line of 200
_LISTED = MOST_TEXT - len("@999999999999#1c0ffee5")  # of them, characters before the digest


class Schedule(Protocol):
    """Chooses the rank that runs next, and numbers for other choices of a run."""

    def begin(self, ranks: int) -> None:
        """Starts a new run of so many ranks; the previous run leaves no trace, so that one object repeats the same run."""

    def next(self, runnable: Sequence[int], current: int | None) -> int:
        """One of `runnable`, which is ascending and not empty.  `current` ran last, and may be blocked now.

        Numbers from the number of ranks on are helper threads of ranks.
        """

    def number(self, below: int) -> int:
        """A number from 0 to `below` - 1, as for the sender that a receive from any source takes."""

    @property
    def text(self) -> str:
        """The text with which `replay` repeats the run so far."""


def round_robin() -> Schedule:
    """The default: the rank that ran goes on while it can, then the next higher one, and after the last the first.

    A rank that can always run is never interrupted: while it polls, the scheduler leaves it out of `runnable`.

    >>> schedule = round_robin()
    >>> schedule.begin(3)
    >>> schedule.next([0, 2], current=0), schedule.next([0, 2], current=1), schedule.next([0, 1], current=2)
    (0, 2, 0)
    >>> schedule.text
    'round_robin'
    """
    return RoundRobinSchedule()


def shuffled(seed: int | None = None) -> "RecordedSchedule":
    """Any rank that can run, all with equal probability.  Without a seed it draws one, which the text shows.

    Raises `BadSchedule` for a seed that is no whole number from 0 to 2**64 - 1.

    >>> schedule = shuffled(42)
    >>> schedule.begin(4)
    >>> schedule.next([0, 1, 2, 3], current=None), schedule.number(below=10)
    (2, 0)
    >>> schedule.text
    'shuffled:42=4:2,n0'
    """
    return RecordedSchedule(ShuffledSchedule(**_check_settings("shuffled", seed=_seed_or_random(seed))))


def pct(seed: int | None = None, depth: int = 3, steps: int = 1000) -> "RecordedSchedule":
    """The rank of the highest priority; priorities are random, and fall at `depth` - 1 random steps.

    Finds any bug that needs `depth` ordered events with a chance of at least 1 / (ranks * steps ** (depth - 1)), if
    a run has at most that many steps: S. Burckhardt, P. Kothari, M. Musuvathi, S. Nagarakatte, "A Randomized
    Scheduler with Probabilistic Guarantees of Finding Bugs", ASPLOS 2010.  A rank may never get its turn.

    Raises `BadSchedule` unless seed < 2**64, 1 <= depth <= 100 and 1 <= steps <= 10**9.

    >>> schedule = pct(7, depth=2, steps=5)
    >>> schedule.begin(2)
    >>> [schedule.next([0, 1], current=None) for _ in range(5)]
    [0, 0, 0, 0, 1]
    >>> schedule.text
    'pct:7:2:5=2:0x4,1'
    """
    return RecordedSchedule(PctSchedule(**_check_settings("pct", seed=_seed_or_random(seed), depth=depth, steps=steps)))


def replay(text: str) -> Schedule:
    """The schedule that repeats a run from its text, and after the end of the text goes on as that run would have.

    A policy alone is a text too, as on a command line: `shuffled`, `pct:7`.

    Raises `BadSchedule` for a text that cannot be read.  The schedule raises `ReplayDiverged` once the program asks
    for another number of ranks, another kind of answer, a rank that cannot run, or when the digests differ.

    >>> again = replay("shuffled:42=4:2,n0")
    >>> again.begin(4)
    >>> again.next([1, 2, 3], current=None)
    2
    >>> again.next([1, 2, 3], current=2)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    localtensor.errors.runs.ReplayDiverged: ...answer 2 in the text is the number 0, and what can run is 1, 2, 3...
    """
    read = _TEXT.fullmatch(text) if isinstance(text, str) and len(text) <= MOST_TEXT else None
    if read is None:
        raise BadSchedule(text, f"it is no POLICY[=RANKS:ANSWERS][@COUNT#DIGEST] of up to {MOST_TEXT} characters")
    made = _policy_named(text, read["policy"], [int(setting) for setting in read["settings"].split(":")[1:]])
    if not read["ranks"] and not read["count"]:
        return made
    policy = made.policy if isinstance(made, RecordedSchedule) else made
    if read["ranks"]:
        policy = _ListedAnswers(policy, int(read["ranks"]), read["answers"])
    if len(policy.text) > _LISTED:
        raise BadSchedule(text, f"what stands before the digest has more than {_LISTED} characters")
    return RecordedSchedule(policy, due=(int(read["count"]), int(read["digest"], 16)) if read["count"] else None)


class RecordedSchedule:
    """Wraps a policy and records its answers: all of them while they fit into a text, else their digest.

    Its memory does not grow with the run.  `due` is a number of answers and the digest that they must have, else
    `ReplayDiverged` is raised.  Two runs of one program under one policy gave the same answers if their texts are equal.

    >>> schedule = RecordedSchedule(round_robin())
    >>> schedule.begin(2)
    >>> [schedule.next([1], current=None) for _ in range(1000)] == [1] * 1000
    True
    >>> schedule.text
    'round_robin=2:1x1000'
    """

    def __init__(self, policy: Schedule, *, due: tuple[int, int] | None = None) -> None:
        self.policy, self._due = policy, due
        self._start(0)

    def _start(self, ranks: int) -> None:
        self._ranks, self._count, self._digest = ranks, 0, crc32(b"%d:" % ranks)
        self._runs: list[tuple[str, int]] | None = []  # (answer, repetitions in a row); None: too many to list

    def begin(self, ranks: int) -> None:
        self._start(ranks)
        self.policy.begin(ranks)

    def next(self, runnable: Sequence[int], current: int | None) -> int:
        rank = self.policy.next(runnable, current)
        self._write(str(rank))
        return rank

    def number(self, below: int) -> int:
        number = self.policy.number(below)
        self._write(f"n{number}")
        return number

    def _write(self, answer: str) -> None:
        self._count += 1
        self._digest = crc32(f"{answer},".encode(), self._digest)
        if self._due and self._due[0] == self._count and self._due[1] != self._digest:
            have, want = f"{self._digest:08x}", f"{self._due[1]:08x}"
            raise ReplayDiverged(f"the digest of the first {self._count} answers is {have}, and the text has {want}")
        if self._runs is None:
            return
        if self._runs and self._runs[-1][0] == answer:
            self._runs[-1] = answer, self._runs[-1][1] + 1
        else:
            self._runs.append((answer, 1))
            if 2 * len(self._runs) > MOST_TEXT:  # each takes a digit and a comma at least
                self._runs = None

    @property
    def text(self) -> str:
        if not self._count:
            return self.policy.text
        if self._runs is not None:
            answers = ",".join(f"{answer}x{times}" if times > 1 else answer for answer, times in self._runs)
            listed = f"{self.policy.text.partition('=')[0]}={self._ranks}:{answers}"
            if len(listed) <= _LISTED:
                return listed
        return f"{self.policy.text}@{self._count}#{self._digest:08x}"


class _ListedAnswers:
    """Answers from a list, then those of the policy that gave them, in the state that it has by then."""

    def __init__(self, policy: Schedule, ranks: int, answers: str) -> None:
        self.text = f"{policy.text}={ranks}:{answers}"
        self._policy, self._ranks, self._answers = policy, ranks, answers

    def begin(self, ranks: int) -> None:
        if ranks != self._ranks:
            raise ReplayDiverged(f"the text is of a run of {self._ranks} ranks, and this one has {ranks}")
        self._policy.begin(ranks)
        self._left, self._place = _parse_answers(self._answers), 0

    def next(self, runnable: Sequence[int], current: int | None) -> int:
        free = self._policy.next(runnable, current)
        answer = self._answer(f"r{free}")
        if answer[0] != "r" or int(answer[1:]) not in runnable:
            ranks = ", ".join(map(str, runnable[:8])) + (f" and {len(runnable) - 8} more" if runnable[8:] else "")
            shown = _describe(answer)
            raise ReplayDiverged(f"answer {self._place} in the text is {shown}, and what can run is {ranks}")
        return int(answer[1:])

    def number(self, below: int) -> int:
        free = self._policy.number(below)
        answer = self._answer(f"n{free}")
        if answer[0] != "n" or int(answer[1:]) >= below:
            request = f"the program asks for a number below {below}"
            raise ReplayDiverged(f"answer {self._place} in the text is {_describe(answer)}, and {request}")
        return int(answer[1:])

    def _answer(self, free: str) -> str:
        self._place += 1
        return next(self._left, free)


_TEXT = re.compile(
    r"(?P<policy>[a-z_]+)(?P<settings>(?::[0-9]+)*)"
    r"(?:=(?P<ranks>[0-9]+):(?P<answers>n?[0-9]+(?:x[0-9]{1,12})?(?:,n?[0-9]+(?:x[0-9]{1,12})?)*))?"
    r"(?:@(?P<count>[0-9]{1,12})#(?P<digest>[0-9a-f]{8}))?"
)
_RANGES = {"seed": (0, 2**64 - 1), "depth": (1, 100), "steps": (1, 10**9)}
_MAKERS: dict[str, tuple[Callable[..., Schedule], str]] = {  # with the settings of each, in order
    "round_robin": (round_robin, "no settings"),
    "shuffled": (shuffled, "seed"),
    "pct": (pct, "seed, depth, steps"),
}


def _policy_named(text: str, name: str, settings: Sequence[int]) -> Schedule:
    if name == "bounded":
        return read_bounded(text)
    if name not in _MAKERS:
        raise BadSchedule(text, f"there is no policy {name}, only {', '.join(_MAKERS)}")
    maker, takes = _MAKERS[name]
    if len(settings) > sum(setting in _RANGES for setting in takes.split(", ")):
        raise BadSchedule(text, f"{name} takes {takes}, not {len(settings)} numbers")
    return maker(*settings)


def _check_settings(policy: str, **settings: int) -> dict[str, int]:
    for name, value in settings.items():
        low, high = _RANGES[name]
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            text = ":".join([policy, *map(repr, settings.values())])
            raise BadSchedule(text, f"{name} has to be a whole number from {low} to {high}")
    return settings


def _seed_or_random(seed: int | None) -> int:
    return secrets.randbits(32) if seed is None else seed


def _parse_answers(answers: str) -> Iterator[str]:
    """The answers one by one: `0x2,n3` is r0, r0, n3.  Lazy, because a text may hold 0x999999999999."""
    runs = (run.partition("x") for run in answers.split(","))
    return chain.from_iterable(repeat(a if a[0] == "n" else f"r{a}", int(times or 1)) for a, _, times in runs)


def _describe(answer: str) -> str:
    return f"{'rank' if answer[0] == 'r' else 'the number'} {answer[1:]}"
