"""A script in a process of its own, with a limit: whatever happens there, this process goes on."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from strategies.base.signals import LEFT, held
from strategies.propagation.races.model import Finding, Part

GRACE = 10.0
"""Seconds that a script has beyond its own limit, to start, and to write down where its threads stood."""
MARK = "races: "


def run_script(name: str, asks: str, text: str, seconds: float) -> Part:
    """What the script found, that it did not end in time, or why nothing was run."""
    start = time.monotonic()
    with ExitStack() as stack:
        with held():
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            LEFT[folder] = partial(shutil.rmtree, ignore_errors=True)
            stack.callback(LEFT.pop, folder)
        file = Path(folder) / f"races_{name}.py"
        file.write_text(text, encoding="utf-8")
        code, out, err = _run([sys.executable, str(file)], folder, seconds + GRACE)
    return judged(name, asks, text, code, out, err, time.monotonic() - start)


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


def judged(name: str, asks: str, text: str, code: int | None, out: str, err: str, seconds: float) -> Part:
    """The part, from what the process left.

    >>> judged("clear", "?", "", 1, 'races: {"begins": "2.13.0"}', "Timeout (0:01:00)!", 61.0).findings[0].kind
    'time-out'
    """
    told = [json.loads(line[len(MARK) :]) for line in out.splitlines() if line.startswith(MARK)]
    last: dict[str, Any] = told[-1] if told and "counts" in told[-1] else {}
    counts, figures = last.get("counts", {}), last.get("figures", {})
    found = [
        Finding(name, one["found"], counts.get(one["found"], 1), one["example"], text) for one in told if "found" in one
    ]
    late = code is None or "Timeout (" in err
    if not any("begins" in one for one in told):
        said = f"it did not begin in {seconds:.0f} s" if late else _last_line(err) or f"exit code {code}"
        return Part(name, asks, 0, seconds, trouble=said)
    if late:
        found.append(Finding(name, "time-out", 1, _tail(err), text))
    elif not last and code is not None and code < 0:
        found.append(Finding(name, "crash", 1, f"signal {-code}\n{_tail(err)}", text))
    elif not last:
        return Part(name, asks, 0, seconds, tuple(found), trouble=_last_line(err) or f"exit code {code}")
    return Part(name, asks, figures.get("calls", 0), seconds, tuple(found), figures)


def _text(output: object) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else str(output or "")


def _tail(err: str) -> str:
    return "\n".join(err.strip().splitlines()[:40]) or "it wrote nothing"


def _last_line(err: str) -> str:
    return (err.strip().splitlines() or [""])[-1]
