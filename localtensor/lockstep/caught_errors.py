"""Errors that a program in lockstep catches although not all of its ranks have raised them: it has gone on as no rank does."""

from __future__ import annotations

import ast
import linecache
from collections import deque
from types import CodeType, FrameType

from localtensor._util.call_sites import is_user_file
from localtensor._util.events import Place
from localtensor.errors import NotInLockstep
from localtensor.errors.base import LocalTensorError, first_line
from localtensor.lockstep.patches.branch_source import tree_of

MOST_NOTED = 4  # errors that may still be on their way: each keeps the frames alive through which it has come
_NAMES = (ast.Name, ast.Attribute, ast.Tuple, ast.expr_context)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


class CaughtErrors:
    """The refusals of one mode and the errors of some of its ranks, of which some may be caught by the program.

    An error whose traceback begins in a frame of the user's has been caught there.  A handler that names a class of this package, as
    `except RanksDiverge` or `pytest.raises(NotInLockstep)`, expects a refusal; `pytest.raises` of another error expects that of any rank.
    """

    def __init__(self) -> None:
        self._noted: deque[tuple[BaseException, str]] = deque()
        self._first = ""

    def note(self, error: BaseException, what: str) -> None:
        """An error is about to be raised; `what` it is, in words."""
        if any(one is error for one, _ in self._noted):
            return
        self._noted.append((error, what))
        if len(self._noted) > MOST_NOTED:
            self._look(*self._noted.popleft())

    def check(self, halfway: bool) -> None:
        """The program has ended, without an error, and perhaps `halfway` in a statement.  Raises `NotInLockstep`."""
        while self._noted:
            self._look(*self._noted.popleft())
        if halfway:
            raise NotInLockstep(
                "if",
                "a debugger took over while its statements ran for some ranks, and what follows ran for these alone",
            )
        if self._first:
            raise NotInLockstep("except", self._first)

    def _look(self, error: BaseException, what: str) -> None:
        """Keeps the first error that was caught in a user's frame, in words."""
        trace = error.__traceback__
        if self._first or trace is None or not is_user_file(trace.tb_frame.f_code.co_filename):
            return
        frame, line = trace.tb_frame, trace.tb_lineno
        if frame.f_globals.get("__name__", "").startswith("_pytest."):  # it shows the operands of an assertion
            return
        refused = isinstance(error, LocalTensorError)
        handlers = _handlers_at(frame.f_code, line, ("suppress", "raises") if refused else ("suppress",))
        if handlers and not (refused and any(_names_ours(each, frame) for each in handlers)):
            told = first_line(f"{type(error).__name__}: {error}", 100)
            place = Place(frame.f_code.co_filename, line, frame.f_code.co_name)
            self._first = f"{what} was caught at {place}, `{told}`, and all ranks have gone on behind it"


def _handlers_at(code: CodeType, line: int, managers: tuple[str, ...]) -> list[ast.expr | None]:
    """What the `except` and `with` clauses around this line of a function name, of which some may catch an error; None is a bare `except`."""
    found: list[ast.expr | None] = []
    node: ast.AST | None = tree_of("".join(linecache.getlines(code.co_filename)))
    while node is not None:
        if isinstance(node, _SCOPES):
            found.clear()
        elif isinstance(node, ast.Try) and _covers(node.body[0], node.body[-1], line):
            found += [one.type for one in node.handlers]
        elif isinstance(node, ast.With | ast.AsyncWith):
            for item in node.items:
                found += _caught_by(item.context_expr, managers)
        node = next((one for one in _statements(node) if _covers(one, one, line)), None)
    return found


def _caught_by(manager: ast.expr, names: tuple[str, ...]) -> list[ast.expr]:
    """The errors that a context manager catches whose name has one of these, as `assertRaises`; empty of any other."""
    if not isinstance(manager, ast.Call):
        return []
    name = ast.unparse(manager.func).rpartition(".")[2].lower()
    return manager.args if any(one in name for one in names) else []


def _names_ours(types: ast.expr | None, frame: FrameType) -> bool:
    """Whether a handler names a class of this package's errors.  Nothing but names is evaluated."""
    if types is None or not all(isinstance(one, _NAMES) for one in ast.walk(types)):
        return False
    try:
        value = eval(compile(ast.Expression(types), "", "eval"), frame.f_globals, dict(frame.f_locals))  # noqa: S307
    except (NameError, AttributeError):
        return False
    return any(
        isinstance(one, type) and issubclass(one, LocalTensorError)
        for one in (value if isinstance(value, tuple) else (value,))
    )


def _statements(node: ast.AST) -> list[ast.stmt]:
    """The statements inside of one, those of its handlers and cases included."""
    inner = [one for one in ast.iter_child_nodes(node) if not isinstance(one, ast.expr)]
    return [at for one in inner for at in ([one] if isinstance(one, ast.stmt) else _statements(one))]


def _covers(first: ast.stmt, last: ast.stmt, line: int) -> bool:
    return first.lineno <= line <= (last.end_lineno or last.lineno)
