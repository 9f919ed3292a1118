"""`if rank == 0:` in lockstep: the statement runs once for each kind of rank, and what it assigns is joined.

All ranks share one control flow, so a condition has one answer.  Where the ranks differ, the statement that asks is found in the source
(branch_source.py), its condition is evaluated for each kind of rank, and what follows is called as a function on the values of the ranks on
which it holds, and of the others if there is an `else`.  Then the control flow goes on behind the statement: by the answer that skips it, or
by a jump of a trace function over the `else`.  An assignment of `a if condition else b` runs for each kind, and once more by itself; then a
trace function assigns the joined values.  An assertion fails if it does on any rank.

Not so where the statement leaves its function or loop, where a kind of rank communicates alone, where nothing follows an `else` in its
block, or in code of torch: that raises `RanksDiverge` or `NotInLockstep`.
"""

from __future__ import annotations

import ctypes
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from localtensor._util.call_sites import is_user_file
from localtensor.errors import NotInLockstep
from localtensor.lockstep.comms.collectives import select, stacked_value
from localtensor.lockstep.dispatch.dispatcher import plain_dispatch
from localtensor.lockstep.patches.branch_source import TEST, Branch, branch_at, list_at
from localtensor.lockstep.patches.device_mesh import (
    join_rank_groups,
    keep_ranks,
    narrow_mode,
    narrow_value,
    ranks_of_row,
    wait_for,
    without_other_modes,
)
from localtensor.lockstep.values import formatting
from localtensor.lockstep.values.local_tensor import LocalTensor, wrap
from localtensor.lockstep.values.partition import NOWHERE, Array, Partition, by_value

_OURS = str(Path(__file__).parents[2])


class _Differs(Exception):  # it is no error: the condition is evaluated for the kinds of rank apart
    """A part of a condition that is evaluated for some ranks differs between them: its values by rank."""


_decided: dict[FrameType, Branch] = {}
"""The statement that has run for some ranks, and whose condition may ask again in this frame."""


def run_for_some_ranks(mode: Any, values: Array, held: Array | None) -> bool | None:
    """Runs the statement that asks for this condition, and returns the answer that skips it; None where it cannot be run so.

    `values` has for each rank whether what is asked for holds; `held` marks the ranks that ask.
    """
    frame = _asking_frame()
    if frame is None or mode is None:
        return None
    if frame.f_code.co_name == TEST:
        raise _Differs(values)
    branch = branch_at(frame)
    if branch is None:
        return None
    decided = _decided.get(frame)
    if decided is not None and decided.lines == branch.lines:
        return not branch.leads
    traces = branch.inside or branch.again or (branch.lasts and not branch.whole)
    if traces and (sys.gettrace() is not None or decided is not None):
        return None
    here = mode.everyone.row_of != NOWHERE
    before = dict(frame.f_locals)
    truth = _truth(mode, branch, frame, before, values, here if held is None else here & held)
    groups = by_value(truth.astype(np.int64), here if held is None else here & held)
    if groups.rows == 1 or branch.fails:
        return branch.leads is bool(truth[groups.row_of >= 0].all())
    if branch.whole:
        return None
    after = [before] * groups.rows
    for row, code in enumerate((branch.otherwise, branch.holds)):  # by_value sorts: False, then True
        if code is not None:
            after[row] = _called(mode, branch, code, frame, before, ranks_of_row(groups, row))
    joined = _joined(mode, branch, before, after, groups)
    if not branch.again:
        _assign(frame, joined)
    if traces:
        _follow(frame, branch, joined)
    return not branch.leads


def _truth(mode: Any, branch: Branch, frame: FrameType, before: dict[str, Any], values: Array, held: Array) -> Array:
    """Whether the condition holds, by rank: it is evaluated for each kind of rank, where it asks for a value that differs."""
    truth, left = np.zeros(mode.world, bool), [by_value(values.astype(np.int64), held)]
    while left:
        groups = left.pop()
        for row in range(groups.rows):
            kind = ranks_of_row(groups, row)
            try:
                truth[kind.held] = _called(mode, branch, branch.test, frame, before, kind)
            except _Differs as found:
                left.append(by_value(found.args[0].astype(np.int64), kind.held))
    return truth


def _called(
    mode: Any, branch: Branch, code: CodeType, frame: FrameType, before: dict[str, Any], kind: Partition
) -> Any:
    """What a function of the statement returns on these ranks: its variables afterwards, or the condition's truth."""
    function = FunctionType(code, frame.f_globals)
    scope = {**frame.f_globals, **before}
    shared = {name: _items(scope[name]) for name in branch.reads if name in scope}
    with narrow_mode(mode, kind), without_other_modes(mode), _NoWrites():
        given = [_narrowed(mode, before.get(name, _UNSET), kind) for name in branch.variables]
        after = function(*given)
    for name, items in shared.items():
        now = _items(scope[name])
        if len(now) != len(items) or any(a is not b for a, b in zip(now, items, strict=True)):
            raise NotInLockstep(f"if: {name}", "it is changed on some ranks only, and is one object for all")
    return {name: value for name, value in after.items() if value is not _UNSET} if code is not branch.test else after


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
            _narrowed(mode, one, ranks_of_row(groups, row)) if found is before else one
            for row, (one, found) in enumerate(zip(each, after, strict=True))
        ]
        joined[name] = _with_gradient(mode, own, groups)
    return joined


def _narrowed(mode: Any, value: Any, kind: Partition) -> Any:
    """The value on these ranks; gradients of a tensor go back to these alone."""
    if type(value) in (list, tuple):
        return type(value)(_narrowed(mode, one, kind) for one in value)
    if type(value) in (Tensor, LocalTensor, Parameter) and value.requires_grad and torch.is_grad_enabled():
        return _Narrow.apply(value, mode, kind)
    return narrow_value(mode, value, kind)


def _with_gradient(mode: Any, found: Sequence[Any], groups: Partition) -> Any:
    """One value of the values of each kind of rank, whose gradients go back to each."""
    if all(type(one) in (list, tuple) for one in found) and len({len(one) for one in found}) == 1:
        return type(found[0])(_with_gradient(mode, column, groups) for column in zip(*found, strict=True))
    if torch.is_grad_enabled() and any(isinstance(one, Tensor) and one.requires_grad for one in found):
        for row, one in enumerate(found):
            _check_leaves(one, groups.row_of == row)
        return _Join.apply(mode, groups, *map(wait_for, found))
    return join_rank_groups(mode, found, groups)


def _check_leaves(x: object, here: Array) -> None:
    """Raises `NotInLockstep` if a tensor of these ranks gives gradients to one that other ranks have, too, but by its local variables."""
    left, seen = [getattr(x, "grad_fn", None)], set()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and not (
            isinstance(leaf, LocalTensor) and (here | (leaf._partition.row_of == NOWHERE)).all()
        ):
            problem = "it gives a gradient on some ranks only to a tensor that all of them have; as a local variable of the function it can"
            raise NotInLockstep("if: requires_grad", problem)
        if node.name() != "_NarrowBackward":
            left.extend(each for each, _ in node.next_functions)


class _Narrow(torch.autograd.Function):
    """A tensor on some ranks; its gradient is zero on the others."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mode: Any, kind: Partition) -> Any:
        ctx.whole, ctx.mode, ctx.kind = x.detach(), mode, kind
        return narrow_value(mode, x, kind) if isinstance(x, LocalTensor) else keep_ranks(mode, x, kind)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        on_all = [stacked_value(ctx.mode, one) for one in (grads[0], torch.zeros_like(ctx.whole))]
        number = np.where(ctx.kind.row_of != NOWHERE, 0, np.where(on_all[1].held.row_of != NOWHERE, 1, NOWHERE))
        with plain_dispatch():
            return wrap(*select(on_all, number), ctx.mode), None, None


class _Join(torch.autograd.Function):
    """One tensor of those of each kind of rank."""

    @staticmethod
    def forward(ctx: Any, mode: Any, groups: Partition, *found: Tensor) -> Any:
        ctx.mode, ctx.groups = mode, groups
        return join_rank_groups(mode, found, groups)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        kinds = [ranks_of_row(ctx.groups, row) for row in range(ctx.groups.rows)]
        return None, None, *(narrow_value(ctx.mode, grads[0], kind) for kind in kinds)


def _follow(frame: FrameType, branch: Branch, joined: dict[str, Any]) -> None:
    """Follows the frame through the rest of the statement: it jumps over an `else`, and the variables of an assignment are assigned again."""
    _decided[frame] = branch

    def trace(seen: FrameType, event: str, _: Any) -> Any:
        if seen is not frame or event not in ("line", "return"):
            return trace
        if event == "line" and branch.lines[0] <= frame.f_lineno <= branch.lines[1]:
            return trace
        del _decided[frame]
        if branch.again:
            _assign(frame, joined)
        elif branch.inside and event == "line":
            with (
                warnings.catch_warnings()
            ):  # since Python 3.12 a jump gives None to variables without a value, and says so
                warnings.simplefilter("ignore", RuntimeWarning)
                frame.f_lineno = branch.behind  # type: ignore[misc]  # a trace function may
        frame.f_trace = None
        sys.settrace(None)
        return None

    frame.f_trace = trace
    sys.settrace(lambda *_: None)


def item_for_each_rank(mode: Any, values: Array, held: Array | None) -> int | None:
    """The place of the items of a list that is indexed by an int of each rank, joined; None if it cannot be done so.

    The list has them as its last item until the frame's next instruction, in which a trace function takes it away again.
    """
    frame = _asking_frame()
    found = None if frame is None or mode is None or sys.gettrace() is not None else list_at(frame)
    if frame is None or not found:
        return None
    here = mode.everyone.row_of != NOWHERE
    here = here if held is None else here & held
    if ((values < -len(found)) | (values >= len(found)))[here].any():
        return len(found)  # IndexError, as on that rank
    groups = by_value(values, here)
    kinds = [ranks_of_row(groups, row) for row in range(groups.rows)]
    items = [found[int(values[kind.row_of != NOWHERE][0])] for kind in kinds]
    if any(isinstance(one, DTensor) and one is not items[0] for one in items):
        return None
    joined = _with_gradient(mode, [_narrowed(mode, *pair) for pair in zip(items, kinds, strict=True)], groups)

    def trace(seen: FrameType, event: str, _: Any) -> Any:
        if seen is not frame:
            return trace
        found.pop()
        frame.f_trace_opcodes, frame.f_trace = False, None
        sys.settrace(None)
        return None

    found.append(joined)
    frame.f_trace, frame.f_trace_opcodes = trace, True
    sys.settrace(lambda *_: None)
    return len(found) - 1


class _Unset:
    """A variable that the frame does not have."""


_UNSET = _Unset()


def _asking_frame() -> FrameType | None:
    """The frame of user code that asks for the answer of a condition or for an index; None if torch does."""
    frame: FrameType | None = sys._getframe(1)
    own = [one.__code__ for one in (torch.SymBool.__bool__, torch.SymInt.__bool__, torch.SymInt.__index__, Tensor.__contains__)]
    while frame is not None and (frame.f_code in own or frame.f_code.co_filename.startswith(_OURS)):
        frame = frame.f_back
    return frame if frame is not None and is_user_file(frame.f_code.co_filename) else None


def _assign(frame: FrameType, values: dict[str, Any]) -> None:
    """Gives the frame's variables these values."""
    local = frame.f_locals  # before Python 3.13 a copy, which is made anew whenever it is asked for
    local.update(values)
    if local is not frame.f_globals and sys.version_info < (3, 13):
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))


formatting.BRANCHES[:] = [run_for_some_ranks]
formatting.ITEMS[:] = [item_for_each_rank]
