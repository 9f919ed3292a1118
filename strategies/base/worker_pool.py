"""Units of work in processes of their own: a native crash or a hang costs one unit, never the run.

Workers are forked, so that what the parent has imported (torch, OpInfo) is there at once; where
there is no fork they are spawned.  Results come back in the order of the units, whatever the order
in which workers finish, so that the same seed gives the same output.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing as mp
import os
import selectors
import signal
import struct
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import IO, Any, Protocol

import torch

from localtensor._util import pickling

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
    def __init__(self, context: Any) -> None:
        self.noted = context.RawValue("q", -1)
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, self.noted), daemon=True)
        self.process.start()
        theirs.close()
        self.unit = -1
        self.done = 0
        self.since = 0.0
        self.seen = -1

    def give(self, unit: int, work: Work, task: Any) -> None:
        self.unit, self.since, self.seen, self.noted.value = unit, time.monotonic(), -1, -1
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it is gone: `take` says how
            self.pipe.send_bytes(pickling.dumps((work, task)))

    def take(self) -> Answer:
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

    def kill(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join(5)
        self.pipe.close()


def death(code: int | None) -> str:
    if code is not None and code < 0:
        return f"the process died with {signal.Signals(-code).name}"
    return f"the process left with code {code}"


def _serve(pipe: Connection, noted: Any) -> None:
    """A worker's life: one unit after another, until the parent closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    _end_with_parent()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    mute()

    def note(number: int) -> None:
        noted.value = number

    parent = mp.parent_process()
    while True:
        try:
            while not pipe.poll(1.0):  # a sibling may hold a copy of the other end: then no end of file tells us
                if parent is not None and os.getppid() != parent.pid:
                    return
            work, task = pickling.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            sent = pickling.dumps(Done(work(task, note)))
        except Exception as error:  # why: the unit's own failure, sent home with its traceback and shown as Crashed
            sent = pickling.dumps(Failed(f"{type(error).__name__}: {error}", traceback.format_exc()))
        pipe.send_bytes(sent)


def _end_with_parent() -> None:
    """On Linux the system ends this process with its parent, even where it hangs in native code.

    With the thread that forked it, to be exact: a crew lives and ends in one thread.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PDEATHSIG, signal.SIGKILL)


_PDEATHSIG = 1
"""PR_SET_PDEATHSIG, prctl(2)."""


def mute() -> None:
    """malloc's and torch's last words go nowhere: the parent says in one sentence what happened."""
    if sys.stdout is not None:
        sys.stdout.flush()
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    os.dup2(sink, 2)


class Crew:
    """At most so many workers, hired when there is work for them, kept from one `run` to the next.

    A CUDA context does not survive a fork, so with `cuda` the workers are spawned.
    """

    def __init__(self, workers: int, *, cuda: bool = False) -> None:
        forks = "fork" in mp.get_all_start_methods() and not cuda
        self._context = mp.get_context("fork" if forks else "spawn")
        self._most = workers
        self._hands: list[_Worker] = []

    def __enter__(self) -> Crew:
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
        told = 0
        self._hire(len(tasks))
        for at in range(len(self._hands)):
            _next(self._living(at), waiting, work, tasks)
        while told < len(tasks):
            for at, answer in _heard(self._hands, limit):
                answers[self._hands[at].unit] = answer
                self._hands[at].done += 1
                if isinstance(answer, Lost) or self._hands[at].done >= RETIRE:
                    self._replace(at)
                _next(self._living(at), waiting, work, tasks)
                if tick:
                    tick(1)
            while told in answers:
                yield answers.pop(told)
                told += 1

    def _living(self, at: int) -> _Worker:
        """The worker of that number, or another in its place: somebody may have killed it while it was idle."""
        if not self._hands[at].process.is_alive():
            self._replace(at)
        return self._hands[at]

    def _replace(self, at: int) -> None:
        self._hands[at].kill()
        self._hands[at] = _Worker(self._context)

    def _hire(self, tasks: int) -> None:
        gc.freeze()  # what is there by now is shared: a child's collector must not write to it
        while len(self._hands) < min(self._most, tasks):
            self._hands.append(_Worker(self._context))


def run(
    work: Work, tasks: Sequence[Any], *, workers: int, limit: float, tick: Callable[[int], None] | None = None
) -> Iterator[Answer]:
    """As `Crew.run`, with a crew that is there for this call alone."""
    with Crew(workers) as crew:
        yield from crew.run(work, tasks, limit=limit, tick=tick)


def _next(worker: _Worker, waiting: Iterator[int], work: Work, tasks: Sequence[Any]) -> None:
    unit = next(waiting, -1)
    worker.unit = -1
    if unit >= 0:
        worker.give(unit, work, tasks[unit])


def _heard(crew: Sequence[_Worker], limit: float) -> list[tuple[int, Answer]]:
    """What has come back by now, or within a quarter of a second; tasks past their limit are lost."""
    busy = {worker.pipe: at for at, worker in enumerate(crew) if worker.unit >= 0}
    heard = [(busy[pipe], crew[busy[pipe]].take()) for pipe in wait(list(busy), timeout=0.25)]
    known = {at for at, _ in heard}
    for at, worker in enumerate(crew):
        if at not in known and worker.unit >= 0 and (why := worker.past(limit)):
            heard.append((at, Lost(why, worker.noted.value)))
    return heard


def own_memory(pid: int | None) -> int:
    """Bytes of memory that no file backs, as far as they are resident; 0 where the system does not tell."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            resident, shared = map(int, file.read().split()[1:3])
    except OSError:
        return 0
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


# A worker that any process may have, in any thread: one child over two pipes, replaced when it dies.
#
# `workers` forks, which a process with threads, or one that may have no children of its own, must not do.  Here the
# child is a fresh Python (`python -m strategies.base.worker_pool`), as it is wanted inside the workers of somebody's executor.

_SIZE = struct.Struct("!Bq")
_NOTE, _ANSWER = 0, 1
BRIEF = 0.25
"""Seconds between two looks at a child that is silent."""


class Sealed:
    """One child process, started at the first task; `path` is what it is to find modules by."""

    def __init__(self, path: Sequence[str] = ()) -> None:
        self._path = tuple(path)
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Sealed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def run(self, work: Work, tasks: Sequence[Any], limit: float) -> Iterator[Answer]:
        """The answer to each task, in order.  `limit` is seconds between two notes, the child's start apart."""
        for task in tasks:
            answer = self._one(pickling.dumps((work, task)), limit)
            if isinstance(answer, Lost):
                self._end()
            yield answer

    def _one(self, sent: bytes, limit: float) -> Answer:
        if self._child is not None and self._child.poll() is not None:  # somebody killed it while it was idle
            self._end()
        child = self._child = self._child or _started(self._path)
        if child.stdin is None or child.stdout is None:
            raise RuntimeError("a child without pipes")
        try:
            left = memoryview(_SIZE.pack(_ANSWER, len(sent)) + sent)
            while left:
                left = left[child.stdin.write(left) :]
        except BrokenPipeError:
            return Lost(death(child.wait()), -1)
        noted, since = -1, time.monotonic()
        while True:
            why = _waited(child, since + limit, limit)
            if why:
                return Lost(why, noted)
            head = _exactly(child.stdout, _SIZE.size)
            if len(head) < _SIZE.size:
                return Lost(death(child.wait()), noted)
            kind, size = _SIZE.unpack(head)
            if kind == _NOTE:
                noted, since = size, time.monotonic()
                continue
            body = _exactly(child.stdout, size)
            return pickling.loads(body) if len(body) == size else Lost(death(child.wait()), noted)

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.communicate()


def _exactly(pipe: IO[bytes], size: int) -> bytes:
    """So many bytes, or fewer where the other end is closed.  The pipe has no buffer, so that one can wait for it."""
    parts = []
    while size and (part := pipe.read(size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _started(path: Sequence[str]) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*path, *sys.path])}
    child = subprocess.Popen(
        [sys.executable, "-m", "strategies.base.worker_pool"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env=environment, bufsize=0,
    )  # fmt: skip
    if child.stdout is not None:
        child.stdout.read(1)  # it has imported torch: from here on the clock of a task runs
    return child


def _waited(child: subprocess.Popen[bytes], end: float, limit: float) -> str:
    """Returns when the child has something to say: empty; or why nobody waits for it any longer."""
    with selectors.DefaultSelector() as ears:
        if child.stdout is not None:
            ears.register(child.stdout, selectors.EVENT_READ)
        while not ears.select(BRIEF):
            if time.monotonic() > end:
                return f"{LATE} {limit:g} s"
            if own_memory(child.pid) > MEMORY:
                return f"it used more than {MEMORY >> 20} MiB"
    return ""


def serve(sent: bytes) -> bytes:
    """What an executor's worker is given: tasks for one function.  Sends back all answers; a crash costs one task."""
    work, tasks, limit, path = pickling.loads(sent)
    with Sealed(path) as sealed:
        return pickling.dumps(list(sealed.run(work, tasks, limit)))


def _live(tasks: IO[bytes], answers: IO[bytes]) -> None:
    """The child: one task after another, until the parent closes the pipe."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    answers.write(b"!")
    answers.flush()

    def note(number: int) -> None:
        answers.write(_SIZE.pack(_NOTE, number))
        answers.flush()

    while len(head := tasks.read(_SIZE.size)) == _SIZE.size:
        work, task = pickling.loads(tasks.read(_SIZE.unpack(head)[1]))
        try:
            body = pickling.dumps(Done(work(task, note)))
        except Exception as error:  # why: the task's own failure, sent home with its traceback and shown as Crashed
            body = pickling.dumps(Failed(f"{type(error).__name__}: {error}", traceback.format_exc()))
        answers.write(_SIZE.pack(_ANSWER, len(body)) + body)
        answers.flush()


if __name__ == "__main__":
    pipes = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    mute()
    _live(*pipes)


class Hands(Protocol):
    """Who does the work: `workers.Crew`, or somebody's executor."""

    def __enter__(self) -> Hands: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...

    def run(
        self, work: Work, tasks: Sequence[Any], *, limit: float, tick: Callable[[int], None] | None = None
    ) -> Iterator[Answer]: ...
