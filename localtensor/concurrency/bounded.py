"""Bounded search: every schedule with at most so many preemptions, each exactly once, the fewest turns first.

M. Musuvathi, S. Qadeer, "Iterative Context Bounding for Systematic Testing of Multithreaded Programs", PLDI 2007.  A
schedule is `round_robin` except for some choices; a choice that interrupts a thread that could go on is a preemption.
A thread that waits or has ended is replaced for free, by any of those that can run.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise

from localtensor.errors.runs import BadSchedule, ReplayDiverged

_TEXT = re.compile(r"bounded((?::[0-9]{1,9}:[0-9]{1,9})*)")


@dataclass(frozen=True, slots=True)
class BranchPoint:
    """A choice with alternatives: its number in the run, the other options, and whether they preempt a thread."""

    place: int
    others: tuple[int, ...]
    preempts: bool


class BoundedSchedule:
    """A `Schedule`: round robin, except for the answers in `turns`, each a pair (number of the choice, answer).

    >>> schedule = BoundedSchedule(((1, 1),))
    >>> schedule.begin(2)
    >>> [schedule.next([0, 1], current=0) for _ in range(3)], schedule.text
    ([0, 1, 0], 'bounded:1:1')
    """

    def __init__(self, turns: tuple[tuple[int, int], ...] = (), preemptions: int = 0) -> None:
        self.turns, self.preemptions = turns, preemptions
        self.text = "".join(["bounded", *(f":{place}:{answer}" for place, answer in turns)])
        self._turns = dict(turns)
        self._from = turns[-1][0] + 1 if turns else 0
        self.begin(0)

    def begin(self, ranks: int) -> None:
        self.choices: list[BranchPoint] = []  # after the last turn: earlier ones belong to other schedules
        self._place = -1

    @property
    def steps(self) -> int:
        """The number of choices of the run so far."""
        return self._place + 1

    def next(self, runnable: Sequence[int], current: int | None) -> int:
        self._place += 1
        place = self._place
        going = current in runnable
        if place < self._from:
            turn = self._turns.get(place)
            if turn is None:
                return _default(runnable, current)
            if turn not in runnable:
                raise ReplayDiverged(f"answer {place} is thread {turn}, and what can run is {list(runnable)}")
            return turn
        chosen = _default(runnable, current)
        if len(runnable) > 1:
            self.choices.append(BranchPoint(place, tuple(one for one in runnable if one != chosen), going))
        return chosen

    def number(self, below: int) -> int:
        self._place += 1
        turn = self._turns.get(self._place, 0)
        if turn >= below:
            raise ReplayDiverged(f"answer {self._place} is the number {turn}, and it has to be below {below}")
        if self._place >= self._from and below > 1:
            self.choices.append(BranchPoint(self._place, tuple(range(1, below)), preempts=False))
        return turn


class Frontier:
    """The schedules still to run: `take` one, run it, then `grow` by its choices.  At most `most` are kept.

    Those with the fewest turns come first, and among them those with the fewest preemptions: so each choice of the run
    without turns is tried once before two are combined, however many choices are free.
    """

    def __init__(self, bound: int, most: int) -> None:
        self._bound, self._most = bound, most
        self._ahead: list[tuple[int, int, int, tuple[tuple[int, int], ...]]] = [(0, 0, 0, ())]
        self._added = 0

    def take(self) -> BoundedSchedule | None:
        """A schedule with the fewest turns; None if none is left."""
        if not self._ahead:
            return None
        _, preemptions, _, turns = heappop(self._ahead)
        return BoundedSchedule(turns, preemptions)

    def grow(self, ran: BoundedSchedule) -> None:
        """Adds the schedules that differ from this run in one answer after its last turn."""
        for choice in ran.choices:
            cost = ran.preemptions + choice.preempts
            if cost > self._bound:
                continue
            for other in choice.others:
                if len(self._ahead) >= self._most:
                    return
                turns = (*ran.turns, (choice.place, other))
                self._added += 1
                heappush(self._ahead, (len(turns), cost, self._added, turns))


def read_bounded(text: str) -> BoundedSchedule:
    """The schedule of a text such as `bounded:17:1:25:0`.  Raises `BadSchedule`."""
    found = _TEXT.fullmatch(text)
    if found is None:
        raise BadSchedule(text, "it is no bounded[:PLACE:ANSWER]...")
    numbers = [int(number) for number in found[1].split(":")[1:]]
    turns = tuple(zip(numbers[::2], numbers[1::2], strict=True))
    if any(late <= early for (early, _), (late, _) in pairwise(turns)):
        raise BadSchedule(text, "its places do not ascend")
    return BoundedSchedule(turns)


def _default(runnable: Sequence[int], current: int | None) -> int:
    """The thread that ran; if it cannot run, the next higher one, and after the last the first."""
    if current is None:
        return runnable[0]
    for one in runnable:
        if one >= current:
            return one
    return runnable[0]
