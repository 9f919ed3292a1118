"""Exploration of programs of ours under many schedules, and the report of races on a terminal and as JSON.

The second part is the scripts that run torch's own propagator under free-running threads, each in a process with a time limit.
Each script is one file of plain torch, and the script that repeats a finding is the one that made it.  They use these
private parts of torch (each tried on 2.13.0):
    `DTensor._op_dispatcher.sharding_propagator`   the propagator itself, and its cache's `cache_info`
    `_redistribute._gen_transform_infos`, `clear_redistribute_planner_cache`, `use_min_cost_redistribution_plan`
    `debug._clear_sharding_prop_cache`, `_dtensor_spec`, `_op_schema`, `_ops.single_dim_strategy`
    `DeviceMesh(..., _init_backend=False, _rank=r)`   a rank's view of a mesh without a process group
    `torch.testing._internal.distributed.multi_threaded_pg`   torch's own rank threads
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from textwrap import fill, indent, shorten
from types import MappingProxyType, ModuleType
from typing import Any

from localtensor.concurrency import Program, ProgramMaker, by_lines, explore, single_flight, single_flight_cells
from strategies.base.signals import CLEANUPS, uninterrupted
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


GRACE = 10.0
"""Seconds that a script has beyond its own limit, to start, and to write its threads' stacks."""
MARK = "races: "


def run_race_script(name: str, asks: str, text: str, seconds: float) -> ProgramSummary:
    """Run the script: its findings, or that it did not end in time, or why nothing was run."""
    start = time.monotonic()
    with ExitStack() as stack:
        with uninterrupted():
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            CLEANUPS[folder] = partial(shutil.rmtree, ignore_errors=True)
            stack.callback(CLEANUPS.pop, folder)
        file = Path(folder) / f"races_{name}.py"
        file.write_text(text, encoding="utf-8")
        code, out, err = _run([sys.executable, str(file)], folder, seconds + GRACE)
    return summary_of_output(name, asks, text, code, out, err, time.monotonic() - start)


def _run(command: list[str], folder: str, seconds: float) -> tuple[int | None, str, str]:
    """Exit code (None: killed after so many seconds), standard output and standard error."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONUNBUFFERED": "1"}
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=seconds, check=False, cwd=folder, env=environment,
            text=True, errors="replace",
        )  # fmt: skip
    except subprocess.TimeoutExpired as late:
        return None, _text(late.stdout), _text(late.stderr)
    return done.returncode, done.stdout, done.stderr


def summary_of_output(
    name: str, asks: str, text: str, code: int | None, out: str, err: str, seconds: float
) -> ProgramSummary:
    """The summary of a script's process, from its exit code (None: killed) and its output.

    >>> summary_of_output("clear", "?", "", 1, 'races: {"begins": "2.13.0"}', "Timeout (0:01:00)!", 61.0).findings[0].kind
    'time-out'
    """
    events = [json.loads(line[len(MARK) :]) for line in out.splitlines() if line.startswith(MARK)]
    last: dict[str, Any] = events[-1] if events and "counts" in events[-1] else {}
    counts, figures = last.get("counts", {}), last.get("figures", {})
    seen = [event for event in events if "found" in event]
    found = [RaceFinding(name, one["found"], counts.get(one["found"], 1), one["example"], text) for one in seen]
    late = code is None or "Timeout (" in err
    if not any("begins" in event for event in events):
        trouble = f"it did not begin in {seconds:.0f} s" if late else _last_line(err) or f"exit code {code}"
        return ProgramSummary(name, asks, 0, seconds, trouble=trouble)
    if late:
        found.append(RaceFinding(name, "time-out", 1, _tail(err), text))
    elif not last and code is not None and code < 0:
        found.append(RaceFinding(name, "crash", 1, f"signal {-code}\n{_tail(err)}", text))
    elif not last:
        return ProgramSummary(name, asks, 0, seconds, tuple(found), trouble=_last_line(err) or f"exit code {code}")
    return ProgramSummary(name, asks, figures.get("calls", 0), seconds, tuple(found), figures)


def _text(output: object) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else str(output or "")


def _tail(err: str) -> str:
    return "\n".join(err.strip().splitlines()[:40]) or "it wrote nothing"


def _last_line(err: str) -> str:
    return (err.strip().splitlines() or [""])[-1]


RACE_SCRIPTS: Mapping[str, str] = MappingProxyType({
    "numbers": "does a redistribution on rank threads keep the numbers?",
    "plans": "is each rank thread given its own plan for a redistribution?",
    "ranks": "is a thread that serves a second rank given the first one's answer?",
    "keys": "are two calls that differ in an argument distinguished?",
    "flags": "does a setting of one thread stay its own, and end when it ends?",
    "clear": "does every thread learn that the caches were cleared?",
    "answers": "do many threads of one rank get what one thread gets?",
})  # fmt: skip
"""The question that each script answers, the one with the worst consequences first."""
_FOLDER = Path(__file__).parents[2] / "templates"


def race_script(name: str, *, threads: int, rounds: int, seed: int, seconds: int) -> str:
    """The whole text of a script, which gives up after `seconds`.

    >>> race_script("clear", threads=8, rounds=1, seed=0, seconds=60).splitlines()[0]
    '# A rule is replaced, and the caches are cleared: does every thread learn of it?'
    """
    body = (_FOLDER / f"races_{name}.txt").read_text(encoding="utf-8")
    first, rest = body.split("\n", 1)
    head = (
        f"{first}\n# Plain torch: run it with `python races_{name}.py`; exit code 1 if it finds something.\n"
        f"THREADS, ROUNDS, SEED, SECONDS = {threads}, {rounds}, {seed}, {seconds}\n"
    )
    return head + (_FOLDER / "races_common.txt").read_text(encoding="utf-8") + rest
