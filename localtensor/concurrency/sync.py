"""The `Sync` of a run that is explored: each taking, freeing, opening, waiting and step is a yield point.

A thread says what it is about to do, and does it when the schedule lets it: whoever waits for a lock that another has
cannot be chosen.  Timed waits run out only when nobody else can run, so that no clock decides.
"""

from __future__ import annotations

import contextlib
import threading
from contextlib import AbstractContextManager
from typing import Any, Protocol

from localtensor.concurrency.controlled_run import Stage
from localtensor.errors.runs import WaitsAlone

# What concurrent code of ours asks of the outside: locks, gates, who am I, and places where another thread may go on.
#
# Real threads are served by `THREADS`.  A harness that explores interleavings serves the same code with locks of its own,
# so that one schedule is one run; hence no room with threads in it uses `threading` itself, but takes a `Sync`.

SLICE = 1.0  # seconds


class Gate(Protocol):
    """Shut at first; once it is open it stays open."""

    def open(self) -> None:
        """All who wait go on, and whoever comes later does not wait."""

    def wait(self, seconds: float | None = None) -> bool:
        """True once it is open; False after so many seconds."""


class Sync(Protocol):
    """The services; an object is shared by all threads that meet in the same locks."""

    def lock(self, name: str = "") -> AbstractContextManager[Any]:
        """A new lock for `with`, which the thread that has it must not take again.  `name` is for reports."""

    def gate(self, name: str = "") -> Gate:
        """A new gate."""

    def me(self) -> int:
        """The calling thread: no two that live at once have the same number."""

    def step(self, what: str) -> None:
        """A yield point: here a schedule may let another thread go on.  `what` names it in reports."""


class Threads:
    """Real threads: a step is nothing."""

    def lock(self, name: str = "") -> AbstractContextManager[Any]:
        return threading.Lock()

    def gate(self, name: str = "") -> Gate:
        return _SyncGate()

    def me(self) -> int:
        return threading.get_ident()

    def step(self, what: str) -> None:
        """Threads switch by themselves."""


class _SyncGate:
    """A bare lock, handed on by each who comes through.  `threading.Event` has a lock of its own, in Python: a thread
    that is sent an exception there leaves it locked, and then nobody can open.  Who leaves this one locked holds up the
    others for the rest of their `SLICE`.
    """

    __slots__ = ("_lock", "_open")

    def __init__(self) -> None:
        self._open = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def open(self) -> None:
        self._open = True
        self._hand_on()

    def wait(self, seconds: float | None = None) -> bool:
        while seconds is None and not self._open:
            self._stand(SLICE)
        return self._open or self._stand(seconds or 0)

    def _stand(self, seconds: float) -> bool:
        if self._lock.acquire(timeout=seconds):
            self._hand_on()
        return self._open

    def _hand_on(self) -> None:
        with contextlib.suppress(RuntimeError):  # it was free
            self._lock.release()


THREADS = Threads()
"""What production code is given where it is given nothing else."""


SETUP = -1  # who makes the program and checks it: no thread of it


class Scheduled:
    """A `Sync`; beyond that, a thread may be interrupted where it waits, and numbers come from the schedule."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._made = 0
        self.interrupts: dict[int, type[BaseException]] = {}
        self.gates: dict[int, _Gate] = {}  # where each thread waits

    def lock(self, name: str = "") -> _Lock:
        return _Lock(self._stage, self._named("lock", name))

    def gate(self, name: str = "") -> Gate:
        return _Gate(self, self._stage, self._named("gate", name))

    def me(self) -> int:
        current = self._stage.current
        return SETUP if current is None else current

    def step(self, what: str) -> None:
        stage = self._stage
        if stage.current is not None:
            stage.pause(stage.current, what)

    def number(self, below: int) -> int:
        """From 0 to `below` - 1, by the schedule: a bounded search tries each of them."""
        return self._stage.number(below)

    def interrupt(self, thread: int, error: type[BaseException] = KeyboardInterrupt) -> None:
        """The thread's wait at a gate, now or the next one, ends in that error, as Ctrl-C ends it."""
        self.step(f"interrupts thread {thread}")
        self.interrupts[thread] = error
        if thread in self.gates:
            self.gates.pop(thread).leave(thread)

    def _named(self, kind: str, name: str) -> str:
        self._made += 1
        return name or f"{kind} {self._made}"


class _Lock:
    def __init__(self, stage: Stage, name: str) -> None:
        self._stage, self._name = stage, name
        self._takes, self._frees = f"takes {name}", f"frees {name}"
        self._owner: int | None = None
        self._wanting: list[int] = []

    def __enter__(self) -> bool:
        stage = self._stage
        me = stage.current
        if me is None:
            if self._owner is not None:
                raise WaitsAlone(self._name)
            self._owner = SETUP
            return True
        self._wanting.append(me)
        if self._owner is None:
            stage.pause(me, self._takes)
        else:
            stage.stand(me, self._takes, self)
        self._wanting.remove(me)
        self._owner = me
        for other in self._wanting:
            stage.bar(other, self)
        return True

    def __exit__(self, *_: object) -> None:
        stage = self._stage
        if stage.over:
            return
        self._owner = None
        for other in self._wanting:
            stage.wake(other)
        if stage.current is not None:
            stage.pause(stage.current, self._frees)

    def why(self) -> str:
        return f"{self._name}, which {'the setup' if self._owner == SETUP else f'thread {self._owner}'} has"

    def expire(self, thread: int) -> None:
        """Nobody waits for a lock by the clock."""


class _Gate:
    def __init__(self, sync: Scheduled, stage: Stage, name: str) -> None:
        self._sync, self._stage, self._name = sync, stage, name
        self._open = False
        self._waiting: list[int] = []

    def open(self) -> None:
        stage = self._stage
        if stage.over and stage.current is not None:
            return
        if stage.current is not None:
            stage.pause(stage.current, f"opens {self._name}")
        self._open = True
        for thread in tuple(self._waiting):
            self.leave(thread)

    def wait(self, seconds: float | None = None) -> bool:
        stage, me = self._stage, self._stage.current
        if me is None:
            if not self._open and seconds is None:
                raise WaitsAlone(self._name)
            return self._open
        if self._open or me in self._sync.interrupts:
            stage.pause(me, f"waits at {self._name}")
        else:
            self._waiting.append(me)
            self._sync.gates[me] = self
            if seconds is not None:
                stage.timed[me] = stage.clock + max(seconds, 0.0)
            stage.stand(me, f"goes through {self._name}", self)
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
        """That thread may go on."""
        self.expire(thread)
        self._stage.wake(thread)
