"""Programs in few words, for the tests of the modules that run them."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from localtensor.layout.spec import parse, shorts
from strategies.model.rule import Program, Sample
from strategies.programs.run.real_run import run_simulated_programs
from strategies.programs.run.verdict import Confirmation


def on(one: Sample, text: str, mesh: tuple[int, ...] = (2,), then: str = "", **options: Any) -> Program:
    """`on(sample, "S(0)/R, P(sum)")`: tensors apart by a comma and a space, axes by a slash; a lone placement is
    that of the first axis, with replicas on the others."""
    inputs = tuple(_placements(part, len(mesh)) for part in text.split(", "))
    return Program(one, mesh, inputs, then, **options)


def _placements(text: str, axes: int) -> tuple[Placement, ...]:
    given = [parse(part) for part in text.split("/")]
    return (*given, *[Replicate() for _ in range(axes - len(given))])


def played(*programs: Program) -> list[Confirmation]:
    return run_simulated_programs(programs)


def assert_right(*programs: Program) -> None:
    for program, found in zip(programs, run_simulated_programs(programs), strict=True):
        assert (found.wrong, found.note) == ("", "DTensor's own run is right"), (
            f"{program}: {found.wrong or found.note}"
        )


def assert_goes_wrong(program: Program, because: str) -> None:
    (found,) = run_simulated_programs([program])
    assert because in found.wrong, f"{program}: {found.wrong or found.note}"


def described(program: Program) -> str:
    """All of a program but its call, in a line: mesh, submesh, seed, draw, every placement, and what follows."""
    mesh = ",".join(map(str, program.mesh)) + ("," if len(program.mesh) == 1 else "")
    flattened = ", flattened" if program.flattened else ""
    inputs = ", ".join(f"({shorts(layout)})" for layout in program.inputs)
    then = f", then {program.then}" if program.then else ""
    return f"{program.sample.op} on ({mesh}){flattened}, seed {program.seed} draw {program.draw}: {inputs}{then}"
