"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """The file has this text, or what it had before: never a part of it.  Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_lines(path, [text.removesuffix("\n")])


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """As `write_whole`, line by line, for what is large.  Raises `OSError`.

    What is no ordinary file, a device or a pipe, is written to and stays what it is; so does a link.
    """
    if path.exists() and not path.is_file():
        with path.open("w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)
        return
    path = path.resolve()
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:  # why: a half-written file must not stay, whatever stopped us; the error goes on
        os.unlink(name)
        raise
