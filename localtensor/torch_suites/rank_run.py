"""A test body of torch's suites on rank threads: each rank begins and ends as a fresh process would.

Leftovers that a real run over gloo ignores once every rank has ended are ignored here: unreceived messages, works
without a wait().  A program that would hang there ends here, with an explanation.

The barrier of torch's own DistributedTest keeps its count on a class, once for each process, and so once for all rank
threads.  Here ranks count in the store of their simulation.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import time
import traceback
import unittest
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any, NoReturn

import torch.distributed as dist

from localtensor._util.ambient import running, simulation_of_this_rank
from localtensor._util.patching import replaced, wrapped
from localtensor.concurrency.schedule import Schedule, replay, round_robin
from localtensor.errors import CollectiveTimeout, ForeignThread, NotDense, NotServed, ProgramFault, RankRaised
from localtensor.errors.failure_report import failure_text
from localtensor.threads.run import run_in_threads
from localtensor.threads.state.special_slots import torchrun_environment
from localtensor.torch_suites.libraries import is_rank, polling_stores, shared_registry, step_aside

PIDS = 2**22  # above all process ids of the system


class RankKilled(BaseException):
    """A rank ended itself as only a process can: by `os._exit`, or a signal to itself.  No program catches this."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def exit_code(end: BaseException) -> int:
    """The exit code of a process that ends by this SystemExit or `RankKilled`.

    >>> exit_code(SystemExit()), exit_code(SystemExit(86)), exit_code(SystemExit("a sentence"))
    (0, 86, 1)
    """
    code = getattr(end, "code", None)
    return code if isinstance(code, int) else int(code is not None)


@dataclass(slots=True)
class RankProcess:
    """The entry of a rank in `self.processes` of a test: it has the interface of a process that has ended."""

    rank: int
    exitcode: int | None = None
    text: str = ""  # of the exception that ended it, if one did
    name: str = field(init=False)
    pid: str = field(init=False)  # no number: a signal to it must reach no process

    def __post_init__(self) -> None:
        self.name, self.pid = f"process {self.rank}", f"rank {self.rank}"

    def start(self) -> None:
        """Does nothing: all ranks start where their test joins them."""

    def terminate(self) -> None:
        """Does nothing: it has ended, or will never begin."""

    kill = close = terminate

    def join(self, timeout: float | None = None) -> None:
        """Does nothing: it has ended."""

    def is_alive(self) -> bool:
        return False

    def send(self, text: object) -> None:
        """Stores the text of an exception: the object is also the pipe to the process, which torch writes and reads."""
        self.text = str(text)

    def recv(self) -> str:
        return self.text

    def poll(self, timeout: float | None = None) -> bool:
        return bool(self.text)

    closed = False


@contextmanager
def as_processes() -> Iterator[None]:
    """While inside, a rank that ends its process ends only itself, and a rank that sleeps lets the others run."""
    with ExitStack() as stack:
        calls: list[tuple[Any, str, Callable[..., Any]]] = [
            (os, "_exit", _ending(lambda code: code)),
            (os, "abort", _ending(lambda: -signal.SIGABRT)),
            (os, "kill", _kill_rank),
            (os, "getpid", _own_pid),
            (signal, "raise_signal", _ending(lambda number: -int(number))),
            (time, "sleep", _sleep_rank),
            *((time, name, _clock_of_rank) for name in ("time", "monotonic", "perf_counter")),
        ]
        for owner, name, around in calls:
            stack.enter_context(wrapped(owner, name, around))
        yield


def _own_pid(original: Callable[..., int]) -> int:
    """A process id for each rank, above all ids of the system."""
    simulation = simulation_of_this_rank()
    own = original()
    return own if simulation is None else own * PIDS + simulation.rank() + PIDS


def _ending(code_of: Callable[..., int]) -> Callable[..., Any]:
    """A wrapper of a call that ends the process: a rank ends with the exit code of its arguments instead."""

    def end(original: Callable[..., Any], *args: object, **kwargs: object) -> object:
        if is_rank():
            raise RankKilled(code_of(*args, **kwargs))
        return original(*args, **kwargs)

    return end


def _kill_rank(original: Callable[..., Any], pid: int, number: int) -> object:
    if pid == os.getpid() and number and is_rank():
        raise RankKilled(-int(number))
    return original(pid, number)


def _sleep_rank(original: Callable[..., Any], seconds: float) -> None:
    original(seconds)
    step_aside()


def _clock_of_rank(original: Callable[[], float]) -> float:
    """The time on a rank: a wait whose limit has passed on the simulated clock has taken that long."""
    simulation = simulation_of_this_rank()
    return original() + (0.0 if simulation is None else simulation.skipped)


_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH_TEST_DIRS = (f"torch{os.sep}testing{os.sep}_internal{os.sep}", f"{os.sep}unittest{os.sep}")


def raise_fault(fault: ProgramFault, ranks: int) -> NoReturn:
    """Raises the `Exception` of the rank that was the first cause, else the fault; a note describes the other ranks."""
    __tracebackhide__ = True
    cause = fault.errors.get(fault.raised[0].rank) if isinstance(fault, RankRaised) else None
    text = failure_text(fault, ranks, (fault.replay or "") if isinstance(fault, RankRaised) else "")
    if isinstance(cause, Exception):
        shown: Exception = cause.with_traceback(user_traceback(cause.__traceback__))
        attach_note(shown, text)
        raise shown
    attach_note(fault, text)
    raise fault.with_traceback(None)


def attach_note(error: BaseException, text: str) -> None:
    """Adds the text as a note of the error; Python 3.10 has no notes, and shows the error alone."""
    if text and hasattr(error, "add_note") and text not in getattr(error, "__notes__", ()):
        error.add_note(text)


def user_traceback(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from its first frame outside of this project, torch's test bases and unittest; else all of it."""
    here = trace
    while here is not None:
        file = here.tb_frame.f_code.co_filename
        if not (file.startswith(_OURS) or any(part in file for part in _TORCH_TEST_DIRS)):
            return here
        here = here.tb_next
    return trace


def skip_test(why: object) -> NoReturn:
    """Raises `unittest.SkipTest`; pytest shows the line that calls it."""
    __tracebackhide__ = True
    raise unittest.SkipTest(str(why))


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
        arrived = simulation.store.add(f"barrier {number}", 1)
        simulation.store.set(f"barrier {number}: {arrived}", b"")
        try:  # a wait, and no loop of polls: the time limits of other ranks pass meanwhile
            simulation.store.wait([f"barrier {number}: {wait_for or simulation.ranks}"], timedelta(seconds=timeout))
        except CollectiveTimeout as late:
            raise RuntimeError("barrier timeout") from late

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
        """A new schedule of that text."""
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
    outside = dict(os.environ)
    skips: list[BaseException] = []

    def run_rank(rank: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()  # a process begins without one
        for name in torchrun_environment(rank, ranks):  # a spawned process has none of these
            os.environ.pop(name, None)
        os.environ.update(outside)
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
    """Warns, at the line of the caller's caller, that torch's own ranks run."""
    warnings.warn(f"this test runs on ranks of torch's own: {why}", TorchsOwnWay, stacklevel=3)


def precision_setter(kind: type) -> Callable[[], None]:
    """A function that copies the precisions of a test class, which torch keeps by thread, into a rank's thread."""
    local = getattr(kind, "_tls", None)
    held = dict(vars(local)) if isinstance(local, threading.local) else {}

    def set_precisions() -> None:
        if isinstance(local, threading.local):
            vars(local).update(held)

    return set_precisions
