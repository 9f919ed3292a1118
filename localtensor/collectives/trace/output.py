"""The files that are written of a recorded run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from localtensor.errors import Refusal


class CannotWrite(Refusal, values="{argument}={path}"):
    """A file of a recorded run that cannot be written."""

    PROBLEM = "it cannot be written ({reason})"
    REMEDY = "Name a file in a folder that exists and that you may write to."


def check_file(call: str, name: str, path: Path) -> None:
    """Makes sure before a run that its file can be written.  Raises `CannotWrite`."""
    try:
        with open(path, "a", encoding="utf-8"):
            pass
    except (OSError, ValueError) as error:
        raise CannotWrite(call, name, path, getattr(error, "strerror", None) or str(error)) from None


def write_file(call: str, name: str, path: Path, write: Callable[[Any], object]) -> None:
    """Writes a file by `write(file)`.  Raises `CannotWrite`, as where a disk is full."""
    try:
        with open(path, "w", encoding="utf-8") as file:
            write(file)
    except OSError as error:
        raise CannotWrite(call, name, path, error.strerror or str(error)) from None
