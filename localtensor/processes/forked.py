"""A function of this process, with all that it has closed over, on real ranks: each is a process forked from this one.

`run(on="gloo")` keeps its processes and sends them a function by name.  What a test is made of cannot be sent: the
fixtures that it was given, a class made inside of a function.  A forked process has them already.
"""

import contextlib
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from ctypes import CDLL
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from localtensor._util import ambient as _context
from localtensor._util.call_sites import place_of
from localtensor._util.events import Died, Outcome, Raised, Returned, Waiting
from localtensor.errors import LocalTensorError, NestedRun
from localtensor.errors.base import refusal
from localtensor.errors.programs import RankRaised
from localtensor.processes import run as real
from localtensor.processes.exception_transport import Story, again, stand_in, story
from localtensor.processes.job import Home, home, live
from localtensor.processes.run import GRACE, LEAVE
from localtensor.processes.worker import PATIENCE, Answer, Reply, Seat, heed_no_interrupt, serve
from localtensor.processes.worker_group import Crew

Tell = Callable[[BaseException], str]
SYSTEM = sys.platform
_DIE_WITH_PARENT = 1  # Linux: PR_SET_PDEATHSIG of prctl(2)


class NoFork(LocalTensorError):
    """Ranks that cannot be forked from this process."""

    def __init__(self, on: str, problem: str, remedy: str) -> None:
        super().__init__(refusal("run_forked", "on", f"on={on!r}", problem, remedy))


def run_forked(
    body: Callable[[int], object], ranks: int, on: str, seed: int, timeout: float | None, tell: Tell
) -> None:
    """Each rank has run `body(rank)` in a process forked from this one; none of them is left.

    The default group is over gloo, or NCCL with a GPU for each rank.  Environment, generators and threads are as in
    `run`; what a rank prints goes where this process has stdout and stderr.  `timeout` is in seconds, None for none.
    Raises `RankRaised`: `errors` are the exceptions made again, `rendered` what `tell` made of each where it was
    raised.  Raises `NeverEnded`, `NestedRun`, `TooFewGpus`, and `NoFork` where this process cannot be forked.  A rank
    to which torch refuses every backward, because of what this process has done, counts as having raised `NoFork`.
    """
    _check(ranks, on)
    limit = PATIENCE if timeout is None else timeout
    crew = _Forked(ranks, on, partial(_answer, partial(_perform, body, tell, on), home(seed, _device(on))))
    try:
        crew.start()
        deadline = time.monotonic() + limit
        crew.send([b"go"] * ranks, limit)
        replies = crew.gather(deadline, GRACE, LEAVE)
        silent = crew.whereabouts([rank for rank, reply in enumerate(replies) if reply is None])
    finally:
        crew.kill()
    outcomes = [
        Waiting(rank, silent[rank]) if reply is None else _outcome(rank, reply) for rank, reply in enumerate(replies)
    ]
    if not all(isinstance(outcome, Returned) for outcome in outcomes):
        raise _fault(outcomes, _stories(replies), limit)


def _check(ranks: int, on: str) -> None:
    outer = _context.of_rank()
    if outer is not None:
        raise NestedRun(outer.rank(), place_of(sys._getframe(2)))
    if "fork" not in multiprocessing.get_all_start_methods():
        raise NoFork(on, "this system cannot fork a process", "Run the ranks on threads.")
    if dist.is_initialized():
        problem = "this process has a default process group of its own, and a rank must have another"
        raise NoFork(on, problem, "Call torch.distributed.destroy_process_group() before.")
    if on == "nccl":
        real.enough_gpus(ranks)
        if torch.cuda.is_initialized():
            problem = "this process has used CUDA, and a process forked after that cannot"
            raise NoFork(on, problem, "Use CUDA inside of the ranks only, or run on 'gloo' or threads.")


def _device(on: str) -> str | None:
    return "cuda" if on == "nccl" else None


class _Forked(Crew):
    """A crew whose processes are copies of this one."""

    def __init__(self, ranks: int, backend: str, answer: Callable[[int, bytes, int], Reply]) -> None:
        super().__init__(ranks, backend)
        self._answer = answer

    def start(self) -> None:
        with warnings.catch_warnings():
            # Python warns of forks while there are other threads, which may hold locks; ours need none of theirs.
            warnings.filterwarnings("ignore", ".*use of fork\\(\\) may lead to deadlocks", DeprecationWarning)
            super().start()

    def context(self) -> Any:
        return multiprocessing.get_context("fork")

    def task(self, seat: Seat, ends: Sequence[Connection]) -> Callable[[Seat, Connection, Connection], None]:
        return partial(_sit, partial(self._answer, seat.rank), os.getpid(), ends)


def _sit(
    answer: Answer, parent: int, ends: Sequence[Connection], seat: Seat, jobs: Connection, side: Connection
) -> None:
    """The forked process becomes a rank, and ends with its parent."""
    heed_no_interrupt()
    gc.freeze()  # what is garbage of the parent's stays its own: a file would be written twice, a folder removed
    for end in ends:
        end.close()  # else a rank would hold open the pipe whose end tells it, or another, that the parent is gone
    if SYSTEM == "linux":
        CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
    serve(seat, jobs, side, answer)


def _answer(perform: Callable[[int], Story | None], mine: Home, rank: int, message: bytes, room: int) -> Reply:
    try:
        found = live(pickle.dumps(_call), mine, perform, rank)
    except BaseException as error:  # why: whatever it is, the parent has to hear of it
        found = story(error, str)
    return Reply("returned") if found is None else Reply("raised", found)


def _call(perform: Callable[[int], Story | None], rank: int) -> Story | None:
    return perform(rank)


def _perform(body: Callable[[int], object], tell: Tell, on: str, rank: int) -> Story | None:
    """None, or how the rank failed, told while it is still in its own state."""
    try:
        with _flushed():
            body(rank)
    except BaseException as error:  # why: what the body raises is its outcome, SystemExit and pytest's skips too
        with _flushed():
            return story(_with_its_reason(error, on), tell)
    return None


def _with_its_reason(error: BaseException, on: str) -> BaseException:
    """Where torch refuses every backward in this process, and the error says no more than that: why, and what to do.

    Autograd's engine has a thread for each device but the CPU from the first backward on, and none after a fork
    (torch/csrc/autograd/engine.cpp, `in_bad_autograd_fork`).  FakeTensorMode, and so DTensor and torch.compile, puts a
    stand-in for a GPU where torch is built for CUDA and finds none.
    """
    if type(error) is not RuntimeError or not _is_of_any_backward(error):
        return error
    problem = "the first backward of this process was run while it had a GPU, or FakeTensorMode's stand-in for one, "
    problem += "and torch refuses every backward in a process forked after that"
    remedy = "Run these tests in a pytest of their own, beside none that runs a backward in pytest's own process."
    known = NoFork(on, problem, remedy)
    known.__cause__ = error
    return known.with_traceback(error.__traceback__)


def _is_of_any_backward(error: RuntimeError) -> bool:
    """Whether the least of all backwards says the same; none is tried where the error does not speak of forks."""
    try:
        said = str(error)
        if "fork" not in said:
            return False
        with torch.inference_mode(False), torch.enable_grad():
            leaf = torch.ones((), device="cpu", requires_grad=True)
    except Exception:  # why: a text of the user's own, or a mode of his that is still on, may raise anything
        return False
    try:
        leaf.backward()
    except Exception as refused:  # why: as above, and it is compared with what the user is told
        return str(refused) == said
    return False


@contextlib.contextmanager
def _flushed() -> Iterator[None]:
    """What was printed is out: the process will not end in a way that sees to that."""
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or no stream at all
                stream.flush()


def _outcome(rank: int, reply: Reply) -> Outcome:
    body: Any = reply.body
    if reply.kind == "returned":
        return Returned(rank, None)
    if isinstance(body, Story):
        return Raised(rank, body.kind, body.message, body.traceback, body.at)
    return Died(rank, body)


def _stories(replies: Sequence[Reply | None]) -> dict[int, Story]:
    return {rank: reply.body for rank, reply in enumerate(replies) if reply and isinstance(reply.body, Story)}


def _fault(outcomes: Sequence[Outcome], stories: dict[int, Story], seconds: float) -> LocalTensorError:
    fault = real.fault(outcomes, seconds)
    if isinstance(fault, RankRaised):
        fault.where.update({rank: one.place for rank, one in stories.items()})
        fault.rendered = {rank: one.rendered for rank, one in stories.items()}
        for one in fault.raised:
            known = stories.get(one.rank)
            fault.errors[one.rank] = again(known) if known else stand_in(one.kind, one.message)
            fault.errors[one.rank].__cause__ = real.remote_traceback(one)
        fault.__cause__ = fault.errors[fault.raised[0].rank]
    return fault
