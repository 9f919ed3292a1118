"""The result of the metric check of a cost function, as values and as text."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

from localtensor.layout import Spec, shape_text
from strategies.planner.steps.plan import PICO, bytes_text, placements_text


@dataclass(frozen=True, slots=True)
class Violation:
    """A violation of the triangle inequality: the path by the second spec costs less than the direct one."""

    src: Spec
    via: Spec
    dst: Spec
    direct: float
    first: float
    second: float

    @property
    def saved(self) -> float:
        return self.direct - (self.first + self.second)

    def text(self, unit: str) -> str:
        direct, around = amount_text(self.direct, unit), amount_text(self.first + self.second, unit)
        return f"{placements_text(self.src)} -> {placements_text(self.dst)} costs {direct}; by way of {placements_text(self.via)} {around}"


@dataclass(frozen=True, slots=True)
class InvalidAnswer:
    """One answer that no cost may give."""

    what: str
    where: str
    """The pair of specs, or the move."""
    got: float

    def text(self, unit: str) -> str:
        return f"{self.where} costs {amount_text(self.got, unit)}: {self.what}"


@dataclass(frozen=True, slots=True)
class MetricReport:
    """The result for all triples of these specs.

    A cost need not be symmetric: R to S(0) is a copy, and the way back is an all-gather.
    """

    cost: str
    unit: str
    """`s`, `ps`, `bytes`, or empty for any other."""
    specs: tuple[Spec, ...]
    triples: int
    """0 if the answers were such that no plan could be searched by them."""
    broken: int
    """Triples that violate the triangle inequality."""
    walls: int
    """Of these, those with an infinite direct cost, though there is a path."""
    worst: tuple[Violation, ...]
    odd: tuple[InvalidAnswer, ...]
    free: int
    """Pairs of different specs that cost nothing: no fault, if the cost ignores what lies between them."""

    @property
    def holds(self) -> bool:
        return self.broken == 0 and not self.odd

    def lines(self, most: int = 5) -> list[str]:
        """The report, the worst first, at most so many of each kind."""
        one = self.specs[0]
        about = f"{len(self.specs)} specs of {shape_text(one.shape, one.dtype)} on {one.mesh}"
        if not self.triples:
            found = [f"{self.cost}: not tried on triples, since no plan can be searched by such prices ({about})"]
        else:
            share = f"{self.broken:,} of {self.triples:,} triples break the triangle inequality"
            walls = f", {self.walls:,} of them where it knows of no way, and of two that make one" if self.walls else ""
            found = [f"{self.cost}: {share}{walls} ({about})"]
        found += [f"  {detour.text(self.unit)}" for detour in self.worst[:most]]
        for what, count in Counter(odd.what for odd in self.odd).items():
            found.append(f"{count:,} answers: {what}")
            found += [f"  {odd.text(self.unit)}" for odd in self.odd if odd.what == what][:most]
        if self.free:
            found.append(f"{self.free:,} pairs of different specs cost nothing, which is no fault")
        return [*found, "It is a metric on these, but for symmetry." if self.holds else "It is no metric."]

    def as_json(self, most: int = 5) -> dict[str, Any]:
        """The result as JSON; infinite and undefined numbers as text."""
        one = self.specs[0]
        worst = [
            {
                "src": placements_text(d.src), "via": placements_text(d.via), "dst": placements_text(d.dst),
                "direct": json_number(d.direct), "around": json_number(d.first + d.second),
            }
            for d in self.worst[:most]
        ]  # fmt: skip
        return {
            "cost": self.cost, "unit": self.unit, "mesh": list(one.mesh.sizes), "shape": list(one.shape),
            "dtype": str(one.dtype).removeprefix("torch."), "specs": len(self.specs), "triples": self.triples,
            "broken": self.broken, "walls": self.walls, "worst": worst,
            "odd": [{"what": o.what, "where": o.where, "got": json_number(o.got)} for o in self.odd[:most]],
            "odd_count": len(self.odd), "free": self.free, "holds": self.holds,
        }  # fmt: skip


def amount_text(value: float, unit: str) -> str:
    """A number in its unit.

    >>> amount_text(12.3e-6, "s"), amount_text(8_100_000, "ps"), amount_text(96, "bytes"), amount_text(7, ""), amount_text(math.inf, "s")
    ('12.3 us', '8.1 us', '96 B', '7', 'infinitely much')
    """
    if math.isinf(value):
        return "infinitely much" if value > 0 else "minus infinitely much"
    if unit in ("s", "ps"):
        return f"{value * 1e6 if unit == 's' else value * 1e6 / PICO:.6g} us"
    return bytes_text(value) if unit == "bytes" and value >= 0 else f"{value:.12g}"


def json_number(value: float) -> float | str:
    """A number as JSON represents it.

    >>> json_number(1.5), json_number(math.inf), json_number(math.nan)
    (1.5, 'inf', 'nan')
    """
    return value if math.isfinite(value) else str(value)
