"""All ambient state: the running simulation, each thread's lockstep modes, idle process pools, sharding rules, guards
against implicit communication, and the shared caches.

Only one simulation can run at a time, because it owns what torch keeps once per process.  Lockstep modes belong to a
thread.  Sharding rules and guards belong to a thread and task; process-wide rules serve threads that have none of their
own, and ranks have the guard of the thread that runs them.  Process pools are kept from one call to the next, because
starting processes takes a moment.
"""

import functools
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

MOST_KEPT = 16  # idle processes, in all pools together
_simulation_lock = threading.Lock()
_running: list[Any] = []
_serials = itertools.count(1)
_pools_lock = threading.Lock()
_pools: dict[Hashable, Any] = {}  # the most recently used pool is last


def next_serial() -> int:
    """A serial number, unique in this process."""
    return next(_serials)


def running() -> Any | None:
    """The running simulation, or None."""
    return _running[-1] if _running else None


def simulation_of_this_rank() -> Any | None:
    """The running simulation if this thread is one of its ranks, else None."""
    simulation = running()
    return simulation if simulation is not None and simulation.is_rank() else None


@contextmanager
def simulation_entered(simulation: object, busy: Callable[[str], Exception] = RuntimeError) -> Iterator[None]:
    """Inside the block, `running()` is this simulation; a second thread waits at entry until the first has left.

    Raises `busy(reason)` if a lockstep mode is open: waiting for a mode of this thread would never end.
    """
    with _simulation_lock:
        with _modes_lock:
            if _open_modes:
                raise busy(_why_busy())
            _running.append(simulation)
        try:
            yield
        finally:
            _running.pop()


@contextmanager
def pool_of(key: Hashable, make: Callable[[], Any]) -> Iterator[Any]:
    """The pool kept under this key, or `make()`; a second thread waits at entry.  Pools end with this process.

    The least recently used pools are closed when more than `MOST_KEPT` processes would be idle.
    """
    with _pools_lock:
        pool = _pools.pop(key, None) or make()
        _pools[key] = pool
        while len(_pools) > 1 and sum(kept.ranks for kept in _pools.values()) > MOST_KEPT:
            _pools.pop(next(iter(_pools))).close()
        yield pool


def close_pools() -> None:
    """Close every kept pool (for tests)."""
    with _pools_lock:
        while _pools:
            _pools.popitem()[1].close()


_modes_lock = threading.Lock()  # held briefly: a simulation and lockstep modes exclude each other
_open_modes: list[Any] = []


class _Ambient(threading.local):
    def __init__(self) -> None:
        self.modes: list[Any] = []


here = _Ambient()
_idle_mode_factory: list[Callable[[int], Any]] = []
_idle_modes: dict[int, Any] = {}


def lockstep() -> Any | None:
    """The LocalTensorMode of this thread, or None."""
    modes = here.modes
    return modes[-1] if modes else None


def note_error(error: BaseException, what: str) -> None:
    """The mode of this thread, if there is one, looks at its end whether the program has caught this error; `what` is it in words."""
    mode = lockstep()
    if mode is not None:
        mode.caught.note(error, what)


def open_mode(mode: object, busy: Callable[[str], Exception]) -> None:
    """Make the mode this thread's current one.  Raises `busy(reason)` if a simulation runs or the mode is open."""
    with _modes_lock:
        simulation = running()
        if simulation is not None:
            elsewhere = "localtensor.run is at work in another thread"
            raise busy("this is a rank of localtensor.run" if simulation.is_rank() else elsewhere)
        if any(mode is one for one in _open_modes):
            raise busy("this mode is entered already")
        _open_modes.append(mode)
    here.modes.append(mode)


def close_mode(mode: object) -> bool:
    """Remove the mode from this thread; True if no mode is left in the process."""
    with _modes_lock:
        _open_modes[:] = [one for one in _open_modes if one is not mode]
    here.modes[:] = [one for one in here.modes if one is not mode]
    return not _open_modes


def refuse_inside_mode(busy: Callable[[str], Exception]) -> None:
    """Raises `busy(reason)` if this thread is in a lockstep mode."""
    if here.modes:
        raise busy(_why_busy())


def _why_busy() -> str:
    where = "inside of a LocalTensorMode" if here.modes else "while another thread is in a LocalTensorMode"
    return f"localtensor.run was called {where}"


def set_idle_mode_factory(make: Callable[[int], Any]) -> None:
    """Set the factory (ranks -> mode) of the never-entered modes that own LocalTensors made outside any mode."""
    _idle_mode_factory[:] = [make]


def idle_mode(world: int) -> Any:
    """The mode that owns LocalTensors of `world` ranks made outside any mode."""
    if world not in _idle_modes:
        _idle_modes[world] = _idle_mode_factory[0](world)
    return _idle_modes[world]


class _UseCount:
    """A count of the users of a process-wide change: the first user applies it, the last one undoes it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count = 0

    def begin(self, first: Callable[[], None]) -> None:
        """Add a user; `first` is called if there was none."""
        with self.lock:
            if not self.count:
                first()
            self.count += 1

    def end(self, last: Callable[[], None]) -> None:
        """Remove a user; `last` is called if none is left."""
        with self.lock:
            self.count -= 1
            if not self.count:
                last()


_rules: ContextVar[Any] = ContextVar("localtensor_rules", default=None)
_process_rules: list[Any] = []


def rules() -> Any | None:
    """The sharding rules in force in this thread and task, or None.  Called at each op, so it must be quick."""
    own = _rules.get()
    return own if own is not None or not _process_rules else _process_rules[-1]


def own_rules() -> Any | None:
    """The rules of this thread and task, without those of the process."""
    return _rules.get()


def process_rules() -> Any | None:
    """The rules of the process, or None."""
    return _process_rules[-1] if _process_rules else None


def set_rules(rules: Any | None) -> None:
    """Set the rules of this thread and task; with None, those of the process apply."""
    _rules.set(rules)


def set_process_rules(rules: object) -> None:
    """Set the rules for every thread that has none of its own, permanently."""
    _process_rules.append(rules)


_rules_users = _UseCount()
begin_rules, end_rules = _rules_users.begin, _rules_users.end


_guard: ContextVar[Any] = ContextVar("localtensor_guard", default=None)


def guard() -> Any | None:
    """The guard that an op of this thread and task consults before it communicates implicitly, or None.  Called at each op."""
    return _guard.get()


def set_guard(guard: Any | None) -> None:
    """Set the guard of this thread and task."""
    _guard.set(guard)


_guards_users = _UseCount()
begin_guards, end_guards = _guards_users.begin, _guards_users.end


class _Backward(threading.local):
    """The users of a changed setting for this thread's backward: torch keeps it per thread, not per task."""

    def __init__(self) -> None:
        self.users = 0
        self.context: Any = None


_backward = _Backward()


def hold_backward(begin: Callable[[], Any]) -> None:
    """Add a user of a changed backward; the first one calls `begin` and keeps the context that it returns."""
    if not _backward.users:
        _backward.context = begin()
    _backward.users += 1


def release_backward() -> None:
    """Remove a user, in any order; the last one exits the context.

    Does nothing in a thread without users: the caller may have entered in another thread.
    """
    if not _backward.users:
        return
    _backward.users -= 1
    if not _backward.users:
        context, _backward.context = _backward.context, None
        context.__exit__(None, None, None)


_caches: dict[int, "weakref.ref[Any]"] = {}


def add_cache(cache: object) -> None:
    """Register a cache: it is one of `caches()` for as long as something else refers to it."""
    serial = next_serial()
    # No lambda: a Ctrl-C that arrives while Python code runs for a weak reference is printed and lost.
    _caches[serial] = weakref.ref(cache, functools.partial(_caches.pop, serial))


def caches() -> list[Any]:
    """The caches that are alive, the oldest first."""
    return [cache for cache in (known() for known in _caches.copy().values()) if cache is not None]


def _reset_after_fork() -> None:
    """A forked child starts its own pools, and has no other thread that could release a lock or finish a value."""
    global _pools_lock
    _pools_lock, _rules_users.lock, _guards_users.lock = threading.Lock(), threading.Lock(), threading.Lock()
    _pools.clear()
    for cache in caches():
        cache.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)
