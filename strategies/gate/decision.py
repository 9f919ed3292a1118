"""What the gate decides: which findings of a run nobody has accepted, and which accepted ones are no more.

Pure: a report, a baseline, what was tried and a day come in, a value goes out.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from strategies.base.worker_pool import LATE
from strategies.gate.baseline import ANY, Baseline, Entry, GateResult, Key, ReviewedFinding, SourceLine
from strategies.model.rule import Rule
from strategies.model.verdict import ALONE, MESHES, PAIRS, Crash, Finding, Report, Verdict, mesh_kind

IGNORED, CRASHED, HANGS = "ignored", "crashed", "hangs"
"""Rules of keys that are no rules: a registration that torch never asks, and two ways to get no answer."""
Slot = tuple[str, str, str, str]
"""An overload, a class of dtypes, a kind of mesh and a kind of trial."""
Places = Callable[[str], SourceLine | None]
"""Where the rule of an overload is written."""


def nowhere(op: str) -> SourceLine | None:
    """No place is known."""
    return None


@dataclass(frozen=True, slots=True)
class Coverage:
    """What a run has tried.  What it tried to the end and does not show is not there.

    `any` are overloads of which something was tried; `ops` those of which nothing was left out, and a rule was tried.
    """

    any: frozenset[str] = frozenset()
    ops: frozenset[str] = frozenset()
    slots: frozenset[Slot] = frozenset()

    def covers(self, key: Key) -> bool:
        """Whether this run would have shown it."""
        if key.op not in self.ops or ANY in (key.dtypes, key.mesh):
            return key.op in self.ops
        alone = ALONE if "->" in key.rule else PAIRS
        return (key.op, key.dtypes, key.mesh, alone if key.mesh == mesh_kind((1,)) else MESHES) in self.slots


def rule_name(finding: Finding) -> str:
    """The finding's name without its overload, and without the sizes of its mesh, which a key names by their kind.

    `aten.add.Tensor on (2, 2): (S(0), R), R` is `(S(0), R), R`.
    """
    return re.sub(r"^( on \([\d, ]+\))?: ", "", finding.name.removeprefix(finding.rule.op))


def keys_of(finding: Finding) -> tuple[Key, ...]:
    """A key for each class of dtypes and kind of mesh on which it was suspected."""
    kinds = sorted(set(finding.kinds)) or [(ANY, ANY)]
    return tuple(Key(finding.rule.op, rule_name(finding), dtypes, mesh) for dtypes, mesh in kinds)


def crash_key(crash: Crash) -> Key:
    """Crashes of an overload are one key, and its time-outs another: where and why differs from run to run."""
    return Key(crash.op, HANGS if crash.error.startswith(LATE) else CRASHED, ANY, ANY)


def ignored_finding(op: str) -> Finding:
    """A registration that torch never asks, as a finding: on one rank, where nothing can be sharded wrongly."""
    reason = "torch asks this op's single-dim strategy first, so that the registration is never used"
    return Finding(Rule(op, (), ()), 1, Verdict.UNSOUND, reason, (), "its registration", title=f"{op}: {IGNORED}")


def judge(
    report: Report, baseline: Baseline, tried: Coverage, today: dt.date, *, places: Places = nowhere
) -> GateResult:
    """The result of a run, less what only its caller knows: choices, untried overloads, seconds."""
    wrong = [ignored_finding(op) for op in report.ignored]
    wrong += [f for f in report.findings if f.verdict is Verdict.UNSOUND]
    entries = {entry.key: entry for entry in baseline.entries}
    lasting = {key: entry for key, entry in entries.items() if not _over(entry, today)}
    judged = tuple(_judged(finding, lasting, places) for finding in wrong)
    crashes = {crash_key(crash) for crash in report.crashed}
    suspected = {key for f in report.findings if f.verdict is Verdict.SUSPECT for key in keys_of(f)}
    shown = {key for one in judged for key in one.keys} | crashes
    absent = [e for key, e in entries.items() if key not in shown | suspected and tried.covers(key)]
    luck = tuple(e for e in absent if e.key.rule in (CRASHED, HANGS))
    left = replace(report, crashed=tuple(c for c in report.crashed if crash_key(c) not in lasting))
    return GateResult(
        left, judged, gone=tuple(e for e in absent if e not in luck),
        expired=tuple(e for e in baseline.entries if e.key in shown and e.key not in lasting),
        trouble=(*_nothing(report), *_crashes(left)), unseen=luck,
        notes=(*_notes(report, baseline), *(f"{key}: accepted: {lasting[key].reason}" for key in sorted(crashes & set(lasting)))),
        judged=tuple(sorted(tried.any)),
    )  # fmt: skip


def _over(entry: Entry, today: dt.date) -> bool:
    """Its last day is past; on that day itself it still counts."""
    return entry.expires is not None and entry.expires < today


def _judged(finding: Finding, lasting: Mapping[Key, Entry], places: Places) -> ReviewedFinding:
    keys = keys_of(finding)
    new = tuple(key for key in keys if key not in lasting)
    return ReviewedFinding(
        finding, keys, new, places(finding.rule.op), tuple(lasting[key] for key in keys if key in lasting)
    )


def _nothing(report: Report) -> list[str]:
    if report.counts.instances:
        return []
    return ["nothing was tested: no rule was tried on any sample, and that is not a pass"]


def _crashes(report: Report) -> list[str]:
    by_key: dict[Key, list[Crash]] = {}
    for crash in report.crashed:
        by_key.setdefault(crash_key(crash), []).append(crash)
    told = []
    for key, crashes in sorted(by_key.items()):
        more = f" (and {len(crashes) - 1} more like it)" if len(crashes) > 1 else ""
        told.append(f"{key.op} {key.rule}: {crashes[0].sample}: {crashes[0].error}{more}")
    return told


def _notes(report: Report, baseline: Baseline) -> list[str]:
    if baseline.text is None:
        return [f"{baseline.path} is not there: nothing is accepted yet"]
    if baseline.torch != report.torch:
        return [f"{baseline.path} was written under torch {baseline.torch}, this is torch {report.torch}"]
    return []


def new_keys(result: GateResult) -> tuple[Key, ...]:
    """All that fails the gate, or puts it in trouble, and that an entry would accept."""
    new = {key for judged in result.new for key in judged.new}
    return tuple(sorted(new | {crash_key(crash) for crash in result.report.crashed}))


def amended(
    baseline: Baseline, result: GateResult, *, remove: bool, reason: str = "", expires: dt.date | None = None
) -> Baseline:
    """The baseline less what is gone, if `remove`; and with what is new, if there is a reason."""
    gone = {entry.key for entry in (*result.gone, *result.unseen)} if remove else set()
    less = baseline.without(gone)
    if not reason:
        return less
    expired = {entry.key for entry in result.expired}
    known = {entry.key for entry in less.entries} - expired
    return less.also([Entry(key, reason, expires) for key in new_keys(result) if key not in known])
