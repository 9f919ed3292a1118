"""Running a task on all ranks of a mesh: in lockstep, on rank threads or on real processes.

The caller defines what each rank does.  This module runs it, limits its time, and reports why ranks did not return.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import implicit_replication

import localtensor as lt
from localtensor._util import Died, Outcome, Raised, Returned, Waiting, pickling
from localtensor.errors import LocalTensorError, error_in_one_line
from localtensor.lockstep import is_rank_number, on_rank
from localtensor.processes import Idleness, Pool, prepare
from strategies.base.time_limit import DoesNotReturn
from strategies.torch_api.code_places import no_return_error, rule_limit
from strategies.torch_api.mesh_and_caches import Answers, cached_propagation, cached_traces, clear_dtensor_caches

THREAD_TIMEOUT = 60.0
"""Time limit of a run on rank threads."""
PROCESS_TIMEOUT = 20.0
RETRY_FACTOR = 3.0
"""The factor by which a second attempt may take longer, after ranks were waiting when the time was up: only a rank that
waits on an idle machine, too, is a finding.  One that has worked all the time had the machine to itself, and one that waited while
processors were free had them."""
ALL_THE_TIME = 0.9
IDLE_SECONDS = 1.5
"""Seconds in which no rank of a real run uses the processor, after which they wait for each other."""
BACKENDS_BY_NAME = {"nccl": "cpu:gloo,cuda:nccl"}
"""The backends for a backend's name: ranks report who raised by tensors on the CPU."""
CALL_SECONDS = 8.0
"""Processor time in seconds after which a call does not return; less than the limits of runs and of steps."""
RANK_MODULES = ("torch._dynamo", "strategies.programs.run.rank_run")
"""What confirming processes need.  DTensor imports torch._dynamo at its first call: the fork server does so once for all."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class MeshTask(Generic[T]):
    """What all ranks of a mesh do together, and the function that turns their results into a verdict.

    `verdict` takes the results by rank, and what stopped the ranks, or "".  Ranks that were stopped have no result.
    """

    ranks: int
    mesh: tuple[Any, ...]
    """The function that makes the mesh, and its arguments: tasks with equal ones share a mesh."""
    in_lockstep: Callable[[DeviceMesh], Sequence[Any]]
    on_rank: Callable[[DeviceMesh, int], Any]
    verdict: Callable[[dict[int, Any], str], T]

    def make_mesh(self) -> DeviceMesh:
        made: DeviceMesh = self.mesh[0](*self.mesh[1:])
        return made


def run_simulated(works: Sequence[MeshTask[T]], right: Callable[[T], bool], *, alone: bool = False) -> list[T]:
    """The verdict on each, in their order, by a run in lockstep if that one is `right`, else by one on rank threads.

    `alone` gives each its own run on threads, for ranks that may go on to the next task while others are stopped.
    """
    found: dict[int, T] = {}
    groups: dict[Any, list[int]] = {}
    for number, work in enumerate(works):
        groups.setdefault(work.mesh, []).append(number)
    for group in groups.values():
        first = run_in_lockstep([works[number] for number in group])
        found.update({number: verdict for number, verdict in zip(group, first, strict=True) if verdict is not None})
        doubtful = [number for number in group if number not in found or not right(found[number])]
        for some in [[number] for number in doubtful] if alone else [doubtful]:
            found.update(zip(some, run_on_threads([works[number] for number in some]), strict=True))
    return [found[number] for number in range(len(works))]


class _World:
    """A mode of so many ranks with a mesh, and what DTensor has propagated there.  It can be entered again."""

    def __init__(self, work: MeshTask[Any]) -> None:
        self.mode, self.answers = lt.LocalTensorMode(work.ranks), Answers()
        self._make = work.make_mesh
        self._mesh: DeviceMesh | None = None
        self._groups: set[str] = set()
        self.stuck = False  # a program was stopped somewhere inside

    def mesh(self) -> DeviceMesh:
        """The mesh, in the mode."""
        if self._mesh is None:
            self._mesh = self._make()
            self._groups = set(self.mode.groups.by_name)
        return self._mesh

    def is_as_new(self) -> bool:
        """Whether no program was stopped inside, or has made or ended a process group, or registered a rule."""
        return not self.stuck and set(self.mode.groups.by_name) == self._groups and self.answers.hold()

    def close(self) -> None:
        """Forget its process groups, outside of the mode."""
        self.mode.groups.lasting = False
        self.mode.groups.close()


_WORLDS: ContextVar[dict[Any, _World] | None] = ContextVar("worlds", default=None)


@contextlib.contextmanager
def shared_worlds() -> Iterator[None]:
    """While active, runs in lockstep on equal meshes share the mesh, and what DTensor has propagated there.

    All runs share the traces of decompositions.
    """
    worlds: dict[Any, _World] = {}
    token = _WORLDS.set(worlds)
    try:
        with cached_traces():
            yield
    finally:
        _WORLDS.reset(token)
        for world in worlds.values():
            world.close()


@contextlib.contextmanager
def _world_of(work: MeshTask[Any]) -> Iterator[_World]:
    """The world of a task, which is kept where worlds are shared, unless the mode itself ends in an error."""
    worlds, key = _WORLDS.get(), (work.ranks, work.mesh)
    world = (worlds or {}).pop(key, None)
    if world is not None and not world.is_as_new():
        world.close()
        world = None
    world = world or _World(work)
    world.mode.groups.lasting = worlds is not None
    try:
        with cached_propagation(world.answers), world.mode:
            yield world
    except BaseException:  # why: it is raised again
        world.close()
        raise
    if worlds is not None:
        worlds[key] = world


def run_in_lockstep(works: Sequence[MeshTask[T]]) -> list[T | None]:
    """The verdict on each in one control flow for all ranks of their mesh; None for one that does not complete."""
    results: list[Sequence[Any] | None] = [None] * len(works)
    stays: dict[int, str] = {}
    limit = rule_limit(CALL_SECONDS)
    # An error of the mode itself leaves the remaining ones without a result.
    with contextlib.suppress(LocalTensorError), _world_of(works[0]) as world:
        mesh = world.mesh()
        for number, work in enumerate(works):
            clear_dtensor_caches()
            try:
                with limit.applied():
                    results[number] = work.in_lockstep(mesh)
            except DoesNotReturn as stuck:
                stays[number], world.stuck = no_return_error(stuck), True
            except Exception:  # why: any failure is repeated on rank threads, which report it by rank
                results[number] = None
    clear_dtensor_caches()
    return [
        work.verdict(dict(enumerate(results[number] or ())), stays.get(number, ""))
        if results[number] is not None or number in stays
        else None
        for number, work in enumerate(works)
    ]


def values_by_rank(x: object, ranks: int) -> list[Any]:
    """Each rank's value of a value in lockstep; ranks with equal ones share one object."""
    if is_rank_number(x):
        return [on_rank(x, rank) for rank in range(ranks)]
    if not isinstance(x, lt.LocalTensor):
        return [x.detach() if isinstance(x, Tensor) else x] * ranks
    table = {rank: value for holders, value in x.detach().values() for rank in holders}
    return [table[rank] for rank in range(ranks)]


def run_on_threads(works: Sequence[MeshTask[T]]) -> list[T]:
    """The verdict on each, with a control flow for each rank of their mesh.

    A fault that ends the run, such as a deadlock, is attributed to the task that was running.
    """
    found: list[T] = []
    while len(found) < len(works):
        left = works[len(found) :]
        per_rank: list[list[Any]] = [[] for _ in range(left[0].ranks)]
        fault = _run(left, per_rank)
        done = min(map(len, per_rank))
        found += [work.verdict(dict(enumerate(values)), "") for work, values in zip(left, zip(*per_rank), strict=False)]
        if done < len(left):
            some = {rank: own[done] for rank, own in enumerate(per_rank) if len(own) > done}
            found.append(left[done].verdict(some, fault))
    return found


def with_implicit_replication(work: MeshTask[T]) -> MeshTask[T]:
    """The same, with DTensor's own switch on in each rank: it is of a thread."""

    def on_rank(mesh: DeviceMesh, rank: int) -> Any:
        with implicit_replication():
            return work.on_rank(mesh, rank)

    return replace(work, on_rank=on_rank)


def _run(works: Sequence[MeshTask[Any]], results: Sequence[list[Any]]) -> str:
    """Append each rank's results to its list until all tasks are done.  Returns why the run stopped before, or ""."""

    def body() -> None:
        mesh = works[0].make_mesh()
        rank = mesh.get_rank()
        for work in works:
            clear_dtensor_caches()
            results[rank].append(work.on_rank(mesh, rank))

    try:
        lt.run(body, ranks=works[0].ranks, timeout=THREAD_TIMEOUT, leftovers="ignore")
    except LocalTensorError as error:
        return error_in_one_line(error)
    return ""


class RankProcesses:
    """A pool of real processes, started at the first call and reused while the number of ranks is the same.

    There is one pool at a time, and one more while `renew` is used: each rank takes a process of a hundred megabytes.  `seconds`
    is the limit of a call.
    """

    def __init__(self, backend: str = "gloo", seconds: float = PROCESS_TIMEOUT) -> None:
        self.backend, self.seconds = backend, seconds
        self._pool: Pool | None = None
        self._next: Pool | None = None
        self._served = False

    def __enter__(self: T) -> T:  # noqa: PYI019
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fresh(self, ranks: int) -> bool:
        """Whether the next call of so many ranks is the first of its processes."""
        return not self._served or self._pool is None or self._pool.ranks != ranks or not self._pool.pids

    def renew(self, ranks: int) -> None:
        """End all processes; the next call has new ones, and others are started beside it for the call after the next `renew`."""
        self._close_pool()
        if self._next is not None and self._next.ranks != ranks:
            self._close_next()
        self._pool, self._next = self._next, self._made(ranks)
        self._next.begin()

    def close(self) -> None:
        """End all processes; the next call starts new ones."""
        self._close_pool()
        self._close_next()

    def kill(self) -> None:
        """End the processes, also while another thread waits for them: they have died, for it."""
        for pool in (self._pool, self._next):
            if pool is not None:
                pool.kill()

    def _close_next(self) -> None:
        if self._next is not None:
            self._next.close()
        self._next = None

    def _close_pool(self) -> None:
        if self._pool is not None:
            self._pool.close()
        self._pool, self._served = None, False

    def _made(self, ranks: int) -> Pool:
        return Pool(ranks, backend=BACKENDS_BY_NAME.get(self.backend, self.backend), timeout=self.seconds)

    def run(self, play: Callable[[bytes], bytes], parts: Sequence[Any]) -> list[Outcome]:
        """The outcome of `play` on each rank with its own part.  Never hangs: the pool ends processes that do."""
        if self._pool is None or self._pool.ranks != len(parts):
            self._close_pool()
            self._pool = self._made(len(parts))
        self._served = True
        sent = [(pickling.dumps(part),) for part in parts]
        watched = Idleness(IDLE_SECONDS)
        outcomes = self._pool.call(play, sent, idle=watched)
        left = [outcome for outcome in outcomes if not isinstance(outcome, Returned)]
        silent = left and all(
            isinstance(outcome, Waiting) for outcome in left
        )  # out of time, and no rank raised or died
        if silent and not watched.free and watched.worked() < ALL_THE_TIME * self._pool.timeout:
            longer, idle = RETRY_FACTOR * self._pool.timeout, Idleness(RETRY_FACTOR * IDLE_SECONDS)
            outcomes = self._pool.call(play, sent, timeout=longer, idle=idle)
        return outcomes


def returned_values(outcomes: Sequence[Outcome]) -> list[Any]:
    """The values sent by the ranks that returned."""
    return [pickling.loads(outcome.value) for outcome in outcomes if isinstance(outcome, Returned)]  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class RankFailure:
    """Why ranks did not return, and which; `raised` if the reason is an exception, `refused` the error if the call raised on every rank."""

    text: str
    ranks: tuple[int, ...]
    raised: Raised | None = None
    refused: str = ""


def some_raise_text(ranks: Sequence[int], error: str) -> str:
    """What goes wrong where these ranks raise and others do not."""
    return f"rank {', '.join(map(str, ranks))} raises {error}; its peers go on and wait for it at the next collective"


def first_rank_failure(outcomes: Sequence[Outcome]) -> RankFailure | None:
    """The first rank that died, or else that raised, or else all that wait; None if all returned."""
    for outcome in outcomes:  # first of all, since the peers of a dead process raise, or wait for it
        if isinstance(outcome, Died):
            died = f"the process of rank {outcome.rank} dies (exit code {outcome.exitcode})"
            return RankFailure(died, (outcome.rank,))
    for outcome in outcomes:
        if isinstance(outcome, Raised):
            raised = f"rank {outcome.rank} raises {outcome.kind}: {outcome.message}"
            return RankFailure(raised, (outcome.rank,), outcome)
    waiting = [outcome for outcome in outcomes if isinstance(outcome, Waiting)]
    if held := [outcome for outcome in waiting if outcome.raised]:
        ranks, error = tuple(outcome.rank for outcome in held), held[0].raised
        if len(held) == len(outcomes):  # each before another one's collective: no peer is left that goes on
            return RankFailure(f"every rank raises {error}", ranks, refused=error)
        return RankFailure(some_raise_text(ranks, error), ranks)
    where = "; ".join(f"rank {outcome.rank} waits at {outcome.where}" for outcome in waiting)
    return RankFailure(f"hangs: {where}", tuple(outcome.rank for outcome in waiting)) if waiting else None


def prepare_confirmation(backend: str) -> None:
    """Start what real processes are forked from, if it does not run yet: they will be needed soon."""
    if backend != "none":
        prepare(*RANK_MODULES, forked=_is_our_command())


def _is_our_command() -> bool:
    """Whether this process is a command of ours, and no program of a user's or pytest, of which a fork is no clean start."""
    main = sys.modules["__main__"]
    name, file = getattr(getattr(main, "__spec__", None), "name", ""), getattr(main, "__file__", None) or ""
    return name in ("localtensor.__main__", "strategies.__main__") or Path(file).stem == "localtensor"
