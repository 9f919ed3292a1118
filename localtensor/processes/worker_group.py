"""One generation of worker processes, seen from the parent: started together, killed together.

That is cheap where there is a fork server: it has imported torch already, and new ranks meet within some 30 ms.
All that travels is pickle bytes over pipes between parent and child.

A private part of CPython, which has no public twin; read on 3.10, 3.11, 3.12 and 3.13; without it a folder is left lying:

| part | for what |
|---|---|
| `multiprocessing.process.current_process()._config["tempdir"]` | the folder of the fork server's socket |
"""

import atexit
import contextlib
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

from localtensor import errors
from localtensor.processes.worker import FENCE, Reply, Seat, calls_for_fence, serve

START_LIMIT = 120.0  # seconds; the first import of torch from a cold disk is the slow case
FENCE_LIMIT = 1.0  # seconds; too short on a busy machine costs a restart, no more
PRELOAD = ("torch", "torch.distributed.tensor", "localtensor.processes.worker", "localtensor.processes.job")
CREWS: "set[WorkerGroup]" = set()  # that are there: who ends this process at once removes their folders
# Once in the fork server, not in each rank: what test modules import, and what torch imports when DTensor is first used
# (whose TORCHDYNAMO_* and TORCH_COMPILE_DISABLE are then those of when the server started).
PRELOAD_IF_USED = ("pytest", "hypothesis", "torch._dynamo")


@dataclass(slots=True)
class _Member:
    """One worker, seen from the parent."""

    process: BaseProcess
    jobs: Connection
    side: Connection
    pid: int

    def reply(self) -> Reply:
        """The reply that is there to be read; kind "died" if there is none, and will be none."""
        try:
            if self.jobs.poll():
                reply: Reply = pickle.loads(self.jobs.recv_bytes())
                return reply
        except (EOFError, OSError):
            pass
        self.process.join(1)
        if self.process.exitcode is None:  # it closed its pipe and lives on
            self.process.kill()
            self.process.join(1)
        return Reply("died", self.process.exitcode)


class WorkerGroup:
    """One generation of processes: started together, killed together."""

    def __init__(self, ranks: int, backend: str) -> None:
        self.ranks, self.backend = ranks, backend
        self.members: list[_Member] = []
        self._owner = os.getpid()
        # 0700.  No TemporaryDirectory: a forked copy of that would take the folder along when it ends.
        self.folder = tempfile.mkdtemp(prefix="localtensor-")
        CREWS.add(self)
        self._path: list[str] = []
        self._fence = False
        self._left = False  # ranks that had returned were ended before all others had
        # Registered later than multiprocessing's own hook, hence run earlier: that one would join our processes.
        atexit.register(self.kill)

    def start(self) -> None:
        """All ranks have joined the group."""
        context = self.context()
        shared = environ(self.ranks)
        with _without_chatter():
            for rank in range(self.ranks):
                try:
                    with deaf():  # and whenever Ctrl-C comes, a process that has begun is a member
                        self.members.append(self._hire(context, rank, shared))
                except (ConnectionError, EOFError) as error:  # the fork server ended, for want of memory say
                    why = f"rank {rank}: {type(error).__name__}: {error}"
                    raise errors.PoolDidNotStart("Pool.call", self.ranks, why) from error
        for rank, reply in enumerate(self.gather(time.monotonic() + START_LIMIT, grace=5.0)):
            if reply is None or reply.kind != "ready":
                raise errors.PoolDidNotStart("Pool.call", self.ranks, f"rank {rank}: {_sad_story(reply)}")

    def context(self) -> Any:
        """How the processes are made."""
        return _context()

    def task(self, seat: Seat, ends: Sequence[Connection]) -> Callable[[Seat, Connection, Connection], None]:
        """What such a process does; `ends` are the parent's, of the pipes that it and those before it have."""
        return serve

    def _hire(self, context: Any, rank: int, shared: dict[str, str]) -> _Member:
        own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        seat = Seat(rank, self.ranks, self.backend, self.folder, own)
        jobs, their_jobs = context.Pipe()
        side, their_side = context.Pipe()
        ends = [end for member in self.members for end in (member.jobs, member.side)]
        task = self.task(seat, [*ends, jobs, side])
        process = context.Process(
            target=task, args=(seat, their_jobs, their_side), name=f"localtensor rank {rank}", daemon=True
        )
        process.start()
        their_jobs.close()
        their_side.close()
        return _Member(process, jobs, side, process.pid)

    def call(self, jobs: Sequence[bytes], limit: float, grace: float, leave: float | None) -> list[Reply]:
        """Each rank's reply to its job; of kind "waiting", with the line it is at, from a rank that stays silent."""
        deadline = time.monotonic() + limit
        self.send(jobs, limit)
        replies = self.gather(deadline, grace, leave)
        silent = self.whereabouts([rank for rank, reply in enumerate(replies) if reply is None])
        return [reply or Reply("waiting", silent[rank]) for rank, reply in enumerate(replies)]

    def send(self, jobs: Sequence[bytes], limit: float) -> None:
        """Every rank has its job, or is dead: if a frozen process does not take a large one, all are killed."""
        path = None if self._path == sys.path else list(sys.path)
        self._path = list(sys.path)
        head = pickle.dumps(path, pickle.HIGHEST_PROTOCOL)
        large = max(map(len, jobs)) > 1 << 15
        alarm = threading.Timer(limit, self._kill_members) if large else None
        if alarm:
            alarm.daemon = True
            alarm.start()
        try:
            for member, job in zip(self.members, jobs, strict=True):
                with contextlib.suppress(OSError):  # it died: gather will see it
                    member.jobs.send_bytes(head + job)
        finally:
            if alarm:
                alarm.cancel()

    def gather(self, deadline: float, grace: float, leave: float | None = None) -> list[Reply | None]:
        """Each rank's reply; None for a rank that stays silent.

        So many seconds after the last reply, `leave` ends the ranks that have returned: as when a process ends
        that others wait for, these are told.
        """
        got: dict[int, Reply] = {}
        while len(got) < self.ranks and (left := deadline - time.monotonic()) > 0:
            waits_on = leave is not None and not self._left and any(reply.kind == "returned" for reply in got.values())
            awaited: dict[Any, int] = {}
            for rank, member in enumerate(self.members):
                if rank not in got:
                    awaited[member.jobs] = awaited[member.process.sentinel] = rank
            came = {awaited[ready] for ready in wait(list(awaited), min(left, leave or left) if waits_on else left)}
            if waits_on and not came:
                self._end([rank for rank, reply in got.items() if reply.kind == "returned"])
            for rank in came:
                got[rank] = self.members[rank].reply()
                if got[rank].kind in ("raised", "died", "no_function", "no_arguments"):
                    deadline = min(deadline, time.monotonic() + grace)
        return [got.get(rank) for rank in range(self.ranks)]

    def whereabouts(self, ranks: Sequence[int], patience: float = 0.5) -> dict[int, str]:
        """What line each of these ranks is at, as far as it can still say."""
        found = dict.fromkeys(ranks, "unknown")
        for rank in ranks:
            with contextlib.suppress(OSError):
                self.members[rank].side.send_bytes(b"?")
        for rank in ranks:
            with contextlib.suppress(EOFError, OSError):
                if self.members[rank].side.poll(patience):
                    found[rank] = self.members[rank].side.recv_bytes().decode()
        return found

    def in_step(self, replies: Sequence[Reply]) -> bool:
        """Whether the group may serve another call.

        It may if all ranks finished and began equally many operations (then a fence is under way, and the next
        call sees whether it holds), or if no rank began any: a refusal before the first collective does no harm.
        """
        present = [reply for reply in replies if reply.steps is not None]
        if self._left or len(present) < self.ranks or len({reply.steps for reply in present}) > 1:
            return False
        fences = [calls_for_fence(reply) for reply in present]
        self._fence = all(fences)
        if self._fence:
            for member in self.members:
                with contextlib.suppress(OSError):  # it died since: fit will see it
                    member.jobs.send_bytes(FENCE)
        return self._fence or all(reply.steps and reply.steps[0] == reply.steps[1] for reply in present)

    def fit(self) -> bool:
        """Whether all ranks live, and the fence after the last call, if one was due, has held."""
        if not self.mine():
            return False
        if self._fence:
            self._fence = False
            fenced = self.gather(time.monotonic() + FENCE_LIMIT, grace=0)
            return all(reply is not None and reply.kind == "fenced" for reply in fenced)
        ends = [end for member in self.members for end in (member.jobs, member.process.sentinel)]
        return not wait(ends, 0)  # a pipe ends a moment before the fork server reports the death

    def kill(self) -> None:
        """No process and no file is left.  A copy of this object in a forked child must not touch them."""
        atexit.unregister(self.kill)
        members, self.members = self.members, []
        if not self.mine():
            CREWS.discard(self)
            return
        try:
            for member in members:
                member.process.kill()
            for member in members:
                member.process.join()
                member.process.close()
                member.jobs.close()
                member.side.close()
        finally:  # a Ctrl-C that comes while they end, most of all
            shutil.rmtree(self.folder, ignore_errors=True)
            CREWS.discard(self)

    def mine(self) -> bool:
        """Whether this process made it, and not one of which this is a forked copy."""
        return self._owner == os.getpid()

    def _end(self, ranks: Sequence[int]) -> None:
        self._left = True
        for rank in ranks:
            self.members[rank].process.kill()

    def _kill_members(self) -> None:
        with contextlib.suppress(ValueError):  # put away by another thread just now
            for member in self.members:
                member.process.kill()


def _sad_story(reply: Reply | None) -> str:
    if reply is None:
        return "silent"
    body: Any = reply.body
    return f"exit code {body}" if reply.kind == "died" else f"{body[0]}: {body[1]}"


def _context() -> Any:
    """Fork server if there is one: a process that has imported torch, started nothing, and forks the ranks."""
    if "forkserver" in multiprocessing.get_all_start_methods():
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*PRELOAD, *(name for name in PRELOAD_IF_USED if name in sys.modules)])
        # Not ours in a forked copy (ChildProcessError); a long TMPDIR makes its socket's path too long (OSError).
        with _without_chatter(), contextlib.suppress(OSError):
            resource_tracker.ensure_running()  # which lifts the mask of signals: not while the server starts
            with deaf():
                forkserver.ensure_running()
            return context
    return multiprocessing.get_context("spawn")


def prepare() -> None:
    """Have the fork server start, if there is one, and do not wait until it has imported torch."""
    _context()


def environ(ranks: int) -> dict[str, str]:
    """The environment that ranks share: gloo and NCCL are bound to the loopback interface."""
    home = next((name for _, name in socket.if_nameindex() if re.fullmatch(r"lo\d*|loopback.*", name)), None)
    if home is None:
        raise errors.PoolDidNotStart("Pool.call", ranks, "this machine has no loopback interface")
    if not _loops_back():  # a store would try to connect for minutes
        raise errors.PoolDidNotStart("Pool.call", ranks, "the loopback interface of this machine is down")
    own = {"GLOO_SOCKET_IFNAME": home, "NCCL_SOCKET_IFNAME": home, "WORLD_SIZE": str(ranks)}
    return {"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ, **own}


def _loops_back() -> bool:
    """Whether there is a way to 127.0.0.1; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as there:
        try:
            there.connect(("127.0.0.1", 9))
        except OSError:
            return False
    return True


@contextlib.contextmanager
def deaf() -> Iterator[None]:
    """Children that start now do not hear Ctrl-C from their first moment on: it is ours, and we end them."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def tidy() -> Iterator[None]:
    """While inside, SIGTERM ends this process as ever, but first the ranks and what is theirs.

    Where somebody heeds it, it stays his.  For no longer than the main thread waits for ranks: elsewhere a handler of
    Python's would make SIGTERM wait for what is computed.
    """
    free = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if free:
        signal.signal(signal.SIGTERM, _terminated)
    try:
        yield
    finally:
        if free and signal.getsignal(signal.SIGTERM) is _terminated:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _terminated(number: int, frame: FrameType | None) -> None:
    crews = [crew for crew in CREWS if crew.mine()]
    for crew in crews:
        crew.kill()
    if crews and (its := getattr(multiprocessing.process.current_process(), "_config", {}).get("tempdir")):
        shutil.rmtree(its, ignore_errors=True)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


@contextlib.contextmanager
def _without_chatter() -> Iterator[None]:
    """Children that start now load torch with its C++ warnings off: it reads the level once, when loaded."""
    if "TORCH_CPP_LOG_LEVEL" in os.environ:
        yield
        return
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    try:
        yield
    finally:
        os.environ.pop("TORCH_CPP_LOG_LEVEL", None)
