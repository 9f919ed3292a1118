"""One call of an op through DTensor itself, on a mesh of one or more axes, and what follows it: as a value."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch.distributed.tensor.placement_types import Placement

from localtensor.layout.spec import shorts
from strategies.model.rule import Sample


@dataclass(frozen=True, slots=True)
class Program:
    """One call of an op through DTensor itself on a mesh of one or more axes, and a cheap op after it.

    `inputs` has, for each tensor of the call, one placement per mesh axis.  `then` names a follower (see
    `followers`), and is empty where nothing follows.  `(seed, draw)` fix how partial inputs are decomposed.
    With `flattened`, a flattened submesh exists before the op runs.
    """

    sample: Sample
    mesh: tuple[int, ...]
    inputs: tuple[tuple[Placement, ...], ...]
    then: str = ""
    seed: int = 0
    draw: int = 0
    flattened: bool = False

    @property
    def ranks(self) -> int:
        return math.prod(self.mesh)

    def __str__(self) -> str:
        """`aten.add.Tensor on (2, 2): (S(0), R), R, then sum`: one placement where a tensor has the same on each axis."""
        held = ", ".join(held_text(placements) for placements in self.inputs)
        shown = f"{self.sample.op} on {self.mesh}: {held}"
        shown += f", then {self.then}" if self.then else ""
        return shown + (", a flattened submesh present" if self.flattened else "")


def held_text(placements: tuple[Placement, ...]) -> str:
    """`(S(0), R)`; one placement where it is the same on each axis."""
    return shorts(placements[:1]) if len(set(placements)) == 1 else f"({shorts(placements)})"
