"""The steps of a gate run, which `strategies.cli.commands.gate` calls in turn.

`make_plan` selects the overloads by the options.  `run_plan` takes cached verdicts (`verdict_cache`), tests the other
overloads (`run`, a sweep as that of `localtensor validate`), and caches the new verdicts.  `Work.beside` compares the
report with a baseline (`decision.judge`).
"""

from __future__ import annotations

import datetime as dt
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from strategies.base.git import NoGit, NoRepository, repository
from strategies.base.journal import Line, lines_of_kind, open_journal
from strategies.base.progress import Progress, with_count
from strategies.gate import decision, verdict_cache
from strategies.gate.baseline import Baseline, ChosenOverload, GateResult, SourceLine
from strategies.gate.changes.project import rule_functions
from strategies.gate.changes.select import select_changed
from strategies.gate.changes.version_view import OUTSIDE, rule_digests
from strategies.gate.decision import RunCoverage
from strategies.gate.options import GateOptions
from strategies.gate.verdict_cache import VerdictCache
from strategies.inputs.gathering import matching_overloads, overloads_of_rules
from strategies.model.settings import Settings
from strategies.model.verdict import Counts, Report, WorkUnit, mesh_kind, read_unit
from strategies.sweep import aggregate
from strategies.torch_api import user_modules

REMEDY = "`samples(op)` in the rules module can give others"
NO_TIME, PARTLY_TRIED = "the time was up before it", "the time was up before all of it was tried"


@dataclass(frozen=True, slots=True)
class GateRun:
    """A report, its coverage, and the lines of the journal that it was made from."""

    report: Report
    tried: RunCoverage
    untried: tuple[tuple[str, str], ...]
    begin: Line
    lines: tuple[Line, ...]


def run(settings: Settings, progress: Progress, known: Sequence[Line] = ()) -> GateRun:
    """Test what the settings name, except for the units of the known lines.  Raises as `validate`."""
    from strategies.sweep.session import run_validation  # not needed where all verdicts are from the cache
    from strategies.torch_api.rank_runs import prepare_confirmation

    prepare_confirmation(settings.confirm)
    with open_journal(None, resume=False) as journal:
        journal.lines += known
        seconds = run_validation(settings, journal, progress)
        return run_of_lines(journal.begun or {}, journal.lines, seconds)


def run_of_lines(begin: Line, lines: Sequence[Line], seconds: Sequence[tuple[str, float]] = ()) -> GateRun:
    """The run that these lines, all of its lines, describe."""
    tried, untried = coverage_of(begin, lines)
    return GateRun(aggregate.report(begin, lines, seconds), tried, untried, begin, tuple(lines))


def coverage_of(begin: Line, lines: Sequence[Line]) -> tuple[RunCoverage, tuple[tuple[str, str], ...]]:
    """The coverage; and the overloads that were not tested completely, with the reason."""
    line_of = {read_unit(line["unit"]): line for line in lines_of_kind(lines, "unit")}
    plan: dict[str, list[WorkUnit]] = defaultdict(list)
    for unit in aggregate.planned_units(begin):
        plan[unit.op].append(unit)
    crashed = {unit.op for unit, line in line_of.items() if line.get("crashed")}
    crashed |= {line["crash"][0] for line in lines_of_kind(lines, "settled") if "crash" in line}
    instances: Counter[str] = Counter()
    for unit, line in line_of.items():
        instances[unit.op] += line.get("tried", 0)
    left = {op: [u for u in units if u not in line_of] for op, units in plan.items()}
    whole = frozenset(op for op in plan if not left[op] and op not in crashed and instances[op])
    late = [op for op in sorted(plan) if left[op]]
    untried = tuple((op, NO_TIME if len(left[op]) == len(plan[op]) else PARTLY_TRIED) for op in late)
    captured = not any(line["crashed"] for line in lines_of_kind(lines, "captured"))
    slots = frozenset(
        (u.op, u.dtypes, mesh_kind(u.mesh), u.kind)
        for op in whole
        for u in plan[op]
        if captured or line_of[u].get("samples", 0)  # else a crash may have cost a class of dtypes its samples
    )
    return RunCoverage(frozenset(op for op in plan if len(left[op]) < len(plan[op])), whole, slots), untried


def source_lines(top: Path, ops: Collection[str]) -> Callable[[str], SourceLine | None]:
    """The first line of the function that is registered for each overload, of several the first one below `top`; None
    if there is none."""
    found: dict[str, SourceLine] = {}
    functions = rule_functions(ops) if ops else {}
    for op in ops:
        for one in reversed(functions.get(op, ())):
            path = Path(one.file)
            if path.is_absolute() and path.resolve().is_relative_to(top.resolve()):
                found[op] = SourceLine(path.resolve().relative_to(top.resolve()).as_posix(), one.line)
    return found.get


def function_names(top: Path, ops: Collection[str]) -> Callable[[str], str]:
    """The name of the function that is registered for each overload, as its author wrote it, with its file and line; "" if
    there is none.  The file is relative to `top`, or to the folder that its package is installed in."""
    found: dict[str, str] = {}
    for op, functions in (rule_functions(ops) if ops else {}).items():
        for one in functions[:1]:
            path = Path(repository_path(Path(one.file), top))
            roots = [n for n, part in enumerate(path.parts) if part in ("site-packages", "dist-packages")]
            shown = Path(*path.parts[roots[-1] + 1 :]) if roots else path
            found[op] = f"{one.name} ({shown.as_posix()}:{one.line})"
    return lambda op: found.get(op, "")


def repository_path(path: Path, top: Path) -> str:
    """The path relative to the repository, with slashes; as it was given, if it is outside."""
    there = path.absolute().resolve()
    return there.relative_to(top.resolve()).as_posix() if there.is_relative_to(top.resolve()) else path.as_posix()


@dataclass(frozen=True, slots=True)
class GatePlan:
    """What is to be tested: the settings, the module's registrations if there is one, and the result of `--changed`."""

    settings: Settings
    registered: user_modules.RegisteredRules | None
    choices: tuple[ChosenOverload, ...] = ()
    unchanged: tuple[str, ...] = ()


def make_plan(options: GateOptions, folder: Path, start: float) -> GatePlan:
    """The plan by the options.

    Raises `BadSetting`, `UnknownOp`, `BadRules`, and with `--changed` `BadRevision`, `NoRepository` or `NoGit`.
    """
    settings = options.settings(folder, start)
    given = options.rules != "dtensor"
    registered = user_modules.load_rules(options.rules, str(folder)) if given else None
    if registered and options.ops:
        settings = replace(settings, only=overloads_of_rules(registered, options.ops))
    if options.changed is None:
        return GatePlan(settings, registered)
    module = registered.module if registered else None
    selection = select_changed(options.changed, folder, module, settings.only or _all(registered, options.ops))
    ops = tuple(choice.op for choice in selection.choices)
    if ops:
        settings = replace(settings, only=ops) if module else replace(settings, patterns=ops, everything=False)
    return GatePlan(settings, registered, selection.choices, selection.unchanged)


def _all(registered: user_modules.RegisteredRules | None, patterns: Sequence[str]) -> tuple[str, ...]:
    """All overloads that the module registers, or those of torch's own that the patterns name."""
    if registered is not None:
        return registered.every
    every = tuple(member.op for member in user_modules.all_registered_overloads("cpu"))
    return matching_overloads(patterns, every) if patterns else every


@dataclass(frozen=True, slots=True)
class GateFindings:
    """The findings of a run, before they are compared with a baseline.  Source lines are relative to `top`, the
    folder of the repository, else the one that the gate runs in."""

    report: Report
    tried: RunCoverage
    top: Path
    places: Callable[[str], SourceLine | None] = lambda op: None
    functions: Callable[[str], str] = lambda op: ""
    choices: tuple[ChosenOverload, ...] = ()
    untried: tuple[tuple[str, str], ...] = ()
    remembered: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    trouble: tuple[str, ...] = ()
    idle: bool = False
    """No rule had to be tested, and that is a pass."""
    looked_at: frozenset[str] | None = None
    """All overloads of the module or of torch; None where the options left some out."""

    def beside(self, baseline: Baseline, today: dt.date) -> GateResult:
        """The findings compared with the baseline."""
        if self.idle:
            return GateResult(self.report, notes=self.notes)
        result = decision.decide(self.report, baseline, self.tried, today, places=self.places, functions=self.functions)
        notes = list(result.notes)
        known = {entry.key.op for entry in baseline.entries}
        if self.looked_at is not None and (ops := sorted(known - self.looked_at)):  # of another module, or removed ones
            first = f"{ops[0]} and {len(ops) - 1} more" if len(ops) > 1 else ops[0]
            notes.append(f"{baseline.path} has entries of overloads that are not among those judged here: {first}")
        return replace(
            result,
            choices=self.choices,
            untried=self.untried,
            remembered=self.remembered,
            notes=(*notes, *self.notes),
            trouble=(*result.trouble, *self.trouble),
        )


def run_plan(options: GateOptions, plan: GatePlan, progress: Progress) -> GateFindings:
    """Test what the plan selects, or take the verdicts of equal runs from the cache.  Raises as `validate`."""
    settings = plan.settings
    try:
        top = repository(Path(settings.folder)).top
    except (NoRepository, NoGit):
        top = Path(settings.folder)
    if options.changed is not None and not plan.choices:
        report = Report(torch.__version__.split("+")[0], settings.seed, settings.ranks, settings.confirm, Counts())
        note = f"no rule changed since {options.changed}: "
        note += f"nothing had to be judged ({with_count(len(plan.unchanged), 'overload')} unchanged)"
        return GateFindings(report, RunCoverage(), top, notes=(note,), idle=True)
    done, cached, notes = _run_or_recall(plan, _cache(options, plan), progress)
    untried = (*done.untried, *_unreached(plan, done))
    wrong = {*(op for op, _ in done.report.ignored), *(f.rule.op for f in done.report.findings)}
    all_ops = (
        None
        if options.ops or options.changed is not None
        else {*done.begin["ops"], *(op for op, _ in done.begin["ignored"])}
    )
    trouble = f"the {options.budget} of --budget were over before the first overload was tried"
    too_late = bool(done.untried) and not done.report.counts.instances
    return GateFindings(
        done.report,
        done.tried,
        top,
        source_lines(top, wrong),
        function_names(top, wrong),
        plan.choices,
        tuple(sorted(untried)),
        cached,
        tuple(notes),
        (trouble,) if too_late else (),
        looked_at=None if all_ops is None else frozenset(all_ops),
    )


def _cache(options: GateOptions, plan: GatePlan) -> VerdictCache | None:
    module = plan.registered.module if plan.registered else None
    if options.no_cache or (module and hasattr(sys.modules[module], "samples")):  # what samples depend on is unknown
        return None
    beside = tuple(op for op in _ops(plan) if op.startswith("aten."))
    digest_of = rule_digests(module)

    def digest(op: str) -> str | None:
        found = digest_of(op)
        return None if module and found == OUTSIDE else found  # of a user's rule outside of the project: unknown

    return VerdictCache(options.cache, plan.settings, digest, verdict_cache.tool_digest(), beside)


def _ops(plan: GatePlan) -> tuple[str, ...]:
    """The overloads of the module that are to be tested."""
    registered, only = plan.registered, plan.settings.only
    if registered is None:
        return ()
    return registered.only(only).ops if only else registered.ops


def _run_or_recall(
    plan: GatePlan, cache: VerdictCache | None, progress: Progress
) -> tuple[GateRun, tuple[str, ...], list[str]]:
    """The run, the overloads whose verdicts are from the cache, and notes on writing the cache."""
    settings, registered = plan.settings, plan.registered
    ops = list(_ops(plan)) if registered else cache.ops() if cache else None
    known = {op: own for op in ops if (own := cache.lines(op)) is not None} if cache and ops else {}
    lines = [line for own in known.values() for line in own]
    if ops and set(known) == set(ops):
        ignored = registered.only(settings.only or registered.every).ignored if registered else ()
        begin = aggregate.first_line(settings.asked(), ops, settings.kinds_and_meshes(), ignored)
        return run_of_lines(begin, lines), tuple(known), []
    done = run(settings, progress, lines)
    problem = cache.keep(done.begin, done.lines, done.tried.ops) if cache else ""
    return done, tuple(known), [problem] if problem else []


def _unreached(plan: GatePlan, done: GateRun) -> list[tuple[str, str]]:
    """The overloads that were named, and of which no rule could be tested; why, where that is known."""
    crashed = {crash.op for crash in done.report.crashed}
    late = {op for op, _ in done.untried}
    left = set(_ops(plan)) - done.tried.ops - crashed - late
    why: dict[str, str] = {}
    for text, _ in done.report.skipped:
        op, _, reason = text.partition(": ")
        why.setdefault(op, reason)
    return [(op, f"no call of it could be judged ({why.get(op, 'none was found')}); {REMEDY}") for op in sorted(left)]
