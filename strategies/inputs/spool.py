"""The samples of a sweep, beside its journal, so that going on with it captures nothing again: JSON, a line an overload."""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path

from strategies.model import codec
from strategies.model.rule import Sample


def path_of(journal: Path) -> Path:
    return journal.with_name(journal.name + ".samples")


def lines(run: str, shelf: Mapping[str, tuple[Sequence[Sample], str]]) -> Iterator[str]:
    """The lines of the file.  All samples must have a form in JSON (see `codec.has_form`)."""
    yield json.dumps({"run": run, "overloads": len(shelf)})
    for op, (found, why) in shelf.items():
        yield json.dumps({"op": op, "why": why, "samples": list(map(codec.sample, found))}, separators=(",", ":"))


def read(path: Path, run: str, wanted: Container[str]) -> dict[str, tuple[Sequence[Sample], str]] | None:
    """The samples of the wanted overloads; None if the file is not there, not whole, or of another run."""
    try:
        with path.open(encoding="utf-8") as file:
            head = json.loads(file.readline())
            if head["run"] != run:
                return None
            rows = list(file)
            if len(rows) != head["overloads"]:
                return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    found: dict[str, tuple[Sequence[Sample], str]] = {}
    for row in rows:
        if row.split('"', 4)[3] in wanted:  # the op stands first: the others need not be parsed
            told = json.loads(row)
            found[told["op"]] = [codec.read_sample(s) for s in told["samples"]], told["why"]
    return found
