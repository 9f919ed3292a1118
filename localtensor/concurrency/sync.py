"""Locks, gates, thread numbers and yield points for concurrent code, by real threads or by an explored schedule.

Production code is served by `THREAD_SYNC`.  A harness that explores interleavings serves the same code with `ScheduledSync`, so
that one schedule is one run; hence code that is explored takes a `Sync` and never uses `threading` itself.

In an explored run each lock operation, gate operation and step is a yield point.  A thread announces its next action,
and performs it when the schedule chooses the thread; a thread that waits for a held lock cannot be chosen.  Timed waits
expire only when no other thread can run, so that no clock decides.
"""

from __future__ import annotations

import contextlib
import threading
from contextlib import AbstractContextManager
from typing import Any, Protocol

from localtensor.concurrency.controlled_run import ControlledRun
from localtensor.errors.runs import WaitsAlone

SLICE = 1.0  # seconds


class Gate(Protocol):
    """Closed at first; once open it stays open."""

    def open(self) -> None:
        """Lets all waiting threads go on; later threads do not wait."""

    def wait(self, seconds: float | None = None) -> bool:
        """True once it is open; False after so many seconds."""


class Sync(Protocol):
    """The services; one object is shared by all threads that use the same locks."""

    def lock(self, name: str = "") -> AbstractContextManager[Any]:
        """A new lock for `with`; it is not reentrant.  `name` is for reports."""

    def gate(self, name: str = "") -> Gate:
        """A new gate."""

    def me(self) -> int:
        """The number of the calling thread; no two live threads have the same."""

    def step(self, what: str) -> None:
        """A yield point: a schedule may let another thread go on here.  `what` names it in reports."""


class ThreadSync:
    """Real threads, for which a step does nothing."""

    def lock(self, name: str = "") -> AbstractContextManager[Any]:
        return threading.Lock()

    def gate(self, name: str = "") -> Gate:
        return _SyncGate()

    def me(self) -> int:
        return threading.get_ident()

    def step(self, what: str) -> None:
        """Threads switch by themselves."""


class _SyncGate:
    """A bare lock that each thread releases for the next.  `threading.Event` has a lock of its own, in Python: a thread
    that is sent an exception there leaves it locked, and then no thread can open.  A thread that leaves this one locked
    delays the others for the rest of their `SLICE`.
    """

    __slots__ = ("_lock", "_open")

    def __init__(self) -> None:
        self._open = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def open(self) -> None:
        self._open = True
        self._release()

    def wait(self, seconds: float | None = None) -> bool:
        while seconds is None and not self._open:
            self._wait_for_lock(SLICE)
        return self._open or self._wait_for_lock(seconds or 0)

    def _wait_for_lock(self, seconds: float) -> bool:
        if self._lock.acquire(timeout=seconds):
            self._release()
        return self._open

    def _release(self) -> None:
        with contextlib.suppress(RuntimeError):  # it was free
            self._lock.release()


THREAD_SYNC = ThreadSync()
"""The default services of production code."""


SETUP_THREAD = -1  # the number of the caller that makes the program and checks it


class ScheduledSync:
    """The `Sync` of an explored run; it can also interrupt a waiting thread, and draws numbers from the schedule."""

    def __init__(self, run: ControlledRun) -> None:
        self._run = run
        self._made = 0
        self.interrupts: dict[int, type[BaseException]] = {}
        self.gates: dict[int, _Gate] = {}  # thread -> the gate that it waits at

    def lock(self, name: str = "") -> _Lock:
        return _Lock(self._run, self._named("lock", name))

    def gate(self, name: str = "") -> Gate:
        return _Gate(self, self._run, self._named("gate", name))

    def me(self) -> int:
        current = self._run.current
        return SETUP_THREAD if current is None else current

    def step(self, what: str) -> None:
        run = self._run
        if run.current is not None:
            run.pause(run.current, what)

    def number(self, below: int) -> int:
        """From 0 to `below` - 1, by the schedule: a bounded search tries each of them."""
        return self._run.number(below)

    def interrupt(self, thread: int, error: type[BaseException] = KeyboardInterrupt) -> None:
        """Ends the thread's current or next wait at a gate by that error, as Ctrl-C does."""
        self.step(f"interrupts thread {thread}")
        self.interrupts[thread] = error
        if thread in self.gates:
            self.gates.pop(thread).leave(thread)

    def _named(self, kind: str, name: str) -> str:
        self._made += 1
        return name or f"{kind} {self._made}"


class _Lock:
    def __init__(self, run: ControlledRun, name: str) -> None:
        self._run, self._name = run, name
        self._takes, self._frees = f"takes {name}", f"frees {name}"
        self._owner: int | None = None
        self._wanting: list[int] = []

    def __enter__(self) -> bool:
        run = self._run
        me = run.current
        if me is None:
            if self._owner is not None:
                raise WaitsAlone(self._name)
            self._owner = SETUP_THREAD
            return True
        self._wanting.append(me)
        if self._owner is None:
            run.pause(me, self._takes)
        else:
            run.block(me, self._takes, self)
        self._wanting.remove(me)
        self._owner = me
        for other in self._wanting:
            run.suspend(other, self)
        return True

    def __exit__(self, *_: object) -> None:
        run = self._run
        if run.over:
            return
        self._owner = None
        for other in self._wanting:
            run.wake(other)
        if run.current is not None:
            run.pause(run.current, self._frees)

    def why(self) -> str:
        return f"{self._name}, which {'the setup' if self._owner == SETUP_THREAD else f'thread {self._owner}'} has"

    def expire(self, thread: int) -> None:
        """Never called: waits for a lock have no timeout."""


class _Gate:
    def __init__(self, sync: ScheduledSync, run: ControlledRun, name: str) -> None:
        self._sync, self._run, self._name = sync, run, name
        self._open = False
        self._waiting: list[int] = []

    def open(self) -> None:
        run = self._run
        if run.over and run.current is not None:
            return
        if run.current is not None:
            run.pause(run.current, f"opens {self._name}")
        self._open = True
        for thread in tuple(self._waiting):
            self.leave(thread)

    def wait(self, seconds: float | None = None) -> bool:
        run, me = self._run, self._run.current
        if me is None:
            if not self._open and seconds is None:
                raise WaitsAlone(self._name)
            return self._open
        if self._open or me in self._sync.interrupts:
            run.pause(me, f"waits at {self._name}")
        else:
            self._waiting.append(me)
            self._sync.gates[me] = self
            if seconds is not None:
                run.timed[me] = run.clock + max(seconds, 0.0)
            run.block(me, f"goes through {self._name}", self)
        error = self._sync.interrupts.pop(me, None)
        if error is not None:
            raise error
        return self._open

    def why(self) -> str:
        return f"{self._name}, which is shut"

    def expire(self, thread: int) -> None:
        self._waiting.remove(thread)
        self._sync.gates.pop(thread, None)

    def leave(self, thread: int) -> None:
        """Lets that thread go on."""
        self.expire(thread)
        self._run.wake(thread)
