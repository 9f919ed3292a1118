"""A worker that any process may have, in any thread: one child over two pipes, replaced when it dies.

`workers` forks, which a process with threads, or one that may have no children of its own, must not do.  Here the
child is a fresh Python (`python -m strategies.base.subprocess_worker`), as it is wanted inside the workers of somebody's executor.
"""

from __future__ import annotations

import os
import selectors
import struct
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import IO, Any

import torch

from localtensor._util import pickling as wire
from strategies.base.worker_pool import LATE, MEMORY, Answer, Done, Failed, Lost, Work, death, mute, own_memory

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
            answer = self._one(wire.dumps((work, task)), limit)
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
            return wire.loads(body) if len(body) == size else Lost(death(child.wait()), noted)

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
        [sys.executable, "-m", "strategies.base.subprocess_worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
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
    work, tasks, limit, path = wire.loads(sent)
    with Sealed(path) as sealed:
        return wire.dumps(list(sealed.run(work, tasks, limit)))


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
        work, task = wire.loads(tasks.read(_SIZE.unpack(head)[1]))
        try:
            body = wire.dumps(Done(work(task, note)))
        except Exception as error:  # why: the task's own failure, sent home with its traceback and shown as Crashed
            body = wire.dumps(Failed(f"{type(error).__name__}: {error}", traceback.format_exc()))
        answers.write(_SIZE.pack(_ANSWER, len(body)) + body)
        answers.flush()


if __name__ == "__main__":
    pipes = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    mute()
    _live(*pipes)
