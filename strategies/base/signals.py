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
import errno
import logging
import os
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import typer
from rich.console import Console

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


# How every command ends: its exit code, and what is said after Ctrl-C or after an error of ours.

CLEAN, WRONG, USAGE, NOTHING, INTERRUPTED = 0, 1, 2, 3, 130


def leave(work: Callable[[], int], more: str = "") -> None:
    """End with the exit code of the work: 130 after Ctrl-C, 143 after SIGTERM, 3 after an error of ours.

    `more` is said to whoever stopped it (see `stopping.say`).
    """
    begin(more)
    try:
        code = work()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Exception as error:  # why: exit code 1 means a wrong rule, so our own failure must not leave with Python's 1
        code = INTERRUPTED if came() else NOTHING
        if code == NOTHING and (lacking := _lacking(error)):
            complain(f"localtensor: {lacking}; this says nothing about any rule.")
        elif code == NOTHING:
            complain(traceback.format_exc())
            complain("localtensor itself failed, as shown above; this says nothing about any rule.")
    if code == INTERRUPTED and (said := sentence(came())):
        complain(said)
        soon()
    raise typer.Exit(128 + came() if code == INTERRUPTED and came() else code)


def complain(text: str) -> None:
    """Write it to standard error, as far as that takes it: where it does not, the exit code has to do."""
    with contextlib.suppress(OSError):
        typer.echo(text, err=True)


def _lacking(error: Exception) -> str:
    """What is not there to work with, if that is what the machine says; else ""."""
    if isinstance(error, MemoryError):
        return "the machine has no room for this: memory"
    if isinstance(error, OSError) and error.errno in SHORT:
        return f"the machine has no room for this: {error.strerror}"
    if isinstance(error, FileNotFoundError):
        try:
            os.getcwd()
        except FileNotFoundError:
            return "the working folder is not there any longer, change to another"
    return ""


SHORT = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
"""Errors that mean: the machine has too little of something."""


def open_streams() -> None:
    """Standard streams that whoever started us has closed lead nowhere: else a file of ours would take their place."""
    for at, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(at)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free: this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(at, mode, errors="replace", closefd=False))  # noqa: SIM115  # for as long as we live


def wrote(text: str) -> str:
    """Write it to standard output, if there is one; why it could not be written, or "".

    Nobody reading any longer, as after `| head`, is no fault.
    """
    return _out(lambda: sys.stdout.write(text))


def printed(show: Callable[[Console], None]) -> str:
    """As `wrote`, of what `show` prints on a console: 140 columns wide where there is no terminal."""
    return _out(lambda: show(_Pipe(width=None if sys.stdout.isatty() else 140, soft_wrap=False, emoji=False)))


def _out(write: Callable[[], object]) -> str:
    if sys.stdout is None:  # started with `>&-`: the exit code, and the files, are all that is wanted
        return ""
    try:
        write()
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            return f"cannot write to standard output: {error.strerror}."
    return ""


class _Pipe(Console):
    """rich leaves with exit code 1 when nobody reads any longer; here 1 means a wrong rule."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def many(workers: int | None) -> int:
    """How many worker processes: one for each core, if nobody says otherwise."""
    return workers if workers is not None else os.cpu_count() or 1


# A process without torch's noise, for a while: around one call that may be refused, or around a whole command.


@contextlib.contextmanager
def quiet(level: int = logging.CRITICAL) -> Iterator[None]:
    """While inside, no warning is heard, and no log up to this level.

    Torch logs every refusal and every submesh that might have been flattened: these are answers here.
    """
    before = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(level)
        try:
            yield
        finally:
            logging.disable(before)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """What a command that judges does to its process: errors alone are logged, and torch computes on one thread.

    One thread: the tensors are small, the workers many, and they are forked from here.  It is undone when the command
    ends, since others may run in the process, tests for example.
    """
    import torch  # not above: `--help` does without it

    threads = torch.get_num_threads()
    with quiet(logging.WARNING):
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
