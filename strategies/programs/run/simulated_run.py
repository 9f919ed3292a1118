"""Programs played in this process, many at a time: DTensor itself in one control flow for all ranks.

A program that does not get through in lockstep is played once more on rank threads, where each rank has its own
control flow and may raise alone; and so is one whose result is wrong, before anybody hears of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import localtensor as lt
from localtensor.errors import LocalTensorError, in_a_line
from strategies.base.signals import quiet
from strategies.model.oracle import REFUSALS, Truth
from strategies.model.program import Program
from strategies.programs.run.program_oracle import has_partial, truth_about
from strategies.programs.run.rank_run import Heard, Part, placement_text, played, results_on
from strategies.programs.run.real_run import program_parts
from strategies.programs.run.verdict import Confirmation, judged
from strategies.torch_api.mesh_and_caches import averages, forget, mesh_of, remembering
from strategies.validation.difference import coarsest

SECONDS = 60.0
"""Time limit of a run of programs on rank threads."""
BATCH = 128
"""Programs whose pieces are in memory at one time."""


@dataclass(frozen=True, slots=True)
class _Job:
    """A program that can be played, its number among all, and what is known of it."""

    number: int
    program: Program
    truth: Truth
    parts: tuple[Part, ...]


def play_all(programs: Sequence[Program]) -> list[Confirmation]:
    """What DTensor makes of each, in their order, played on simulated ranks.

    A program costs itself only, whatever becomes of it: one that cannot be held, or that plain tensors refuse, has a
    note that begins with `no such program`.  What is `wrong` here is to be confirmed by a `Court`.
    """
    found: dict[int, Confirmation] = {}
    truths: dict[Any, Truth] = {}
    for first in range(0, len(programs), BATCH):
        jobs = []
        with quiet(), averages("simulated"), torch.random.fork_rng(devices=[]):  # random ops are run too
            for number, program in enumerate(programs[first : first + BATCH], first):
                try:
                    parts = tuple(program_parts(program, "cpu"))
                    jobs.append(_Job(number, program, _truth(program, truths), parts))
                except (*REFUSALS, LocalTensorError) as error:
                    found[number] = Confirmation("", f"no such program: {in_a_line(error)}")
            for _, group in _grouped(jobs):
                found.update(_played(group))
    return [found[number] for number in range(len(programs))]


def _truth(program: Program, known: dict[Any, Truth]) -> Truth:
    key = id(program.sample), program.then, program.seed, has_partial(program)
    if key not in known:
        torch.manual_seed(program.seed)
        known[key] = truth_about(program.sample, program.then, program.seed, partial=key[-1])
    return known[key]


def _grouped(jobs: Sequence[_Job]) -> list[tuple[Any, list[_Job]]]:
    """Those that share a mesh, in the order of the first of each."""
    groups: dict[Any, list[_Job]] = {}
    for job in jobs:
        groups.setdefault((job.program.mesh, job.program.flattened), []).append(job)
    return list(groups.items())


def _played(jobs: Sequence[_Job]) -> dict[int, Confirmation]:
    heard = in_lockstep(jobs)
    found = {job.number: _judged(job, heard[job.number]) for job in jobs if job.number in heard}
    doubtful = [job for job in jobs if job.number not in found or found[job.number].wrong]
    return found | on_threads(doubtful)


def _judged(job: _Job, heard: Sequence[Heard]) -> Confirmation:
    coarse = coarsest(job.program.sample.tensors, job.program.inputs)
    return judged(job.truth, job.program.mesh, heard, coarse=coarse)


def in_lockstep(jobs: Sequence[_Job]) -> dict[int, list[Heard]]:
    """What each rank hears, by program; programs that do not get through are not there."""
    found: dict[int, list[Heard]] = {}
    first = jobs[0].program
    with contextlib.suppress(LocalTensorError), remembering(), lt.LocalTensorMode(first.ranks):  # works may be left
        mesh = mesh_of("cpu", first.mesh, first.flattened)
        for job in jobs:
            forget()
            with contextlib.suppress(Exception):  # why: whatever stops it, rank threads say who raised what
                found[job.number] = _one_flow(job.parts, mesh)
    forget()
    return found


def _one_flow(parts: Sequence[Part], mesh: DeviceMesh) -> list[Heard]:
    columns = zip(*(part.pieces for part in parts), strict=True)
    pieces = tuple(_on_all(column) for column in columns)
    outs = results_on(replace(parts[0], pieces=pieces), mesh)
    ranks = range(len(parts))
    held = [_by_rank(out.to_local() if isinstance(out, DTensor) else out, len(parts)) for out in outs]
    whole = [_by_rank(out.full_tensor() if isinstance(out, DTensor) else out, len(parts)) for out in outs]
    placements = tuple(map(placement_text, outs))
    return [
        Heard(
            "", (), placements, tuple(tuple(p[rank].shape) if isinstance(p[rank], Tensor) else None for p in held),
            tuple(p[rank] for p in held), tuple(w[rank] for w in whole),
        ) for rank in ranks
    ]  # fmt: skip


def _on_all(pieces: Sequence[Tensor]) -> Tensor:
    return lt.LocalTensor(list(pieces))


def _by_rank(x: Any, ranks: int) -> list[Any]:
    """What each rank has of it; ranks that have the same have one object."""
    if not isinstance(x, lt.LocalTensor):
        return [x.detach() if isinstance(x, Tensor) else x] * ranks
    table = {rank: value for holders, value in x.detach().values() for rank in holders}
    return [table[rank] for rank in range(ranks)]


def on_threads(jobs: Sequence[_Job]) -> dict[int, Confirmation]:
    """The verdict on each program, with a control flow for each rank.

    A fault that ends the run, such as ranks that wait for each other, is the program's that was being played.
    """
    found: dict[int, Confirmation] = {}
    while len(found) < len(jobs):
        left = jobs[len(found) :]
        kept: list[list[Heard]] = [[] for _ in range(left[0].program.ranks)]
        fault = _run(left, kept)
        through = min(map(len, kept))
        for job, heard in zip(left, zip(*kept, strict=False), strict=False):
            found[job.number] = _judged(job, heard)
        if through < len(left):
            found[left[through].number] = Confirmation(f"stops: {fault}")
    return found


def _run(jobs: Sequence[_Job], kept: Sequence[list[Heard]]) -> str:
    """Plays them until all are through, or one stops the run: then this is why."""
    first = jobs[0].program

    def body() -> None:
        mesh = mesh_of("cpu", first.mesh, first.flattened)
        rank = mesh.get_rank()
        for job in jobs:
            forget()
            kept[rank].append(played(job.parts[rank], mesh))

    try:
        lt.run(body, ranks=first.ranks, timeout=SECONDS, leftovers="ignore")
    except LocalTensorError as error:
        return in_a_line(error)
    return ""
