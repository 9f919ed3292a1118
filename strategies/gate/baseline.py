"""The findings that a repository has accepted, as a file beside its code: `localtensor-baseline.json`.

Sorted and indented, so that a diff of two versions is what was accepted and what was mended.  Its schema is
strategies/schema/baseline.json.
"""

from __future__ import annotations

import datetime as dt
import json
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from localtensor.errors import Refusal
from strategies.base.atomic_files import read_bytes, write_whole
from strategies.model.verdict import CLASSES, Finding, Report

# What the gate speaks of: keys that outlive edits, entries of a baseline, and what one run of the gate came to.


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """A wrong rule by what it means, never by a line of a file.

    `op` is an overload, `rule` the name of the finding without it, `dtypes` a class of dtypes (units.CLASSES), `mesh`
    a kind of mesh.

    >>> str(Key("aten.cumprod.default", "S(0) -> S(0)", "real", "1 axis"))
    'aten.cumprod.default: S(0) -> S(0) (real, 1 axis)'
    """

    op: str
    rule: str
    dtypes: str
    mesh: str

    def __str__(self) -> str:
        return f"{self.op}: {self.rule} ({self.dtypes}, {self.mesh})"


@dataclass(frozen=True, slots=True)
class Entry:
    """A finding that somebody has accepted, why, and until when; `expires` None is for good."""

    key: Key
    reason: str
    expires: dt.date | None = None


@dataclass(frozen=True, slots=True)
class SourceLine:
    """Where a rule is written: `file` as a path within the repository, with slashes."""

    file: str
    line: int


@dataclass(frozen=True, slots=True)
class ReviewedFinding:
    """A confirmed finding beside the baseline: `new` are those of its keys that nobody has accepted, or whose
    acceptance has expired.  `accepted` are the entries of the baseline for the others."""

    finding: Finding
    keys: tuple[Key, ...]
    new: tuple[Key, ...]
    place: SourceLine | None = None
    accepted: tuple[Entry, ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """An overload that is judged, and why: `its rule function sharding_of_scale changed`."""

    op: str
    reason: str


@dataclass(frozen=True, slots=True)
class GateResult:
    """What one run of the gate came to.

    `findings` are all confirmed ones; `gone` are entries of the baseline that were tried and no longer show;
    `expired` those that still show and are past their date; `untried` overloads that there was no time for, with the
    reason; `choices` what `--changed` chose (empty without it); `trouble` what leads to exit code 3, in words;
    `judged` all overloads that were tried, those without a finding included; `unseen` entries of crashes that did not
    come back, which is luck as often as a mend and fails nothing; `remembered` overloads whose verdict is that of an
    equal run before; `notes` what is good to know and fails nothing.
    """

    report: Report
    findings: tuple[ReviewedFinding, ...] = ()
    gone: tuple[Entry, ...] = ()
    expired: tuple[Entry, ...] = ()
    untried: tuple[tuple[str, str], ...] = ()
    choices: tuple[Choice, ...] = ()
    trouble: tuple[str, ...] = ()
    seconds: float = 0.0
    unseen: tuple[Entry, ...] = ()
    remembered: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    judged: tuple[str, ...] = ()

    @property
    def new(self) -> tuple[ReviewedFinding, ...]:
        """The findings that fail the gate."""
        return tuple(judged for judged in self.findings if judged.new)

    @property
    def exit_code(self) -> int:
        """0 clean, 1 something new or gone, 3 nothing tested or in trouble.  What is wrong outranks trouble."""
        if self.new or self.gone:
            return 1
        return 3 if self.trouble else 0


FORMAT = 1
ANY = "any"
"""The class of dtypes, or the kind of mesh, of what does not depend on it."""
_MESH = re.compile(r"any|1 axis|[1-9][0-9]* axes")
_NAMES = ("op", "rule", "dtypes", "mesh", "reason")


class BadBaseline(Refusal, call="localtensor gate", argument="--baseline"):
    """A baseline that cannot be used: the file, which entry, what is the matter with it."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """What a file holds: entries by their keys.  `torch` is the version that it was last written under.

    `text` is what stands in the file, None where there is no file: then nothing is accepted.
    """

    path: Path
    torch: str = ""
    entries: tuple[Entry, ...] = ()
    text: str | None = None

    def without(self, gone: Collection[Key]) -> Baseline:
        """The same less the entries of these keys."""
        return replace(self, entries=tuple(e for e in self.entries if e.key not in gone))

    def also(self, more: Sequence[Entry]) -> Baseline:
        """The same with these entries, in the place of those of the same keys."""
        kept = self.without({entry.key for entry in more}).entries
        return replace(self, entries=tuple(sorted((*kept, *more), key=lambda e: e.key)))


def read(path: Path) -> Baseline:
    """The baseline in that file; an empty one if there is none.  Raises `BadBaseline`."""
    try:
        text = read_bytes(path).decode().replace("\r\n", "\n")
    except FileNotFoundError:
        return Baseline(path)
    except UnicodeDecodeError:
        raise BadBaseline(path, "it is no text in UTF-8", "Name a baseline, or remove the file.") from None
    except OSError as error:
        raise BadBaseline(path, f"it cannot be read ({error.strerror})", "Name a file of yours.") from error
    told = _parsed(path, text)
    if not isinstance(told, dict) or not isinstance(told.get("entries"), list) or "format" not in told:
        raise BadBaseline(path, "it is no baseline of localtensor", "Name another file by --baseline.")
    if type(told["format"]) is not int or told["format"] != FORMAT:
        remedy = "Use the version of localtensor that wrote it."
        raise BadBaseline(path, f"it has format {told['format']!r:.40}, not {FORMAT}", remedy)
    torch = told.get("torch")
    if not isinstance(torch, str) or (more := set(told) - {"format", "torch", "entries"}):
        problem = (
            "it does not name its torch" if not isinstance(torch, str) else f"{min(more)!r:.60} means nothing here"
        )
        raise BadBaseline(path, problem, "Write it by `localtensor gate --accept`.")
    entries = tuple(_entry(path, number, one) for number, one in enumerate(told["entries"], 1))
    _check_once(path, entries)
    return Baseline(path, torch, tuple(sorted(entries, key=lambda e: e.key)), text)


def _parsed(path: Path, text: str) -> Any:
    if re.search(r"^(<{7}|>{7}) ", text, re.MULTILINE):
        raise BadBaseline(path, "a merge has left its marks in it", "Resolve them, keeping the entries of both sides.")
    try:
        return json.loads(text, object_pairs_hook=_once)
    except _Twice as error:
        raise BadBaseline(path, f"an object in it has {error} twice", "Keep one of the two.") from None
    except json.JSONDecodeError as error:
        raise BadBaseline(path, f"line {error.lineno} is no JSON ({error.msg})", "Mend that line.") from None
    except (RecursionError, ValueError):  # too deep, or a number of thousands of digits
        raise BadBaseline(path, "it is no baseline of localtensor", "Name another file by --baseline.") from None


class _Twice(Exception):
    pass


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise _Twice(repr(next(name for name in names if names.count(name) > 1)))
    return made


def _entry(path: Path, number: int, told: Any) -> Entry:
    """The entry, or a refusal that names it by its number and, as far as it can be read, by its key."""

    def bad(problem: str, remedy: str) -> BadBaseline:
        named = [str(told.get(name, "?")) for name in ("op", "rule")] if isinstance(told, dict) else []
        shown = f" ({': '.join(named):.90})" if named else ""
        return BadBaseline(path, f"entry {number}{shown} {problem}", remedy)

    if not isinstance(told, dict):
        raise bad("is no object", "Write op, rule, dtypes, mesh and reason.")
    for name in _NAMES:
        if not isinstance(told.get(name), str) or not told[name].strip():
            raise bad(f"has no {name}", f"Say its {name}.")
        if not is_text(told[name]):
            raise bad(f"has half a character in its {name}", "Write it anew.")
    if more := set(told) - {*_NAMES, "expires"}:
        raise bad(f"has {min(more)!r:.60}, which means nothing here", f"Write {', '.join(_NAMES)} or expires.")
    if told["dtypes"] not in (*CLASSES, ANY):
        raise bad(f"has dtypes {told['dtypes']!r:.40}", f"Choose of {', '.join((*CLASSES, ANY))}.")
    if not _MESH.fullmatch(told["mesh"]):
        raise bad(f"has mesh {told['mesh']!r:.40}", "Write '1 axis', '2 axes' and so on, or 'any'.")
    expires = None
    if "expires" in told:
        expires = date(told["expires"]) if isinstance(told["expires"], str) else None
        if expires is None:
            raise bad(f"expires on {told['expires']!r:.40}, which is no date", "Write YYYY-MM-DD.")
    return Entry(Key(told["op"], told["rule"], told["dtypes"], told["mesh"]), told["reason"], expires)


def is_text(text: str) -> bool:
    """Whether it is Unicode: JSON can spell a half of a pair of surrogates, which is none."""
    return not re.search("[\ud800-\udfff]", text)


def date(text: str) -> dt.date | None:
    """The day that `YYYY-MM-DD` names, None if it names none.

    >>> date("2026-02-28"), date("2026-02-30"), date("20260228")
    (datetime.date(2026, 2, 28), None, None)
    """
    if not re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", text):
        return None
    try:
        return dt.date.fromisoformat(text)
    except ValueError:
        return None


def _check_once(path: Path, entries: Iterable[Entry]) -> None:
    seen: dict[Key, int] = {}
    for number, entry in enumerate(entries, 1):
        if entry.key in seen:
            raise BadBaseline(path, f"entries {seen[entry.key]} and {number} are both of {entry.key}", "Keep one.")
        seen[entry.key] = number


def as_text(baseline: Baseline, torch: str) -> str:
    """The file's text: what `read` reads, with a newline at the end."""
    entries = [
        {
            "op": e.key.op, "rule": e.key.rule, "dtypes": e.key.dtypes, "mesh": e.key.mesh, "reason": e.reason,
            **({"expires": e.expires.isoformat()} if e.expires else {}),
        }
        for e in sorted(baseline.entries, key=lambda e: e.key)
    ]  # fmt: skip
    return json.dumps({"format": FORMAT, "torch": torch, "entries": entries}, indent=2, ensure_ascii=False) + "\n"


def write(baseline: Baseline, torch: str) -> Baseline:
    """What is now in the file, which is written whole or not at all; behind a link, the file that it leads to.

    Raises `BadBaseline` if the file is no longer what was read, or cannot be written.
    """
    if read(baseline.path).text != baseline.text:
        raise BadBaseline(baseline.path, "it changed while the gate ran", "Run the gate again.")
    text = as_text(baseline, torch)
    try:
        write_whole(baseline.path.resolve(), text)
    except OSError as error:
        raise BadBaseline(baseline.path, f"it cannot be written ({error.strerror})", "Name a file of yours.") from error
    return replace(baseline, torch=torch, text=text)
