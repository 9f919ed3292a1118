"""Validation of calls on meshes of several axes by simulated runs of DTensor, and the cause of each wrong result.

The cause of a wrong program may be one axis alone, or the redistribution of the result and not the op.
`smallest_wrong_programs` returns each fault once, as the smallest program that shows it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from localtensor.errors import BadPlacement
from localtensor.layout import Layout, has_one_meaning
from strategies.model.oracle import REJECTIONS
from strategies.model.rule import Claim, Program, Sample, read_layout
from strategies.programs.mesh_programs import copy_sample, draw_programs, smallest_wrong_program
from strategies.programs.run.program_oracle import has_partial, oracle_of_program
from strategies.programs.run.real_run import run_simulated_programs
from strategies.programs.run.verdict import Confirmation

Found = list[tuple[Program, Confirmation]]
MESHES: tuple[tuple[int, ...], ...] = ((2, 2), (2, 3), (2, 2, 2))
"""The meshes on which every call is tried."""
SECONDS = 0.2
"""The time that one call on one mesh may take, approximately."""
SECONDS_PER_PROGRAM, SECONDS_PER_COMBINATION = 0.02, 0.0002
"""Seconds for a program, and for each combination of one-axis lines that DTensor considers for it (torch 2.13)."""


def programs_in_time(claims: Mapping[int, Sequence[Claim]], mesh: tuple[int, ...], seconds: float = SECONDS) -> int:
    """How many programs fit in that time, given that DTensor considers every combination of a line for each axis.

    It does not measure time, so that two runs try the same programs.
    """
    combinations = math.prod(1 + len(claims.get(size, ())) for size in mesh)
    return max(1, int(seconds / (SECONDS_PER_PROGRAM + SECONDS_PER_COMBINATION * combinations)))


def try_meshes(
    sample: Sample, claims: Mapping[int, Sequence[Claim]], meshes: Sequence[tuple[int, ...]] = MESHES, *, seed: int,
    budget: int | None = None,
) -> Found:  # fmt: skip
    """Programs of this call on these meshes, with the result of each in simulation.

    `claims` are the one-axis claims by number of ranks; `budget` is the largest number of programs on one mesh, by
    default as many as fit in `SECONDS`.
    """
    programs: list[Program] = []
    for mesh in meshes:
        most = programs_in_time(claims, mesh) if budget is None else budget
        programs += draw_programs(sample, claims, mesh, seed=seed, budget=most)
    return list(zip(programs, run_simulated_programs(programs), strict=True))


def smallest_wrong_programs(found: Found) -> Found:
    """The smallest programs that are wrong in simulation, one for each fault, in the order of `found`."""
    known: dict[tuple[str, ...], Confirmation] = {}

    def run(program: Program) -> Confirmation:
        values = f"{program.seed} {program.draw if has_partial(program) else 0}"
        key = (str(program), values, program.sample.origin, *program.sample.arguments())
        if key not in known:
            known[key] = run_simulated_programs([program], quick=True)[0]
        return known[key]

    by_fault: dict[str, tuple[Program, Confirmation]] = {}
    for program, confirmation in found:
        if confirmation.wrong:
            smallest = cause_of(program, confirmation, run)
            # Programs that differ in seed and draw alone show the same fault.
            fault = f"{replace(smallest, seed=0, draw=0)}"
            if fault in by_fault:
                continue
            shown = confirmation if smallest is program else run_simulated_programs([smallest])[0]
            by_fault[fault] = (smallest, shown) if shown.wrong else (program, confirmation)
    return list(by_fault.values())


def cause_of(program: Program, confirmation: Confirmation, confirm: Callable[[Program], Confirmation]) -> Program:
    """The smallest program that is wrong: a redistribution without an op, if one is wrong already."""
    for moved in redistributions(program, confirmation):
        if confirm(moved).wrong:
            return smallest_wrong_program(moved, confirm)
    return smallest_wrong_program(program, confirm)


def redistributions(program: Program, confirmation: Confirmation) -> Iterator[Program]:
    """Programs that only gather the results of a program, and its inputs, each in its layout."""
    inputs = zip(program.sample.tensors, program.inputs, strict=True)
    for x, layout in [*_results(program, confirmation), *inputs]:
        if len(layout) == len(program.mesh) and has_one_meaning(layout, x.shape, x.dtype, program.mesh):
            yield replace(program, sample=copy_sample(x), inputs=(layout,), then="")


def _results(program: Program, confirmation: Confirmation) -> list[tuple[Tensor, Layout]]:
    if not confirmation.rank_results:
        return []
    try:
        outputs = oracle_of_program(program).outputs
    except REJECTIONS:  # a random op may refuse now what it took before
        return []
    made = []
    for want, text in zip(outputs, confirmation.rank_results[0].placements, strict=False):
        try:
            layout = read_layout(text)
        except BadPlacement:  # a plain tensor, or a placement of DTensor's own
            continue
        if isinstance(want, Tensor) and want.numel():
            made.append((want.detach(), layout))
    return made
