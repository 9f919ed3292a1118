"""Interleavings of programs of ours, explored: each program under its share of the schedules."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType

from localtensor.concurrency import single_flight as once
from localtensor.concurrency import single_flight_cells as once_cells
from localtensor.concurrency.explorer import Maker, explore
from localtensor.concurrency.line_yield_points import by_lines
from localtensor.concurrency.results import Program
from strategies.propagation.races import cache_programs as races_once
from strategies.propagation.races.linearizability import calls
from strategies.propagation.races.model import Tried

Programs = Sequence[Callable[..., Program]]
Modules = Sequence[ModuleType]
ONCE: Programs = (
    races_once.asks, races_once.colliding, races_once.cleared, races_once.cleared_twice, races_once.failing,
    races_once.failing_once, races_once.reentered, races_once.ringed, races_once.two_caches, races_once.crowded,
    races_once.interrupted_waiter, races_once.interrupted_owner, calls,
)  # fmt: skip
"""The shared cache."""
WITHIN: Modules = (once, once_cells)
"""Its modules."""
STAGES = (("marked", "bounded", 0.25), ("marked", "pct", 0.93), ("lines", "pct", 0.99), ("bytecodes", "pct", 1.0))
"""Where threads may change places, who says when, and the part of the schedules that is done then.

First at the yield points that the code marks; then at every line, and at every bytecode, of the modules under test.
"""
Told = Callable[[str, int], object]
"""Hears the name of the program at work, and how many of its schedules are done."""


def _silent(name: str, count: int) -> None:
    """Nobody is told."""


def explore_all(
    programs: Programs,
    schedules: int,
    *,
    within: Modules = WITHIN,
    seed: int = 0,
    seconds: float | None = None,
    told: Told = _silent,
) -> list[Tried]:
    """Each program under its share of so many schedules, and of the seconds; the first failure of each.

    `within` are the modules whose lines and bytecodes are yield points in the last stages.
    """
    end = None if seconds is None else time.monotonic() + seconds
    found = []
    for number, program in enumerate(programs):
        share = schedules // len(programs) + (number < schedules % len(programs))
        left = None if end is None else max(0.0, end - time.monotonic()) / (len(programs) - number)
        found.append(_explored(program, within, share, seed, left, told))
    return found


def made(program: Callable[..., Program], yields: str, within: Modules) -> Maker:
    """The program with yield points as a stage has them: "marked", "lines" or "bytecodes"."""
    return program if yields == "marked" else by_lines(program, *within, opcodes=yields == "bytecodes")


def _explored(
    program: Callable[..., Program], within: Modules, share: int, seed: int, seconds: float | None, told: Told
) -> Tried:
    name, promise = program.__name__, (program.__doc__ or "").strip().rstrip(".")
    told(name, 0)
    start = time.monotonic()
    tried, failure, stage = 0, None, "marked"
    for yields, policy, part in STAGES:
        many = round(share * part) - tried
        if many < 1 or failure is not None:
            continue
        left = None if seconds is None else max(0.0, start + seconds - time.monotonic())
        heard = partial(_further, told, name, tried)
        done = explore(
            made(program, yields, within), policy=policy, schedules=many, seed=seed, seconds=left, told=heard
        )
        tried, failure, stage = tried + done.schedules, done.failure, yields
    told(name, tried)
    return Tried(name, promise, tried, time.monotonic() - start, failure, stage)


def _further(told: Told, name: str, before: int, count: int) -> None:
    told(name, before + count)
