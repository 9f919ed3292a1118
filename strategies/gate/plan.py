"""What a gate judges and what comes of it: which overloads, by which verdicts, beside which baseline.

The way of a run, from `gate_command.run`: `chosen` reads from the options which overloads; `work` takes from the cache what
equal runs said of them (`verdict_cache`), tries the others (`gate_run.run`, which sweeps as `localtensor validate` does),
and keeps what was said; `Work.beside` holds the report against a baseline (`gate.judge`).
"""

from __future__ import annotations

import datetime as dt
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from strategies.base.git import NoGit, NoRepository, repository
from strategies.base.journal import Line, of_kind, open_journal
from strategies.base.progress import Progress, counted
from strategies.base.signals import many
from strategies.gate import decision, verdict_cache
from strategies.gate.baseline import Baseline, Choice, GateResult, SourceLine
from strategies.gate.changes.project import written_now
from strategies.gate.changes.select import select
from strategies.gate.changes.version_view import OUTSIDE, digests
from strategies.gate.decision import Coverage, Places, nowhere
from strategies.gate.options import GateOptions
from strategies.gate.verdict_cache import VerdictCache, remembered
from strategies.inputs.selection import matching
from strategies.model.settings import Settings, meshes
from strategies.model.verdict import Counts, Report, Unit, mesh_kind, read_unit
from strategies.sweep import aggregate
from strategies.torch_api import population, user_modules

# One run of the gate: what is remembered of equal runs is taken, the rest is tried, and what was tried is known.

NO_TIME, PART = "the time was up before it", "the time was up before all of it was tried"


@dataclass(frozen=True, slots=True)
class Ran:
    """A report, what it says something about, and the lines of the journal that it was made from."""

    report: Report
    tried: Coverage
    untried: tuple[tuple[str, str], ...]
    begin: Line
    lines: tuple[Line, ...]


def run(settings: Settings, progress: Progress, known: Sequence[Line] = ()) -> Ran:
    """Try what the settings name, less the units of which the known lines tell.  Raises as `validate`."""
    from strategies.sweep.session import put_on_trial  # a run of which all is remembered needs nothing that judges

    with open_journal(None, resume=False) as journal:
        journal.lines += known
        seconds = put_on_trial(settings, journal, progress)
        return ran(journal.begun or {}, journal.lines, seconds)


def ran(begin: Line, lines: Sequence[Line], seconds: Sequence[tuple[str, float]] = ()) -> Ran:
    """The same of lines that are all there."""
    report = aggregate.report(begin, lines, seconds)
    tried, untried = reached(begin, lines)
    return Ran(report, tried, untried, begin, tuple(lines))


def nothing(settings: Settings, torch: str) -> Report:
    """The report of a run in which there was nothing to do."""
    return Report(torch, settings.seed, settings.ranks, settings.confirm, Counts())


def reached(begin: Line, lines: Sequence[Line]) -> tuple[Coverage, tuple[tuple[str, str], ...]]:
    """What was tried to the end; and the overloads that were not, with the reason."""
    told = {read_unit(line["unit"]): line for line in of_kind(lines, "unit")}
    plan: dict[str, list[Unit]] = defaultdict(list)
    for unit in aggregate.plan(begin):
        plan[unit.op].append(unit)
    crashed = _crashed(lines)
    instances: Counter[str] = Counter()
    for unit, line in told.items():
        instances[unit.op] += line.get("tried", 0)
    left = {op: [u for u in units if u not in told] for op, units in plan.items()}
    whole = frozenset(op for op in plan if not left[op] and op not in crashed and instances[op])
    untried = tuple((op, NO_TIME if len(left[op]) == len(plan[op]) else PART) for op in sorted(plan) if left[op])
    captured = not any(line["crashed"] for line in of_kind(lines, "captured"))
    slots = frozenset(
        (u.op, u.dtypes, mesh_kind(u.mesh), u.trial)
        for op in whole
        for u in plan[op]
        if captured or told[u].get("samples", 0)  # else a crash may have cost a class of dtypes its samples
    )
    return Coverage(frozenset(op for op in plan if len(left[op]) < len(plan[op])), whole, slots), untried


def _crashed(lines: Sequence[Line]) -> set[str]:
    """Overloads of which some sample was not judged."""
    return {line["unit"].split(" ")[0] for line in of_kind(lines, "unit") if line.get("crashed")} | {
        line["crash"][0] for line in of_kind(lines, "settled") if "crash" in line
    }


# Where the rule of an overload is written, as far as that is in the repository at hand.


def places(top: Path, ops: Collection[str]) -> Places:
    """For each of these overloads the first line of the function that is registered for it, of several the first one
    below `top`; None if there is none."""
    found: dict[str, SourceLine] = {}
    every = written_now(ops) if ops else {}
    for op in ops:
        below = (_place(one.file, one.line, top.resolve()) for one in every.get(op, ()))
        place = next((place for place in below if place is not None), None)
        if place is not None:
            found[op] = place
    return found.get


def _place(file: str, line: int, top: Path) -> SourceLine | None:
    path = Path(file)
    if not path.is_absolute() or not path.resolve().is_relative_to(top):
        return None
    return SourceLine(path.resolve().relative_to(top).as_posix(), line)


def within(path: Path, top: Path) -> str:
    """The path as the repository knows it, with slashes; as it was given, if it is outside."""
    there = path.absolute().resolve()
    return there.relative_to(top.resolve()).as_posix() if there.is_relative_to(top.resolve()) else path.as_posix()


REMEDY = "`samples(op)` in the rules module can give others"


@dataclass(frozen=True, slots=True)
class GatePlan:
    """What is to be judged: settings, the module's registrations if there is one, and what `--changed` said."""

    settings: Settings
    registered: user_modules.Registered | None
    choices: tuple[Choice, ...] = ()
    unchanged: tuple[str, ...] = ()


def chosen(options: GateOptions, folder: Path, start: float) -> GatePlan:
    """What the options ask for, of what is there.

    Raises `BadSetting`, `UnknownOp`, `BadRules`, and with `--changed` `BadRevision`, `NoRepository` or `NoGit`.
    """
    axes, several = meshes(options.ranks, options.mesh)
    module = options.rules if options.rules != "dtensor" else None
    settings = Settings(
        patterns=options.ops if module is None else (), everything=options.everything, ranks=axes, meshes=several,
        pairs=options.pairs, rules=options.rules, confirm=options.confirm, seed=options.seed, workers=many(options.workers),
        folder=str(folder), until=options.until(start),
    )  # fmt: skip
    registered = user_modules.load(options.rules, str(folder)) if module else None
    if registered and options.ops:
        settings = replace(settings, only=matching(options.ops, (*registered.ops, *registered.ignored)))
    if options.changed is None:
        return GatePlan(settings, registered)
    selection = select(options.changed, folder, module, settings.only or _all(registered, options.ops))
    ops = tuple(choice.op for choice in selection.choices)
    if ops:
        settings = replace(settings, only=ops) if module else replace(settings, patterns=ops, everything=False)
    return GatePlan(settings, registered, selection.choices, selection.unchanged)


def _all(registered: user_modules.Registered | None, patterns: Sequence[str]) -> tuple[str, ...]:
    """All overloads that the module registers, or those of torch's own that the patterns name."""
    if registered is not None:
        return tuple(sorted({*registered.ops, *registered.ignored}))
    every = tuple(member.op for member in population.everything("cpu"))
    return matching(patterns, every) if patterns else every


@dataclass(frozen=True, slots=True)
class Work:
    """What was found, before anybody has compared it with a baseline.  `top` is where places are told from."""

    report: Report
    tried: Coverage
    top: Path
    places: Places = nowhere
    choices: tuple[Choice, ...] = ()
    untried: tuple[tuple[str, str], ...] = ()
    remembered: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    trouble: tuple[str, ...] = ()
    idle: bool = False
    """Nothing had to be judged, and that is a pass."""
    looked_at: frozenset[str] | None = None
    """All overloads that there are, where none was left out by choice; None where some were."""

    def beside(self, baseline: Baseline, today: dt.date) -> GateResult:
        """The result."""
        if self.idle:
            return GateResult(self.report, notes=self.notes)
        result = decision.judge(self.report, baseline, self.tried, today, places=self.places)
        return replace(
            result, choices=self.choices, untried=self.untried, remembered=self.remembered,
            notes=(*result.notes, *self._apart(baseline), *self.notes), trouble=(*result.trouble, *self.trouble),
        )  # fmt: skip

    def _apart(self, baseline: Baseline) -> list[str]:
        """A note on the entries of overloads that nothing was heard of: of another module, or of a rule that is gone."""
        if self.looked_at is None:
            return []
        ops = sorted({entry.key.op for entry in baseline.entries} - self.looked_at)
        first = f"{ops[0]} and {len(ops) - 1} more" if len(ops) > 1 else "".join(ops)
        return (
            [f"{baseline.path} has entries of overloads that are not among those judged here: {first}"] if ops else []
        )


def work(options: GateOptions, what: GatePlan, progress: Progress) -> Work:
    """Try what was chosen, or remember what equal runs found.  Raises as `validate`."""
    top = top_of(Path(what.settings.folder))
    if options.changed is not None and not what.choices:
        report = nothing(what.settings, torch.__version__.split("+")[0])
        said = f"nothing had to be judged ({counted(len(what.unchanged), 'overload')} unchanged)"
        return Work(report, Coverage(), top, notes=(f"no rule changed since {options.changed}: {said}",), idle=True)
    done, same, notes = _found(what, _cache(options, what), progress)
    untried = (*done.untried, *_unreached(what, done))
    wrong = {*done.report.ignored, *(f.rule.op for f in done.report.findings)}
    chosen_some = options.ops or options.changed is not None
    return Work(
        done.report, done.tried, top, places(top, wrong), what.choices, tuple(sorted(untried)), same, tuple(notes),
        _too_late(options, done),
        looked_at=None if chosen_some else frozenset({*done.begin["ops"], *done.begin["ignored"]}),
    )  # fmt: skip


def _cache(options: GateOptions, what: GatePlan) -> VerdictCache | None:
    module = options.rules if what.registered else None
    if options.no_cache:
        return None
    if module and hasattr(sys.modules[module], "samples"):  # what these hang on is unknown
        return None
    beside = tuple(op for op in _ops(what) if op.startswith("aten."))
    known = digests(module)
    return VerdictCache(
        options.cache, what.settings, lambda op: _inside(known(op), module), verdict_cache.judge(), beside
    )


def _inside(digest: str | None, module: str | None) -> str | None:
    """The digest, unless it says that the rule of a user's is nowhere in the project: then its content is unknown."""
    return None if module and digest == OUTSIDE else digest


def _ops(what: GatePlan) -> tuple[str, ...]:
    """The overloads of the module that are to be tried."""
    registered, only = what.registered, what.settings.only
    if registered is None:
        return ()
    return registered.only(only).ops if only else registered.ops


def _found(what: GatePlan, cache: VerdictCache | None, progress: Progress) -> tuple[Ran, tuple[str, ...], list[str]]:
    """What was found, the overloads of which an equal run told it, and what there is to say about keeping it."""
    settings, registered = what.settings, what.registered
    ops = list(_ops(what)) if registered else cache.ops() if cache else None
    known = remembered(cache, ops) if cache and ops else {}
    lines = [line for own in known.values() for line in own]
    if ops and set(known) == set(ops):
        ignored = registered.only(settings.only or registered.ignored).ignored if registered else ()
        return (
            ran(aggregate.first_line(settings.asked(), ops, settings.trials(), ignored), lines),
            tuple(known),
            [],
        )
    done = run(settings, progress, lines)
    problem = cache.keep(done.begin, done.lines, done.tried.ops) if cache else ""
    return done, tuple(known), [problem] if problem else []


def _unreached(what: GatePlan, done: Ran) -> list[tuple[str, str]]:
    """The overloads that were asked for by name, and of which nothing could be tried; why, where that is known."""
    crashed = {crash.op for crash in done.report.crashed}
    late = {op for op, _ in done.untried}
    left = set(_ops(what)) - done.tried.ops - crashed - late
    why: dict[str, str] = {}
    for text, _ in done.report.skipped:
        op, _, reason = text.partition(": ")
        why.setdefault(op, reason)
    return [(op, f"no call of it could be judged ({why.get(op, 'none was found')}); {REMEDY}") for op in sorted(left)]


def _too_late(options: GateOptions, done: Ran) -> tuple[str, ...]:
    if done.report.counts.instances or not done.untried:
        return ()
    return (f"the {options.budget} of --budget were over before the first overload was tried",)


def top_of(folder: Path) -> Path:
    """The folder that places are told from: that of the repository, else the one that the gate runs in."""
    try:
        return repository(folder).top
    except (NoRepository, NoGit):
        return folder
