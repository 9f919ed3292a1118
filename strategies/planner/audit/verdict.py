"""DTensor's own redistribution on trial: what became of a pair, what a right plan would be, and what theirs costs more."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from localtensor.errors import LocalTensorError
from strategies.planner.audit.compare import compared
from strategies.planner.audit.pairs import Pair
from strategies.planner.audit.simulated_run import Job, Outcome, play_all
from strategies.planner.audit.torch_plans import Refused, for_dtensor, paid
from strategies.planner.execute.lockstep import redistribute
from strategies.planner.search.api import NoPlan, plan
from strategies.planner.steps.plan import Plan, Price
from strategies.planner.steps.torch_price import TorchPrice

BATCH = 64
"""Pairs that are played at a time."""
GROWN = 256
KINDS = ("right", "wrong", "stops", "refused", "alike", "undecided")
"""`alike`: refused by DTensor, and by our planner or by torch.distributed itself, too.  `undecided`: refused, and our plan does not arrive, either."""


BACKENDS = "does not support complex tensors"
"""What torch.distributed says of maxima and products of complex tensors: there no plan gets anywhere."""


@dataclass(frozen=True, slots=True)
class Waste:
    """DTensor's plan beside the cheapest, of a large tensor (see `grown`): by our clock and by torch's own count, in bytes and in collectives."""

    time: float
    """The price of theirs by that of ours; 1.0 is no waste, and so it is of two that cost nothing; infinite where only
    ours costs nothing."""
    torch: float
    sent: tuple[int, int]
    """Bytes that the rank which sends most sends: theirs, ours."""
    collectives: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one pair under one of DTensor's planners."""

    pair: Pair
    mode: str
    outcome: Outcome
    theirs: Plan | Refused
    ours: Plan | None = None
    """The cheapest plan by our clock; None if there is none."""
    waste: Waste | None = None
    """Where both arrive."""

    @property
    def found(self) -> bool:
        """Whether something is wrong."""
        return self.outcome.kind in ("wrong", "stops", "refused")


def judge(pairs: Sequence[Pair], mode: str, *, seed: int = 0) -> Iterator[Verdict]:
    """A verdict on each, in their order, played on simulated ranks."""
    for start in range(0, len(pairs), BATCH):
        jobs = [Job.of(pair, seed) for pair in pairs[start : start + BATCH]]
        for job, outcome in zip(jobs, play_all(jobs, mode), strict=True):
            yield weighed(job, mode, outcome)


def weighed(job: Job, mode: str, outcome: Outcome) -> Verdict:
    """The verdict, once it is known what became of it."""
    pair = job.pair
    theirs = for_dtensor(pair.src, pair.dst, mode, flattened=pair.flattened)
    try:
        ours = cheapest(pair)
    except NoPlan as none:
        kind = "alike" if outcome.kind == "refused" else outcome.kind
        return Verdict(pair, mode, Outcome(kind, outcome.text or str(none), outcome.ranks), theirs)
    if outcome.kind == "refused" and BACKENDS in outcome.text:
        return Verdict(pair, mode, Outcome("alike", outcome.text), theirs, ours)
    if outcome.kind == "refused":
        wrong = arrives(job, ours)
        if wrong:
            return Verdict(pair, mode, Outcome("undecided", f"{outcome.text}; our plan: {wrong}"), theirs, ours)
    waste = wasted(grown(pair), mode) if outcome.kind == "right" else None
    return Verdict(pair, mode, outcome, theirs, ours, waste)


def cheapest(pair: Pair, price: Price | None = None) -> Plan:
    """Our plan for the pair; raises `NoPlan`."""
    return plan(pair.src, pair.dst, price, flattened=pair.flattened)


def arrives(job: Job, ours: Plan) -> str:
    """What is wrong where our plan is carried out; empty if nothing is."""
    try:
        return compared(redistribute(list(job.pieces), ours), job.whole, job.pair.dst).text
    except LocalTensorError as error:
        return str(error)


def wasted(pair: Pair, mode: str) -> Waste | None:
    """Their plan beside ours; None if they have none, or if there is nothing to move."""
    if 0 in pair.src.shape:
        return None
    theirs = for_dtensor(pair.src, pair.dst, mode, flattened=pair.flattened)
    if isinstance(theirs, Refused):
        return None
    ours, price = cheapest(pair), TorchPrice.of(pair.mesh)
    least = paid(cheapest(pair, price).steps, price)
    return Waste(
        _ratio(theirs.price, ours.price), _ratio(paid(theirs.steps, price), least),
        (theirs.sent, ours.sent), (_collectives(theirs), _collectives(ours)),
    )  # fmt: skip


def grown(pair: Pair) -> Pair:
    """The same of a tensor that is `GROWN` times as long along every dim: of small ones all plans cost alike."""
    src, dst = (replace(spec, shape=tuple(size * GROWN for size in spec.shape)) for spec in (pair.src, pair.dst))
    return replace(pair, src=src, dst=dst)


def _ratio(theirs: int, ours: int) -> float:
    if ours == 0:
        return math.inf if theirs else 1.0
    return theirs / ours


def _collectives(plan: Plan) -> int:
    return sum(step.kind != "local" for step in plan.steps)
