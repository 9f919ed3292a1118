"""Real ranks as processes forked from this one, for functions that cannot be sent by name.

`run(on="gloo")` keeps its processes and sends them a function by name.  A test's body cannot be sent: it may close over
fixtures, or over a class defined inside a function.  A forked process has them already.

An exception leaves a forked process as an `ExceptionRecord`, from which the parent rebuilds it.
"""

import builtins
import contextlib
import gc
import io
import multiprocessing
import os
import pickle
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from localtensor._util import ambient
from localtensor._util.call_sites import place_of_error, place_of_frame
from localtensor._util.events import Died, Outcome, Place, Raised, Returned, Waiting
from localtensor.errors import LocalTensorError, NestedRun, Refusal
from localtensor.errors.programs import RankRaised
from localtensor.processes import pool, worker
from localtensor.processes.job import CallerState, caller_state, run_job
from localtensor.processes.pool import GRACE, LEAVE
from localtensor.processes.worker import SEPARATOR, Answer, Reply, WorkerSpec
from localtensor.processes.worker_group import WorkerGroup


@dataclass(frozen=True, slots=True)
class ExceptionRecord:
    """An exception as text, in the caller's form (`rendered`), and pickled.

    `pickled` is None if it cannot be pickled; the nearest builtin class, `builtin_base`, then stands for it.
    """

    kind: str
    message: str
    traceback: str
    at: float
    place: Place | None
    rendered: str
    pickled: bytes | None
    builtin_base: str


def record_exception(error: BaseException, render: Callable[[BaseException], str]) -> ExceptionRecord:
    """The record of an exception, made where it was caught."""
    at = time.monotonic()
    return ExceptionRecord(
        *worker.describe_exception(error),
        at,
        place_of_error(error),
        _render_safely(error, render),
        _pickle_exception(error),
        next(name for name in (kind.__name__ for kind in type(error).__mro__) if hasattr(builtins, name)),
    )


def rebuild_exception(one: ExceptionRecord) -> BaseException:
    """The exception, of its own class if it survives pickling, else of a class of that name.

    Its traceback has a single entry, the line where it was raised.
    """
    error = _unpickled(one)
    return error.with_traceback(_traceback_at(one.place)) if one.place else error


def _unpickled(one: ExceptionRecord) -> BaseException:
    with contextlib.suppress(Exception):  # why: reading an exception back runs its own code
        error: Any = _ExceptionUnpickler(io.BytesIO(one.pickled)).load() if one.pickled else None
        if isinstance(error, BaseException) and (type(error).__name__, str(error)) == (one.kind, one.message):
            return error
    return substitute_exception(one.kind, one.message, one.builtin_base)


def _traceback_at(place: Place) -> TracebackType | None:
    """A traceback of one frame that raises at this line and does nothing else."""
    code = compile("raise ZeroDivisionError", place.file, "exec")
    try:
        exec(code.replace(co_firstlineno=place.line, co_name=place.function), {"__name__": "forked"})  # noqa: S102
    except ZeroDivisionError as error:
        trace = error.__traceback__
        return trace.tb_next if trace else None
    return None


def substitute_exception(kind: str, message: str, builtin_base: str = "Exception") -> BaseException:
    """An exception of a new class with this name, which holds only the message.

    >>> error = substitute_exception("BadLoss", "nan", "ValueError")
    >>> type(error).__name__, str(error), isinstance(error, ValueError)
    ('BadLoss', 'nan', True)
    """
    base = getattr(builtins, builtin_base)
    made: Any = type(kind, (base,), {"__module__": __name__, "__str__": lambda self: message})
    error: BaseException = made.__new__(made, message)
    return error


def _render_safely(error: BaseException, render: Callable[[BaseException], str]) -> str:
    try:
        return str(render(error))
    except Exception as worse:  # why: it shows values of the user's, whose own code may raise anything
        return f"(its own text failed: {type(worse).__name__})"


def _pickle_exception(error: BaseException) -> bytes | None:
    stream = io.BytesIO()
    try:
        _ExceptionPickler(stream, pickle.HIGHEST_PROTOCOL).dump(error)
    except Exception:  # why: pickling runs the exception's own code
        return None
    return stream.getvalue()


class _ExceptionPickler(pickle.Pickler):
    """Pickles exceptions of classes that cannot be found by name, such as pytest's own, by identity: a fork has them."""

    def persistent_id(self, value: object) -> tuple[str, int] | None:
        if not (isinstance(value, type) and issubclass(value, BaseException)):
            return None
        found: Any = sys.modules.get(value.__module__)
        for part in value.__qualname__.split("."):
            found = getattr(found, part, None)
        return None if found is value else _class_id(value)


class _ExceptionUnpickler(pickle.Unpickler):
    def persistent_load(self, mark: tuple[str, int]) -> type[BaseException]:
        found = [kind for kind in _subclasses(BaseException) if _class_id(kind) == mark]
        if not found:
            raise pickle.UnpicklingError(f"no class {mark[0]} was there before the fork")
        return found[0]


def _class_id(kind: type) -> tuple[str, int]:
    """The identity of a class, here and in a fork, where it has the same address."""
    return f"{kind.__module__}.{kind.__qualname__}", id(kind)


def _subclasses(kind: type[BaseException]) -> Iterator[type[BaseException]]:
    for one in kind.__subclasses__():
        yield one
        yield from _subclasses(one)


Render = Callable[[BaseException], str]


class NoFork(Refusal, call="run_forked", argument="on", values="on={on!r}"):
    """Ranks that cannot be forked from this process."""


def run_forked(
    body: Callable[[int], object], ranks: int, on: str, seed: int, timeout: float | None, render: Render
) -> None:
    """Run `body(rank)` on every rank, each in a process forked from this one; no process is left afterwards.

    The default group is over gloo, or NCCL with a GPU for each rank.  Environment, generators and threads are as in
    `run`; output goes to the stdout and stderr of this process.  `timeout` is in seconds, None for no limit.

    Raises `RankRaised`, whose `errors` are the rebuilt exceptions and whose `rendered` is `render(error)` of each,
    called in its rank; `NeverEnded`, `NestedRun`, `TooFewGpus`; and `NoFork` where this process cannot be forked.  A
    rank in which torch refuses every backward, because of what this process has done, counts as having raised `NoFork`.
    """
    _check(ranks, on)
    limit = worker.GROUP_TIMEOUT if timeout is None else timeout
    mine = caller_state(seed, "cuda" if on == "nccl" else None)
    group = _ForkedGroup(ranks, on, partial(_answer, partial(_perform, body, render, on), mine))
    try:
        group.begin()
        group.join()
        replies = group.call([b"go"] * ranks, limit, GRACE, LEAVE)
    finally:
        group.kill()
    outcomes = [_outcome(rank, reply) for rank, reply in enumerate(replies)]
    if not all(isinstance(outcome, Returned) for outcome in outcomes):
        raise _error_of_ranks(replies, outcomes, limit)


def _check(ranks: int, on: str) -> None:
    outer = ambient.simulation_of_this_rank()
    if outer is not None:
        raise NestedRun(outer.rank(), place_of_frame(sys._getframe(2)))
    if "fork" not in multiprocessing.get_all_start_methods():
        raise NoFork(on, "this system cannot fork a process", "Run the ranks on threads.")
    if dist.is_initialized():
        problem = "this process has a default process group of its own, and a rank must have another"
        raise NoFork(on, problem, "Call torch.distributed.destroy_process_group() before.")
    if on == "nccl":
        pool.check_gpus(ranks)
        if torch.cuda.is_initialized():
            problem = "this process has used CUDA, and a process forked after that cannot"
            raise NoFork(on, problem, "Use CUDA inside of the ranks only, or run on 'gloo' or threads.")


class _ForkedGroup(WorkerGroup):
    """A worker group whose processes are forks of this one."""

    def __init__(self, ranks: int, backend: str, answer: Callable[[int, bytes, int], Reply]) -> None:
        super().__init__(ranks, backend)
        self._answer = answer

    def begin(self) -> None:
        with warnings.catch_warnings():
            # Python warns of forks while there are other threads, which may hold locks; ours need none of theirs.
            warnings.filterwarnings("ignore", ".*use of fork\\(\\) may lead to deadlocks", DeprecationWarning)
            super().begin()

    def context(self) -> "multiprocessing.context.ForkContext":
        return multiprocessing.get_context("fork")

    def task(
        self, spec: WorkerSpec, ends: Sequence[Connection]
    ) -> Callable[[WorkerSpec, Connection, Connection], None]:
        return partial(_become_rank, partial(self._answer, spec.rank), os.getpid(), ends)


def _become_rank(
    answer: Answer, parent: int, ends: Sequence[Connection], spec: WorkerSpec, jobs: Connection, side: Connection
) -> None:
    """Make this forked process a rank, which ends with its parent."""
    worker.end_with_parent(parent)
    gc.freeze()  # the parent's garbage is not collected here: a file would be written twice, a folder removed
    for end in ends:
        end.close()  # else a rank keeps open a pipe whose end signals that the parent is gone
    worker.serve(spec, jobs, side, answer)


def _answer(
    perform: Callable[[int], ExceptionRecord | None], mine: CallerState, rank: int, message: bytes, max_open: int
) -> Reply:
    try:
        found = run_job(perform, mine, rank)
    except BaseException as error:  # why: reported to the parent, whatever it is
        found = record_exception(error, str)
    return Reply("returned") if found is None else Reply("raised", found)


def _perform(body: Callable[[int], object], render: Render, on: str, rank: int) -> ExceptionRecord | None:
    """None, or the record of the rank's exception, made while the rank still has its own state."""
    try:
        with _flushed():
            body(rank)
    except BaseException as error:  # why: what the body raises is its outcome, SystemExit and pytest's skips too
        with _flushed():
            return record_exception(_with_fork_reason(error, on), render)
    return None


def _with_fork_reason(error: BaseException, on: str) -> BaseException:
    """The error, or `NoFork` with reason and remedy if torch refuses every backward in this process.

    Autograd's engine has a thread for each device but the CPU from the first backward on, and none after a fork
    (torch/csrc/autograd/engine.cpp, `in_bad_autograd_fork`).  FakeTensorMode, and so DTensor and torch.compile, puts a
    stand-in for a GPU where torch is built for CUDA and finds none.
    """
    if type(error) is not RuntimeError or not _fails_in_any_backward(error):
        return error
    problem = "the first backward of this process was run while it had a GPU, or FakeTensorMode's stand-in for one, "
    problem += "and torch refuses every backward in a process forked after that"
    remedy = "Run these tests in a pytest of their own, beside none that runs a backward in pytest's own process."
    known = NoFork(on, problem, remedy)
    known.__cause__ = error
    return known.with_traceback(error.__traceback__)


def _fails_in_any_backward(error: RuntimeError) -> bool:
    """Whether a minimal backward raises the same error; it is tried only if the error mentions a fork."""
    try:
        message = str(error)
        if "fork" not in message:
            return False
        with torch.inference_mode(False), torch.enable_grad():
            leaf = torch.ones((), device="cpu", requires_grad=True)
    except Exception:  # why: the error's own __str__, or a mode still active, may raise anything; then nothing is known
        return False
    try:
        leaf.backward()
    except Exception as refused:  # why: as above; it is compared with the user's error
        return str(refused) == message
    return False


@contextlib.contextmanager
def _flushed() -> Iterator[None]:
    """Flush stdout and stderr at the end of the block: the process ends without doing so."""
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
    if isinstance(body, ExceptionRecord):
        return Raised(rank, body.kind, body.message, body.traceback, body.at)
    return Waiting(rank, *body.split(SEPARATOR, 1)) if reply.kind == "waiting" else Died(rank, body)


def _error_of_ranks(replies: Sequence[Reply], outcomes: Sequence[Outcome], seconds: float) -> LocalTensorError:
    records = {rank: reply.body for rank, reply in enumerate(replies) if isinstance(reply.body, ExceptionRecord)}
    fault = pool.error_of_outcomes(outcomes, seconds)
    if isinstance(fault, RankRaised):
        fault.where.update({rank: one.place for rank, one in records.items()})
        fault.rendered = {rank: one.rendered for rank, one in records.items()}
        for one in fault.raised:
            known = records.get(one.rank)
            fault.errors[one.rank] = rebuild_exception(known) if known else substitute_exception(one.kind, one.message)
            fault.errors[one.rank].__cause__ = pool.remote_traceback(one)
        fault.__cause__ = fault.errors[fault.raised[0].rank]
    return fault
