"""How findings of races read: on a terminal, and as JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from textwrap import fill, indent, shorten
from types import ModuleType
from typing import Any

from localtensor.concurrency import Maker, Program, by_lines, explore, single_flight, single_flight_cells
from strategies.propagation.races import cache_programs
from strategies.propagation.races.linearizability import ExploredProgram, Finding, ProgramSummary, calls

WIDTH = 110
EXAMPLE = 12  # lines of an example that are shown


def as_text(target: str, about: str, parts: Sequence[ProgramSummary], repeat: str) -> str:
    """A line for each part, each finding with what it means, and a last line that counts."""
    lines = [f"localtensor races --target {target}: {about}", ""]
    lines += [_line(part) for part in parts]
    findings = [finding for part in parts for finding in part.findings]
    for number, finding in enumerate(findings, 1):
        lines += ["", *_told(number, finding)]
    lines += ["", _last(parts, findings)]
    if findings:
        lines.append(repeat)
    return "\n".join(lines)


def as_json(target: str, about: str, parts: Sequence[ProgramSummary], code: int) -> str:
    """The whole report."""
    return json.dumps({
        "target": target,
        "about": about,
        "exit_code": code,
        "parts": [_part(part) for part in parts],
    }, indent=1) + "\n"  # fmt: skip


def _part(part: ProgramSummary) -> dict[str, Any]:
    return {
        "name": part.name,
        "asks": part.asks,
        "tried": part.tried,
        "seconds": round(part.seconds, 2),
        "figures": dict(part.figures),
        "trouble": part.trouble,
        "findings": [
            {
                "kind": one.kind,
                "count": one.count,
                "example": one.example,
                "meaning": one.meaning,
                "script": one.script,
            }
            for one in part.findings
        ],
    }


def _line(part: ProgramSummary) -> str:
    what = f"not run: {shorten(part.trouble, 60)}" if part.trouble else _count(len(part.findings), "finding")
    return f"  {part.name:20} {part.tried:>9,} in {part.seconds:6.1f} s  {what:12}  {part.asks}"


def _told(number: int, finding: Finding) -> list[str]:
    times = "once" if finding.count == 1 else f"{finding.count} times"
    example = finding.example.splitlines()
    shown = [fill(line, WIDTH, subsequent_indent="  ", break_long_words=False) for line in example[:EXAMPLE]]
    if len(example) > EXAMPLE:
        shown.append(f"... and {len(example) - EXAMPLE} more lines")
    told = [f"{number}. {finding.part}: {finding.kind}, {times}", indent("\n".join(shown), "   ")]
    return told + ([indent(fill(f"It means: {finding.meaning}", WIDTH), "   ")] if finding.meaning else [])


def _last(parts: Sequence[ProgramSummary], findings: Sequence[Finding]) -> str:
    tried, idle = sum(part.tried for part in parts), [part.name for part in parts if part.trouble]
    left = f"; not run: {', '.join(idle)}" if idle else ""
    return f"{_count(len(findings), 'finding')} in {tried:,} tried{left}"


def _count(many: int, word: str) -> str:
    return f"{many or 'no'} {word}{'' if many == 1 else 's'}"


# Interleavings of programs of ours, explored: each program under its share of the schedules.

Programs = Sequence[Callable[..., Program]]
Modules = Sequence[ModuleType]
ONCE: Programs = (
    cache_programs.asks, cache_programs.colliding, cache_programs.cleared, cache_programs.cleared_twice, cache_programs.failing,
    cache_programs.failing_once, cache_programs.reentered, cache_programs.ringed, cache_programs.two_caches, cache_programs.crowded,
    cache_programs.interrupted_waiter, cache_programs.interrupted_owner, calls,
)  # fmt: skip
"""The shared cache."""
WITHIN: Modules = (single_flight, single_flight_cells)
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
) -> list[ExploredProgram]:
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
) -> ExploredProgram:
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
            made(program, yields, within), policy=policy, schedules=many, seed=seed, seconds=left, progress=heard
        )
        tried, failure, stage = tried + done.schedules, done.failure, yields
    told(name, tried)
    return ExploredProgram(name, promise, tried, time.monotonic() - start, failure, stage)


def _further(told: Told, name: str, before: int, count: int) -> None:
    told(name, before + count)
