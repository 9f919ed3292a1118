"""System calls of the threads of ranks: a wait for files, sockets, processes and semaphores lets the others run.

A call that does not wait lets them run first, too: a loop may find the same file ready until another thread has read it.
"""

import _multiprocessing  # type: ignore[import-not-found]  # of C
import functools
import os
import select
import selectors
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any

from localtensor._util.ambient import simulation_of_this_rank
from localtensor._util.patching import replaced, wrapped

POLL_SLICE = 0.01  # seconds of a system call, after which other threads of the run have their turn
_select = select.select


class _Here(threading.local):
    """What the calling thread does."""

    starting = False  # a thread: it waits for the new one, which has no turn yet


here = _Here()


def of_rank() -> Any:
    """The simulation if the calling thread is one of its threads, and may wait for another."""
    simulation = None if here.starting else simulation_of_this_rank()
    return simulation if simulation is not None and not simulation.forked else None


def with_helpers() -> Any:
    """The same, if the run has helper threads."""
    simulation = of_rank()
    return simulation if simulation is not None and simulation.run_token.has_helpers() else None


def _wait_for_child(original: Callable[..., Any], pid: int, options: int) -> Any:
    """`os.waitpid`: in a run with helper threads others run until the child has ended."""
    simulation = with_helpers()
    if simulation is None or options not in (0, os.WNOHANG):
        return original(pid, options)
    simulation.run_token.step_aside(simulation.run_token.here())
    while (found := original(pid, os.WNOHANG)) == (0, 0) and options == 0:
        time.sleep(POLL_SLICE)
    return found


def _polled(select_for: Callable[[float | None], Any], timeout: float | None) -> Any:
    """A call that selects, until something is ready or `timeout` seconds have passed.

    In a run with helper threads others run first, since a loop may find the same file ready until another thread has
    read it, and between slices of the wait.
    """
    simulation = with_helpers()
    if simulation is None:
        return select_for(timeout)
    until = None if timeout is None else time.monotonic() + timeout
    token = simulation.run_token
    while True:
        simulation.helpers.end_sleeps()
        token.step_aside(token.here())
        left = POLL_SLICE if until is None else max(0.0, until - time.monotonic())
        found = select_for(0.0 if token.others_can_run() else min(left, POLL_SLICE))
        if any(found) or left == 0.0:
            return found


def _select_calls(original: Callable[..., Any], *args: Any) -> Any:
    return _polled(functools.partial(original, *args[:3]), args[3] if len(args) > 3 else None)


def _selector_calls(original: Callable[..., Any], selector: Any, timeout: float | None = None) -> Any:
    return _polled(functools.partial(original, selector), timeout)


class RankSemaphore(_multiprocessing.SemLock):
    """The semaphore in the locks of multiprocessing; a thread of a rank that waits for it lets the others run."""

    __slots__ = ()

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        if not block:
            return bool(super().acquire(False))
        return bool(_polled(lambda seconds: [super(RankSemaphore, self).acquire(True, seconds)], timeout)[0])

    def __enter__(self) -> bool:
        return self.acquire()


def _of_pipe(descriptor: int) -> bool:
    """Whether the calling thread would wait at a pipe or socket, while others of the run could go on."""
    return with_helpers() is not None and os.get_blocking(descriptor) and not stat.S_ISREG(os.fstat(descriptor).st_mode)


def _read(original: Callable[[int, int], bytes], descriptor: int, size: int) -> bytes:
    """`os.read`."""
    if _of_pipe(descriptor):
        _select_calls(_select, [descriptor], [], [])
    return original(descriptor, size)


def _write(original: Callable[[int, Any], int], descriptor: int, data: Any) -> int:
    """`os.write`; a pipe that is ready takes so many bytes without a wait."""
    left = memoryview(data).cast("B")
    size = len(left)
    while len(left) > 0 and _of_pipe(descriptor):
        _select_calls(_select, [], [descriptor], [])
        left = left[original(descriptor, left[: select.PIPE_BUF]) :]
    return original(descriptor, data) if len(left) == size else size


def _when_readable(original: Callable[..., Any], sock: socket.socket, *args: Any, **kwargs: Any) -> Any:
    if with_helpers() is not None and sock.gettimeout() != 0:
        ready = _select_calls(_select, [sock], [], [], sock.gettimeout())
        if not ready[0]:
            raise TimeoutError("timed out")
    return original(sock, *args, **kwargs)


def _kinds_of_selector() -> set[type]:
    """The classes of the standard library that define `select`."""
    kinds = [kind for kind in vars(selectors).values() if isinstance(kind, type)]
    bases = {base for kind in kinds if issubclass(kind, selectors.BaseSelector) for base in kind.__mro__}
    return {base for base in bases if "select" in vars(base) and base is not selectors.BaseSelector}


@contextmanager
def waits_of_ranks() -> Iterator[None]:
    """Inside the block, threads of ranks wait so."""
    calls: list[tuple[Any, str, Callable[..., Any]]] = [
        (os, "waitpid", _wait_for_child),
        (os, "read", _read),
        (os, "write", _write),
        (select, "select", _select_calls),
        *((kind, "select", _selector_calls) for kind in _kinds_of_selector()),
        *((socket.socket, name, _when_readable) for name in ("accept", "recv", "recv_into")),
    ]
    with ExitStack() as stack:
        for owner, name, around in calls:
            stack.enter_context(wrapped(owner, name, around))
        for method, function in (("_recv", os.read), ("_send", os.write)):  # which it has kept from its import
            kept = getattr(Connection, method)
            stack.callback(setattr, kept, "__defaults__", kept.__defaults__)
            kept.__defaults__ = (function,)
        stack.enter_context(replaced(_multiprocessing, "SemLock", RankSemaphore))
        yield
