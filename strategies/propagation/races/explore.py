"""Exploration of programs of ours under many schedules, and the report of races on a terminal and as JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from textwrap import fill, indent, shorten
from types import ModuleType
from typing import Any

from localtensor.concurrency import Program, ProgramMaker, by_lines, explore, single_flight, single_flight_cells
from strategies.propagation.races import cache_programs
from strategies.propagation.races.linearizability import ExploredProgram, ProgramSummary, RaceFinding, calls

WIDTH = 110
EXAMPLE = 12
"""The largest number of lines shown of an example."""


def as_text(target: str, about: str, parts: Sequence[ProgramSummary], repeat: str) -> str:
    """A line for each part, each finding with what it means, and a last line that counts."""
    lines = [f"localtensor races --target {target}: {about}", ""]
    lines += [_line(part) for part in parts]
    findings = [finding for part in parts for finding in part.findings]
    for number, finding in enumerate(findings, 1):
        lines += ["", *_finding_text(number, finding)]
    tried, idle = sum(part.tried for part in parts), [part.name for part in parts if part.trouble]
    left = f"; not run: {', '.join(idle)}" if idle else ""
    lines += ["", f"{_count(len(findings), 'finding')} in {tried:,} tried{left}"]
    if findings:
        lines.append(repeat)
    return "\n".join(lines)


def as_json(target: str, about: str, parts: Sequence[ProgramSummary], code: int) -> str:
    """The whole report."""
    body = {"target": target, "about": about, "exit_code": code, "parts": [_part(part) for part in parts]}
    return json.dumps(body, indent=1) + "\n"


_FINDING_FIELDS = ("kind", "count", "example", "meaning", "script")


def _part(part: ProgramSummary) -> dict[str, Any]:
    return {
        "name": part.name,
        "asks": part.asks,
        "tried": part.tried,
        "seconds": round(part.seconds, 2),
        "figures": dict(part.figures),
        "trouble": part.trouble,
        "findings": [{name: getattr(one, name) for name in _FINDING_FIELDS} for one in part.findings],
    }


def _line(part: ProgramSummary) -> str:
    what = f"not run: {shorten(part.trouble, 60)}" if part.trouble else _count(len(part.findings), "finding")
    return f"  {part.name:20} {part.tried:>9,} in {part.seconds:6.1f} s  {what:12}  {part.asks}"


def _finding_text(number: int, finding: RaceFinding) -> list[str]:
    times = "once" if finding.count == 1 else f"{finding.count} times"
    example = finding.example.splitlines()
    shown = [fill(line, WIDTH, subsequent_indent="  ", break_long_words=False) for line in example[:EXAMPLE]]
    if len(example) > EXAMPLE:
        shown.append(f"... and {len(example) - EXAMPLE} more lines")
    lines = [f"{number}. {finding.part}: {finding.kind}, {times}", indent("\n".join(shown), "   ")]
    return lines + ([indent(fill(f"It means: {finding.meaning}", WIDTH), "   ")] if finding.meaning else [])


def _count(many: int, word: str) -> str:
    return f"{many or 'no'} {word}{'' if many == 1 else 's'}"


Programs = Sequence[Callable[..., Program]]
Modules = Sequence[ModuleType]
ONCE: Programs = (
    cache_programs.asks, cache_programs.colliding, cache_programs.cleared, cache_programs.cleared_twice,
    cache_programs.failing, cache_programs.failing_once, cache_programs.reentered, cache_programs.ringed,
    cache_programs.two_caches, cache_programs.crowded, cache_programs.interrupted_waiter,
    cache_programs.interrupted_owner, calls,
)  # fmt: skip
"""The programs over the shared cache."""
WITHIN: Modules = (single_flight, single_flight_cells)
"""The modules of the shared cache."""
SCHEDULE_STAGES = (
    ("marked", "bounded", 0.25),
    ("marked", "pct", 0.93),
    ("lines", "pct", 0.99),
    ("bytecodes", "pct", 1.0),
)
"""For each stage the yield points, the policy, and the share of the schedules that is done after it.

Threads may switch first at the yield points that the code marks, then at every line, and at every bytecode, of the
modules under test.
"""
Progress = Callable[[str, int], object]
"""A callback that takes the name of the current program, and the number of its schedules that are done."""


def explore_all(
    programs: Programs,
    schedules: int,
    *,
    within: Modules = WITHIN,
    seed: int = 0,
    seconds: float | None = None,
    progress: Progress = lambda name, count: None,
) -> list[ExploredProgram]:
    """Run each program under its share of the schedules and seconds, up to its first failure.

    `within` are the modules whose lines and bytecodes are yield points in the last stages.
    """
    end = None if seconds is None else time.monotonic() + seconds
    found = []
    for number, program in enumerate(programs):
        share = schedules // len(programs) + (number < schedules % len(programs))
        left = None if end is None else max(0.0, end - time.monotonic()) / (len(programs) - number)
        found.append(_explored(program, within, share, seed, left, progress))
    return found


def made(program: Callable[..., Program], yields: str, within: Modules) -> ProgramMaker:
    """The program with the yield points of a stage: "marked", "lines" or "bytecodes"."""
    return program if yields == "marked" else by_lines(program, *within, opcodes=yields == "bytecodes")


def _explored(
    program: Callable[..., Program], within: Modules, share: int, seed: int, seconds: float | None, report: Progress
) -> ExploredProgram:
    name, promise = program.__name__, (program.__doc__ or "").strip().rstrip(".")
    report(name, 0)
    start = time.monotonic()
    tried, failure, stage = 0, None, "marked"
    for yields, policy, part in SCHEDULE_STAGES:
        many = round(share * part) - tried
        if many < 1 or failure is not None:
            continue
        left = None if seconds is None else max(0.0, start + seconds - time.monotonic())

        def progress(count: int, before: int = tried) -> None:
            report(name, before + count)

        staged = made(program, yields, within)
        done = explore(staged, policy=policy, schedules=many, seed=seed, seconds=left, progress=progress)
        tried, failure, stage = tried + done.schedules, done.failure, yields
    report(name, tried)
    return ExploredProgram(name, promise, tried, time.monotonic() - start, failure, stage)
