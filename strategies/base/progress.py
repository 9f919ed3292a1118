"""How far the work is, on a terminal; without one, nothing."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from dataclasses import MISSING, fields
from inspect import Parameter, Signature
from pathlib import Path
from types import GenericAlias
from typing import Annotated, Any, Protocol, TypeVar, get_args, get_origin, get_type_hints

import rich.progress
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from typer import Option

from localtensor.errors import LocalTensorError, refusal
from strategies.base.atomic_files import unwritable
from strategies.base.signals import LEFT, USAGE, check, complain, leave


class Progress(Protocol):
    """Who is told how far the work is."""

    def phase(self, name: str, total: int) -> None: ...

    def tick(self, count: int = 1) -> None: ...

    def say(self, text: str) -> None: ...


class Silent:
    """Nobody is told."""

    def phase(self, name: str, total: int) -> None:
        """A phase of `total` units begins."""

    def tick(self, count: int = 1) -> None:
        """So many units are done."""

    def say(self, text: str) -> None:
        """Something that the user would want to know, and that stops nothing."""


class Bar:
    """Progress on a terminal; without one, nothing.  No thread of its own: workers are forked meanwhile."""

    def __init__(self, progress: rich.progress.Progress | None, console: Console) -> None:
        self._progress, self._console = progress, console
        self._task: TaskID | None = None

    def __enter__(self) -> Bar:
        if self._progress:
            LEFT["terminal"] = _show_cursor
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress:
            self._progress.stop()
            LEFT.pop("terminal", None)

    def phase(self, name: str, total: int) -> None:
        if self._progress:
            if self._task is not None:
                self._progress.remove_task(self._task)
            self._task = self._progress.add_task(name, total=total)
            self._progress.refresh()

    def tick(self, count: int = 1) -> None:
        check()
        if self._progress and self._task is not None:
            self._progress.update(self._task, advance=count, refresh=True)

    def say(self, text: str) -> None:
        self._console.print(text, markup=False)


def _show_cursor(_: str) -> None:
    os.write(2, b"\r\x1b[2K\x1b[?25h")  # and the bar goes, as at any other end


def bar(console: Console, quiet: bool) -> Bar:
    """A bar for this console; a silent one if it is no terminal, or quiet is asked for."""
    if quiet or not console.is_terminal:
        return Bar(None, console)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Bar(rich.progress.Progress(*columns, console=console, auto_refresh=False, transient=True), console)


_UNFIT = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def printable(text: str) -> str:
    """The text, with a mark for each character that XML cannot hold: control characters and lone surrogates.

    >>> printable("a" + chr(0) + "b") == "a" + chr(0xFFFD) + "b"
    True
    """
    return _UNFIT.sub("\ufffd", text)


def counted(number: int, what: str) -> str:
    """`1 overload`, `2 overloads`."""
    return f"{number} {what}{'s' if number != 1 else ''}"


# The options of a command as one frozen value: a dataclass, whose fields are the parameters of the command line.

Options = TypeVar("Options")
Seed = Annotated[int, Option("--seed", help="Same seed, same output.")]
Quiet = Annotated[bool, Option("--quiet", "-q", help="No progress bar.")]
Workers = Annotated[
    int | None, Option("--workers", help="Worker processes.  [default: one for each core]", show_default=False)
]


class BadOption(LocalTensorError):
    """An option of a command that cannot be followed."""

    def __init__(self, call: str, option: str, value: object, problem: str, remedy: str) -> None:
        super().__init__(refusal(call, option, str(value), problem, remedy))


def check_writable(call: str, **paths: Path | None) -> None:
    """Say before the work, not after it, that a file cannot be written; `repro` is a folder.  Raises `BadOption`."""
    for name, path in paths.items():
        problem, remedy = unwritable(path, folder=name == "repro") if path is not None else ("", "")
        if problem:
            raise BadOption(call, f"--{name}", path, problem, remedy)


def check_folder(call: str, json: Path | None, remedy: str) -> None:
    """`check_writable` takes a file whose folder is still to be made; this does not.  Raises `BadOption`."""
    if json is not None and not json.absolute().parent.is_dir():
        raise BadOption(call, "--json", json, "its folder is not there", remedy)


def takes_options(more: str = "") -> Callable[[Callable[[Options], int]], Callable[..., None]]:
    """A function of `options`, which gives the exit code, as a function that typer can register.

    Its parameters are the fields of the dataclass, each annotated with its `Option` or `Argument`; a field that is a
    tuple may be given several times.  Options that the dataclass refuses end the command with 2.  For `more` see `leave`.
    """

    def typed(function: Callable[[Options], int]) -> Callable[..., None]:
        kind = get_type_hints(function)["options"]
        several = {name for name, hint in get_type_hints(kind).items() if get_origin(hint) is tuple}

        @functools.wraps(function)
        def command(**given: Any) -> None:
            def work() -> int:
                lists = {name: tuple(given[name]) for name in several if given[name]}
                try:
                    options = kind(**{name: value for name, value in given.items() if name not in several}, **lists)
                except BadOption as error:
                    complain(str(error))
                    return USAGE
                return function(options)

            leave(work, more)

        del command.__wrapped__  # whose parameter is another
        command.__annotations__ = {}
        command.__signature__ = Signature(_parameters(kind))  # type: ignore[attr-defined]
        return command

    return typed


def _parameters(kind: Any) -> list[Parameter]:
    """The fields of a dataclass as typer reads parameters: it knows lists, and no tuples of any length."""
    hints = get_type_hints(kind, include_extras=True)
    found = []
    for field in fields(kind):
        hint, default = hints[field.name], Parameter.empty if field.default is MISSING else field.default
        value = get_args(hint)[0]
        if get_origin(value) is tuple:
            hint = hint.copy_with((GenericAlias(list, get_args(value)[:1]),))
            default = Parameter.empty if default is Parameter.empty else None
        found.append(Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=hint))
    return found
