"""How many of the overloads that DTensor registers were tested, how many have a verdict, and why the others have none."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields

from rich.console import Group
from rich.table import Table
from rich.text import Text

from strategies.base.journal import Line
from strategies.model.verdict import LeftOut, Verdict, read_unit
from strategies.sweep.report.text_and_json import by_reason, left_out_data, left_out_text
from strategies.torch_api.user_modules import FAMILIES, RegisteredOverload

DECIDED = frozenset({Verdict.SOUND.value, Verdict.UNSOUND.value, Verdict.REFUSED.value})
"""The verdicts that are proved; an unconfirmed suspect is not."""
ABSENT = "not in this journal"
UNTRIED = "no sample was found, and no reason was given"
UNDECIDED = "tried, and nothing that DTensor claims could be judged"


@dataclass(frozen=True, slots=True)
class OverloadCoverage:
    """One overload: the number of samples tried, the verdicts met (values of `Verdict`), and the reasons why rules of
    it could not be judged."""

    samples: int = 0
    verdicts: frozenset[str] = frozenset()
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FamilyCoverage:
    """The counts of one family of overloads; `able` are those that the device can run."""

    family: str
    registered: int
    able: int
    exercised: int
    decided: int


@dataclass(frozen=True, slots=True)
class Reason:
    """Why these overloads were not exercised, or exercised and not decided."""

    text: str
    ops: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SweepCoverage:
    """The table.  `others` counts tested overloads outside the registries: DTensor decomposes them."""

    torch: str
    device: str
    rows: tuple[FamilyCoverage, ...]
    cannot: tuple[Reason, ...]
    unexercised: tuple[Reason, ...]
    undecided: tuple[Reason, ...]
    others: int = 0
    left_out: tuple[LeftOut, ...] = ()

    @property
    def total(self) -> FamilyCoverage:
        sums = (sum(getattr(row, f.name) for row in self.rows) for f in fields(FamilyCoverage)[1:])
        return FamilyCoverage("all", *sums)

    @property
    def share(self) -> float:
        """Exercised overloads of those that the device can run."""
        return self.total.exercised / self.total.able if self.total.able else 1.0

    @property
    def decided_share(self) -> float:
        """Overloads with a Sound or an Unsound verdict, of those that the device can run."""
        return self.total.decided / self.total.able if self.total.able else 1.0


def left_out_of(lines: Iterable[Line]) -> tuple[LeftOut, ...]:
    """What each overload was not tested with, by the lines of a journal, sorted."""
    found: dict[tuple[str, str, str], dict[str, None]] = {}
    for line in lines:
        if line["kind"] == "unit" and line.get("left_out"):
            unit = read_unit(line["unit"])
            for what, names in line["left_out"].items():
                found.setdefault((unit.op, unit.dtypes, what), {}).update(dict.fromkeys(names))
    return tuple(LeftOut(*key, tuple(names)) for key, names in sorted(found.items(), key=lambda pair: pair[0]))


def coverage_table(
    members: Sequence[RegisteredOverload],
    tried: Mapping[str, OverloadCoverage],
    *,
    torch: str,
    device: str = "cpu",
    left_out: tuple[LeftOut, ...] = (),
) -> SweepCoverage:
    """The coverage of these overloads.  Every one is in the counts, and each that is not decided has a reason."""
    there = {m.family for m in members}
    families = [name for name in FAMILIES[::-1] if name in there] + sorted(there - set(FAMILIES))
    rows = tuple(_row(name, members, tried) for name in families)
    able = [m for m in members if not m.cannot]
    missed = [m for m in able if not _of(m, tried).samples]
    open_ = [m for m in able if _of(m, tried).samples and not _of(m, tried).verdicts & DECIDED]
    names = {m.op for m in members}
    cannot = _grouped((m.cannot, m.op) for m in members if m.cannot)
    unexercised = _grouped((_why(m, tried, UNTRIED if m.op in tried else ABSENT), m.op) for m in missed)
    undecided = _grouped((_why(m, tried, UNDECIDED), m.op) for m in open_)
    others = sum(1 for op, what in tried.items() if op not in names and what.samples)
    return SweepCoverage(torch, device, rows, cannot, unexercised, undecided, others, left_out)


def _of(member: RegisteredOverload, tried: Mapping[str, OverloadCoverage]) -> OverloadCoverage:
    return tried.get(member.op, OverloadCoverage())


def _why(member: RegisteredOverload, tried: Mapping[str, OverloadCoverage], default: str) -> str:
    return next((reason for reason in _of(member, tried).reasons if reason), default)


def _row(name: str, members: Sequence[RegisteredOverload], tried: Mapping[str, OverloadCoverage]) -> FamilyCoverage:
    own = [m for m in members if m.family == name]
    able = [m for m in own if not m.cannot]
    exercised = [m for m in able if _of(m, tried).samples]
    decided = [m for m in exercised if _of(m, tried).verdicts & DECIDED]
    return FamilyCoverage(name, len(own), len(able), len(exercised), len(decided))


def _grouped(pairs: Iterable[tuple[str, str]]) -> tuple[Reason, ...]:
    return tuple(Reason(text, tuple(sorted(ops))) for text, ops in by_reason(pairs))


def as_json(coverage: SweepCoverage) -> str:
    """The coverage as JSON text, keys in order, the same for the same coverage."""
    body = asdict(coverage) | {
        "schema": 1,
        "total": asdict(coverage.total),
        "share": round(coverage.share, 4),
        "decided_share": round(coverage.decided_share, 4),
        "left_out": left_out_data(coverage.left_out),
    }
    return json.dumps(body, indent=2, sort_keys=True) + "\n"


def render(coverage: SweepCoverage, *, left_out: bool = False) -> Group:
    """The coverage for a terminal: the table by family, every reason with its overloads, and what was left out of each."""
    shown = Table(title=f"DTensor's registered overloads in torch {coverage.torch} on {coverage.device}")
    for heading in ("family", "registered", f"a {coverage.device.upper()} can run", "exercised", "with a verdict"):
        shown.add_column(heading, justify="left" if heading == "family" else "right")
    for row in (*coverage.rows, coverage.total):
        numbers = (row.registered, row.able, row.exercised, row.decided)
        shown.add_row(row.family, *map(str, numbers), style="bold" if row.family == "all" else None)
    exercised, decided = _percent(coverage.share), _percent(coverage.decided_share)
    share = f"{exercised} exercised, {decided} with a Sound or an Unsound verdict"
    lines = [Text(f"Of what a {coverage.device.upper()} can run: {share}.")]
    if coverage.others:
        lines.append(Text(f"Tried besides: {coverage.others} overloads that DTensor takes apart itself."))
    for heading, reasons in (
        ("Cannot run here", coverage.cannot),
        ("Not exercised", coverage.unexercised),
        ("Exercised, without a verdict", coverage.undecided),
    ):
        lines += [Text(f"{heading}:")] if reasons else []
        lines += [Text(f"  {len(r.ops):4d}  {r.text}: {', '.join(r.ops)}") for r in reasons]
    if left_out:
        lines += [Text("Left out of the tests of each overload:"), *left_out_text(coverage.left_out)]
    return Group(shown, *lines)


def _percent(share: float) -> str:
    """Rounded down, so that 100.0 % means all."""
    return f"{int(share * 1000) / 10:.1f} %"
