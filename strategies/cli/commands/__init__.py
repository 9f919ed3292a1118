"""The commands: each runs once its options are read.  Here: how a command prints, writes its files and ends."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from strategies.base.atomic_files import write_whole
from strategies.base.signals import NOTHING, complain, wrote


def fail(sentence: str, code: int) -> int:
    """Print the sentence on standard error.  Returns the exit code."""
    complain(sentence)
    return code


def deliver_text(text: str, files: Sequence[tuple[Path, str]], code: int) -> int:
    """Print the text, then write each file, whole or not at all.  Returns the exit code: 3 where a file is lost."""
    problem = wrote(text)
    if problem:
        complain(f"localtensor: {problem}")
    above = "nor could the report be shown" if problem else "the report above is whole"
    for path, content in files:
        try:
            write_whole(path, content)
        except OSError as error:
            return fail(f"localtensor: {error.filename or path}: {error.strerror}; {above}", NOTHING)
    return (code or NOTHING) if problem else code
