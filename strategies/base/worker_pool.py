"""Tasks in separate processes: a native crash or a hang loses one task, never the run.

Workers are forked, so that the parent's imports (torch, OpInfo) are available at once; on systems without fork they are
spawned. Results are in the order of the tasks, whatever the order in which workers finish, so that the output depends
on the seed only.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import multiprocessing as mp
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Protocol

import torch

from localtensor._util import pickling
from localtensor.processes import end_with_parent, is_late, processor_time, sigint_blocked, signal_name

MOST_TASKS_PER_WORKER = 200
"""Tasks after which a worker is replaced: torch's caches grow with every new op and shape."""
MEMORY = 2 << 30
"""Bytes that a worker may hold, including what it shares with its parent since the fork."""
GPU_MEMORY = 4 << 30
"""Bytes more for a worker with a GPU: CUDA's libraries keep so much on the host."""
GPU_LOST = 86
"""The exit code of a worker whose GPU serves it no more."""
TIMED_OUT = "no answer within"
"""The start of the reason for a worker that timed out."""
ProgressNote = Callable[[int], None]
"""Reports the progress of a task as a number; the last one is known even if the process dies."""
Work = Callable[[Any, ProgressNote], Any]


@dataclass(frozen=True, slots=True)
class TaskDone:
    """What the task returned, and the seconds of processor time that it took in its worker."""

    value: Any
    seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class TaskFailed:
    """The task raised: an error of ours, with its traceback."""

    error: str
    trace: str


@dataclass(frozen=True, slots=True)
class TaskLost:
    """The process died, or timed out; `noted` is the last number that it reported, or -1."""

    why: str
    noted: int


TaskAnswer = TaskDone | TaskFailed | TaskLost
Tick = Callable[[int], None]
Again = Callable[[int, TaskLost], Any]
"""The task to run in place of the lost one of this number; None if there is none."""
Arrived = Callable[[int, TaskAnswer], None]
"""Gets the answer to the task of this number when it comes, which may be long before those to earlier tasks."""


class _Worker:
    """A process that runs one task at a time, over a pipe; its progress number is in shared memory."""

    def __init__(self, process: BaseProcess | _PopenProcess, pipe: Connection, noted: ctypes.c_longlong) -> None:
        self.process, self.pipe, self.noted = process, pipe, noted
        self.more_memory = 0
        self.unit = -1
        self.done = 0
        self.since, self.spent = 0.0, 0.0
        self.seen = -1

    def give(self, unit: int, work: Work, task: object) -> None:
        self.unit, self.since, self.seen, self.noted.value = unit, time.monotonic(), -1, -1
        self.spent = processor_time(self.process.pid)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it is gone: `take` says how
            self.pipe.send_bytes(pickling.dumps((work, task)))

    def take(self) -> TaskAnswer:
        self.done += 1
        try:
            return pickling.loads(self.pipe.recv_bytes())  # type: ignore[no-any-return]
        except (EOFError, ConnectionResetError):
            self.process.join(5)
            return TaskLost(exit_reason(self.process.exitcode), self.noted.value)

    def past(self, limit: float) -> str:
        """The reason to end it: no progress within the limit, or too much memory; else empty."""
        now = time.monotonic()
        if self.noted.value != self.seen:
            self.since, self.seen, self.spent = now, self.noted.value, processor_time(self.process.pid)
        if now - self.since > limit and is_late(now - self.since, processor_time(self.process.pid) - self.spent, limit):
            return f"{TIMED_OUT} {limit:g} s"
        most = MEMORY + self.more_memory
        return f"it used more than {most >> 20} MiB" if private_memory(self.process.pid) > most else ""

    def serves(self) -> bool:
        """Whether it can take another task: not if it is dead or due to retire."""
        return not self.pipe.closed and self.done < MOST_TASKS_PER_WORKER and self.process.is_alive()

    def kill(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join(5)
        self.pipe.close()


def exit_reason(code: int | None) -> str:
    if code == GPU_LOST:
        return "a kernel failed on the GPU (an index out of bounds, say), which then serves its process no more"
    if code is not None and code < 0:
        return f"the process died with {signal_name(-code)}"
    return f"the process left with code {code}"


def _worker_loop(pipe: Connection, noted: ctypes.c_longlong, parent: int) -> None:
    """The loop of a worker: one task after another, until the parent closes the pipe."""
    end_with_parent(parent)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    silence_output()

    def note(number: int) -> None:
        _leave_if_gpu_is_lost()
        noted.value = number

    while True:
        try:
            while not pipe.poll(1.0):  # a sibling may hold a copy of the other end: then no end of file tells us
                if os.getppid() != parent:
                    return
            work, task = pickling.loads(pipe.recv_bytes())
        except EOFError:
            return
        begun = time.process_time()
        try:
            value = work(task, note)
            _leave_if_gpu_is_lost()
            sent = pickling.dumps(TaskDone(value, time.process_time() - begun))
        except Exception as error:  # why: the unit's own failure, sent home with its traceback and shown as Crashed
            sent = pickling.dumps(TaskFailed(f"{type(error).__name__}: {error}", traceback.format_exc()))
        pipe.send_bytes(sent)


def _leave_if_gpu_is_lost() -> None:
    """End this process where a kernel has failed: all further calls on its GPU would fail, too, and be taken for crashes."""
    if torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            os._exit(GPU_LOST)


def silence_output() -> None:
    """Redirects the last output of malloc and torch to the null device: the parent reports a crash in one line."""
    if sys.stdout is not None:
        sys.stdout.flush()
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    os.dup2(sink, 2)


class WorkerPool:
    """At most so many workers, started when there is work for them, and kept from one `run_tasks` to the next.

    A CUDA context does not survive a fork, so with `cuda` the workers are spawned.
    """

    def __init__(self, workers: int, *, cuda: bool = False) -> None:
        self._forks = "fork" in mp.get_all_start_methods() and not cuda
        self._more_memory = GPU_MEMORY if cuda else 0
        self._limit = workers
        self._frozen = gc.get_freeze_count() > 0  # by other code, which unfreezes it
        self._workers: list[_Worker] = []
        self._tasks: Sequence[Any] = ()

    @property
    def running(self) -> list[Any]:
        """The tasks at work."""
        return [self._tasks[worker.unit] for worker in self._workers if 0 <= worker.unit < len(self._tasks)]

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.process.kill()  # all at once: a process of this size takes a while to go
        for worker in self._workers:
            worker.kill()
        self._workers.clear()
        if "triton" in sys.modules and not self._frozen:  # it costs the interpreter a second at its end
            gc.unfreeze()  # else cycles outlive the interpreter, and triton lists its part of them

    def run(
        self, work: Work, tasks: Sequence[Any], *, limit: float, tick: Tick | None = None, again: Again | None = None,
        arrived: Arrived | None = None,
    ) -> Iterator[TaskAnswer]:  # fmt: skip
        """The answer to every task, in order; `arrived` gets each as soon as it is there.

        `limit` is seconds between two progress reports; `tick` is called with 1 after each task, and with 0 several times
        a second, when `running` has the tasks at work. `work` is a function that can be imported by name. What `again` makes of a
        lost task is run in its place at once. A caller that does not take all answers must leave the pool's context, which ends all processes.
        """
        self._tasks = tasks = list(tasks)
        waiting = iter(range(len(tasks)))
        answers: dict[int, TaskAnswer] = {}
        given = 0
        if self._forks:
            gc.freeze()  # what is there by now is shared: a child's collector must not write to it
        while len(self._workers) < min(self._limit, len(tasks)):
            self._workers.append(self._start_worker())
        for at in range(len(self._workers)):
            self._give_next(at, waiting, work, tasks)
        while given < len(tasks):
            for at, answer in _finished(self._workers, limit):
                unit = self._workers[at].unit
                if isinstance(answer, TaskLost):
                    self._workers[at].kill()
                    other = again(unit, answer) if again else None
                    if other is not None:
                        tasks[unit] = other
                        self._give_next(at, iter([unit]), work, tasks)
                        continue
                answers[unit] = answer
                if arrived:
                    arrived(unit, answer)
                self._give_next(at, waiting, work, tasks)
                if tick:
                    tick(1)
            if tick:
                tick(0)
            while given in answers:
                yield answers.pop(given)
                given += 1

    def _give_next(self, at: int, waiting: Iterator[int], work: Work, tasks: Sequence[Any]) -> None:
        """Gives the next task, if there is one, to the worker at this index, or to a replacement for it."""
        worker = self._workers[at]
        worker.unit = -1
        unit = next(waiting, -1)
        if unit < 0:
            return
        if not worker.serves():
            worker.kill()
            worker = self._workers[at] = self._start_worker()
        worker.give(unit, work, tasks[unit])

    def _start_worker(self) -> _Worker:
        context: Any = mp.get_context("fork" if self._forks else "spawn")
        noted = context.RawValue("q", -1)
        pipe, theirs = context.Pipe()
        process = context.Process(target=_worker_loop, args=(theirs, noted, os.getpid()), daemon=True)
        process.start()
        theirs.close()
        worker = _Worker(process, pipe, noted)
        worker.more_memory = self._more_memory
        return worker


def run_tasks(
    work: Work, tasks: Sequence[Any], *, workers: int, limit: float, tick: Tick | None = None
) -> Iterator[TaskAnswer]:
    """As `WorkerPool.run`, with a pool for this call only."""
    with WorkerPool(workers) as pool:
        yield from pool.run(work, tasks, limit=limit, tick=tick)


def _finished(workers: Sequence[_Worker], limit: float) -> list[tuple[int, TaskAnswer]]:
    """The answers available within a quarter of a second; tasks past their limit are lost."""
    busy: dict[Any, int] = {worker.pipe: at for at, worker in enumerate(workers) if worker.unit >= 0}
    finished = [(busy[pipe], workers[busy[pipe]].take()) for pipe in wait(list(busy), timeout=0.25)]
    known = {at for at, _ in finished}
    for at, worker in enumerate(workers):
        if at not in known and worker.unit >= 0 and (why := worker.past(limit)):
            finished.append((at, TaskLost(why, worker.noted.value)))
    return finished


def private_memory(pid: int | None) -> int:
    """Resident bytes that no file backs; 0 where the system does not report them."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            resident, shared = map(int, file.read().split()[1:3])
    except OSError:
        return 0
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


class SubprocessPool(WorkerPool):
    """A pool of one worker that any process may use, in any thread; `path` is its module search path.

    A process with threads, or a daemonic child of multiprocessing, must not fork or spawn. Here the worker is a new
    Python interpreter, for use inside the workers of a user's executor.
    """

    def __init__(self, path: Sequence[str] = ()) -> None:
        super().__init__(1)
        self._forks = False
        self._path = tuple(path)

    def _start_worker(self) -> _Worker:
        pipe, theirs = mp.Pipe()
        with tempfile.TemporaryFile() as file, theirs, sigint_blocked():
            file.write(b"\xff" * ctypes.sizeof(ctypes.c_longlong))  # -1, and the place for it is there
            file.flush()
            shared = theirs.fileno(), file.fileno()
            process = _PopenProcess(
                [sys.executable, "-c", _WORKER_SCRIPT, *map(str, shared), str(os.getpid())],
                pass_fds=shared,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([*self._path, *sys.path])},
            )
            noted = _shared_number(file.fileno())
        with contextlib.suppress(EOFError, OSError):  # it is gone: `take` says how
            pipe.recv_bytes()  # it has imported torch: from here on the clock of a task runs
        return _Worker(process, pipe, noted)


class _PopenProcess(subprocess.Popen[bytes]):
    """A subprocess with the interface of a multiprocessing process."""

    @property
    def exitcode(self) -> int | None:
        return self.poll()

    def is_alive(self) -> bool:
        return self.poll() is None

    def join(self, timeout: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(timeout)


_WORKER_SCRIPT = "import sys; from strategies.base.worker_pool import run_subprocess_worker; run_subprocess_worker(*map(int, sys.argv[1:]))"


def run_subprocess_worker(pipe: int, noted: int, parent: int) -> None:
    """The main function of the new interpreter."""
    os.set_inheritable(pipe, False)
    ours = Connection(pipe)
    ours.send_bytes(b"")
    _worker_loop(ours, _shared_number(noted), parent)


def _shared_number(file: int) -> ctypes.c_longlong:
    """The number in that file, shared by all processes that map it."""
    return ctypes.c_longlong.from_buffer(mmap.mmap(file, ctypes.sizeof(ctypes.c_longlong)))


def run_in_subprocess(sent: bytes) -> bytes:
    """The task of an executor's worker: many tasks of one function. Returns their answers; a crash loses one task."""
    work, tasks, limit, path = pickling.loads(sent)
    with SubprocessPool(path) as sealed:
        return pickling.dumps(list(sealed.run(work, tasks, limit=limit)))


class Workers(Protocol):
    """The interface of a pool: a `WorkerPool`, or a user's executor."""

    def __enter__(self) -> Workers: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...

    def run(
        self, work: Work, tasks: Sequence[Any], *, limit: float, tick: Tick | None = None, again: Again | None = None,
        arrived: Arrived | None = None,
    ) -> Iterator[TaskAnswer]: ...  # fmt: skip
