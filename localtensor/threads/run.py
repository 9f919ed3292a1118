"""A program on rank threads in this process: one thread per rank, one running at a time, under a schedule."""

import math
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch.distributed import distributed_c10d as c10d

from localtensor._util.ambient import running, set_guard, set_rules, simulation_entered, simulation_of_this_rank
from localtensor._util.call_sites import in_debugger, is_user_file, place_of_error, place_of_frame
from localtensor._util.events import Call, Place
from localtensor.collectives.c10d_table import kernels_in_place
from localtensor.collectives.rendezvous import RunObserver
from localtensor.concurrency.schedule import Schedule
from localtensor.errors import GroupsLeftOver, ModeBusy, NestedRun, NeverEnded, NoTime, ProgramFault
from localtensor.errors.base import wait_lines
from localtensor.errors.runs import DAY
from localtensor.threads import dist_patches, rank_world
from localtensor.threads.cores import threads_per_op
from localtensor.threads.diagnosis import RankEnd
from localtensor.threads.faults import FaultMissed, Faults, FaultsOfRun
from localtensor.threads.helper_threads import helper_threads
from localtensor.threads.isolation.isolate import Isolation, ranks_isolated
from localtensor.threads.isolation.modules import in_world
from localtensor.threads.process_group import Kernels
from localtensor.threads.replicas import ReplicaWatch, training_hooked
from localtensor.threads.run_token import Abort, stack_reserved
from localtensor.threads.simulation import Simulation
from localtensor.threads.state import shared_propagation
from localtensor.threads.state.swap import SLOTS, OutsideState, RankState, switch
from localtensor.threads.store import RankStore
from localtensor.threads.symmetric.patches import symmetric_memory_patched

GRACE = 5.0  # seconds that an interrupted rank has to end, before its thread is abandoned
Body = Callable[[int], Any]


@dataclass(frozen=True, slots=True)
class ThreadRun:
    """The result of a simulation: each rank's value, the ranks' calls, and the schedule that repeats it.

    `values` is empty if a rank has died and the program is to be started again.
    """

    values: tuple[Any, ...]
    calls: tuple[Call, ...]
    replay: str
    groups_left: "GroupsLeftOver | None"


def run_in_threads(
    body: Body,
    ranks: int,
    schedule: Schedule,
    seed: int,
    timeout: float | None,
    *,
    share: bool | None = None,
    fresh: bool = False,
    roots: Sequence[object] = (),
    report: Callable[[list[str], list[str]], None] | None = None,
    faults: Faults | None = None,
    start: int = 0,
    replicas: str | None = None,
    races: bool = True,
    observer: RunObserver | None = None,
) -> ThreadRun:
    """Run `body(rank)` on every rank, each with its own world; `share`: see `localtensor.run`.

    `fresh`: each rank imports its modules itself, also those that this process has imported (torch and the like excepted).
    `report(shared, writes)` is called at the end: what ranks shared, and the writes to it that were seen, a line each.
    `roots`: functions that the ranks will call, if what they write to the globals of modules is to be kept apart.
    `faults`: those on purpose; `start` counts the starts of the program, from 0.
    `replicas`, `races`: see `localtensor.run`.  `observer` sees calls, waits and ends.

    Raises one of localtensor.errors.ProgramFault, `NestedRun`, or what interrupted it (KeyboardInterrupt).
    """
    outer = simulation_of_this_rank()
    if outer is not None:
        raise NestedRun(outer.rank(), place_of_frame(sys._getframe(1)))
    left: dict[int, dict[str, rank_world.MadeGroup]] = {}
    share = os.environ.get("LOCALTENSOR_SHARE") != "0" if share is None else share
    with (
        training_hooked(),  # first: the ranks' own tables of hooks begin as the process's
        _simulation_context(ranks, schedule, seed, share) as (simulation, rank_worlds, isolating),
        ranks_isolated(ranks, roots, fresh=fresh) if fresh or roots else nullcontext() as isolation,
    ):
        if isolation is not None:
            isolating.append(isolation)
        if faults is not None:
            simulation.faults = FaultsOfRun(faults, start, simulation)
        simulation.detects_races = races
        simulation.observer = observer
        if replicas != "ignore":
            simulation.kernels.replicas = ReplicaWatch(simulation, every=replicas == "check")

        def run_rank(rank: int) -> None:
            _run_rank(simulation, rank_worlds[rank], body, left)

        def in_own_world(rank: int) -> None:
            with in_world(isolation.worlds[rank]):  # type: ignore[union-attr]  # only where there is one
                run_rank(rank)

        try:
            simulation.run_token.start(run_rank if isolation is None else in_own_world)
            _wait_for_ranks(simulation, timeout)
        except BaseException as error:  # why: the ranks must be ended, whatever interrupts; it is raised again
            vars(error)["rank_lines"] = _rank_lines(simulation)
            try:
                simulation.run_token.interrupt(GRACE)
            except KeyboardInterrupt:  # a second one: do not wait for ranks that do not end
                simulation.run_token.interrupt(0)
            raise
        finally:
            simulation.run_token.join()
            if report is not None and isolation is not None:
                report(*isolation.report())
        if simulation.run_token.refusal is not None:
            raise simulation.run_token.refusal
        # A start again has the same answers only under the policy itself.
        text = schedule.text if start == 0 else getattr(schedule, "policy", schedule).text
        return _result(simulation, text, faults, left)


def _result(
    simulation: Simulation, text: str, faults: Faults | None, left: dict[int, dict[str, rank_world.MadeGroup]]
) -> ThreadRun:
    """The result of a run whose ranks have ended, under the schedule of this text; raises the run's error."""
    calls = tuple(simulation.calls())
    if faults is not None and simulation.faults.over:
        return ThreadRun((), calls, text, None)
    simulation.close()
    if simulation.verdict is not None:
        if isinstance(simulation.verdict, ProgramFault):
            simulation.verdict.log, simulation.verdict.replay = calls, _replay_text(text, faults)
        raise simulation.verdict
    if faults is not None and (missed := simulation.faults.missed()):
        warnings.warn(
            FaultMissed(f"the run ended without a fault that was asked for: {'; '.join(missed)}"), stacklevel=4
        )
    values = tuple(simulation.ended[rank].value for rank in range(simulation.ranks))
    return ThreadRun(values, calls, text, _groups_left(left))


def _replay_text(schedule: str, faults: Faults | None) -> str | None:
    """The arguments of `run` that repeat this run; None where they are the defaults."""
    parts = [] if schedule == "round_robin" else [f"schedule={schedule!r}"]
    if faults is not None:
        parts.append(f"faults=lt.{faults!r}")
    return ", ".join(parts) or None


def limit_from_environment(otherwise: float | None) -> float | None:
    """The seconds of LOCALTENSOR_TIMEOUT, or `otherwise` if it is unset; None for no limit, which 0 means too.

    Raises `NoTime` unless that is a number of seconds up to a day.
    """
    text = os.environ.get("LOCALTENSOR_TIMEOUT")
    try:
        seconds = float(text or otherwise or 0)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= DAY:
        raise NoTime("run", "LOCALTENSOR_TIMEOUT" if text else "timeout", text or otherwise)
    return seconds or None


@contextmanager
def _simulation_context(
    ranks: int, schedule: Schedule, seed: int, share: bool
) -> Iterator[tuple[Simulation, list[rank_world.RankWorld], list[Isolation]]]:
    """A simulation with torch.distributed replaced and the caller's state saved; both are restored at the end."""
    dist_patches.register_backend()
    states = [RankState(rank, ranks, seed) for rank in range(ranks)]
    rank_worlds: list[rank_world.RankWorld] = []
    isolating: list[Isolation] = []

    def swap(old: int | None, new: int | None) -> None:
        for isolation in isolating:
            isolation.turn(new)
        sharing.update()  # entered below, before the first rank runs
        switch(None if old is None else states[old], None if new is None else states[new])
        if new is not None:
            c10d._world = rank_worlds[new]
        for isolation in isolating:
            isolation.settle()

    simulation = Simulation(ranks, schedule, swap)
    simulation.kernels = Kernels(simulation)
    simulation.store = RankStore(simulation)
    rank_worlds.extend(rank_world.RankWorld(simulation, rank) for rank in range(ranks))
    with ExitStack() as stack:
        stack.enter_context(simulation_entered(simulation, ModeBusy))
        stack.enter_context(stack_reserved())
        stack.enter_context(OutsideState())
        stack.enter_context(dist_patches.patched_torch_distributed())
        stack.enter_context(kernels_in_place(simulation.kernels))
        stack.enter_context(helper_threads(simulation, rank_worlds))
        stack.enter_context(symmetric_memory_patched())
        stack.enter_context(_one_core_per_op())
        sharing = stack.enter_context(shared_propagation.propagation_shared(SLOTS["patches"].inside, on=share))
        stack.enter_context(rank_world.process_globals_guarded())
        yield simulation, rank_worlds, isolating


@contextmanager
def _one_core_per_op() -> Iterator[None]:
    """Ops run on one core, as in torchrun's processes: sums are equal, and no rank starts a team of OpenMP threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads_per_op())
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _run_rank(
    simulation: Simulation, world: rank_world.RankWorld, body: Body, left: dict[int, dict[str, rank_world.MadeGroup]]
) -> None:
    """Run one rank, in its thread."""
    set_rules(simulation.rules)
    set_guard(simulation.guard)
    torch.set_num_threads(torch.get_num_threads())  # OpenMP's own number is per thread, and starts at all cores
    torch.autograd.set_multithreading_enabled(False)  # backward stays in this thread
    threading.current_thread()._daemonic = False  # type: ignore[attr-defined]  # what the threads that it starts inherit
    rank_world.init_default_group(world, "gloo")
    world.implicit = True
    try:
        with nullcontext() if simulation.observer is None else simulation.observer.around(world.rank):
            value = body(world.rank)
        if simulation.helpers is not None and not simulation.forked:
            simulation.helpers.finish(world.rank)
    except Abort:
        raise
    except BaseException as error:  # why: whatever ends a rank is reported as its outcome
        if simulation.forked:
            _end_child(error)
        if not simulation.run_token.aborting:
            if simulation.helpers is not None:
                simulation.helpers.end(world.rank)
            simulation.end(world.rank, RankEnd(error=error, place=place_of_error(error)))
    else:
        if simulation.forked:
            _end_child(None)
        simulation.end(world.rank, RankEnd(value))
    finally:
        # Not for a lost rank: the run is over, and the state belongs to the caller again.
        if world.rank not in simulation.run_token.lost:
            left[world.rank] = rank_world.leave_groups(world)
            if simulation.memory is not None:
                simulation.memory.leave(world.rank, world.rank)
            rank_world.clear_sharding_cache()


def _after_fork() -> None:
    simulation = running()
    if simulation is not None:
        simulation.forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _end_child(error: BaseException | None) -> NoReturn:
    """End a process that a rank has forked, as Python ends its own: the threads of the run are not in it."""
    code = 0
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    elif error is not None:
        traceback.print_exception(error)
        code = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code & 0xFF)


def _wait_for_ranks(simulation: Simulation, timeout: float | None) -> None:
    """Return when all ranks have ended; end a run past its limit, unless it is being debugged."""
    token = simulation.run_token
    while not token.wait(timeout):
        holder = token.holder
        frame = None if holder is None else sys._current_frames().get(token.idents.get(holder, 0))
        if in_debugger(frame):
            continue
        running_at, waits = place_of_frame(frame), simulation.waits()
        left_behind = token.interrupt(GRACE)
        if simulation.verdict is None:
            simulation.verdict = NeverEnded(timeout or 0.0, running_at, holder, waits, left_behind)
        return


def _rank_lines(simulation: Simulation) -> list[str]:
    """What each rank does now: the user's calls of the one that runs, the innermost first, and what the others wait for."""
    token = simulation.run_token
    holder = token.holder
    frame = None if holder is None else sys._current_frames().get(token.idents.get(holder, 0))
    calls = (
        [Place(f.f_code.co_filename, line, f.f_code.co_name) for f, line in traceback.walk_stack(frame)]
        if frame
        else []
    )
    theirs = [str(place) for place in calls if is_user_file(place.file)]
    running = [f"  rank {holder} was running at {', called at '.join(theirs[:MOST_CALLS])}"] if theirs else []
    return [*running, *wait_lines(simulation.waits())]


MOST_CALLS = 12


def _groups_left(left: dict[int, dict[str, rank_world.MadeGroup]]) -> GroupsLeftOver | None:
    made = {name: one for by_name in left.values() for name, one in by_name.items()}
    if not made:
        return None
    places = {name: Place(*line) if line else None for name, (_, line) in made.items()}
    groups = {name: ranks for name, (ranks, _) in made.items()}
    return GroupsLeftOver(groups, sorted(rank for rank, by_name in left.items() if by_name), places)
