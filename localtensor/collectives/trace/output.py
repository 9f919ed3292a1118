"""The files that are written of a recorded run."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from localtensor.errors import Refusal, WrongType

PARTS: set[str] = set()
"""The files that are being written: what ends the process at once removes them."""


class CannotWrite(Refusal, values="{argument}={path}"):
    """A file of a recorded run that cannot be written."""

    PROBLEM = "it cannot be written ({reason})"
    REMEDY = "Name a file in a folder that exists and that you may write to."


def trace_path(call: str, trace: object) -> Path | None:
    """The path of an argument `trace`; None for a bool or None.  Raises `WrongType`."""
    if trace is None or isinstance(trace, bool):
        return None
    if not isinstance(trace, str | os.PathLike):
        raise WrongType(call, "trace", trace, "it is no path", "Pass the path of a file, as 'trace.json', or True.")
    return Path(os.fspath(trace))


def check_file(call: str, name: str, path: Path) -> None:
    """Makes sure before a run that its file can be written; leaves none that was not there.  Raises `CannotWrite`."""
    try:
        there = path.exists()
        with open(path, "a", encoding="utf-8"):
            pass
        if not there:
            path.resolve().unlink()  # of a link, the file
    except (OSError, ValueError) as error:
        raise CannotWrite(call, name, path, getattr(error, "strerror", None) or str(error)) from None


def write_file(call: str, name: str, path: Path, write: Callable[[Any], object]) -> None:
    """Writes a file by `write(file)`, whole or not at all, as if Ctrl-C is pressed again meanwhile.

    What is no plain file, as a pipe, is written directly.  Raises `CannotWrite`, as where a disk is full.
    """
    try:
        if path.exists() and not path.is_file():
            with open(path, "w", encoding="utf-8") as file:
                write(file)
            return
        target = path.resolve()  # of a link, the file
        part = target.with_name(f".{target.name}.{os.getpid()}.part")
        PARTS.add(str(part))
        try:
            with open(part, "w", encoding="utf-8") as file:
                write(file)
            os.replace(part, target)
        finally:
            part.unlink(missing_ok=True)
            PARTS.discard(str(part))
    except OSError as error:
        raise CannotWrite(call, name, path, error.strerror or str(error)) from None


def problem_text(error: BaseException) -> str:
    """The error in which a run has ended, as the recording has it.

    >>> problem_text(ValueError("no such luck")), problem_text(KeyboardInterrupt())
    ('ValueError: no such luck', 'KeyboardInterrupt')
    """
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
