"""The whole programs of `tests/end_to_end/programs`, each compiled and run in lockstep, beside the same program as it is written."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from tests.end_to_end.programs import test_lockstep
from tests.end_to_end.programs.lockstep_ways import in_lockstep
from tests.tools.compiled.draws import of_ours

BACKENDS = ("aot_eager", "inductor")
SECONDS = 600
"""The most that one program may take under one backend."""
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-3}
"""The largest difference that passes, as a part of the largest value of the tensor; `difference` is what was measured."""
PROGRAMS: dict[str, tuple[Any, ...]] = {**test_lockstep.CLOSE, **test_lockstep.EQUAL}


def difference(mine: Any, theirs: Any) -> float:
    """The largest difference, as a part of the largest value; infinite where types, shapes or other values differ."""
    if isinstance(mine, Tensor) and isinstance(theirs, Tensor):
        if mine.dtype != theirs.dtype or mine.shape != theirs.shape:
            return float("inf")
        if mine.dtype not in TOLERANCE:
            return 0.0 if torch.equal(mine, theirs) else float("inf")
        if not mine.numel() or torch.equal(mine.nan_to_num(7), theirs.nan_to_num(7)):
            return 0.0
        part = ((mine - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30)).item()
        return part / TOLERANCE[mine.dtype]
    if isinstance(mine, dict) and isinstance(theirs, dict) and list(mine) == list(theirs):
        return max((difference(mine[key], theirs[key]) for key in mine), default=0.0)
    if isinstance(mine, list | tuple) and isinstance(theirs, list | tuple) and len(mine) == len(theirs):
        return max((difference(one, other) for one, other in zip(mine, theirs, strict=True)), default=0.0)
    if isinstance(mine, float) and isinstance(theirs, float):
        return difference(torch.tensor(mine, dtype=torch.float64), torch.tensor(theirs, dtype=torch.float64))
    return 0.0 if mine == theirs else float("inf")


def compared(name: str, backend: str) -> dict[str, Any]:
    """What came of one program: `outcome`, the `difference` in tolerances, and how many graphs were compiled."""
    program, *args = PROGRAMS[name]
    ranks = test_lockstep.ranks_of(program)
    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = in_lockstep(program, *args, ranks=ranks)
        try:
            found = in_lockstep(torch.compile(program, backend=backend), *args, ranks=ranks)
        except Exception as error:  # why: whatever it is, it is the outcome
            words = str(error).strip().partition("\n")[0][:200]
            named = "refused by name" if of_ours(error) else "RAISES"
            return {"outcome": f"{named}: {type(error).__name__}: {words}"}
    far = difference(found, wanted)
    graphs = counters["stats"].get("unique_graphs", 0)
    return {"outcome": "equal" if far <= 1 else "DIFFERENT", "difference": far, "graphs": graphs}


def all_compared(chosen: list[str]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Each program under each backend, in a process of its own."""
    for name in chosen or PROGRAMS:
        for backend in BACKENDS:
            command = [
                sys.executable,
                "-X",
                "faulthandler",
                "-m",
                "tests.tools.compiled",
                "programs",
                "--here",
                name,
                backend,
            ]
            try:
                done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=SECONDS)
            except subprocess.TimeoutExpired:
                yield name, backend, {"outcome": f"RAISES: more than {SECONDS} s"}
                continue
            if done.returncode:
                kind = "native crash" if done.returncode < 0 else "error"
                yield name, backend, {"outcome": f"RAISES: {kind} {done.returncode}: {done.stderr[-800:]}"}
            else:
                yield name, backend, json.loads(done.stdout.splitlines()[-1])
