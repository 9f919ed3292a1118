"""What `localtensor validate --plans` found, as values: how many pairs came to what, the findings, and the waste."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from strategies.planner.audit.causes import Cause
from strategies.planner.audit.pairs import Pair
from strategies.planner.audit.verdict import KINDS, Verdict


@dataclass(frozen=True, slots=True)
class Wasted:
    """What one planner's plans cost beyond the cheapest, over all pairs where it arrives."""

    pairs: int
    dearer: int
    """How many cost more by our clock."""
    dearer_torch: int
    """How many cost more by torch's own count."""
    sent: tuple[int, int]
    """Bytes over all pairs: theirs, ours."""
    collectives: tuple[int, int]
    for_nothing: int
    """How many cost something where every rank holds what it should from the start: not among the ratios."""
    most: float
    worst: Pair | None
    """The pair whose plan is so many times as dear by our clock."""
    most_torch: float
    worst_torch: Pair | None


@dataclass(frozen=True, slots=True)
class Row:
    """What became of the pairs of one mesh under one planner."""

    mesh: tuple[int, ...]
    mode: str
    counts: tuple[tuple[str, int], ...]

    @property
    def pairs(self) -> int:
        return sum(count for _, count in self.counts)


@dataclass(frozen=True, slots=True)
class Tried:
    """The whole of a run."""

    torch: str
    seed: int
    rows: tuple[Row, ...]
    causes: tuple[Cause, ...]
    wasted: tuple[tuple[str, Wasted], ...]
    whole: bool = True
    """False where it was stopped."""

    @property
    def pairs(self) -> int:
        return sum(row.pairs for row in self.rows)

    @property
    def confirmed(self) -> tuple[Cause, ...]:
        return tuple(one for one in self.causes if one.confirmed)


def rows(verdicts: Sequence[Verdict]) -> tuple[Row, ...]:
    """One row for each mesh and planner, in the order in which they come."""
    found: dict[tuple[tuple[int, ...], str], dict[str, int]] = {}
    for verdict in verdicts:
        counts = found.setdefault((verdict.pair.mesh.sizes, verdict.mode), dict.fromkeys(KINDS, 0))
        counts[verdict.outcome.kind] += 1
    return tuple(Row(mesh, mode, tuple(counts.items())) for (mesh, mode), counts in found.items())


def wasted(verdicts: Sequence[Verdict]) -> tuple[tuple[str, Wasted], ...]:
    """For each planner that arrived somewhere."""
    found: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        if verdict.waste is not None:
            found.setdefault(verdict.mode, []).append(verdict)
    return tuple((mode, _sum(mine)) for mode, mine in found.items())


def _sum(verdicts: Sequence[Verdict]) -> Wasted:
    known = [(verdict.pair, verdict.waste) for verdict in verdicts if verdict.waste is not None]
    worst, clock = max(known, key=lambda one: _finite(one[1].time))
    counted, torch = max(known, key=lambda one: _finite(one[1].torch))
    most, most_torch = _finite(clock.time), _finite(torch.torch)
    return Wasted(
        len(known), sum(w.time > 1 for _, w in known), sum(w.torch > 1 for _, w in known),
        (sum(w.sent[0] for _, w in known), sum(w.sent[1] for _, w in known)),
        (sum(w.collectives[0] for _, w in known), sum(w.collectives[1] for _, w in known)),
        sum(max(w.time, w.torch) == math.inf for _, w in known),
        most, worst if most > 1 else None, most_torch, counted if most_torch > 1 else None,
    )  # fmt: skip


def _finite(ratio: float) -> float:
    return ratio if ratio < math.inf else 1.0
