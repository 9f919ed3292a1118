"""A program run by real processes over gloo or NCCL, from the same start as on rank threads, and refused alike."""

import builtins
import contextlib
import logging
import pickle
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from localtensor import errors
from localtensor._util import ambient as _context
from localtensor._util.call_sites import is_user_file, place_of
from localtensor._util.events import Died, Outcome, Place, Raised, Returned, Waiting
from localtensor.errors import LocalTensorError, NestedRun, NeverEnded, NotImportable, RankRaised, TooFewGpus
from localtensor.processes.job import Lost, home, live
from localtensor.processes.pool import Pool, name_of
from localtensor.processes.worker import PATIENCE

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
    outer = _context.of_rank()
    if outer is not None:
        raise NestedRun(outer.rank(), place_of(sys._getframe(2)))
    if on == "nccl":
        enough_gpus(ranks)
        device = device or "cuda"
    function, mine = _by_name(fn), home(seed, device)
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
    return _context.pool_of((ranks, on), lambda: Pool(ranks, backend=on, grace=GRACE, leave=LEAVE))


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
    gpus = torch.cuda.device_count() if torch.distributed.is_nccl_available() else 0
    if gpus < ranks:
        raise TooFewGpus(ranks, gpus)


def _by_name(fn: Callable[..., Any]) -> bytes:
    try:
        return pickle.dumps(fn, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # why: pickle refuses with three kinds of exception
        raise NotImportable("run", name_of(fn), f"{type(error).__name__}: {error}") from error


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
