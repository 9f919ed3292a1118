"""A limit of processor time for a call that may never return, and the function in which it stays.

The call is interrupted by an exception, so that its process lives on.  This works for loops in Python, in the main thread,
on systems with `setitimer`; elsewhere, and for loops in native code, there is no limit, and the one of the worker pool ends
the process.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FrameType

Counts = Callable[[Sequence[CodeType]], bool]
LOOKS = 10
"""Looks at the stack in the second half of the limit: the innermost call that all of them see is the one that stays."""
KNOWN_SECONDS = 1.0
"""The limit of a call that stays in a function that has not returned before."""


class DoesNotReturn(BaseException):
    """A call has reached its limit of so many seconds; `codes` are the functions that it stays in, the innermost last.

    It is no `Exception`: the code that is called may catch those.
    """

    def __init__(self, codes: Sequence[CodeType], seconds: float) -> None:
        super().__init__(f"{codes[-1].co_name} does not return within {seconds:g} s of processor time")
        self.codes, self.seconds = tuple(codes), seconds


class TimeLimit:
    """A limit of so many seconds of processor time for each of several calls.

    `counts` says whether a call that stays in these functions is to be interrupted; it may go on otherwise.

    >>> limit = TimeLimit(0.1)
    >>> def forever():
    ...     while True:
    ...         pass
    >>> try:
    ...     with limit.applied():
    ...         forever()
    ... except DoesNotReturn as error:
    ...     print(error)
    forever does not return within 0.1 s of processor time
    """

    def __init__(self, seconds: float, counts: Counts = bool) -> None:
        self.seconds, self._counts = seconds, counts
        self._stuck: set[CodeType] = set()
        """The functions that have not returned: a call that is in one of them is interrupted after `KNOWN_SECONDS`."""

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Within it, raises `DoesNotReturn` at the limit.  Limits do not nest: within another one there is none."""
        if not _is_available():
            yield
            return
        look = _Look(self.seconds, self._stuck, self._counts)
        before = signal.signal(signal.SIGPROF, look)
        try:
            look.arm(KNOWN_SECONDS if self._stuck and self.seconds > KNOWN_SECONDS else self.seconds)
            yield
        except DoesNotReturn as error:
            self._stuck.add(error.codes[-1])
            raise
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, before)


def _is_available() -> bool:
    return (
        hasattr(signal, "setitimer")
        and threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGPROF) in (signal.SIG_DFL, signal.SIG_IGN)
    )


class _Look:
    """The handler of the timer: it looks at the stack so many times, and then interrupts."""

    def __init__(self, seconds: float, stuck: set[CodeType], counts: Counts) -> None:
        self._seconds, self._stuck, self._counts = seconds, stuck, counts
        self._begun: float | None = None
        self._armed = seconds
        self._looks = 0
        self._common: list[FrameType] = []

    def arm(self, seconds: float) -> None:
        """Looks so that the last look comes after so many seconds."""
        self._armed, self._looks, self._common = seconds, 0, []
        signal.setitimer(signal.ITIMER_PROF, seconds / 2, seconds / 2 / LOOKS)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._begun is None:  # half of the limit ago: most calls end before a look, and need no clock
            self._begun = time.process_time() - self._armed / 2
        seen = _stack(frame)
        self._common = [a for a, b in zip(self._common, seen, strict=False) if a is b] if self._looks else seen
        self._looks += 1
        if self._looks <= LOOKS:
            return
        codes = [frame.f_code for frame in self._common]
        left = self._seconds - (time.process_time() - self._begun)
        known = codes[-1] in self._stuck
        if not known and left > 0.1 * self._seconds:
            self.arm(left)
            return
        if not self._counts(codes):
            self.arm(self._seconds)
            return
        raise DoesNotReturn(codes, self._armed if known else self._seconds)


def _stack(frame: FrameType | None) -> list[FrameType]:
    """The frames of a thread, the outermost first."""
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found[::-1]
