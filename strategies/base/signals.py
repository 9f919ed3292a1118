"""Ctrl-C and SIGTERM: a command can end at any moment with one message, without partial files or orphaned processes.

Python's default, an exception at any bytecode, is unreliable: it may be raised in an import, a destructor, a callback
from C++, or another clean-up. So a signal ends the process at once, after the clean-ups in `CLEANUPS`. Everything else
tolerates this: a journal is complete up to its last line, and workers and ranks end with their parent. Code that has to
be notified, such as a user's executor, runs under `interruptible`: the first signal is an exception, and the second
one, or a timeout, ends the process. Operations that must not be interrupted run under `uninterrupted`.

The state is in this module and not in `localtensor/_util/ambient.py`, because the handler is installed before other
imports.

Private parts of CPython without a public equivalent, read on 3.10 to 3.13; without them less is cleaned up:

| part | for |
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
from typing import NoReturn

import typer
from rich.console import Console

from strategies.base.foreign_text import PrintableConsole, printable

EXIT_SECONDS = 5.0
"""Seconds for the exit of the interpreter, which waits for threads and children."""
LEAVE_SECONDS = 60.0
"""Seconds for the exit of the interpreter after a report: threads and exit handlers of a user's module may take so long."""
STOP_SECONDS = 20.0
"""Seconds until the process ends after a signal under `gently`: rank threads that do not react take two times five."""
SIGNAL_NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
CLEANUPS: dict[str, Callable[[str], object]] = {}
"""Paths to remove before exit, each with its function; and "terminal", which shows the cursor again."""


class _State:
    owner = 0  # the process that watches; a copy of it must not speak
    more = ""  # what the sentence ends with
    came = 0  # the signal
    code = 0  # what the process ends with: 3 from the begin of a command to its end
    gentle = 0
    held = 0
    said = False


def install_handlers() -> None:
    """Installs the handlers of SIGINT and SIGTERM, unless the parent process ignores them. In the main thread only."""
    if _State.owner:
        return
    _State.owner = os.getpid()
    for number in SIGNAL_NAMES:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _handle)
    if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
        os.register_at_fork(after_in_child=_reset_in_child)
    before = sys.unraisablehook

    def hook(lost: sys.UnraisableHookArgs) -> None:
        if _State.came and issubclass(lost.exc_type, KeyboardInterrupt):  # raised where no caller can catch it
            _end(_State.came)
        before(lost)

    sys.unraisablehook = hook


def refuse_silent_exit(*, of_the_program: bool = False) -> None:
    """`os._exit(0)` by other code in this process, a rules module or an executor, ends it with the code of the command;
    until that is known with 3: nothing tested is no pass. Forked children, and other codes, end as before.

    `of_the_program` is set where the exit code is that of a user's program: then nothing changes.
    """
    if of_the_program:
        return
    owner, leave = os.getpid(), os._exit

    def guarded(status: int) -> NoReturn:
        if os.getpid() == owner and not status & 0xFF and _State.code:
            text = f"localtensor: a module or an executor of yours has ended the program by os._exit({status}).\n"
            with contextlib.suppress(OSError):
                os.write(2, text.encode())
            leave(_State.code)
        leave(status)

    vars(sys.modules.get("posix", os))["_exit"] = os._exit = guarded  # `os` has it from `posix`


def set_stop_note(more: str) -> None:
    """Sets the rest of the message after "stopped by Ctrl-C"."""
    _State.more = more


def received_signal() -> int:
    """The signal received, or 0."""
    return _State.came


def raise_if_stopped() -> None:
    """Raises KeyboardInterrupt if one was raised before and other code has swallowed it."""
    if _State.came and _State.gentle:
        raise KeyboardInterrupt


def stop_message(number: int = 0) -> str:
    """The message after a signal, once; then ""."""
    said, _State.said = _State.said, True
    return "" if said else f"localtensor: stopped by {SIGNAL_NAMES.get(number or signal.SIGINT)}{_State.more}."  # type: ignore[call-overload]


def begin_command(more: str) -> None:
    """Resets the state for a new command; `more` is the rest of its message."""
    _State.more, _State.said, _State.came, _State.code = more, False, 0, EXIT_NOTHING


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Within it, the first signal raises KeyboardInterrupt."""
    _State.gentle += 1
    try:
        yield
    finally:
        _State.gentle -= 1
        if _State.came and not isinstance(sys.exc_info()[1], KeyboardInterrupt):  # it became something else on the way
            raise KeyboardInterrupt from None


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Within it, the first signal is deferred; the second is not."""
    _State.held += 1
    try:
        yield
    finally:
        _State.held -= 1
    if _State.came and not _State.held:
        if not _State.gentle:
            _end(_State.came)
        raise KeyboardInterrupt


def _handle(number: int, frame: FrameType | None) -> None:
    again, _State.came = _State.came, number
    if again or not (_State.gentle or _State.held):
        _end(number)
    if _State.gentle:
        _after(STOP_SECONDS, lambda: _end(number))
    if not _State.held:
        raise KeyboardInterrupt


def _after(seconds: float, end: Callable[[], object]) -> None:
    """Calls `end` after so many seconds, in a thread that holds nothing open.

    Returns when the thread has started: at exit CPython frees what a thread needs to start, and does not wait for it.
    """
    begun = _thread.allocate_lock()
    begun.acquire()

    def sleep_and_end() -> None:
        begun.release()
        time.sleep(seconds)
        end()

    _thread.start_new_thread(sleep_and_end, ())
    begun.acquire(timeout=1)


def limit_exit_time() -> None:
    """After the message, limits the time of the interpreter's exit."""
    if _State.owner == os.getpid():
        _after(EXIT_SECONDS, lambda: _end(_State.came or signal.SIGINT))


def limit_leaving(code: object, whose: str = "a module or an executor of yours", seconds: float = 0.0) -> None:
    """Ends the process with its exit code if threads, processes or exit handlers of other code hold it open for so long (`LEAVE_SECONDS`)."""
    ours, limit = code & 0xFF if isinstance(code, int) else EXIT_WRONG, seconds or LEAVE_SECONDS
    what = f"a thread, a process or an exit handler of {whose} has not ended within {limit:.3g} s of the report"
    _after(limit, lambda: _leave(ours, f"localtensor: {what}; it is left."))


def _end(number: int) -> None:
    """Ends the process as after this signal."""
    _leave(128 + number, stop_message(number))


def _leave(code: int, text: str) -> None:
    """Cleans up and exits. Takes no lock and flushes no stream: a signal may have interrupted any code."""
    for pid in _children():
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    parts = [(path, os.unlink) for path in _parts()]
    for path, remove in [*CLEANUPS.items(), *parts, *((folder, _remove_folder) for folder in _folders())]:
        with contextlib.suppress(OSError):
            remove(path)
    with contextlib.suppress(OSError):
        if text:
            os.write(2, f"{text}\n".encode(errors="replace"))
    os._exit(code)


def _folders() -> list[str]:
    """Folders of real ranks that may not have started (started ranks remove them), and of Python's fork server."""
    groups = getattr(sys.modules.get("localtensor.processes.worker_group"), "WORKER_GROUPS", ())
    found = [group.folder for group in list(groups)]
    process = getattr(sys.modules.get("multiprocessing.process"), "_current_process", None)
    its = getattr(process, "_config", {}).get("tempdir")
    return [*found, its] if its else found


def _parts() -> list[str]:
    """Files of a recorded run that are not yet written."""
    return list(getattr(sys.modules.get("localtensor.collectives.trace.output"), "PARTS", ()))


def _remove_folder(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _children() -> list[int]:
    """The child processes, where the system lists them, without Python's resource tracker, which ends by itself.

    The fork server would end by itself, too, but not before it has finished its imports.
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


def _reset_in_child() -> None:
    """Restores the default handlers in a forked child."""
    for number in SIGNAL_NAMES:
        if signal.getsignal(number) is _handle:
            signal.signal(number, signal.SIG_DFL)


EXIT_CLEAN, EXIT_WRONG, EXIT_USAGE, EXIT_NOTHING, EXIT_INTERRUPTED = 0, 1, 2, 3, 130


def run_command(work: Callable[[], int], more: str = "") -> None:
    """Ends the command with the exit code of `work`: 130 after Ctrl-C, 143 after SIGTERM, 3 after an internal error.

    `more` ends the message after a signal (see `set_stop_note`).
    """
    begin_command(more)
    try:
        code = work()
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except SystemExit as error:
        code = EXIT_NOTHING
        left = f"a module or an executor of yours has left the program (SystemExit: {error.code})"
        print_error(f"localtensor: {left}; nothing was reported.")
    except Exception as error:  # why: exit code 1 means a wrong rule, so our own failure must not leave with Python's 1
        code = EXIT_INTERRUPTED if received_signal() else EXIT_NOTHING
        if code == EXIT_NOTHING and (lacking := _missing_resource(error)):
            print_error(f"localtensor: {lacking}; this says nothing about any rule.")
        elif code == EXIT_NOTHING:
            print_error(traceback.format_exc())
            print_error("localtensor itself failed, as shown above; this says nothing about any rule.")
    if code == EXIT_INTERRUPTED and (said := stop_message(received_signal())):
        print_error(said)
        limit_exit_time()
    if code == EXIT_INTERRUPTED and received_signal():
        code = 128 + received_signal()
    _State.code = code
    raise typer.Exit(code)


def print_error(text: str) -> None:
    """Writes to standard error, as `printable`; failures are ignored, since the exit code still reports the result."""
    with contextlib.suppress(OSError):
        typer.echo(printable(text), err=True)


def _missing_resource(error: Exception) -> str:
    """The resource that is missing, if the error is about one; else ""."""
    if isinstance(error, MemoryError):
        return "the machine has run out of a resource: memory"
    if isinstance(error, OSError) and error.errno in SHORTAGES:
        return f"the machine has run out of a resource: {error.strerror}"
    if isinstance(error, FileNotFoundError):
        try:
            os.getcwd()
        except FileNotFoundError:
            return "the working folder is not there any longer, change to another"
    return ""


SHORTAGES = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
"""Errors that mean that the machine has run out of some resource."""


def open_streams() -> None:
    """Opens closed standard streams on the null device: otherwise the next opened file would get their descriptors."""
    for at, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(at)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free: this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(at, mode, errors="replace", closefd=False))  # noqa: SIM115  # for as long as we live


def write_stdout(text: str, *, coloured: bool = False) -> str:
    """Writes to standard output, if there is one, as `printable`; returns the reason if that failed, or "".

    A closed pipe, as after `| head`, is not a failure. `coloured` is text that a `PrintableConsole` has made.
    """
    return _write(lambda: sys.stdout.write(text if coloured else printable(text)))


def print_stdout(show: Callable[[Console], None]) -> str:
    """As `write_stdout`, for the output of `show` on a console: 140 columns wide where there is no terminal."""
    return _write(lambda: show(_PipeConsole(width=None if sys.stdout.isatty() else 140, soft_wrap=False, emoji=False)))


def _write(write: Callable[[], object]) -> str:
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


class _PipeConsole(PrintableConsole):
    """A console that raises on a broken pipe. rich would exit with code 1, which here means a wrong rule."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def worker_count(workers: int | None) -> int:
    """The number of worker processes: one for each core by default."""
    return workers if workers is not None else os.cpu_count() or 1


@contextlib.contextmanager
def quiet(level: int = logging.CRITICAL) -> Iterator[None]:
    """Suppresses warnings, and logs up to this level.

    Torch logs every error and every submesh that could have been flattened; the callers expect them.
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
def quiet_on_one_thread() -> Iterator[None]:
    """The process state of validating commands: only errors are logged, and torch computes on one thread.

    One thread, because the tensors are small, the workers many, and they are forked from here. The state is restored at
    the end, since other code, such as tests, may run in this process.
    """
    import torch  # not above: `--help` does without it

    threads = torch.get_num_threads()
    with quiet(logging.WARNING):
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
