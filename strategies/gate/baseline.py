"""The baseline: the findings that a repository has accepted, in `localtensor-baseline.json` beside its code.

The file is sorted and indented, so that a diff of two versions shows what was accepted and what was fixed.  Its schema
is strategies/schema/baseline.json.
"""

from __future__ import annotations

import datetime as dt
import json
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from localtensor.errors import Refusal
from strategies.base.atomic_files import read_bytes, write_whole
from strategies.base.foreign_text import BadJson, is_text, parse_date, read_json
from strategies.model.rule import DTYPE_CLASSES
from strategies.model.verdict import Finding, Report


@dataclass(frozen=True, slots=True, order=True)
class FindingKey:
    """The identity of a wrong rule, independent of source lines.

    `op` is an overload, `rule` the name of the finding without it, `dtypes` a class of dtypes (`verdict.CLASSES`),
    `mesh` a kind of mesh.

    >>> str(FindingKey("aten.cumprod.default", "S(0) -> S(0)", "real", "1 axis"))
    'aten.cumprod.default: S(0) -> S(0) (real, 1 axis)'
    """

    op: str
    rule: str
    dtypes: str
    mesh: str

    def __str__(self) -> str:
        return f"{self.op}: {self.rule} ({self.dtypes}, {self.mesh})"


@dataclass(frozen=True, slots=True)
class BaselineEntry:
    """An accepted finding, the reason, and the last day; `expires` None is for good."""

    key: FindingKey
    reason: str
    expires: dt.date | None = None


@dataclass(frozen=True, slots=True)
class SourceLine:
    """Where a rule is written: `file` as a path within the repository, with slashes."""

    file: str
    line: int


@dataclass(frozen=True, slots=True)
class ReviewedFinding:
    """A confirmed finding compared with the baseline.

    `new` are those of its keys that are not accepted, or whose acceptance has expired; `accepted` are the baseline's
    entries for the others.  `function` names the registered rule function, with its file and line: findings of one
    function are one cause, however many of its forms are wrong.
    """

    finding: Finding
    keys: tuple[FindingKey, ...]
    new: tuple[FindingKey, ...]
    place: SourceLine | None = None
    accepted: tuple[BaselineEntry, ...] = ()
    function: str = ""

    @property
    def cause(self) -> str:
        """The rule function, or its line, or the overload where neither is known."""
        place = f"{self.place.file}:{self.place.line}" if self.place else ""
        return self.function or place or self.finding.rule.op


@dataclass(frozen=True, slots=True)
class WrongFunction:
    """One cause: a rule function, and its findings in the order of the report."""

    cause: str
    findings: tuple[ReviewedFinding, ...]

    @property
    def keys(self) -> tuple[FindingKey, ...]:
        """Those that fail the gate; of a function whose findings are all accepted those that are accepted."""
        new = [key for one in self.findings for key in one.new]
        return tuple(sorted(new or (entry.key for one in self.findings for entry in one.accepted)))


def by_cause(findings: Iterable[ReviewedFinding]) -> tuple[WrongFunction, ...]:
    """The findings grouped by their cause, in the order of the first of each."""
    groups: dict[str, list[ReviewedFinding]] = {}
    for one in findings:
        groups.setdefault(one.cause, []).append(one)
    return tuple(WrongFunction(cause, tuple(found)) for cause, found in groups.items())


@dataclass(frozen=True, slots=True)
class ChosenOverload:
    """An overload that `--changed` selects, and why: `its rule function sharding_of_scale changed`."""

    op: str
    reason: str


@dataclass(frozen=True, slots=True)
class GateResult:
    """The result of one run of the gate.

    `findings` are all confirmed ones; `gone` are entries of the baseline that were tested and no longer reproduce;
    `expired` those that still reproduce and are past their date; `untried` overloads without a test, with the reason;
    `choices` the overloads that `--changed` selected (empty without it); `trouble` the reasons for exit code 3;
    `judged` all tested overloads, those without a finding included; `unseen` entries of crashes that did not come
    back, which may be chance and fails nothing; `remembered` overloads whose verdict is from the cache; `notes` remarks
    that fail nothing.
    """

    report: Report
    findings: tuple[ReviewedFinding, ...] = ()
    gone: tuple[BaselineEntry, ...] = ()
    expired: tuple[BaselineEntry, ...] = ()
    untried: tuple[tuple[str, str], ...] = ()
    choices: tuple[ChosenOverload, ...] = ()
    trouble: tuple[str, ...] = ()
    seconds: float = 0.0
    unseen: tuple[BaselineEntry, ...] = ()
    remembered: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    judged: tuple[str, ...] = ()

    @property
    def new(self) -> tuple[ReviewedFinding, ...]:
        """The findings that fail the gate."""
        return tuple(finding for finding in self.findings if finding.new)

    @property
    def new_causes(self) -> tuple[WrongFunction, ...]:
        """The rule functions that fail the gate, each with its new findings."""
        return by_cause(self.new)

    @property
    def accepted_causes(self) -> tuple[WrongFunction, ...]:
        """The rule functions of which only accepted forms are wrong."""
        new = {one.cause for one in self.new_causes}
        return tuple(one for one in by_cause(f for f in self.findings if f.accepted) if one.cause not in new)

    @property
    def exit_code(self) -> int:
        """0 clean, 1 something new or gone, 3 nothing tested or in trouble.  1 outranks 3."""
        if self.new or self.gone:
            return 1
        return 3 if self.trouble else 0


FORMAT = 1
ANY = "any"
"""The class of dtypes, or the kind of mesh, of a key that does not depend on it."""
_MESH = re.compile(r"any|1 axis|[1-9][0-9]* axes")
_NAMES = ("op", "rule", "dtypes", "mesh", "reason")


class BadBaseline(Refusal, call="localtensor gate", argument="--baseline"):
    """A baseline that cannot be used: the file, the entry, and the problem."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """The content of a baseline file.

    `torch` is the version that it was last written under.  `text` is the text of the file, None where there is no file:
    then nothing is accepted.
    """

    path: Path
    torch: str = ""
    entries: tuple[BaselineEntry, ...] = ()
    text: str | None = None

    def without(self, gone: Collection[FindingKey]) -> Baseline:
        """The same without the entries of these keys."""
        return replace(self, entries=tuple(e for e in self.entries if e.key not in gone))

    def also(self, more: Sequence[BaselineEntry]) -> Baseline:
        """The same with these entries, which replace those of the same keys."""
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
    body = _parsed(path, text)
    if not isinstance(body, dict) or not isinstance(body.get("entries"), list) or "format" not in body:
        raise BadBaseline(path, "it is no baseline of localtensor", "Name another file by --baseline.")
    if type(body["format"]) is not int or body["format"] != FORMAT:
        remedy = "Use the version of localtensor that wrote it."
        raise BadBaseline(path, f"it has format {body['format']!r:.40}, not {FORMAT}", remedy)
    torch, remedy = body.get("torch"), "Write it by `localtensor gate --accept`."
    if not isinstance(torch, str):
        raise BadBaseline(path, "it does not name its torch", remedy)
    if more := set(body) - {"format", "torch", "entries"}:
        raise BadBaseline(path, f"{min(more)!r:.60} means nothing here", remedy)
    entries = tuple(_entry(path, number, item) for number, item in enumerate(body["entries"], 1))
    seen: dict[FindingKey, int] = {}
    for number, entry in enumerate(entries, 1):
        if entry.key in seen:
            raise BadBaseline(path, f"entries {seen[entry.key]} and {number} are both of {entry.key}", "Keep one.")
        seen[entry.key] = number
    return Baseline(path, torch, tuple(sorted(entries, key=lambda e: e.key)), text)


def _parsed(path: Path, text: str) -> object:
    if re.search(r"^(<{7}|>{7}) ", text, re.MULTILINE):
        raise BadBaseline(path, "a merge has left its marks in it", "Resolve them, keeping the entries of both sides.")

    try:
        return read_json(text)
    except BadJson as error:
        raise BadBaseline(path, str(error), "Correct it, or name another file by --baseline.") from None


def _entry(path: Path, number: int, body: object) -> BaselineEntry:
    """The entry.  Raises `BadBaseline`, which names it by its number and, as far as it can be read, by its key."""

    def bad(problem: str, remedy: str) -> BadBaseline:
        named = [str(body.get(name, "?")) for name in ("op", "rule")] if isinstance(body, dict) else []
        shown = f" ({': '.join(named):.90})" if named else ""
        return BadBaseline(path, f"entry {number}{shown} {problem}", remedy)

    if not isinstance(body, dict):
        raise bad("is no object", "Write op, rule, dtypes, mesh and reason.")
    for name in _NAMES:
        if not isinstance(body.get(name), str) or not body[name].strip():
            raise bad(f"has no {name}", f"Say its {name}.")
        if not is_text(body[name]):
            raise bad(f"has half a character in its {name}", "Write it anew.")
    if more := set(body) - {*_NAMES, "expires"}:
        raise bad(f"has {min(more)!r:.60}, which means nothing here", f"Write {', '.join(_NAMES)} or expires.")
    if body["dtypes"] not in (*DTYPE_CLASSES, ANY):
        raise bad(f"has dtypes {body['dtypes']!r:.40}", f"Choose of {', '.join((*DTYPE_CLASSES, ANY))}.")
    if not _MESH.fullmatch(body["mesh"]):
        raise bad(f"has mesh {body['mesh']!r:.40}", "Write '1 axis', '2 axes' and so on, or 'any'.")
    expires = None
    if "expires" in body:
        expires = parse_date(body["expires"]) if isinstance(body["expires"], str) else None
        if expires is None:
            raise bad(f"expires on {body['expires']!r:.40}, which is no date", "Write YYYY-MM-DD.")
    return BaselineEntry(FindingKey(body["op"], body["rule"], body["dtypes"], body["mesh"]), body["reason"], expires)


def as_text(baseline: Baseline, torch: str) -> str:
    """The text of the file, which `read` reads."""
    entries = [
        asdict(e.key) | {"reason": e.reason} | ({"expires": e.expires.isoformat()} if e.expires else {})
        for e in sorted(baseline.entries, key=lambda e: e.key)
    ]
    return json.dumps({"format": FORMAT, "torch": torch, "entries": entries}, indent=2, ensure_ascii=False) + "\n"


def write(baseline: Baseline, torch: str) -> Baseline:
    """Write the file, whole or not at all; of a link, the file that it leads to.  Returns the baseline as written.

    Raises `BadBaseline` if the file has changed since it was read, or cannot be written.
    """
    if read(baseline.path).text != baseline.text:
        raise BadBaseline(baseline.path, "it changed while the gate ran", "Run the gate again.")
    text = as_text(baseline, torch)
    try:
        write_whole(baseline.path.resolve(), text)
    except OSError as error:
        raise BadBaseline(baseline.path, f"it cannot be written ({error.strerror})", "Name a file of yours.") from error
    return replace(baseline, torch=torch, text=text)
