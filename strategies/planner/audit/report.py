"""What `localtensor validate --plans` prints, and what it writes for programs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from localtensor.layout.spec import Spec, short
from strategies.planner.audit.causes import Cause
from strategies.planner.audit.dtensor_tried import Tried, Wasted
from strategies.planner.audit.rank_run import users
from strategies.planner.steps.plan import bytes_text

FORMAT = 1
_COLUMNS = {
    "right": "right",
    "wrong": "wrong",
    "stops": "stops",
    "refused": "refused",
    "alike": "no way",
    "undecided": "undecided",
}
_MEANT = {
    "wrong": "Wrong values", "stops": "Ranks that raise alone, or wait for ever",
    "refused": "Refused, though there is a plan, which was carried out and is right",
}  # fmt: skip


def as_text(tried: Tried) -> str:
    """The report for a terminal."""
    return "\n".join(_lines(tried))


def _lines(tried: Tried) -> Iterator[str]:
    meshes = ", ".join(dict.fromkeys(str(row.mesh) for row in tried.rows)) or "no mesh"
    yield f"DTensor's own redistribution, torch {tried.torch}: {tried.pairs:,} on {meshes}; seed {tried.seed}"
    yield ""
    yield f"{'mesh':<12}{'planner':<9}" + "".join(f"{name:>10}" for name in _COLUMNS.values())
    for row in tried.rows:
        counts = dict(row.counts)
        mesh = ",".join(map(str, row.mesh))
        yield f"{mesh:<12}{row.mode:<9}" + "".join(f"{counts.get(kind, 0):>10,}" for kind in _COLUMNS)
    for kind, title in _MEANT.items():
        mine = [one for one in tried.confirmed if one.outcome.kind == kind]
        if mine:
            yield f"\n{title}, on real processes, too:"
            for one in mine:
                yield from _cause(one)
    open_ones = [one for one in tried.causes if not one.confirmed]
    if open_ones:
        yield "\nOn simulated ranks only:"
        for one in open_ones:
            yield from _cause(one)
    yield ""
    for mode, waste in tried.wasted:
        yield from _waste(mode, waste)
    if not tried.whole:
        yield "Stopped before all was tried."


def _cause(one: Cause) -> Iterator[str]:
    times = "once" if one.met == 1 else f"{one.met:,} times"
    own = "" if one.asked else "; a user cannot ask for it"
    yield f"  {one.pattern}  ({' and '.join(one.modes)}; met {times}{own})"
    yield f"    {one.pair}: {one.outcome.text}"
    if one.note:
        yield f"    real processes: {one.note}"


def _waste(mode: str, waste: Wasted) -> Iterator[str]:
    yield (
        f"Waste, {mode}: {waste.dearer:,} of {waste.pairs:,} plans that arrive cost more than the cheapest by our clock, "
        f"{waste.dearer_torch:,} by torch's own count; {bytes_text(waste.sent[0])} sent where "
        f"{bytes_text(waste.sent[1])} would do, in {waste.collectives[0]:,} collectives for {waste.collectives[1]:,}"
    )
    if waste.for_nothing:
        yield f"  {waste.for_nothing:,} move data where every rank holds its piece from the start"
    for times, whose, worst in (
        (waste.most, "our clock", waste.worst), (waste.most_torch, "torch's own", waste.worst_torch),
    ):  # fmt: skip
        if worst is not None:
            own = "" if users(worst.src, worst.dst) else "  (a user cannot ask for it)"
            yield f"  {times:.1f} times as dear by {whose}: {worst}{own}"


def as_json(tried: Tried, code: int) -> str:
    """The report for programs."""
    return json.dumps(
        {
            "format": FORMAT, "torch": tried.torch, "seed": tried.seed, "exit": code, "whole": tried.whole,
            "pairs": tried.pairs,
            "rows": [{"mesh": row.mesh, "planner": row.mode, **dict(row.counts)} for row in tried.rows],
            "findings": [finding(one) for one in tried.causes],
            "waste": {mode: _waste_json(waste) for mode, waste in tried.wasted},
        },
        indent=1,
    )  # fmt: skip


def finding(one: Cause) -> dict[str, Any]:
    """One finding, with a pair that can be written again: placements in their short print, orders by dim."""
    pair = one.pair
    return {
        "kind": one.outcome.kind, "symptom": one.symptom, "pattern": one.pattern, "planners": one.modes, "met": one.met,
        "mesh": pair.mesh.sizes, "shape": pair.src.shape, "dtype": str(pair.src.dtype).removeprefix("torch."),
        "src": _spec(pair.src), "dst": _spec(pair.dst), "flattened": pair.flattened, "what": one.outcome.text,
        "ranks": one.outcome.ranks, "user": one.asked, "confirmed": one.confirmed, "note": one.note, "example": str(one.example),
    }  # fmt: skip


def _spec(spec: Spec) -> dict[str, Any]:
    return {"placements": [short(placement) for placement in spec.placements], "order": spec.shard_order}


def _waste_json(waste: Wasted) -> dict[str, Any]:
    return {
        "pairs": waste.pairs, "dearer": waste.dearer, "dearer_by_torch": waste.dearer_torch, "sent": waste.sent,
        "collectives": waste.collectives, "for_nothing": waste.for_nothing, "most": round(waste.most, 3), "worst": str(waste.worst or ""),
        "most_by_torch": round(waste.most_torch, 3), "worst_by_torch": str(waste.worst_torch or ""),
    }  # fmt: skip
