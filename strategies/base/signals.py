"""Ctrl-C and SIGTERM: a command ends at any moment with one sentence, nothing half-written, and nobody left.

Python's own way, an exception between any two steps, goes astray: in an import, a destructor, a callback from C++,
another clean-up.  So a signal ends the process at once, and what that would leave lying is in `LEFT`, to be put away
first.  All else is made to be left: a journal is whole to its last line, workers and ranks end with their parent.
Where somebody has to be told, an executor of the user's or his own program, the first signal is an exception
(`gently`), and the second, or too long a way out, ends it.  What must be done whole, or not at all, is `held`.

The state is here, not in `localtensor/_util/ambient.py`: a handler has to be there before anything else is imported.

Private parts of CPython, which have no public twin; read on 3.10, 3.11, 3.12 and 3.13; without them more is left lying:

| part | for what |
|---|---|
| `multiprocessing.process._current_process._config["tempdir"]` | the folder of the fork server's socket |
| `multiprocessing.resource_tracker._resource_tracker._pid` | the child that ends by itself and cleans up |
"""

from __future__ import annotations

import _thread  # not threading: its locks may be in the hands of whom we interrupt
import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

LAST = 5.0
"""Seconds for Python's own end, which waits for threads and children."""
PATIENCE = 20.0
"""Seconds for the way out of what is stopped gently: rank threads that do not obey take two times five."""
NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
LEFT: dict[str, Callable[[str], object]] = {}
"""Paths that must not stay, each with what removes it; and "terminal", to show its cursor."""


class _Now:
    owner = 0  # the process that watches; a copy of it must not speak
    more = ""  # what the sentence ends with
    came = 0  # the signal
    gentle = 0
    held = 0
    said = False


def watch() -> None:
    """From here on SIGINT and SIGTERM are ours, unless whoever started us had them ignored.  In the main thread only."""
    if _Now.owner:
        return
    _Now.owner = os.getpid()
    for number in NAMES:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _signalled)
    if hasattr(os, "register_at_fork"):  # not on Windows, where nobody forks
        os.register_at_fork(after_in_child=_leave_alone)
    before = sys.unraisablehook

    def hook(lost: Any) -> None:
        if _Now.came and issubclass(lost.exc_type, KeyboardInterrupt):  # raised where nobody can catch it
            _end(_Now.came)
        before(lost)

    sys.unraisablehook = hook


def say(more: str) -> None:
    """What the sentence says from here on, after "stopped by Ctrl-C"."""
    _Now.more = more


def came() -> int:
    """The signal that has come, or 0."""
    return _Now.came


def check() -> None:
    """Raises KeyboardInterrupt if one was raised before, and somebody took it for his own."""
    if _Now.came and _Now.gentle:
        raise KeyboardInterrupt


def sentence(number: int = 0) -> str:
    """What is said to whoever stopped it, once; "" after that."""
    said, _Now.said = _Now.said, True
    return "" if said else f"localtensor: stopped by {NAMES.get(number or signal.SIGINT)}{_Now.more}."  # type: ignore[call-overload]


def begin(more: str) -> None:
    """Work begins, of which this is to be said."""
    _Now.more, _Now.said, _Now.came = more, False, 0


@contextlib.contextmanager
def gently() -> Iterator[None]:
    """While inside, the first signal is a KeyboardInterrupt."""
    _Now.gentle += 1
    try:
        yield
    finally:
        _Now.gentle -= 1
        if _Now.came and not isinstance(sys.exc_info()[1], KeyboardInterrupt):  # it became something else on the way
            raise KeyboardInterrupt from None


@contextlib.contextmanager
def held() -> Iterator[None]:
    """While inside, the first signal waits; the second does not."""
    _Now.held += 1
    try:
        yield
    finally:
        _Now.held -= 1
    if _Now.came and not _Now.held:
        if not _Now.gentle:
            _end(_Now.came)
        raise KeyboardInterrupt


def _signalled(number: int, frame: FrameType | None) -> None:
    again, _Now.came = _Now.came, number
    if again or not (_Now.gentle or _Now.held):
        _end(number)
    if _Now.gentle:
        _later(number, PATIENCE)
    if not _Now.held:
        raise KeyboardInterrupt


def _later(number: int, seconds: float) -> None:
    """End after so many seconds, whatever goes on then.

    Returns when that thread has begun: CPython frees at its end what a thread's first step needs, and does not wait.
    """
    begun = _thread.allocate_lock()
    begun.acquire()
    _thread.start_new_thread(_give_up, (number, seconds, begun))
    begun.acquire(timeout=1)


def _give_up(number: int, seconds: float, begun: _thread.LockType) -> None:
    begun.release()
    time.sleep(seconds)
    _end(number)


def soon() -> None:
    """It was stopped, and that was said: what Python does last is not waited for long."""
    if _Now.owner == os.getpid():
        _later(_Now.came or signal.SIGINT, LAST)


def _end(number: int) -> None:
    """Put away what must not stay, and be gone.  No lock is taken, and no stream flushed: anything may be under way."""
    for pid in _children():
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    for path, remove in [*LEFT.items(), *((folder, _tree) for folder in _folders())]:
        with contextlib.suppress(OSError):
            remove(path)
    with contextlib.suppress(OSError):
        if text := sentence(number):
            os.write(2, f"{text}\n".encode(errors="replace"))
    os._exit(128 + number)


def _folders() -> list[str]:
    """Of real ranks, which have not begun perhaps: those that have remove it themselves; and Python's, of a fork server."""
    found = [crew.folder for crew in list(getattr(sys.modules.get("localtensor.processes.worker_group"), "CREWS", ()))]
    process = getattr(sys.modules.get("multiprocessing.process"), "_current_process", None)
    its = getattr(process, "_config", {}).get("tempdir")
    return [*found, its] if its else found


def _tree(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _children() -> list[int]:
    """Our child processes, as far as the system tells; not Python's resource tracker, which ends with us and cleans up.

    Its fork server would end too, but not before it has imported all that it was told to.
    """
    tracker = getattr(sys.modules.get("multiprocessing.resource_tracker"), "_resource_tracker", None)
    own = getattr(tracker, "_pid", None)
    found = []
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                pid = int(name)
                with open(f"/proc/{pid}/stat", "rb") as file:
                    parent = int(file.read().rpartition(b")")[2].split()[1])
                if parent == os.getpid() and pid != own:
                    found.append(pid)
    return found


def _leave_alone() -> None:
    """A copy of this process dies of a signal, in silence."""
    for number in NAMES:
        if signal.getsignal(number) is _signalled:
            signal.signal(number, signal.SIG_DFL)
