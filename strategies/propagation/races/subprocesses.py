"""The scripts that run torch's own propagator under free-running threads, each in a process with a time limit.

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
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from strategies.base.signals import CLEANUPS, uninterrupted
from strategies.propagation.races.linearizability import ProgramSummary, RaceFinding

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
