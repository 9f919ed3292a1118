"""How far the work is, on a terminal; without one, nothing."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class Bar:
    """Progress on a terminal; without one, nothing.  No thread of its own: workers are forked meanwhile."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._task: TaskID | None = None

    def __enter__(self) -> Bar:
        if self._progress:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress:
            self._progress.stop()

    def phase(self, name: str, total: int) -> None:
        if self._progress:
            if self._task is not None:
                self._progress.remove_task(self._task)
            self._task = self._progress.add_task(name, total=total)
            self._progress.refresh()

    def tick(self, count: int = 1) -> None:
        if self._progress and self._task is not None:
            self._progress.update(self._task, advance=count, refresh=True)


def bar(console: Console, quiet: bool) -> Bar:
    """A bar for this console; a silent one if it is no terminal, or quiet is asked for."""
    if quiet or not console.is_terminal:
        return Bar(None)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Bar(Progress(*columns, console=console, auto_refresh=False, transient=True))
