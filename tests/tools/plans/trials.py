"""Redistributions carried out every way that there is, and held to the definition: what is wrong, in a line each.

| way       | how                                                                                              |
|-----------|--------------------------------------------------------------------------------------------------|
| lists     | pure functions on all ranks' tensors                                                             |
| lockstep  | LocalTensors under a LocalTensorMode                                                             |
| threads   | torch.distributed on the rank threads of `localtensor.run`, in torch's own device mesh or without |
| gloo      | the same on real processes                                                                       |
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

import localtensor as lt
from localtensor.layout.mesh import Mesh
from localtensor.layout.reductions import is_unambiguous
from localtensor.layout.spec import Spec, StridedShard
from strategies.planner.execute.lockstep import redistribute
from strategies.planner.execute.process_groups import Axes, Groups, axes_of, groups_along, redistribute_local
from strategies.planner.search.api import plan
from strategies.planner.steps.alpha_beta import partials_commute
from strategies.planner.steps.legal_steps import legal_changes
from strategies.planner.steps.plan import Plan
from strategies.planner.steps.prices import priced_step
from tests.strategies.planner.execute.random_specs import Drawn, drawn
from tests.strategies.planner.execute.random_values import held_of, same, wrong


@dataclass(frozen=True, slots=True)
class Trial:
    """A redistribution and the plan for it."""

    one: Drawn
    plan: Plan


def trials(seed: int, numbers: Iterable[int], ranks: int = 24) -> Iterator[Trial]:
    """Drawn, and planned."""
    for number in numbers:
        one = drawn(seed, number, ranks=ranks)
        yield Trial(one, plan(one.src, one.dst, flattened=one.flattened))


def judged(trial: Trial, held: Sequence[Tensor], got: Sequence[Tensor], way: str) -> str:
    """What is wrong, with the draw that shows it; empty if nothing is."""
    found = wrong(trial.one, held, got)
    if not found and trial.plan.steps:
        if any(not x.is_contiguous() for x in got):
            found = "a result is not contiguous"
        elif {_at(x) for x in held if x.numel()} & {_at(x) for x in got if x.numel()}:
            found = "a result shares memory with what was brought"
    return f"{trial.one}: {way}: {found}\n{trial.plan}" if found else ""


def _at(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def in_lists(trial: Trial) -> str:
    held = held_of(trial.one)
    before = [x.clone() for x in held]
    got = redistribute(held, trial.plan)
    if not all(same(x, y, bits=True) for x, y in zip(held, before, strict=True)):
        return f"{trial.one}: lists: what was brought was written to\n{trial.plan}"
    return judged(trial, held, got, "lists")


def in_lockstep(trial: Trial) -> str:
    held = held_of(trial.one)
    with lt.LocalTensorMode(trial.one.src.mesh.ranks):
        got = redistribute(lt.LocalTensor(held), trial.plan)
    return judged(trial, held, [got.on(rank).contiguous() for rank in range(len(held))], "lockstep")


def by_ranks(asked: Sequence[Trial], on: str) -> list[str]:
    """All of these in one world, of the ranks that the largest needs: on "threads", or "gloo" processes."""
    held = [held_of(trial.one) for trial in asked]
    world = max(trial.one.world for trial in asked)
    pieces = [[row[rank] if rank < len(row) else torch.empty(0) for row in held] for rank in range(world)]
    plans = tuple(trial.plan for trial in asked)
    got = lt.run(carried_out, plans, pieces, ranks=world, on=on, timeout=900)
    answers = [[got[rank][i] for rank in range(len(held[i]))] for i in range(len(asked))]
    return [found for trio in zip(asked, held, answers, strict=True) if (found := judged(*trio, on))]


def carried_out(plans: Sequence[Plan], pieces: Sequence[Tensor]) -> list[Tensor]:
    """What this rank holds after each plan; those of one mesh share their groups, and every second mesh is torch's."""
    found: dict[int, Tensor] = {}
    by_mesh: dict[Mesh, list[int]] = {}
    for number, one in enumerate(plans):
        by_mesh.setdefault(one.src.mesh, []).append(number)
    for turn, (mesh, numbers) in enumerate(by_mesh.items()):
        with _groups(mesh, axes_of(plans[number] for number in numbers), turn % 2 == 1) as groups:
            for number in numbers:
                found[number] = redistribute_local(pieces[number], plans[number], groups)
    return [found[number] for number in range(len(plans))]


def _groups(mesh: Mesh, axes: Sequence[Axes], theirs: bool) -> contextlib.AbstractContextManager[Groups]:
    theirs = theirs and mesh.ranks == dist.get_world_size()
    return groups_along(mesh, axes, init_device_mesh("cpu", mesh.sizes) if theirs else None)


def batch(seed: int, ranks: int, lockstep: int, numbers: range) -> tuple[int, list[str]]:
    """How many were tried on lists, each so manieth in lockstep, too; and what is wrong."""
    failures = []
    for trial in trials(seed, numbers, ranks):
        ways = [in_lists, in_lockstep] if lockstep and trial.one.number % lockstep == 0 else [in_lists]
        failures += [found for way in ways if (found := tried(way, trial))]
    return len(numbers), failures


def tried(way: Callable[[Trial], str], trial: Trial) -> str:
    try:
        return way(trial)
    except Exception as error:  # why: whatever is raised is a wrong answer of this one, and the others go on
        return f"{trial.one}: {way.__name__}: {type(error).__name__}: {error}\n{trial.plan}"


# -- every step alone


def every_step(
    meshes: Sequence[tuple[int, ...]], shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype]
) -> Iterator[Trial]:
    """Every legal step from every spec on these meshes, as a plan of its own: a step is right alone, or it is wrong."""
    number = itertools.count()
    for sizes, shape, dtype in itertools.product(meshes, shapes, dtypes):
        mesh = Mesh.of(*sizes)
        offered = _offered(shape, dtype)
        flattened = [
            axes for count in range(2, len(sizes) + 1) for axes in itertools.combinations(range(len(sizes)), count)
        ]
        for spec in _specs(mesh, shape, dtype, offered):
            for change in legal_changes(spec, offered, flattened):
                step = priced_step(change.kind, change.axes, spec, change.now)
                one = Drawn(0, next(number), spec, change.now)
                yield Trial(one, Plan(spec, change.now, (step,), 0, "", "", 0))


def _offered(shape: tuple[int, ...], dtype: torch.dtype) -> list[Placement]:
    cut = [Shard(dim) for dim in range(len(shape))]
    strided = [StridedShard(dim, split_factor=2) for dim in range(min(1, len(shape)))]
    return [
        Replicate(),
        *cut,
        *strided,
        *(Partial(kind) for kind in ("sum", "max", "avg") if is_unambiguous(kind, dtype)),
    ]


def _specs(mesh: Mesh, shape: tuple[int, ...], dtype: torch.dtype, offered: Sequence[Placement]) -> Iterator[Spec]:
    for placements in itertools.product(offered, repeat=len(mesh.sizes)):
        if all(partials_commute(one, other, dtype) for one, other in itertools.combinations(placements, 2)):
            plain = Spec(mesh, placements, shape, dtype)
            stacks = [(dim, plain.cut_by(dim)) for dim in range(len(shape)) if len(plain.cut_by(dim)) > 1]
            orders = [[(dim, order) for order in itertools.permutations(axes)] for dim, axes in stacks]
            for order in itertools.product(*orders):
                yield Spec(mesh, placements, shape, dtype, tuple(order))
