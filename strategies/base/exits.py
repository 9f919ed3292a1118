"""How every command ends: its exit code, and what is said after Ctrl-C or after an error of ours."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import traceback
from collections.abc import Callable

import typer
from rich.console import Console

from strategies.base import signals as stopping

CLEAN, WRONG, USAGE, NOTHING, INTERRUPTED = 0, 1, 2, 3, 130


def leave(work: Callable[[], int], more: str = "") -> None:
    """End with the exit code of the work: 130 after Ctrl-C, 143 after SIGTERM, 3 after an error of ours.

    `more` is said to whoever stopped it (see `stopping.say`).
    """
    stopping.begin(more)
    try:
        code = work()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Exception as error:  # why: exit code 1 means a wrong rule, so our own failure must not leave with Python's 1
        code = INTERRUPTED if stopping.came() else NOTHING
        if code == NOTHING and (lacking := _lacking(error)):
            complain(f"localtensor: {lacking}; this says nothing about any rule.")
        elif code == NOTHING:
            complain(traceback.format_exc())
            complain("localtensor itself failed, as shown above; this says nothing about any rule.")
    if code == INTERRUPTED and (said := stopping.sentence(stopping.came())):
        complain(said)
        stopping.soon()
    raise typer.Exit(128 + stopping.came() if code == INTERRUPTED and stopping.came() else code)


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
