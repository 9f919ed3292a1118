"""Interleavings a second: a bounded search and PCT over three threads of six yield points, and over the shared cache.

With them, how soon the planted races are found, and what silence about the shared cache costs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from localtensor.concurrency.explorer import ExplorationResult, Program, explore
from localtensor.concurrency.sync import ScheduledSync
from strategies.propagation.races import explore as races
from tests.tools.races.culprits import CULPRITS

THREADS, STEPS, BOUND = 3, 6, 2
SECONDS, RATE, WITHIN, MANY = 10.0, 500, 1000, 5000
"""Targets: seconds of the bounded search, PCT schedules a second, schedules until a planted race; and a sample."""


@dataclass(frozen=True, slots=True)
class Races:
    """Seconds and schedules; `latest` is the planted race that took the most schedules, by pct and by bounded search."""

    bounded_seconds: float
    bounded_schedules: int
    pct_rate: float
    locks_rate: float
    once_rate: float
    found: int
    planted: int
    latest: tuple[str, int]

    @property
    def passed(self) -> bool:
        return self.found == self.planted

    def figures(self) -> dict[str, object]:
        return asdict(self)


def steps(sync: ScheduledSync) -> Program:
    def thread() -> None:
        for _ in range(STEPS):
            sync.step("step")

    return Program([thread] * THREADS)


def locks(sync: ScheduledSync) -> Program:
    """Each thread takes and frees a lock three times: six yield points, and most of them in the others' way."""
    lock = sync.lock()

    def thread() -> None:
        for _ in range(STEPS // 2):
            with lock:
                pass

    return Program([thread] * THREADS)


def _timed(work: Callable[[], ExplorationResult]) -> tuple[float, int]:
    start = time.perf_counter()
    done = work()
    if done.failure:
        raise RuntimeError(f"a right program failed: {done.failure}")
    return time.perf_counter() - start, done.schedules


def measure() -> Races:
    seconds, all_of_them = _timed(lambda: explore(steps, policy="bounded", bound=BOUND, schedules=10**6))
    pct = _timed(lambda: explore(steps, policy="pct", schedules=MANY))
    taken = _timed(lambda: explore(locks, policy="pct", schedules=MANY))
    start = time.perf_counter()
    tried = races.explore_all(races.ONCE, MANY)
    if any(one.failure for one in tried):
        raise RuntimeError(f"the shared cache failed: {[str(one.failure) for one in tried if one.failure]}")
    once = sum(one.schedules for one in tried) / (time.perf_counter() - start)
    needed = {
        culprit.name: [
            explore(culprit.of(culprit.wrong), policy=policy, schedules=WITHIN) for policy in ("pct", "bounded")
        ]
        for culprit in CULPRITS
    }
    found = sum(all(one.failure for one in both) for both in needed.values())
    latest = max(((name, max(one.schedules for one in both)) for name, both in needed.items()), key=lambda it: it[1])
    return Races(
        seconds, all_of_them, pct[1] / pct[0], taken[1] / taken[0], once, found, len(CULPRITS), latest,
    )  # fmt: skip


def show(console: Console, found: Races) -> None:
    table = Table(title="Races: interleavings explored", title_justify="left", show_header=False)
    for row in (
        (f"all of {THREADS} threads x {STEPS} yield points, bound {BOUND}",
         f"{found.bounded_seconds:.2f} s for {found.bounded_schedules}", f"target {SECONDS:.0f} s"),
        ("bounded, schedules a second", f"{found.bounded_schedules / found.bounded_seconds:,.0f}", ""),
        ("pct, schedules a second", f"{found.pct_rate:,.0f}; with locks {found.locks_rate:,.0f}", f"target {RATE}"),
        ("pct and bounded over the shared cache", f"{found.once_rate:,.0f} a second", "nothing found in them"),
        ("planted races found by both", f"{found.found} of {found.planted}", f"target all, within {WITHIN} schedules"),
        ("the one that took the most schedules", f"{found.latest[1]}: {found.latest[0]}", ""),
    ):  # fmt: skip
        table.add_row(*row)
    console.print(table)
