"""A test body of torch's suites on rank threads: each rank begins and ends as a fresh process would.

Leftovers that a real run over gloo ignores once every rank has ended are ignored here: unreceived messages, works
without a wait().  A program that would hang there ends here, with an explanation.

The barrier of torch's own DistributedTest keeps its count on a class, once for each process, and so once for all rank
threads.  Here ranks count in the store of their simulation.
"""

import itertools
import sys
import threading
import time
import traceback
import unittest
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from localtensor._util.ambient import running
from localtensor._util.patching import replaced
from localtensor.concurrency.schedule import Schedule, replay, round_robin
from localtensor.errors import ForeignThread, NotDense, NotServed, ProgramFault, RankRaised
from localtensor.threads.run import run_in_threads
from localtensor.torch_suites.exits import RankKilled, RankProcess, as_processes, exit_code, user_traceback
from localtensor.torch_suites.libraries import polling_stores, shared_registry, step_aside

# Private part of torch: why it is needed.  Tried on torch 2.13.0.
PRIVATE = {
    "torch.testing._internal.distributed.distributed_test.Barrier.sync": "it counts once for each process",
}
_DISTRIBUTED_TEST = "torch.testing._internal.distributed.distributed_test"


@contextmanager
def rank_barrier() -> Iterator[None]:
    """While inside, the barrier of DistributedTest works on rank threads; does nothing if it is not imported."""
    barrier = getattr(sys.modules.get(_DISTRIBUTED_TEST), "Barrier", None)
    if barrier is None:
        yield
        return
    counts: dict[int, Any] = {}

    def sync(cls: type, wait_for: int | None = None, timeout: float = 10) -> None:
        simulation: Any = running()
        number = next(counts.setdefault(simulation.rank(), itertools.count()))
        key, wanted, end = f"barrier {number}", wait_for or simulation.ranks, time.monotonic() + timeout
        simulation.store.add(key, 1)
        while simulation.store.add(key, 0) < wanted:
            if time.monotonic() > end:
                raise RuntimeError("barrier timeout")
            step_aside()

    with replaced(barrier, "sync", classmethod(sync)):
        yield


UNSUPPORTED = (NotServed, NotDense, ForeignThread)  # what rank threads refuse and real processes may do
TIMEOUT = 300.0  # seconds for one test, as torch gives its processes


class TorchsOwnWay(UserWarning):
    """A test that rank threads do not support runs as it would without this project."""


@dataclass(frozen=True, slots=True)
class SuiteOptions:
    """How the ranks of each test run: the text of a schedule, the seed of their generators, seconds for a test."""

    schedule: str = "round_robin"
    seed: int = 0
    timeout: float | None = TIMEOUT

    def order(self) -> Schedule:
        return round_robin() if self.schedule == "round_robin" else replay(self.schedule)


@dataclass(frozen=True, slots=True)
class SuiteResult:
    """The result of the ranks of one test: a process for each, and the fault that ended the run, or None."""

    processes: tuple[RankProcess, ...]
    fault: ProgramFault | None
    seconds: float
    skipped: BaseException | None  # the first SkipTest


def run_ranks(body: Callable[[RankProcess], Any], ranks: int, how: SuiteOptions, home: object) -> SuiteResult:
    """Runs `body(process)` on each rank, with a process of its own; `home`: the class or function of the test.

    `SystemExit` and `unittest.SkipTest` are ways to end; any other exception is a failure, and ends all ranks.
    """
    processes = tuple(RankProcess(rank) for rank in range(ranks))
    skips: list[BaseException] = []

    def run_rank(rank: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()  # a process begins without one
        process = processes[rank]
        try:
            body(process)
        except unittest.SkipTest as why:
            skips.append(why)
            process.exitcode = 0
        except (SystemExit, RankKilled) as end:
            process.exitcode = exit_code(end)
            if isinstance(end.__cause__, unittest.SkipTest):
                skips.append(end.__cause__)
        else:
            process.exitcode = 0

    began, fault = time.monotonic(), None
    with ExitStack() as stack:
        stack.callback(dist.set_debug_level, dist.get_debug_level())  # torch has one for a process
        stack.enter_context(polling_stores())
        stack.enter_context(as_processes())
        stack.enter_context(rank_barrier())
        stack.enter_context(shared_registry())
        try:
            run_in_threads(run_rank, ranks, how.order(), how.seed, how.timeout, roots=(home,))
        except ProgramFault as ended:
            fault = ended
    if fault is not None and all(process.exitcode is not None for process in processes):
        fault = None  # every rank has ended: gloo ignores leftovers
    if isinstance(fault, RankRaised):
        for rank, error in fault.errors.items():
            shown = user_traceback(error.__traceback__)
            processes[rank].text = "".join(traceback.format_exception(type(error), error, shown))
    return SuiteResult(processes, fault, time.monotonic() - began, skips[0] if skips else None)


def needs_fallback(result: SuiteResult) -> bool:
    """Whether a rank called what rank threads do not support.  A warning then announces that torch's own ranks run."""
    errors = result.fault.errors.values() if isinstance(result.fault, RankRaised) else ()
    refusal = next((error for error in errors if isinstance(error, UNSUPPORTED)), None)
    if refusal is not None:
        warn_fallback(str(refusal))
    return refusal is not None


def warn_fallback(why: str) -> None:
    warnings.warn(f"this test runs on ranks of torch's own: {why}", TorchsOwnWay, stacklevel=3)


def precision_setter(kind: type) -> Callable[[], None]:
    """A function that copies the precisions of a test class, which torch keeps by thread, into a rank's thread."""
    local = getattr(kind, "_tls", None)
    held = dict(vars(local)) if isinstance(local, threading.local) else {}

    def set_precisions() -> None:
        if isinstance(local, threading.local):
            vars(local).update(held)

    return set_precisions
