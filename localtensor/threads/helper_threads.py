"""Threads that a program starts in a rank: each belongs to its rank, and runs when the schedule gives it a turn.

So such a thread finds the groups, meshes, generators and settings of its rank, its collectives are served in turn, and
the run stays a function of the schedule.  A thread that waits must pass the run token on.  Python's own locks do not, so
`threading.Lock` and what is made of it (RLock, Condition, Event, Semaphore, Queue, Future) are made of `RankLock`s by the
threads of ranks; `Thread.join`, `time.sleep`, and the system calls that wait for files, sockets and processes pass it on as well.

A time limit, or a sleep, ends when no thread of the run can go on without it, and not before its time.
"""

import functools
import multiprocessing.util
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import thread as pool_threads
from contextlib import ExitStack, contextmanager
from types import FrameType, ModuleType
from typing import Any

import torch

from localtensor._util.ambient import running, set_guard, set_rules
from localtensor._util.call_sites import origin, place_of_error
from localtensor._util.patching import replaced, wrapped
from localtensor.collectives.rendezvous import Contribution, Group, Ticket
from localtensor.concurrency.system_calls import POLL_SLICE, here, of_rank, waits_of_ranks, with_helpers
from localtensor.threads import rank_world
from localtensor.threads.diagnosis import RankEnd
from localtensor.threads.isolation.modules import here as isolated
from localtensor.threads.run_token import Abort
from localtensor.threads.simulation import Simulation
from localtensor.threads.symmetric.watch import helper_watched

_allocate_lock, _sleep = threading.Lock, time.sleep


class _Chosen(type):
    """The class of `threading.Lock` and the like while ranks run: a thread of a rank makes `ours`, any other `original`."""

    original: Any
    ours: Any
    kinds: tuple[type, ...]

    def __call__(cls, *args: object, **kwargs: object) -> Any:
        return (cls.original if of_rank() is None else cls.ours)(*args, **kwargs)

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, cls.kinds)


def _chosen(owner: ModuleType, name: str, ours: Any) -> Any:
    """What takes the place of `owner.name`.  It pickles by that name: a child process finds the original there."""
    original = getattr(owner, name)
    kinds = tuple({type(make()) for make in (original, ours)})
    chosen = {"original": staticmethod(original), "ours": staticmethod(ours), "kinds": kinds}
    return _Chosen(name, (), {**chosen, "__module__": owner.__name__})


class RankLock:
    """A lock like `threading.Lock`; a thread of a rank that waits for it lets the others run."""

    __slots__ = ("__weakref__", "_lock", "_waiting")

    def __init__(self) -> None:
        self._lock = _allocate_lock()
        self._waiting: list[Ticket] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if not blocking or -1 != timeout <= 0:
            return self._lock.acquire(blocking, timeout)  # refuses some arguments
        if self._lock.acquire(False):
            return True
        simulation = of_rank()
        if simulation is None:
            return self._lock.acquire(blocking, timeout)
        until = None if timeout < 0 else time.monotonic() + timeout
        while not self._lock.acquire(False):
            ticket = _ticket(simulation, "Lock.acquire", lambda: not self._lock.locked())
            self._waiting.append(ticket)
            _block(simulation, ticket, None if timeout < 0 else timeout)
            if not ticket.done and until is not None:
                self._waiting.remove(ticket)
                return self._lock.acquire(True, max(0.0, until - time.monotonic()))
        return True

    def release(self) -> None:
        self._lock.release()
        if self._waiting and of_rank() is not None:
            waiting, self._waiting = self._waiting, []
            for ticket in waiting:
                running().wake(ticket)  # type: ignore[union-attr]  # each tries again

    def locked(self) -> bool:
        return self._lock.locked()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()

    def __reduce__(self) -> str:
        raise TypeError("cannot pickle '_thread.lock' object")

    def _at_fork_reinit(self) -> None:
        self._lock = _allocate_lock()
        self._waiting = []


def _ticket(simulation: Simulation, call: str, ready: Callable[[], bool]) -> Ticket:
    """What the calling thread waits for, without the other ranks."""
    rank = simulation.enter()
    part = Contribution(rank, call, Group("thread", (rank,)), None, (), None, line=origin(sys._getframe(2)).line)
    part.number = 0
    return Ticket(part, lambda: (rank,), ready=ready)


def _block(simulation: Simulation, ticket: Ticket, seconds: float | None) -> None:
    """Wait for the ticket, or for the end of a time limit: no other thread can run, or one waits outside for so long."""
    sleepers = simulation.helpers.sleepers
    if seconds is not None:
        sleepers[ticket] = time.monotonic() + seconds
    try:
        simulation.block(ticket, seconds)
    finally:
        sleepers.pop(ticket, None)


def _importing(frame: FrameType | None) -> bool:
    """Whether the code of the frame, or what calls it, is of a module that is being imported."""
    while frame is not None:
        loading = getattr(frame.f_globals.get("__spec__"), "_initializing", False)
        if loading and frame.f_code.co_name == "<module>":
            return True
        frame = frame.f_back
    return False


class HelperThreads:
    """The helper threads of one simulation."""

    def __init__(self, simulation: Simulation, worlds: list[rank_world.RankWorld]) -> None:
        self.errors: dict[int, RankEnd] = {}  # by rank: the first error of one of its helper threads
        # By rank: what it calls before it waits for its threads; None once that has begun.
        self._at_exit: dict[int, list[Callable[[], object]] | None] = {}
        self._finalizers: dict[int, list[Any]] = {}
        self.sleepers: dict[Ticket, float] = {}  # what waits with a time limit, until when
        self._simulation, self._worlds = simulation, worlds
        self._over: dict[threading.Thread, RankLock] = {}  # locked until the thread has ended
        self._numbers: dict[threading.Thread, int] = {}
        self._registered: dict[int, dict[str, Any]] = {}  # by thread: the groups that C++ finds there by name
        self._others = {
            thread for thread in threading.enumerate() if thread.daemon or thread is threading.current_thread()
        }
        self._hook = threading.excepthook

    def start(self, original: Callable[..., None], thread: threading.Thread) -> None:
        """`Thread.start`: the thread belongs to the rank that starts it."""
        simulation = of_rank()
        if simulation is None or thread in self._numbers:
            return original(thread)
        rank, token = simulation.enter(), simulation.run_token
        number = self._numbers[thread] = token.add(rank, thread)
        over = self._over[thread] = RankLock()
        over.acquire()
        thread.run = functools.partial(self._run, thread, rank, thread.run)  # type: ignore[method-assign]
        daemon, thread._daemonic = thread.daemon, True  # type: ignore[attr-defined]  # an abandoned one must not keep Python alive
        here.starting = True
        try:
            return original(thread)
        except BaseException:  # why: the thread has no turn to wait for
            token.withdraw(number)
            raise
        finally:
            here.starting = False
            thread._daemonic = daemon  # type: ignore[attr-defined]

    def _run(self, thread: threading.Thread, rank: int, run: Callable[[], None]) -> None:
        def body(number: int) -> None:
            simulation = self._simulation
            set_rules(simulation.rules)
            set_guard(simulation.guard)
            torch.set_num_threads(torch.get_num_threads())  # OpenMP's own number is per thread
            torch.autograd.set_multithreading_enabled(False)  # backward stays in this thread
            try:
                with helper_watched(simulation, rank, number):
                    run()
            except (Abort, SystemExit):
                pass
            except BaseException as error:  # why: it is the rank's error, or the program's own hook gets it
                if threading.excepthook is self._hook:
                    self.errors.setdefault(rank, RankEnd(error=error, place=place_of_error(error)))
                else:
                    threading.excepthook(threading.ExceptHookArgs([type(error), error, error.__traceback__, thread]))
            finally:
                del thread.run
                rank_world.c10d_cpp._unregister_all_process_groups()
                rank_world.clear_sharding_cache()
                self._over[thread].release()

        self._simulation.run_token.run_helper(self._numbers[thread], body)

    def take_turn(self, number: int) -> None:
        """In a thread that has just received the run token: C++ finds the groups of its rank there, and no others."""
        groups: dict[Any, Any] = {
            name: group for group, name in self._worlds[self._simulation.run_token.rank_of[number]].pg_names.items()
        }
        before = self._registered.get(number)
        if before == groups or (before is None and number < self._simulation.ranks and len(self._registered) == 0):
            return
        self._registered[number] = groups
        rank_world.c10d_cpp._unregister_all_process_groups()
        for name, group in groups.items():
            rank_world.c10d_cpp._register_process_group(name, group)

    def join(self, original: Callable[..., None], thread: threading.Thread, timeout: float | None = None) -> None:
        """`Thread.join`."""
        over = self._over.get(thread) if of_rank() is not None else None
        if over is not None and thread is not threading.current_thread():
            if not over.acquire(True, -1 if timeout is None else max(timeout, 0)):
                return
            over.release()
            timeout = None  # the last steps of the thread need no turn
        original(thread, timeout)

    def is_alive(self, original: Callable[..., bool], thread: threading.Thread) -> bool:
        """`Thread.is_alive`, perhaps in a loop."""
        alive, simulation = original(thread), of_rank()
        if alive and simulation is not None and thread in self._over:
            simulation.run_token.step_aside(simulation.run_token.here())
        return alive

    def register_atexit(self, original: Callable[..., None], function: Any, *args: Any, **kwargs: Any) -> None:
        """`threading._register_atexit`: what a rank, such as one that uses loky, does before it waits for its threads.

        What a module registers as it is imported, once for all ranks, is the process's.
        """
        simulation = of_rank()
        if simulation is None or (isolated.world is None and _importing(sys._getframe(2))):
            return original(function, *args, **kwargs)
        calls = self._at_exit.setdefault(simulation.enter(), [])
        if calls is None:
            raise RuntimeError("can't register atexit after shutdown")
        calls.append(functools.partial(function, *args, **kwargs))
        return None

    def finalize(self, original: Callable[..., None], made: Any, obj: Any, *args: Any, **kwargs: Any) -> None:
        """`multiprocessing.util.Finalize`: what ends a pool that its rank leaves, while the threads of the pool are there."""
        original(made, obj, *args, **kwargs)
        simulation = of_rank()
        if simulation is not None and (made._key[0] or 0) > 0:
            self._finalizers.setdefault(simulation.enter(), []).append(made)

    def sleep(self, original: Callable[[float], None], seconds: float) -> None:
        """`time.sleep`: where the rank has helper threads, or is one, the others run meanwhile."""
        simulation = with_helpers()
        if simulation is None or not seconds >= 0:
            return original(seconds)
        until = time.monotonic() + seconds
        _block(simulation, _ticket(simulation, "time.sleep", lambda: False), seconds)
        return original(max(0.0, until - time.monotonic()))

    def end_sleeps(self) -> None:
        """Wake the threads whose time limits have passed while another waits outside of the run, where time does not jump."""
        now = time.monotonic()
        for ticket in [ticket for ticket, until in self.sleepers.items() if until <= now]:
            self._simulation._wake(ticket)

    def released_outside(self, tickets: Iterable[Ticket], wake: Callable[[Ticket], None]) -> bool:
        """Wake the threads whose lock a thread of no rank has released; waits for that while there is such a thread."""
        locks = [ticket for ticket in tickets if ticket.ready is not None]
        while locks and not self._simulation.run_token.aborting:
            free = [ticket for ticket in locks if ticket.ready is not None and ticket.ready()]
            for ticket in free:
                ticket.done = True
                wake(ticket)
            known = self._others.union(self._numbers)
            if free or any(ticket.deadline is not None for ticket in locks):
                return bool(free)
            if not any(thread not in known and not thread.name.startswith("rank ") for thread in threading.enumerate()):
                return False
            _sleep(POLL_SLICE)
        return False

    def finish(self, rank: int) -> None:
        """Wait for the rank's helper threads, as a process does at its end: idle pools and daemon threads are ended."""
        token = self._simulation.run_token
        at_exit, self._at_exit[rank] = self._at_exit.get(rank), None
        for call in reversed(at_exit or []):
            call()
        process_pools = vars(sys.modules.get("concurrent.futures.process", threading)).get("_threads_wakeups", ())
        for thread in [*pool_threads._threads_queues, *process_pools]:
            if self._numbers.get(thread) in token.helpers(rank):
                executor = (thread._args[0] if thread in pool_threads._threads_queues else thread.executor_reference)()
                if executor is not None:
                    executor.shutdown(wait=False)
        left = [finalizer for finalizer in self._finalizers.pop(rank, []) if finalizer.still_active()]
        for finalizer in sorted(left, key=lambda made: made._key, reverse=True):
            finalizer()  # in the order of a process that exits
        for thread, number in list(self._numbers.items()):
            if token.rank_of[number] == rank and not thread.daemon:
                thread.join()
        self.end(rank)

    def end(self, rank: int) -> None:
        """End the rank's helper threads where they are."""
        token = self._simulation.run_token
        for number in token.helpers(rank):
            self._simulation.end_thread(number)
        while token.helpers(rank):
            token.step_aside(token.here())


@contextmanager
def helper_threads(simulation: Simulation, worlds: list[rank_world.RankWorld]) -> Iterator[HelperThreads]:
    """Inside the block, threads that ranks start are threads of the simulation."""
    helpers = simulation.helpers = HelperThreads(simulation, worlds)
    with ExitStack() as stack:
        for owner, name, ours in (
            (threading, "Lock", RankLock),
            (threading, "_allocate_lock", RankLock),
            (threading, "RLock", threading._PyRLock),  # type: ignore[attr-defined]
            (queue, "SimpleQueue", queue._PySimpleQueue),  # type: ignore[attr-defined]
        ):
            stack.enter_context(replaced(owner, name, _chosen(owner, name, ours)))
        for name in ("start", "join", "is_alive"):
            stack.enter_context(wrapped(threading.Thread, name, getattr(helpers, name)))
        stack.enter_context(wrapped(threading, "_register_atexit", helpers.register_atexit))
        stack.enter_context(wrapped(multiprocessing.util.Finalize, "__init__", helpers.finalize))
        stack.enter_context(wrapped(time, "sleep", helpers.sleep))
        stack.enter_context(waits_of_ranks())
        yield helpers
