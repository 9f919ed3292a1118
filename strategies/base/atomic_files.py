"""Files that are written completely or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path

from strategies.base.signals import CLEANUPS, uninterrupted


def read_bytes(path: Path, most: int = -1) -> bytes:
    """The content of the file, or its first `most` bytes. Raises `OSError`.

    Does not wait for a pipe without a writer, and does not read all of a device, which may be endless.
    """
    if "\0" in str(path):
        raise OSError(errno.EINVAL, "no file has a name with a null character", str(path))
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0))) as file:
        mode = os.fstat(file.fileno()).st_mode
        if most < 0 and (stat.S_ISCHR(mode) or stat.S_ISBLK(mode)):
            raise OSError(errno.EINVAL, "this is a device", str(path))
        if not stat.S_ISFIFO(mode):
            return file.read(most)
        try:
            begin = os.read(file.fileno(), most if most > 0 else 1 << 16)
        except BlockingIOError:  # a writer exists
            begin = b""
        else:
            if not begin:
                raise OSError(errno.ENODATA, "no process writes to this pipe", str(path))
        os.set_blocking(file.fileno(), True)
        return begin + file.read(most if most < 0 else most - len(begin))


def why_not_writable(path: Path, *, folder: bool = False) -> tuple[str, str]:
    """The reason why no file (or folder of files) can be created there, and a remedy; two empty texts if one can.

    Missing parent folders count as creatable, as in `write_whole`.
    """
    try:
        if path.is_dir() and not folder:
            return "this is a folder", "Name a file."
        if path.exists() and not path.is_dir() and folder:
            return "this is a file", "Name a folder; it is made if it is not there."
        there = next(above for above in (path.absolute(), *path.absolute().parents) if above.exists())
        if path.is_file() or (path.is_symlink() and not path.exists()):
            there = _resolved(path).parent  # another takes its place, or that of what it leads to
    except OSError as error:  # too long a name, say
        return f"it cannot be ({error.strerror})", "Name another."
    if (there.is_dir() or there != path.absolute()) and not (there.is_dir() and os.access(there, os.W_OK)):
        remedy = "Name a folder below one of yours." if folder else "Name a file in a folder of yours."
        return f"{there} takes no files", remedy
    return "", ""


def write_whole(path: Path, text: str) -> None:
    """Writes the text to the file; on failure the file keeps its old content. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_lines(path, [text.removesuffix("\n")])


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """As `write_whole`, line by line, for large texts. Raises `OSError`, which names the file on a full disk, too.

    A device or a pipe is written to and stays what it is, and a link stays a link.  Half of a surrogate pair, which UTF-8
    does not have, is written as JSON and Python spell it.
    """
    try:
        if path.exists() and not path.is_file():
            with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
                file.writelines(f"{line}\n" for line in lines)
        else:
            _replace(_resolved(path), lines)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def _resolved(path: Path) -> Path:
    try:
        return path.resolve()
    except RuntimeError:  # Python before 3.13 raises this for a link to itself
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from None


def _replace(path: Path, lines: Iterable[str]) -> None:
    with uninterrupted():
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        CLEANUPS[name] = os.unlink
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(f"{line}\n" for line in lines)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:  # why: a half-written file must not stay, whatever stopped us; the error goes on
        with contextlib.suppress(FileNotFoundError):  # stopped just after it was put in its place
            os.unlink(name)
        raise
    finally:
        CLEANUPS.pop(name, None)
