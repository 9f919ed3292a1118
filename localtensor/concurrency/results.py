"""What an exploration is of, and what it comes to: a program of threads, and the one failure with its interleaving."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from textwrap import wrap

LINE = 110  # characters of one line of an interleaving


def _nothing() -> None:
    """A program whose threads say all there is to say."""


@dataclass(frozen=True, slots=True)
class Program:
    """Threads that share what one call made, and what must hold once all of them have ended (else it raises)."""

    threads: Sequence[Callable[[], object]]
    check: Callable[[], object] = _nothing


@dataclass(frozen=True, slots=True)
class Failure:
    """One interleaving that went wrong.

    kind: "raised" by a thread, "check" failed, "deadlock", "livelock" (past the limit of steps) or "hung" (a thread
    ran for seconds without a yield point).
    said: what happened, in one sentence.
    text: what `replay` takes to do it again.
    steps: who did what, in order.
    repeats: a second run of the same schedule failed in the same way.

    >>> print(Failure("check", "2 is not 3", "pct:7", ((0, "reads"), (0, "writes"), (1, "reads"))))
    check: 2 is not 3
      thread 0: reads, writes
      thread 1: reads
    Replay: pct:7
    """

    kind: str
    said: str
    text: str
    steps: tuple[tuple[int, str], ...]
    repeats: bool = True

    def __str__(self) -> str:
        flaky = (
            "" if self.repeats else "\nThe same schedule did not fail again: something else than the schedule decides."
        )
        told = "\n".join(line for who, steps in groupby(self.steps, lambda step: step[0]) for line in _told(who, steps))
        return f"{self.kind}: {self.said}\n{told}\nReplay: {self.text}{flaky}"


def _told(who: int, steps: Iterable[tuple[int, str]]) -> list[str]:
    """`  thread 0: takes lock 1, spins 40 times`, in lines that fit."""
    words = [(what, sum(1 for _ in same)) for what, same in groupby(what for _, what in steps)]
    said = ", ".join(what if times == 1 else f"{what} {times} times" for what, times in words)
    head = f"  thread {who}: "
    return wrap(said, LINE, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False)


@dataclass(frozen=True, slots=True)
class Explored:
    """schedules: how many were run.  complete: none within the bound was left out.  longest: steps of one run at most."""

    schedules: int
    complete: bool
    failure: Failure | None
    longest: int = 0

    def __str__(self) -> str:
        if self.failure is None:
            every = "all " if self.complete else ""
            return f"{every}{self.schedules} schedules, at most {self.longest} steps each: nothing found"
        return f"schedule {self.schedules}: {self.failure}"
