"""Runs of cases and programs by DTensor itself with their placements: on real processes, and simulated in this process.

Only a candidate that is wrong on real processes is called Unsound.  A rule that DTensor does not follow (it redistributes
first), or whose local arguments it rewrites so that the result is right, is cleared.

Simulated programs run in one control flow for all ranks.  A program that does not complete so, or whose result is wrong,
runs again on rank threads, where each rank has its own control flow and may raise alone.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import localtensor as lt
from localtensor._util import Outcome
from localtensor.errors import LocalTensorError, in_a_line
from localtensor.layout import short
from strategies.base.signals import quiet
from strategies.model.oracle import REFUSALS, Truth
from strategies.model.rule import Call, Program
from strategies.programs.run.local_inputs import held_of
from strategies.programs.run.program_oracle import call_of_program, has_partial, truth_about, truth_of
from strategies.programs.run.rank_run import RankResult, RankTask, placement_text, play, played, results_on
from strategies.programs.run.verdict import Confirmation, judged
from strategies.torch_api.mesh_and_caches import averages, mesh_of
from strategies.torch_api.rank_runs import RankProcesses, Work, by_rank, lost, simulated, unpacked
from strategies.validation.difference import coarsest
from strategies.validation.probe import Case

Home = tuple[str, str]
"""The user's rules module, and its folder."""


class RealRuns(RankProcesses):
    """Real processes that confirm cases and programs, under the user's rules module `home`."""

    def __init__(self, backend: str, device: str = "cpu", home: Home = ("", "")) -> None:
        super().__init__(backend)
        self.device, self.home = device, home

    def confirm(self, case: Case) -> Confirmation:
        """Run the case on real processes.  Never hangs: the pool ends processes that do."""
        return weigh(case, self.run(play, parts_of(case, self.device, self.home)))

    def confirm_program(self, program: Program, truth: Truth | None = None) -> Confirmation:
        """Run the program on real processes.  Raises as `held_of` and `truth_of` do."""
        truth = truth or truth_of(program)
        return weigh_program(program, truth, self.run(play, program_parts(program, self.device, self.home)))


def parts_of(case: Case, device: str, home: Home = ("", "")) -> list[RankTask]:
    """The task of each rank for a case."""
    placements = tuple((p,) for p in case.rule.inputs if p is not None)
    made = RankTask(case.sample.call, placements, (), (), (), device, home, (case.ranks,))
    return _rank_tasks(made, case.truth.inputs, case.held)


def program_parts(program: Program, device: str, home: Home = ("", "")) -> list[RankTask]:
    """The task of each rank for a program."""
    call: Call = call_of_program(program)
    made = RankTask(call, program.inputs, (), (), (), device, home, program.mesh, program.flattened)
    return _rank_tasks(made, program.sample.tensors, held_of(program))


def _rank_tasks(part: RankTask, whole: Sequence[Tensor], held: Sequence[Sequence[Tensor]]) -> list[RankTask]:
    ranks = len(held[0]) if held else 1
    pieces = [tuple(column[rank].detach().cpu().clone() for column in held) for rank in range(ranks)]
    return [part.of(whole, mine) for mine in pieces]


def weigh(case: Case, outcomes: Sequence[Outcome]) -> Confirmation:
    """The verdict on a real run of a case."""
    claimed = [short(p) for p in case.rule.outputs]
    coarse = coarsest(case.truth.inputs, [(p,) for p in case.rule.inputs])
    return _confirmation(case.truth, (case.ranks,), outcomes, claimed, coarse)


def weigh_program(program: Program, truth: Truth, outcomes: Sequence[Outcome]) -> Confirmation:
    """The verdict on a real run of a program."""
    return _confirmation(truth, program.mesh, outcomes, (), coarsest(program.sample.tensors, program.inputs))


def _confirmation(
    truth: Truth, mesh: tuple[int, ...], outcomes: Sequence[Outcome], claimed: Sequence[str], coarse: float
) -> Confirmation:
    fault = lost(outcomes)
    if fault is None:
        return judged(truth, mesh, unpacked(outcomes), claimed, coarse=coarse)
    if fault.raised is None:
        return Confirmation(fault.text)
    note = f"the stage itself failed: {fault.raised.kind}: {fault.raised.message}"
    return Confirmation("", note, failed=fault.raised.traceback)


BATCH = 128
"""The number of programs whose pieces are in memory at one time."""


def play_all(programs: Sequence[Program]) -> list[Confirmation]:
    """The result of each program on simulated ranks, in their order.

    A program that cannot be distributed, or that plain tensors refuse, has a note that begins with `no such program`, and
    does not affect the others.  `RealRuns` confirms those that are `wrong`.
    """
    found: dict[int, Confirmation] = {}
    truths: dict[Any, Truth] = {}
    for first in range(0, len(programs), BATCH):
        works: dict[int, Work[Confirmation]] = {}
        with quiet(), averages("simulated"), torch.random.fork_rng(devices=[]):  # for random ops
            for number, program in enumerate(programs[first : first + BATCH], first):
                try:
                    parts = program_parts(program, "cpu")
                    works[number] = work_of(program, _truth(program, truths), parts)
                except (*REFUSALS, LocalTensorError) as error:
                    found[number] = Confirmation("", f"no such program: {in_a_line(error)}")
            found.update(zip(works, simulated(list(works.values()), right), strict=True))
    return [found[number] for number in range(len(programs))]


def _truth(program: Program, known: dict[Any, Truth]) -> Truth:
    key = id(program.sample), program.then, program.seed, has_partial(program)
    if key not in known:
        torch.manual_seed(program.seed)
        known[key] = truth_about(program.sample, program.then, program.seed, partial=key[-1])
    return known[key]


def right(found: Confirmation) -> bool:
    """Whether the result of a run in lockstep is final."""
    return not found.wrong


def work_of(program: Program, truth: Truth, parts: Sequence[RankTask]) -> Work[Confirmation]:
    """The work of all ranks for a program, and the function that compares their results with the oracle."""

    def verdict(given: dict[int, RankResult], fault: str) -> Confirmation:
        if fault:
            return Confirmation(f"stops: {fault}")
        coarse = coarsest(program.sample.tensors, program.inputs)
        return judged(truth, program.mesh, list(given.values()), coarse=coarse)

    def on_rank(mesh: DeviceMesh, rank: int) -> RankResult:
        return played(parts[rank], mesh)

    mesh = mesh_of, "cpu", program.mesh, program.flattened
    return Work(program.ranks, mesh, functools.partial(_lockstep_results, parts), on_rank, verdict)


def _lockstep_results(parts: Sequence[RankTask], mesh: DeviceMesh) -> list[RankResult]:
    """The results of all ranks in lockstep, from one call on `LocalTensor` pieces."""
    columns = zip(*(part.pieces for part in parts), strict=True)
    pieces = tuple(lt.LocalTensor(list(column)) for column in columns)
    outs = results_on(replace(parts[0], pieces=pieces), mesh)
    ranks = range(len(parts))
    local = [by_rank(out.to_local() if isinstance(out, DTensor) else out, len(parts)) for out in outs]
    whole = [by_rank(out.full_tensor() if isinstance(out, DTensor) else out, len(parts)) for out in outs]
    placements = tuple(map(placement_text, outs))
    return [
        RankResult(
            "", (), placements, tuple(tuple(p[rank].shape) if isinstance(p[rank], Tensor) else None for p in local),
            tuple(p[rank] for p in local), tuple(w[rank] for w in whole),
        ) for rank in ranks
    ]  # fmt: skip
