"""An append-only file of JSON lines, so that a run that is killed can resume.

The first line identifies the run; a journal of another run is rejected. An incomplete last line is dropped, and its
unit is repeated. Only one run at a time writes to a journal.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import FileIO
from multiprocessing.util import register_after_fork
from pathlib import Path
from types import TracebackType
from typing import Any

from localtensor.errors import Refusal
from strategies.base.atomic_files import read_bytes
from strategies.base.foreign_text import BadJson, Either, misfit, read_json

FORMAT = 1
WRITES = "localtensor validate"
"""The command that writes and resumes journals, by --journal; the others read them, by their argument JOURNAL."""
Line = dict[str, Any]


class BadJournal(Refusal):
    """A journal that cannot be read, continued or written. `call` is the command that it was passed to."""

    def __init__(self, path: Path, problem: str, remedy: str, call: str = WRITES) -> None:
        argument = "--journal" if call == WRITES else "JOURNAL"
        super().__init__(call, argument, str(path), problem, remedy)


class DiskFull(BadJournal):
    """A line could not be written. All lines before it are complete."""


FOREIGN_LINE_ERRORS = (AttributeError, IndexError, KeyError, TypeError, ValueError)
"""The errors raised on a line that is JSON of a known kind, but has other contents than this version writes."""


def foreign_line_error(path: Path | str, error: Exception, call: str) -> BadJournal:
    """The error for such a file, by the command that read it."""
    text = " ".join(str(error).split())
    problem = f"a line does not hold what a journal's does ({type(error).__name__}: {text:.200})"
    return BadJournal(Path(path), problem, "Name what --journal wrote.", call)


@contextlib.contextmanager
def paused_collector() -> Iterator[None]:
    """No garbage collection inside: a journal's lines all stay, and Python would visit them again and again while they are made."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(frozen=True, slots=True)
class JournalLines:
    """`begin` is the first line, `lines` are the others; `whole` is the number of bytes of the file that they take.

    `cut` describes the rest of the file, which is dropped; it is empty if there is none.
    """

    begin: Line
    lines: tuple[Line, ...]
    whole: int
    cut: str = ""


@paused_collector()
def load_journal(path: Path, call: str = WRITES) -> JournalLines:
    """The lines of a journal without an incomplete last line. Raises `BadJournal`, naming the command `call`."""
    try:
        data = read_bytes(path)
    except OSError as error:
        raise BadJournal(path, f"it cannot be read ({error.strerror})", "Name a journal.", call) from error
    found: list[Line] = []
    whole = 0
    rows = data.split(b"\n")
    seen: dict[str, int] = {}
    for number, row in enumerate(rows[:-1], 1):
        line = _parse_line(row)
        if line is None and number == len(rows) - 1 and found:  # bytes of a crash of the machine may end in a newline
            break
        problem = "is no line of a journal" if line is None else _line_problem(line, number, seen)
        if line is None or problem:
            raise BadJournal(path, f"line {number} {problem}", "It was changed by something else: start anew.", call)
        found.append(line)
        whole += len(row) + 1
    if not found or found[0].get("kind") != "begin":
        raise BadJournal(path, "it does not begin as a journal does", "Name a journal, or start anew.", call)
    if found[0].get("format") != FORMAT:
        raise BadJournal(path, f"it has format {found[0].get('format')!r:.40}, not {FORMAT}", "Start anew.", call)
    cut = data[whole:]
    note = f"{path}: its last line was cut after {len(cut)} bytes; that unit is tried again" if cut else ""
    return JournalLines(found[0], tuple(found[1:]), whole, note)


def check_first_line(path: Path, call: str) -> None:
    """Checks the first line of a file, before the work: quickly, and without what the work needs. Raises `BadJournal`.

    A pipe, which can be read once only, is left alone, and so is a file whose first line is very long.
    """
    try:
        whole = path.is_file()
        start = read_bytes(path, LONGEST) if whole or not path.exists() else b""
    except OSError as error:
        raise BadJournal(path, f"it cannot be read ({error.strerror})", "Name a journal.", call) from error
    row, newline, _ = start.partition(b"\n")
    if not whole or (not newline and len(start) == LONGEST):
        return
    line = _parse_line(row)
    if newline and line is None:
        raise BadJournal(path, "line 1 is no line of a journal", "It was changed by something else: start anew.", call)
    if line is None or line["kind"] != "begin":
        raise BadJournal(path, "it does not begin as a journal does", "Name a journal, or start anew.", call)


LONGEST = 1 << 16
"""The number of bytes that are read of a first line."""


def check_is_new(path: Path, *, resume: bool) -> None:
    """Checks that no journal is there unless it is to be resumed. Raises `BadJournal`."""
    try:
        there = path.exists() and path.stat().st_size > 0
    except OSError as error:
        raise BadJournal(path, f"it cannot be opened ({error.strerror})", "Name a file of yours.") from error
    if there and not resume:
        raise BadJournal(path, "it is there already", "Go on with it by --resume, or name another file.")


def _parse_line(row: bytes) -> Line | None:
    try:
        line = read_json(row)
    except BadJson:
        return None
    if not isinstance(line, dict) or not all(
        name in line for name in _REQUIRED_KEYS.get(str(line.get("kind")), ("kind",))
    ):
        return None
    return line if isinstance(line.get("kind"), str) else None


_REQUIRED_KEYS = {
    "begin": ("format",), "unit": ("unit",), "settled": ("rule", "verdict"), "captured": ("crashed", "refused"),
    "causes": ("torch", "shard", "causes"),
}  # fmt: skip
"""The required keys of each kind of line."""


_COUNTS, _CRASH = {str: int}, {"op": str, "sample": str, "error": str, "trace": str}
_CANDIDATES = {str: [{str: object}]}
_SHAPES = {
    "begin": {
        "torch": str, "seed": int, "patterns": [str], "everything": bool, "search": bool, "ranks": [int],
        "meshes": [[int]], "pairs": bool, "dtypes": [str], "device": frozenset({"cpu", "cuda"}), "rules": str,
        "confirm": frozenset({"gloo", "nccl", "none"}), "shard": Either((type(None), (int, int))), "only": [str],
        "case": str, "ops": [str], "trials": [(str, [int])], "ignored": [(str, str)], "rules_text": str,
    },
    "unit": {
        "unit": str, "samples": int, "tried": int, "combinations": int, "sound": [str], "by_metadata": [str],
        "suspects": _CANDIDATES, "whole": _CANDIDATES, "missing": [{str: object}], "untestable": {str: str},
        "crashed": [_CRASH], "skipped": _COUNTS, "left_out": {str: [str]}, "seconds": float,
    },
    "settled": {
        "rule": str, "verdict": str, "crash": (str, str, str, str), "same_as": str, "ranks": int, "reason": str,
        "sample": [str], "origin": str, "confirmed_on": Either((type(None), str)), "got": str, "want": str,
        "picture": str, "script": str, "title": str, "mesh": [int], "elements": int, "command": str,
    },
    "captured": {"crashed": [(str, str, str, str)], "refused": _COUNTS},
    "causes": {
        "torch": str, "shard": Either((type(None), (int, int))),
        "causes": [{
            "id": str, "key": [str], "kind": str, "words": str, "found_on": str, "findings": [str], "ops": [str],
            "families": [str], "function": str, "file": str, "line": int, "detail": str, "why": str,
            "versions": [(str, str)], "severity": str, "rank": [int], "tried": [(str, int)], "call": str, "reason": str,
            "ranks": int, "lines": str, "prints": str, "right": str, "verdict": str, "ran_on": str, "script": str,
        }],
    },
}  # fmt: skip
"""The forms of what each kind of line holds, as far as it is read without tensors."""
MOST_UNITS = 4_000_000
"""Units that a run may have: about a hundred times those of all overloads of torch on a dozen meshes."""


def line_problem(line: Line) -> str:
    """What is wrong with the form of a line, as a part of a sentence; "" for nothing."""
    kind = line.get("kind")
    return misfit(line, _SHAPES.get(kind, {}), "it") if isinstance(kind, str) else "it has no kind"


def _line_problem(line: Line, number: int, seen: dict[str, int]) -> str:
    """What is wrong with a line, also beside the lines before it; `seen` has the line of each unit and outcome."""
    kind = line["kind"]
    if problem := line_problem(line):
        return f"does not hold what a journal's does: {problem}"
    if kind == "begin" and number > 1:
        return "begins another run"
    if kind == "begin" and len(line.get("ops", ())) * len(line.get("trials", ())) > MOST_UNITS:
        return f"plans more than {MOST_UNITS:,} units"
    name = line["unit"] if kind == "unit" else f"{line['rule']}: {line['verdict']}" if kind == "settled" else ""
    if name and seen.setdefault(name, number) != number:
        return f"is of {name!r:.80}, as line {seen[name]} is"
    return ""


def run_difference(begin: Line, mine: Line) -> str:
    """The differences between a journal's run and mine, in words; empty if it is the same run."""
    names = [name for name in mine if name not in ("kind", "ops") and begin.get(name) != mine[name]]
    return "; ".join(f"{name} was {begin.get(name)!r}, now {mine[name]!r}" for name in names)


class Journal:
    """A journal open for appending. Without a path the lines are only kept in memory."""

    def __init__(self, path: Path | None, file: FileIO | None, done: JournalLines | None) -> None:
        self.path, self._file = path, file
        self.begun = done.begin if done else None
        self.cut = done.cut if done else ""
        self.lines: list[Line] = list(done.lines) if done else []
        if file is not None:  # else a worker that outlives this run would hold the file for it
            register_after_fork(file, FileIO.close)

    def begin(self, line: Line) -> None:
        """Writes the first line, or compares it when resuming. Raises `BadJournal` if the journal is of another run."""
        if self.begun is None:
            self.begun = {"kind": "begin", "format": FORMAT, **line}
            self._write(self.begun)
        elif self.path and (problem := run_difference(self.begun, line)):
            raise BadJournal(self.path, f"it is of another run: {problem}", "Ask for the same again, or start anew.")

    def add(self, line: Line) -> None:
        """Appends a line and passes it to the operating system."""
        self._write(line)
        self.lines.append(line)

    def _write(self, line: Line) -> None:
        if self._file is None or self.path is None:
            return
        row = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        before = self._file.tell()
        try:
            left = memoryview(row)
            while left:  # a raw file may take a part of it, and refuse the rest
                left = left[self._file.write(left) :]
        except OSError as error:
            with contextlib.suppress(OSError):  # a reader would drop a partial line anyway
                _truncate(self._file, before)
            problem = f"a line could not be written ({error.strerror}); the {len(self.lines)} before it are whole"
            raise DiskFull(self.path, problem, "Make room, then go on with --resume.") from error

    def close(self) -> None:
        """Releases the journal for another run."""
        if self._file is not None:
            self._file.close()

    def drop(self) -> None:
        """Removes the file if nothing was written: the run was rejected before its first line."""
        if self.path is not None and self.begun is None:
            self.path.unlink(missing_ok=True)
        self.close()  # not before: no other process may have the file until it is gone

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_journal(path: Path | None, *, resume: bool) -> Journal:
    """A new journal, or one to resume. Raises `BadJournal` if it cannot be opened, or is in use by another run."""
    if path is None:
        return Journal(None, None, None)
    check_is_new(path, resume=resume)
    try:
        there = path.exists() and path.stat().st_size > 0
        file = FileIO(path, "r+" if path.exists() else "x+")
    except OSError as error:
        raise BadJournal(path, f"it cannot be opened ({error.strerror})", "Name a file of yours.") from error
    try:
        _lock(path, file)
        done = load_journal(path) if there else None
        _truncate(file, done.whole if done else 0)
    except BaseException as error:  # why: whatever stopped us, the next run must get at the file; the error goes on
        file.close()
        if isinstance(error, OSError):
            raise BadJournal(path, f"it cannot be written ({error.strerror})", "Name a file of yours.") from error
        raise
    return Journal(path, file, done)


def _truncate(file: FileIO, size: int) -> None:
    """Truncates the file after its complete lines, where the next one is written."""
    os.ftruncate(file.fileno(), size)
    file.seek(size)


def _lock(path: Path, file: FileIO) -> None:
    """Locks the file for this run; the operating system releases the lock when the process ends."""
    try:
        import fcntl
    except ImportError:  # no such lock on this system: then it is the user's to see to
        return
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise BadJournal(path, "another run is writing to it", "Wait for that one, or name another file.") from error


def lines_of_kind(lines: Sequence[Line], kind: str) -> Iterator[Line]:
    """The lines of one kind, in order."""
    return (line for line in lines if line["kind"] == kind)
