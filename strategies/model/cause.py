"""A cause of findings as a journal keeps it: data alone, of which pages, reports and merged journals are made.

`strategies.sweep.causes.records` computes it, in one place; a journal has one line of kind `KIND` for each computation.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

KIND = "causes"
"""The kind of a journal's line that holds all causes of its findings, each as `data_of` writes it."""
PUBLIC_CALL = "public call"
"""The kind of a cause whose subject is a public function: no part of DTensor that it calls is wrong by itself."""
SHOWS, RIGHT, FAILED = "shows", "does not show", "cannot be run"
"""What a run of a cause's script came to."""


@dataclass(frozen=True, slots=True)
class CauseRecord:
    """One fault of torch, the findings that it makes, the case that shows it best, and what was tried on it.

    `key` is equal for equal causes of one torch; `file` and `line` are of the function, "" and 0 where it is native code;
    `why` says in words why there is no function.  `rank` orders causes.  `families` are named in the title, in order.
    """

    id: str
    key: tuple[str, ...]
    kind: str
    words: str
    found_on: str
    findings: tuple[str, ...]
    ops: tuple[str, ...] = ()
    families: tuple[str, ...] = ()
    function: str = ""
    file: str = ""
    line: int = 0
    detail: str = ""
    why: str = ""
    versions: tuple[tuple[str, str], ...] = ()
    """What the script of this cause showed on other versions of torch, oldest first, where that is known."""
    severity: str = "no case"
    rank: tuple[int, ...] = ()
    tried: tuple[tuple[str, int], ...] = ()
    """What was replaced, and how many of the findings are right then."""
    call: str = ""
    reason: str = ""
    ranks: int = 0
    lines: str = ""
    """Plain torch that shows it."""
    prints: str = ""
    right: str = ""
    verdict: str = ""
    """What the script came to, `SHOWS`, `RIGHT` or `FAILED`; "" where no script could be written."""
    ran_on: str = ""
    """The version of torch that ran the script."""
    script: str = ""

    @property
    def what(self) -> str:
        """What is wrong: `shards with wrong values, for cumprod, cumsum and 2 more`."""
        some = ", ".join(self.families[:3]) + (f" and {len(self.families) - 3} more" if len(self.families) > 3 else "")
        return f"{self.words}, for {some}" if some else self.words

    @property
    def name(self) -> str:
        return f"{self.subject}: {self.what}"

    @property
    def subject(self) -> str:
        """The function that is wrong, or the public one that a program calls."""
        found = self.key[1].partition(",")[0] if self.kind == PUBLIC_CALL else self.function
        return found or "not attributed"

    @property
    def script_name(self) -> str:
        return f"{self.id}.py"

    @property
    def reproduces(self) -> bool:
        return self.verdict == SHOWS

    @property
    def cured(self) -> int:
        """How many of the findings some replacement makes right."""
        return sum(count for _, count in self.tried)

    @property
    def where(self) -> str:
        """`torch/distributed/tensor/_ops/_math_ops.py:452`, or the kind of the cause where it has no file."""
        return f"{self.file}:{self.line}" if self.file else "native code" if self.function else self.kind

    @property
    def order(self) -> tuple[object, ...]:
        """Causes in this order: those with the widest reach; of equal ones those that affect most ops."""
        return not self.function, not self.rank, self.rank, -len(self.ops), self.name

    @property
    def tried_text(self) -> str:
        """Sentences on what was replaced, and how many findings were right then."""
        if not self.tried:
            return "No replacement of one part of DTensor makes a finding right."
        return " ".join(f"With {what}, {_of(count, len(self.findings))} right." for what, count in self.tried)

    @property
    def terms(self) -> tuple[str, ...]:
        """What the names are that its case and its lines use and its script defines."""
        return definitions(self.script, self.call, re.sub(r"^def .*", "", self.lines, flags=re.MULTILINE))

    @property
    def run_text(self) -> str:
        """A sentence on a script that does not show the fault, with the torch that ran it; "" where it does."""
        if self.verdict in ("", SHOWS):
            return ""
        what = "its script shows nothing wrong" if self.verdict == RIGHT else "its script cannot be run"
        if self.ran_on == self.found_on:
            return f"On torch {self.ran_on} {what}: those of its findings show it."
        return f"Found on torch {self.found_on}, this no longer reproduces: {what} on torch {self.ran_on}."

    @property
    def versions_text(self) -> str:
        """The versions of torch that have the fault: `torch 2.12.1 and 2.13.0; not 2.14.1 (fixed)`."""
        known = dict(self.versions)
        known.setdefault(self.found_on, "present")
        if self.verdict and self.ran_on not in known:
            known[self.ran_on] = "present" if self.reproduces else "fixed" if self.verdict == RIGHT else "error"
        ordered = sorted(known, key=_version_key)
        have = [version for version in ordered if known[version].startswith("present")]
        others = [f"{version} ({known[version]})" for version in ordered if version not in have]
        return f"torch {_listed(have)}" + (f"; not {_listed(others)}" if others else "")


def definitions(script: str, *texts: str) -> tuple[str, ...]:
    """What the functions and classes are that these texts use and the script defines: its names, each with the first line of its docstring.

    >>> script = "class Tied(Module):" + chr(10) + "    'Two layers that share one weight.'"
    >>> definitions(script, "parallelize_module(Tied(n), mesh)"), definitions(script, "nn.Tied(n)")
    (('Tied: Two layers that share one weight.',), ())
    """
    try:
        nodes = [node for node in ast.parse(script).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # a journal may hold any text
        return ()
    used = [node for node in nodes if any(re.search(rf"(?<![\w.]){node.name}\(", text) for text in texts)]
    return tuple(f"{node.name}: {words.splitlines()[0]}" for node in used if (words := ast.get_docstring(node)))


def _of(count: int, every: int) -> str:
    if count == every:
        return "its one finding is" if every == 1 else f"all {every} findings are"
    return f"{count} of {every} findings {'is' if count == 1 else 'are'}"


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _version_key(version: str) -> list[int]:
    return [int(part) for part in version.partition("+")[0].split(".") if part.isdecimal()]


def data_of(record: CauseRecord) -> dict[str, Any]:
    """The cause for a journal; fields that are empty are left out."""
    return {name: value for name, value in asdict(record).items() if value not in ("", (), 0)}


def read_cause(data: Mapping[str, Any]) -> CauseRecord:
    """The cause that `data_of` wrote.  Raises `TypeError` for what it did not write, ValueError for an id that is a path."""
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*", str(data.get("id"))):  # a script is called after it
        raise ValueError(f"{data.get('id')!r:.60} is no id of a cause")
    return CauseRecord(**{name: _frozen(value) for name, value in data.items()})


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else value


def json_data(cause: CauseRecord) -> dict[str, Any]:
    """A cause as `causes --json`, `validate --json` and `merge --json` write it; its schema is in strategies/schema/report.json."""
    return {
        "id": cause.id,
        "name": cause.name,
        "kind": cause.kind,
        "function": cause.function or None,
        "file": cause.file or None,
        "line": cause.line or None,
        "detail": cause.detail or None,
        "why": cause.why or None,
        "severity": cause.severity,
        "versions": {cause.found_on: "present"} | dict(cause.versions),
        "ops": list(cause.ops),
        "findings": list(cause.findings),
        "tried": cause.tried_text,
        "cured": cause.cured,
        "call": cause.call or None,
        "reason": cause.reason or None,
        "ranks": cause.ranks or None,
        "lines": cause.lines or None,
        "prints": cause.prints or None,
        "right": cause.right or None,
        "reproduces": cause.reproduces,
        "run": cause.run_text or None,
        "script": cause.script_name if cause.script else None,
    }


def causes_line(records: Iterable[CauseRecord], torch: str, shard: object) -> dict[str, Any]:
    """The line of a journal.  `torch` is the version that computed them, `shard` that of the journal."""
    return {"kind": KIND, "torch": torch, "shard": shard, "causes": [data_of(record) for record in records]}


def read_causes(lines: Iterable[Mapping[str, Any]]) -> tuple[CauseRecord, ...]:
    """The causes of a journal's lines, in their order.

    Of several computations the last counts; in a merged journal the last of each shard, and equal causes are one.
    """
    last = {str(line["shard"]): line for line in lines if line["kind"] == KIND}
    whole = [last["None"]] if "None" in last else last.values()
    found: dict[tuple[str, ...], CauseRecord] = {}
    for record in (read_cause(data) for line in whole for data in line["causes"]):
        found[record.key] = _joined(found[record.key], record) if record.key in found else record
    return tuple(sorted(found.values(), key=lambda record: record.order))


def _joined(one: CauseRecord, other: CauseRecord) -> CauseRecord:
    """One cause of the findings of both; its case is that of the one with the wider reach."""
    first, second = sorted((one, other), key=lambda record: record.order)
    counts = dict(first.tried)
    for what, count in second.tried:
        counts[what] = counts.get(what, 0) + count
    return replace(
        first,
        families=tuple(dict.fromkeys((*first.families, *second.families))),
        ops=tuple(sorted({*one.ops, *other.ops})),
        findings=tuple(sorted({*one.findings, *other.findings})),
        tried=tuple(sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))),
    )


def of_findings(records: Iterable[CauseRecord], names: Iterable[str]) -> tuple[CauseRecord, ...]:
    """The causes of these findings, without findings that are not among them."""
    there = set(names)
    kept = (replace(r, findings=tuple(f for f in r.findings if f in there)) for r in records)
    return tuple(record for record in kept if record.findings)
