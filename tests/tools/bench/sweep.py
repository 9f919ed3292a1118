"""The main job whole: `localtensor validate --all --claims`, its time and its memory."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.tools.bench.memory import Peak, watched
from tests.tools.bench.ours import cpu

SECONDS, MEMORY = 300.0, 4096
"""Targets: wall seconds on two cores, and MiB."""
TOOL = Path(sys.executable).parent / "localtensor"
"""The console script, as a user runs it: under `python -c` each of torch's seedings looks for a file "<string>"."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """`wall` and `cpu` hold everything, Python's start too; `phases` is what the tool says of itself."""

    wall: float
    cpu: float
    phases: dict[str, float]
    counts: dict[str, int]
    peak: Peak | None


def sweep() -> Sweep:
    """Run it twice, each in a process of its own: once for its time, and once watched for its memory, which
    slows it down.  Raises RuntimeError if nothing was tested."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        words = [str(TOOL), "validate", "--all", "--claims", "--quiet", "--json", str(report)]
        busy, start = cpu(), time.perf_counter()
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        seconds, busy = time.perf_counter() - start, cpu() - busy
        if done.returncode not in (0, 1) or not report.exists():
            raise RuntimeError(
                f"localtensor validate --all --claims ended with code {done.returncode}: {done.stderr[-2000:]}"
            )
        told = json.loads(report.read_text())
        _, _, peak = watched(words)
    return Sweep(seconds, busy, told["seconds"], told["counts"], peak)
