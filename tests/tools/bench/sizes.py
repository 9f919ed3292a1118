"""How small the findings of a report are: median ranks and elements, from `localtensor validate --json FILE`.

The elements of a finding are those of its whole tensors, which its sample gives as short texts such as `f64[4,2]`.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

RANKS, ELEMENTS = 2, 8
"""Targets of the two medians."""
_TENSOR = re.compile(r"\b(?:f|bf|i|u|c|b|bool|float|int|uint|complex)\w*\[([\d, ]*)\]")


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the findings with one verdict: how many, the medians, and the largest."""

    verdict: str
    findings: int
    ranks: float
    elements: float
    most_elements: int


def sizes(report: Path) -> list[Sizes]:
    """For each verdict that the report holds, and for all together.  Raises ValueError where there is no finding."""
    findings = json.loads(report.read_text())["findings"]
    if not findings:
        raise ValueError(f"{report} holds no finding")
    verdicts = sorted({f["verdict"] for f in findings})
    by_verdict = [_sizes(v, [f for f in findings if f["verdict"] == v]) for v in verdicts]
    return [*by_verdict, *([_sizes("all", findings)] if len(verdicts) > 1 else [])]


def _sizes(verdict: str, findings: list[dict[str, Any]]) -> Sizes:
    counts = [elements(f["sample"]) for f in findings]
    ranks = statistics.median(_ranks(f["mesh"]) for f in findings)
    return Sizes(verdict, len(findings), ranks, statistics.median(counts), max(counts))


def _ranks(mesh: Any) -> int:
    """From `[2, 3]`, a number, or the text of either."""
    return math.prod(map(int, re.findall(r"\d+", str(mesh))))


def elements(sample: str | Iterable[str]) -> int:
    """The elements of all tensors that a sample names; `f64[]` has one."""
    text = sample if isinstance(sample, str) else " ".join(sample)
    shapes = _TENSOR.findall(text)
    return sum(math.prod(int(size) for size in shape.split(",") if size.strip()) for shape in shapes)


def show(console: Console, found: Iterable[Sizes]) -> None:
    """Markdown rows."""
    console.print(
        "\n| findings | how many | ranks, median | elements, median | most elements |\n|---|---|---|---|---|",
        markup=False,
    )
    for s in found:
        console.print(
            f"| {s.verdict} | {s.findings} | {s.ranks:g} (target {RANKS}) | {s.elements:g} (target {ELEMENTS}) | {s.most_elements} |"
        )
