"""The parent's side of a process pool: worker processes that are started together and killed together.

Starting is cheap where there is a fork server: it has imported torch already, and new ranks connect within some 30 ms.

Private parts of CPython, without a public equivalent; read on 3.10 to 3.14; without the first a folder is left behind, without
the second `prepare(forked=True)` starts the server as a new interpreter, which imports torch once more:

| part | for what |
|---|---|
| `multiprocessing.process.current_process()._config["tempdir"]` | the folder of the fork server's socket |
| `multiprocessing.util.spawnv_passfds(executable, arguments, files)`, whose last argument is the server's program | starts the fork server |
"""

import atexit
import contextlib
import gc
import importlib
import multiprocessing
import multiprocessing.util
import os
import pickle
import shutil
import signal
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
from localtensor.processes.idleness import Idleness
from localtensor.processes.worker import FENCE, Reply, WorkerSpec, serve, worker_environment

START_LIMIT = 120.0  # seconds; the first import of torch from a cold disk is the slow case
FENCE_LIMIT = 1.0  # seconds; too short on a busy machine costs a restart, no more
PRELOAD = ("torch", "torch.distributed.tensor", "localtensor.processes.worker", "localtensor.processes.job")
WORKER_GROUPS: "set[WorkerGroup]" = set()  # all living groups: an immediate exit of this process removes their folders
# Imported once in the fork server, not in each rank, if this process has them: what test modules import, and what torch
# imports when DTensor is first used (with TORCHDYNAMO_* and TORCH_COMPILE_DISABLE as of the start of the server).
PRELOAD_IF_USED = ("pytest", "hypothesis", "torch._dynamo")


@dataclass(slots=True)
class _Worker:
    """One worker, seen from the parent."""

    process: BaseProcess
    jobs: Connection
    side: Connection
    pid: int

    def reply(self) -> Reply:
        """The next reply; of kind "died" if the process has ended without one."""
        try:
            if self.jobs.poll():
                reply: Reply = pickle.loads(self.jobs.recv_bytes())
                return reply
        except (EOFError, OSError):
            pass
        self.process.join(1)
        if self.process.exitcode is None:  # it closed its pipe but is alive
            self.process.kill()
            self.process.join(1)
        return Reply("died", self.process.exitcode)


class WorkerGroup:
    """Processes of one rank each, started together and killed together."""

    def __init__(self, ranks: int, backend: str) -> None:
        self.ranks, self.backend = ranks, backend
        self.members: list[_Worker] = []
        self.joined = False
        self._owner = os.getpid()
        # Mode 0700.  Not a TemporaryDirectory, whose forked copy would remove the folder when it ends.
        self.folder = tempfile.mkdtemp(prefix="localtensor-")
        WORKER_GROUPS.add(self)
        self._path: list[str] = []
        self._fence = False
        self._left = False  # whether returned ranks were killed before the others returned
        # Registered after multiprocessing's own hook, so it runs before that: it would join our processes.
        atexit.register(self.kill)

    def begin(self) -> None:
        """Start all processes; `join` waits for them.  Raises `PoolDidNotStart`."""
        context = self.context()
        if context.get_start_method() != "fork" and (program := _unreadable_program()):
            why = f"their `__main__` is {program}, which is no file that they can read"
            raise errors.PoolDidNotStart("Pool.call", self.ranks, why)
        shared = worker_environment(self.ranks)
        with _without_cpp_warnings():
            for rank in range(self.ranks):
                try:
                    with sigint_blocked():  # also: a Ctrl-C never finds a started process that is no member
                        self.members.append(self._start_worker(context, rank, shared))
                except (ConnectionError, EOFError) as error:  # the fork server ended, for example out of memory
                    why = f"rank {rank}: {type(error).__name__}: {error}"
                    raise errors.PoolDidNotStart("Pool.call", self.ranks, why) from error

    def join(self) -> None:
        """Return when all ranks have joined the group.  Raises `PoolDidNotStart`."""
        for rank, reply in enumerate(self.gather(time.monotonic() + START_LIMIT, grace=5.0)):
            if reply is None or reply.kind != "ready":
                raise errors.PoolDidNotStart("Pool.call", self.ranks, f"rank {rank}: {_startup_error(reply)}")
        self.joined = True

    def context(self) -> Any:
        """The multiprocessing context of the processes."""
        return _context()

    def task(
        self, spec: WorkerSpec, ends: Sequence[Connection]
    ) -> Callable[[WorkerSpec, Connection, Connection], None]:
        """The main function of a process; `ends` are the parent's ends of all pipes opened so far."""
        return serve

    def _start_worker(self, context: Any, rank: int, shared: dict[str, str]) -> _Worker:
        own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        spec = WorkerSpec(rank, self.ranks, self.backend, self.folder, own)
        jobs, their_jobs = context.Pipe()
        side, their_side = context.Pipe()
        ends = [end for member in self.members for end in (member.jobs, member.side)]
        task = self.task(spec, [*ends, jobs, side])
        process = context.Process(
            target=task, args=(spec, their_jobs, their_side), name=f"localtensor rank {rank}", daemon=True
        )
        process.start()
        their_jobs.close()
        their_side.close()
        return _Worker(process, jobs, side, process.pid)

    def call(
        self, jobs: Sequence[bytes], limit: float, grace: float, leave: float | None, idle: Idleness | None = None
    ) -> list[Reply]:
        """Each rank's reply to its job; of kind "waiting", with its current line, for a rank that does not reply."""
        deadline = time.monotonic() + limit
        self.send(jobs, limit)
        replies = self.gather(deadline, grace, leave, idle)
        silent = self.whereabouts([rank for rank, reply in enumerate(replies) if reply is None])
        return [reply or Reply("waiting", silent[rank]) for rank, reply in enumerate(replies)]

    def send(self, jobs: Sequence[bytes], limit: float) -> None:
        """Send every rank its job; if a process does not read a large one within `limit` seconds, all are killed."""
        path = None if self._path == sys.path else list(sys.path)
        self._path = list(sys.path)
        head = pickle.dumps(path, pickle.HIGHEST_PROTOCOL)
        large = max(map(len, jobs)) > 1 << 15
        alarm = threading.Timer(limit, self.kill_processes) if large else None
        if alarm:
            alarm.daemon = True
            alarm.start()
        try:
            for member, job in zip(self.members, jobs, strict=True):
                with contextlib.suppress(OSError):  # it died: `gather` reports it
                    member.jobs.send_bytes(head + job)
        finally:
            if alarm:
                alarm.cancel()

    def gather(
        self, deadline: float, grace: float, leave: float | None = None, idle: Idleness | None = None
    ) -> list[Reply | None]:
        """Each rank's reply; None for a rank that does not reply by `deadline`, or once `idle` is over.

        `leave` seconds after the last reply the ranks that have returned are killed: their peers get the backend's error.
        """
        got: dict[int, Reply] = {}
        if idle is not None:
            idle.begin([member.pid for member in self.members])
        while len(got) < self.ranks and (left := deadline - time.monotonic()) > 0:
            waits_on = leave is not None and not self._left and any(reply.kind == "returned" for reply in got.values())
            awaited: dict[Any, int] = {}
            for rank, member in enumerate(self.members):
                if rank not in got:
                    awaited[member.jobs] = awaited[member.process.sentinel] = rank
            pause = min(left, leave or left) if waits_on else left if idle is None else min(left, idle.pause)
            came = {awaited[ready] for ready in wait(list(awaited), pause)}
            if not came and idle is not None and idle.over():
                break
            if waits_on and not came:
                self._left = True
                for rank in [rank for rank, reply in got.items() if reply.kind == "returned"]:
                    self.members[rank].process.kill()
            for rank in came:
                got[rank] = self.members[rank].reply()
                if got[rank].kind in ("raised", "died", "no_function", "no_arguments"):
                    deadline = min(deadline, time.monotonic() + grace)
        return [got.get(rank) for rank in range(self.ranks)]

    def whereabouts(self, ranks: Sequence[int], patience: float = 0.5) -> dict[int, str]:
        """The current line of each of these ranks, or "unknown"."""
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

        It may if all ranks finished and began equally many operations (then a fence is started, which the next call
        checks), or if no rank began any.
        """
        present = [reply for reply in replies if reply.steps is not None]
        if self._left or len(present) < self.ranks or len({reply.steps for reply in present}) > 1:
            return False
        fences = [_calls_for_fence(reply) for reply in present]
        self._fence = all(fences)
        if self._fence:
            for member in self.members:
                with contextlib.suppress(OSError):  # it died since: `is_usable` reports it
                    member.jobs.send_bytes(FENCE)
        return self._fence or all(reply.steps and reply.steps[0] == reply.steps[1] for reply in present)

    def is_usable(self) -> bool:
        """Whether all ranks are alive, and the fence after the last call, if there was one, has held."""
        if not self.owned_here():
            return False
        if self._fence:
            self._fence = False
            fenced = self.gather(time.monotonic() + FENCE_LIMIT, grace=0)
            return all(reply is not None and reply.kind == "fenced" for reply in fenced)
        ends = [end for member in self.members for end in (member.jobs, member.process.sentinel)]
        return not wait(ends, 0)  # a pipe ends a moment before the fork server reports the death

    def kill(self) -> None:
        """Kill the processes and remove the files; does nothing in a forked copy of this process."""
        atexit.unregister(self.kill)
        members, self.members = self.members, []
        if not self.owned_here():
            WORKER_GROUPS.discard(self)
            return
        try:
            for member in members:
                member.process.kill()
            for member in members:
                member.process.join()  # not closed: a thread that starts a process polls all others
                member.jobs.close()
                member.side.close()
        finally:  # above all after a Ctrl-C while they end
            shutil.rmtree(self.folder, ignore_errors=True)
            WORKER_GROUPS.discard(self)

    def owned_here(self) -> bool:
        """Whether this process made the group, rather than a process of which this is a fork."""
        return self._owner == os.getpid()

    def kill_processes(self) -> None:
        """Kill the processes, and leave what belongs to them to the thread that waits for them."""
        for member in self.members:
            member.process.kill()


def _calls_for_fence(reply: Reply) -> bool:
    """Whether this job must be followed by a fence: it finished, and it used the default group."""
    return reply.kind in ("returned", "unsendable") and reply.steps is not None and reply.steps[0] != reply.steps[1]


def _unreadable_program() -> str:
    """The program of this process, if each worker would run it again and cannot: one from standard input; else empty."""
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    if not path or getattr(main, "__spec__", None) is not None:
        return ""
    return "" if os.path.exists(os.path.join(multiprocessing.process.ORIGINAL_DIR or "", path)) else str(path)  # type: ignore[attr-defined]


def _startup_error(reply: Reply | None) -> str:
    if reply is None:
        return "silent"
    body: Any = reply.body
    return f"exit code {body}" if reply.kind == "died" else f"{body[0]}: {body[1]}"


def _context(modules: Sequence[str] = ()) -> Any:
    """The fork server's context if there is one: a process that has imported torch and forks the ranks; else spawn.

    `modules` are imported there, too, if it is not running yet.
    """
    if "forkserver" in multiprocessing.get_all_start_methods():
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*PRELOAD, *(name for name in PRELOAD_IF_USED if name in sys.modules), *modules])
        # Not ours in a forked copy (ChildProcessError); a long TMPDIR makes its socket's path too long (OSError).
        with _without_cpp_warnings(), contextlib.suppress(OSError):
            resource_tracker.ensure_running()  # it resets the signal mask, so not while the server starts
            with sigint_blocked():
                forkserver.ensure_running()
            return context
    return multiprocessing.get_context("spawn")


def prepare(*modules: str, forked: bool = False) -> None:
    """Start the fork server, if there is one, without waiting until it has imported torch and these modules.

    `forked`: as a fork of this process, which imports them first; for a program of ours at its start, while it has one
    thread, and nothing of a user's is changed in it.
    """
    if not forked or threading.active_count() > 1 or "forkserver" not in multiprocessing.get_all_start_methods():
        _context(modules)
        return
    from localtensor._util.patching import replaced  # lazy: it imports torch, which a usage error does not wait for

    for name in PRELOAD:  # the server imports the others, beside this process
        importlib.import_module(name)
    resource_tracker.ensure_running()  # a new interpreter: the server alone is a fork
    with replaced(multiprocessing.util, "spawnv_passfds", _fork_of_this_process):
        _context(modules)


def _fork_of_this_process(executable: object, arguments: Sequence[Any], files: Sequence[int]) -> int:
    """Runs the program that is the last argument, with these files and the streams of this process; returns its pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        gc.freeze()  # the collector of the ranks must not write to what is shared
        before = 3
        for file in sorted(file for file in files if file > 2):
            os.closerange(before, file)
            before = file + 1
        os.closerange(before, os.sysconf("SC_OPEN_MAX"))
        sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        exec(str(arguments[-1]), {})  # noqa: S102  # CPython's own program of the server
    except SystemExit:
        code = 0
    finally:
        os._exit(code)


@contextlib.contextmanager
def sigint_blocked() -> Iterator[None]:
    """Inside the block SIGINT is blocked, so that processes started there ignore Ctrl-C from the start."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def ranks_end_on_sigterm() -> Iterator[None]:
    """Inside the block SIGTERM first ends the ranks and removes their files, then this process.

    A handler of the user's is left in place.  The block lasts only while the main thread waits for ranks: otherwise a
    Python handler would delay SIGTERM until the running native code returns.
    """
    free = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if free:
        signal.signal(signal.SIGTERM, _on_sigterm)
    try:
        yield
    finally:
        if free and signal.getsignal(signal.SIGTERM) is _on_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    groups = [group for group in WORKER_GROUPS if group.owned_here()]
    for group in groups:
        group.kill()
    if groups and (its := getattr(multiprocessing.process.current_process(), "_config", {}).get("tempdir")):
        shutil.rmtree(its, ignore_errors=True)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


@contextlib.contextmanager
def _without_cpp_warnings() -> Iterator[None]:
    """Processes started in the block load torch without C++ warnings: it reads the level once, when loaded."""
    if "TORCH_CPP_LOG_LEVEL" in os.environ:
        yield
        return
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    try:
        yield
    finally:
        os.environ.pop("TORCH_CPP_LOG_LEVEL", None)
