"""The child's side of a process pool: a process that serves one rank, runs jobs, and ends with its parent.

The child has two pipes.  On `jobs` the parent sends work and reads replies; on `side` it asks for the position of a
rank that does not reply.  Parent and child exchange pickled bytes only.  When the parent is gone, `side` closes, and
the process ends, even while a collective holds the main thread.

| torch part                                    | read on    | run on | without it                             |
|-----------------------------------------------|------------|--------|----------------------------------------|
| ProcessGroup._get_sequence_number_for_group   | by feature | 2.13   | every call starts a new group: slower  |
"""

import io
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import socket
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
from localtensor.errors import PoolDidNotStart

Steps: TypeAlias = tuple[int, int]  # operations that the default group had begun before the job, and after it

GROUP_TIMEOUT = 86400  # seconds of a group's own timeout: longer than any call may last
FENCE = b""  # the message that requests a fence; all others are jobs
SYSTEM = sys.platform
_PDEATHSIG = 1  # Linux: PR_SET_PDEATHSIG of prctl(2)
MAX_LEFT_OPEN = 400  # files that jobs may leave open in one process; each group left behind holds 5, and 3 threads


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """The rank and group of a worker, and its environment."""

    rank: int
    ranks: int
    backend: str
    folder: str
    environ: dict[str, str]


def worker_environment(ranks: int) -> dict[str, str]:
    """The environment that ranks share: gloo and NCCL are bound to the loopback interface."""
    home = next((name for _, name in socket.if_nameindex() if re.fullmatch(r"lo\d*|loopback.*", name)), None)
    if home is None:
        raise PoolDidNotStart("Pool.call", ranks, "this machine has no loopback interface")
    if not _loopback_is_up():  # else a store tries to connect for minutes
        raise PoolDidNotStart("Pool.call", ranks, "the loopback interface of this machine is down")
    own = {"GLOO_SOCKET_IFNAME": home, "NCCL_SOCKET_IFNAME": home, "WORLD_SIZE": str(ranks)}
    return {"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ, **own}


def _loopback_is_up() -> bool:
    """Whether 127.0.0.1 is reachable; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as there:
        try:
            there.connect(("127.0.0.1", 9))
        except OSError:
            return False
    return True


class Reply(NamedTuple):
    """A worker's reply; `kind` is ready, returned, raised, no_function, no_arguments, unsendable, fenced or unfenced.

    The parent sets "died" for a process that has ended, and "waiting" for one that does not reply.  The type of `body`
    depends on the kind.  `steps` is None if the process cannot take another job.
    """

    kind: str
    body: object = None
    steps: Steps | None = None


Answer: TypeAlias = Callable[[bytes, int], Reply]  # (message, number of files that may be open) -> reply


def serve(spec: WorkerSpec, jobs: Connection, side: Connection, answer: Answer | None = None) -> None:
    """Run a worker.  It ends by os._exit, because torch's cleanup may block on ranks that are gone.

    `answer` serves a message; by default a message is a pickled function and its arguments.
    """
    ignore_interrupt()
    multiprocessing.current_process().daemon = False  # a program may have children, such as data loaders
    os.environ.clear()
    os.environ.update(spec.environ)
    threading.Thread(target=_serve_side, args=(side, threading.get_ident(), spec.folder), daemon=True).start()
    try:
        try:
            _init_group(spec)
        except BaseException as error:  # why: reported to the parent, whatever it is
            _send_reply(jobs, Reply("raised", describe_exception(error)))
        else:
            _send_reply(jobs, Reply("ready"))
            _serve_jobs(spec, jobs, answer or _run_message)
    except (EOFError, OSError):
        pass
    _leave(spec.folder)


def end_with_parent(parent: int) -> None:
    """Ignore Ctrl-C, and on Linux end this process with its parent, even while it hangs in native code.

    To be exact, it ends with the thread that started it: processes must be ended in the thread that starts them.
    """
    ignore_interrupt()
    if SYSTEM == "linux":
        CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def ignore_interrupt() -> None:
    """Ignore Ctrl-C: the parent handles it, and ends this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):  # the parent blocked it until now
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _init_group(spec: WorkerSpec) -> None:
    import torch  # deferred, so that the environment above is in force when a spawned worker loads it
    import torch.distributed as dist

    torch.set_num_threads(1)
    device = None
    if "nccl" in spec.backend:
        device = torch.device("cuda", spec.rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    os.stat(spec.folder)  # raises if the parent has removed it; a FileStore would wait for minutes, holding the GIL
    store = dist.FileStore(os.path.join(spec.folder, "store"), spec.ranks)
    # The parent keeps the time: if the group timed out first, a hang would look like an exception.
    timeout = timedelta(seconds=GROUP_TIMEOUT)
    dist.init_process_group(
        spec.backend, store=store, rank=spec.rank, world_size=spec.ranks, timeout=timeout, device_id=device
    )
    if spec.backend == "gloo":
        from localtensor.processes.staging import stage_gpu_tensors

        stage_gpu_tensors()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # so output appears even if the rank is killed next


def _serve_jobs(spec: WorkerSpec, jobs: Connection, answer: Answer) -> None:
    max_open = _open_files() + MAX_LEFT_OPEN
    while True:
        message = jobs.recv_bytes()
        if message == FENCE:
            _send_reply(jobs, Reply("fenced" if _fence(spec) else "unfenced"))
        else:
            _send_reply(jobs, answer(message, max_open))


def _fence(spec: WorkerSpec) -> bool:
    """Whether no operation of the last job is unfinished; if one is, this may also hang until the parent times out.

    The parent requests it when all ranks have replied: a rank still at work must not reach its peers' barrier.  An
    unfinished collective blocks the barrier.  An unmatched send takes the receive that is posted here, whose own send
    then finds none, and vice versa.  (Messages with a tag other than 0 are missed, if all ranks began equally many
    operations.)
    """
    import torch
    import torch.distributed as dist

    peers = [rank for rank in range(spec.ranks) if rank != spec.rank and "gloo" in spec.backend]
    note = torch.zeros(1, device="cpu")
    try:
        under_way = [dist.barrier(async_op=True)]
        under_way += [dist.irecv(torch.zeros(1, device="cpu"), peer) for peer in peers]
        under_way += [dist.isend(note, peer) for peer in peers]
        return all([work is None or work.wait() for work in under_way])
    except Exception:  # why: any failure means that the fence did not hold
        return False


def _send_reply(jobs: Connection, reply: Reply) -> None:
    jobs.send_bytes(pickle.dumps(reply, pickle.HIGHEST_PROTOCOL))


def _run_message(message: bytes, max_open: int) -> Reply:
    """Run one job: three consecutive pickles (search path or None, function, arguments)."""
    before = _operations_begun()
    _drop_coalesced()
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
    except BaseException as error:  # why: whatever the job raises is its outcome, SystemExit too
        why: tuple[Any, ...] = (
            (*describe_exception(error), time.monotonic()) if kind == "raised" else describe_exception(error)
        )
        return Reply(kind, why, _steps(before, max_open))
    try:
        body = dumps(value, views=True)
    except BaseException as error:  # why: a value's own pickling may raise anything
        return Reply("unsendable", (type(value).__name__, describe_exception(error)[1]), _steps(before, max_open))
    return Reply("returned", body, _steps(before, max_open))


def describe_exception(error: BaseException) -> tuple[str, str, str]:
    """Class name, message and traceback as strings: the exception's class may not exist in the reading process."""
    user_part = error.__traceback__ and error.__traceback__.tb_next
    try:
        return type(error).__name__, str(error), "".join(traceback.format_exception(type(error), error, user_part))
    except Exception as worse:  # why: an exception's own __str__ may raise anything
        return type(error).__name__, f"(its own text failed: {type(worse).__name__})", ""


def _operations_begun() -> int | None:
    """The number of operations that the default group has begun; None without such a group, or if torch lacks the counter.

    Collectives and sends both count; a call that is refused before it starts does not.
    """
    import torch.distributed as dist

    count = getattr(dist.group.WORLD, "_get_sequence_number_for_group", None)
    return int(count()) if count else None


def _drop_coalesced() -> None:
    """Forget what a `_coalescing_manager` of the last job collected when it raised: later calls would be collected too, not made."""
    from torch.distributed import distributed_c10d as c10d

    c10d._world.pg_coalesce_state.clear()


def _steps(before: int | None, max_open: int) -> Steps | None:
    after = _operations_begun()
    return None if before is None or after is None or _open_files() > max_open else (before, after)


def _open_files() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0


def _serve_side(side: Connection, main: int, folder: str) -> None:
    try:
        while True:
            side.recv_bytes()
            frame = sys._current_frames().get(main)
            side.send_bytes(f"{whereabouts(frame)}{SEPARATOR}{_raised_in(frame)}".encode())
    except (EOFError, OSError):
        _leave(folder)


SEPARATOR = "\0"
"""Stands between the position of a rank and the error that it holds."""


def _raised_in(frame: FrameType | None) -> str:
    """The text of the innermost local variable `__raised__`, or ""."""
    return next((text for inner, _ in _frames_of_job(frame) if (text := inner.f_locals.get("__raised__"))), "")


def _leave(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # a killed parent cannot remove it
    os._exit(0)


def whereabouts(frame: FrameType | None, depth: int = 3) -> str:
    """The innermost lines of the user's own code, innermost first."""
    stack = traceback.StackSummary.extract(_frames_of_job(frame))
    # The prefixes of files without user code: this package, the standard library, torch.
    homes = [os.path.dirname(os.path.dirname(__file__)) + os.sep, sysconfig.get_path("stdlib") + os.sep, "<frozen "]
    if "torch" in sys.modules:
        homes.append(os.path.dirname(sys.modules["torch"].__file__ or "") + os.sep)
    mine = [summary for summary in stack if not summary.filename.startswith(tuple(homes))]
    return " < ".join(_place(summary) for summary in mine[:depth]) or "unknown"


def _frames_of_job(frame: FrameType | None) -> Iterator[tuple[FrameType, int]]:
    for inner, line in traceback.walk_stack(frame) if frame else ():
        if inner.f_code is _serve_jobs.__code__:
            return
        yield inner, line


def _place(summary: traceback.FrameSummary) -> str:
    return f"{os.path.basename(summary.filename)}:{summary.lineno} in {summary.name}: {summary.line}"
