"""One call of an op through DTensor itself, on a mesh of one or more axes, and what follows it: as a value."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.tensor.placement_types import Placement

from localtensor.layout import Layout, cuts, factors_of, in_order, order_of, parse, shorts
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


# Layouts as a finding writes them, and on fewer axes, as the search for a smaller one asks for them.
#
# What a layout means is said in `localtensor.layout.shards`.

_BETWEEN = re.compile(r", (?![^()]*\))")
"""The commas between placements, and not those within one."""


def read_layout(text: str) -> Layout:
    """The layout that a text stands for: `S(0)` on one axis, `(S(0), R)` on two.  Raises `BadPlacement`.

    >>> read_layout("(S(0), SS(1,2), R)")
    (Shard(dim=0), _StridedShard(dim=1, sf=2), Replicate())
    """
    inner = text[1:-1] if text.startswith("(") else text
    return tuple(parse(part) for part in _BETWEEN.split(inner))


def on_axes(layout: Layout, mesh: Sequence[int], axes: Sequence[int], sizes: Sequence[int]) -> Layout:
    """The layout on some of the axes alone, which now have these sizes; a dim is cut in the order in which it was.

    >>> whole = read_layout("(SS(0,3), S(0))")
    >>> on_axes(whole, (2, 3), (0, 1), (2, 2)), on_axes(whole, (2, 3), (0,), (2,))
    ((_StridedShard(dim=0, sf=2), Shard(dim=0)), (Shard(dim=0),))
    """
    made = [layout[axis] for axis in axes]
    for dim in sorted({cut[0] for cut in map(cuts, layout) if cut is not None}):
        order = order_of(factors_of(layout, dim), mesh)
        left = [axes.index(axis) for axis in order or () if axis in axes]
        for axis, placement in in_order(dim, left, sizes).items():
            made[axis] = placement
    return tuple(made)
