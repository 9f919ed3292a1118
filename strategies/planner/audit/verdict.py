"""Test of DTensor's own redistribution: the outcome of a pair, our plan for it, and the excess cost of DTensor's plan.

Pairs run in batches in this process, in lockstep: one control flow for all ranks. A pair that fails in lockstep, or
gives a wrong result, is rerun on rank threads, where a rank may raise alone.

Failing pairs are confirmed on real processes. There, besides our definition, `distribute_tensor` of the whole tensor is
consulted: where it deals other pieces than `split` does, of the source or of the destination, the outcome is
`disputed`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import localtensor as lt
from localtensor.errors import LocalTensorError
from localtensor.layout import assemble, split
from strategies.base.signals import quiet
from strategies.planner.audit import rank_run
from strategies.planner.audit.compare import Outcome, compare_pieces
from strategies.planner.audit.pairs import NoDTensorPlan, Pair, dtensor_plan, dtensor_price
from strategies.planner.execute.lockstep import redistribute
from strategies.planner.search.api import NoPlan, plan
from strategies.planner.steps.plan import Plan, Price
from strategies.planner.steps.prices import TorchPrice
from strategies.torch_api import rank_runs
from strategies.torch_api.mesh_and_caches import averages_as_sums, world_mesh_with_submeshes
from strategies.torch_api.rank_runs import RankProcesses, first_rank_failure, returned_values


@dataclass(frozen=True, slots=True)
class PairRun:
    """A pair with values: the input piece of each rank, and the tensor that they represent."""

    pair: Pair
    pieces: tuple[Tensor, ...]
    whole: Tensor

    @classmethod
    def of(cls, pair: Pair, seed: int = 0) -> PairRun:
        x = distinct_values(pair.src.shape, pair.src.dtype)
        held = tuple(piece.clone() for piece in split(x, pair.src, torch.Generator().manual_seed(seed)))
        return cls(pair, held, assemble(held, pair.src).to(x.dtype))

    def part(self, mode: str, piece: Tensor, whole: Tensor | None = None) -> rank_run.RedistributionTask:
        return rank_run.RedistributionTask(self.pair.src, self.pair.dst, self.pair.flattened, mode, piece, whole)


def distinct_values(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Distinct nonzero values of both signs; for booleans, an irregular pattern."""
    count = torch.Size(shape).numel()
    if dtype == torch.bool:
        return (torch.arange(count) * 5 % 7 % 2 == 0).reshape(shape)
    real = torch.arange(count) * 2 - count + (1 - count % 2)
    if dtype.is_complex:
        return torch.complex(real.double(), real.double().flip(0) / 2).to(dtype).reshape(shape)
    return real.to(dtype).reshape(shape)


def outcome_of(job: PairRun, results: Sequence[rank_run.RedistributionResult]) -> Outcome:
    """The outcome, from the results of all ranks."""
    raised = [rank for rank, one in enumerate(results) if one.error]
    if raised:
        first = results[raised[0]].error
        if len(raised) == len(results):
            return Outcome("refused", first)
        return Outcome("stops", f"rank {raised[0]} raises {first}; its peers go on", tuple(raised))
    return compare_pieces([one.piece for one in results], job.whole, job.pair.dst)


def simulate_pairs(jobs: Sequence[PairRun], mode: str) -> list[Outcome]:
    """The outcome of DTensor's redistribution for each pair in order, on simulated ranks."""
    with quiet(), averages_as_sums("simulated"), rank_run.dtensor_planner(mode):
        works = [rank_work(job, mode) for job in jobs]
        return rank_runs.run_simulated(works, lambda outcome: outcome.kind == "right", alone=True)


def rank_work(job: PairRun, mode: str) -> rank_runs.MeshTask[Outcome]:
    """The rank functions for a pair, and its outcome; must run within `dtensor_planner(mode)`."""
    pair = job.pair

    def flow(mesh: DeviceMesh) -> list[rank_run.RedistributionResult]:
        pieces = lt.LocalTensor([piece.clone() for piece in job.pieces])
        held = rank_run.redistribute_piece(job.part(mode, pieces), mesh)
        return [rank_run.RedistributionResult("", piece) for piece in rank_runs.values_by_rank(held, pair.mesh.ranks)]

    def on_rank(mesh: DeviceMesh, rank: int) -> rank_run.RedistributionResult:
        return rank_run.result_of_rank(job.part(mode, job.pieces[rank].clone()), mesh)

    def verdict(given: dict[int, rank_run.RedistributionResult], fault: str) -> Outcome:
        raised = [rank for rank, one in given.items() if one.error]
        if fault and raised:
            fault = f"rank {raised[0]} raises {given[raised[0]].error}; its peers wait for it"
        return Outcome("stops", fault, tuple(raised)) if fault else outcome_of(job, list(given.values()))

    mesh_maker = (world_mesh_with_submeshes, pair.mesh, pair.flattened)
    return rank_runs.MeshTask(pair.mesh.ranks, mesh_maker, flow, on_rank, verdict)


BATCH = 64
"""Pairs that run at a time."""
GROWTH = 256
KINDS = ("right", "wrong", "stops", "refused", "alike", "undecided")
"""`alike`: refused by DTensor, and by our planner or by torch.distributed itself, too. `undecided`: refused, and our
plan fails, too."""
NO_COMPLEX_SUPPORT = "does not support complex tensors"
"""The error of torch.distributed for maxima and products of complex tensors, for which no plan can succeed."""


@dataclass(frozen=True, slots=True)
class Waste:
    """DTensor's plan compared with the cheapest for a large tensor: by time, torch's own count, bytes, collectives."""

    time: float
    """The price of theirs divided by that of ours; 1.0 where both are free, infinite where only ours is free."""
    torch: float
    sent: tuple[int, int]
    """Bytes that the busiest sender sends: theirs, ours."""
    collectives: tuple[int, int]


@dataclass(frozen=True, slots=True)
class PairVerdict:
    """The outcome of one pair under one of DTensor's planners."""

    pair: Pair
    mode: str
    outcome: Outcome
    theirs: Plan | NoDTensorPlan
    ours: Plan | None = None
    """The cheapest plan on our default topology; None if there is none."""
    waste: Waste | None = None
    """Where both plans are right."""

    @property
    def found(self) -> bool:
        """Whether it is a finding."""
        return self.outcome.kind in ("wrong", "stops", "refused")


def pair_verdicts(pairs: Sequence[Pair], mode: str, *, seed: int = 0) -> Iterator[PairVerdict]:
    """The verdict on each pair in order, run on simulated ranks."""
    for start in range(0, len(pairs), BATCH):
        jobs = [PairRun.of(pair, seed) for pair in pairs[start : start + BATCH]]
        for job, outcome in zip(jobs, simulate_pairs(jobs, mode), strict=True):
            yield verdict_of(job, mode, outcome)


def verdict_of(job: PairRun, mode: str, outcome: Outcome) -> PairVerdict:
    """The verdict for an outcome."""
    pair = job.pair
    theirs = dtensor_plan(pair.src, pair.dst, mode, flattened=pair.flattened)
    try:
        ours = cheapest_plan(pair)
    except NoPlan as none:
        kind = "alike" if outcome.kind == "refused" else outcome.kind
        return PairVerdict(pair, mode, Outcome(kind, outcome.text or str(none), outcome.ranks), theirs)
    if outcome.kind == "refused" and NO_COMPLEX_SUPPORT in outcome.text:
        return PairVerdict(pair, mode, Outcome("alike", outcome.text), theirs, ours)
    if outcome.kind == "refused" and (wrong := fault_of_our_plan(job, ours)):
        return PairVerdict(pair, mode, Outcome("undecided", f"{outcome.text}; our plan: {wrong}"), theirs, ours)
    waste = waste_of_plan(enlarged(pair), mode) if outcome.kind == "right" else None
    return PairVerdict(pair, mode, outcome, theirs, ours, waste)


def cheapest_plan(pair: Pair, price: Price | None = None) -> Plan:
    """Our plan for the pair; raises `NoPlan`."""
    return plan(pair.src, pair.dst, price, flattened=pair.flattened)


def fault_of_our_plan(job: PairRun, ours: Plan) -> str:
    """The fault of our plan's result; empty if it is right."""
    try:
        return compare_pieces(redistribute(list(job.pieces), ours), job.whole, job.pair.dst).text
    except LocalTensorError as error:
        return str(error)


def waste_of_plan(pair: Pair, mode: str) -> Waste | None:
    """The excess cost of their plan; None if they have none, or if the tensor is empty."""
    if 0 in pair.src.shape:
        return None
    theirs = dtensor_plan(pair.src, pair.dst, mode, flattened=pair.flattened)
    if isinstance(theirs, NoDTensorPlan):
        return None
    ours, price = cheapest_plan(pair), TorchPrice.of(pair.mesh)
    least = dtensor_price(cheapest_plan(pair, price).steps, price)
    return Waste(
        _ratio(theirs.price, ours.price),
        _ratio(dtensor_price(theirs.steps, price), least),
        (theirs.sent, ours.sent),
        (_collective_count(theirs), _collective_count(ours)),
    )


def enlarged(pair: Pair) -> Pair:
    """The pair with a tensor `GROWTH` times as long along every dim: for small ones all plans cost alike."""
    src, dst = (replace(spec, shape=tuple(size * GROWTH for size in spec.shape)) for spec in (pair.src, pair.dst))
    return replace(pair, src=src, dst=dst)


def _ratio(theirs: int, ours: int) -> float:
    return theirs / ours if ours else math.inf if theirs else 1.0


def _collective_count(plan: Plan) -> int:
    return sum(step.kind != "local" for step in plan.steps)


class RealRedistributions(RankProcesses):
    """Real processes on which pairs are confirmed."""

    def confirm(self, jobs: Sequence[PairRun], mode: str) -> list[Outcome]:
        """The outcome of each pair on real processes, in order. Never hangs: the pool ends processes that do."""
        found = []
        for job in jobs:
            outcomes = self.run(rank_run.run_task, [job.part(mode, piece, job.whole) for piece in job.pieces])
            fault = first_rank_failure(outcomes)
            stopped = fault and Outcome("stops", fault.text, fault.ranks)
            found.append(stopped or _checked_outcome(job, returned_values(outcomes)))
        return found


def _checked_outcome(job: PairRun, results: Sequence[rank_run.RedistributionResult]) -> Outcome:
    outcome = outcome_of(job, results)
    referees = (job.pair.src, [one.given for one in results]), (job.pair.dst, [one.dealt for one in results])
    for spec, every in referees:
        pieces = [piece for piece in every if piece is not None]
        if len(pieces) == len(results) and (apart := compare_pieces(pieces, job.whole, spec).text):
            return replace(outcome, kind="disputed", text=f"distribute_tensor itself deals {spec} otherwise: {apart}")
    return outcome
