"""Units of work in processes of their own: a native crash or a hang costs one unit, never the run.

Workers are forked, so that what the parent has imported (torch, OpInfo) is there at once; where
there is no fork they are spawned.  Results come back in the order of the units, whatever the order
in which workers finish, so that the same seed gives the same output.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import multiprocessing as mp
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Protocol

import torch

from localtensor._util import pickling
from localtensor.processes import deaf, end_with_parent

RETIRE = 200
"""Tasks after which a worker is replaced: torch's caches grow with every new op and shape."""
MEMORY = 2 << 30
"""Bytes that a worker may hold; what it has from its parent since the fork counts."""
LATE = "no answer within"
"""How the reason begins where a worker was silent for too long."""
Note = Callable[[int], None]
"""Called by a unit to say how far it is; the last number is known even if the process dies."""
Work = Callable[[Any, Note], Any]


@dataclass(frozen=True, slots=True)
class Done:
    value: Any


@dataclass(frozen=True, slots=True)
class Failed:
    """The unit raised: an error of ours, with its traceback."""

    error: str
    trace: str


@dataclass(frozen=True, slots=True)
class Lost:
    """The process died, or did not answer in time; `noted` is the last number that it noted, or -1."""

    why: str
    noted: int


Answer = Done | Failed | Lost


class _Worker:
    """A process that does one unit at a time, over a pipe; what it notes is in memory that it shares with us."""

    def __init__(self, process: Any, pipe: Connection, noted: Any) -> None:
        self.process, self.pipe, self.noted = process, pipe, noted
        self.unit = -1
        self.done = 0
        self.since = 0.0
        self.seen = -1

    def give(self, unit: int, work: Work, task: Any) -> None:
        self.unit, self.since, self.seen, self.noted.value = unit, time.monotonic(), -1, -1
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it is gone: `take` says how
            self.pipe.send_bytes(pickling.dumps((work, task)))

    def take(self) -> Answer:
        self.done += 1
        try:
            return pickling.loads(self.pipe.recv_bytes())  # type: ignore[no-any-return]
        except (EOFError, ConnectionResetError):
            self.process.join(5)
            return Lost(death(self.process.exitcode), self.noted.value)

    def past(self, limit: float) -> str:
        """Why it is to be ended: nothing noted within the limit, or more memory than it may use; else empty."""
        now = time.monotonic()
        if self.noted.value != self.seen:
            self.since, self.seen = now, self.noted.value
        if now - self.since > limit:
            return f"{LATE} {limit:g} s"
        return f"it used more than {MEMORY >> 20} MiB" if own_memory(self.process.pid) > MEMORY else ""

    def serves(self) -> bool:
        """Whether it may have another unit: not if it was ended, is due to retire, or somebody killed it meanwhile."""
        return not self.pipe.closed and self.done < RETIRE and self.process.is_alive()

    def kill(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join(5)
        self.pipe.close()


def death(code: int | None) -> str:
    if code is not None and code < 0:
        return f"the process died with {signal.Signals(-code).name}"
    return f"the process left with code {code}"


def _serve(pipe: Connection, noted: Any, parent: int) -> None:
    """A worker's life: one unit after another, until the parent closes the pipe."""
    end_with_parent(parent)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    mute()

    def note(number: int) -> None:
        noted.value = number

    while True:
        try:
            while not pipe.poll(1.0):  # a sibling may hold a copy of the other end: then no end of file tells us
                if os.getppid() != parent:
                    return
            work, task = pickling.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            sent = pickling.dumps(Done(work(task, note)))
        except Exception as error:  # why: the unit's own failure, sent home with its traceback and shown as Crashed
            sent = pickling.dumps(Failed(f"{type(error).__name__}: {error}", traceback.format_exc()))
        pipe.send_bytes(sent)


def mute() -> None:
    """malloc's and torch's last words go nowhere: the parent says in one sentence what happened."""
    if sys.stdout is not None:
        sys.stdout.flush()
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    os.dup2(sink, 2)


class WorkerPool:
    """At most so many workers, hired when there is work for them, kept from one `run` to the next.

    A CUDA context does not survive a fork, so with `cuda` the workers are spawned.
    """

    def __init__(self, workers: int, *, cuda: bool = False) -> None:
        self._forks = "fork" in mp.get_all_start_methods() and not cuda
        self._most = workers
        self._hands: list[_Worker] = []

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._hands:
            worker.process.kill()  # all at once: a process of this size takes a while to go
        for worker in self._hands:
            worker.kill()
        self._hands.clear()

    def run(
        self, work: Work, tasks: Sequence[Any], *, limit: float, tick: Callable[[int], None] | None = None
    ) -> Iterator[Answer]:
        """The answer to every task, in order.  `limit` is seconds between two notes; `tick` hears of each one done.

        `work` is a function that can be imported by name.  Whoever does not take all answers must
        leave the crew too, which leaves no process behind.
        """
        waiting = iter(range(len(tasks)))
        answers: dict[int, Answer] = {}
        given = 0
        self._hire(len(tasks))
        for at in range(len(self._hands)):
            self._next(at, waiting, work, tasks)
        while given < len(tasks):
            for at, answer in _finished(self._hands, limit):
                answers[self._hands[at].unit] = answer
                if isinstance(answer, Lost):
                    self._hands[at].kill()
                self._next(at, waiting, work, tasks)
                if tick:
                    tick(1)
            while given in answers:
                yield answers.pop(given)
                given += 1

    def _next(self, at: int, waiting: Iterator[int], work: Work, tasks: Sequence[Any]) -> None:
        """The worker of that number, or another in its place, has the next task, if there is one."""
        worker = self._hands[at]
        worker.unit = -1
        unit = next(waiting, -1)
        if unit < 0:
            return
        if not worker.serves():
            worker.kill()
            worker = self._hands[at] = self._worker()
        worker.give(unit, work, tasks[unit])

    def _hire(self, tasks: int) -> None:
        if self._forks:
            gc.freeze()  # what is there by now is shared: a child's collector must not write to it
        while len(self._hands) < min(self._most, tasks):
            self._hands.append(self._worker())

    def _worker(self) -> _Worker:
        context: Any = mp.get_context("fork" if self._forks else "spawn")
        noted = context.RawValue("q", -1)
        pipe, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, noted, os.getpid()), daemon=True)
        process.start()
        theirs.close()
        return _Worker(process, pipe, noted)


def run(
    work: Work, tasks: Sequence[Any], *, workers: int, limit: float, tick: Callable[[int], None] | None = None
) -> Iterator[Answer]:
    """As `WorkerPool.run`, with a pool that is there for this call alone."""
    with WorkerPool(workers) as crew:
        yield from crew.run(work, tasks, limit=limit, tick=tick)


def _finished(crew: Sequence[_Worker], limit: float) -> list[tuple[int, Answer]]:
    """What has come back by now, or within a quarter of a second; tasks past their limit are lost."""
    busy: dict[Any, int] = {worker.pipe: at for at, worker in enumerate(crew) if worker.unit >= 0}
    finished = [(busy[pipe], crew[busy[pipe]].take()) for pipe in wait(list(busy), timeout=0.25)]
    known = {at for at, _ in finished}
    for at, worker in enumerate(crew):
        if at not in known and worker.unit >= 0 and (why := worker.past(limit)):
            finished.append((at, Lost(why, worker.noted.value)))
    return finished


def own_memory(pid: int | None) -> int:
    """Bytes of memory that no file backs, as far as they are resident; 0 where the system does not tell."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            resident, shared = map(int, file.read().split()[1:3])
    except OSError:
        return 0
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


class Sealed(WorkerPool):
    """A crew of one that any process may have, in any thread; `path` is what its worker is to find modules by.

    A process with threads, or one that may have no children of multiprocessing's, must not fork or spawn.  Here the
    worker is a fresh Python, as it is wanted inside the workers of somebody's executor.
    """

    def __init__(self, path: Sequence[str] = ()) -> None:
        super().__init__(1)
        self._forks = False
        self._path = tuple(path)

    def _worker(self) -> _Worker:
        pipe, theirs = mp.Pipe()
        with tempfile.TemporaryFile() as file, theirs, deaf():
            file.write(b"\xff" * ctypes.sizeof(ctypes.c_longlong))  # -1, and the place for it is there
            file.flush()
            shared = theirs.fileno(), file.fileno()
            process = _Fresh(
                [sys.executable, "-c", _FRESH, *map(str, shared), str(os.getpid())], pass_fds=shared,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([*self._path, *sys.path])},
            )  # fmt: skip
            noted = _mapped(file.fileno())
        with contextlib.suppress(EOFError, OSError):  # it is gone: `take` says how
            pipe.recv_bytes()  # it has imported torch: from here on the clock of a task runs
        return _Worker(process, pipe, noted)


class _Fresh(subprocess.Popen[bytes]):
    """A child with the methods of multiprocessing's own."""

    @property
    def exitcode(self) -> int | None:
        return self.poll()

    def is_alive(self) -> bool:
        return self.poll() is None

    def join(self, timeout: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(timeout)


_FRESH = "import sys; from strategies.base.worker_pool import fresh; fresh(*map(int, sys.argv[1:]))"


def fresh(pipe: int, noted: int, parent: int) -> None:
    """What a fresh Python does."""
    os.set_inheritable(pipe, False)
    ours = Connection(pipe)
    ours.send_bytes(b"")
    _serve(ours, _mapped(noted), parent)


def _mapped(file: int) -> ctypes.c_longlong:
    """The number in that file, shared by all who have it."""
    return ctypes.c_longlong.from_buffer(mmap.mmap(file, ctypes.sizeof(ctypes.c_longlong)))


def serve(sent: bytes) -> bytes:
    """What an executor's worker is given: tasks for one function.  Sends back all answers; a crash costs one task."""
    work, tasks, limit, path = pickling.loads(sent)
    with Sealed(path) as sealed:
        return pickling.dumps(list(sealed.run(work, tasks, limit=limit)))


class Workers(Protocol):
    """Who does the work: a `WorkerPool`, or somebody's executor."""

    def __enter__(self) -> Workers: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...

    def run(
        self, work: Work, tasks: Sequence[Any], *, limit: float, tick: Callable[[int], None] | None = None
    ) -> Iterator[Answer]: ...
