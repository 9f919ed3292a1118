"""How long the training step of an MLP takes to compile in lockstep, with many ranks beside one."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from localtensor import LocalTensorMode


def seconds_to_compile(ranks: int, backend: str) -> tuple[float, float]:
    """Processor time of the first step of an MLP over tensor-parallel ranks, compiled, less that of a step once it is; and of such a step."""
    torch.compiler.reset()
    with LocalTensorMode(ranks):
        mesh = init_device_mesh("cpu", (ranks,))
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 64))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        x, compiled = torch.ones(8, 64), torch.compile(model, backend=backend)
        took = []
        for _ in range(3):
            start = time.process_time()
            compiled(x).square().mean().backward()
            took.append(time.process_time() - start)
    return took[0] - min(took[1:]), min(took[1:])


def measured(ranks: tuple[int, ...], backend: str, times: int) -> dict[int, list[float]]:
    """Seconds to compile by number of ranks, each in a process of its own, in turn."""
    found: dict[int, list[float]] = {count: [] for count in ranks}
    for _ in range(times):
        for count in ranks:
            command = [sys.executable, "-m", "tests.tools.compiled", "cost", "--here", str(count), backend]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            found[count].append(json.loads(done.stdout.splitlines()[-1])[0])
    return found


def table(found: dict[int, list[float]]) -> list[str]:
    """A line for each number of ranks; the last one is the ratio of the medians."""
    medians = {ranks: statistics.median(times) for ranks, times in found.items()}
    lines = [f"{ranks:>6,} ranks: {median:.2f} s (median of {len(found[ranks])})" for ranks, median in medians.items()]
    return [*lines, f"ratio {medians[max(medians)] / medians[min(medians)]:.2f}"]
