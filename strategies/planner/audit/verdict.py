"""DTensor's own redistribution on trial: what became of a pair, what a right plan would be, and what theirs costs more."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import localtensor as lt
from localtensor._util import Died, Raised, Returned, Waiting, pickling
from localtensor._util import Outcome as Event
from localtensor.errors import LocalTensorError, in_a_line
from localtensor.layout import assemble, split
from localtensor.processes import Pool
from strategies.base.signals import quiet
from strategies.planner.audit.compare import compared
from strategies.planner.audit.pairs import Pair, Refused, for_dtensor, paid
from strategies.planner.audit.rank_run import Part, Told, heard, mesh_on, planner, play
from strategies.planner.execute.lockstep import redistribute
from strategies.planner.search.api import NoPlan, plan
from strategies.planner.steps.plan import Plan, Price
from strategies.planner.steps.prices import TorchPrice
from strategies.torch_api.mesh_and_caches import averages, forget, remembering

# Pairs played in this process, many at a time: DTensor's own redistribution, in one control flow for all ranks.
#
# A pair that does not get through in lockstep, or comes to something wrong there, is played once more on rank threads,
# where each rank has its own control flow and may raise alone, before anybody hears of it.

SECONDS = 60.0
"""Time limit of a run of one pair on rank threads."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a pair: `right`, `wrong`, `refused` (by every rank alike), or `stops` (a rank raises alone, or waits)."""

    kind: str
    text: str = ""
    ranks: tuple[int, ...] = ()


RIGHT = Outcome("right")


@dataclass(frozen=True, slots=True)
class Job:
    """A pair with values: what each rank is given, and the tensor that this is."""

    pair: Pair
    pieces: tuple[Tensor, ...]
    whole: Tensor

    @classmethod
    def of(cls, pair: Pair, seed: int = 0) -> Job:
        x = numbers(pair.src.shape, pair.src.dtype)
        held = tuple(piece.clone() for piece in split(x, pair.src, torch.Generator().manual_seed(seed)))
        return cls(pair, held, assemble(held, pair.src).to(x.dtype))

    def part(self, mode: str, piece: Any, whole: Tensor | None = None) -> Part:
        return Part(self.pair.src, self.pair.dst, self.pair.flattened, mode, piece, whole)


def numbers(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """No two alike, of both signs, none zero; of booleans, in no simple order."""
    count = torch.Size(shape).numel()
    if dtype == torch.bool:
        return (torch.arange(count) * 5 % 7 % 2 == 0).reshape(shape)
    real = torch.arange(count) * 2 - count + (1 - count % 2)
    if dtype.is_complex:
        return torch.complex(real.double(), real.double().flip(0) / 2).to(dtype).reshape(shape)
    return real.to(dtype).reshape(shape)


def judged(job: Job, told: Sequence[Told]) -> Outcome:
    """The verdict on what every rank was told."""
    raised = [rank for rank, one in enumerate(told) if one.error]
    if raised:
        first = told[raised[0]].error
        if len(raised) == len(told):
            return Outcome("refused", first)
        return Outcome("stops", f"rank {raised[0]} raises {first}; its peers go on", tuple(raised))
    wrong = compared([one.piece for one in told], job.whole, job.pair.dst)
    return Outcome("wrong", wrong.text, wrong.ranks) if wrong.text else RIGHT


def play_all(jobs: Sequence[Job], mode: str) -> list[Outcome]:
    """What DTensor makes of each, in their order, played on simulated ranks."""
    found: dict[int, Outcome] = {}
    with quiet(), averages("simulated"), planner(mode):
        for numbers_of in _grouped(jobs).values():
            found.update(_in_lockstep(jobs, numbers_of, mode))
        for number, job in enumerate(jobs):
            if number not in found or found[number].kind != "right":
                found[number] = on_threads(job, mode)
    return [found[number] for number in range(len(jobs))]


def _grouped(jobs: Sequence[Job]) -> dict[Any, list[int]]:
    groups: dict[Any, list[int]] = {}
    for number, job in enumerate(jobs):
        groups.setdefault((job.pair.mesh, job.pair.flattened), []).append(number)
    return groups


def _in_lockstep(jobs: Sequence[Job], which: Sequence[int], mode: str) -> dict[int, Outcome]:
    """The verdicts on those that get through."""
    found: dict[int, Outcome] = {}
    pair = jobs[which[0]].pair
    ranks = pair.mesh.ranks
    with contextlib.suppress(LocalTensorError), remembering(), lt.LocalTensorMode(ranks):  # works may be left
        mesh = mesh_on(pair.mesh, pair.flattened)
        for number in which:
            forget()
            job = jobs[number]
            told = heard(job.part(mode, lt.LocalTensor([piece.clone() for piece in job.pieces])), mesh)
            if not told.error:
                found[number] = judged(job, [Told("", piece) for piece in _by_rank(told.piece, ranks)])
    forget()
    return found


def _by_rank(x: Any, ranks: int) -> list[Any]:
    if not isinstance(x, lt.LocalTensor):
        return [x] * ranks
    table = {rank: value for holders, value in x.values() for rank in holders}
    return [table[rank] for rank in range(ranks)]


def on_threads(job: Job, mode: str) -> Outcome:
    """The verdict with a control flow for each rank; to be called within `planner(mode)`."""
    told: list[Told | None] = [None] * job.pair.mesh.ranks

    def body() -> None:
        mesh = mesh_on(job.pair.mesh, job.pair.flattened)
        rank = mesh.get_rank()
        forget()
        told[rank] = heard(job.part(mode, job.pieces[rank].clone()), mesh)

    try:
        lt.run(body, ranks=job.pair.mesh.ranks, timeout=SECONDS, leftovers="ignore")
    except LocalTensorError as error:
        raised = {rank: one for rank, one in enumerate(told) if one is not None and one.error}
        if raised:
            rank, one = next(iter(raised.items()))
            return Outcome("stops", f"rank {rank} raises {one.error}; its peers wait for it", tuple(raised))
        return Outcome("stops", in_a_line(error))
    return judged(job, [one for one in told if one is not None])


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


# What real processes make of pairs that went wrong on simulated ranks, and whether torch's own words agree with ours.
#
# The referee besides our definition is `distribute_tensor` of the whole tensor: where that deals other pieces than
# `split` does, by the source or by the destination, nobody is called wrong, or right.

SECONDS_ON_GLOO = 20.0
"""Time limit of a pair, or of a batch of pairs that do not stop."""
FIRST = 120.0
BATCH_ON_GLOO = 24


class Bench:
    """A pool of real processes, of as many ranks as were asked for last."""

    def __init__(self, backend: str = "gloo", seconds: float = SECONDS_ON_GLOO) -> None:
        self.backend, self.seconds = backend, seconds
        self._pool: Pool | None = None

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
        self._pool = None

    def confirm(self, jobs: Sequence[Job], mode: str) -> list[Outcome]:
        """What becomes of each on real processes, in their order.  Never hangs: the pool ends what does."""
        found: dict[int, Outcome] = {}
        groups: dict[int, list[int]] = {}
        for number, job in enumerate(jobs):
            groups.setdefault(job.pair.mesh.ranks, []).append(number)
        for ranks, numbers in sorted(groups.items()):
            for start in range(0, len(numbers), BATCH_ON_GLOO):
                batch = numbers[start : start + BATCH_ON_GLOO]
                found.update(zip(batch, self._batch([jobs[n] for n in batch], mode, ranks), strict=True))
        return [found[number] for number in range(len(jobs))]

    def _batch(self, jobs: Sequence[Job], mode: str, ranks: int) -> list[Outcome]:
        events = self._call(jobs, mode, ranks)
        if not all(isinstance(event, Returned) for event in events):
            if len(jobs) == 1:
                return [_lost(events)]
            return [self._batch([job], mode, ranks)[0] for job in jobs]
        columns = [pickling.loads(event.value) for event in events if isinstance(event, Returned)]  # type: ignore[arg-type]
        return [_heard(job, told) for job, told in zip(jobs, zip(*columns, strict=True), strict=True)]

    def _call(self, jobs: Sequence[Job], mode: str, ranks: int) -> list[Event]:
        if self._pool is None or self._pool.ranks != ranks:
            self.close()
            self._pool = Pool(ranks, backend=self.backend, timeout=self.seconds)
            self._pool.call(
                play, [(pickling.dumps([]),)] * ranks, timeout=FIRST
            )  # imports are no part of a pair's time
        sent = [[job.part(mode, job.pieces[rank], job.whole) for job in jobs] for rank in range(ranks)]
        return self._pool.call(play, [(pickling.dumps(parts),) for parts in sent])


def _heard(job: Job, told: Sequence[Told]) -> Outcome:
    outcome = judged(job, told)
    referees = (job.pair.src, [one.given for one in told]), (job.pair.dst, [one.dealt for one in told])
    for spec, every in referees:
        pieces = [piece for piece in every if piece is not None]
        apart = compared(pieces, job.whole, spec).text if len(pieces) == len(told) else ""
        if apart:
            text = f"distribute_tensor itself deals {spec} otherwise: {apart}"
            return replace(outcome, kind="disputed", text=text)
    return outcome


def _lost(events: Sequence[Event]) -> Outcome:
    for event in events:
        if isinstance(event, Died):
            return Outcome(
                "stops", f"the process of rank {event.rank} dies (exit code {event.exitcode})", (event.rank,)
            )
    for event in events:
        if isinstance(event, Raised):
            return Outcome("stops", f"rank {event.rank} raises {event.kind}: {event.message}", (event.rank,))
    waiting = [event for event in events if isinstance(event, Waiting)]
    where = "; ".join(f"rank {event.rank} waits at {event.where}" for event in waiting)
    return Outcome("stops", f"hangs: {where}", tuple(event.rank for event in waiting))
