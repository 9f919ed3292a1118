"""How every command ends: its exit code, and what is said after Ctrl-C or after an error of ours."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

import typer

CLEAN, WRONG, USAGE, NOTHING, INTERRUPTED = 0, 1, 2, 3, 130


def leave(work: Callable[[], int], more: str = "") -> None:
    """End with the exit code of the work: 130 after Ctrl-C, 3 after an error of ours."""
    try:
        code = work()
    except KeyboardInterrupt:
        typer.echo(f"localtensor: stopped by Ctrl-C{more}.", err=True)
        code = INTERRUPTED
    except Exception:  # why: exit code 1 means a wrong rule, so our own failure must not leave with Python's 1
        typer.echo(traceback.format_exc(), err=True)
        typer.echo("localtensor itself failed, as shown above; this says nothing about any rule.", err=True)
        code = NOTHING
    raise typer.Exit(code)


def wrote(text: str) -> str:
    """Write it to standard output, if there is one; why it could not be written, or "".

    Nobody reading any longer, as after `| head`, is no fault.
    """
    if sys.stdout is None:  # started with `>&-`: the exit code, and the files, are all that is wanted
        return ""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            return f"cannot write to standard output: {error.strerror}."
    return ""


def many(workers: int | None) -> int:
    """How many worker processes: one for each core, if nobody says otherwise."""
    return workers if workers is not None else os.cpu_count() or 1
