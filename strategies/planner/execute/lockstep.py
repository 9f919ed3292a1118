"""Execution of plans on all ranks' tensors in one control flow: on a list of tensors, or on a LocalTensor.

On a list, each rank runs its own part of each step, and the parts meet in the pure functions of
`localtensor.collectives.reference`, group by group. A LocalTensor keeps its stacked storage: an even step is one
collective in lockstep; any other step runs once for all groups that have equal values and equal pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import overload

import torch
from torch import Tensor
from torch.distributed.tensor import Partial
from torch.distributed.tensor.placement_types import Placement

from localtensor import lockstep
from localtensor.collectives import reference
from localtensor.errors import Refusal, WrongPieces, WrongType
from localtensor.layout import GLOO_DTYPES, Spec, StridedShard, local_shapes, shard_cut, short
from localtensor.lockstep import LocalTensor, plain_dispatch
from strategies.planner.execute.rows import rank_groups
from strategies.planner.execute.step import RankPart, StepCollective, group_step, plain_values, rank_part, run_group
from strategies.planner.steps.legal_steps import ranks_along
from strategies.planner.steps.plan import Plan, RedistributionStep


class OtherDtype(Refusal, call="redistribute", argument="held"):
    """The ranks hold tensors of another dtype than the one that the plan was made for."""

    PROBLEM = "the plan is for {src}"
    REMEDY = "Plan for the dtype that the ranks hold: what is legal, and how it is reduced, hangs on it."


@overload
def redistribute(held: LocalTensor, plan: Plan) -> LocalTensor: ...
@overload
def redistribute(held: Sequence[Tensor], plan: Plan) -> list[Tensor]: ...
def redistribute(held: LocalTensor | Sequence[Tensor], plan: Plan) -> LocalTensor | Sequence[Tensor]:
    """Every rank's tensor after the plan, by rank number; `held` are the tensors before, and is not changed.

    A list, one tensor for each rank, returns a list; a LocalTensor returns a LocalTensor. The result has no gradient
    history. A plan without steps returns `held` itself. Ranks of a LocalTensor that are not in the plan's mesh hold
    nothing afterwards. Raises `WrongPieces` if a local shape is not that of `plan.src`, and `OtherDtype` if the dtype
    is not.

    >>> from localtensor.layout import Mesh, parse
    >>> from strategies.planner.search.api import plan
    >>> src, dst = (Spec(Mesh.of(2), (parse(p),), (3,), torch.int64) for p in ("S(0)", "R"))
    >>> redistribute([torch.tensor([1, 2]), torch.tensor([3])], plan(src, dst))
    [tensor([1, 2, 3]), tensor([1, 2, 3])]
    """
    if not isinstance(plan, Plan):
        raise WrongType("redistribute", "plan", plan, "it is no plan", "Pass what plan(src, dst) returns.")
    if not plan.steps:
        return held
    with torch.no_grad():
        if isinstance(held, LocalTensor):
            _check_pieces([held.__localtensor_on__(rank) for rank in range(plan.src.mesh.ranks)], plan)
            for step in plan.steps:
                quick = _even_step(held, step)
                held = quick if quick is not None else _uneven_step(held, step)
            return held
        found = [plain_values(x) for x in held]
        _check_pieces(found, plan)
        for step in plan.steps:
            found = step_in_groups(found, step)
        return found


def step_in_groups(held: Sequence[Tensor], step: RedistributionStep) -> list[Tensor]:
    """One step on a list of all ranks' tensors, group by group."""
    found: dict[int, Tensor] = {}
    for members in rank_groups(step.was.mesh, step.axes):
        todo = group_step(step, members)
        done = run_parts([rank_part(held[rank], todo, me) for me, rank in enumerate(members)])
        found.update(zip(members, done, strict=True))
    return [found[rank] for rank in range(len(held))]


def run_parts(works: Sequence[RankPart]) -> list[Tensor]:
    """The results of the members of a group, whose parts meet in pure collectives."""
    given: Sequence[Tensor | None] = [None] * len(works)
    while True:
        calls, done = list[StepCollective](), list[Tensor]()
        for one, what in zip(works, given, strict=True):
            try:
                calls.append(one.send(what))  # type: ignore[arg-type]  # a generator is started with None
            except StopIteration as end:
                done.append(end.value)
        if done:
            return done
        given = _COLLECTIVES[calls[0].kind](calls)


def _reference_collective(
    collective: Callable[..., list[Tensor]], *names: str
) -> Callable[[list[StepCollective]], list[Tensor]]:
    return lambda calls: collective([call.x for call in calls], *(getattr(calls[0], name) for name in names))


_COLLECTIVES: dict[str, Callable[[list[StepCollective]], list[Tensor]]] = {
    "all_gather": _reference_collective(reference.all_gather_into_tensor),
    "reduce_scatter": _reference_collective(reference.reduce_scatter_tensor, "op"),
    "all_reduce": _reference_collective(reference.all_reduce, "op"),
    "all_to_all": lambda calls: reference.all_to_all_single(
        [call.x for call in calls],
        input_splits=[call.sent for call in calls],
        output_splits=[call.got for call in calls],
    ),
}


def _check_pieces(held: Sequence[Tensor], plan: Plan) -> None:
    want, got = local_shapes(plan.src), [tuple(x.shape) for x in held]
    if got != want:
        raise WrongPieces("redistribute", got, want)
    others = [x.dtype for x in held if x.dtype != plan.src.dtype]
    if others:
        raise OtherDtype(others[0], plan.src)


def _even_step(x: LocalTensor, step: RedistributionStep) -> LocalTensor | None:
    """The step as one collective in lockstep; None where pieces are uneven, or ordered otherwise than the ranks."""
    was, now = (spec.placements[step.axes[0]] for spec in (step.was, step.now))
    if step.kind == "local" or x.dtype not in GLOO_DTYPES:
        return None
    family = rank_groups(step.was.mesh, step.axes)
    if isinstance(was, Partial):
        mixed = len({short(step.was.placements[axis]) for axis in step.axes}) > 1
        if mixed or (was.reduce_op in ("product", "avg") and x.dtype.is_complex):
            return None
        if step.kind == "all_reduce":
            return lockstep.all_reduce(x, was.reduce_op, family)
    if not (_has_even_pieces(step.was, step.axes) and _has_even_pieces(step.now, step.axes)):
        return None
    if isinstance(was, Partial):
        return lockstep.reduce_scatter_tensor(x, was.reduce_op, family, _sharded_dim(now))
    if step.kind == "all_gather":
        return lockstep.all_gather_into_tensor(x, family, _sharded_dim(was))
    if _sharded_dim(was) == _sharded_dim(now):
        return None
    return lockstep.shard_dim_alltoall(x, _sharded_dim(was), _sharded_dim(now), family)


def _sharded_dim(placement: Placement) -> int:
    cut = shard_cut(placement)
    return cut[0] if cut is not None else -1


def _has_even_pieces(spec: Spec, axes: tuple[int, ...]) -> bool:
    """Whether all ranks hold pieces of one shape, those of a group in the order of its ranks."""
    if any(isinstance(p, StridedShard) for p in spec.placements):
        return False
    for dim, size in enumerate(spec.shape):
        stack = spec.cut_by(dim)
        mine = tuple(axis for axis in stack if axis in axes)
        if size % ranks_along(spec.mesh.sizes, stack) or mine != tuple(sorted(mine)):
            return False
    return True


def _uneven_step(x: LocalTensor, step: RedistributionStep) -> LocalTensor:
    """The step, once for all groups (or ranks, if it is local) that have equal values and equal pieces."""
    found: dict[int, Tensor] = {}
    done: dict[Hashable, list[Tensor]] = {}
    with plain_dispatch():
        held = zip(x._cells, x._partition.sizes, x._partition.starts, strict=True)
        values = {  # the distinct ones, by their rows of the partition
            at + row: plain_values(cell[row] if size > 1 else cell) for cell, size, at in held for row in range(size)
        }
        rows = x._partition.row_of.tolist()
        for members in rank_groups(step.was.mesh, step.axes):
            todo = group_step(step, members)
            if todo.kind != "local":
                key: Hashable = (todo, tuple(rows[rank] for rank in members))
                if key not in done:
                    done[key] = run_group([values[rows[rank]] for rank in members], todo)
                found.update(zip(members, done[key], strict=True))
                continue
            for me, rank in enumerate(members):
                key = (todo.shape, todo.was[me], todo.now[me], me == 0, rows[rank])
                if key not in done:
                    done[key] = run_parts([rank_part(values[rows[rank]], todo, me)])
                found[rank] = done[key][0]
    return LocalTensor(found)
