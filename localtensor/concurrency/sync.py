"""What concurrent code of ours asks of the outside: locks, gates, who am I, and places where another thread may go on.

Real threads are served by `THREADS`.  A harness that explores interleavings serves the same code with locks of its own,
so that one schedule is one run; hence no room with threads in it uses `threading` itself, but takes a `Sync`.
"""

from __future__ import annotations

import contextlib
import threading
from contextlib import AbstractContextManager
from typing import Any, Protocol

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
        return _Gate()

    def me(self) -> int:
        return threading.get_ident()

    def step(self, what: str) -> None:
        """Threads switch by themselves."""


class _Gate:
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
