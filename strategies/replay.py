"""A program as one line, and back: what a finding on a mesh prints, so that it can be had again.

`aten.add.Tensor on (2,3), flattened, seed 7 draw 3: (S(0), R), (P(sum), R), then sum`; each tensor has the
placements of all mesh axes in parentheses.  The call itself, its values with it, is not in the line.
"""

from __future__ import annotations

import re

from localtensor.errors import BadPlacement
from localtensor.placement import shorts
from strategies.layouts import read_layout
from strategies.programs import Program
from strategies.rules import Sample

_LAYOUT = r"\((?:[^()]|\([^()]*\))*\)"
_LINE = re.compile(
    r"(?P<op>\S+) on \((?P<mesh>[\d, ]+)\)(?P<flattened>, flattened)?, seed (?P<seed>\d+) draw (?P<draw>\d+): "
    rf"(?P<inputs>{_LAYOUT}(?:, {_LAYOUT})*)(?:, then (?P<then>.+))?"
)


def describe(program: Program) -> str:
    """The line of a program; `parse_program` makes the same program of it."""
    mesh = ",".join(map(str, program.mesh)) + ("," if len(program.mesh) == 1 else "")
    flattened = ", flattened" if program.flattened else ""
    inputs = ", ".join(f"({shorts(layout)})" for layout in program.inputs)
    then = f", then {program.then}" if program.then else ""
    return f"{program.sample.op} on ({mesh}){flattened}, seed {program.seed} draw {program.draw}: {inputs}{then}"


def parse_program(text: str, sample: Sample) -> Program:
    """The program of this sample that a line describes.

    Raises `BadPlacement` for a line that is none, for one about another op, and for one that has not a layout for
    each tensor of the sample, or not a placement for each axis.
    """
    found = _LINE.fullmatch(text.strip())
    if not found:
        raise BadPlacement("replay.parse_program", text, "this is no line that describes a program")
    mesh = tuple(int(size) for size in found["mesh"].replace(" ", "").strip(",").split(","))
    inputs = tuple(read_layout(part) for part in re.findall(_LAYOUT, found["inputs"]))
    if found["op"] != sample.op:
        raise BadPlacement("replay.parse_program", text, f"the sample is a call of {sample.op}")
    if len(inputs) != len(sample.tensors) or any(len(layout) != len(mesh) for layout in inputs):
        count = f"{len(sample.tensors)} tensors on {len(mesh)} axes need as many layouts of as many placements"
        raise BadPlacement("replay.parse_program", text, count)
    numbers = int(found["seed"]), int(found["draw"])
    return Program(sample, mesh, inputs, found["then"] or "", *numbers, flattened=bool(found["flattened"]))
