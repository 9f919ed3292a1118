"""Calls on meshes of several axes, each played by DTensor itself; and what is to blame for what goes wrong there.

A wrong program says little as it is drawn: one axis alone may be wrong, or no op at all but the redistribution of
its result.  `suspects` gives each fault once, as the smallest program that shows it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from localtensor.errors import BadPlacement
from localtensor.layout import Layout, has_meaning
from strategies.model.oracle import REFUSALS
from strategies.model.rule import Call, Claim, Leaf, Program, Sample, read_layout
from strategies.programs.mesh_programs import blame, draw_programs
from strategies.programs.run.program_oracle import truth_of
from strategies.programs.run.real_run import play_all
from strategies.programs.run.verdict import Confirmation

Found = list[tuple[Program, Confirmation]]
MESHES: tuple[tuple[int, ...], ...] = ((2, 2), (2, 3), (2, 2, 2))
"""Where every call is tried."""
SECONDS = 0.2
"""What one call on one mesh may take, about."""
EACH, PER_LINE = 0.02, 0.0002
"""Seconds for a program, and for each combination of one-axis lines that DTensor weighs for it (torch 2.13)."""
MOVED = "aten.clone.default"
"""The op that does nothing: what is wrong with it is the redistribution of its result."""


def affordable(claims: Mapping[int, Sequence[Claim]], mesh: tuple[int, ...], seconds: float = SECONDS) -> int:
    """How many programs fit in that time: DTensor weighs every combination of a line for each axis.

    By count, not by the clock, so that two runs try the same.
    """
    combinations = math.prod(1 + len(claims.get(size, ())) for size in mesh)
    return max(1, int(seconds / (EACH + PER_LINE * combinations)))


def try_meshes(
    sample: Sample, claims: Mapping[int, Sequence[Claim]], meshes: Sequence[tuple[int, ...]] = MESHES, *, seed: int,
    budget: int | None = None,
) -> Found:  # fmt: skip
    """Programs of this call on these meshes, and what came of each in simulation.

    `claims` are the one-axis claims by number of ranks; `budget` is the most programs on one mesh, what fits in
    `SECONDS` if it is None.
    """
    programs = [
        program
        for mesh in meshes
        for program in draw_programs(
            sample, claims, mesh, seed=seed, budget=affordable(claims, mesh) if budget is None else budget
        )
    ]
    return list(zip(programs, play_all(programs), strict=True))


def suspects(found: Found) -> Found:
    """What is wrong, each fault once: the smallest programs that show it, in simulation, in the order of `found`."""
    ask = _remembered(lambda program: play_all([program])[0])
    charged: dict[str, tuple[Program, Confirmation]] = {}
    for program, confirmation in found:
        if confirmation.wrong:
            smallest = to_blame(program, confirmation, ask)
            # The first of a fault stands for all: seeds and sizes make no other fault.
            fault = f"{replace(smallest, seed=0, draw=0)}"
            charged.setdefault(fault, (smallest, confirmation if smallest is program else ask(smallest)))
    return list(charged.values())


def to_blame(program: Program, confirmation: Confirmation, confirm: Callable[[Program], Confirmation]) -> Program:
    """The smallest program that is wrong: a redistribution without any op, if that is wrong already."""
    for moved in redistributions(program, confirmation):
        if confirm(moved).wrong:
            return blame(moved, confirm)
    return blame(program, confirm)


def redistributions(program: Program, confirmation: Confirmation) -> Iterator[Program]:
    """Its tensors, as they came out and as they come in, with nothing done to them but to be put together again."""
    coming = zip(program.sample.tensors, program.inputs, strict=True)
    for x, layout in [*_outcomes(program, confirmation), *coming]:
        if len(layout) == len(program.mesh) and has_meaning(layout, x.shape, x.dtype, program.mesh):
            yield plain(x, layout, program)


def plain(x: Tensor, layout: Layout, program: Program) -> Program:
    """A program that does nothing to x, on the mesh of another and under its seed."""
    sample = Sample(Call(MOVED, (Leaf(0),)), (x,), "a redistribution without an op")
    return replace(program, sample=sample, inputs=(layout,), then="")


def _outcomes(program: Program, confirmation: Confirmation) -> list[tuple[Tensor, Layout]]:
    if not confirmation.heard:
        return []
    try:
        outputs = truth_of(program).outputs
    except REFUSALS:  # plain tensors refuse now what they did before: a random op
        return []
    made = []
    for want, text in zip(outputs, confirmation.heard[0].placements, strict=False):
        try:
            layout = read_layout(text)
        except BadPlacement:  # a plain tensor, or a placement of DTensor's own
            continue
        if isinstance(want, Tensor) and want.numel():
            made.append((want.detach(), layout))
    return made


def _remembered(confirm: Callable[[Program], Confirmation]) -> Callable[[Program], Confirmation]:
    known: dict[tuple[str, ...], Confirmation] = {}

    def ask(program: Program) -> Confirmation:
        told = (str(program), f"{program.seed} {program.draw}", program.sample.origin)
        key = (*told, *program.sample.arguments())
        if key not in known:
            known[key] = confirm(program)
        return known[key]

    return ask
