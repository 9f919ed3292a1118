"""The text of an int that differs between ranks: it may be shown, and is no value to compare or to look up by."""

from __future__ import annotations

import ast
import itertools
import linecache
from collections.abc import Iterator
from types import FrameType

from localtensor.errors.base import first_line
from localtensor.lockstep.patches.branch_source import asking_frame, position, tree_of
from localtensor.lockstep.values.formatting import TEXTS

_READ_BY = frozenset({
    "get", "setdefault", "pop", "find", "rfind", "index", "count", "startswith", "endswith", "split", "partition", "replace", "removeprefix",
    "removesuffix", "len", "int", "float", "hash", "getattr", "hasattr", "setattr", "delattr", "eval", "exists", "is_file", "match", "search",
})  # fmt: skip
"""Functions and methods that compute with a text, or look something up by it."""
_MADE_BY = frozenset(
    {"str", "repr", "ascii", "format", "join", "zfill", "ljust", "rjust", "upper", "lower", "strip", "encode", "Path"}
)
_KNOWN = ("RankInts(", "RankBools(")
_SCOPES = (
    ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp
)  # fmt: skip
_THROUGH = (ast.JoinedStr, ast.FormattedValue, ast.BinOp, ast.Attribute, ast.IfExp, ast.NamedExpr)


def use_of_text() -> str | None:
    """The expression in which the user's code computes with the text that it asks for; None where it may be no more than shown."""
    frame = asking_frame(of_numbers=True)
    if frame is None or frame.f_globals.get("__name__", "").startswith("_pytest."):
        return None
    path = [
        *itertools.dropwhile(lambda node: isinstance(node, ast.Constant | ast.Name), _around(frame))
    ]  # within an f-string
    if not path or not _makes_text(path[0]):
        return None  # words of ours, of an error or of a comparison of the ints themselves
    for inner, outer in itertools.pairwise(path):
        if _computes(inner, outer):
            return first_line(ast.unparse(outer), 60)
        if isinstance(outer, ast.Call) and _name_of(outer) in _MADE_BY:
            continue
        if not isinstance(outer, (*_THROUGH, ast.Tuple, ast.List, ast.Set)):
            return None
    return None


TEXTS.append(use_of_text)


def _computes(inner: ast.AST, outer: ast.AST) -> bool:
    """Whether an expression computes with the text that a part of it makes."""
    if isinstance(outer, ast.Call):
        return _name_of(outer) in _READ_BY and not isinstance(inner, ast.Tuple | ast.List | ast.Set)
    if isinstance(outer, ast.Subscript):
        return inner is outer.slice
    if isinstance(outer, ast.Compare):
        others = [one for one in (outer.left, *outer.comparators) if one is not inner]
        return not any(_is_of_ranks(one) for other in others for one in ast.walk(other))
    return isinstance(outer, ast.Dict) and inner in outer.keys


def _makes_text(node: ast.AST) -> bool:
    """Whether an expression makes a text of a value."""
    if isinstance(node, ast.Call):
        return _name_of(node) in _MADE_BY
    return isinstance(node, ast.JoinedStr | ast.FormattedValue) or (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Mod)
        and isinstance(node.left, ast.Constant | ast.JoinedStr)
    )


def _is_of_ranks(node: ast.AST) -> bool:
    """Whether what a text is compared with is the text of an int of each rank, too: of another value, or `RankInts(0, 1)` itself."""
    return _makes_text(node) or (isinstance(node, ast.Constant) and any(known in str(node.value) for known in _KNOWN))


def _name_of(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def _around(frame: FrameType) -> Iterator[ast.AST]:
    """The expressions around what the frame evaluates, from the innermost on, as far as they are of one function; none before Python 3.11."""
    place = position(frame)
    if place is None or len(place) < 4:
        return
    first, last, begin, end = place
    node: ast.AST | None = tree_of("".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals)))
    found: list[ast.AST] = []
    while node is not None:
        if isinstance(node, (ast.stmt, *_SCOPES)):
            found.clear()
        else:
            found.append(node)
        node = next((one for one in ast.iter_child_nodes(node) if _covers(one, (first, begin), (last, end))), None)
    yield from reversed(found)


def _covers(node: ast.AST, begin: tuple[int, int], end: tuple[int, int]) -> bool:
    if not isinstance(node, ast.expr | ast.stmt):  # a keyword, a handler, a comprehension: what is in it decides
        return any(_covers(one, begin, end) for one in ast.iter_child_nodes(node))
    return (node.lineno, node.col_offset) <= begin and end <= (node.end_lineno or 0, node.end_col_offset or 0)
