"""Where the rule of an overload is written, as far as that is in the repository at hand."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from strategies.gate.changes.registrations import written_now
from strategies.gate.decision import Places
from strategies.gate.model import SourceLine


def places(top: Path, ops: Collection[str]) -> Places:
    """For each of these overloads the first line of the function that is registered for it, of several the first one
    below `top`; None if there is none."""
    found: dict[str, SourceLine] = {}
    every = written_now(ops) if ops else {}
    for op in ops:
        below = (_place(one.file, one.line, top.resolve()) for one in every.get(op, ()))
        place = next((place for place in below if place is not None), None)
        if place is not None:
            found[op] = place
    return found.get


def _place(file: str, line: int, top: Path) -> SourceLine | None:
    path = Path(file)
    if not path.is_absolute() or not path.resolve().is_relative_to(top):
        return None
    return SourceLine(path.resolve().relative_to(top).as_posix(), line)


def within(path: Path, top: Path) -> str:
    """The path as the repository knows it, with slashes; as it was given, if it is outside."""
    there = path.absolute().resolve()
    return there.relative_to(top.resolve()).as_posix() if there.is_relative_to(top.resolve()) else path.as_posix()
