"""The ground truth: a program run by real processes, one a rank, over real torch.distributed.

    with Pool(2) as pool:
        outcomes = pool.call(my_module.program, [(x0,), (x1,)])   # one Outcome a rank, in rank order

The processes start at the first call and are reused.  Between two calls nothing of the first may reach the
second: whenever a group could be out of step the processes are killed, and the next call starts others.  That is
cheap where there is a fork server (it has imported torch already, and new ranks meet within some 30 ms).

A rank's process keeps what a job leaves behind: modules, caches, random state, default dtype.

Everything stays on this machine: the ranks meet through a file in a private folder, and gloo and NCCL are bound
to the loopback interface.  All that travels is pickle bytes over pipes between parent and child.
"""

import builtins
import contextlib
import logging
import pickle
import re
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

import torch

from localtensor import errors
from localtensor._util import ambient
from localtensor._util.call_sites import is_user_file, place_of
from localtensor._util.events import Died, Outcome, Place, Raised, Returned, Waiting
from localtensor._util.pickling import dumps
from localtensor.errors import LocalTensorError, NestedRun, NeverEnded, NotImportable, RankRaised, TooFewGpus
from localtensor.processes.job import Lost, home, live
from localtensor.processes.worker import PATIENCE, Reply
from localtensor.processes.worker_group import WorkerGroup, tidy
from localtensor.processes.worker_group import prepare as start_early

BACKENDS = ("gloo", "nccl", "cpu:gloo,cuda:nccl")

Args = Sequence[Any]


class Pool:
    """`ranks` processes that run functions together, with torch.distributed's default group initialised.

    `timeout` is for one call, in seconds.  Once a rank has raised or died, its silent peers get `grace` seconds.
    A rank that has returned waits for its peers; `leave` seconds after the last reply it is ended instead, and who
    waits for it is told by its backend, as where each process runs for itself.
    Threads may share a pool: their calls take turns.
    """

    def __init__(
        self,
        ranks: int,
        *,
        backend: str = "gloo",
        timeout: float = 30.0,
        grace: float = 2.0,
        leave: float | None = None,
    ) -> None:
        if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
            raise errors.NoRanks("Pool", ranks)
        _check_backend(backend, ranks)
        self.ranks, self.backend = ranks, backend
        self.timeout = _positive("Pool", "timeout", timeout)
        self.grace = _positive("Pool", "grace", grace)
        self.leave = None if leave is None else _positive("Pool", "leave", leave)
        self._crew: WorkerGroup | None = None
        self._end: Callable[[], object] | None = None  # ends the crew, also when the pool is garbage
        self._closed = False
        self._turn = threading.Lock()

    def call(
        self, fn: Callable[..., object], args_per_rank: Sequence[Args], *, timeout: float | None = None
    ) -> list[Outcome]:
        """What became of `fn(*args)` on each rank, in rank order.  Whatever the ranks do, the call ends.

        `fn` is found by its name in each process, so it stands at the top level of a module.  A rank that has not
        come back in time is Waiting, and all processes are killed; the next call starts others.
        """
        limit = self.timeout if timeout is None else _positive("Pool.call", "timeout", timeout)
        jobs = _jobs(fn, args_per_rank, self.ranks)
        with self._turn, tidy():
            if self._closed:
                raise errors.PoolClosed("Pool.call", self.ranks)
            try:
                crew = self._ready_crew()
                replies = crew.call(jobs, limit, self.grace, self.leave)
            except BaseException:  # why: Ctrl-C too must leave no process behind
                self._dismiss()
                raise
            if not crew.in_step(replies):
                self._dismiss()
        return [_outcome(rank, reply, fn) for rank, reply in enumerate(replies)]

    def close(self) -> None:
        """No process of this pool is left.  Closing twice is fine; calling after it is not."""
        with self._turn:
            self._closed = True
            self._dismiss()

    def __enter__(self) -> "Pool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pids(self) -> tuple[int, ...]:
        """The process of each rank, in rank order; empty while none run."""
        return tuple(member.pid for member in self._crew.members) if self._crew else ()

    def _ready_crew(self) -> WorkerGroup:
        if self._crew and not self._crew.fit():
            self._dismiss()
        if self._crew is None:
            self._crew = WorkerGroup(self.ranks, self.backend)
            self._end = finalize = weakref.finalize(self, self._crew.kill)
            finalize.atexit = False  # the crew sees to that itself
            self._crew.start()
        return self._crew

    def _dismiss(self) -> None:
        self._crew = None
        if self._end:
            self._end()


def prepare() -> None:
    """Begin what the first call of a pool would wait for; returns at once.  Nothing is lost where no call follows."""
    start_early()


def _outcome(rank: int, reply: Reply, fn: Callable[..., object]) -> Outcome:
    body: Any = reply.body
    match reply.kind:
        case "returned":
            try:
                return Returned(rank, pickle.loads(body))
            except Exception as error:  # why: reading a value back runs its own code
                raise errors.NotSendable("Pool.call", "returned value", "value", rank, _brief(error)) from error
        case "raised":
            return Raised(rank, *body)
        case "died":
            return Died(rank, body)
        case "waiting":
            return Waiting(rank, body)
        case "no_function":
            raise errors.NotImportable("Pool.call", name_of(fn), f"{body[0]}: {body[1]}")
        case "no_arguments":
            raise errors.NotSendable("Pool.call", "args_per_rank", "tuple", rank, f"{body[0]}: {body[1]}")
    kind, detail = body
    raise errors.NotSendable("Pool.call", "returned value", kind, rank, detail)


def _check_backend(backend: str, ranks: int) -> None:
    if backend not in BACKENDS:
        raise errors.NoSuchBackend("Pool", backend, "no such backend is known", ", ".join(BACKENDS))
    if "nccl" in backend:
        have = _gpus()
        if have < ranks:
            problem = f"NCCL wants a GPU for each of {ranks} ranks, and there are {have}"
            raise errors.NoSuchBackend("Pool", backend, problem, BACKENDS[0])


def _positive(call: str, argument: str, seconds: float) -> float:
    if not isinstance(seconds, int | float) or not 0 < seconds <= PATIENCE:
        raise errors.NoTime(call, argument, seconds)
    return float(seconds)


def _jobs(fn: Callable[..., object], args_per_rank: Sequence[Args], ranks: int) -> list[bytes]:
    """One message a rank.  All are written before any is sent, so that a refusal finds the ranks idle."""
    if len(args_per_rank) != ranks:
        problem = f"there are {ranks} ranks"
        raise errors.WrongArguments("Pool.call", f"{len(args_per_rank)} entries", problem)
    head = _by_name(fn, "Pool.call")
    return [head + _packed(rank, args) for rank, args in enumerate(args_per_rank)]


def _by_name(fn: Callable[..., Any], call: str) -> bytes:
    try:
        return pickle.dumps(fn, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # why: pickle refuses with three kinds of exception
        raise NotImportable(call, name_of(fn), _brief(error)) from error


def _packed(rank: int, args: Args) -> bytes:
    if not isinstance(args, tuple | list):
        problem = "the arguments of a rank are a tuple or a list"
        raise errors.WrongArguments("Pool.call", f"{type(args).__name__} for rank {rank}", problem)
    try:
        return dumps(args, views=True)
    except Exception as error:  # why: pickling an argument runs its own code
        raise errors.NotSendable("Pool.call", "args_per_rank", _culprit(args), rank, _brief(error)) from error


def _culprit(args: Args) -> str:
    for arg in args:
        try:
            dumps(arg, views=True)
        except Exception:  # why: it is the exception that we look for
            return type(arg).__name__
    return "tuple"


def name_of(fn: object) -> str:
    """The module and the name by which other processes find a function."""
    return f"{getattr(fn, '__module__', '?')}.{getattr(fn, '__qualname__', repr(fn))}"


def _brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


# A program run by real processes over gloo or NCCL, from the same start as on rank threads, and refused alike.

GRACE = 1.0  # seconds for the other ranks, once one has raised or died
LEAVE = 2.0  # seconds after which a rank that has returned is ended while others go on, as if it ran for itself
_ECHOES = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process has exited")
_HOMES = (builtins, errors, torch.distributed)  # of exceptions that may come again here
_LINE = re.compile(r'^ *File "(?P<file>.*)", line (?P<line>\d+), in (?P<function>.*)$', re.MULTILINE)


def run_in_processes(
    fn: Callable[..., Any],
    pieces: Sequence[tuple[Any, ...]],
    on: str,
    seed: int,
    timeout: float | None,
    device: str | torch.device | None,
) -> tuple[Any, ...]:
    """What `fn(*pieces[rank])` returned on each rank, each a process of its own; they are kept for the next call.

    Raises `RankRaised` if ranks raise or die, `NeverEnded`, `TooFewGpus`, `NestedRun`; `NotImportable` where a
    process does not find `fn`, and `NotSendable` where what it takes or returns cannot travel.
    """
    ranks = len(pieces)
    outer = ambient.of_rank()
    if outer is not None:
        raise NestedRun(outer.rank(), place_of(sys._getframe(2)))
    if on == "nccl":
        enough_gpus(ranks)
        device = device or "cuda"
    function, mine = _by_name(fn, "run"), home(seed, device)
    limit = PATIENCE if timeout is None else timeout
    try:
        with _pool(ranks, on) as pool, _meshes_come_home_in_silence():
            outcomes = pool.call(live, [(function, mine, *args) for args in pieces], timeout=limit)
    except LocalTensorError as refused:
        refused.args = tuple(_said_by_run(text) for text in refused.args)
        raise
    for outcome in outcomes:
        if isinstance(outcome, Returned) and isinstance(outcome.value, Lost):
            raise NotImportable("run", name_of(fn), outcome.value.detail)
    if all(isinstance(outcome, Returned) for outcome in outcomes):
        return tuple(outcome.value for outcome in outcomes if isinstance(outcome, Returned))
    raise fault(outcomes, limit)


def _pool(ranks: int, on: str) -> contextlib.AbstractContextManager[Any]:
    return ambient.pool_of((ranks, on), lambda: Pool(ranks, backend=on, grace=GRACE, leave=LEAVE))


@contextlib.contextmanager
def _meshes_come_home_in_silence() -> Iterator[None]:
    """torch warns that the mesh of a DTensor which a rank returned has no process group here: it needs none."""
    logger = logging.getLogger("torch.distributed.device_mesh")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def fault(outcomes: Sequence[Outcome], seconds: float) -> NeverEnded | RankRaised:
    """Why not all ranks returned: those that raised or died, the first one first; else they ran out of time."""
    busy = [outcome for outcome in outcomes if isinstance(outcome, Waiting)]
    failed = [_as_raised(outcome) for outcome in outcomes if isinstance(outcome, Raised | Died)]
    if not failed:
        return NeverEnded(seconds, None, None, busy=busy)
    failed.sort(key=lambda one: (_is_echo(one), one.at or float("inf"), one.rank))
    error = RankRaised(failed, (), {one.rank: _raised_at(one.traceback) for one in failed}, busy)
    error.__cause__ = _again(failed[0])
    return error


def _is_echo(raised: Raised) -> bool:
    """Whether the rank only says that another one has gone."""
    return raised.kind in ("RuntimeError", "DistBackendError") and any(words in raised.message for words in _ECHOES)


def enough_gpus(ranks: int) -> None:
    if _gpus() < ranks:
        raise TooFewGpus(ranks, _gpus())


def _gpus() -> int:
    return torch.cuda.device_count() if torch.distributed.is_nccl_available() else 0


def _said_by_run(text: object) -> object:
    """Inner code says what, the front says where."""
    return (
        text.replace("Pool.call: args_per_rank:", "run: args:").replace("Pool.call:", "run:")
        if isinstance(text, str)
        else text
    )


def _as_raised(outcome: Raised | Died) -> Raised:
    if isinstance(outcome, Raised):
        return outcome
    code = outcome.exitcode
    how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    return Raised(outcome.rank, "Died", f"its process ended {how}", "")


def _raised_at(text: str) -> Place | None:
    """The innermost line of the user's own code in a traceback."""
    lines = [
        Place(one["file"], int(one["line"]), one["function"])
        for one in _LINE.finditer(text)
        if is_user_file(one["file"])
    ]
    return lines[-1] if lines else None


class _RemoteTraceback(Exception):
    """What a process printed of its exception; shown above the copy of it that is raised here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def _again(raised: Raised) -> BaseException:
    """The exception, of its own class if that is Python's, torch's or ours: others may not exist here."""
    kind = next((found for home in _HOMES if (found := getattr(home, raised.kind, None))), None)
    error: BaseException = RuntimeError(f"{raised.kind}: {raised.message}")
    if isinstance(kind, type) and issubclass(kind, BaseException):
        with contextlib.suppress(TypeError):  # UnicodeDecodeError and its like take more than a message
            error = kind.__new__(kind, raised.message) if issubclass(kind, LocalTensorError) else kind(raised.message)
    error.__cause__ = remote_traceback(raised)
    return error


def remote_traceback(raised: Raised) -> Exception | None:
    """The cause to give an exception that is raised here again: shown above it is where it was raised first."""
    return _RemoteTraceback(raised.traceback) if raised.traceback else None
