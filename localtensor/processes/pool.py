"""Programs on real processes, one per rank, over real torch.distributed.

    with Pool(2) as pool:
        outcomes = pool.call(my_module.program, [(x0,), (x1,)])   # one Outcome a rank, in rank order

The processes start at the first call and are reused.  No communication of one call may reach the next: whenever a group
could be out of step, the processes are killed, and the next call starts others.  A rank's process keeps what a job
leaves behind: modules, caches, random state, default dtype.

Everything stays on this machine: the ranks find each other through a file in a private folder, and gloo and NCCL are
bound to the loopback interface.  Parent and child exchange pickled bytes over pipes.

`run_in_processes` runs a program as `localtensor.run` does on rank threads: from the same state, with the same refusals.
"""

import builtins
import contextlib
import logging
import pickle
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from localtensor import errors
from localtensor._util import ambient
from localtensor._util.call_sites import is_user_file, place_of_frame
from localtensor._util.events import Died, Outcome, Place, Raised, Returned, Waiting
from localtensor._util.pickling import dumps
from localtensor.errors import LocalTensorError, NestedRun, NeverEnded, NotImportable, RankRaised, TooFewGpus
from localtensor.errors.runs import MOST_RANKS
from localtensor.processes.idleness import Idleness, signal_name
from localtensor.processes.job import FunctionNotFound, caller_state, run_job
from localtensor.processes.worker import GROUP_TIMEOUT, SEPARATOR, Reply
from localtensor.processes.worker_group import WorkerGroup, ranks_end_on_sigterm

BACKENDS = ("gloo", "nccl", "cpu:gloo,cuda:nccl")

Args = Sequence[Any]


class Pool:
    """`ranks` processes that run functions together, with torch.distributed's default group initialised.

    `timeout` is for one call, in seconds.  Once a rank has raised or died, its silent peers get `grace` seconds.  A
    rank that has returned waits for its peers; `leave` seconds after the last reply it is killed instead, so that its
    peers get an error from the backend, as with independent processes.  Threads may share a pool: their calls take
    turns.
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
        if not isinstance(ranks, int) or isinstance(ranks, bool) or not 0 < ranks <= MOST_RANKS:
            raise errors.NoRanks("Pool", ranks)
        if backend not in BACKENDS:
            raise errors.NoSuchBackend("Pool", backend, "no such backend is known", ", ".join(BACKENDS))
        if "nccl" in backend and (have := _gpu_count()) < ranks:
            problem = f"NCCL wants a GPU for each of {ranks} ranks, and there are {have}"
            raise errors.NoSuchBackend("Pool", backend, problem, BACKENDS[0])
        self.ranks, self.backend = ranks, backend
        self.timeout = _checked_seconds("Pool", "timeout", timeout)
        self.grace = _checked_seconds("Pool", "grace", grace)
        self.leave = None if leave is None else _checked_seconds("Pool", "leave", leave)
        self._group: WorkerGroup | None = None
        self._end: Callable[[], object] | None = None  # kills the group, also when the pool is collected
        self._closed = False
        self._turn = threading.Lock()

    def call(
        self,
        fn: Callable[..., object],
        args_per_rank: Sequence[Args],
        *,
        timeout: float | None = None,
        idle: Idleness | None = None,
    ) -> list[Outcome]:
        """The outcome of `fn(*args)` on each rank, in rank order.  The call ends whatever the ranks do.

        Each process finds `fn` by name, so it must be at the top level of a module.  A rank that has not returned in
        time is Waiting, and all processes are killed; the next call starts others.  So it is as soon as
        `idle` finds that none has worked for its time: they wait for each other, unless `fn` sleeps or waits for something else.
        """
        limit = self.timeout if timeout is None else _checked_seconds("Pool.call", "timeout", timeout)
        if len(args_per_rank) != self.ranks:
            problem = f"there are {self.ranks} ranks"
            raise errors.WrongArguments("Pool.call", f"{len(args_per_rank)} entries", problem)
        head = _pickled_by_name(fn, "Pool.call")
        # All messages are written before any is sent, so that the ranks are still idle on an error.
        jobs = [head + _pickled_arguments(rank, args) for rank, args in enumerate(args_per_rank)]
        with self._turn, ranks_end_on_sigterm():
            if self._closed:
                raise errors.PoolClosed("Pool.call", self.ranks)
            try:
                group = self._ready_group()
                replies = group.call(jobs, limit, self.grace, self.leave, idle)
            except BaseException:  # why: Ctrl-C too must leave no process behind; it is raised again
                self._dismiss()
                raise
            if not group.in_step(replies):
                self._dismiss()
        return [_outcome(rank, reply, fn) for rank, reply in enumerate(replies)]

    def begin(self) -> None:
        """Start the processes, without waiting until they have joined: the first call does.  Raises `PoolDidNotStart`."""
        with self._turn:
            if not self._closed and self._group is None:
                self._begun_group()

    def close(self) -> None:
        """End the pool's processes.  Closing twice is allowed; calling afterwards raises `PoolClosed`."""
        with self._turn:
            self._closed = True
            self._dismiss()

    def kill(self) -> None:
        """End the processes at once, also while another thread calls them: for it, the ranks have died."""
        if (group := self._group) is not None:
            group.kill_processes()

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def pids(self) -> tuple[int, ...]:
        """The process of each rank, in rank order; empty while none run."""
        return tuple(member.pid for member in self._group.members) if self._group else ()

    def _ready_group(self) -> WorkerGroup:
        if self._group and self._group.joined and not self._group.is_usable():
            self._dismiss()
        group = self._group or self._begun_group()
        if not group.joined:
            group.join()
        return group

    def _begun_group(self) -> WorkerGroup:
        self._group = group = WorkerGroup(self.ranks, self.backend)
        self._end = finalize = weakref.finalize(self, group.kill)
        finalize.atexit = False  # the group registers its own exit hook
        group.begin()
        return group

    def _dismiss(self) -> None:
        self._group = None
        if self._end:
            self._end()


def _outcome(rank: int, reply: Reply, fn: Callable[..., object]) -> Outcome:
    body: Any = reply.body
    match reply.kind:
        case "returned":
            try:
                return Returned(rank, pickle.loads(body))
            except Exception as error:  # why: reading a value back runs its own code
                raise errors.NotSendable("Pool.call", "returned value", "value", rank, _error_text(error)) from error
        case "raised":
            return Raised(rank, *body)
        case "died":
            return Died(rank, body)
        case "waiting":
            return Waiting(rank, *body.split(SEPARATOR, 1))
        case "no_function":
            raise errors.NotImportable("Pool.call", name_of(fn), f"{body[0]}: {body[1]}")
        case "no_arguments":
            raise errors.NotSendable("Pool.call", "args_per_rank", "tuple", rank, f"{body[0]}: {body[1]}")
    kind, detail = body
    raise errors.NotSendable("Pool.call", "returned value", kind, rank, detail)


def _checked_seconds(call: str, argument: str, seconds: float) -> float:
    if not isinstance(seconds, int | float) or not 0 < seconds <= GROUP_TIMEOUT:
        raise errors.NoTime(call, argument, seconds)
    return float(seconds)


def _pickled_by_name(fn: Callable[..., Any], call: str) -> bytes:
    try:
        return pickle.dumps(fn, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # why: pickle refuses with three kinds of exception
        raise NotImportable(call, name_of(fn), _error_text(error)) from error


def _pickled_arguments(rank: int, args: Args) -> bytes:
    if not isinstance(args, tuple | list):
        problem = "the arguments of a rank are a tuple or a list"
        raise errors.WrongArguments("Pool.call", f"{type(args).__name__} for rank {rank}", problem)
    try:
        return dumps(args, views=True)
    except Exception as error:  # why: pickling an argument runs its own code
        raise errors.NotSendable(
            "Pool.call", "args_per_rank", _unpicklable_type(args), rank, _error_text(error)
        ) from error


def _unpicklable_type(args: Args) -> str:
    for arg in args:
        try:
            dumps(arg, views=True)
        except Exception:  # why: the argument that raises is the one looked for
            return type(arg).__name__
    return "tuple"


def name_of(fn: object) -> str:
    """The module and name by which other processes find a function."""
    return f"{getattr(fn, '__module__', '?')}.{getattr(fn, '__qualname__', repr(fn))}"


def _error_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


GRACE = 1.0  # seconds for the other ranks, once one has raised or died
LEAVE = 2.0  # seconds after which a rank that has returned is killed while others run, as if it were alone
_LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process has exited")
_EXCEPTION_MODULES = (builtins, errors, torch.distributed)  # whose exceptions are raised here as their own class
_TRACEBACK_LINE = re.compile(r'^ *File "(?P<file>.*)", line (?P<line>\d+), in (?P<function>.*)$', re.MULTILINE)


def run_in_processes(
    fn: Callable[..., Any],
    pieces: Sequence[tuple[Any, ...]],
    on: str,
    seed: int,
    timeout: float | None,
    device: str | torch.device | None,
) -> tuple[Any, ...]:
    """The result of `fn(*pieces[rank])` on each rank, each in its own process; the processes are kept for the next call.

    Raises `RankRaised` if ranks raise or die, `NeverEnded`, `TooFewGpus`, `NestedRun`; `NotImportable` if a process
    does not find `fn`, and `NotSendable` if an argument or result cannot be pickled.
    """
    ranks = len(pieces)
    outer = ambient.simulation_of_this_rank()
    if outer is not None:
        raise NestedRun(outer.rank(), place_of_frame(sys._getframe(2)))
    if on == "nccl":
        check_gpus(ranks)
        device = device or "cuda"
    make = partial(Pool, ranks, backend=on, grace=GRACE, leave=LEAVE)
    return _run_in_pool(ambient.pool_of((ranks, on), make), fn, pieces, seed, timeout, device)


def run_once_in_processes(
    fn: Callable[..., Any], pieces: Sequence[tuple[Any, ...]], seed: int, timeout: float | None
) -> tuple[Any, ...]:
    """As `run_in_processes` over gloo, in processes that no other run has used or will use.  Raises what that raises."""
    return _run_in_pool(Pool(len(pieces), grace=GRACE, leave=LEAVE), fn, pieces, seed, timeout, None)


def _run_in_pool(
    made: contextlib.AbstractContextManager[Pool],
    fn: Callable[..., Any],
    pieces: Sequence[tuple[Any, ...]],
    seed: int,
    timeout: float | None,
    device: str | torch.device | None,
) -> tuple[Any, ...]:
    function, mine = _pickled_by_name(fn, "run"), caller_state(seed, device)
    limit = GROUP_TIMEOUT if timeout is None else timeout
    try:
        with made as pool, _without_mesh_warnings():
            outcomes = pool.call(run_job, [(function, mine, *args) for args in pieces], timeout=limit)
    except LocalTensorError as refused:
        refused.args = tuple(_as_text_of_run(text) for text in refused.args)
        raise
    for outcome in outcomes:
        if isinstance(outcome, Returned) and isinstance(outcome.value, FunctionNotFound):
            raise NotImportable("run", name_of(fn), outcome.value.detail)
    if all(isinstance(outcome, Returned) for outcome in outcomes):
        return tuple(outcome.value for outcome in outcomes if isinstance(outcome, Returned))
    raise error_of_outcomes(outcomes, limit)


@contextlib.contextmanager
def _without_mesh_warnings() -> Iterator[None]:
    """Suppress torch's warning that a returned DTensor's mesh has no process group here: it needs none."""
    logger = logging.getLogger("torch.distributed.device_mesh")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def error_of_outcomes(outcomes: Sequence[Outcome], seconds: float) -> NeverEnded | RankRaised:
    """The error if not all ranks returned: those that raised or died, the first one first; else a timeout."""
    busy = [outcome for outcome in outcomes if isinstance(outcome, Waiting)]
    failed = [_as_raised(outcome) for outcome in outcomes if isinstance(outcome, Raised | Died)]
    if not failed:
        return NeverEnded(seconds, None, None, busy=busy)
    failed.sort(key=lambda one: (_reports_lost_peer(one), one.at or float("inf"), one.rank))
    error = RankRaised(failed, (), {one.rank: _raised_at(one.traceback) for one in failed}, busy)
    error.__cause__ = _rebuilt(failed[0])
    return error


def _reports_lost_peer(raised: Raised) -> bool:
    """Whether the error only reports the loss of another rank."""
    return raised.kind in ("RuntimeError", "DistBackendError") and any(words in raised.message for words in _LOST_PEER)


def check_gpus(ranks: int) -> None:
    """Raises `TooFewGpus` unless this machine has a GPU for each rank."""
    if _gpu_count() < ranks:
        raise TooFewGpus(ranks, _gpu_count())


def _gpu_count() -> int:
    return torch.cuda.device_count() if torch.distributed.is_nccl_available() else 0


def _as_text_of_run(text: object) -> object:
    """A message of the pool under the name of `run`, which the user called."""
    if not isinstance(text, str):
        return text
    return text.replace("Pool.call: args_per_rank:", "run: args:").replace("Pool.call:", "run:")


def _as_raised(outcome: Raised | Died) -> Raised:
    if isinstance(outcome, Raised):
        return outcome
    code = outcome.exitcode
    how = f"by signal {signal_name(-code)}" if code < 0 else f"with exit code {code}"
    return Raised(outcome.rank, "Died", f"its process ended {how}", "")


def _raised_at(text: str) -> Place | None:
    """The innermost line of the user's own code in a traceback."""
    lines = [one for one in _TRACEBACK_LINE.finditer(text) if is_user_file(one["file"])]
    return Place(lines[-1]["file"], int(lines[-1]["line"]), lines[-1]["function"]) if lines else None


class _RemoteTraceback(Exception):
    """The traceback of an exception in another process; shown above the copy that is raised here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def _rebuilt(raised: Raised) -> BaseException:
    """The exception, of its own class if that is Python's, torch's or ours: other classes may not exist here."""
    kind = next((found for module in _EXCEPTION_MODULES if (found := getattr(module, raised.kind, None))), None)
    error: BaseException = RuntimeError(f"{raised.kind}: {raised.message}")
    if isinstance(kind, type) and issubclass(kind, BaseException):
        with contextlib.suppress(TypeError):  # UnicodeDecodeError and the like take more than a message
            error = kind.__new__(kind, raised.message) if issubclass(kind, LocalTensorError) else kind(raised.message)
    error.__cause__ = remote_traceback(raised)
    return error


def remote_traceback(raised: Raised) -> Exception | None:
    """The cause of an exception that is raised here again, which shows its first traceback; None without one."""
    return _RemoteTraceback(raised.traceback) if raised.traceback else None
