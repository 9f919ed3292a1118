"""How much memory a command and the processes that it starts take, read from /proc while it runs."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import threading
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
EVERY = 0.5
"""Seconds between two looks."""
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Peak:
    """In MiB.  `together` adds up what is resident in all processes at one moment, and so counts a page
    that forked workers share with their parent once for each; `shared_once` counts it once."""

    together: int
    shared_once: int
    parent: int
    children: tuple[int, ...]


def own_peak() -> float:
    """The most that this process had resident, in MiB.

    Not ru_maxrss where there is /proc: a process starts with that of the one that forked it.
    """
    with contextlib.suppress(OSError):
        for line in Path(PROC, "self", "status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def watched(words: list[str]) -> tuple[subprocess.CompletedProcess[str], float, Peak | None]:
    """Run a command: what it said, its seconds, and its peak; None where there is no /proc."""
    start = time.perf_counter()
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        watcher = _Watcher(process.pid)
        watcher.start()
        try:
            out, err = process.communicate()
        except BaseException:  # why: Ctrl-C must not leave the sweep running
            process.kill()
            raise
        finally:
            watcher.stop()
    seconds = time.perf_counter() - start
    return subprocess.CompletedProcess(words, process.returncode, out, err), seconds, watcher.peak()


class _Watcher(threading.Thread):
    """Looks at a process and all its descendants until it is told to stop."""

    def __init__(self, root: int) -> None:
        super().__init__(daemon=True)
        self._root = root
        self._over = threading.Event()
        self._together = self._shared_once = 0
        self._each: dict[int, int] = defaultdict(int)

    def run(self) -> None:
        while PROC.is_dir() and not self._over.wait(EVERY):
            pids = _family(self._root)
            resident = {pid: _resident(pid) for pid in pids}
            for pid, size in resident.items():
                self._each[pid] = max(self._each[pid], size)
            self._together = max(self._together, sum(resident.values()))
            self._shared_once = max(self._shared_once, sum(map(_proportional, pids)))

    def stop(self) -> None:
        self._over.set()
        self.join()

    def peak(self) -> Peak | None:
        if not self._each:
            return None
        children = sorted((size // MIB for pid, size in self._each.items() if pid != self._root), reverse=True)
        return Peak(self._together // MIB, self._shared_once // MIB, self._each[self._root] // MIB, tuple(children))


def _family(root: int) -> list[int]:
    """The process and its descendants."""
    children: dict[int, list[int]] = defaultdict(list)
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            children[_parent(entry)].append(int(entry.name))
    found = [root]
    for pid in found:
        found += children[pid]
    return found


def _parent(entry: Path) -> int:
    try:
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):  # it has ended meanwhile
        return -1


def _resident(pid: int) -> int:
    try:
        return int((PROC / str(pid) / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def _proportional(pid: int) -> int:
    """Its pages, each divided by the number of processes that share it."""
    try:
        lines = (PROC / str(pid) / "smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024
