"""Rank threads on one core: only one of them runs at a time, and its caches are where the last one left them.

Left to itself, the system wakes each thread on the core that is idle, which is always another than the one that
hands over; a step of 16 ranks then takes twice as long (`python -m tests.bench --only ranks`, with and without
LOCALTENSOR_CORES=all).  So the threads of a run keep to one core, and move together when others keep it busy.
"""

import ctypes
import os
import time

LOOK = 0.05  # seconds between two looks at whether the core is ours
STARVED = 0.6  # of the time: below it, we move


class Cores:
    """Where the threads of one run run.  Nothing is done where the system has no affinity, or one core only."""

    def __init__(self, ranks: int) -> None:
        self._allowed = sorted(_allowed())
        omp = os.environ.get("OMP_NUM_THREADS") or "1"  # or a list of numbers, one for each level of nesting
        wanted = os.environ.get("LOCALTENSOR_CORES", "one") != "all" and omp.partition(",")[0].strip() == "1"
        self._core = _current(self._allowed) if wanted and len(self._allowed) > 1 else None
        self._core_of: list[int | None] = [None] * ranks
        self._looked = time.perf_counter()
        self._used = time.process_time()

    def turn(self, rank: int) -> None:
        """The rank's thread, which has just got the baton, runs where the last one ran."""
        if self._core is None:
            return
        now = time.perf_counter()
        if now - self._looked > LOOK:
            self._look(now)
        if self._core_of[rank] != self._core:
            os.sched_setaffinity(0, {self._core})
            self._core_of[rank] = self._core

    def _look(self, now: float) -> None:
        used = time.process_time()
        if self._core is not None and used - self._used < STARVED * (now - self._looked):
            self._core = self._allowed[(self._allowed.index(self._core) + 1) % len(self._allowed)]
        self._looked, self._used = now, used


def _allowed() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def _current(allowed: list[int]) -> int:
    """The core that this thread is on."""
    try:
        core = int(ctypes.CDLL(None).sched_getcpu())
    except (AttributeError, OSError):
        core = -1
    return core if core in allowed else allowed[0]
