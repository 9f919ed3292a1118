"""Text that comes from elsewhere (journals, baselines, rules modules, git) on its way to a terminal, into a file name, or
into a program: escaped, made of a safe alphabet, checked.

Terminals obey escape sequences, and CI servers obey lines such as `::error::` and `##vso[...]` in what a step prints.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

_UNPRINTABLE = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")
"""Control characters but for tab and newline, marks that reorder a line, and halves of surrogate pairs."""
_COMMAND = re.compile(r"(?<![^\n])([^\S\n]*):(?=:)|#(?=#(?:vso|teamcity)?\[)")
"""The first character of a command to a CI server: GitHub's are at the begin of a line, the others anywhere in it."""


def printable(text: str) -> str:
    r"""The text without power over a terminal or a CI server; what is escaped has the form that JSON and Python have.

    >>> printable("a\x1b[31m\r\n ::error::b") == "a\\u001b[31m\\u000d\n \\u003a:error::b"
    True
    """
    return without_commands(_UNPRINTABLE.sub(lambda found: _escape(found[0]), text))


def without_commands(text: str) -> str:
    r"""The text without commands to a CI server; colours of our own stay.

    >>> without_commands("##vso[task.complete]") == "\\u0023#vso[task.complete]"
    True
    """
    return _COMMAND.sub(lambda found: f"{found[1] or ''}{_escape(found[0][-1])}", text)


def _escape(sign: str) -> str:
    return f"\\u{ord(sign):04x}"


class PrintableConsole(Console):
    """A console that prints any text as `printable` does, in its own colours; markup in a string is still read."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control else Segment(_UNPRINTABLE.sub(lambda found: _escape(found[0]), text), style)

    @property
    def file(self) -> Any:  # a stream, by the annotation of rich: of which it needs what follows
        """The stream, where lines are known as they are printed: after wrapping."""
        return _WithoutCommands(super().file)

    @file.setter
    def file(self, new_file: Any) -> None:
        self._file = new_file


class _WithoutCommands:
    """A text stream that writes `without_commands`."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(without_commands(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


LONGEST = 150
"""Letters of a file name without its suffix: file systems take 255."""


def safe_file_name(stem: str, suffix: str) -> str:
    """A file name of ASCII letters, digits, `_`, `-` and `.` alone, which is no path and not hidden.

    Other characters, and what is too long, are replaced by a digest of the stem, so that different stems stay different.

    >>> safe_file_name("cumprod__S0", ".py"), safe_file_name("../é", ".py")
    ('cumprod__S0.py', '_____9cd7743f15ff1ad6.py')
    """
    plain = re.sub(r"[^A-Za-z0-9_.-]|^[.-]+", "_", stem)[:LONGEST]
    if plain != stem or not plain:
        plain = f"{plain}__{hashlib.sha256(stem.encode(errors='surrogatepass')).hexdigest()[:16]}"
    return plain + suffix


def path_below(folder: Path, name: str) -> Path:
    """The path of that name in the folder.  Raises `OSError` if it leads out of it: through a link that lies there."""
    path = folder / name
    if path.parent != folder or (path.is_symlink() and not path.resolve().is_relative_to(folder.resolve())):
        raise OSError(0, f"it leads out of {folder}", str(path))
    return path


class BadJson(ValueError):
    """A text that is no JSON, or none that is read here: nested too deep, a name twice, too long a number."""


def read_json(data: bytes | str) -> Any:
    """The value of a JSON text in UTF-8.  Raises `BadJson`, with the problem as a part of a sentence, and nothing else.

    No honest file has a number of thousands of digits, a name twice in an object, or brackets that exceed Python's stack.
    """
    try:
        text = data.decode("utf-8-sig") if isinstance(data, bytes) else data
        return json.loads(text, object_pairs_hook=_unique)
    except UnicodeDecodeError:
        raise BadJson("it is no text in UTF-8") from None
    except BadJson:
        raise
    except json.JSONDecodeError as error:
        raise BadJson(f"line {error.lineno} is no JSON ({error.msg})") from None
    except RecursionError:
        raise BadJson("it is nested too deep") from None
    except ValueError:
        raise BadJson("it has a number of thousands of digits") from None


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise BadJson(f"an object in it has {next(name for name in names if names.count(name) > 1)!r:.60} twice")
    return found


Shape = Any
"""A form of JSON data: a class; a set of values; `[shape]`, a list of any length; `(shape, ...)`, a list of that length;
`{str: shape}`, an object with any names; `{name: shape}`, an object whose names, those that are there, have these forms;
`Either(shapes)`."""


class Either(tuple[Shape, ...]):
    """Data of one of these shapes."""

    __slots__ = ()


def misfit(value: object, shape: Shape, where: str = "it") -> str:
    """The first place where the data has another shape, in words; "" if it fits.  An int has less than 64 bits.

    >>> misfit({"ranks": [2, "3"]}, {"ranks": [int]}), misfit({"ranks": [2]}, {"ranks": [int]})
    ("it.ranks[1] is '3'", '')
    """
    found = _misfit(value, shape)
    return "" if found is None else f"{where}{''.join(reversed(found[0]))} is {_shown(found[1])}"


def _misfit(value: object, shape: Shape) -> tuple[list[str], object] | None:
    """The path to the first value of another shape, its last part first, and that value; None if all fit."""
    if isinstance(shape, type):
        kinds = (int, float) if shape is float else shape
        fits = isinstance(value, kinds) and (shape in (bool, object) or not isinstance(value, bool))
        return None if fits and not (isinstance(value, int) and abs(value) >= 1 << 63) else ([], value)
    if isinstance(shape, frozenset):
        return None if isinstance(value, str) and value in shape else ([], value)
    if isinstance(shape, Either):
        tried = [_misfit(value, each) for each in shape]
        return None if None in tried else tried[0]
    inner: Iterable[tuple[Any, object, Shape]]
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return [], value
        every = shape.get(str)
        names = value if every is not None else shape.keys() & value.keys()
        inner = ((name, value[name], every if every is not None else shape[name]) for name in names)
    else:
        if not isinstance(value, list) or (isinstance(shape, tuple) and len(value) != len(shape)):
            return [], value
        inner = zip(range(len(value)), value, shape if isinstance(shape, tuple) else shape * len(value), strict=True)
    for name, one, form in inner:
        found = _misfit(one, form)
        if found is not None:
            found[0].append(f"[{name}]" if isinstance(value, list) else f".{name}")
            return found
    return None


def _shown(value: object) -> str:
    """A value in at most 40 characters; one that may be nested by its kind alone."""
    kinds: dict[type, str] = {list: "a list", dict: "an object"}
    return kinds.get(type(value)) or f"{value!r:.40}"


def is_text(text: str) -> bool:
    """Whether it is valid Unicode: JSON can spell half of a surrogate pair."""
    return not re.search("[\ud800-\udfff]", text)


def parse_date(text: str) -> dt.date | None:
    """The day of the form `YYYY-MM-DD`; None for any other text.

    >>> parse_date("2026-02-28"), parse_date("2026-02-30"), parse_date("20260228")
    (datetime.date(2026, 2, 28), None, None)
    """
    if not re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", text):
        return None
    try:
        return dt.date.fromisoformat(text)
    except ValueError:
        return None
