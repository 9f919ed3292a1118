"""What a recording costs: `python -m tests.tools.trace_cost` runs programs on eight ranks with and without one, in turn.

The programs are the four of `run_pictures` and the training step of `bench --only ranks`.  What is compared is processor time of the
process, with `lt.run(..., trace=FILE)` up to the written file; a figure is the median of some runs.  What a run without a recording
pays is counted: its reports to an observer that ignores them, each with its time in a loop.  With `--large` one run of
100,000 events is recorded instead, in a process of its own: seconds, bytes of the trace and of the page, memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import timeit
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import process_time
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import localtensor as lt
from localtensor.collectives.observer import RunObserver
from localtensor.collectives.trace.events import CALL, WAIT, Recording
from localtensor.layout.links import Links
from localtensor.runner.trace.files import TraceOptions, recorded
from localtensor.threads.run import run_in_threads
from tests.tools.bench.memory import own_peak
from tests.tools.bench.mlp_step import train
from tests.tools.run_pictures import PROGRAMS, RANKS

RUNS, STEPS, EVENTS, TIMES = 7, 20, 100_000, 100_000


def steps() -> None:
    """Steps of a DTensor program of small tensors, where all is overhead."""
    train(STEPS)


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of processor time of a run without and with a recording, and of the reports of one without; its events."""

    name: str
    off: float
    on: float
    reports: float
    events: int

    def __str__(self) -> str:
        return (
            f"{self.name:15} {self.off:7.3f} s, recorded {self.on:7.3f} s: {self.on / self.off:.2f} times;"
            f" {self.events} events; reports without a recording {self.reports / self.off:.3%}"
        )


def seconds_of(program: Callable[[], object], trace: Path | None) -> tuple[float, Recording | None]:
    """The processor time of a run, and its recording."""
    before = process_time()
    ran = lt.run(program, ranks=RANKS, trace=trace)
    return process_time() - before, ran.recording


def cost_of(name: str, program: Callable[[], object], runs: int, file: Path) -> Cost:
    """The medians of so many runs, after one that is not counted."""
    off, on, recording = [], [], None
    for _ in range(runs + 1):
        off.append(seconds_of(program, None)[0])
        taken, recording = seconds_of(program, file)
        on.append(taken)
    assert recording is not None
    return Cost(name, statistics.median(off[1:]), statistics.median(on[1:]), reports(recording), len(recording.events))


def reports(recording: Recording) -> float:
    """The seconds that a run without a recording takes to report what this one has recorded."""
    observer, part = RunObserver(), SimpleNamespace()
    calls, waits = recording.of(CALL), recording.of(WAIT)

    def wait() -> None:
        with observer.waiting(part):  # type: ignore[arg-type]  # it is ignored
            pass

    each = [
        (len(calls), lambda: observer.posted(part)),  # type: ignore[arg-type]
        (len({call.exchange for call in calls}), lambda: observer.met([part])),  # type: ignore[list-item]
        (len(waits), wait),
    ]
    return sum(count * timeit.timeit(report, number=TIMES) / TIMES for count, report in each)


class Little(nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


def loop(times: int) -> None:
    """Training steps of data parallelism by hand."""
    model = Little()
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(times):
        model(torch.ones(4, 16)).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()


def large(folder: Path) -> dict[str, Any]:
    """The figures of a run of about `EVENTS` events, with its trace and its page."""
    few = lt.run(loop, 4, ranks=RANKS, trace=True).recording
    fewer = lt.run(loop, 2, ranks=RANKS, trace=True).recording
    assert few is not None and fewer is not None
    times = 21 * EVENTS // 10 // (len(few.events) - len(fewer.events))  # a twentieth more: collections are not in each
    before, memory = process_time(), own_peak()
    lt.run(loop, times, ranks=RANKS, timeout=None)
    bare, bare_memory = process_time() - before, own_peak()
    before = process_time()
    files = TraceOptions(folder / "trace.json", folder / "page.html", links=Links())
    with recorded(files, RANKS) as recorder:
        run_in_threads(lambda rank: loop(times), RANKS, lt.round_robin(), 0, None, observer=recorder)
        run = process_time() - before
    written = process_time() - before - run
    before = process_time()
    trace = json.loads((folder / "trace.json").read_text())
    return {
        "events": len(recorder.recording.events), "in the trace": len(trace["traceEvents"]),
        "seconds without a recording": bare, "seconds of the run": run, "seconds of writing both files": written,
        "seconds of reading the trace": process_time() - before,
        "MB of the trace": (folder / "trace.json").stat().st_size / 1e6,
        "MB of the page": (folder / "page.html").stat().st_size / 1e6,
        "MiB at first": memory, "MiB without a recording": bare_memory, "MiB at most": own_peak(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="programs; all if there are none")
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--large", type=Path, metavar="DIR", help=f"record {EVENTS:,} events into this folder")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    if given.large is not None:
        for name, value in large(given.large).items():
            print(f"{name:30} {value:,.1f}" if isinstance(value, float) else f"{name:30} {value:,}")
        return
    with tempfile.TemporaryDirectory() as folder:
        for name, program in {**PROGRAMS, "steps": steps}.items():
            if not given.names or name in given.names:
                print(cost_of(name, program, given.runs, Path(folder) / "trace.json"), flush=True)


if __name__ == "__main__":
    main()
