"""The user's line that made a call, and the entry point of torch through which it went."""

import inspect
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from traceback import walk_tb
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

from localtensor._util.events import Place, place_at

_TORCH = str(Path(torch.__file__).parent) + "/"
_OURS = str(Path(__file__).parents[1]) + "/"
_STDLIB = str(Path(sysconfig.get_paths()["stdlib"])) + "/"
_SITE = tuple(sysconfig.get_paths()[name] + "/" for name in ("purelib", "platlib"))
_CHECKER = tuple(f"{site}spmd_types/" for site in _SITE)
"""A type checker that calls the user's functions and torch's, as torch's own dispatch does."""

USER, TORCH, OTHER, C10D, FUNCTIONAL, OPS, VIA_OPS, DTENSOR = range(8)
_KIND_OF_FILE = {
    _TORCH + "distributed/c10d_logger.py": OTHER,
    _TORCH + "distributed/distributed_c10d.py": C10D,
    _TORCH + "distributed/_functional_collectives.py": FUNCTIONAL,
    _TORCH + "_ops.py": OPS,
    _TORCH + "_library/autograd.py": OTHER,
    _TORCH + "overrides.py": OTHER,
    # DTensor's own code of ops: what it calls, no line of the program calls.
    **{_TORCH + f"distributed/tensor/{name}.py": DTENSOR for name in ("_dispatch", "_tp_conv", "_nonlinear_redux")},
}
WORKER_LOOP = "_serve_jobs"
"""The function of a real process from which the user's code is called: what calls it is no line of the program."""
_BLOCKING = ("send", "recv")  # of distributed_c10d.py: these wait for the Work of isend and irecv
_FROM_LOCAL = (_TORCH + "distributed/tensor/_api.py", "backward")  # a gradient that comes in other placements
_kinds: dict[str, int] = {}

Fn = Callable[..., Any]  # of torch, or in its place
Args = Sequence[Any]  # of a call, as torch hands them on
Kwargs = dict[str, Any]


class Origin(NamedTuple):
    """The user's line as (file, line, function), or None; and whether the call returns its Work to the user.

    A functional collective keeps its Work: the tensor that it returns waits when it is read.  FSDP and the like
    keep theirs, too, and `send` and `recv` wait at once.  `implicit`: an op of DTensor makes the call to move its own tensors, and no line of the program asks for it.
    """

    line: tuple[str, int, str] | None
    returns_work: bool
    implicit: bool = False

    @property
    def place(self) -> Place | None:
        return place_at(*self.line) if self.line else None


def _kind(file: str) -> int:
    if file in _KIND_OF_FILE:
        return _KIND_OF_FILE[file]
    if file.startswith(_TORCH):
        return TORCH
    if file.endswith("/typing_extensions.py"):  # @deprecated wraps functions of torch and others
        return OTHER
    library = file.startswith(_STDLIB) and not file.startswith(_SITE)
    return OTHER if library or file.startswith((_OURS, "<frozen", *_CHECKER)) else USER


def is_user_file(file: str) -> bool:
    """Whether the file belongs neither to torch and its type checker, nor to the standard library, nor to this package."""
    return _kind(file) == USER


def is_of_ours(code: CodeType) -> bool:
    """Whether the code belongs to this package."""
    return code.co_filename.startswith(_OURS)


def origin(frame: FrameType | None) -> Origin:
    """The origin of the call that this frame serves: the innermost frame outside torch and this package."""
    entry, implicit, waits = None, False, False
    while frame is not None:
        code = frame.f_code
        kind = _kinds.get(code.co_filename)
        if kind is None:
            kind = _kinds[code.co_filename] = _kind(code.co_filename)
        # A user's dispatch mode handles a call; it does not start one.
        mode = _mode_of(frame) if kind == USER and entry == OPS else None
        if mode is not None:
            frame = mode.f_back
            continue
        if kind == USER and not code.co_name.startswith("__torch_"):
            # `group.allreduce([x])` comes straight from C++; an op that is called by name, through _ops.py.
            returns_work = not waits and entry in (C10D, OPS, None)
            return Origin((code.co_filename, frame.f_lineno, code.co_name), returns_work, implicit)
        if kind == DTENSOR or (code.co_name == _FROM_LOCAL[1] and code.co_filename == _FROM_LOCAL[0]):
            kind, implicit = TORCH, True
        # A dispatch mode passes a collective on through _ops.py too: the entry point is further out.
        if kind in (C10D, FUNCTIONAL, OPS) and entry in (None, OPS, VIA_OPS):
            entry = kind
        elif kind == TORCH and entry in (None, C10D, OPS):
            entry = VIA_OPS if entry == OPS else TORCH  # the Work goes to torch's own code, which is trusted
        waits = waits or (kind == C10D and code.co_name in _BLOCKING)
        frame = frame.f_back
    return Origin(None, entry == C10D, implicit)


def _mode_of(frame: FrameType | None) -> FrameType | None:
    """The frame of the user's dispatch mode that called this user's frame, through the user's functions alone, or None."""
    while frame is not None and is_user_file(frame.f_code.co_filename):
        if frame.f_code.co_name.startswith("__torch_"):
            return frame
        frame = frame.f_back
    return None


def code_that_called_us() -> CodeType | None:
    """The innermost code on this thread's stack that is not this package's: of C++ that calls back, its own caller."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return None if frame is None else frame.f_code


def place_of_frame(frame: FrameType | None) -> Place | None:
    """The user's innermost line on this frame's stack: that of `origin`, without what else that finds out."""
    while frame is not None and frame.f_code.co_name != WORKER_LOOP:
        code = frame.f_code
        kind = _kinds.get(code.co_filename)
        if kind is None:
            kind = _kinds[code.co_filename] = _kind(code.co_filename)
        if kind == USER and not code.co_name.startswith("__torch_"):
            return place_at(code.co_filename, frame.f_lineno, code.co_name)
        frame = frame.f_back
    return None


def place_of_function(function: object) -> Place | None:
    """The line at which a user's function begins; None of torch's functions, and of other callables."""
    code = getattr(function, "__code__", None)
    if code is None or not is_user_file(code.co_filename):
        return None
    return place_at(code.co_filename, code.co_firstlineno, code.co_name)


_DEBUGGERS = ("bdb", "pdb", "pydevd", "_pydevd", "debugpy")


def in_debugger(frame: FrameType | None) -> bool:
    """Whether this thread or the calling one is being debugged; a coverage tool is no debugger."""
    tracer = getattr(sys.gettrace(), "__module__", None) or ""
    names = (tracer, *(f.f_globals.get("__name__") or "" for f in _callers(frame)))
    return any(name.split(".")[0].startswith(_DEBUGGERS) for name in names)


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def handled_exception() -> str | None:
    """The exception that this thread is handling, in one line: a call made meanwhile may be part of the clean-up."""
    error = sys.exc_info()[1]
    if error is None:
        return None
    lines = user_lines(walk_tb(error.__traceback__))
    where = f" at {lines[-1]}" if lines else ""
    try:
        text = str(error).partition("\n")[0][:80]
    except Exception:  # why: an exception's own __str__ may raise anything
        text = ""
    return f"{type(error).__name__}{': ' * bool(text)}{text}{where}"


def user_lines(walk: Iterator[tuple[FrameType, int]]) -> list[Place]:
    """The lines of a traceback that belong to the user's own code, outermost first."""
    codes = [(frame.f_code, line) for frame, line in walk]
    return [Place(code.co_filename, line, code.co_name) for code, line in codes if is_user_file(code.co_filename)]


def place_of_error(error: BaseException) -> Place | None:
    """The innermost line of the user's own code in the exception's traceback, or None.

    Functions that hide themselves from pytest's tracebacks, as pytest.fail does, do not count.
    """
    walk = walk_tb(error.__traceback__)
    lines = user_lines((frame, line) for frame, line in walk if not frame.f_locals.get("__tracebackhide__"))
    return lines[-1] if lines else None


def bound_arguments(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call, by parameter name; defaults are not filled in."""
    return dict(inspect.signature(function).bind(*args, **kwargs).arguments)


def undecorated(function: Any) -> Callable[..., Any]:
    """The function within torch's logging decorators."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function  # type: ignore[no-any-return]
