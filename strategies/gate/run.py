"""One run of the gate: what is remembered of equal runs is taken, the rest is tried, and what was tried is known."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from strategies.base.journal import Line, of_kind, open_journal
from strategies.base.progress import Progress
from strategies.gate.decision import Tried
from strategies.model.settings import Settings
from strategies.model.verdict import Counts, Report
from strategies.model.work_unit import Unit, mesh_kind, read_unit
from strategies.sweep import aggregate as tally

NO_TIME, PART = "the time was up before it", "the time was up before all of it was tried"


@dataclass(frozen=True, slots=True)
class Ran:
    """A report, what it says something about, and the lines of the journal that it was made from."""

    report: Report
    tried: Tried
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
    report = tally.report(begin, lines, seconds)
    tried, untried = reached(begin, lines)
    return Ran(report, tried, untried, begin, tuple(lines))


def nothing(settings: Settings, torch: str) -> Report:
    """The report of a run in which there was nothing to do."""
    return Report(torch, settings.seed, settings.ranks, settings.confirm, Counts())


def reached(begin: Line, lines: Sequence[Line]) -> tuple[Tried, tuple[tuple[str, str], ...]]:
    """What was tried to the end; and the overloads that were not, with the reason."""
    told = {read_unit(line["unit"]): line for line in of_kind(lines, "unit")}
    plan: dict[str, list[Unit]] = defaultdict(list)
    for unit in tally.plan(begin):
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
    return Tried(frozenset(op for op in plan if len(left[op]) < len(plan[op])), whole, slots), untried


def _crashed(lines: Sequence[Line]) -> set[str]:
    """Overloads of which some sample was not judged."""
    return {line["unit"].split(" ")[0] for line in of_kind(lines, "unit") if line.get("crashed")} | {
        line["crash"][0] for line in of_kind(lines, "settled") if "crash" in line
    }
