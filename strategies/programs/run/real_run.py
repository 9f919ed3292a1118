"""Runs of cases and programs by DTensor itself with their placements: on real processes, and simulated in this process.

Only a candidate that is wrong on real processes is called Unsound.  A rule that DTensor does not follow (it
redistributes first), or whose local arguments it rewrites so that the result is right, is cleared.

Simulated programs run in one control flow for all ranks.  A program that does not complete so, or whose result is
wrong, runs again on rank threads, where each rank has its own control flow and may raise alone.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.placement_types import Placement

import localtensor as lt
from localtensor._util import Outcome
from localtensor.errors import LocalTensorError, error_in_one_line
from localtensor.layout import assemble_axis, short
from strategies.base.signals import quiet
from strategies.model.kernels import REJECTIONS, placed_call, run_call
from strategies.model.oracle import OracleResult, mutates
from strategies.model.rule import Call, Program
from strategies.programs.run import rank_run
from strategies.programs.run.law_steps import LAWS
from strategies.programs.run.program_oracle import has_partial, oracle_of_program, oracle_of_sample, program_call
from strategies.programs.run.rank_run import ProgramRankResult, ProgramRankTask
from strategies.programs.run.step_functions import RINGS, local_inputs_of
from strategies.programs.run.verdict import Confirmation, confirmation_of, raises
from strategies.torch_api import rank_runs
from strategies.torch_api.code_places import NO_RETURN, no_return_place
from strategies.torch_api.dtensor import registrations_restored
from strategies.torch_api.mesh_and_caches import averages_as_sums, is_refusal_of_rules, world_mesh
from strategies.torch_api.rank_runs import MeshTask, RankProcesses
from strategies.validation.difference import coarsest_eps
from strategies.validation.probe import Case

RulesModule = tuple[str, str]
"""The user's rules module, and its folder."""


SECONDS_AFTER_SIMULATION = 2.0
"""Processor time in seconds for a call from which simulated ranks have not returned either, in a longer time."""


class RunsStopped(Exception):
    """The real runs of a `ProgramRealRuns` were stopped from another thread."""


class ProgramRealRuns(RankProcesses):
    """Real processes that confirm cases and programs, under the user's rules module `home`.

    A thread that holds the lock `turn` gives it to others while the processes are at work.
    """

    def __init__(self, backend: str, device: str = "cpu", home: RulesModule = ("", "")) -> None:
        super().__init__(backend)
        self.device, self.home = device, home
        self.turn: threading.Lock | None = None
        self._stopped = False

    def run(self, play: Callable[[bytes], bytes], parts: Sequence[Any]) -> list[Outcome]:
        """As of `RankProcesses`.  Raises `RunsStopped`."""
        with self._others_turn():
            return super().run(play, parts)

    def renew(self, ranks: int) -> None:
        """As of `RankProcesses`.  Raises `RunsStopped`."""
        with self._others_turn():
            super().renew(ranks)

    def stop(self) -> None:
        """From another thread: end the processes, and run none any more."""
        self._stopped = True
        self.kill()

    @contextlib.contextmanager
    def _others_turn(self) -> Iterator[None]:
        if self._stopped:
            raise RunsStopped
        if self.turn is None:
            yield
            return
        self.turn.release()
        try:
            yield
        finally:
            self.turn.acquire()

    def confirm(self, case: Case, *, expected: str = "") -> Confirmation:
        """Run the case on real processes; in new ones if `expected`, what a probe has found, is that a rank raises.

        Never hangs: the pool ends processes that do.
        """
        parts = case_tasks(case, self.device, self.home)
        return self._confirmed(parts, functools.partial(case_confirmation, case), expected)

    def confirm_program(self, program: Program, *, expected: str = "") -> Confirmation:
        """Run the program on real processes, as `confirm`.  Raises as `local_inputs_of` and `oracle_of_program` do."""
        oracle = oracle_of_program(program)
        coarse = coarsest_eps(program.sample.tensors, program.inputs)
        parts = program_tasks(program, self.device, self.home)
        return self._confirmed(parts, lambda outs: _confirmation(oracle, program.mesh, outs, (), coarse), expected)

    def _confirmed(
        self, parts: Sequence[ProgramRankTask], verdict: Callable[[Sequence[Outcome]], Confirmation], expected: str
    ) -> Confirmation:
        """The verdict on the outcomes of a run.  Where ranks raise, that of a run in fresh processes counts.

        DTensor keeps more from call to call than its caches that can be emptied: the second `addr` with a complex `alpha`
        raises in torch 2.13, in processes in which the first one is right.
        """
        raising = " raises " in expected
        if raising:
            self.renew(len(parts))
        if no_return_place(expected) is not None:
            parts = [replace(part, seconds=SECONDS_AFTER_SIMULATION) for part in parts]
        fresh = self.fresh(len(parts))
        first = verdict(self.run(rank_run.run_pickled_task, parts))
        raised = bool(first.refused or (first.rank_results and raises(first.wrong)))
        if raising and not (raised or first.wrong):  # perhaps in processes that have run it
            return self._confirmed(parts, verdict, "")
        if raised and leaves_domain(parts):
            return Confirmation("", "plain torch itself refuses what the ranks' partial inputs add up to")
        if fresh or not raised:
            return first
        if first.refused.startswith(NO_RETURN):  # it has taken its time, and does not depend on other calls
            return first
        self.renew(len(parts))
        second = verdict(self.run(rank_run.run_pickled_task, parts))
        if second.wrong or second.refused or second.failed:
            return second
        note = f"only in processes that have run other calls: {first.wrong or first.note}"
        return replace(second, note=note, after_others=True)


def case_tasks(case: Case, device: str, home: RulesModule = ("", "")) -> list[ProgramRankTask]:
    """The task of each rank for a case."""
    placements = tuple((p,) for p in case.rule.inputs if p is not None)
    made = ProgramRankTask(placed_call(case.sample.call, device), placements, (), (), (), device, home, (case.ranks,))
    return rank_tasks(made, case.oracle.inputs, case.held)


def program_tasks(program: Program, device: str, home: RulesModule = ("", "")) -> list[ProgramRankTask]:
    """The task of each rank for a program."""
    call: Call = program_call(program)
    made = ProgramRankTask(call, program.inputs, (), (), (), device, home, program.mesh, program.flattened)
    return rank_tasks(made, program.sample.tensors, local_inputs_of(program))


def rank_tasks(
    part: ProgramRankTask, whole: Sequence[Tensor], held: Sequence[Sequence[Tensor]]
) -> list[ProgramRankTask]:
    """The task of each rank: `held[leaf][rank]` are its pieces of the whole tensors."""
    sized = replace(part, shapes=tuple(tuple(t.shape) for t in whole), strides=tuple(t.stride() for t in whole))
    ranks = len(held[0]) if held else 1
    pieces = [tuple(column[rank].detach().cpu().clone() for column in held) for rank in range(ranks)]
    return [replace(sized, pieces=mine) for mine in pieces]


def leaves_domain(parts: Sequence[ProgramRankTask]) -> bool:
    """Whether plain torch refuses the tensors that the pieces of the ranks make, added in either order.

    A sum of parts rounds: a probability of 1.0 may come out as 1.0000000000000002, which `bernoulli` refuses on one device, too.
    """
    call, mesh = parts[0].call, parts[0].mesh or (len(parts),)
    for order in (1, -1):
        try:
            made = [
                _folded([part.pieces[leaf] for part in parts], layout, mesh, order)
                for leaf, layout in enumerate(parts[0].placements)
            ]
        except LocalTensorError:  # a placement of DTensor's own
            return False
        try:
            with torch.random.fork_rng(devices=[]):
                run_call(call, made, mutates=mutates(call.op))
        except REJECTIONS:
            return True
    return False


def _folded(held: Sequence[Tensor], layout: Sequence[Placement], mesh: Sequence[int], order: int) -> Tensor:
    """The whole of the pieces; those of a partial axis are added in rank order, or from the last on if `order` is -1."""
    for placement, size in reversed(list(zip(layout, mesh, strict=True))):
        step = order if isinstance(placement, Partial) else 1
        held = [assemble_axis(held[i : i + size][::step], placement) for i in range(0, len(held), size)]
    return held[0]


def case_confirmation(case: Case, outcomes: Sequence[Outcome]) -> Confirmation:
    """The verdict on a real run of a case."""
    claimed = [short(p) for p in case.rule.outputs]
    coarse = coarsest_eps(case.oracle.inputs, [(p,) for p in case.rule.inputs])
    return _confirmation(case.oracle, (case.ranks,), outcomes, claimed, coarse)


def _confirmation(
    oracle: OracleResult, mesh: tuple[int, ...], outcomes: Sequence[Outcome], claimed: Sequence[str], coarse: float
) -> Confirmation:
    fault = rank_runs.first_rank_failure(outcomes)
    if fault is None:
        return confirmation_of(oracle, mesh, rank_runs.returned_values(outcomes), claimed, coarse=coarse)
    if fault.refused:
        return Confirmation("", fault.text, refused=fault.refused)
    if fault.raised is None:
        return Confirmation(fault.text)
    note = f"the stage itself failed: {fault.raised.kind}: {fault.raised.message}"
    return Confirmation("", note, failed=fault.raised.traceback)


BATCH = 128
"""The number of programs whose pieces are in memory at one time."""


def run_simulated_programs(programs: Sequence[Program], *, quick: bool = False) -> list[Confirmation]:
    """The result of each program on simulated ranks, in their order.

    What is wrong in lockstep is run on rank threads, whose result counts.  With `quick` the result in lockstep counts, where
    there is one: in a search whose outcome is run again.

    A program that cannot be distributed, or that plain tensors refuse, has a note that begins with `no such program`,
    and does not affect the others.  `ProgramRealRuns` confirms those that are `wrong`.
    """
    found: dict[int, Confirmation] = {}
    oracles: dict[Any, OracleResult] = {}
    for first in range(0, len(programs), BATCH):
        works: dict[int, MeshTask[Confirmation]] = {}
        around = quiet(), averages_as_sums("simulated"), torch.random.fork_rng(devices=[]), registrations_restored()
        with contextlib.ExitStack() as stack:  # random ops draw, and programs may register rules
            for one in around:
                stack.enter_context(one)
            for number, program in enumerate(programs[first : first + BATCH], first):
                try:
                    parts = program_tasks(program, "cpu")
                    works[number] = mesh_task_of(program, _oracle(program, oracles), parts)
                except (*REJECTIONS, LocalTensorError) as error:
                    found[number] = Confirmation("", f"no such program: {error_in_one_line(error)}")
            found.update(
                zip(
                    works,
                    rank_runs.run_simulated(list(works.values()), (lambda _: True) if quick else is_right),
                    strict=True,
                )
            )
    return [found[number] for number in range(len(programs))]


def _oracle(program: Program, known: dict[Any, OracleResult]) -> OracleResult:
    key = id(program.sample), program.then, program.seed, has_partial(program)
    if key not in known:
        # Without a GPU in use, torch.manual_seed would note three stacks, for devices that may come later.
        seed = torch.manual_seed if torch.cuda.is_initialized() else torch.default_generator.manual_seed
        seed(program.seed)
        known[key] = oracle_of_sample(program.sample, program.then, program.seed, partial=key[-1])
    return known[key]


def is_right(found: Confirmation) -> bool:
    """Whether the result of a run in lockstep is final."""
    return not found.wrong


def mesh_task_of(program: Program, oracle: OracleResult, parts: Sequence[ProgramRankTask]) -> MeshTask[Confirmation]:
    """The work of all ranks for a program, and the function that compares their results with the oracle."""

    def verdict(given: dict[int, ProgramRankResult], fault: str) -> Confirmation:
        if fault.startswith(NO_RETURN):
            return Confirmation("", f"DTensor refuses this call on every rank: {fault}", refused=fault)
        if fault:
            return Confirmation(f"stops: {fault}")
        coarse = coarsest_eps(program.sample.tensors, program.inputs)
        return confirmation_of(oracle, program.mesh, list(given.values()), coarse=coarse)

    def on_rank(mesh: DeviceMesh, rank: int) -> ProgramRankResult:
        # An op in place writes to its pieces: each run of the same work begins with the values that were drawn.
        fresh = replace(parts[rank], pieces=tuple(piece.clone() for piece in parts[rank].pieces))
        return rank_run.run_task(fresh, mesh)

    mesh = world_mesh, "cpu", program.mesh, program.flattened
    return MeshTask(program.ranks, mesh, functools.partial(_lockstep_results, parts), on_rank, verdict)


class NeedsRankThreads(Exception):
    """A program whose ranks have random generators or handlers of their own."""


def _lockstep_results(parts: Sequence[ProgramRankTask], mesh: DeviceMesh) -> list[ProgramRankResult]:
    """The results of all ranks in lockstep, from one call on `LocalTensor` pieces.

    Raises `NeedsRankThreads` for a law of random ops and context parallelism, which need a random
    generator and a control flow for each rank.
    """
    if getattr(parts[0].call, "then", "") in {**LAWS, **RINGS}:
        raise NeedsRankThreads("laws of random ops and context parallelism")
    columns = zip(*(part.pieces for part in parts), strict=True)
    pieces = tuple(lt.LocalTensor(list(column)) for column in columns)
    try:
        outs = rank_run.call_results(replace(parts[0], pieces=pieces), mesh)
    except Exception as error:  # why: a rule may raise anything, and what is no refusal is raised again
        if not is_refusal_of_rules(error):
            raise
        return [ProgramRankResult("op", (error_in_one_line(error),) * len(parts))] * len(parts)
    by_rank = functools.partial(rank_runs.values_by_rank, ranks=len(parts))
    local = [by_rank(out.to_local() if isinstance(out, DTensor) else out) for out in outs]
    placed = [(out, pieces) for out, pieces in zip(outs, local, strict=True) if isinstance(out, DTensor)]
    misfits = [
        next((wrong for out, p in placed if (wrong := rank_run.misfit(out, tuple(p[rank].shape), rank))), None)
        for rank in range(len(parts))
    ]
    errors = tuple(error_in_one_line(wrong) if wrong else "" for wrong in misfits) if any(misfits) else ()
    # Where pieces do not fit the shape that DTensor says, they may make the right tensor all the same.
    whole = [] if errors else [by_rank(out.full_tensor() if isinstance(out, DTensor) else out) for out in outs]
    return [
        ProgramRankResult(
            "full_tensor" if errors else "",
            errors,
            tuple(map(rank_run.placement_text, outs)),
            tuple(tuple(p[rank].shape) if isinstance(p[rank], Tensor) else None for p in local),
            tuple(p[rank] for p in local),
            tuple(w[rank] for w in whole),
        )
        for rank in range(len(parts))
    ]
