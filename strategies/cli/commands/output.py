"""What a command prints, the files it writes, and its exit code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from strategies.base.atomic_files import write_whole
from strategies.base.signals import EXIT_NOTHING, print_error, write_stdout


def fail(sentence: str, code: int) -> int:
    """Print the sentence on standard error.  Returns the exit code."""
    print_error(sentence)
    return code


def deliver_text(text: str, files: Sequence[tuple[Path, str]], code: int) -> int:
    """Print the text, then write each file, whole or not at all.  Returns the exit code: 3 where a file is lost."""
    problem = write_stdout(text)
    if problem:
        print_error(f"localtensor: {problem}")
    above = "nor could the report be shown" if problem else "the report above is whole"
    for path, content in files:
        try:
            write_whole(path, content)
        except OSError as error:
            return fail(f"localtensor: {error.filename or path}: {error.strerror}; {above}", EXIT_NOTHING)
    return (code or EXIT_NOTHING) if problem else code
