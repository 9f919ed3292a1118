"""What a recording costs: `python -m tests.tools.trace_cost` runs programs on eight ranks with and without one, in turn.

The programs are the four of `run_pictures` and the training step of `bench --only ranks`.  What is compared is processor time of the
process, with `lt.run(..., trace=FILE)` up to the written file; a figure is the median of the ratios of neighbouring runs, with its
quartiles.  `--off` compares a run without a recording with one in whose code the reports to the observer are not there.  With
`--large` one run of 100,000 events is recorded instead, in a process of its own: seconds, bytes of the trace and of the page, memory.
"""

from __future__ import annotations

import argparse
import ast
import gc
import inspect
import json
import statistics
import tempfile
import textwrap
import timeit
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import process_time
from types import FunctionType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import localtensor as lt
from localtensor.collectives.trace.events import CALL, WAIT, Recording
from localtensor.layout.links import Links
from localtensor.runner.trace.files import TraceOptions, recorded
from localtensor.threads import run as threads_run
from localtensor.threads.run import run_in_threads
from localtensor.threads.simulation import Simulation
from tests.tools.bench.memory import own_peak
from tests.tools.bench.mlp_step import train
from tests.tools.run_pictures import PROGRAMS, RANKS

RUNS, STEPS, EVENTS, TIMES = 9, 20, 100_000, 100_000


def steps() -> None:
    """Steps of a DTensor program of small tensors, where all is overhead."""
    train(STEPS)


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of processor time of neighbouring runs: of those that are the measure, and of those that are measured."""

    name: str
    bases: list[float]
    others: list[float]

    def __str__(self) -> str:
        ratios = [other / base for other, base in zip(self.others, self.bases, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        return (
            f"{self.name:15} {statistics.median(self.bases):7.3f} s; {middle:.3f} times, quartiles {low:.3f} and"
            f" {high:.3f}, of {len(ratios)} pairs; the fastest runs {min(self.others) / min(self.bases):.3f} times"
        )


def seconds_of(program: Callable[[], object], trace: Path | None) -> float:
    """The processor time of a run; what earlier ones have left is collected before."""
    gc.collect()
    before = process_time()
    lt.run(program, ranks=RANKS, trace=trace)
    return process_time() - before


def cost_of(name: str, one: Callable[[], float], base: Callable[[], float], runs: int) -> Cost:
    """The seconds of so many pairs of runs, after one that does not count; every second pair begins with the base."""
    bases, others = [], []
    for number in range(runs + 1):
        first, second = (base, one) if number % 2 else (one, base)
        taken = first(), second()
        bases.append(taken[not number % 2])
        others.append(taken[number % 2])
    return Cost(name, bases[1:], others[1:])


def reports(recording: Recording) -> float:
    """The seconds that a run without a recording takes to see that nothing records, by the time of one test in a loop."""
    run, calls, waits = SimpleNamespace(observer=None), recording.of(CALL), recording.of(WAIT)
    count = len(calls) + len({call.exchange for call in calls}) + len(waits)
    return count * timeit.timeit(lambda: run.observer is None, number=TIMES) / TIMES


class _Silent(ast.NodeTransformer):
    """Removes the reports to an observer: tests whether there is one, and a block around others."""

    def __init__(self) -> None:
        self.removed = 0

    def visit_If(self, node: ast.If) -> Any:  # the name is that of ast
        self.generic_visit(node)
        test = ast.unparse(node.test)
        if not test.endswith((".observer is None", ".observer is not None")):
            return node
        return self._without(node, node.body if test.endswith("is None") else node.orelse)

    def visit_With(self, node: ast.With) -> Any:  # the name is that of ast
        self.generic_visit(node)
        return self._without(node, node.body) if ".observer." in ast.unparse(node.items[0]) else node

    def _without(self, node: ast.AST, body: list[ast.stmt]) -> list[ast.stmt]:
        self.removed += 1
        return body


def silent(function: FunctionType) -> FunctionType:
    """The function without its reports to an observer.  Raises LookupError if it has none."""
    tree, remover = ast.parse(textwrap.dedent(inspect.getsource(function))), _Silent()
    code = compile(ast.fix_missing_locations(remover.visit(tree)), function.__code__.co_filename, "exec")
    if not remover.removed:
        raise LookupError(f"{function.__qualname__} reports nothing")
    found: dict[str, Any] = {}
    exec(code, function.__globals__, found)
    made: FunctionType = found[function.__name__]
    return made


REPORTING: list[tuple[Any, str]] = [
    *((Simulation, name) for name in ("_complete", "_deliver_message", "wait", "note", "end")), (threads_run, "_run_rank"),
]  # fmt: skip


@contextmanager
def without_reports() -> Iterator[None]:
    """Inside the block no code of a run reports to an observer."""
    patches = [mock.patch.object(owner, name, silent(getattr(owner, name))) for owner, name in REPORTING]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


def seconds_without_reports(program: Callable[[], object]) -> float:
    """The processor time of a run that has no observer."""
    with without_reports():
        return seconds_of(program, None)


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
    parser.add_argument("--off", action="store_true", help="compare runs without a recording, with and without reports")
    parser.add_argument("--large", type=Path, metavar="DIR", help=f"record {EVENTS:,} events into this folder")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    if given.large is not None:
        for name, value in large(given.large).items():
            print(f"{name:30} {value:,.1f}" if isinstance(value, float) else f"{name:30} {value:,}")
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        for name, program in {**PROGRAMS, "steps": steps}.items():
            if given.names and name not in given.names:
                continue
            bare = partial(seconds_of, program, None)
            if given.off:
                cost = cost_of(name, bare, partial(seconds_without_reports, program), given.runs)
                recording = lt.run(program, ranks=RANKS, trace=True).recording
                assert recording is not None
                share = reports(recording) / statistics.median(cost.bases)
                print(f"{cost}; the reports by themselves {share:.3%}", flush=True)
            else:
                print(cost_of(name, partial(seconds_of, program, file), bare, given.runs), flush=True)


if __name__ == "__main__":
    main()
