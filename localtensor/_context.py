"""The simulation that runs now, the lockstep of each thread, and the real processes that wait for work: all ambient
state there is.

Only one simulation can run at a time, because it owns what torch keeps once per process.  Real processes are kept
from one call to the next, since it takes a moment to start them.
"""

import itertools
import os
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
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


def lockstep_modes() -> list[Any]:
    """The modes of this thread, the innermost last."""
    return _ambient.modes


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


def close_pools() -> None:
    """No pool is kept."""
    with _pools_turn:
        while _pools:
            _pools.popitem()[1].close()


def _forget_pools() -> None:
    """A forked child starts its own: the parent's processes know nothing of it."""
    global _pools_turn  # noqa: PLW0603  # the lock may be held by a thread that the child does not have
    _pools_turn = threading.Lock()
    _pools.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pools)
