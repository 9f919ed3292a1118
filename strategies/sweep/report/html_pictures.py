"""The heat map: for each overload, how its rules fare by the placements that they take and give."""

from __future__ import annotations

import cmath
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from localtensor.layout import short
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


# The picture of ranks as boxes: who holds what before and after, and which values are wrong.
#
# It is read off the text of strategies/programs/run/verdict.py, which is what a journal keeps.

_PART = re.compile(r"(argument|result) (\d+), (.*)")
_HELD = re.compile(r"  (rank \d+|together)  (.*)")
_WANT = re.compile(r"(?:the op gives|  and       ) (.*)")
_TENSOR = re.compile(r"\[(.*)\] of shape \(([\d, ]*)\)", re.DOTALL)
_FAILS = re.compile(r"(?:the process of )?rank ([\d, ]+) (?:raises|dies)|(every rank) raises")
_MISSHAPEN = re.compile(r"rank (\d+) holds shape")
OP = "the op gives"


@dataclass(frozen=True, slots=True)
class Value:
    """An element as it was printed; `wrong` if the op gives another."""

    text: str
    wrong: bool = False


@dataclass(frozen=True, slots=True)
class Box:
    """What one rank holds, or all of them together.  `shape` is None for what is no tensor: then `note` says it.

    `more` says that elements are left out; `wrong` marks the box as a whole.
    """

    who: str
    values: tuple[Value, ...] = ()
    shape: tuple[int, ...] | None = None
    more: bool = False
    note: str = ""
    wrong: bool = False

    @property
    def columns(self) -> int:
        """How many elements stand side by side: the last dim."""
        return max(1, self.shape[-1]) if self.shape and len(self.shape) > 1 else max(1, len(self.values))

    @property
    def size(self) -> str:
        return "" if self.shape is None else " × ".join(map(str, self.shape)) or "scalar"


@dataclass(frozen=True, slots=True)
class TensorPicture:
    """One tensor over all ranks: `argument 0` held as `S(0)`; `what` is "argument", "result" or "op"."""

    what: str
    title: str
    placement: str
    boxes: tuple[Box, ...]


def parts(picture: str, reason: str = "") -> tuple[TensorPicture, ...]:
    """The picture's tensors in order, each result with what the op gives; empty if it is no such text.

    >>> text = chr(10).join(("argument 0, R", "  rank 0  [1] of shape (1,)", "the op gives [1] of shape (1,)"))
    >>> [part.title for part in parts(text)]
    ['argument 0', 'the op gives']
    """
    found: list[tuple[str, str, str, list[Box]]] = []
    wants: list[Box] = []
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
        drawn = [replace(part, boxes=tuple(_fallen(box, reason) for box in part.boxes)) for part in drawn]
        return (*drawn, *(TensorPicture("op", OP, "", (want,)) for want in wants))
    bad = _MISSHAPEN.match(reason) if len(results) == 1 else None
    shown = {part.title: _compared(part, want, f"rank {bad[1]}" if bad else "") for part, want in zip(results, wants)}
    return tuple(shown.get(part.title, part) for part in drawn)


def _box(who: str, text: str) -> Box:
    found = _TENSOR.fullmatch(text)
    if not found:
        return Box(who, note=text, wrong=text == "could not be assembled")
    words = found[1].split(", ") if found[1] else []
    more = words[-1:] == ["..."]
    shape = tuple(int(size) for size in found[2].split(",") if size.strip())
    return Box(who, tuple(map(Value, words[:-1] if more else words)), shape, more)


def _fallen(box: Box, reason: str) -> Box:
    """The box with a mark if its rank is one of those that raise or die."""
    found = _FAILS.match(reason)
    if not found or not (found[2] or box.who.removeprefix("rank ") in re.split(r"\D+", found[1])):
        return box
    return replace(box, wrong=True, note="fails here")


def _compared(part: TensorPicture, want: Box, misshapen: str) -> TensorPicture:
    """The part with its wrong values marked, and the rank of a wrong shape, and what the op gives beside it."""
    boxes = []
    pieces = [box for box in part.boxes if box.who != "together"]
    spots = _spots(part.placement, pieces, want)
    for box in part.boxes:
        if box.who == "together":
            boxes.append(_marked(box, want, range(len(box.values)), whole=True))
        elif box.who == misshapen:
            boxes.append(replace(box, wrong=True, note="this shape is wrong"))
        elif spots is not None:
            boxes.append(_marked(box, want, spots[pieces.index(box)]))
        else:
            boxes.append(box)
    return replace(part, boxes=(*boxes, want))


def _marked(box: Box, want: Box, spots: Sequence[int], *, whole: bool = False) -> Box:
    """Its elements against those of `want` at these places; as a whole if even the shape is another."""
    if whole and box.shape != want.shape:
        return replace(box, wrong=True)
    values = tuple(
        replace(value, wrong=spot < len(want.values) and not same(value.text, want.values[spot].text))
        for value, spot in zip(box.values, spots)
    )
    return replace(box, values=values)


def same(one: str, other: str) -> bool:
    """Whether two printed numbers are one to some four digits, NaN being itself.

    >>> same("nan", "nan"), same("1+0j", "1"), same("2", "2.1"), same("True", "False")
    (True, True, False, False)
    """
    if one == other:
        return True
    try:
        a, b = complex(one), complex(other)
    except ValueError:
        return False
    return cmath.isclose(a, b, rel_tol=1e-4, abs_tol=1e-6)


def _spots(placement: str, pieces: Sequence[Box], want: Box) -> list[list[int]] | None:
    """For each rank where its elements are in the whole; None unless the pieces are R or S and fit together."""
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


def _places(box: Box, whole: Sequence[int], dim: int, start: int) -> list[int]:
    """The place in the whole, counted in order, of each element of this piece."""
    inner = math.prod(whole[dim + 1 :])
    wide = (box.shape or ())[dim] * inner
    return [i // wide * whole[dim] * inner + start * inner + i % wide for i in range(len(box.values))] if wide else []
