"""`if rank == 0:` in lockstep: the statement runs once for each kind of rank, and what it assigns is joined.

All ranks share one control flow, so a condition has one answer.  Where the ranks differ, the `if` statement that asks is found in the
source, and is called as a function on the values of the ranks on which the condition holds, and of the others if there is an `else`.
Then the control flow goes on behind the statement: by the answer False, or by a jump of a trace function over the `else`.

Not so where the statement leaves its function or loop, where a kind of rank communicates alone, where nothing follows an `else` in its
block, or in code of torch: that raises `RanksDiverge` or `NotInLockstep`.
"""

from __future__ import annotations

import ast
import ctypes
import functools
import itertools
import linecache
import sys
import warnings
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from localtensor._util.call_sites import is_user_file
from localtensor.errors import NotInLockstep
from localtensor.lockstep.patches.device_mesh import (
    join_rank_groups,
    narrow_mode,
    narrow_value,
    ranks_of_row,
    without_other_modes,
)
from localtensor.lockstep.values import formatting
from localtensor.lockstep.values.local_tensor import left_alone_by_the_compiler
from localtensor.lockstep.values.partition import NOWHERE, Array, Partition, by_value

_LEAVES = (
    ast.Return, ast.Break, ast.Continue, ast.Yield, ast.YieldFrom, ast.Await, ast.Global, ast.Nonlocal, ast.Delete, ast.NamedExpr,
)  # fmt: skip
_QUERIES = (
    "get_rank",
    "get_world_size",
    "get_local_rank",
    "get_coordinate",
    "is_initialized",
    "len",
    "int",
    "min",
    "max",
)
"""Calls in a condition that may be made twice."""
_NAME = "_for_some_ranks"


@dataclass(frozen=True, slots=True)
class Branch:
    """An `if` statement as a function of the local variables that it names; it returns them.  `reads` are all names that it reads.

    `answer` is that of its condition where it does not hold; then the control flow comes to line `inside` of the `else`, from
    which it is to jump to line `behind`; both are 0 without an `else`.
    """

    code: CodeType
    reads: tuple[str, ...]
    variables: tuple[str, ...]
    assigns: tuple[str, ...]
    answer: bool
    inside: int = 0
    behind: int = 0


def run_for_some_ranks(mode: Any, values: Array, held: Array | None) -> bool | None:
    """Runs the `if` statement that asks for this condition, and returns the answer that skips it; None where it cannot be run so.

    `values` has for each rank whether the condition holds; `held` marks the ranks that ask.
    """
    frame = _asking_frame()
    branch = None if frame is None else branch_at(frame)
    if frame is None or branch is None or mode is None or (branch.inside and sys.gettrace() is not None):
        return None
    here = mode.everyone.row_of != NOWHERE
    groups = by_value(values.astype(np.int64), here if held is None else here & held)
    before = dict(frame.f_locals)
    after = [before] * groups.rows
    for row in range(groups.rows):
        holds = bool(values[groups.row_of == row].any()) is not branch.answer
        if holds or branch.inside:
            after[row] = _called(mode, branch, frame, before, ranks_of_row(groups, row))
    _assign(frame, _joined(mode, branch, before, after, groups))
    if branch.inside:
        _jump(frame, branch)
    return branch.answer


left_alone_by_the_compiler(run_for_some_ranks)


def _called(mode: Any, branch: Branch, frame: FrameType, before: dict[str, Any], kind: Partition) -> dict[str, Any]:
    """The variables after the statement on these ranks."""
    code = next(one for one in branch.code.co_consts if isinstance(one, CodeType) and one.co_name == _NAME)
    function = FunctionType(code, frame.f_globals)
    scope = {**frame.f_globals, **before}
    shared = {name: _items(scope[name]) for name in branch.reads if name in scope}
    with narrow_mode(mode, kind), without_other_modes(mode), _NoWrites():
        given = [narrow_value(mode, before.get(name, _UNSET), kind) for name in branch.variables]
        after = function(*given)
    for name, items in shared.items():
        now = _items(scope[name])
        if len(now) != len(items) or any(a is not b for a, b in zip(now, items, strict=True)):
            raise NotInLockstep(f"if: {name}", "it is changed on some ranks only, and is one object for all")
    return {name: value for name, value in after.items() if value is not _UNSET}


class _NoWrites(TorchDispatchMode):
    """Refuses ops that write to tensors which were there before: the other ranks have them, too."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema, kwargs = func._schema, kwargs or {}
        if schema.is_mutable:
            named = {**dict(zip((one.name for one in schema.arguments), args, strict=False)), **kwargs}
            for one in schema.arguments:
                written = named.get(one.name) if one.alias_info is not None and one.alias_info.is_write else None
                if any(isinstance(x, Tensor) and id(x) not in self._made for x in tree_leaves(written)):
                    raise NotInLockstep(f"if: {func}", "it writes on some ranks only to a tensor that all of them have")
        done = func(*args, **kwargs)
        if not any(one.alias_info is not None for one in schema.returns):
            self._made.update((id(x), x) for x in tree_leaves(done) if isinstance(x, Tensor))
        return done


def _items(value: object) -> list[Any]:
    """What a container or an object holds, and its containers; nothing of what cannot be changed."""
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, list | set):
        return list(value)
    ours = type(value).__module__.startswith(("torch.distributed.", "torch._C", "localtensor."))  # groups, meshes
    if ours or isinstance(value, type | ModuleType | FunctionType | Tensor) or not hasattr(value, "__dict__"):
        return []
    held = [*vars(value).values()]
    return [*held, *(item for one in held if isinstance(one, dict | list | set) for item in _items(one))]


def _joined(
    mode: Any, branch: Branch, before: dict[str, Any], after: Sequence[dict[str, Any]], groups: Partition
) -> dict[str, Any]:
    """The variables that are assigned, with the value of each kind of rank.  One that only some have is that of those."""
    joined: dict[str, Any] = {}
    for name in branch.assigns:
        each = [found.get(name, _UNSET) for found in after]
        if any(one is _UNSET for one in each):  # other ranks have no such variable, and cannot read it
            joined.update((name, one) for one in each if one is not _UNSET)
            continue
        if any(isinstance(one, DTensor) for one in each) and any(one is not each[0] for one in each):
            raise NotInLockstep(f"if: {name}", "a DTensor is assigned on some ranks only, and is one object for all")
        own = [
            narrow_value(mode, one, ranks_of_row(groups, row)) if found is before else one
            for row, (one, found) in enumerate(zip(each, after, strict=True))
        ]
        joined[name] = join_rank_groups(mode, own, groups)
    return joined


def _jump(frame: FrameType, branch: Branch) -> None:
    """Has the frame go on behind the statement when it comes to the `else`."""

    def trace(seen: FrameType, event: str, _: Any) -> Any:
        if seen is not frame or event != "line" or frame.f_lineno < branch.inside:
            return trace
        with warnings.catch_warnings():  # since Python 3.12 a jump gives None to variables without a value, and says so
            warnings.simplefilter("ignore", RuntimeWarning)
            frame.f_lineno = branch.behind  # type: ignore[misc]  # a trace function may
        frame.f_trace = None
        sys.settrace(None)
        return None

    frame.f_trace = trace
    sys.settrace(lambda *_: None)


class _Unset:
    """A variable that the frame does not have."""


_UNSET = _Unset()


def _asking_frame() -> FrameType | None:
    """The frame of user code that asks for the answer of a condition; None if torch does."""
    frame: FrameType | None = sys._getframe(1)
    own = torch.SymBool.__bool__.__code__, torch.SymInt.__bool__.__code__
    while frame is not None and frame.f_code is not own[0]:
        frame = frame.f_back
    while frame is not None and frame.f_code in own:
        frame = frame.f_back
    if frame is None or any(name.startswith("__compiled_fn") for name in frame.f_code.co_names):
        return None  # nor of what Dynamo has made of a function: its variables are elsewhere
    return frame if is_user_file(frame.f_code.co_filename) else None


def branch_at(frame: FrameType) -> Branch | None:
    """The `if` statement whose condition the frame asks for, if it can be run for some ranks."""
    place = _position(frame)
    lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)
    code = frame.f_code
    own = () if frame.f_locals is frame.f_globals else (*code.co_varnames, *code.co_cellvars)
    alone = code.co_name == _NAME  # a statement that was made a function: it returns on the line behind
    return None if place is None else _branch("".join(lines), code.co_filename, place, own, code.co_freevars, alone)


def _position(frame: FrameType) -> tuple[int, ...] | None:
    """The lines and columns of the expression that is asked; on Python 3.10 the line alone."""
    if not hasattr(frame.f_code, "co_positions"):
        return (frame.f_lineno,)
    place = next(iter([*frame.f_code.co_positions()][frame.f_lasti // 2 :]), None)
    return None if place is None or None in place else tuple(at for at in place if at is not None)


@functools.lru_cache(512)
def _branch(
    text: str, file: str, place: tuple[int, ...], own: tuple[str, ...], free: tuple[str, ...], alone: bool
) -> Branch | None:
    """The statement in a text whose condition is at this place, in a function with variables of its `own` and `free` ones."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return None
    behind = dict(_following(tree.body))
    for node in ast.walk(tree):
        if isinstance(node, ast.If):
            whole = _is_at(node, place)  # on Python 3.11 the jump has the place of the statement
            answers = {answer for one, answer in _asked(node.test, answer=False) if whole or _is_at(one, place)}
            if len(answers) == 1:
                after = behind[node] or ((node.end_lineno or 0) + 1 if alone else 0)
                fits = _is_fit(node, free) and (not node.orelse or after > (node.end_lineno or after))
                return _made(node, answers.pop(), file, {*own, *free}, after) if fits else None
    return None


def _following(block: Sequence[ast.stmt], behind: int = 0) -> Iterator[tuple[ast.AST, int]]:
    """Each `if` statement with the line on which the control flow goes on behind it; 0 where nothing follows in its block.

    Behind the last statement within an `if` comes what follows that one.
    """
    for one, after in itertools.zip_longest(block, block[1:]):
        line = behind if after is None else after.lineno
        if isinstance(one, ast.If):
            yield one, line
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(one, name, [])
            if inner and isinstance(inner, list):
                yield from _following(inner, line if isinstance(one, ast.If) else 0)


def _asked(test: ast.expr, *, answer: bool) -> Iterator[tuple[ast.expr, bool]]:
    """The parts of a condition, each with the answer that skips the statement: those of `and` and `not`."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) and not answer:
        for value in test.values:
            yield from _asked(value, answer=answer)
    elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _asked(test.operand, answer=not answer)
    elif not isinstance(test, ast.BoolOp):
        yield test, answer


def _is_at(node: ast.expr | ast.stmt, place: tuple[int, ...]) -> bool:
    if len(place) == 1:
        return node.lineno == place[0]
    return (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset) == place


def _is_fit(node: ast.If, free: tuple[str, ...]) -> bool:
    """Whether the statement stays in its function, sets no attribute, and has a condition that may be evaluated twice."""
    body = [one for statement in (*node.body, *node.orelse) for one in ast.walk(statement)]
    leaves = any(isinstance(one, _LEAVES) for one in body)
    shared = any(isinstance(one, ast.Attribute | ast.Subscript) and isinstance(one.ctx, ast.Store) for one in body)
    named = any(isinstance(one, ast.Name) and one.id in ("super", "locals", "vars", "exec", "eval") for one in body)
    private = any(
        isinstance(one, ast.Attribute) and one.attr.startswith("__") and not one.attr.endswith("__") for one in body
    )
    twice = all(_name_of(one.func) in _QUERIES for one in ast.walk(node.test) if isinstance(one, ast.Call))
    assigned = {one.id for one in body if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
    return not (leaves or shared or named or private or assigned & {*free}) and twice


def _name_of(function: ast.expr) -> str:
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def _made(node: ast.If, answer: bool, file: str, local: AbstractSet[str], behind: int) -> Branch:
    names = [one for one in ast.walk(node) if isinstance(one, ast.Name)]
    assigns = {one.id for one in names if isinstance(one.ctx, ast.Store)} | set(_imported(node))
    variables = sorted({one.id for one in names if one.id in local} | assigns)
    arguments = ast.arguments([], [ast.arg(name) for name in variables], None, [], [], None, [])
    back = ast.parse("return locals()").body
    for one in ast.walk(back[0]):
        if isinstance(one, ast.stmt | ast.expr):
            one.lineno = one.end_lineno = behind or (node.end_lineno or 0) + 1
    made: Any = ast.FunctionDef(_NAME, arguments, [node, *back], [], None)
    made.type_params = []
    tree = ast.fix_missing_locations(ast.Module([made], []))
    code, inside = compile(tree, file, "exec"), node.orelse[0].lineno if node.orelse else 0
    reads = {one.id for one in names if isinstance(one.ctx, ast.Load)}
    return Branch(
        code, tuple(sorted(reads)), tuple(variables), tuple(sorted(assigns)), answer, inside, behind if inside else 0
    )


def _imported(node: ast.If) -> Iterator[str]:
    for one in ast.walk(node):
        if isinstance(one, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in one.names)


def _assign(frame: FrameType, values: dict[str, Any]) -> None:
    """Gives the frame's variables these values."""
    local = frame.f_locals  # before Python 3.13 a copy, which is made anew whenever it is asked for
    local.update(values)
    if local is not frame.f_globals and sys.version_info < (3, 13):
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))


formatting.BRANCHES[:] = [run_for_some_ranks]
