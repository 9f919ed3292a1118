"""What a script showed on a version of torch, and the table of all of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PRESENT, FIXED, NOT_APPLICABLE, ERROR, NOT_AVAILABLE = "present", "fixed", "not applicable", "error", "not available"
HANGS = "hangs"
NO_RULE = "does not have a sharding strategy"
"""Words of the NotImplementedError of a DTensor that has no rule for the op at all."""


_PAGE = """# Which torch has which fault

By `localtensor causes sweep.jsonl --repro scripts`, then `python -m tests.tools.versions scripts -o docs/versions.md`. The first column names what
the sweep found in torch 2.13.0 ([findings.md](findings.md)): faults that only another version has are not here. Each was run as a script of plain
torch on gloo processes, in an environment for each version.

* present: the script shows the fault there; "present: hangs" if it does not end
* fixed: it runs and gives what is right, so this version has the fault no longer or not yet
* not applicable: this torch lacks what the script calls, or DTensor has no rule for the op
* error: DTensor raises there, which is another behaviour than the fault; its words are below the table
"""


@dataclass(frozen=True)
class Script:
    """A script that shows one fault: exit code 1 if the fault is there, 0 if not."""

    path: Path
    title: str
    """The first line of its docstring."""
    ranks: int
    found_on: str = ""
    """The version of torch that its docstring says has the fault."""
    raises: str = ""
    """The exception that is the fault, for one that shows as an exception."""


@dataclass(frozen=True)
class Outcome:
    """One of the five kinds, and what there is to add in one line."""

    kind: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {HANGS}" if self.detail == HANGS else self.kind


@dataclass(frozen=True)
class Column:
    """One version of torch: what each script showed there, by the name of its file."""

    version: str
    outcomes: Mapping[str, Outcome] = field(default_factory=dict)
    missing: str = ""
    """Why this version could not be installed."""

    def of(self, script: Script) -> Outcome:
        return self.outcomes.get(script.path.name, Outcome(NOT_AVAILABLE, self.missing))


def script_of(path: Path) -> Script:
    """What the first lines of the script say of it.  Raises OSError, and ValueError where they name no number of ranks."""
    text = path.read_text(encoding="utf-8", errors="replace")
    head = re.match(r'\s*(?:#[^\n]*\n\s*)*"""(.*?)"""', text, re.DOTALL)
    words = head[1].strip() if head else ""
    ranks = re.search(r"torchrun .*?--nproc[-_]per[-_]node[ =](\d+)", words)
    if not ranks:
        raise ValueError("its docstring has no line `torchrun --nproc-per-node N`")
    found_on = re.search(r"\btorch (\d+\.\d+\.\d+)", words)
    raises = re.search(r"\braises (\w+)", words)
    return Script(
        path, words.splitlines()[0], int(ranks[1]), found_on[1] if found_on else "", raises[1] if raises else ""
    )


def outcome_of(script: Script, codes: Sequence[int | None], output: str) -> Outcome:
    """What the exit codes of the ranks, and the output of the one that failed first, mean for the fault of this script."""
    if set(codes) == {0}:
        return Outcome(FIXED)
    error = _last_error(output)
    said = f"{error.kind}: {error.message}" if error else _last_line(output)
    if error and (error.is_missing(script) or NO_RULE in error.message):
        return Outcome(NOT_APPLICABLE, said)
    if 1 in codes or (error and error.kind == script.raises):
        return Outcome(PRESENT)
    if error:
        return Outcome(ERROR, said)
    shown = ", ".join("ended" if code is None else str(code) for code in codes)
    return Outcome(ERROR, f"exit codes {shown}; {said}")


@dataclass(frozen=True)
class _Error:
    kind: str
    message: str
    """Its first line."""
    file: str
    """Where it was raised, without the `__getattr__` that looked for a name."""

    def is_missing(self, script: Script) -> bool:
        """Whether the script itself names what this torch does not have; such an error from within torch is torch's own."""
        kinds = ("ImportError", "ModuleNotFoundError", "AttributeError")
        return self.kind in kinds and Path(self.file).name == script.path.name


def _last_error(output: str) -> _Error | None:
    """The error of the last traceback."""
    _, traceback, block = output.rpartition("Traceback (most recent call last):\n")
    error = re.search(r"^([A-Za-z_][\w.]*)(?:: (.*))?$", block, re.MULTILINE)
    if not traceback or not error:
        return None
    frames = re.findall(r'^  File "(.+?)", line \d+, in (\S+)', block, re.MULTILINE)
    files = [file for file, function in frames if function != "__getattr__"]
    return _Error(error[1].rpartition(".")[2], error[2] or "-", files[-1] if files else "")


def _last_line(output: str) -> str:
    return next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "it printed nothing")


def gone(scripts: Iterable[Script], columns: Iterable[Column]) -> list[Script]:
    """The scripts that do not show their fault on the version that they name."""
    by_version = {column.version: column for column in columns if not column.missing}
    named = [script for script in scripts if script.found_on in by_version]
    return [script for script in named if by_version[script.found_on].of(script).kind != PRESENT]


def markdown(scripts: Sequence[Script], columns: Sequence[Column], by_op: bool = False) -> str:
    """A row for each script, or for each op; below the table the reason of each error."""
    rows = _rows(scripts, by_op)
    lines = ["| what | " + " | ".join(column.version for column in columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for label, group in rows.items():
        cells = [_cell([column.of(script) for script in group]) for column in columns]
        lines.append(f"| {_escaped(label)} | " + " | ".join(cells) + " |")
    notes = [f"* torch {c.version} is {NOT_AVAILABLE}: {_escaped(c.missing)}" for c in columns if c.missing]
    for script in scripts:
        errors = [(column.version, column.of(script)) for column in columns]
        notes += [f"* {script.path.name} on {v}: {_escaped(o.detail)}" for v, o in errors if o.kind == ERROR]
    return "\n".join([*lines, *([""] if notes else []), *notes]) + "\n"


def page(scripts: Sequence[Script], columns: Sequence[Column], by_op: bool = False) -> str:
    """The table with a heading, and how many faults each version has."""
    there = {c.version: sum(c.of(script).kind == PRESENT for script in scripts) for c in columns if not c.missing}
    counts = ", ".join(f"{number} on {version}" for version, number in there.items())
    return f"{_PAGE}\nOf {len(scripts)} faults are present: {counts}.\n\n{markdown(scripts, columns, by_op)}"


def as_json(scripts: Sequence[Script], columns: Sequence[Column]) -> dict[str, Any]:
    return {
        "torch": {column.version: column.missing or "installed" for column in columns},
        "scripts": [
            {
                "script": script.path.name,
                "title": script.title,
                "ranks": script.ranks,
                "found_on": script.found_on,
                "outcomes": {c.version: {"kind": str(c.of(script)), "detail": c.of(script).detail} for c in columns},
            }
            for script in scripts
        ],
    }


def _rows(scripts: Sequence[Script], by_op: bool) -> dict[str, list[Script]]:
    rows: dict[str, list[Script]] = {}
    titles = Counter(script.title for script in scripts)
    for script in scripts:
        label = script.title if titles[script.title] == 1 else f"{script.title} ({script.path.name})"
        rows.setdefault(re.split(r":? ", script.title)[0] if by_op else label, []).append(script)
    return rows


def _cell(outcomes: Sequence[Outcome]) -> str:
    """The outcome that all share; else how many show the fault, or how many of each of the others."""
    words = Counter(map(str, outcomes))
    if len(words) == 1:
        return next(iter(words))
    present = sum(outcome.kind == PRESENT for outcome in outcomes)
    if present:
        return f"{PRESENT} {present} of {len(outcomes)}" if present < len(outcomes) else PRESENT
    return ", ".join(f"{word} {number}" for word, number in sorted(words.items()))


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
