"""`if rank == 0:` in lockstep: the statement runs once for each kind of rank, and what it assigns is joined.

All ranks share one control flow, so a condition has one answer.  Where the ranks differ, the statement that asks is found in the source
(branch_source.py), its condition is evaluated for each kind of rank, and what follows is called as a function on the values of the ranks on
which it holds.  Then the control flow goes on behind the statement, by the answer that skips it.  With an `else`, that is called for the other
ranks, and the frame itself runs what follows where the condition holds, in the mode narrowed to those ranks by a trace function, which joins
the variables behind it.  An assignment of `a if condition else b` runs for each kind, and once more by itself; then a
trace function assigns the joined values.  An assertion fails if it does on any rank.

Not so where the statement leaves its function or loop, where a kind of rank communicates alone, or in code of torch: that raises
`RanksDiverge` or `NotInLockstep`.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import CodeType, FrameType, FunctionType
from typing import Any

import numpy as np
from torch.distributed.tensor import DTensor

from localtensor._util.patching import left_alone_by_the_compiler
from localtensor.errors import NotHeld, NotInLockstep, RanksDiverge, ValuesDiffer
from localtensor.errors.base import rank_names
from localtensor.lockstep.patches.branch_effects import Effects, NoWrites
from localtensor.lockstep.patches.branch_items import assignment_at, list_at
from localtensor.lockstep.patches.branch_source import TEST, Branch, asking_frame, branch_at, names_read
from localtensor.lockstep.patches.branch_values import UNSET, Variables, joined_with_gradients, narrowed, variable_on
from localtensor.lockstep.patches.device_mesh import narrow_mode, ranks_of_row, without_other_modes
from localtensor.lockstep.patches.tracing import check_one_control_flow
from localtensor.lockstep.values import formatting
from localtensor.lockstep.values.partition import NOWHERE, Array, Partition, by_value

_ERRORS = (
    ArithmeticError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
    NotHeld,
    NotInLockstep,
    RanksDiverge,
    ValuesDiffer,
)


class _Differs(Exception):  # it is no error: the condition is evaluated for the kinds of rank apart
    """A part of a condition that is evaluated for some ranks differs between them: its values by rank."""


_decided: dict[FrameType, Branch] = {}
"""The statement that has run for some ranks, and whose condition may ask again in this frame."""


def run_for_some_ranks(mode: Any, values: Array, held: Array | None) -> bool | None:
    """Runs the statement that asks for this condition, and returns the answer that skips it; None where it cannot be run so.

    `values` has for each rank whether what is asked for holds; `held` marks the ranks that ask.
    """
    frame = asking_frame()
    if frame is None or mode is None:
        return None
    if frame.f_code.co_name == TEST:
        raise _Differs(values)
    branch = branch_at(frame)
    if branch is None:
        return None
    check_one_control_flow(formatting.node_text("RankBools", values, held))
    decided = _decided.get(frame)
    if decided is not None and decided.lines == branch.lines:
        return branch.leads is bool(decided.arm[0])
    traces = branch.arm[0] or branch.again or (branch.lasts and not branch.whole)
    if traces and sys.gettrace() not in (None, _no_calls):  # a debugger's, or of coverage
        return None
    here = mode.everyone.row_of != NOWHERE
    here = here if held is None else here & held
    before = Variables(frame)
    results = _test_results(mode, branch, frame, before, values, here)
    groups = by_value(results.astype(np.int64), here)
    if groups.rows == 1 or branch.fails:
        return branch.leads is bool(results[here].all())
    return None if branch.whole else _run(mode, branch, frame, before, groups)


left_alone_by_the_compiler(run_for_some_ranks)


def _run(mode: Any, branch: Branch, frame: FrameType, before: Variables, groups: Partition) -> bool:
    """Runs the statement for the ranks on which its condition holds not, and does, and returns what the part that asks is to be."""
    after: list[dict[str, Any]] = [before] * groups.rows
    for row, code in enumerate(
        (branch.otherwise, None if branch.arm[0] else branch.holds)
    ):  # by_value sorts: False, then True
        if code is not None:
            after[row] = _called(mode, branch, code, frame, before, ranks_of_row(groups, row))
    if branch.arm[0]:
        _follow(frame, branch, branch.lines, _Arm(mode, branch, frame, (before, after), groups).begin)
        return branch.leads
    joined = _joined(mode, branch, before, after, groups)
    if branch.again:
        _follow(frame, branch, branch.lines, lambda event, error: _assign(frame, joined))
    else:
        _assign(frame, joined)
        if branch.lasts:
            _follow(frame, branch, branch.lines, lambda event, error: None)
    return not branch.leads


def _test_results(mode: Any, branch: Branch, frame: FrameType, before: Variables, values: Array, held: Array) -> Array:
    """Whether the condition holds, by rank: it is evaluated for each kind of rank, where it asks for a value that differs."""
    results, left = np.zeros(mode.world, bool), [by_value(values.astype(np.int64), held)]
    while left:
        groups = left.pop()
        for row in range(groups.rows):
            kind = ranks_of_row(groups, row)
            try:
                results[kind.held] = _called(mode, branch, branch.test, frame, before, kind)
            except _Differs as found:
                left.append(by_value(found.args[0].astype(np.int64), kind.held))
    return results


def _called(mode: Any, branch: Branch, code: CodeType, frame: FrameType, before: Variables, kind: Partition) -> Any:
    """What a function of the statement returns on these ranks: its variables afterwards, or whether the condition holds."""
    function, needed = FunctionType(code, frame.f_globals), names_read(code)
    with _on_ranks(mode, branch, {**frame.f_globals, **before}, kind):
        given = {name: variable_on(mode, before.get(name, UNSET), kind, name in needed) for name in branch.variables}
        own = _own(branch, given)
        after = function(*given.values())
        _check_effects(own)
    return {name: value for name, value in after.items() if value is not UNSET} if code is not branch.test else after


@contextmanager
def _on_ranks(mode: Any, branch: Branch, scope: dict[str, Any], kind: Partition) -> Iterator[None]:
    """While inside, the statement runs on these ranks.  Raises `NotInLockstep` if it has changed what all ranks have."""
    shared = Effects({name: scope[name] for name in branch.reads if name in scope})
    with narrow_mode(mode, kind), without_other_modes(mode), NoWrites():
        try:
            yield
        except _Differs:
            raise
        except Exception as error:  # why: it is raised again; the program may catch it, for all ranks
            if kind.held is not None:
                mode.caught.note(error, f"an error of {rank_names(np.flatnonzero(kind.held).tolist())}")
            raise
    _check_effects(shared)


def _own(branch: Branch, given: dict[str, Any]) -> Effects:
    """What these ranks alone have: lists are copies.  What the statement reads, and is none, all ranks have."""
    return Effects({name: x for name, x in given.items() if name not in branch.reads or type(x) in (list, tuple)})


def _check_effects(before: Effects) -> None:
    if name := before.changed():
        raise NotInLockstep(f"if: {name}", "it is changed on some ranks only, and is one object for all")


class _Arm:
    """What follows where a condition holds, run by the frame itself on those ranks, while a trace function follows it."""

    def __init__(
        self,
        mode: Any,
        branch: Branch,
        frame: FrameType,
        values: tuple[Variables, list[dict[str, Any]]],
        groups: Partition,
    ) -> None:
        self._mode, self._branch, self._frame, self._groups = mode, branch, frame, groups
        self._before, self._after = values
        self._stack = ExitStack()

    def begin(self, event: str, error: Any) -> Next:
        """Narrows the mode and the variables as the frame comes to the first line."""
        if event == "return" or error is not None:
            return None  # the condition has raised
        kind, names = ranks_of_row(self._groups, 1), [name for name in self._branch.variables if name in self._before]
        self._stack.enter_context(_on_ranks(self._mode, self._branch, {**self._frame.f_globals, **self._before}, kind))
        needed = names_read(self._branch.holds) if self._branch.holds is not None else frozenset()
        with self._stack:
            found = {name: variable_on(self._mode, self._before[name], kind, name in needed) for name in names}
            self._stack = self._stack.pop_all()
        _running.append(self)
        given = {name: value for name, value in found.items() if value is not UNSET}
        self._unset = found.keys() - given.keys()  # the frame has them, and does not read them
        self._given = _own(self._branch, given)
        _assign(self._frame, given)
        return self._branch.arm, self.end

    def end(self, event: str, error: Any) -> Next:
        """Joins the variables behind the last line; restores them where the frame has raised an error."""
        _running.remove(self)
        now = dict(self._frame.f_locals)
        kept = {name for name in self._unset if now.get(name) is self._before[name]}
        self._after[1] = {name: now[name] for name in self._branch.variables if name in now and name not in kept}
        _assign(self._frame, {name: self._before[name] for name in self._branch.variables if name in self._before})
        if error is not None:
            self._stack.__exit__(*error)
            return None
        _check_effects(self._given)
        self._stack.close()
        _assign(self._frame, _joined(self._mode, self._branch, self._before, self._after, self._groups))
        return None

    def is_left_by(self, mode: Any) -> bool:
        """Closes it if the mode ends within: another trace function has taken the place of that which follows the frame."""
        if self._mode is mode:
            _decided.pop(self._frame, None)
            self._stack.__exit__(RuntimeError, None, None)
        return self._mode is mode


_running: list[_Arm] = []


def leave(mode: Any) -> bool:
    """Whether a statement of this mode was left in the middle, as by a debugger; the mode is whole again."""
    left = [arm for arm in reversed(_running) if arm.is_left_by(mode)]
    _running[:] = [arm for arm in _running if arm not in left]
    return bool(left)


Next = tuple[tuple[int, int], Callable[[str, Any], Any]] | None
"""Further lines to follow, and what to call behind them."""


def _joined(
    mode: Any, branch: Branch, before: Variables, after: Sequence[dict[str, Any]], groups: Partition
) -> dict[str, Any]:
    """The variables that are assigned, with the value of each kind of rank.  One that only some have is that of those."""
    joined: dict[str, Any] = {}
    for name in branch.assigns:
        shared = any(before.shares(name, found) for found in after)
        each = [
            variable_on(mode, found.get(name, UNSET), ranks_of_row(groups, row))
            if found is before
            else found.get(name, UNSET)
            for row, found in enumerate(after)
        ]
        if any(one is UNSET for one in each):  # other ranks have no such variable, and cannot read it
            joined.update((name, one) for one in each if one is not UNSET)
            continue
        whole = next((type(one).__name__ for one in each if isinstance(one, DTensor | np.ndarray)), None)
        if whole and any(one is not each[0] for one in each):
            problem = f"a value of type {whole} is assigned on some ranks only, and is one object for all"
            raise NotInLockstep(f"if: {name}", problem)
        joined[name] = joined_with_gradients(mode, each, groups, shared)
    return joined


def _follow(frame: FrameType, branch: Branch, lines: tuple[int, int], then: Callable[[str, Any], Any]) -> None:
    """Calls `then` with the trace event and the error of the frame, or None, when it leaves these lines, and goes on with what it returns."""
    outside = _decided.get(frame)
    _decided[frame] = branch
    state: list[Any] = [(lines, then), None]

    def trace(seen: FrameType, event: str, argument: Any) -> Any:
        if seen is frame and event == "exception":
            state[1] = argument
        (first, last), then = state[0]
        if seen is not frame or event not in ("line", "return"):
            return trace
        if event == "line" and first <= frame.f_lineno <= last:
            state[1] = None  # it is caught there
            return trace
        state[0] = None
        try:
            state[0] = then(event, state[1])
        finally:
            if state[0] is None:
                _decided.pop(frame, None)
                _decided.update({} if outside is None else {frame: outside})
                give_back()
        if state[0] is not None:
            return trace
        if state[1] is not None:
            give_on(frame, "exception", state[1])
        return give_on(frame, event, argument)

    left_alone_by_the_compiler(trace)  # a compiled function resumes behind a graph break with the compiler on
    give_back, give_on = _trace(frame, trace)


def _no_calls(*_: Any) -> None:
    """The trace function of a thread in which a frame is followed: other frames are not."""


def _trace(frame: FrameType, trace: Any) -> tuple[Callable[[], None], Callable[..., Any]]:
    """Follows the frame by this trace function, and returns one that restores what followed it before, and one that calls that."""
    former, of_thread = frame.f_trace, sys.gettrace()

    def give_back() -> None:
        frame.f_trace_opcodes, frame.f_trace = False, former
        sys.settrace(of_thread)

    def give_on(seen: FrameType, event: str, argument: Any) -> Any:
        return None if former is None or event == "opcode" else former(seen, event, argument)

    frame.f_trace = trace
    sys.settrace(_no_calls)
    return give_back, give_on


def item_for_each_rank(mode: Any, values: Array, held: Array | None) -> int | None:
    """The place of the items of a list that is indexed by an int of each rank, joined; None if it cannot be done so.

    The list has them as its last item until the frame's next instruction, in which a trace function takes it away again.
    """
    frame = asking_frame()
    if mode is None or sys.gettrace() not in (None, _no_calls):
        return None
    here = _ranks_here(mode, held)
    found = None if frame is None or _is_replaced(frame) else list_at(frame)
    if frame is None or not found:
        rank = rank_of_assignment(mode, values, held)
        return None if rank is None else int(values[rank])
    outside = ((values < -len(found)) | (values >= len(found)))[here]
    if outside.any():
        return len(found) if outside.all() else None  # IndexError, as on each rank; on some, the others go on
    groups = by_value(values, here)
    kinds = [ranks_of_row(groups, row) for row in range(groups.rows)]
    items = [found[int(values[kind.row_of != NOWHERE][0])] for kind in kinds]
    if any(isinstance(one, DTensor) and one is not items[0] for one in items):
        return None
    pieces = [narrowed(mode, *pair) for pair in zip(items, kinds, strict=True)]
    joined = joined_with_gradients(mode, pieces, groups, shared=True)

    def trace(seen: FrameType, event: str, argument: Any) -> Any:
        if seen is not frame:
            return trace
        found.pop()
        give_back()
        return give_on(seen, event, argument)

    found.append(joined)
    frame.f_trace_opcodes = True
    give_back, give_on = _trace(frame, trace)
    return len(found) - 1


def rank_of_assignment(mode: Any, kinds: Array, held: Array | None) -> int | None:
    """Runs the assignment that asks for a number of each rank for each kind of rank, and returns the rank whose number it gets now.

    It then gets the joined values.  None where that cannot be, or fails on some ranks, of which the others may know nothing.
    """
    frame = None if mode is None or sys.gettrace() not in (None, _no_calls) else asking_frame(of_numbers=True)
    if frame is None:
        return None
    here = _ranks_here(mode, held)
    if _is_replaced(frame):
        return int(np.flatnonzero(here)[0])
    branch, groups = assignment_at(frame), by_value(kinds, here)
    if branch is None or branch.holds is None or groups.rows == 1:
        return None
    before = Variables(frame)
    every = [ranks_of_row(groups, row) for row in range(groups.rows)]
    try:
        after = [_called(mode, branch, branch.holds, frame, before, kind) for kind in every]
        joined = _joined(mode, branch, before, after, groups)
    except _ERRORS:
        return None
    _follow(frame, branch, branch.lines, lambda event, error: _assign(frame, joined))
    return int(np.flatnonzero(here)[0])


def _ranks_here(mode: Any, held: Array | None) -> Array:
    here: Array = mode.everyone.row_of != NOWHERE
    return here if held is None else here & held


def _is_replaced(frame: FrameType) -> bool:
    """Whether the frame runs an assignment whose variables get other values behind it."""
    branch = _decided.get(frame)
    return branch is not None and branch.again and branch.lines[0] <= frame.f_lineno <= branch.lines[1]


def _assign(frame: FrameType, values: dict[str, Any]) -> None:
    """Gives the frame's variables these values."""
    local = frame.f_locals  # before Python 3.13 a copy, which is made anew whenever it is asked for
    local.update(values)
    if local is not frame.f_globals and sys.version_info < (3, 13):
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))


formatting.BRANCHES[:] = [run_for_some_ranks]
formatting.ITEMS[:] = [item_for_each_rank]
formatting.CHOICES[:] = [rank_of_assignment]
