"""What a parent sees of its processes: what they use of the processor, whether they work or wait for each other, what ended them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence

POLL = 0.5  # seconds between two looks
TICKS, SHARE = 2, 0.02
"""Ticks of the system's clock, and the share of the time, that a process which waits may use: gloo's threads look around."""
FREE = 0.5
"""Processors that have nothing to do, on average, while all processes wait for each other and for no processor."""
BUSY_MACHINE = 10
"""Times its limit that a step may take by the clock where other processes hold the processor."""


def processor_time(pid: int | None) -> float:
    """Seconds of the processor that a process and its threads used; 0 where the system does not report them."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            user, system = file.read().rpartition(")")[2].split()[11:13]
    except OSError:
        return 0.0
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def free_time() -> float:
    """Seconds in which the system's processors had nothing to do, of all processors; 0 where it does not report them."""
    try:
        with open("/proc/stat") as file:
            return int(file.readline().split()[4]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0


class Idleness:
    """Watches the processes of a call: whether all of them have used no processor for `seconds`, and how long they have worked.

    `free` is whether the machine was free meanwhile: a process that can go on then does.  Where the system does not report what
    processes use, none of the three is ever so.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.pause = min(POLL, seconds / 2)
        self._pids: Sequence[int | None] = ()
        self._start: list[float] = []
        self._used: list[float] = []
        self._since = self._free_then = 0.0
        self.free = False

    def begin(self, pids: Sequence[int | None]) -> None:
        """The call begins."""
        self._pids = pids
        self._start = self._used = self._now()
        self._since, self._free_then, self.free = time.monotonic(), free_time(), False

    def over(self) -> bool:
        """Whether no process has worked for so long.  To be asked once in `pause` seconds."""
        used, passed = self._now(), time.monotonic() - self._since
        least = TICKS / os.sysconf("SC_CLK_TCK") + SHARE * passed
        if not all(used) or any(now - before > least for now, before in zip(used, self._used, strict=True)):
            self._used, self._since, self._free_then = used, time.monotonic(), free_time()
            return False
        self.free = passed >= self._seconds and free_time() - self._free_then >= FREE * passed
        return passed >= self._seconds

    def worked(self) -> float:
        """The seconds of the processor that the process which worked most has used during the call, when last looked at."""
        return max((now - start for now, start in zip(self._used, self._start, strict=True)), default=0.0)

    def _now(self) -> list[float]:
        return [processor_time(pid) for pid in self._pids]


def is_late(passed: float, worked: float, limit: float) -> bool:
    """Whether a step is past its limit: it worked for so long, or waits for something; not if the machine is busy.

    `passed` are seconds by the clock, `worked` those of the processor.

    >>> is_late(31, 30.5, limit=30), is_late(31, 0.1, limit=30), is_late(60, 12, limit=30), is_late(301, 12, limit=30)
    (True, True, False, True)
    """
    return passed > limit and (worked > limit or worked < SHARE * passed or passed > BUSY_MACHINE * limit)


def signal_name(number: int) -> str:
    """The name of a signal; Python has none for most real-time signals.

    >>> signal_name(9), signal_name(signal.SIGRTMIN + 6)
    ('SIGKILL', 'SIGRTMIN+6')
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIGRTMIN{number - signal.SIGRTMIN:+}"
