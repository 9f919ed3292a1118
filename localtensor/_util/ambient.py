"""The simulation that runs now, the lockstep of each thread, the real processes that wait for work, and which shared
caches live: all ambient state there is.

Only one simulation can run at a time, because it owns what torch keeps once per process.  Real processes are kept
from one call to the next, since it takes a moment to start them.
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

MOST_KEPT = 16  # real processes that wait idle, in all pools together
_turn = threading.Lock()
_running: list[Any] = []
_serials = itertools.count(1)
_pools_turn = threading.Lock()
_pools: dict[Hashable, Any] = {}  # the one used last is last


def next_serial() -> int:
    """A number that no other simulation of this process has."""
    return next(_serials)


def running() -> Any | None:
    """The simulation that runs now, or None."""
    return _running[-1] if _running else None


def of_rank() -> Any | None:
    """The simulation that runs now, if this thread is one of its ranks; else None."""
    simulation = running()
    return simulation if simulation is not None and simulation.is_rank() else None


@contextmanager
def entered(simulation: object, busy: Callable[[str], Exception] = RuntimeError) -> Iterator[None]:
    """While inside, `running()` is this simulation; a second thread waits outside until it is over.

    Raises what `busy` makes of a clause, if a mode is open: that would not end by waiting where it is this thread's.
    """
    with _turn:
        with _gate:
            if _open_modes:
                raise busy(_why_busy())
            _running.append(simulation)
        try:
            yield
        finally:
            _running.pop()


@contextmanager
def pool_of(key: Hashable, make: Callable[[], Any]) -> Iterator[Any]:
    """The pool kept under this key, or a new one; a second thread waits outside.  Pools end with this process.

    The ones used longest ago are closed, when more than `MOST_KEPT` processes would be idle.
    """
    with _pools_turn:
        pool = _pools.pop(key, None) or make()
        _pools[key] = pool
        while len(_pools) > 1 and sum(kept.ranks for kept in _pools.values()) > MOST_KEPT:
            _pools.pop(next(iter(_pools))).close()
        yield pool


def close_pools() -> None:
    """No pool is kept: for tests that look at processes, or close what they began with."""
    with _pools_turn:
        while _pools:
            _pools.popitem()[1].close()


# -- lockstep: each thread has its own modes; those of other threads are nothing to it


_gate = threading.Lock()  # held for a moment only: either a simulation is there, or modes are
_open_modes: list[Any] = []


class _Ambient(threading.local):
    def __init__(self) -> None:
        self.modes: list[Any] = []


_ambient = _Ambient()
_make_idle: list[Callable[[int], Any]] = []
_idle: dict[int, Any] = {}


def lockstep() -> Any | None:
    """The LocalTensorMode of this thread, or None."""
    modes = _ambient.modes
    return modes[-1] if modes else None


def open_mode(mode: Any, busy: Callable[[str], Exception]) -> None:
    """The mode is this thread's.  Raises what `busy` makes of a clause, if something else is in the way."""
    with _gate:
        simulation = running()
        if simulation is not None:
            raise busy(
                "this is a rank of localtensor.run"
                if simulation.is_rank()
                else "localtensor.run is at work in another thread"
            )
        if any(mode is one for one in _open_modes):
            raise busy("this mode is entered already")
        _open_modes.append(mode)
    _ambient.modes.append(mode)


def close_mode(mode: Any) -> bool:
    """The mode is this thread's no longer; the answer says whether it was the last of the process."""
    with _gate:
        _open_modes[:] = [one for one in _open_modes if one is not mode]
    _ambient.modes[:] = [one for one in _ambient.modes if one is not mode]
    return not _open_modes


def refuse_inside_mode(busy: Callable[[str], Exception]) -> None:
    """Raises what `busy` makes of a clause, if this thread is in a mode."""
    if _ambient.modes:
        raise busy(_why_busy())


def _why_busy() -> str:
    where = (
        "was called inside of a LocalTensorMode"
        if _ambient.modes
        else "was called while another thread is in a LocalTensorMode"
    )
    return f"localtensor.run {where}"


def makes_idle_modes(make: Callable[[int], Any]) -> None:
    """How to make a mode that nobody enters, for LocalTensors outside of any."""
    _make_idle[:] = [make]


def idle_mode(world: int) -> Any:
    """The mode of so many ranks that LocalTensors made outside of any mode belong to."""
    if world not in _idle:
        _idle[world] = _make_idle[0](world)
    return _idle[world]


# -- sharding rules of our own: each thread and each task has its own; those of the process are for who has none


_rules: ContextVar[Any] = ContextVar("localtensor_rules", default=None)
_process_rules: list[Any] = []


def rules() -> Any | None:
    """The rules that are in force in this thread and task, or None.  Asked at each op, so it must be quick."""
    own = _rules.get()
    return own if own is not None or not _process_rules else _process_rules[-1]


def own_rules() -> Any | None:
    """The same, less those of the process."""
    return _rules.get()


def process_rules() -> Any | None:
    """Those of the process, or None."""
    return _process_rules[-1] if _process_rules else None


def put_rules(rules: Any | None) -> None:
    """These are in force in this thread and task from here; None: those of the process, if it has any."""
    _rules.set(rules)


def put_process_rules(rules: Any) -> None:
    """These are in force wherever a thread has none of its own, for good."""
    _process_rules.append(rules)


class _Users:
    """How many have something, for which the first prepares the process."""

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self._held: list[None] = []

    def begin(self, first: Callable[[], None]) -> None:
        """Somebody has it; `first` is called if nobody had before."""
        with self.turn:
            if not self._held:
                first()
            self._held.append(None)

    def end(self, last: Callable[[], None]) -> None:
        """Somebody has it no longer; `last` is called if nobody else has it."""
        with self.turn:
            self._held.pop()
            if not self._held:
                last()


_rules_users, _guards_users = _Users(), _Users()
begin_rules, end_rules = _rules_users.begin, _rules_users.end


# -- explicit communication only: each thread and each task has its own guard; ranks have that of who runs them


_guard: ContextVar[Any] = ContextVar("localtensor_guard", default=None)
begin_guards, end_guards = _guards_users.begin, _guards_users.end


def guard() -> Any | None:
    """What this thread and task asks before an op communicates by itself, or None.  Asked at each op: it is quick."""
    return _guard.get()


def put_guard(guard: Any | None) -> None:
    """Ops of this thread and task ask this one from here."""
    _guard.set(guard)


class _Backward(threading.local):
    """How many want this thread's backward otherwise: what torch keeps of it is the thread's, and not a task's."""

    def __init__(self) -> None:
        self.users = 0
        self.kept: Any = None


_backward = _Backward()


def hold_backward(begin: Callable[[], Any]) -> None:
    """Somebody wants this thread's backward otherwise; `begin` is called if nobody did, and what it returns is kept."""
    if not _backward.users:
        _backward.kept = begin()
    _backward.users += 1


def release_backward() -> None:
    """Somebody does no longer: what was kept is left, as a context is, if nobody else does.  In any order.

    Nothing is done in a thread that holds nothing: a context that another thread has entered is left here.
    """
    if not _backward.users:
        return
    _backward.users -= 1
    if not _backward.users:
        kept, _backward.kept = _backward.kept, None
        kept.__exit__(None, None, None)


def _forget_pools() -> None:
    """A forked child starts its own: the parent's processes know nothing of it."""
    global _pools_turn  # a thread that the child does not have may hold it, and the next ones
    _pools_turn, _rules_users.turn, _guards_users.turn = threading.Lock(), threading.Lock(), threading.Lock()
    _pools.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pools)


# -- shared caches


_caches: dict[int, "weakref.ref[Any]"] = {}


def add_cache(cache: Any) -> None:
    """The cache is one of `caches()` for as long as somebody else holds it."""
    serial = next_serial()
    # No lambda: a Ctrl-C that comes while Python code runs for a weak reference is printed, and lost.
    _caches[serial] = weakref.ref(cache, functools.partial(_caches.pop, serial))


def caches() -> list[Any]:
    """Every cache that lives, the oldest first."""
    return [cache for cache in (known() for known in _caches.copy().values()) if cache is not None]


def _renew_caches() -> None:
    """A forked child has one thread: what others compute nobody will finish, and what they hold nobody will free."""
    for cache in caches():
        cache.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_caches)
