"""A program run by rank threads in this process: one thread a rank, one at a time, under a schedule."""

import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from localtensor._util.ambient import entered, of_rank, put_guard, put_rules
from localtensor._util.call_sites import in_debugger, place_of, raised_at, stack_of
from localtensor._util.events import Call, Place
from localtensor.collectives.c10d_table import kernels_in_place
from localtensor.concurrency.schedule import Schedule
from localtensor.errors import GroupsLeftOver, LocalTensorError, ModeBusy, NestedRun, NeverEnded, NoTime, ProgramFault
from localtensor.threads import dist_patches, rank_world
from localtensor.threads.diagnosis import Ended
from localtensor.threads.process_group import Kernels
from localtensor.threads.run_token import Abort
from localtensor.threads.simulation import Simulation
from localtensor.threads.state import shared_propagation
from localtensor.threads.state.swap import SLOTS, OutsideState, RankState, switch
from localtensor.threads.store import RankStore

GRACE = 5.0  # seconds that a rank past its limit has to obey, before its thread is given up
DAY = 24 * 3600.0  # seconds: no limit is longer
Body = Callable[[int], Any]


@dataclass(frozen=True, slots=True)
class Ran:
    """What a simulation leaves: each rank's value, what the ranks called, and the text that repeats it."""

    values: tuple[Any, ...]
    calls: tuple[Call, ...]
    replay: str
    groups_left: "GroupsLeftOver | None"


def run_in_threads(
    body: Body, ranks: int, schedule: Schedule, seed: int, timeout: float | None, *, share: bool | None = None
) -> Ran:
    """Every rank has run `body(rank)` in a world of its own; `share`: see `localtensor.run`.

    Raises the error that explains why not: one of localtensor.errors.ProgramFault, `NestedRun`, or what
    interrupted it (KeyboardInterrupt).
    """
    outer = of_rank()
    if outer is not None:
        raise NestedRun(outer.rank(), place_of(sys._getframe(1)))
    left: dict[int, dict[str, rank_world.Made]] = {}
    with _stage(ranks, schedule, seed, shared_propagation.wanted(share)) as (simulation, rank_worlds):
        try:
            simulation.baton.start(lambda rank: _live(simulation, rank_worlds[rank], body, left))
            _await(simulation, timeout)
        except BaseException:  # why: the ranks must be ended, whatever interrupts
            try:
                simulation.baton.interrupt(GRACE)
            except KeyboardInterrupt:  # a second one: whoever presses it will not wait for ranks that do not obey
                simulation.baton.interrupt(0)
            raise
        finally:
            simulation.baton.join()
        if simulation.baton.refusal is not None:
            raise simulation.baton.refusal
        simulation.close()
        if simulation.verdict is not None:
            raise _told(simulation.verdict, simulation, schedule)
        return Ran(
            tuple(simulation.ended[rank].value for rank in range(ranks)),
            tuple(simulation.calls()),
            schedule.text,
            _groups_left(left),
        )


def limit_said(otherwise: float | None) -> float | None:
    """The seconds that LOCALTENSOR_TIMEOUT gives a run, or if it says nothing these; None for no limit, which 0 says too.

    Raises `NoTime` for what is no number of seconds up to a day.
    """
    said = os.environ.get("LOCALTENSOR_TIMEOUT")
    try:
        seconds = float(said or otherwise or 0)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= DAY:
        raise NoTime("run", "LOCALTENSOR_TIMEOUT" if said else "timeout", said or otherwise)
    return seconds or None


@contextmanager
def _stage(
    ranks: int, schedule: Schedule, seed: int, share: bool
) -> Iterator[tuple[Simulation, list[rank_world.RankWorld]]]:
    """torch.distributed is ours, the caller's state is put by, and comes back."""
    states = [RankState(rank, ranks, seed) for rank in range(ranks)]
    rank_worlds: list[rank_world.RankWorld] = []

    def swap(old: int | None, new: int | None) -> None:
        sharing.look()  # entered below, before the first rank runs
        switch(None if old is None else states[old], None if new is None else states[new])
        if new is not None:
            c10d._world = rank_worlds[new]

    simulation = Simulation(ranks, schedule, swap)
    simulation.kernels = Kernels(simulation)
    simulation.store = RankStore(simulation)
    rank_worlds.extend(rank_world.RankWorld(simulation, rank) for rank in range(ranks))
    with ExitStack() as stack:
        stack.enter_context(entered(simulation, ModeBusy))
        stack.enter_context(OutsideState())
        stack.enter_context(dist_patches.installed())
        stack.enter_context(kernels_in_place())
        stack.enter_context(_one_core_each())
        sharing = stack.enter_context(shared_propagation.shared(SLOTS["patches"].inside, on=share))
        stack.enter_context(rank_world.kept())
        yield simulation, rank_worlds


@contextmanager
def _one_core_each() -> Iterator[None]:
    """Ops run on one core, as in torchrun's processes: sums come out alike, and no rank starts a team of its own."""
    before = torch.get_num_threads()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _live(
    simulation: Simulation, world: rank_world.RankWorld, body: Body, left: dict[int, dict[str, rank_world.Made]]
) -> None:
    """One rank's life, in its thread."""
    put_rules(simulation.rules)
    put_guard(simulation.guard)
    torch.set_num_threads(torch.get_num_threads())  # OpenMP's own number is per thread, and starts at all cores
    torch.autograd.set_multithreading_enabled(False)  # backward stays in this thread
    rank_world.join(world)
    try:
        value = body(world.rank)
    except Abort:
        raise
    except BaseException as error:  # why: whatever ends a rank is reported with the others
        if not simulation.baton.aborting:
            simulation.end(world.rank, Ended(error=error, place=raised_at(error)))
    else:
        simulation.end(world.rank, Ended(value))
    finally:
        if world.rank not in simulation.baton.lost:  # else the run is over, and what there is now is somebody else's
            left[world.rank] = rank_world.leave(world)
            rank_world.rank_over()


def _await(simulation: Simulation, timeout: float | None) -> None:
    """All ranks have ended; a run past its limit has been ended, unless somebody debugs it."""
    baton = simulation.baton
    while not baton.wait(timeout):
        holder = baton.holder
        frame = None if holder is None else stack_of(baton.idents.get(holder, 0))
        if in_debugger(frame):
            continue
        running_at, waits = place_of(frame), simulation.waits()
        left_behind = baton.interrupt(GRACE)
        if simulation.verdict is None:
            simulation.verdict = NeverEnded(timeout or 0.0, running_at, holder, waits, left_behind)
        return


def _told(error: LocalTensorError, simulation: Simulation, schedule: Schedule) -> LocalTensorError:
    """The verdict, with what the ranks called before it, and how to bring it about again."""
    text = schedule.text
    if isinstance(error, ProgramFault):
        error.log = tuple(simulation.calls())
        error.replay = f"schedule={text!r}" if text != "round_robin" else None
    return error


def _groups_left(left: dict[int, dict[str, rank_world.Made]]) -> GroupsLeftOver | None:
    made = {name: one for by_name in left.values() for name, one in by_name.items()}
    if not made:
        return None
    places = {name: Place(*line) if line else None for name, (_, line) in made.items()}
    groups = {name: ranks for name, (ranks, _) in made.items()}
    return GroupsLeftOver(groups, sorted(rank for rank, by_name in left.items() if by_name), places)
