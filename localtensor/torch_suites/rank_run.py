"""A test body of somebody else's, on rank threads: each rank begins as a fresh process would, and ends as one.

What a real run over gloo lets pass once every rank has come to its end, passes here: a message that nobody received,
a work that nobody waited for.  What would hang there ends here, with an explanation.
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
from localtensor.torch_suites.exits import Killed, RankProcess, as_processes, exit_code, users_part
from localtensor.torch_suites.libraries import one_registry, polled, step_aside

# The barrier of torch's own DistributedTest, which counts files that processes write.
#
# It keeps its count on a class, once for each process, and so once for all rank threads.  Here ranks count in the
# store of their simulation.

# Private part of torch: why it is needed.  Tried on torch 2.13.0.
PRIVATE = {
    "torch.testing._internal.distributed.distributed_test.Barrier.sync": "it counts once for each process",
}
_HOME = "torch.testing._internal.distributed.distributed_test"


@contextmanager
def counted() -> Iterator[None]:
    """While inside, that barrier is met by rank threads; nothing happens if nobody has imported it."""
    barrier = getattr(sys.modules.get(_HOME), "Barrier", None)
    if barrier is None:
        yield
        return
    counts: dict[int, Any] = {}

    def sync(cls: Any, wait_for: int | None = None, timeout: float = 10) -> None:
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


NOT_HERE = (NotServed, NotDense, ForeignThread)  # what rank threads refuse and real processes may do
TIMEOUT = 300.0  # seconds for one test, as torch gives its processes


class TorchsOwnWay(UserWarning):
    """A test that rank threads cannot serve runs as it would without this project."""


@dataclass(frozen=True, slots=True)
class How:
    """How the ranks of each test run: the text of a schedule, the seed of their generators, seconds for a test."""

    schedule: str = "round_robin"
    seed: int = 0
    timeout: float | None = TIMEOUT

    def order(self) -> Schedule:
        return round_robin() if self.schedule == "round_robin" else replay(self.schedule)


@dataclass(frozen=True, slots=True)
class RankResult:
    """What the ranks of one test came to: a process for each, and why the run did not end well, if it did not."""

    processes: tuple[RankProcess, ...]
    fault: ProgramFault | None
    seconds: float
    skipped: BaseException | None  # the first SkipTest


def run_ranks(body: Callable[[RankProcess], Any], ranks: int, how: How) -> RankResult:
    """Every rank has run `body(process)` of its own, or the answer says what ended the run.

    `SystemExit` and `unittest.SkipTest` are ways to end; any other exception is a failure, and ends all ranks.
    """
    processes = tuple(RankProcess(rank) for rank in range(ranks))
    skips: list[BaseException] = []

    def live(rank: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()  # a process begins without one
        process = processes[rank]
        try:
            body(process)
        except unittest.SkipTest as why:
            skips.append(why)
            process.exitcode = 0
        except (SystemExit, Killed) as end:
            process.exitcode = exit_code(end)
            if isinstance(end.__cause__, unittest.SkipTest):
                skips.append(end.__cause__)
        else:
            process.exitcode = 0

    began, fault = time.monotonic(), None
    with ExitStack() as stack:
        stack.callback(dist.set_debug_level, dist.get_debug_level())  # torch has one for a process
        stack.enter_context(polled())
        stack.enter_context(as_processes())
        stack.enter_context(counted())
        stack.enter_context(one_registry())
        try:
            run_in_threads(live, ranks, how.order(), how.seed, how.timeout)
        except ProgramFault as ended:
            fault = ended
    if fault is not None and all(process.exitcode is not None for process in processes):
        fault = None  # every rank came to its end: what it left behind is nothing to gloo
    if isinstance(fault, RankRaised):
        for rank, error in fault.errors.items():
            shown = users_part(error.__traceback__)
            processes[rank].text = "".join(traceback.format_exception(type(error), error, shown))
    return RankResult(processes, fault, time.monotonic() - began, skips[0] if skips else None)


def not_served(told: RankResult) -> bool:
    """Whether a rank asked for what rank threads cannot give it.  Then torch's own way is left; a warning says so."""
    errors = told.fault.errors.values() if isinstance(told.fault, RankRaised) else ()
    refusal = next((error for error in errors if isinstance(error, NOT_HERE)), None)
    if refusal is not None:
        kept(str(refusal))
    return refusal is not None


def kept(why: str) -> None:
    warnings.warn(f"this test runs on ranks of torch's own: {why}", TorchsOwnWay, stacklevel=3)


def precisions(kind: Any) -> Callable[[], None]:
    """What gives a rank's thread the precisions of a test class, which torch keeps by thread.  Called where they are."""
    local = getattr(kind, "_tls", None)
    held = dict(vars(local)) if isinstance(local, threading.local) else {}

    def give() -> None:
        if isinstance(local, threading.local):
            vars(local).update(held)

    return give
