"""A function of this process, with all that it has closed over, on real ranks: each is a process forked from this one.

`run(on="gloo")` keeps its processes and sends them a function by name.  What a test is made of cannot be sent: the
fixtures that it was given, a class made inside of a function.  A forked process has them already.
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
from localtensor._util.call_sites import place_of, raised_at
from localtensor._util.events import Died, Outcome, Place, Raised, Returned, Waiting
from localtensor.errors import LocalTensorError, NestedRun, Refusal
from localtensor.errors.programs import RankRaised
from localtensor.processes import pool
from localtensor.processes.job import Home, home, live
from localtensor.processes.pool import GRACE, LEAVE
from localtensor.processes.worker import PATIENCE, Answer, Reply, Seat, end_with_parent, serve, told
from localtensor.processes.worker_group import WorkerGroup

# An exception on its way out of a forked process: what can be said of it there, and what it is made again from.


@dataclass(frozen=True, slots=True)
class Story:
    """How a rank failed: in words, as whoever shows failures wants it (`rendered`), and the exception itself.

    `pickled` is None where that cannot be; `home` is then the class of Python's own that it is nearest to.
    """

    kind: str
    message: str
    traceback: str
    at: float
    place: Place | None
    rendered: str
    pickled: bytes | None
    home: str


def story(error: BaseException, tell: Callable[[BaseException], str]) -> Story:
    """What is known where the exception was caught."""
    at = time.monotonic()
    return Story(*told(error), at, raised_at(error), _rendered(error, tell), _pickled(error), _home(error))


def again(one: Story) -> BaseException:
    """The exception, of its own class if it comes out of the pickle as it went in, else of one that is named alike.

    Its traceback is a single entry, at the line where it was raised.
    """
    error = _again(one)
    return error.with_traceback(_at(one.place)) if one.place else error


def _again(one: Story) -> BaseException:
    with contextlib.suppress(Exception):  # why: reading an exception back runs its own code
        error: Any = _Unpickler(io.BytesIO(one.pickled)).load() if one.pickled else None
        if isinstance(error, BaseException) and (type(error).__name__, str(error)) == (one.kind, one.message):
            return error
    return stand_in(one.kind, one.message, one.home)


def _at(place: Place) -> TracebackType | None:
    """A traceback that leads to this line: of a frame that has raised there, though it did nothing else."""
    code = compile("raise ZeroDivisionError", place.file, "exec")
    try:
        exec(code.replace(co_firstlineno=place.line, co_name=place.function), {"__name__": "forked"})  # noqa: S102
    except ZeroDivisionError as error:
        trace = error.__traceback__
        return trace.tb_next if trace else None
    return None


def stand_in(kind: str, message: str, home: str = "Exception") -> BaseException:
    """An exception of a class that has this name, and no more than the message.

    >>> error = stand_in("BadLoss", "nan", "ValueError")
    >>> type(error).__name__, str(error), isinstance(error, ValueError)
    ('BadLoss', 'nan', True)
    """
    base = getattr(builtins, home)
    made: Any = type(kind, (base,), {"__module__": __name__, "__str__": lambda self: message})
    error: BaseException = made.__new__(made, message)
    return error


def _rendered(error: BaseException, tell: Callable[[BaseException], str]) -> str:
    try:
        return str(tell(error))
    except Exception as worse:  # why: it shows values of the user's, whose own code may raise anything
        return f"(its own text failed: {type(worse).__name__})"


def _pickled(error: BaseException) -> bytes | None:
    stream = io.BytesIO()
    try:
        _Pickler(stream, pickle.HIGHEST_PROTOCOL).dump(error)
    except Exception:  # why: pickling runs the exception's own code
        return None
    return stream.getvalue()


def _home(error: BaseException) -> str:
    return next(name for name in (kind.__name__ for kind in type(error).__mro__) if hasattr(builtins, name))


class _Pickler(pickle.Pickler):
    """Exceptions of classes that no module has by their name, such as pytest's own: a fork has them all the same."""

    def persistent_id(self, value: Any) -> tuple[str, int] | None:
        if not (isinstance(value, type) and issubclass(value, BaseException)):
            return None
        found: Any = sys.modules.get(value.__module__)
        for part in value.__qualname__.split("."):
            found = getattr(found, part, None)
        return None if found is value else _mark(value)


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, mark: Any) -> type[BaseException]:
        found = [kind for kind in _kinds(BaseException) if _mark(kind) == mark]
        if not found:
            raise pickle.UnpicklingError(f"no class {mark[0]} was there before the fork")
        return found[0]


def _mark(kind: type) -> tuple[str, int]:
    """What tells a class from all others, here and in a fork: there it lies where it lay when they parted."""
    return f"{kind.__module__}.{kind.__qualname__}", id(kind)


def _kinds(kind: type[BaseException]) -> Iterator[type[BaseException]]:
    for one in kind.__subclasses__():
        yield one
        yield from _kinds(one)


Tell = Callable[[BaseException], str]


class NoFork(Refusal, call="run_forked", argument="on", values="on={on!r}"):
    """Ranks that cannot be forked from this process."""


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
        replies = crew.call([b"go"] * ranks, limit, GRACE, LEAVE)
    finally:
        crew.kill()
    outcomes = [_outcome(rank, reply) for rank, reply in enumerate(replies)]
    if not all(isinstance(outcome, Returned) for outcome in outcomes):
        raise _fault(outcomes, _stories(replies), limit)


def _check(ranks: int, on: str) -> None:
    outer = ambient.of_rank()
    if outer is not None:
        raise NestedRun(outer.rank(), place_of(sys._getframe(2)))
    if "fork" not in multiprocessing.get_all_start_methods():
        raise NoFork(on, "this system cannot fork a process", "Run the ranks on threads.")
    if dist.is_initialized():
        problem = "this process has a default process group of its own, and a rank must have another"
        raise NoFork(on, problem, "Call torch.distributed.destroy_process_group() before.")
    if on == "nccl":
        pool.enough_gpus(ranks)
        if torch.cuda.is_initialized():
            problem = "this process has used CUDA, and a process forked after that cannot"
            raise NoFork(on, problem, "Use CUDA inside of the ranks only, or run on 'gloo' or threads.")


def _device(on: str) -> str | None:
    return "cuda" if on == "nccl" else None


class _Forked(WorkerGroup):
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
    end_with_parent(parent)
    gc.freeze()  # what is garbage of the parent's stays its own: a file would be written twice, a folder removed
    for end in ends:
        end.close()  # else a rank would hold open the pipe whose end tells it, or another, that the parent is gone
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
    return Waiting(rank, body) if reply.kind == "waiting" else Died(rank, body)


def _stories(replies: Sequence[Reply]) -> dict[int, Story]:
    return {rank: reply.body for rank, reply in enumerate(replies) if isinstance(reply.body, Story)}


def _fault(outcomes: Sequence[Outcome], stories: dict[int, Story], seconds: float) -> LocalTensorError:
    fault = pool.fault(outcomes, seconds)
    if isinstance(fault, RankRaised):
        fault.where.update({rank: one.place for rank, one in stories.items()})
        fault.rendered = {rank: one.rendered for rank, one in stories.items()}
        for one in fault.raised:
            known = stories.get(one.rank)
            fault.errors[one.rank] = again(known) if known else stand_in(one.kind, one.message)
            fault.errors[one.rank].__cause__ = pool.remote_traceback(one)
        fault.__cause__ = fault.errors[fault.raised[0].rank]
    return fault
