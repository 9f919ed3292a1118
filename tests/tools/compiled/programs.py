"""The whole programs of `tests/end_to_end/programs` in lockstep with their modules compiled, beside the same programs as they are written.

The modules that a program calls are compiled, each outermost one with its hooks; a program that calls none is compiled as a whole, in the
graphs between the calls for which Dynamo breaks them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from tests.end_to_end.programs import test_lockstep
from tests.end_to_end.programs.lockstep_ways import in_lockstep
from tests.tools.compiled.draws import of_ours, one_rank

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


@contextmanager
def modules_compiled(backend: str) -> Iterator[None]:
    """While inside, the first call of a module that no other module calls compiles it."""
    before, within = nn.Module.__call__, [0]

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not within[0] and self._compiled_call_impl is None:
            self.compile(backend=backend)
        within[0] += 1
        try:
            return before(self, *args, **kwargs)
        finally:
            within[0] -= 1

    nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = before  # type: ignore[method-assign]


def compiled(program: Any, args: Sequence[Any], backend: str, run: Callable[..., Any], *, whole: bool) -> Any:
    """What a program gives by `run` with its modules compiled, or itself as a `whole`."""
    torch.compiler.reset()
    counters.clear()
    if whole:
        return run(torch.compile(program, backend=backend), *args)
    with modules_compiled(backend):
        return run(program, *args)


def raised_on_a_rank(program: Any, args: Sequence[Any], backend: str, ranks: int, *, whole: bool) -> str | None:
    """What one rank of torch's own raises, whose collectives move nothing, with the program compiled alike; None if it ends."""
    mine = [arg[0] if isinstance(arg, list) else arg for arg in args]
    try:
        with one_rank(ranks):
            compiled(program, mine, backend, lambda function, *given: function(*given), whole=whole)
    except Exception as error:  # why: whatever it is, it is the outcome
        return f"{type(error).__name__}: {str(error).strip()[:300]}"
    return None


def differs_on_a_rank(program: Any, args: Sequence[Any], backend: str, ranks: int, *, whole: bool) -> bool:
    """Whether what one rank of torch's own gives with the program compiled differs from what it gives as the program is written."""
    mine = [arg[0] if isinstance(arg, list) else arg for arg in args]
    with one_rank(ranks):
        wanted = program(*mine)
        found = compiled(program, mine, backend, lambda function, *given: function(*given), whole=whole)
    return difference(found, wanted) > 1


def compared(name: str, backend: str) -> dict[str, Any]:
    """What came of one program: `outcome`, the `difference` in tolerances, and how many graphs were compiled.

    Its modules are compiled; of a program that calls none, the program.
    """
    program, *args = PROGRAMS[name]
    ranks, whole = test_lockstep.ranks_of(program), False
    run = partial(in_lockstep, ranks=ranks)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = run(program, *args)
        try:
            found = compiled(program, args, backend, run, whole=False)
            if not counters["stats"].get("unique_graphs", 0):
                whole = True
                found = compiled(program, args, backend, run, whole=True)
        except Exception as error:  # why: whatever it is, it is the outcome
            words = f"{type(error).__name__}: {str(error).strip()[:300]}"
            if of_ours(error):
                return {"outcome": f"refused by name: {words}"}
            alone = raised_on_a_rank(program, args, backend, ranks, whole=whole)
            return {"outcome": f"RAISES: {words}" if alone is None else f"raises on a rank, too: {alone}"}
    far, graphs = difference(found, wanted), counters["stats"].get("unique_graphs", 0)
    outcome = "equal" if graphs else "nothing compiled"
    if far > 1:
        alone = raised_on_a_rank(program, args, backend, ranks, whole=whole)
        outcome = f"raises on a rank, and here differs: {alone}"
        if alone is None:
            too = differs_on_a_rank(program, args, backend, ranks, whole=whole)
            outcome = "differs on a rank, too" if too else "DIFFERENT"
    return {"outcome": outcome, "difference": far, "graphs": graphs, "whole": whole}


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
