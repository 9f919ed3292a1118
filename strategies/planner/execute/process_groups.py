"""Execution of plans by ranks: each step is one collective of torch.distributed, in the group along its axes.

The same code runs on the rank threads of `localtensor.run`, on gloo processes, and on any backend that has
all_gather_into_tensor, reduce_scatter_tensor, all_reduce and all_to_all_single; their arguments are contiguous.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from localtensor.errors import Refusal
from localtensor.layout import Mesh
from strategies.planner.execute.rows import block_shape
from strategies.planner.execute.rows import rank_groups as lines
from strategies.planner.execute.step import GroupStep, StepCollective, group_step, plain_values, rank_part
from strategies.planner.steps.plan import Plan

Axes = tuple[int, ...]
_dist: Any = dist
_gather = getattr(_dist, "all_gather_single", None) or _dist.all_gather_into_tensor  # the names before 2.13
_scatter = getattr(_dist, "reduce_scatter_single", None) or _dist.reduce_scatter_tensor


class NotPlanned(Refusal, call="redistribute_local"):
    """A rank's tensor or groups are not those that the plan was made for."""


@dataclass(frozen=True, slots=True)
class AxisGroup:
    """One process group: the ranks that differ along some axes only."""

    group: Any
    members: tuple[int, ...]
    """Their numbers in the mesh, in the order of the group."""


@dataclass(frozen=True, slots=True)
class Groups:
    """The process groups of a rank along the axes of a mesh."""

    mesh: Mesh
    rank: int | None
    """This rank's number in the mesh; None if it is not in the mesh."""
    lines: Mapping[Axes, AxisGroup]
    """By axes: the group that this rank belongs to."""


def axes_of(plans: Iterable[Plan]) -> tuple[Axes, ...]:
    """The sets of axes along which these plans communicate, each once, in the same order on all ranks."""
    steps = (step for plan in plans for step in plan.steps)
    return tuple(sorted({tuple(sorted(step.axes)) for step in steps if step.kind != "local"}))


@contextmanager
def groups_along(mesh: Mesh, axes: Iterable[Axes], on: DeviceMesh | Sequence[int] | None = None) -> Iterator[Groups]:
    """Process groups along these sets of axes, for the duration of the block; every rank of the world must enter it.

    `on` maps the mesh to ranks of the world: a DeviceMesh, whose own groups are used along single axes; a list of
    ranks, row by row; or None for the first ranks. A rank outside the mesh only takes part in creating the groups.
    Ranks may pass different values, each its own mesh, as for the slices of a larger DeviceMesh; all must have one
    shape.

    Raises `NotPlanned` if the DeviceMesh has another shape, or the world has too few ranks.
    """
    ranks = _world_ranks(mesh, on)
    me = ranks.index(dist.get_rank()) if dist.get_rank() in ranks else None
    axis_sets = tuple(dict.fromkeys(tuple(sorted(one)) for one in axes))
    theirs = on if isinstance(on, DeviceMesh) and me is not None else None
    every = _ranks_of_all_meshes(ranks, on, axis_sets)
    made: list[Any] = []
    found: dict[Axes, AxisGroup] = {}
    try:
        for along in axis_sets:
            mine = next((line for line in lines(mesh, along) if me in line), ())
            if len(along) == 1 and isinstance(on, DeviceMesh):
                if theirs is not None:
                    found[along] = AxisGroup(theirs.get_group(along[0]), _by_world_rank(mine, ranks))
                continue
            for one, line in itertools.product(every, lines(mesh, along)):
                made.append(dist.new_group([one[place] for place in _by_world_rank(line, one)]))
                if one == ranks and line == mine:
                    found[along] = AxisGroup(made[-1], _by_world_rank(line, one))
        yield Groups(mesh, me, found)
    finally:
        for group in made:
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)


def _by_world_rank(line: Sequence[int], ranks: Sequence[int]) -> tuple[int, ...]:
    """The mesh ranks of a group in the group's order: torch sorts a group by world rank."""
    return tuple(sorted(line, key=ranks.__getitem__))


def _ranks_of_all_meshes(
    ranks: list[int], on: DeviceMesh | Sequence[int] | None, axis_sets: Sequence[Axes]
) -> list[list[int]]:
    """The world ranks of every mesh in the world, in the same order on all ranks: each rank must create all groups."""
    if on is None or (isinstance(on, DeviceMesh) and all(len(along) == 1 for along in axis_sets)):
        return [ranks]
    ranks_by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks_by_rank, ranks)
    return [list(one) for one in dict.fromkeys(map(tuple, ranks_by_rank))]


def _world_ranks(mesh: Mesh, on: DeviceMesh | Sequence[int] | None) -> list[int]:
    if isinstance(on, DeviceMesh):
        if tuple(on.mesh.shape) != mesh.sizes:
            raise NotPlanned("on", str(on), f"the plan is for {mesh}", "Pass a DeviceMesh of the same shape.")
        return [int(rank) for rank in on.mesh.flatten()]
    ranks = list(range(mesh.ranks)) if on is None else list(on)
    if len(set(ranks)) != mesh.ranks or max(ranks) >= dist.get_world_size():
        problem = f"{mesh} has {mesh.ranks} ranks, and the world {dist.get_world_size()}"
        raise NotPlanned("on", str(ranks), problem, "Name as many ranks of the world as the mesh has.")
    return ranks


def redistribute_local(local: Tensor, plan: Plan, groups: Groups) -> Tensor:
    """Redistributes this rank's tensor; every rank of the mesh must call it with its tensor before the plan.

    The result is contiguous and shares no memory with `local`, which is not written to, may have any strides, and may
    require a gradient; the result has no gradient history. A plan without steps returns `local` itself, and so does a
    rank outside the mesh.

    Raises `NotPlanned` if `local` is not this rank's piece of `plan.src`, or if a step's axes have no group.
    """
    if groups.rank is None or not plan.steps:
        return local
    _check_arguments(local, plan, groups)
    with torch.no_grad():
        found = plain_values(local)
        for number, step in enumerate(plan.steps):
            alone = step.kind == "local"
            line = None if alone else groups.lines[tuple(sorted(step.axes))]
            # Without a group: the ranks along the axes with this rank's other coordinates.
            members = line.members if line else next(one for one in lines(groups.mesh, step.axes) if groups.rank in one)
            found = _run_step(found, group_step(step, members), members.index(groups.rank), line, ours=number > 0)
    return found


def _run_step(x: Tensor, todo: GroupStep, me: int, line: AxisGroup | None, *, ours: bool) -> Tensor:
    """One step: runs this rank's part, and carries out its collectives."""
    mine = rank_part(x, todo, me, ours=ours)
    given: Any = None
    while True:
        try:
            call = mine.send(given)
        except StopIteration as end:
            found: Tensor = end.value
            return found
        del given  # the work holds what it needs of it
        given = _run_collective(call, line.group if line is not None else None, len(todo.was))
        del call


def _run_collective(call: StepCollective, group: dist.ProcessGroup | None, ranks: int) -> Tensor:
    x = call.x
    if call.kind == "all_reduce":
        dist.all_reduce(x, _OPS[call.op], group=group)
        return x
    if call.kind == "all_gather":
        found = x.new_empty(ranks * x.numel())
        _gather(found, x, group=group)
        return found
    if call.kind == "reduce_scatter":
        found = x.new_empty(x.numel() // ranks)
        _scatter(found, x, _OPS[call.op], group=group)
        return found
    found = x.new_empty(sum(call.got))
    dist.all_to_all_single(found, x, list(call.got), list(call.sent), group=group)
    return found


_OPS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM, "product": dist.ReduceOp.PRODUCT, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX,
}  # fmt: skip


def _check_arguments(local: Tensor, plan: Plan, groups: Groups) -> None:
    rank: int = groups.rank  # type: ignore[assignment]  # it is in the mesh
    if groups.mesh != plan.src.mesh:
        raise NotPlanned("groups", str(groups.mesh), f"the plan is for {plan.src.mesh}", "Make groups for its mesh.")
    want, is_one = block_shape(plan.src, (), rank), isinstance(local, Tensor)
    if not is_one or tuple(local.shape) != want or local.dtype != plan.src.dtype:
        shown = f"{local.dtype} of shape {tuple(local.shape)}" if is_one else type(local).__name__
        remedy = "Pass this rank's own piece, or plan from where it lies."
        raise NotPlanned("local", shown, f"rank {rank} of {plan.src} holds {plan.src.dtype} of shape {want}", remedy)
    missing = [axes for axes in axes_of([plan]) if axes not in groups.lines]
    if missing:
        names = [" and ".join(plan.src.mesh.names[axis] for axis in axes) for axes in missing]
        problem = f"the plan communicates along {', '.join(names)}, of which there is no group"
        remedy = "Make them with groups_along(mesh, axes_of([plan]))."
        raise NotPlanned("groups", str(list(groups.lines)), problem, remedy)
