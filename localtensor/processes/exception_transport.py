"""An exception on its way out of a forked process: what can be said of it there, and what it is made again from."""

import builtins
import contextlib
import io
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from localtensor._util.events import Place
from localtensor._util.rank_places import raised_at
from localtensor.processes.worker import told


@dataclass(frozen=True, slots=True)
class Story:
    """How a rank failed: in words, as whoever shows failures wants it (`rendered`), and the exception itself.

    `pickled` is None where that cannot be; `home` is then the class of Python's own that it is nearest to.
    """

    kind: str
    message: str
    traceback: str
    at: float
    place: Place | None
    rendered: str
    pickled: bytes | None
    home: str


def story(error: BaseException, tell: Callable[[BaseException], str]) -> Story:
    """What is known where the exception was caught."""
    at = time.monotonic()
    return Story(*told(error), at, raised_at(error), _rendered(error, tell), _pickled(error), _home(error))


def again(one: Story) -> BaseException:
    """The exception, of its own class if it comes out of the pickle as it went in, else of one that is named alike.

    Its traceback is a single entry, at the line where it was raised.
    """
    error = _again(one)
    return error.with_traceback(_at(one.place)) if one.place else error


def _again(one: Story) -> BaseException:
    with contextlib.suppress(Exception):  # why: reading an exception back runs its own code
        error: Any = _Unpickler(io.BytesIO(one.pickled)).load() if one.pickled else None
        if isinstance(error, BaseException) and (type(error).__name__, str(error)) == (one.kind, one.message):
            return error
    return stand_in(one.kind, one.message, one.home)


def _at(place: Place) -> TracebackType | None:
    """A traceback that leads to this line: of a frame that has raised there, though it did nothing else."""
    code = compile("raise ZeroDivisionError", place.file, "exec")
    try:
        exec(code.replace(co_firstlineno=place.line, co_name=place.function), {"__name__": "forked"})  # noqa: S102
    except ZeroDivisionError as error:
        trace = error.__traceback__
        return trace.tb_next if trace else None
    return None


def stand_in(kind: str, message: str, home: str = "Exception") -> BaseException:
    """An exception of a class that has this name, and no more than the message.

    >>> error = stand_in("BadLoss", "nan", "ValueError")
    >>> type(error).__name__, str(error), isinstance(error, ValueError)
    ('BadLoss', 'nan', True)
    """
    base = getattr(builtins, home)
    made: Any = type(kind, (base,), {"__module__": __name__, "__str__": lambda self: message})
    error: BaseException = made.__new__(made, message)
    return error


def _rendered(error: BaseException, tell: Callable[[BaseException], str]) -> str:
    try:
        return str(tell(error))
    except Exception as worse:  # why: it shows values of the user's, whose own code may raise anything
        return f"(its own text failed: {type(worse).__name__})"


def _pickled(error: BaseException) -> bytes | None:
    stream = io.BytesIO()
    try:
        _Pickler(stream, pickle.HIGHEST_PROTOCOL).dump(error)
    except Exception:  # why: pickling runs the exception's own code
        return None
    return stream.getvalue()


def _home(error: BaseException) -> str:
    return next(name for name in (kind.__name__ for kind in type(error).__mro__) if hasattr(builtins, name))


class _Pickler(pickle.Pickler):
    """Exceptions of classes that no module has by their name, such as pytest's own: a fork has them all the same."""

    def persistent_id(self, value: Any) -> tuple[str, int] | None:
        if not (isinstance(value, type) and issubclass(value, BaseException)):
            return None
        found: Any = sys.modules.get(value.__module__)
        for part in value.__qualname__.split("."):
            found = getattr(found, part, None)
        return None if found is value else _mark(value)


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, mark: Any) -> type[BaseException]:
        found = [kind for kind in _kinds(BaseException) if _mark(kind) == mark]
        if not found:
            raise pickle.UnpicklingError(f"no class {mark[0]} was there before the fork")
        return found[0]


def _mark(kind: type) -> tuple[str, int]:
    """What tells a class from all others, here and in a fork: there it lies where it lay when they parted."""
    return f"{kind.__module__}.{kind.__qualname__}", id(kind)


def _kinds(kind: type[BaseException]) -> Iterator[type[BaseException]]:
    for one in kind.__subclasses__():
        yield one
        yield from _kinds(one)
