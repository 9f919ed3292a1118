"""The gate's decision: which findings of a run are new, and which accepted ones no longer reproduce.

A pure function of a report, a baseline, the coverage of the run, and the day.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from strategies.base.worker_pool import TIMED_OUT
from strategies.gate.baseline import ANY, Baseline, BaselineEntry, FindingKey, GateResult, ReviewedFinding, SourceLine
from strategies.model.rule import Rule
from strategies.model.verdict import ALONE, FAULTS, MESHES, PAIRS, Crash, Finding, Report, Verdict, mesh_kind

IGNORED, CRASHED, HANGS = "ignored", "crashed", "hangs"
"""Values of `Key.rule` that are no rules: a registration that torch never calls, a crash, and a time-out."""


@dataclass(frozen=True, slots=True)
class RunCoverage:
    """What a run has tested.  A finding that is tested completely and does not show no longer reproduces.

    `any` are overloads of which something was tested; `ops` those of which nothing was left out, and a rule was tested.
    """

    any: frozenset[str] = frozenset()
    ops: frozenset[str] = frozenset()
    slots: frozenset[tuple[str, str, str, str]] = frozenset()
    """Each an overload, a class of dtypes, a kind of mesh and a kind of test."""

    def covers(self, key: FindingKey) -> bool:
        """Whether this run would have shown a finding of that key."""
        if key.op not in self.ops or ANY in (key.dtypes, key.mesh):
            return key.op in self.ops
        alone = ALONE if "->" in key.rule else PAIRS
        return (key.op, key.dtypes, key.mesh, alone if key.mesh == mesh_kind((1,)) else MESHES) in self.slots


def rule_name(finding: Finding) -> str:
    """The finding's name without its overload, and without the sizes of its mesh, which a key names by their kind.

    `aten.add.Tensor on (2, 2): (S(0), R), R` is `(S(0), R), R`.
    """
    return re.sub(r"^( on \([\d, ]+\))?: ", "", finding.name.removeprefix(finding.rule.op))


def keys_of(finding: Finding) -> tuple[FindingKey, ...]:
    """A key for each class of dtypes and kind of mesh on which it was suspected."""
    kinds = sorted(set(finding.kinds)) or [(ANY, ANY)]
    return tuple(FindingKey(finding.rule.op, rule_name(finding), dtypes, mesh) for dtypes, mesh in kinds)


def crash_key(crash: Crash) -> FindingKey:
    """One key for all crashes of an overload, and one for its time-outs: their call and error differ from run to run."""
    return FindingKey(crash.op, HANGS if crash.error.startswith(TIMED_OUT) else CRASHED, ANY, ANY)


def ignored_finding(op: str, reason: str) -> Finding:
    """The finding for a registration that torch never calls: on one rank, where nothing can be sharded wrongly."""
    return Finding(Rule(op, (), ()), 1, Verdict.UNSOUND, reason, (), "its registration", title=f"{op}: {IGNORED}")


def decide(
    report: Report,
    baseline: Baseline,
    tried: RunCoverage,
    today: dt.date,
    *,
    places: Callable[[str], SourceLine | None] = lambda op: None,
    functions: Callable[[str], str] = lambda op: "",
) -> GateResult:
    """The result of a run, without what only the caller knows: choices, untested overloads, seconds.

    `places` gives the source line of an overload's rule, `functions` names its rule function.
    """
    wrong = [ignored_finding(op, why) for op, why in report.ignored]
    wrong += [f for f in report.findings if f.verdict in FAULTS]
    entries = {entry.key: entry for entry in baseline.entries}
    valid = {key: e for key, e in entries.items() if e.expires is None or e.expires >= today}
    findings = tuple(
        _reviewed(finding, valid, places(finding.rule.op), functions(finding.rule.op)) for finding in wrong
    )
    crashes = {crash_key(crash) for crash in report.crashed}
    suspected = {key for f in report.findings if f.verdict is Verdict.SUSPECT for key in keys_of(f)}
    shown = {key for one in findings for key in one.keys} | crashes
    absent = [e for key, e in entries.items() if key not in shown | suspected and tried.covers(key)]
    unseen = tuple(e for e in absent if e.key.rule in (CRASHED, HANGS))
    left = replace(report, crashed=tuple(c for c in report.crashed if crash_key(c) not in valid))
    nothing = "nothing was tested: no rule was tried on any sample, and that is not a pass"
    notes = []
    if baseline.text is None:
        way = "; --accept REASON writes it" if shown else ""
        notes.append(f"{baseline.path} is not there: nothing is accepted yet{way}")
    elif baseline.torch != report.torch:
        notes.append(f"{baseline.path} was written under torch {baseline.torch}, this is torch {report.torch}")
    accepted = [f"{key}: accepted: {valid[key].reason}" for key in sorted(crashes & set(valid))]
    return GateResult(
        left,
        findings,
        gone=tuple(e for e in absent if e not in unseen),
        expired=tuple(e for e in baseline.entries if e.key in shown and e.key not in valid),
        trouble=(*([] if report.counts.instances else [nothing]), *_crashes(left)),
        unseen=unseen,
        notes=(*notes, *accepted),
        judged=tuple(sorted(tried.any)),
    )


def _reviewed(
    finding: Finding, valid: Mapping[FindingKey, BaselineEntry], place: SourceLine | None, function: str
) -> ReviewedFinding:
    keys = keys_of(finding)
    new = tuple(key for key in keys if key not in valid)
    return ReviewedFinding(finding, keys, new, place, tuple(valid[key] for key in keys if key in valid), function)


def _crashes(report: Report) -> list[str]:
    by_key: dict[FindingKey, list[Crash]] = {}
    for crash in report.crashed:
        by_key.setdefault(crash_key(crash), []).append(crash)
    lines = []
    for key, crashes in sorted(by_key.items()):
        more = f" (and {len(crashes) - 1} more like it)" if len(crashes) > 1 else ""
        lines.append(f"{key.op} {key.rule}: {crashes[0].sample}: {crashes[0].error}{more}")
    return lines


def new_keys(result: GateResult) -> tuple[FindingKey, ...]:
    """The keys that fail the gate, or put it in trouble, and that an entry would accept."""
    new = {key for finding in result.new for key in finding.new}
    return tuple(sorted(new | {crash_key(crash) for crash in result.report.crashed}))


def amend_baseline(
    baseline: Baseline, result: GateResult, *, remove: bool, reason: str = "", expires: dt.date | None = None
) -> Baseline:
    """The baseline without the entries that no longer reproduce, if `remove`, and with the new keys, if there is a
    reason to accept them."""
    gone = {entry.key for entry in (*result.gone, *result.unseen)} if remove else set()
    less = baseline.without(gone)
    if not reason:
        return less
    expired = {entry.key for entry in result.expired}
    known = {entry.key for entry in less.entries} - expired
    return less.also([BaselineEntry(key, reason, expires) for key in new_keys(result) if key not in known])
