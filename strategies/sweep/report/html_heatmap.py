"""The heat map: for each overload, how its rules fare by the placements that they take and give."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from localtensor.layout.spec import short
from strategies.base.journal import Line, of_kind
from strategies.model.rule import Rule
from strategies.model.verdict import Finding, Report, Verdict

TAKES = ("R", "S(0)", "S(1)", "S(2)", "S(3+)", "P(sum)", "P(avg)", "P(max)", "P(min)", "P(product)", "other")
GIVES = ("R", "S", "P", "other")
WORST = (Verdict.UNSOUND, Verdict.SUSPECT, Verdict.MISSING, Verdict.SOUND, Verdict.UNTESTABLE)
"""What a cell shows is the first of these that it holds."""
_RULE = re.compile(r"[^\s,()]+\([^()]*\)|[^\s,()]+")


@dataclass(frozen=True, slots=True)
class Cell:
    """The rules of one overload, or family, under one placement: the worst verdict, its count, and all counts."""

    column: str
    worst: Verdict
    count: int
    words: str


@dataclass(frozen=True, slots=True)
class Row:
    """An overload or a family.  `cells` has one for each column, None where no rule stands; `why` if it has none.

    `crashed` counts samples on which the tool, or torch itself, failed.
    """

    name: str
    cells: tuple[Cell | None, ...]
    counts: Mapping[Verdict, int]
    why: str = ""
    crashed: int = 0

    @property
    def bad(self) -> int:
        return sum(self.counts.get(verdict, 0) for verdict in WORST[:3])

    @property
    def rules(self) -> int:
        return sum(self.counts.values())

    @property
    def verdicts(self) -> str:
        """The words for a filter: `unsound sound crashed`, or `none` where there is neither rule nor crash."""
        words = [v.value for v in WORST if self.counts.get(v)] + [Verdict.CRASHED.value] * bool(self.crashed)
        return " ".join(words) or "none"


@dataclass(frozen=True, slots=True)
class Family:
    """Overloads of one name, those with findings first; `head` sums them up."""

    head: Row
    rows: tuple[Row, ...]


def families(ops: Iterable[str], lines: Sequence[Line], report: Report) -> tuple[Family, ...]:
    """Every overload of the plan, and those that findings speak of, by family; those with findings first."""
    ruled = _ruled(lines, report)
    whys = _whys(lines)
    crashed = Counter(crash.op for crash in report.crashed)
    grouped: dict[str, list[str]] = defaultdict(list)
    for op in sorted({*ops, *ruled}):
        grouped[family_of(op)].append(op)
    made = []
    for name, members in grouped.items():
        rows = [_row(op, ruled.get(op, {}), whys.get(op, ""), crashed[op]) for op in members]
        every = {rule: verdict for op in members for rule, verdict in ruled.get(op, {}).items()}
        made.append(
            Family(
                _row(name, every, "", sum(row.crashed for row in rows)),
                tuple(sorted(rows, key=lambda row: (-row.bad, row.name))),
            )
        )
    return tuple(sorted(made, key=lambda family: (-family.head.bad, family.head.name)))


def family_of(op: str) -> str:
    """What in-place, foreach and backward overloads of one op have in common.

    >>> [family_of(op) for op in ("aten.add_.Tensor", "aten._foreach_add.List", "my.scale.default")]
    ['add', 'add', 'my.scale']
    """
    space, packet = op.split(".")[:2]
    name = packet.strip("_").removeprefix("foreach_").removesuffix("_backward").strip("_") or packet
    return name if space == "aten" else f"{space}.{name}"


def taken(placements: Iterable[str]) -> tuple[str, ...]:
    """The columns in which a rule stands by what it takes: R only where it takes nothing else.

    >>> taken(["S(1)", "R"]), taken(["R", "R"]), taken(["S(7)"]), taken([])
    (('S(1)',), ('R',), ('S(3+)',), ())
    """
    found = list(dict.fromkeys(column_of(p) for p in placements))
    return tuple(column for column in found if column != "R" or len(found) == 1)


def given(placements: Iterable[str]) -> tuple[str, ...]:
    """The same by what it gives, with all dims as one and all reductions as one."""
    found = dict.fromkeys(c if c in ("R", "other") else c[0] for c in map(column_of, placements))
    return tuple(column for column in found if column != "R" or len(found) == 1)


def column_of(placement: str) -> str:
    """The column of one placement as it is printed."""
    if placement in TAKES:
        return placement
    return "S(3+)" if re.fullmatch(r"S\(\d+\)", placement) else "other"


def columns_of(rule: Rule) -> tuple[str, ...]:
    """The columns of a finding's rule by what it takes, for a filter."""
    return taken(short(p) for p in rule.inputs if p is not None)


def _ruled(lines: Sequence[Line], report: Report) -> dict[str, dict[str, Verdict]]:
    """Each rule of one op on one axis by its text, with its verdict; a program counts to its op under its title."""
    verdicts: dict[str, Verdict] = {}
    for line in of_kind(lines, "unit"):
        verdicts |= dict.fromkeys(line.get("sound", ()), Verdict.SOUND)
    for line in of_kind(lines, "settled"):
        if line["verdict"] == "cleared":
            verdicts[line["rule"]] = Verdict.SOUND
    verdicts |= dict.fromkeys((rule for rule, _ in report.untestable), Verdict.UNTESTABLE)
    verdicts |= {_told(finding): finding.verdict for finding in report.findings}
    ruled: dict[str, dict[str, Verdict]] = defaultdict(dict)
    for rule, verdict in verdicts.items():
        op = rule.partition(": ")[0].partition(" on ")[0]
        ruled[op][rule] = verdict
    return dict(ruled)


def _told(finding: Finding) -> str:
    """A finding's name, which for a program begins with its op too: then what its op alone takes is said first."""
    return f"{finding.rule} @ {finding.title}" if finding.title else finding.name


def _whys(lines: Sequence[Line]) -> dict[str, str]:
    """For each overload the first reason for which samples of it were skipped."""
    whys: dict[str, str] = {}
    for line in of_kind(lines, "unit"):
        for why in line.get("skipped", {}):
            whys.setdefault(line["unit"].split(" ")[0], why)
    return whys


def _row(name: str, rules: Mapping[str, Verdict], why: str, crashed: int) -> Row:
    cells: dict[tuple[bool, str], Counter[Verdict]] = defaultdict(Counter)
    for rule, verdict in rules.items():
        takes, _, gives = rule.partition(" @ ")[0].partition(": ")[2].rpartition(" -> ")
        for column in taken(_RULE.findall(takes)):
            cells[True, column][verdict] += 1
        for column in given(_RULE.findall(gives)):
            cells[False, column][verdict] += 1
    made = [_cell(column, cells.get((True, column))) for column in TAKES]
    made += [_cell(column, cells.get((False, column))) for column in GIVES]
    return Row(name, tuple(made), Counter(rules.values()), "" if rules else why or "no rule was tried", crashed)


def _cell(column: str, counts: Counter[Verdict] | None) -> Cell | None:
    if not counts:
        return None
    worst = next(verdict for verdict in WORST if counts[verdict])
    words = ", ".join(f"{counts[verdict]} {verdict.value}" for verdict in WORST if counts[verdict])
    return Cell(column, worst, counts[worst], words)
