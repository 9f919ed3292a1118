"""From journal lines to the report: merging of shards, the totals.

The report depends on the lines alone: it is the same whether they were written just now or on other machines.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from strategies.base.atomic_files import write_lines
from strategies.base.journal import (
    BadJournal,
    JournalLines,
    Line,
    lines_of_kind,
    load_journal,
    paused_collector,
    run_difference,
)
from strategies.model.cause import of_findings, read_causes
from strategies.model.verdict import Counts, Crash, Finding, Report, Verdict, WorkUnit, mesh_kind, plan_units, read_unit
from strategies.programs.run.verdict import LOCAL_REFUSAL, META_KERNEL
from strategies.sweep.coverage import left_out_of
from strategies.validation import finding
from strategies.validation.finding import RuleOutcome, TaskResult


def first_line(
    settings_line: Line,
    ops: Iterable[str],
    kinds: Iterable[tuple[str, tuple[int, ...]]],
    ignored: Iterable[tuple[str, str]],
) -> Line:
    """A journal's first line: the settings, the overloads, the kinds of test with their meshes, and the registrations
    that torch ignores, with the reasons."""
    pairs = [[kind, list(mesh)] for kind, mesh in kinds]
    return {**settings_line, "ops": list(ops), "trials": pairs, "ignored": [list(one) for one in ignored]}


def planned_units(begin: Line) -> tuple[WorkUnit, ...]:
    """Every unit of the run that a journal's first line describes, those of other shards included."""
    return plan_units(begin["ops"], [(kind, tuple(mesh)) for kind, mesh in begin["trials"]])


@paused_collector()
def report(begin: Line, lines: Sequence[Line], seconds: Sequence[tuple[str, float]] = ()) -> Report:
    """The report on these lines, in any order.  Of a rule with two outcomes the worse verdict counts."""
    results = sorted((finding.read_task(line) for line in lines_of_kind(lines, "unit")), key=lambda r: r.unit)
    settled = sorted((finding.read_outcome(line) for line in lines_of_kind(lines, "settled")), key=lambda s: s.name)
    found = _placed(_worst(settled), settled, results) + _missing(results)
    named = {f.name for f in found}
    cleared = {s.name for s in settled if s.finding is None}
    clean = {name for r in results for name in r.sound} | {n for r in results for n in r.whole if n in cleared}
    clean -= named
    untestable = {name: why for r in results for name, why in r.untestable.items()}
    if begin["confirm"] == "none":
        untestable |= {
            name: f"{candidates[0].instance.evidence.reason}: only a real run can judge it"
            for r in results
            for name, candidates in r.whole.items()
        }
    untestable = {name: why for name, why in untestable.items() if name not in named and name not in clean}
    crashed, refused = _captured(lines)
    crashed += [crash for r in results for crash in r.crashed] + [s.crash for s in settled if s.crash]
    for r in results:
        refused.update({f"{r.unit.op}: {why}": n for why, n in r.skipped.items()})
    done = {r.unit for r in results}
    return Report(
        begin["torch"],
        begin["seed"],
        tuple(begin["ranks"]),
        begin["confirm"],
        _counts(results, found, clean, untestable, len(crashed)),
        tuple(sorted(found, key=_place)),
        tuple(crashed),
        tuple(sorted(untestable.items())),
        tuple(sorted(refused.items())),
        tuple((op, why) for op, why in begin["ignored"]),
        _untested(results),
        tuple(seconds),
        sum(unit not in done for unit in planned_units(begin)),
        left_out_of(lines),
        of_findings(read_causes(lines), (f.name for f in found)),
    )


def _untested(results: Sequence[TaskResult]) -> tuple[tuple[str, str], ...]:
    """The overloads none of whose rules was tested, each with the most frequent reason."""
    tested = {r.unit.op for r in results if r.tried or r.suspects or r.crashed}
    why: dict[str, Counter[str]] = defaultdict(Counter)
    for r in results:
        if r.unit.op not in tested:
            why[r.unit.op].update(r.skipped)
    return tuple((op, max(sorted(c), key=lambda reason: c[reason])) for op, c in sorted(why.items()) if c)


def _worst(settled: Iterable[RuleOutcome]) -> list[Finding]:
    worst: dict[str, Finding] = {}
    for s in settled:
        if s.finding is None:
            continue
        known = worst.get(s.finding.name)
        if known is None or _rank(s.finding) < _rank(known):
            worst[s.finding.name] = s.finding
    return list(worst.values())


def _placed(found: Iterable[Finding], settled: Iterable[RuleOutcome], results: Iterable[TaskResult]) -> list[Finding]:
    """The findings with the kinds of all units that suspected them, under the names that the rules had before shrinking."""
    called = {s.name: s.finding.name for s in settled if s.finding}
    called |= {s.name: called[s.same_as] for s in settled if s.same_as in called}
    kinds: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for r in results:
        for name in {*r.suspects, *r.whole} & called.keys():
            kinds[called[name]].add((r.unit.dtypes, mesh_kind(r.unit.mesh)))
    return [replace(f, kinds=tuple(sorted(kinds[f.name]))) for f in found]


_ORDER = {Verdict.UNSOUND: 0, Verdict.REFUSED: 1, Verdict.SUSPECT: 2, Verdict.MISSING: 3}


def _place(f: Finding) -> tuple[int, bool, str]:
    """The order of findings in a report: what plain torch does without DTensor, too, comes last among those of a verdict."""
    return _ORDER.get(f.verdict, 9), LOCAL_REFUSAL in f.reason or META_KERNEL in f.reason, f.name


def _rank(f: Finding) -> tuple[int, int, int]:
    return _ORDER.get(f.verdict, 9), f.ranks, f.elements


def _missing(results: Iterable[TaskResult]) -> list[Finding]:
    """Each missing rule once, by its smallest instance."""
    found: dict[str, Finding] = {}
    for instance in (i for r in results for i in r.missing):
        one = finding.finding_of_instance(instance, instance.evidence.reason)
        if one.name not in found or _rank(one) < _rank(found[one.name]):
            found[one.name] = one
    return list(found.values())


def _captured(lines: Sequence[Line]) -> tuple[list[Crash], Counter[str]]:
    """Crashes and refusals during the capture of samples.  Each shard captures all samples: one line is enough."""
    first = next(lines_of_kind(lines, "captured"), None)
    if first is None:
        return [], Counter()
    return [Crash(*crash) for crash in first["crashed"]], Counter(first["refused"])


def _counts(
    results: Sequence[TaskResult], found: Sequence[Finding], clean: set[str], untestable: dict[str, str], crashes: int
) -> Counts:
    by_verdict = Counter(f.verdict for f in found)
    samples: Counter[tuple[str, str]] = Counter()
    for r in results:  # the same samples go to each mesh
        key = r.unit.op, r.unit.dtypes
        samples[key] = max(samples[key], r.samples)
    return Counts(
        sound=len(clean),
        unsound=by_verdict[Verdict.UNSOUND],
        refused=by_verdict[Verdict.REFUSED],
        missing=by_verdict[Verdict.MISSING],
        suspect=by_verdict[Verdict.SUSPECT],
        untestable=len(untestable),
        crashed=crashes,
        samples=sum(samples.values()),
        overloads=len({r.unit.op for r in results if r.tried}),
        instances=sum(r.tried for r in results),
        combinations=sum(r.combinations for r in results),
        by_metadata=len({n for r in results for n in r.by_metadata if n in clean}),
    )


MERGE_CALL = "localtensor merge"


class IncompleteRun(BadJournal):
    """Units that no journal holds, or that two hold."""


def merged_run(paths: Sequence[Path]) -> tuple[Line, list[Line], list[str]]:
    """The first line of the run as a whole, all lines, and a sentence for each truncated last line.

    Raises `BadJournal` for a file that is no journal or of another run, and `IncompleteRun` where a unit is missing or
    in two journals, or a suspected rule has no outcome.
    """
    found = [(path, load_journal(path, MERGE_CALL)) for path in paths]
    first = found[0][1].begin
    common = {name: value for name, value in first.items() if name != "shard"}
    for path, one in found[1:]:
        if problem := run_difference(one.begin, common) or _other_plan(first, one.begin):
            raise BadJournal(path, f"it is of another run than {paths[0]}: {problem}", "Merge one run.", MERGE_CALL)
    _complete(first, found)
    lines = [line for _, one in found for line in one.lines]
    return {**common, "shard": None}, lines, [one.cut for _, one in found if one.cut]


def _other_plan(first: Line, other: Line) -> str:
    if first["ops"] == other["ops"]:
        return ""
    apart = sorted(set(first["ops"]) ^ set(other["ops"]))
    return f"{len(apart)} overloads are in one plan only ({apart[0]}, say)"


def _complete(begin: Line, found: Sequence[tuple[Path, JournalLines]]) -> None:
    held: dict[WorkUnit, Path] = {}
    for path, one in found:
        for line in lines_of_kind(one.lines, "unit"):
            unit = read_unit(line["unit"])
            if unit in held:
                raise IncompleteRun(path, f"{unit} is in {held[unit]} as well", "Name each journal once.", MERGE_CALL)
            held[unit] = path
    missing = [unit for unit in planned_units(begin) if unit not in held]
    if missing:
        shards = _shards(begin, found)
        problem = f"{len(missing)} of {len(planned_units(begin))} units are in none of the journals ({missing[0]}, say{shards})"
        raise IncompleteRun(found[0][0], problem, "Run the other shards, or go on with those by --resume.", MERGE_CALL)
    for path, one in found:
        left = sorted(_suspected(one) - {line["rule"] for line in lines_of_kind(one.lines, "settled")})
        if left:
            problem = f"{len(left)} suspected rules were not confirmed yet ({left[0]}, say)"
            raise IncompleteRun(path, problem, "Go on with it by --resume.", MERGE_CALL)


def _shards(begin: Line, found: Sequence[tuple[Path, JournalLines]]) -> str:
    given = [one.begin["shard"] for _, one in found if one.begin["shard"]]
    if not given:
        return ""
    lacking = sorted(set(range(1, given[0][1] + 1)) - {number for number, _ in given})
    return f"; shard {', '.join(f'{number}/{given[0][1]}' for number in lacking)} is not among them" if lacking else ""


def _suspected(one: JournalLines) -> set[str]:
    names: set[str] = set()
    for line in lines_of_kind(one.lines, "unit"):
        names.update(line.get("suspects", {}))
        names.update(line.get("whole", {}) if one.begin["confirm"] != "none" else {})
    return names


def write(path: Path, begin: Line, lines: Sequence[Line]) -> None:
    """One journal of the whole run.  Raises `OSError`."""
    write_lines(path, (json.dumps(line, separators=(",", ":")) for line in (begin, *lines)))
