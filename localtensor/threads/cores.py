"""The core on which the threads of a run are.

Rank threads keep to one core.  Left to itself, the system wakes each thread on an idle core, which is never the core of
the rank that hands over; a step of 16 ranks then takes twice as long (`python -m tests.tools.bench --only ranks`, with
and without LOCALTENSOR_CORES=all).  The threads of a run move together when other processes keep their core busy.
"""

import ctypes
import os
import re
import time

CHECK_INTERVAL = 0.05  # seconds between two checks of the run's share of its core
MIN_CPU_SHARE = 0.6  # of the time; below it, the run moves to the next core


def threads_per_op() -> int:
    """The threads of an op: the first number of OMP_NUM_THREADS, which may list one for each level of nesting.

    1, as torchrun sets it, if the variable is unset, or holds no such number, which OpenMP ignores too.
    """
    first = (os.environ.get("OMP_NUM_THREADS") or "1").partition(",")[0].strip()
    return max(1, int(first)) if re.fullmatch("[0-9]{1,4}", first) else 1


class CoreAffinity:
    """The core of a run's threads.  Does nothing where the system has no CPU affinity, or one core only."""

    def __init__(self) -> None:
        self._allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        omp = os.environ.get("OMP_NUM_THREADS") or "1"  # or a list of numbers, one for each level of nesting
        wanted = os.environ.get("LOCALTENSOR_CORES", "one") != "all" and omp.partition(",")[0].strip() == "1"
        self._core = _current_core(self._allowed) if wanted and len(self._allowed) > 1 else None
        self._core_of: dict[int, int | None] = {}
        self._checked_at = time.perf_counter()
        self._cpu_time = time.process_time()

    def follow(self, rank: int) -> None:
        """Move this thread, which has just received the run token, to the core of the last holder."""
        if self._core is None:
            return
        now = time.perf_counter()
        if now - self._checked_at > CHECK_INTERVAL:
            used = time.process_time()
            if used - self._cpu_time < MIN_CPU_SHARE * (now - self._checked_at):
                self._core = self._allowed[(self._allowed.index(self._core) + 1) % len(self._allowed)]
            self._checked_at, self._cpu_time = now, used
        if self._core_of.get(rank) != self._core:
            os.sched_setaffinity(0, {self._core})
            self._core_of[rank] = self._core


def _current_core(allowed: list[int]) -> int:
    """The core on which this thread runs."""
    try:
        core = int(ctypes.CDLL(None).sched_getcpu())
    except (AttributeError, OSError):
        core = -1
    return core if core in allowed else allowed[0]
