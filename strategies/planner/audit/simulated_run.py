"""Pairs played in this process, many at a time: DTensor's own redistribution, in one control flow for all ranks.

A pair that does not get through in lockstep, or comes to something wrong there, is played once more on rank threads,
where each rank has its own control flow and may raise alone, before anybody hears of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import localtensor as lt
from localtensor.errors import LocalTensorError
from localtensor.errors.formatting import in_a_line
from localtensor.layout.shards import assemble, split
from strategies.base.uninterrupted import quiet
from strategies.planner.audit.compare import compared
from strategies.planner.audit.pairs import Pair
from strategies.planner.audit.rank_run import Part, Told, heard, mesh_on, planner
from strategies.torch_api.mesh_and_caches import averages, forget
from strategies.torch_api.propagation_memo import remembering

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
