"""A call put through lockstep, held against the slow twin."""

import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from localtensor.errors import NotInLockstep, RanksDiverge
from localtensor.lockstep.dispatch import execute
from localtensor.lockstep.dispatch.op_table import op_traits
from localtensor.lockstep.mode import LocalTensorMode
from tests.localtensor.lockstep.lockstep_reference import (
    differences_from_reference,
    envelope,
    leaves,
    rank_by_rank,
    rank_copy,
    within_envelope,
)
from tests.tools.overloads.capture import REFUSED, Call
from tests.tools.overloads.excuses import excused
from tests.tools.overloads.plans import HOW, PLANS, RANKS, filled, fits, operands, outs_of, placed, tensors_of


@dataclass
class Record:
    """What was found of one overload."""

    calls: int = 0
    refused: int = 0  # in words: ranks get different plain numbers, or tensors of different numbers of dims
    equal: int = 0
    near: int = 0
    wrong: list[str] = field(default_factory=list)
    ways: Counter = field(default_factory=Counter)


class Refused(Exception):
    """The op itself does not take what the plan makes of its operands."""


@contextmanager
def watched():
    """Counts how each cell was done: once (one value), stack, vmap or rows."""
    done: Counter = Counter()
    before = {name: getattr(execute, name) for name in ("_on_stack", "_under_vmap", "row_after_row")}

    def counting(name, label):
        def counted(*args, **kwargs):
            result = before[name](*args, **kwargs)
            done[label] += result is not NotImplemented
            return result

        return counted

    for name, label in (("_on_stack", "stack"), ("_under_vmap", "vmap"), ("row_after_row", "rows")):
        setattr(execute, name, counting(name, label))
    try:
        yield done
    finally:
        for name, original in before.items():
            setattr(execute, name, original)


def judged(mode: LocalTensorMode, plan: str, calls: list[Call], record: Record) -> None:
    """One plan of one call (two, of uneven shapes); what was found is written to the record."""
    for how in HOW:
        try:
            _judged(mode, plan, calls, how, record)
        except Refused:
            continue
        return


def _judged(mode, plan, calls, how, record):
    call = calls[0]
    with mode.disable():
        try:
            by_rank = operands(plan, calls, how)
        except REFUSED as error:
            raise Refused from error
    tensors = tensors_of(call)
    try:
        dense = outs_of(call)
        made = [placed(plan, mode, one, dense=place in dense) for place, one in enumerate(by_rank)]
    except REFUSED as error:
        raise Refused from error
    args, kwargs = filled(call.args, tensors, made), filled(call.kwargs, tensors, made)
    twin = rank_by_rank(call.op, *args, **kwargs)
    if any(alone.error is not None for alone in twin.values()):
        raise Refused
    with mode.disable():
        before = {rank: (rank_copy(args, rank, blocks := {}), rank_copy(kwargs, rank, blocks)) for rank in twin}
    told = f"{plan}, {how}: {call.origin}: {shown(call)[:200]}"
    record.calls += 1
    try:
        with watched() as done:
            result = call.op(*args, **kwargs)
        record.ways.update(done or {"once": 1})
        found = differences_from_reference(twin, result, args, kwargs)
        if op_traits(call.op).views and not found:
            found = _through_views(twin, result, args, kwargs)
    except (RanksDiverge, NotInLockstep) as error:
        if not no_control_flow(twin):
            record.wrong.append(f"{told}: raised {error}")
        record.refused += 1
        return
    except Exception as error:  # why: whatever it is, it is what the sweep looks for
        record.wrong.append(f"{told}: raised {type(error).__name__}: {str(error)[:300]}")
        return
    found = [one for one in found if not excused(call.op.name(), plan, one)]
    if not found:
        record.equal += 1
        return
    with mode.disable():
        _near_or_wrong(call.op, before, found, record, told)


def no_control_flow(twin) -> bool:
    """Whether one control flow cannot hold what the ranks get."""
    results = [list(leaves(alone.result)) + list(leaves((alone.args, alone.kwargs))) for alone in twin.values()]
    shapes = {tuple(x.dim() if isinstance(x, Tensor) else x for x in found) for found in results}
    return len(shapes) > 1


def _through_views(twin, result, args, kwargs):
    """What is written to a view is seen through the argument, on each rank."""
    for number, x in enumerate(leaves(result)):
        views = [list(leaves(alone.result))[number] for alone in twin.values()]
        if all(torch._debug_has_internal_overlap(view) == 0 for view in views):
            x.fill_(number % 2)
            for view in views:
                view.fill_(number % 2)
    return differences_from_reference(twin, result, args, kwargs)


def _near_or_wrong(op, before, found, record, told):
    rooms = {}
    for difference in found:
        if difference.what != "value" or not isinstance(difference.alone, Tensor):
            record.wrong.append(f"{told}: {difference}")
            return
        if difference.rank not in rooms:
            rooms[difference.rank] = envelope(op, *before[difference.rank])
        if not within_envelope(difference, rooms[difference.rank]):
            record.wrong.append(f"{told}: {difference}; envelope {rooms[difference.rank]:.3g}")
            return
    record.near += 1


def shown(call: Call) -> str:
    def one(x):
        if isinstance(x, Tensor):
            return f"{str(x.dtype)[6:]}{list(x.shape)}" + ("" if x.is_contiguous() else f"/{x.stride()}")
        if isinstance(x, list | tuple):
            return f"[{', '.join(map(one, x))}]"
        return str(x)

    named = [f"{name}={one(x)}" for name, x in call.kwargs.items()]
    return f"({', '.join([*map(one, call.args), *named])})"


def sweep(calls: Sequence[Call], record: Record, plans: Sequence[str] = tuple(PLANS)) -> Record:
    """The calls of one overload, each in every one of these plans that makes sense for it."""
    with warnings.catch_warnings(), LocalTensorMode(RANKS) as mode:
        warnings.simplefilter("ignore")
        for number, call in enumerate(calls):
            for plan in plans:
                if plan == "uneven":
                    other = next((one for one in calls[:number] if fits(one, call)), None)
                    if other is not None:
                        judged(mode, plan, [other, call], record)
                elif makes_sense(plan, call):
                    judged(mode, plan, [call], record)
    return record


def makes_sense(plan: str, call: Call) -> bool:
    """Whether the plan is another one than a plainer plan, for this call."""
    operands = len(tensors_of(call))
    if plan == "slices" and call.op.name() == "aten::detach_":
        return False  # torch refuses it on views
    needed = {"first": 2, "rest": 2, "mixed order": 2, "second": 3, "third": 3}  # "second" of two is "rest"
    return plan == "uniform" or operands >= needed.get(plan, 1)
