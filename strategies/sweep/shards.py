"""Journals of several shards as one, and the proof that together they hold every unit of the plan, once."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from strategies.base.atomic_files import write_lines
from strategies.base.journal import BadJournal, Line, Read, of_kind, read, unlike
from strategies.model.work_unit import Unit, read_unit
from strategies.sweep.aggregate import plan

MERGES = "localtensor merge"


class Gap(BadJournal):
    """Units that no journal holds, or that two hold."""


def merged(paths: Sequence[Path]) -> tuple[Line, list[Line], list[str]]:
    """The first line of the run as a whole, all lines, and what is to be told of lines that were cut.

    Raises `BadJournal` for a file that is no journal or of another run, and `Gap` where a unit is missing or
    stands in two journals, or a suspected rule was not settled.
    """
    found = [(path, read(path, MERGES)) for path in paths]
    first = found[0][1].begin
    common = {name: value for name, value in first.items() if name != "shard"}
    for path, one in found[1:]:
        if problem := unlike(one.begin, common) or _other_plan(first, one.begin):
            raise BadJournal(path, f"it is of another run than {paths[0]}: {problem}", "Merge one run.", MERGES)
    _complete(first, found)
    lines = [line for _, one in found for line in one.lines]
    return {**common, "shard": None}, lines, [one.cut for _, one in found if one.cut]


def _other_plan(first: Line, other: Line) -> str:
    if first["ops"] == other["ops"]:
        return ""
    apart = sorted(set(first["ops"]) ^ set(other["ops"]))
    return f"{len(apart)} overloads are in one plan only ({apart[0]}, say)"


def _complete(begin: Line, found: Sequence[tuple[Path, Read]]) -> None:
    held: dict[Unit, Path] = {}
    for path, one in found:
        for line in of_kind(one.lines, "unit"):
            unit = read_unit(line["unit"])
            if unit in held:
                raise Gap(path, f"{unit} is in {held[unit]} as well", "Name each journal once.", MERGES)
            held[unit] = path
    missing = [unit for unit in plan(begin) if unit not in held]
    if missing:
        shards = _shards(begin, found)
        problem = f"{len(missing)} of {len(plan(begin))} units are in none of the journals ({missing[0]}, say{shards})"
        raise Gap(found[0][0], problem, "Run the other shards, or go on with those by --resume.", MERGES)
    for path, one in found:
        left = sorted(_suspected(one) - {line["rule"] for line in of_kind(one.lines, "settled")})
        if left:
            problem = f"{len(left)} suspected rules were not confirmed yet ({left[0]}, say)"
            raise Gap(path, problem, "Go on with it by --resume.", MERGES)


def _shards(begin: Line, found: Sequence[tuple[Path, Read]]) -> str:
    given = [one.begin["shard"] for _, one in found if one.begin["shard"]]
    if not given:
        return ""
    lacking = sorted(set(range(1, given[0][1] + 1)) - {number for number, _ in given})
    return f"; shard {', '.join(f'{number}/{given[0][1]}' for number in lacking)} is not among them" if lacking else ""


def _suspected(one: Read) -> set[str]:
    names: set[str] = set()
    for line in of_kind(one.lines, "unit"):
        names.update(line.get("suspects", {}))
        names.update(line.get("whole", {}) if one.begin["confirm"] != "none" else {})
    return names


def write(path: Path, begin: Line, lines: Sequence[Line]) -> None:
    """One journal of the whole run.  Raises `OSError`."""

    def rows() -> Iterator[str]:
        for line in (begin, *lines):
            yield json.dumps(line, separators=(",", ":"))

    write_lines(path, rows())
