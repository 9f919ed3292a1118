"""The heat map of the HTML report, and the picture of a finding's ranks as boxes.

The heat map shows for each overload the verdicts on its rules by their input and output placements.  A picture shows
the pieces of each rank before and after the op, and marks wrong values.  It is parsed from the text of
`strategies.programs.run.verdict`, which is what a journal keeps.
"""

from __future__ import annotations

import cmath
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from localtensor.layout import short
from strategies.base.journal import Line, lines_of_kind
from strategies.model.rule import Rule
from strategies.model.verdict import Report, Verdict

TAKES = ("R", "S(0)", "S(1)", "S(2)", "S(3+)", "P(sum)", "P(avg)", "P(max)", "P(min)", "P(product)", "other")
GIVES = ("R", "S", "P", "other")
WORST = (Verdict.UNSOUND, Verdict.REFUSED, Verdict.SUSPECT, Verdict.MISSING, Verdict.SOUND, Verdict.UNTESTABLE)
"""A cell shows the first of these that it holds."""
_RULE = re.compile(r"[^\s,()]+\([^()]*\)|[^\s,()]+")


@dataclass(frozen=True, slots=True)
class HeatmapCell:
    """The rules of one overload, or family, under one placement: the worst verdict, its count, and all counts."""

    column: str
    worst: Verdict
    count: int
    words: str


@dataclass(frozen=True, slots=True)
class HeatmapRow:
    """An overload or a family.

    `cells` has one for each column, None where there is no rule.  `why` is the reason why there is no rule at all.
    `crashed` counts samples on which this tool or torch failed.
    """

    name: str
    cells: tuple[HeatmapCell | None, ...]
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
        """The words that a filter matches: `unsound sound crashed`, or `none` without rule or crash."""
        words = [v.value for v in WORST if self.counts.get(v)] + [Verdict.CRASHED.value] * bool(self.crashed)
        return " ".join(words) or "none"


@dataclass(frozen=True, slots=True)
class HeatmapFamily:
    """Overloads of one name, those with findings first; `head` is their total."""

    head: HeatmapRow
    rows: tuple[HeatmapRow, ...]


def families(ops: Iterable[str], lines: Sequence[Line], report: Report) -> tuple[HeatmapFamily, ...]:
    """Every overload of the plan, and of the findings, by family; families with findings first."""
    ruled = _verdicts_by_op(lines, report)
    whys = _skip_reasons(lines)
    crashed = Counter(crash.op for crash in report.crashed)
    grouped: dict[str, list[str]] = defaultdict(list)
    for op in sorted({*ops, *ruled}):
        grouped[family_of(op)].append(op)
    made = []
    for name, members in grouped.items():
        rows = [_row(op, ruled.get(op, {}), whys.get(op, ""), crashed[op]) for op in members]
        every = {rule: verdict for op in members for rule, verdict in ruled.get(op, {}).items()}
        head = _row(name, every, "", sum(row.crashed for row in rows))
        made.append(HeatmapFamily(head, tuple(sorted(rows, key=lambda row: (-row.bad, row.name)))))
    return tuple(sorted(made, key=lambda family: (-family.head.bad, family.head.name)))


def family_of(op: str) -> str:
    """The name that in-place, foreach and backward overloads of one op share.

    >>> [family_of(op) for op in ("aten.add_.Tensor", "aten._foreach_add.List", "my.scale.default")]
    ['add', 'add', 'my.scale']
    """
    space, packet = op.split(".")[:2]
    name = packet.strip("_").removeprefix("foreach_").removesuffix("_backward").strip("_") or packet
    return name if space == "aten" else f"{space}.{name}"


def input_columns(placements: Iterable[str]) -> tuple[str, ...]:
    """The columns of a rule by its input placements; R only where all of them are R.

    >>> input_columns(["S(1)", "R"]), input_columns(["R", "R"]), input_columns(["S(7)"]), input_columns([])
    (('S(1)',), ('R',), ('S(3+)',), ())
    """
    found = list(dict.fromkeys(column_of(p) for p in placements))
    return tuple(column for column in found if column != "R" or len(found) == 1)


def output_columns(placements: Iterable[str]) -> tuple[str, ...]:
    """The columns of a rule by its output placements: one for all dims, and one for all reductions."""
    found = dict.fromkeys(c if c in ("R", "other") else c[0] for c in map(column_of, placements))
    return tuple(column for column in found if column != "R" or len(found) == 1)


def column_of(placement: str) -> str:
    """The column of one printed placement."""
    if placement in TAKES:
        return placement
    return "S(3+)" if re.fullmatch(r"S\(\d+\)", placement) else "other"


def columns_of(rule: Rule) -> tuple[str, ...]:
    """The columns of a finding's rule by its input placements, for a filter."""
    return input_columns(short(p) for p in rule.inputs if p is not None)


def _verdicts_by_op(lines: Sequence[Line], report: Report) -> dict[str, dict[str, Verdict]]:
    """For each overload the verdicts on its rules by their text.  A program counts to its op, under its title."""
    verdicts: dict[str, Verdict] = {}
    for line in lines_of_kind(lines, "unit"):
        verdicts |= dict.fromkeys(line.get("sound", ()), Verdict.SOUND)
    for line in lines_of_kind(lines, "settled"):
        if line["verdict"] == "cleared":
            verdicts[line["rule"]] = Verdict.SOUND
    verdicts |= dict.fromkeys((rule for rule, _ in report.untestable), Verdict.UNTESTABLE)
    for finding in report.findings:  # a program's text begins with its op's rule, so that it begins with the op too
        verdicts[f"{finding.rule} @ {finding.title}" if finding.title else finding.name] = finding.verdict
    by_op: dict[str, dict[str, Verdict]] = defaultdict(dict)
    for rule, verdict in verdicts.items():
        by_op[rule.partition(": ")[0].partition(" on ")[0]][rule] = verdict
    return dict(by_op)


def _skip_reasons(lines: Sequence[Line]) -> dict[str, str]:
    """For each overload the first reason for which samples of it were skipped."""
    whys: dict[str, str] = {}
    for line in lines_of_kind(lines, "unit"):
        for why in line.get("skipped", {}):
            whys.setdefault(line["unit"].split(" ")[0], why)
    return whys


def _row(name: str, rules: Mapping[str, Verdict], why: str, crashed: int) -> HeatmapRow:
    cells: dict[tuple[bool, str], Counter[Verdict]] = defaultdict(Counter)
    for rule, verdict in rules.items():
        takes, _, gives = rule.partition(" @ ")[0].partition(": ")[2].rpartition(" -> ")
        for column in input_columns(_RULE.findall(takes)):
            cells[True, column][verdict] += 1
        for column in output_columns(_RULE.findall(gives)):
            cells[False, column][verdict] += 1
    made = [_cell(column, cells.get((True, column))) for column in TAKES]
    made += [_cell(column, cells.get((False, column))) for column in GIVES]
    return HeatmapRow(name, tuple(made), Counter(rules.values()), "" if rules else why or "no rule was tried", crashed)


def _cell(column: str, counts: Counter[Verdict] | None) -> HeatmapCell | None:
    if not counts:
        return None
    worst = next(verdict for verdict in WORST if counts[verdict])
    words = ", ".join(f"{counts[verdict]} {verdict.value}" for verdict in WORST if counts[verdict])
    return HeatmapCell(column, worst, counts[worst], words)


_PART = re.compile(r"(argument|gradient|result) (\d+), (.*)")
_HELD = re.compile(r"  (rank \d+|whole|together) +(.*)")
_WANT = re.compile(r"(?:the op gives|  and       ) (.*)")
_TENSOR = re.compile(r"\[(.*)\] of shape \(([\d, ]*)\)", re.DOTALL)
_FAILS = re.compile(r"(?:the process of )?rank ([\d, ]+) (?:raises|dies)|(every rank) raises")
_MISSHAPEN = re.compile(r"rank (\d+) holds shape")
OP = "the op gives"


@dataclass(frozen=True, slots=True)
class PrintedElement:
    """A printed element; `wrong` if the op gives another."""

    text: str
    wrong: bool = False


@dataclass(frozen=True, slots=True)
class RankBox:
    """The piece of one rank, or the result of all ranks together.

    `shape` is None for a value that is no tensor: then `note` is its text.  `more`: elements are left out.  `wrong`
    marks the box as a whole.
    """

    who: str
    values: tuple[PrintedElement, ...] = ()
    shape: tuple[int, ...] | None = None
    more: bool = False
    note: str = ""
    wrong: bool = False

    @property
    def columns(self) -> int:
        """Elements in a row: the size of the last dim."""
        return max(1, self.shape[-1]) if self.shape and len(self.shape) > 1 else max(1, len(self.values))

    @property
    def size(self) -> str:
        return "" if self.shape is None else " × ".join(map(str, self.shape)) or "scalar"


@dataclass(frozen=True, slots=True)
class TensorPicture:
    """One tensor over all ranks: `argument 0` placed as `S(0)`; `what` is "argument", "gradient", "result" or "op"."""

    what: str
    title: str
    placement: str
    boxes: tuple[RankBox, ...]


def parse_picture(picture: str, reason: str = "") -> tuple[TensorPicture, ...]:
    """The picture's tensors in order, each result beside the op's own; empty for any other text.

    >>> text = chr(10).join(("argument 0, R", "  rank 0  [1] of shape (1,)", "the op gives [1] of shape (1,)"))
    >>> [part.title for part in parse_picture(text)]
    ['argument 0', 'the op gives']
    """
    found: list[tuple[str, str, str, list[RankBox]]] = []
    wants: list[RankBox] = []
    for line in picture.splitlines():
        if part := _PART.fullmatch(line):
            found.append((part[1], f"{part[1]} {part[2]}", part[3], []))
        elif (held := _HELD.fullmatch(line)) and found:
            found[-1][3].append(_box(held[1], held[2]))
        elif want := _WANT.fullmatch(line):
            wants.append(_box(OP, want[1]))
        else:
            return ()
    drawn = [TensorPicture(what, title, placement, tuple(boxes)) for what, title, placement, boxes in found]
    results = [part for part in drawn if part.what == "result"]
    if not results:
        drawn = [replace(part, boxes=tuple(_mark_failed(box, reason) for box in part.boxes)) for part in drawn]
        return (*drawn, *(TensorPicture("op", OP, "", (want,)) for want in wants))
    bad = _MISSHAPEN.match(reason) if len(results) == 1 else None
    shown = {part.title: _mark_wrong(part, want, f"rank {bad[1]}" if bad else "") for part, want in zip(results, wants)}
    return tuple(shown.get(part.title, part) for part in drawn)


def _box(who: str, text: str) -> RankBox:
    found = _TENSOR.fullmatch(text)
    if not found:
        return RankBox(who, note=text, wrong=text == "could not be assembled")
    words = found[1].split(", ") if found[1] else []
    more = words[-1:] == ["..."]
    shape = tuple(int(size) for size in found[2].split(",") if size.strip())
    return RankBox(who, tuple(map(PrintedElement, words[:-1] if more else words)), shape, more)


def _mark_failed(box: RankBox, reason: str) -> RankBox:
    """The box with a mark if its rank is one of those that raise or die."""
    found = _FAILS.match(reason)
    if not found or not (found[2] or box.who.removeprefix("rank ") in re.split(r"\D+", found[1])):
        return box
    return replace(box, wrong=True, note="fails here")


def _mark_wrong(part: TensorPicture, want: RankBox, misshapen: str) -> TensorPicture:
    """The part with its wrong values and the rank of a wrong shape marked, and the op's result beside it."""
    boxes = []
    pieces = [box for box in part.boxes if box.who != "together"]
    spots = _spots(part.placement, pieces, want)
    for box in part.boxes:
        if box.who == "together":
            boxes.append(_mark_values(box, want, range(len(box.values)), whole=True))
        elif box.who == misshapen:
            boxes.append(replace(box, wrong=True, note="this shape is wrong"))
        elif spots is not None:
            boxes.append(_mark_values(box, want, spots[pieces.index(box)]))
        else:
            boxes.append(box)
    return replace(part, boxes=(*boxes, want))


def _mark_values(box: RankBox, want: RankBox, spots: Sequence[int], *, whole: bool = False) -> RankBox:
    """The box with its elements compared with those of `want` at these places; wrong as a whole if its shape differs."""
    if whole and box.shape != want.shape:
        return replace(box, wrong=True)
    values = tuple(
        replace(value, wrong=spot < len(want.values) and not same_number(value.text, want.values[spot].text))
        for value, spot in zip(box.values, spots)
    )
    return replace(box, values=values)


def same_number(one: str, other: str) -> bool:
    """Whether two printed numbers agree to four digits; NaN equals NaN.

    >>> same_number("nan", "nan"), same_number("1+0j", "1"), same_number("2", "2.1"), same_number("True", "False")
    (True, True, False, False)
    """
    if one == other:
        return True
    try:
        a, b = complex(one), complex(other)
    except ValueError:
        return False
    return cmath.isclose(a, b, rel_tol=1e-4, abs_tol=1e-6)


def _spots(placement: str, pieces: Sequence[RankBox], want: RankBox) -> list[list[int]] | None:
    """For each rank the places of its elements in the whole; None unless the pieces are R or S and fit together."""
    if want.shape is None or any(box.shape is None for box in pieces):
        return None
    if placement == "R":
        fits = all(box.shape == want.shape for box in pieces)
        return [list(range(len(box.values))) for box in pieces] if fits else None
    found = re.fullmatch(r"S\((\d+)\)", placement)
    dim = int(found[1]) if found else len(want.shape)
    shapes = [box.shape or () for box in pieces]
    if not all(_fit(shape, want.shape, dim) for shape in shapes) or sum(s[dim] for s in shapes) != want.shape[dim]:
        return None
    starts = [sum(s[dim] for s in shapes[:rank]) for rank in range(len(shapes))]
    return [_places(box, want.shape, dim, start) for box, start in zip(pieces, starts)]


def _fit(shape: Sequence[int], whole: Sequence[int], dim: int) -> bool:
    return len(shape) == len(whole) > dim and all(a == b for i, (a, b) in enumerate(zip(shape, whole)) if i != dim)


def _places(box: RankBox, whole: Sequence[int], dim: int, start: int) -> list[int]:
    """The flat index in the whole of each element of this piece."""
    inner = math.prod(whole[dim + 1 :])
    wide = (box.shape or ())[dim] * inner
    return [i // wide * whole[dim] * inner + start * inner + i % wide for i in range(len(box.values))] if wide else []
