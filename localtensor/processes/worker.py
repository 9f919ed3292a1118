"""The child's side of a process pool: sits at one rank, does what it is sent, and ends with its parent.

Two pipes lead here.  On `jobs` the parent sends work and reads replies; on `side` it asks a rank that does not
answer where it is.  Only plain pickle bytes travel, and only between these two processes.  When the parent is
gone, `side` ends, and with it the process, even while a collective holds the main thread.

| torch part                                    | read on    | run on | without it                             |
|-----------------------------------------------|------------|--------|----------------------------------------|
| ProcessGroup._get_sequence_number_for_group   | by feature | 2.13   | every call starts a new group: slower  |
"""

import io
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from ctypes import CDLL
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any, NamedTuple, TypeAlias

from localtensor._util.pickling import dumps

Steps: TypeAlias = tuple[int, int]  # how many operations the default group had begun: before the job, after it

PATIENCE = 86400  # seconds that a group waits for its members: longer than any call may last
FENCE = b""  # the message that asks for a fence, where others bring a job
SYSTEM = sys.platform
_PDEATHSIG = 1  # Linux: PR_SET_PDEATHSIG of prctl(2)
LITTER = 400  # files that jobs may leave open in one process; each group left behind holds 5, and 3 threads


@dataclass(frozen=True, slots=True)
class Seat:
    """Which rank of which group a worker is, and the environment that goes with it."""

    rank: int
    ranks: int
    backend: str
    folder: str
    environ: dict[str, str]


class Reply(NamedTuple):
    """`kind` is ready, returned, raised, no_function, no_arguments, unsendable, fenced or unfenced.

    The parent puts "died" there for a process that says nothing more.  `body` is what the kind calls for.  `steps` is None when this process is not fit for another job.
    """

    kind: str
    body: object = None
    steps: Steps | None = None


Answer: TypeAlias = Callable[[bytes, int], Reply]  # of a message, in a process that may have so many files open


def calls_for_fence(reply: Reply) -> bool:
    """Whether this job must be followed by a fence: it went through, and it used the default group."""
    return reply.kind in ("returned", "unsendable") and reply.steps is not None and reply.steps[0] != reply.steps[1]


def serve(seat: Seat, jobs: Connection, side: Connection, answer: Answer | None = None) -> None:
    """The life of a worker.  It leaves by os._exit: no cleanup of torch's may block on ranks that are gone.

    `answer` does what a message asks for; if not given, the message holds a pickled function and its arguments.
    """
    heed_no_interrupt()
    multiprocessing.current_process().daemon = False  # a program may have children, such as data loaders
    os.environ.clear()
    os.environ.update(seat.environ)
    threading.Thread(target=_attend, args=(side, threading.get_ident(), seat.folder), daemon=True).start()
    try:
        try:
            _sit_down(seat)
        except BaseException as error:  # why: whatever it is, the parent has to hear of it
            _post(jobs, Reply("raised", told(error)))
        else:
            _post(jobs, Reply("ready"))
            _work(seat, jobs, answer or _answer)
    except (EOFError, OSError):
        pass
    _leave(seat.folder)


def end_with_parent(parent: int) -> None:
    """Ctrl-C does not end this process, and Linux ends it with its parent, even while it hangs in native code.

    With the thread that started it, to be exact: who starts processes in a thread ends them there.
    """
    heed_no_interrupt()
    if SYSTEM == "linux":
        CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def heed_no_interrupt() -> None:
    """Ctrl-C is the parent's, who then ends us."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):  # the parent blocked it, for until we got here
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _sit_down(seat: Seat) -> None:
    import torch  # deferred, so that the environment above is in force when a spawned worker loads it
    import torch.distributed as dist

    torch.set_num_threads(1)
    device = None
    if "nccl" in seat.backend:
        device = torch.device("cuda", seat.rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    os.stat(seat.folder)  # gone with the parent?  A FileStore would look for it for minutes, and hold the GIL meanwhile
    store = dist.FileStore(os.path.join(seat.folder, "store"), seat.ranks)
    # The parent keeps the time.  Were the group the first to lose patience, a hang would read as an exception.
    patience = timedelta(seconds=PATIENCE)
    dist.init_process_group(
        seat.backend, store=store, rank=seat.rank, world_size=seat.ranks, timeout=patience, device_id=device
    )
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # what a rank printed shows even if it is killed next


def _work(seat: Seat, jobs: Connection, answer: Answer) -> None:
    room = _open_files() + LITTER
    while True:
        message = jobs.recv_bytes()
        if message == FENCE:
            _post(jobs, Reply("fenced" if _fence(seat) else "unfenced"))
        else:
            _post(jobs, answer(message, room))


def _fence(seat: Seat) -> bool:
    """Nothing of the last job is under way; if something is, this never returns, and the parent loses patience.

    The parent asks for it when all ranks have replied: a rank still at work must not meet its peers' barrier.
    A collective that was begun and never finished blocks the barrier.  A send that nobody received takes up the
    receive that we post here, and then our own send finds none; the other way round, likewise.  (What carries a
    tag other than 0 goes unseen, if all ranks began equally many operations.)
    """
    import torch
    import torch.distributed as dist

    peers = [rank for rank in range(seat.ranks) if rank != seat.rank and "gloo" in seat.backend]
    note = torch.zeros(1, device="cpu")
    try:
        under_way = [dist.barrier(async_op=True)]
        under_way += [dist.irecv(torch.zeros(1, device="cpu"), peer) for peer in peers]
        under_way += [dist.isend(note, peer) for peer in peers]
        return all([work is None or work.wait() for work in under_way])
    except Exception:  # why: any failure of the fence is its answer
        return False


def _post(jobs: Connection, reply: Reply) -> None:
    jobs.send_bytes(pickle.dumps(reply, pickle.HIGHEST_PROTOCOL))


def _answer(message: bytes, room: int) -> Reply:
    """Do one job: three pickles in a row (search path or None, function, arguments)."""
    before = _begun()
    kind = "no_function"
    try:
        stream = io.BytesIO(message)
        path = pickle.load(stream)
        sys.path[:] = path or sys.path
        fn = pickle.load(stream)
        kind = "no_arguments"
        args = pickle.load(stream)
        kind = "raised"
        value = fn(*args)
    except BaseException as error:  # why: what the job raises is its outcome, SystemExit too
        why: tuple[Any, ...] = (*told(error), time.monotonic()) if kind == "raised" else told(error)
        return Reply(kind, why, _steps(before, room))
    try:
        body = dumps(value, views=True)
    except BaseException as error:  # why: a value's own pickling may raise anything
        return Reply("unsendable", (type(value).__name__, told(error)[1]), _steps(before, room))
    return Reply("returned", body, _steps(before, room))


def told(error: BaseException) -> tuple[str, str, str]:
    """Kind, message and traceback, as strings: an exception's own class may not exist where they are read."""
    beyond_us = error.__traceback__ and error.__traceback__.tb_next
    try:
        return type(error).__name__, str(error), "".join(traceback.format_exception(type(error), error, beyond_us))
    except Exception as worse:  # why: an exception's own __str__ may raise anything
        return type(error).__name__, f"(its own text failed: {type(worse).__name__})", ""


def _begun() -> int | None:
    """How many operations the default group has begun; None if there is no such group, or torch does not say.

    This is the only private part of torch here (seen in 2.13.0).  Collectives and sends both count; a call that
    is refused before it starts does not.
    """
    import torch.distributed as dist

    count = getattr(dist.group.WORLD, "_get_sequence_number_for_group", None)
    return int(count()) if count else None


def _steps(before: int | None, room: int) -> Steps | None:
    after = _begun()
    return None if before is None or after is None or _open_files() > room else (before, after)


def _open_files() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0


def _attend(side: Connection, main: int, folder: str) -> None:
    try:
        while True:
            side.recv_bytes()
            side.send_bytes(whereabouts(sys._current_frames().get(main)).encode())
    except (EOFError, OSError):
        _leave(folder)


def _leave(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # a parent that was killed cannot do it
    os._exit(0)


def whereabouts(frame: FrameType | None, depth: int = 3) -> str:
    """The innermost lines of the user's own code, innermost first."""
    stack = traceback.StackSummary.extract(_within_the_job(frame))
    homes = tuple(_plumbing())
    mine = [summary for summary in stack if not summary.filename.startswith(homes)]
    return " < ".join(_place(summary) for summary in mine[:depth]) or "unknown"


def _within_the_job(frame: FrameType | None) -> Iterator[tuple[FrameType, int]]:
    for inner, line in traceback.walk_stack(frame) if frame else ():
        if inner.f_code is _work.__code__:
            return
        yield inner, line


def _place(summary: traceback.FrameSummary) -> str:
    return f"{os.path.basename(summary.filename)}:{summary.lineno} in {summary.name}: {summary.line}"


def _plumbing() -> Iterator[str]:
    """Where the frames live that tell a user nothing: this package, torch, the standard library."""
    yield os.path.dirname(os.path.dirname(__file__)) + os.sep
    yield sysconfig.get_path("stdlib") + os.sep
    yield "<frozen "
    if "torch" in sys.modules:
        yield os.path.dirname(sys.modules["torch"].__file__ or "") + os.sep
