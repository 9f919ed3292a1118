"""`Comparison`: what was compared, in order, with the layout of each value; as text, as values for JSON, and as a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localtensor.testing.compare.divergence import ONE_DEVICE, Divergence, Findings, Sides
from localtensor.testing.compare.page import page_of
from localtensor.testing.compare.suspects import CloserLook
from localtensor.testing.compare.watch import Key

MOST_COLLECTIVES = 8  # lines of collectives that a report of a divergence prints
EQUAL, DIFFERS, NOT_COMPARED, NOT_REACHED = "equal", "differs", "not compared", "not reached"


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
    what the program was compared with: one device, or a script.
    """

    mesh: Mapping[str, int]
    values: tuple[ComparedValue, ...]
    divergence: Divergence | None
    calls: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    collectives: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    reference: str = ONE_DEVICE

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
                lines.append(f"  assembles as {d.layout}")
            before = [one for one in self._before() if one.state == EQUAL][-1:]
            lines += [f"  right before it: {one.key} as {one.layout}" for one in before]
            lines += [f"  calls     {one}" for one in self.collectives[:MOST_COLLECTIVES]]
            more = len(self.collectives) - MOST_COLLECTIVES
            lines += [f"            and {more} more lines"] if more > 0 else []
        else:
            lines.append(f"compare on {mesh}: the parallel program computes what {self.reference} computes")
        states, differs = Counter(one.state for one in self.values), ""
        if self.divergence is not None:
            differs = f"; different: {states[DIFFERS]}; not reached: {states[NOT_REACHED]}"
        lines.append(f"  compared  {states[EQUAL]} values{differs}; not compared: {states[NOT_COMPARED]}")
        reasons = Counter(one.reason for one in self.values if one.state == NOT_COMPARED)
        lines += [f"    {count} of which {reason}" for reason, count in reasons.most_common(4)]
        return "\n".join([*lines, *(f"  note      {note}" for note in self.notes)])

    def _before(self) -> Sequence[ComparedValue]:
        key = self.divergence.key if self.divergence is not None else None
        at = next((i for i, one in enumerate(self.values) if one.key == key), len(self.values))
        return self.values[:at]


def _key_json(key: Key) -> dict[str, Any]:
    return {"step": key.step, "kind": key.kind, "name": key.name, "call": key.call, "leaf": key.leaf, "value": str(key)}


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
    return Comparison(
        dict(sides.mesh), tuple(values), found, calls, setup, tuple(collectives), tuple(notes), sides.name
    )
