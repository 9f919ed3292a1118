"""The console on standard error, and progress on it: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

import rich.progress
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from strategies.base.foreign_text import PrintableConsole
from strategies.base.signals import CLEANUPS, raise_if_stopped

T = TypeVar("T")


class Progress:
    """Progress reports; this base class ignores them."""

    def phase(self, name: str, total: int) -> None:
        """A phase of `total` units begins."""

    def tick(self, count: int = 1) -> None:
        """`count` more units are done; 0 while they are at work, several times a second."""

    def now(self, what: str) -> None:
        """What is at work: an op, a rule."""

    def each(self, name: str, items: Sequence[T]) -> Iterator[T]:
        """The items, as the units of a phase: each is done when the next is taken."""
        self.phase(name, len(items))
        for item in items:
            self.now(str(item))
            yield item
            self.tick()

    def say(self, text: str) -> None:
        """A message for the user that does not stop the run."""


EVERY = 60.0
"""Seconds between two lines where there is no terminal."""
REFRESH = 0.2
"""Seconds after which a bar is drawn anew."""
LONGEST = 40
"""Characters of what is at work, on a terminal."""


class ProgressBar(Progress):
    """A bar on a terminal, elsewhere lines; neither if `quiet`. It starts no thread, since workers are forked meanwhile."""

    def __init__(self, progress: rich.progress.Progress | None, console: Console, *, quiet: bool = True) -> None:
        self._progress, self._console, self._quiet = progress, console, quiet
        self._task: TaskID | None = None
        self._drawn = 0.0
        self._name, self._done, self._total, self._what = "", 0, 0, ""
        self._begun = self._printed = time.monotonic()

    def __enter__(self) -> ProgressBar:
        if self._progress:
            CLEANUPS["terminal"] = lambda _: os.write(2, b"\r\x1b[2K\x1b[?25h")  # the bar goes, as at any other end
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress:
            self._progress.stop()
            CLEANUPS.pop("terminal", None)

    def phase(self, name: str, total: int) -> None:
        self._name, self._done, self._total, self._what = name, 0, total, ""
        if self._progress:
            if self._task is not None:
                self._progress.remove_task(self._task)
            self._task = self._progress.add_task(name, total=total, what="")
            self._progress.refresh()

    def tick(self, count: int = 1) -> None:
        raise_if_stopped()
        self._done += count
        now = time.monotonic()
        if self._progress and self._task is not None:
            due = count > 0 or now - self._drawn > REFRESH
            self._drawn = now if due else self._drawn
            self._progress.update(self._task, advance=count, what=self._what[:LONGEST], refresh=due)
        elif not self._quiet and now - self._printed > EVERY and self._name:
            self._printed = now
            what = f", now {self._what}" if self._what else ""
            seconds = f"{now - self._begun:.0f} s"
            self.say(f"localtensor: {self._name}: {self._done:,} of {self._total:,} done after {seconds}{what}")

    def now(self, what: str) -> None:
        self._what = what

    def say(self, text: str) -> None:
        self._console.print(text, markup=False)


def error_console() -> Console:
    """A console on standard error, which prints texts as they are."""
    return PrintableConsole(stderr=True, highlight=False, soft_wrap=True, emoji=False)


def progress_bar(console: Console, quiet: bool) -> ProgressBar:
    """Progress on this console: a bar if it is a terminal, else lines; nothing if `quiet`."""
    if quiet or not console.is_terminal:
        return ProgressBar(None, console, quiet=quiet)
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"),
        TimeRemainingColumn(), TextColumn("{task.fields[what]}", markup=False),
    )  # fmt: skip
    return ProgressBar(rich.progress.Progress(*columns, console=console, auto_refresh=False, transient=True), console)


def with_count(number: int, what: str, plural: str = "") -> str:
    """`1 overload`, `2 overloads`; `plural` where it is no `s` more."""
    return f"{number} {what if number == 1 else plural or f'{what}s'}"
