"""Where in the user's own program a call was made, and by which of torch's doors it came in."""

import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import Any, NamedTuple

import torch

from localtensor._util.events import Place

_TORCH = str(Path(torch.__file__).parent) + "/"
_OURS = str(Path(__file__).parents[1]) + "/"
_STDLIB = str(Path(sysconfig.get_paths()["stdlib"])) + "/"
_SITE = tuple(sysconfig.get_paths()[name] + "/" for name in ("purelib", "platlib"))

USER, TORCH, OTHER, C10D, FUNCTIONAL, OPS, VIA_OPS = range(7)
_ROOM = {
    _TORCH + "distributed/c10d_logger.py": OTHER,
    _TORCH + "distributed/distributed_c10d.py": C10D,
    _TORCH + "distributed/_functional_collectives.py": FUNCTIONAL,
    _TORCH + "_ops.py": OPS,
    _TORCH + "_library/autograd.py": OTHER,
    _TORCH + "overrides.py": OTHER,
}
_known: dict[str, int] = {}


class Origin(NamedTuple):
    """The user's line as (file, line, function), or None; and whether the call hands its Work to the user.

    A functional collective keeps its Work to itself: the tensor that it returns waits when it is read.  FSDP and
    the like keep theirs, too.
    """

    line: tuple[str, int, str] | None
    hands_work_out: bool

    @property
    def place(self) -> Place | None:
        return Place(*self.line) if self.line else None


def _kind(file: str) -> int:
    if file in _ROOM:
        return _ROOM[file]
    if file.startswith(_TORCH):
        return TORCH
    if file.endswith("/typing_extensions.py"):  # its @deprecated wraps functions of torch's and of others
        return OTHER
    library = file.startswith(_STDLIB) and not file.startswith(_SITE)
    return OTHER if library or file.startswith((_OURS, "<frozen")) else USER


def is_user_file(file: str) -> bool:
    """Whether code of that file is neither torch's, nor the standard library's, nor ours."""
    return _kind(file) == USER


def origin(frame: FrameType | None) -> Origin:
    """Who made the call that this frame serves: the innermost frame that is neither torch's nor ours."""
    door = None
    while frame is not None:
        code = frame.f_code
        kind = _known.get(code.co_filename)
        if kind is None:
            kind = _known[code.co_filename] = _kind(code.co_filename)
        # A user's dispatch mode is on the way of a call, not at its start.
        if kind == USER and not code.co_name.startswith("__torch_"):
            # `group.allreduce([x])` comes straight from C++; an op that is called by its name, through _ops.py.
            return Origin((code.co_filename, frame.f_lineno, code.co_name), door in (C10D, OPS, None))
        # A dispatch mode passes a collective on through _ops.py too: who opened the door stands further out.
        if kind in (C10D, FUNCTIONAL, OPS) and door in (None, OPS, VIA_OPS):
            door = kind
        elif kind == TORCH and door in (None, C10D, OPS):
            door = VIA_OPS if door == OPS else TORCH  # the Work goes to torch's own code, which is not on trial
        frame = frame.f_back
    return Origin(None, door == C10D)


def place_of(frame: FrameType | None) -> Place | None:
    """The user's innermost line on this frame's stack."""
    return origin(frame).place


def stack_of(ident: int) -> FrameType | None:
    """The innermost frame of a thread, or None if it has ended."""
    return sys._current_frames().get(ident)


_DEBUGGERS = ("bdb", "pdb", "pydevd", "_pydevd", "debugpy")


def in_debugger(frame: FrameType | None) -> bool:
    """Somebody debugs this thread, or the one that asks: time does not count.  A coverage tool is no debugger."""
    tracer = getattr(sys.gettrace(), "__module__", None) or ""
    names = (tracer, *(f.f_globals.get("__name__") or "" for f in _outwards(frame)))
    return any(name.split(".")[0].startswith(_DEBUGGERS) for name in names)


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def handled() -> str | None:
    """The exception that this thread is handling, in a line: what it does now may be part of its cleaning up."""
    error = sys.exc_info()[1]
    if error is None:
        return None
    lines = user_lines(walk_tb(error.__traceback__))
    where = f" at {lines[-1]}" if lines else ""
    try:
        words = str(error).partition("\n")[0][:80]
    except Exception:  # why: an exception's own __str__ may raise anything
        words = ""
    return f"{type(error).__name__}{': ' * bool(words)}{words}{where}"


def user_lines(walk: Iterator[tuple[FrameType, int]]) -> list[Place]:
    """Those lines of a traceback, outermost first, that are the user's own."""
    return [
        Place(frame.f_code.co_filename, line, frame.f_code.co_name)
        for frame, line in walk
        if is_user_file(frame.f_code.co_filename)
    ]


# Which line of a test an exception came from.


def raised_at(error: BaseException) -> Place | None:
    """The innermost line of the user's own code on the way of the exception, None if there is no such.

    A function that hides itself from pytest's tracebacks, as pytest.fail does, is nobody's own.
    """
    walk = traceback.walk_tb(error.__traceback__)
    lines = user_lines((frame, line) for frame, line in walk if not frame.f_locals.get("__tracebackhide__"))
    return lines[-1] if lines else None


def named(function: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments by name."""
    return dict(inspect.signature(function).bind(*args, **kwargs).arguments)


def innermost(function: Any) -> Callable[..., Any]:
    """The function within torch's logging decorators."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function  # type: ignore[no-any-return]
