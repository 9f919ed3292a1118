"""The input and the result of an exploration: a program of threads, and the first failure with its interleaving."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from textwrap import wrap

LINE_WIDTH = 110  # characters of one line of an interleaving


@dataclass(frozen=True, slots=True)
class Program:
    """Threads that share the objects of one call, and a check that raises unless all is well after they have ended."""

    threads: Sequence[Callable[[], object]]
    check: Callable[[], object] = lambda: None  # for threads that check everything themselves


@dataclass(frozen=True, slots=True)
class Failure:
    """One interleaving that went wrong.

    kind: "raised" by a thread, "check" failed, "deadlock", "livelock" (past the limit of steps) or "hung" (a thread
    ran for seconds without a yield point).
    detail: what happened, in one sentence.
    text: the schedule, which `replay` takes to repeat the failure.
    steps: pairs (thread, action), in order.
    repeats: whether a second run of the same schedule failed in the same way.

    >>> print(Failure("check", "2 is not 3", "pct:7", ((0, "reads"), (0, "writes"), (1, "reads"))))
    check: 2 is not 3
      thread 0: reads, writes
      thread 1: reads
    Replay: pct:7
    """

    kind: str
    detail: str
    text: str
    steps: tuple[tuple[int, str], ...]
    repeats: bool = True

    def __str__(self) -> str:
        flaky = "\nThe same schedule did not fail again: something else than the schedule decides."
        by_thread = groupby(self.steps, lambda step: step[0])
        steps = "\n".join(line for who, steps in by_thread for line in _thread_lines(who, steps))
        return f"{self.kind}: {self.detail}\n{steps}\nReplay: {self.text}{'' if self.repeats else flaky}"


def _thread_lines(who: int, steps: Iterable[tuple[int, str]]) -> list[str]:
    """`  thread 0: takes lock 1, spins 40 times`, in lines that fit."""
    words = [(what, sum(1 for _ in same)) for what, same in groupby(what for _, what in steps)]
    detail = ", ".join(what if times == 1 else f"{what} {times} times" for what, times in words)
    head = f"  thread {who}: "
    return wrap(detail, LINE_WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False)


@dataclass(frozen=True, slots=True)
class ExplorationResult:
    """schedules: how many were run.  complete: all within the bound were run.  longest: steps of the longest run."""

    schedules: int
    complete: bool
    failure: Failure | None
    longest: int = 0

    def __str__(self) -> str:
        if self.failure is None:
            every = "all " if self.complete else ""
            return f"{every}{self.schedules} schedules, at most {self.longest} steps each: nothing found"
        return f"schedule {self.schedules}: {self.failure}"
