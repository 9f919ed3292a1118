"""The page of a comparison: the tree of modules, one table a step, each cell coloured by what became of its values."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from localtensor._util.html_page import render_page

if TYPE_CHECKING:
    from localtensor.testing.compare.comparison import ComparedValue, Comparison

COLUMNS = ("input", "output", "gradient", "parameters", "their gradients", "after the step")
LOOKS = {"first": ("\u2715", "unsound"), "differs": ("\u2260", "suspect"), "not compared": ("?", "untestable"),
         "not reached": ("\u2013", "untestable"), "equal": ("\u2713", "sound")}  # fmt: skip
"""The sign and the colour of each state, the worst first; `first` is where the programs differ first."""
_COLUMN_OF = {
    "input": 0, "output": 1, "loss": 1, "gradient of the output": 2, "parameter": 3, "buffer": 3, "gradient": 4,
    "gradient in the step": 4, "parameter after the step": 5,
}  # fmt: skip


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
