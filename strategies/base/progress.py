"""The console on standard error, and a progress bar on a terminal; elsewhere nothing."""

from __future__ import annotations

import os
import re

import rich.progress
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn

from strategies.base.foreign_text import PrintableConsole
from strategies.base.signals import CLEANUPS, raise_if_stopped


class Progress:
    """Progress reports; this base class ignores them."""

    def phase(self, name: str, total: int) -> None:
        """A phase of `total` units begins."""

    def tick(self, count: int = 1) -> None:
        """`count` more units are done."""

    def say(self, text: str) -> None:
        """A message for the user that does not stop the run."""


class ProgressBar(Progress):
    """Progress on a terminal; elsewhere nothing. It starts no thread, since workers are forked meanwhile."""

    def __init__(self, progress: rich.progress.Progress | None, console: Console) -> None:
        self._progress, self._console = progress, console
        self._task: TaskID | None = None

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
        if self._progress:
            if self._task is not None:
                self._progress.remove_task(self._task)
            self._task = self._progress.add_task(name, total=total)
            self._progress.refresh()

    def tick(self, count: int = 1) -> None:
        raise_if_stopped()
        if self._progress and self._task is not None:
            self._progress.update(self._task, advance=count, refresh=True)

    def say(self, text: str) -> None:
        self._console.print(text, markup=False)


def error_console() -> Console:
    """A console on standard error, which prints texts as they are."""
    return PrintableConsole(stderr=True, highlight=False, soft_wrap=True, emoji=False)


def progress_bar(console: Console, quiet: bool) -> ProgressBar:
    """A progress bar on this console; a silent one if it is no terminal, or `quiet`."""
    if quiet or not console.is_terminal:
        return ProgressBar(None, console)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return ProgressBar(rich.progress.Progress(*columns, console=console, auto_refresh=False, transient=True), console)


_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def xml_safe(text: str) -> str:
    """The text with a mark for each character that XML cannot hold: control characters and lone surrogates.

    >>> xml_safe("a" + chr(0) + "b") == "a" + chr(0xFFFD) + "b"
    True
    """
    return _NOT_XML.sub("\ufffd", text)


def with_count(number: int, what: str, plural: str = "") -> str:
    """`1 overload`, `2 overloads`; `plural` where it is no `s` more."""
    return f"{number} {what if number == 1 else plural or f'{what}s'}"
