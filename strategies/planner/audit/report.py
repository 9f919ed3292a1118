"""The report of `localtensor validate --plans`, for people and for programs.

Findings are grouped by cause: every failing pair is shrunk, and pairs that shrink to the same one are one finding.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from localtensor._util.units import bytes_text
from localtensor.layout import Spec, short
from strategies.planner.audit.compare import Outcome
from strategies.planner.audit.pairs import MODES, Pair
from strategies.planner.audit.rank_run import is_public
from strategies.planner.audit.shrink import complexity, shrink_pair
from strategies.planner.audit.verdict import KINDS, PairRun, PairVerdict, RealRedistributions, simulate_pairs
from strategies.planner.steps.plan import placements_text

OnDone = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Cause:
    """One cause of failures, with the smallest pair that shows it."""

    symptom: str
    pair: Pair
    modes: tuple[str, ...]
    """DTensor's planners, of those tested, under which this pair fails."""
    outcome: Outcome
    met: int
    """How many pairs shrank to this one."""
    example: Pair
    """The first of them."""
    confirmed: bool = False
    """Whether real processes showed the same."""
    note: str = ""
    """The different outcome on real processes, if so."""

    @property
    def asked(self) -> bool:
        """Whether the public API offers it: no shard order, no new Partial."""
        return is_public(self.pair.src, self.pair.dst)

    @property
    def pattern(self) -> str:
        """`S(0),S(0) -> R,R, a+b flattened`: only the placements."""
        return self.written(self.pair)

    @staticmethod
    def written(pair: Pair) -> str:
        also = "".join(f", {'+'.join(names)} flattened" for names in pair.flattened)
        dtype = str(pair.src).split("[")[0]
        of = "" if dtype == "f64" else f" of {dtype}"
        return f"{placements_text(pair.src)} -> {placements_text(pair.dst)}{of}{also}"


def symptom(outcome: Outcome) -> str:
    """The part of an outcome that is invariant while a pair shrinks: neither the numbers nor the rank.

    >>> symptom(Outcome("wrong", "rank 1 holds shape (4, 6), not (4, 3)")), symptom(Outcome("refused", "ValueError: no 3"))
    ('wrong values', 'refused: ValueError: no #')
    """
    if outcome.kind == "wrong":
        return "wrong dtype" if "torch." in outcome.text else "wrong values"
    text = re.sub(r"^rank \d+ ", "a rank ", re.sub(r" in group .*", "", outcome.text.split("; ")[0]))
    text = re.sub(r"Partial\((\w+)\)", r"P(\1)", text)  # a kind that has an error of its own keeps its name
    text = re.sub(r"to P\((sum|avg|min|max|product)\) not", "to P not", text)
    return f"{outcome.kind}: {re.sub(r'[0-9]+', '#', text)[:80]}"


def group_by_cause(verdicts: Sequence[PairVerdict], on_done: OnDone = lambda: None) -> list[Cause]:
    """The findings among these verdicts, the most frequent first; `on_done` is called after every verdict."""
    found: dict[str, Cause] = {}
    known: dict[tuple[str, str, str], Pair] = {}
    shown: dict[tuple[str, str], Cause] = {}
    tried = tuple(mode for mode in MODES if any(verdict.mode == mode for verdict in verdicts))
    for verdict in verdicts:
        mark = symptom(verdict.outcome)
        key = (verdict.mode, mark, "" if verdict.outcome.kind == "refused" else str(verdict.pair))
        if key not in known:
            known[key] = _shrunk(verdict, mark)
        pair = known[key]
        if (mark, str(pair)) not in shown:
            outcomes = {mode: simulate_pairs([PairRun.of(pair)], mode)[0] for mode in tried}
            modes = tuple(mode for mode in tried if symptom(outcomes[mode]) == mark)
            shown[mark, str(pair)] = Cause(mark, pair, modes, outcomes[modes[0]], 0, verdict.pair)
        one, same = shown[mark, str(pair)], found.get(Cause.written(pair))
        if same is None or _severity(one) < _severity(same):
            found[one.pattern] = replace(one, met=1 + (same.met if same else 0))
        else:
            found[one.pattern] = replace(same, met=same.met + 1)
        on_done()
    return sorted(found.values(), key=lambda one: (_ORDER.index(one.outcome.kind), -one.met, repr(one.pair)))


def _severity(one: Cause) -> tuple[object, ...]:
    """The sort key of two findings with the same placements: the worse outcome, then the simpler pair."""
    return _ORDER.index(one.outcome.kind), complexity(one.pair)


_ORDER = ("wrong", "stops", "refused", "right")


def confirm_causes(found: Sequence[Cause], bench: RealRedistributions, on_done: OnDone = lambda: None) -> list[Cause]:
    """The findings, each replayed on real processes."""
    made = []
    for one in found:
        real = bench.confirm([PairRun.of(one.pair)], one.modes[0])[0]
        same = real.kind == one.outcome.kind
        made.append(replace(one, confirmed=same, note="" if same else f"{real.kind}: {real.text}"))
        on_done()
    return made


def _shrunk(verdict: PairVerdict, mark: str) -> Pair:
    def shows(pair: Pair) -> bool:
        return symptom(simulate_pairs([PairRun.of(pair)], verdict.mode)[0]) == mark

    return shrink_pair(verdict.pair, verdict.mode, shows).smallest


@dataclass(frozen=True, slots=True)
class TotalWaste:
    """The excess cost of one planner's plans over the cheapest plans, over all pairs for which both are right."""

    pairs: int
    dearer: int
    """The number of plans that cost more on our default topology."""
    dearer_torch: int
    """The number of plans that cost more by torch's own count."""
    sent: tuple[int, int]
    """Bytes over all pairs: theirs, ours."""
    collectives: tuple[int, int]
    for_nothing: int
    """The number of plans that cost something where every rank already holds its piece: excluded from the ratios."""
    most: float
    worst: Pair | None
    """The pair with the highest ratio on our default topology."""
    most_torch: float
    worst_torch: Pair | None


@dataclass(frozen=True, slots=True)
class OutcomeCounts:
    """The outcomes of the pairs of one mesh under one planner."""

    mesh: tuple[int, ...]
    mode: str
    counts: tuple[tuple[str, int], ...]

    @property
    def pairs(self) -> int:
        return sum(count for _, count in self.counts)


@dataclass(frozen=True, slots=True)
class AuditResult:
    """The results of a run."""

    torch: str
    seed: int
    rows: tuple[OutcomeCounts, ...]
    causes: tuple[Cause, ...]
    wasted: tuple[tuple[str, TotalWaste], ...]
    whole: bool = True
    """False if it was interrupted."""

    @property
    def pairs(self) -> int:
        return sum(row.pairs for row in self.rows)

    @property
    def confirmed(self) -> tuple[Cause, ...]:
        return tuple(one for one in self.causes if one.confirmed)


def count_outcomes(verdicts: Sequence[PairVerdict]) -> tuple[OutcomeCounts, ...]:
    """One row for each mesh and planner, in order of first appearance."""
    found: dict[tuple[tuple[int, ...], str], dict[str, int]] = {}
    for verdict in verdicts:
        counts = found.setdefault((verdict.pair.mesh.sizes, verdict.mode), dict.fromkeys(KINDS, 0))
        counts[verdict.outcome.kind] += 1
    return tuple(OutcomeCounts(mesh, mode, tuple(counts.items())) for (mesh, mode), counts in found.items())


def total_waste(verdicts: Sequence[PairVerdict]) -> tuple[tuple[str, TotalWaste], ...]:
    """The excess cost for each planner that has right plans."""
    found: dict[str, list[PairVerdict]] = {}
    for verdict in verdicts:
        if verdict.waste is not None:
            found.setdefault(verdict.mode, []).append(verdict)
    return tuple((mode, _waste_of(mine)) for mode, mine in found.items())


def _waste_of(verdicts: Sequence[PairVerdict]) -> TotalWaste:
    known = [(verdict.pair, verdict.waste) for verdict in verdicts if verdict.waste is not None]
    worst, clock = max(known, key=lambda one: _finite_ratio(one[1].time))
    counted, torch = max(known, key=lambda one: _finite_ratio(one[1].torch))
    most, most_torch = _finite_ratio(clock.time), _finite_ratio(torch.torch)
    return TotalWaste(
        len(known), sum(w.time > 1 for _, w in known), sum(w.torch > 1 for _, w in known),
        (sum(w.sent[0] for _, w in known), sum(w.sent[1] for _, w in known)),
        (sum(w.collectives[0] for _, w in known), sum(w.collectives[1] for _, w in known)),
        sum(max(w.time, w.torch) == math.inf for _, w in known),
        most, worst if most > 1 else None, most_torch, counted if most_torch > 1 else None,
    )  # fmt: skip


def _finite_ratio(ratio: float) -> float:
    return ratio if ratio < math.inf else 1.0


FORMAT = 1
_COLUMNS = {kind: "no way" if kind == "alike" else kind for kind in KINDS}
_TITLES = {
    "wrong": "Wrong values", "stops": "Ranks that raise alone, or wait for ever",
    "refused": "Refused, though there is a plan, which was carried out and is right",
}  # fmt: skip


def audit_text(tried: AuditResult) -> str:
    """The report for a terminal."""
    return "\n".join(_lines(tried))


def _lines(tried: AuditResult) -> Iterator[str]:
    meshes = ", ".join(dict.fromkeys(str(row.mesh) for row in tried.rows)) or "no mesh"
    yield f"DTensor's own redistribution, torch {tried.torch}: {tried.pairs:,} on {meshes}; seed {tried.seed}"
    yield ""
    yield f"{'mesh':<12}{'planner':<9}" + "".join(f"{name:>10}" for name in _COLUMNS.values())
    for row in tried.rows:
        counts = dict(row.counts)
        mesh = ",".join(map(str, row.mesh))
        yield f"{mesh:<12}{row.mode:<9}" + "".join(f"{counts.get(kind, 0):>10,}" for kind in _COLUMNS)
    for kind, title in _TITLES.items():
        mine = [one for one in tried.confirmed if one.outcome.kind == kind]
        if mine:
            yield f"\n{title}, on real processes, too:"
            for one in mine:
                yield from _cause_lines(one)
    open_ones = [one for one in tried.causes if not one.confirmed]
    if open_ones:
        yield "\nOn simulated ranks only:"
        for one in open_ones:
            yield from _cause_lines(one)
    yield ""
    for mode, waste in tried.wasted:
        yield from _waste_lines(mode, waste)
    if not tried.whole:
        yield "Stopped before all was tried."


def _cause_lines(one: Cause) -> Iterator[str]:
    times = "once" if one.met == 1 else f"{one.met:,} times"
    own = "" if one.asked else "; a user cannot ask for it"
    yield f"  {one.pattern}  ({' and '.join(one.modes)}; met {times}{own})"
    yield f"    {one.pair}: {one.outcome.text}"
    if one.note:
        yield f"    real processes: {one.note}"


def _waste_lines(mode: str, waste: TotalWaste) -> Iterator[str]:
    yield (
        f"Waste, {mode}: {waste.dearer:,} of {waste.pairs:,} plans that arrive cost more than the cheapest by our clock, "
        f"{waste.dearer_torch:,} by torch's own count; {bytes_text(waste.sent[0])} sent where "
        f"{bytes_text(waste.sent[1])} would do, in {waste.collectives[0]:,} collectives for {waste.collectives[1]:,}"
    )
    if waste.for_nothing:
        yield f"  {waste.for_nothing:,} move data where every rank holds its piece from the start"
    for times, whose, worst in (
        (waste.most, "our clock", waste.worst),
        (waste.most_torch, "torch's own", waste.worst_torch),
    ):
        if worst is not None:
            own = "" if is_public(worst.src, worst.dst) else "  (a user cannot ask for it)"
            yield f"  {times:.1f} times as dear by {whose}: {worst}{own}"


def audit_json(tried: AuditResult, code: int) -> str:
    """The report for programs."""
    return json.dumps(
        {
            "format": FORMAT,
            "torch": tried.torch,
            "seed": tried.seed,
            "exit": code,
            "whole": tried.whole,
            "pairs": tried.pairs,
            "rows": [{"mesh": row.mesh, "planner": row.mode, **dict(row.counts)} for row in tried.rows],
            "findings": [finding_json(one) for one in tried.causes],
            "waste": {mode: _waste_json(waste) for mode, waste in tried.wasted},
        },
        indent=1,
    )


def finding_json(one: Cause) -> dict[str, object]:
    """One finding as JSON, with a pair that can be parsed again: placements in their short form, orders by dim."""
    pair = one.pair
    return {
        "kind": one.outcome.kind, "symptom": one.symptom, "pattern": one.pattern, "planners": one.modes, "met": one.met,
        "mesh": pair.mesh.sizes, "shape": pair.src.shape, "dtype": str(pair.src.dtype).removeprefix("torch."),
        "src": _spec_json(pair.src), "dst": _spec_json(pair.dst), "flattened": pair.flattened, "what": one.outcome.text,
        "ranks": one.outcome.ranks, "user": one.asked, "confirmed": one.confirmed, "note": one.note,
        "example": str(one.example),
    }  # fmt: skip


def _spec_json(spec: Spec) -> dict[str, object]:
    return {"placements": [short(placement) for placement in spec.placements], "order": spec.shard_order}


def _waste_json(waste: TotalWaste) -> dict[str, object]:
    return {
        "pairs": waste.pairs, "dearer": waste.dearer, "dearer_by_torch": waste.dearer_torch, "sent": waste.sent,
        "collectives": waste.collectives, "for_nothing": waste.for_nothing,
        "most": round(waste.most, 3), "worst": str(waste.worst or ""),
        "most_by_torch": round(waste.most_torch, 3), "worst_by_torch": str(waste.worst_torch or ""),
    }  # fmt: skip
