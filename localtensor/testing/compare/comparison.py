"""`Comparison`: what was compared, in order, with the layout of each value; as text, as values for JSON, and as a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from localtensor._util.events import Call
from localtensor._util.html_page import render_page
from localtensor.testing.compare.divergence import ONE_DEVICE, Divergence, Findings, Sides
from localtensor.testing.compare.find_layout import layout_of_placements
from localtensor.testing.compare.suspects import CloserLook
from localtensor.testing.compare.watch import ARGUMENTS, DROPOUT, Key
from localtensor.testing.compare_dropout import drop_alike

MOST_COLLECTIVES = 8  # lines of collectives that a report of a divergence prints
NO_EVIDENCE = ("parameter", "buffer", "input", DROPOUT)
"""Values with which a program starts: that they are equal does not say that it computes the same."""
NOT_FINITE = "nothing but NaN or infinity in both"
FINITE = "Compare from parameters and inputs that give numbers."
EQUAL, DIFFERS, NOT_COMPARED, NOT_REACHED = "equal", "differs", "not compared", "not reached"

COLUMNS = ("input", "output", "gradient", "parameters", "their gradients", "after the step")
LOOKS = {"first": ("\u2715", "unsound"), "differs": ("\u2260", "suspect"), "not compared": ("?", "untestable"),
         "not reached": ("\u2013", "untestable"), "equal": ("\u2713", "sound")}  # fmt: skip
"""The sign and the colour of each state, the worst first; `first` is where the programs differ first."""
_COLUMN_OF = {
    "input": 0, DROPOUT: 0, "output": 1, "loss": 1, "gradient of the output": 2, "parameter": 3, "buffer": 3, "gradient": 4,
    "gradient in the step": 4, "parameter after the step": 5,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ComparedValue:
    """A value of the reference: equal under a layout, different, not compared for a reason, or after too many that differ."""

    key: Key
    state: str
    layout: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Comparison:
    """What was compared, and with which layout; what was not, and why; the first divergence, or None.

    `values` are all of them, in the order in which the reference computes them.  `calls` are the calls that go wrong first
    inside, with the user's lines; `setup` those that made the module or the parameter parallel.  `collectives` are those of
    the first rank, by line.  `notes` say what was changed for the comparison (dropout that was switched off).  `reference` is
    what the program was compared with: one device, or a script.  `collective_before` is the last collective before those calls.
    """

    mesh: Mapping[str, int]
    values: tuple[ComparedValue, ...]
    divergence: Divergence | None
    calls: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    collectives: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    reference: str = ONE_DEVICE
    collective_before: str = ""

    @property
    def layouts(self) -> dict[str, str]:
        """The layout of each value that is equal, such as "S(0), R", by its name."""
        return {str(one.key): one.layout for one in self.values if one.state == EQUAL}

    @property
    def not_compared(self) -> dict[str, str]:
        """Why a value was not compared, by its name."""
        return {str(one.key): one.reason for one in self.values if one.state == NOT_COMPARED}

    def as_json(self) -> dict[str, Any]:
        """What was compared, and the divergence, as values that json writes; strategies/schema/compare.json describes them."""
        found = self.divergence
        divergence = None if found is None else {
            **_key_json(found.key), "place": None if found.place is None else str(found.place),
            "layout": found.layout, "because": found.what, "values": found.values,
            "expected": None if found.expected is None else found.expected.layout,
            "expected_because": None if found.expected is None else found.expected.reason,
            "calls": list(self.calls), "setup": list(self.setup),
        }  # fmt: skip
        values = [
            {**_key_json(one.key), "state": one.state, "layout": one.layout or None, "reason": one.reason or None}
            for one in self.values
        ]
        return {
            "version": 1, "reference": self.reference, "mesh": dict(self.mesh), "equal": found is None,
            "divergence": divergence, "values": values, "collectives": list(self.collectives),
            "notes": list(self.notes), "text": str(self),
        }  # fmt: skip

    def as_html(self) -> str:
        """A page in one file: the divergence, and the tree of modules coloured by it, step by step."""
        return page_of(self)

    def write_html(self, path: str | Path) -> None:
        """Writes the page to a file."""
        Path(path).write_text(self.as_html(), encoding="utf-8")

    def __str__(self) -> str:
        mesh = ", ".join(f"{name}={size}" for name, size in self.mesh.items())
        lines = []
        if self.divergence is not None:
            d = self.divergence
            lines.append(f"compare on {mesh}: the parallel program differs from {self.reference}")
            lines.append(f"  first at  {d.key}{f', {d.place}' if d.place else ''}")
            lines += [f"  call      {one}" for one in self.calls]
            lines += [f"  set up    {one}" for one in self.setup]
            lines.append(f"  because   {d.what}")
            lines += [f"  values    {d.values}"] if d.values else []
            if d.layout:
                lines.append(f"  assembles as {d.expected or d.layout}")
            before = [one for one in self._before() if one.state == EQUAL][-1:]
            lines += [f"  right before it: {one.key} as {one.layout}" for one in before]
            lines += [f"  after     {self.collective_before}"] if self.collective_before else []
            lines += [f"  calls     {one}" for one in self.collectives[:MOST_COLLECTIVES]]
            more = len(self.collectives) - MOST_COLLECTIVES
            lines += [f"            and {more} more lines"] if more > 0 else []
        else:
            lines.append(f"compare on {mesh}: the parallel program computes what {self.reference} computes")
        states, differs = Counter(one.state for one in self.values), ""
        if self.divergence is not None:
            differs = f"; different: {states[DIFFERS]}; not reached: {states[NOT_REACHED]}"
        lines.append(
            f"  compared  {states[EQUAL] + states[DIFFERS]} values{differs}; not compared: {states[NOT_COMPARED]}"
        )
        reasons = Counter(one.reason for one in self.values if one.state == NOT_COMPARED)
        lines += [f"    {count} of which {reason}" for reason, count in reasons.most_common(4)]
        return "\n".join([*lines, *(f"  note      {note}" for note in self.notes)])

    def _before(self) -> Sequence[ComparedValue]:
        key = self.divergence.key if self.divergence is not None else None
        at = next((i for i, one in enumerate(self.values) if one.key == key), len(self.values))
        return self.values[:at]


def _key_json(key: Key) -> dict[str, Any]:
    return {"step": key.step, "kind": key.kind, "name": key.name, "call": key.call, "leaf": key.leaf, "value": str(key)}


def nothing_compared(sides: Sides, findings: Findings) -> str:
    """Why no number was compared that a program computes; empty if one was."""
    seen = sides.reference.seen
    arguments = (key for key in findings.layouts if key.name == ARGUMENTS and sides.reference.writes_to(key))
    computed = [*(key for key in findings.layouts if key.kind not in NO_EVIDENCE), *arguments]
    if not computed:
        return "; ".join(dict.fromkeys(findings.not_compared.values())) or "no values"
    values = [seen[key].value for key in computed if not key.kind.startswith("optimizer's")]
    if values and not any(bool(x.isfinite().any()) or not x.numel() for x in values):
        return NOT_FINITE
    return ""


def notes_of_values(sides: Sides, findings: Findings) -> list[str]:
    """What is to be known of the values: parameters without a counterpart, and NaN in both, which says little."""
    seen = sides.reference.seen
    names = {key.name: None for key in seen if key.kind == "parameter"}
    there = {key.name: None for rank in sides.ranks for key in rank.seen if key.kind == "parameter"}
    lost, more = ([name for name in a if name not in b] for a, b in ((names, there), (there, names)))
    notes = []
    if lost:
        tail = f"; the ranks have {_some(more)}, which {sides.name} has not" if more else ""
        notes.append(f"no rank has a parameter called {_some(lost)}{tail}")
    notes += sides.notes
    if sides.declared is not None:
        dtype = str(sides.declared).removeprefix("torch.")
        notes.append(f"the ranks compute in {dtype} by the policy of FSDP: values are compared to within its rounding")
    notes += _dropout_notes(sides, findings)
    if sides.reference.draws:
        notes.append(f"{sides.name} draws random numbers in the steps; ranks that have other rows draw others")
    notes += list(_placement_notes(sides, findings))[:1]
    nan = [key for key in findings.layouts if key in seen and not bool(seen[key].value.isfinite().all())]
    return [*notes, *(f"{key} has NaN or infinity in both, and so has what comes of it" for key in nan[:1])]


def _dropout_notes(sides: Sides, findings: Findings) -> Iterator[str]:
    """Which dropouts were off, and which ranks would have dropped the same elements of different parts."""
    every = {key: one.drawn for key, one in sides.reference.seen.items() if one.drawn is not None}
    yield from dict.fromkeys(f"dropout of {key.name} is off" for key, one in every.items() if not one.function)
    functions = sorted({one.function for one in every.values() if one.function})
    yield from (f"dropout by the function {name} is off" for name in functions)
    axes: dict[str, str] = {}
    for key in every if all(rank.seeds for rank in sides.ranks) else ():
        drawn = [x.drawn for rank in sides.ranks if (x := rank.seen.get(key)) is not None and x.drawn is not None]
        layout = findings.layouts.get(key)
        if layout is None or len(drawn) < len(sides.ranks):
            continue
        parts = [axis for axis, one in enumerate(layout.axes) if one.kind == "S"]
        axes |= {axis: str(key) for axis in drop_alike(drawn, list(sides.mesh.items()), parts) if axis not in axes}
    for axis, text in axes.items():
        yield f"ranks along {axis} drop the same elements of different parts: they have one seed ({text})"


def _placement_notes(sides: Sides, findings: Findings) -> Iterator[str]:
    """DTensors that assemble to the right value, but not as their placements say."""
    for key, layout in findings.layouts.items():
        one = sides.ranks[0].seen.get(key)
        for said in () if one is None else layout_of_placements(one, len(layout.axes)):
            if said.axes != layout.axes:
                yield f"{key} assembles as {layout}, and its placements say {said}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def comparison_of(
    sides: Sides, findings: Findings, look: CloserLook | None, collectives: Sequence[str], notes: Sequence[str]
) -> Comparison:
    """The result of a comparison, from what was found."""
    values = []
    differing = {*findings.differing, *([look.divergence.key] if look is not None else [])}
    for key in [*sides.reference.seen, *(key for key in findings.not_compared if key not in sides.reference.seen)]:
        if key in differing:
            values.append(ComparedValue(key, DIFFERS))
        elif key in findings.layouts:
            values.append(ComparedValue(key, EQUAL, str(findings.layouts[key])))
        elif key in findings.not_compared:
            values.append(ComparedValue(key, NOT_COMPARED, reason=findings.not_compared[key]))
        else:
            values.append(ComparedValue(key, NOT_REACHED))
    found, calls, setup = (None, (), ()) if look is None else (look.divergence, look.calls, look.setup)
    before = "" if look is None else look.collective
    return Comparison(
        dict(sides.mesh), tuple(values), found, calls, setup, tuple(collectives), tuple(notes), sides.name, before
    )


def collective_lines(mesh: Mapping[str, int], calls: Sequence[Call]) -> tuple[str, ...]:
    """The collectives of the first rank by the user's line, in the order of their first call.

    >>> from localtensor._util.events import Place
    >>> call = Call(0, "all_reduce", "1", (0, 2), 0, op="sum", place=Place("train.py", 31, "step"))
    >>> collective_lines({"dp": 2, "tp": 2}, [call, call])
    ('all_reduce sum over dp, train.py:31 in step, 2 times',)
    """
    sizes = tuple(mesh.values())
    ranks = torch.arange(torch.Size(sizes).numel()).reshape(sizes)
    axes = {tuple(ranks.movedim(i, 0).reshape(sizes[i], -1)[:, 0].tolist()): name for i, name in enumerate(mesh)}
    seen = Counter(
        (call.kind, call.op, call.group, call.place) for call in calls if call.rank == 0 and call.place is not None
    )
    return tuple(
        f"{kind}{f' {op}' if op else ''} over {axes.get(group, f'ranks {group}')}, {place}{f', {n} times' if n > 1 else ''}"
        for (kind, op, group, place), n in seen.items()
    )


@dataclass(slots=True)
class Row:
    """A module in the tree: how deep it lies, and its values by column."""

    name: str
    depth: int
    cells: list[list[ComparedValue]] = field(default_factory=lambda: [[] for _ in COLUMNS])


def page_of(done: Comparison) -> str:
    """The page, as text."""
    first = done.divergence.key if done.divergence is not None else None
    steps: dict[int, dict[str, Row]] = {}
    for one in done.values:
        kind = one.key.kind
        column = _COLUMN_OF.get(kind, 5)
        module = one.key.name.rpartition(".")[0] if column >= 3 else one.key.name
        rows = steps.setdefault(one.key.step, {})
        for name in _path(module):
            rows.setdefault(name, Row(name, name.count(".") + bool(name)))
        rows[module].cells[column].append(one)

    def state(values: list[ComparedValue]) -> str:
        found = {"first" if one.key == first else one.state for one in values}
        return next((look for look in LOOKS if look in found), "")

    ordered = [(step, sorted(rows.values(), key=lambda row: _order(row.name))) for step, rows in sorted(steps.items())]
    return render_page(
        Path(__file__).parents[2] / "templates" / "compare.html.j2",
        done=done, steps=ordered, columns=COLUMNS, looks=LOOKS, state=state, first=first,
        mesh=", ".join(f"{name}={size}" for name, size in done.mesh.items()),
        counts={look: sum(one.state == look for one in done.values) for look in LOOKS if look != "first"},
    )  # fmt: skip


def _path(name: str) -> list[str]:
    """The modules around a module, and itself.

    >>> _path("layers.0.up")
    ['', 'layers', 'layers.0', 'layers.0.up']
    """
    parts = name.split(".") if name else []
    return [".".join(parts[:count]) for count in range(len(parts) + 1)]


def _order(name: str) -> list[tuple[int, str]]:
    """Numbers in names count as such: layer 10 comes after layer 9."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")] if name else []
