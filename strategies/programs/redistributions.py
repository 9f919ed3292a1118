"""Redistributions without an op, from any layout to any that a user may ask for.

The op is a copy and the target is what follows it: `to (S(0), R)`.  Torch redistributes to a Partial for its own use
only, and refuses a user who asks for that; so targets hold none.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from localtensor.layout.meaning import Layout, has_meaning, in_order
from localtensor.layout.spec import parse, shorts
from strategies.inputs.hypothesis_source import Pick, drawn
from strategies.model.program import Program
from strategies.model.rule import Call, Leaf, Sample
from strategies.programs.mesh_programs import FLATTENED, mended, options

SHAPES: tuple[tuple[int, ...], ...] = ((7, 6), (8, 8), (5, 3), (1, 4), (3,), (4, 2, 6))
"""Uneven, even, shorter than the mesh, of one row, of one dim and of three."""
DTYPES = (torch.float64, torch.float64, torch.int64)
"""Floats twice as often."""
COPY = "aten.clone.default"


Move = tuple[tuple[int, ...], torch.dtype, Layout, Layout, bool]
"""Shape, dtype, from where, to where, and whether a flattened submesh is there."""
HAND = 5
"""How many come of one example of Hypothesis: its next one is often the last with little changed."""


def copy_of(x: Tensor) -> Sample:
    """The call that does nothing to x."""
    return Sample(Call(COPY, (Leaf(0),)), (x,), "a redistribution without an op")


def draw_redistributions(mesh: tuple[int, ...], *, seed: int, budget: int) -> list[Program]:
    """At most `budget` different programs on this mesh, the same for a seed in any process."""
    hands = drawn(
        lambda pick: tuple(_one(mesh, pick) for _ in range(HAND)), seed=seed, budget=-(-budget * 5 // 4 // HAND)
    )
    found = dict.fromkeys(one for hand in hands for one in hand if one is not None)
    return [
        Program(copy_of(_numbers(shape, dtype)), mesh, (source,), f"to ({shorts(target)})", seed, draw, flattened)
        for draw, (shape, dtype, source, target, flattened) in enumerate(itertools.islice(found, budget))
    ]


def _one(mesh: tuple[int, ...], pick: Pick) -> Move | None:
    shape, dtype = pick(SHAPES), pick(DTYPES)
    x = _numbers(shape, dtype)
    source = mended(_layout(x, mesh, pick, partial=True), x, mesh)
    target = mended(_layout(x, mesh, pick, partial=False), x, mesh)
    flattened = pick(FLATTENED)
    told = all(has_meaning(layout, shape, dtype, mesh) for layout in (source, target))
    return (shape, dtype, source, target, flattened) if told and source != target else None


def _layout(x: Tensor, mesh: Sequence[int], pick: Pick, *, partial: bool) -> Layout:
    every = options(x) if partial else (Replicate(), *map(Shard, range(x.ndim)))
    form = pick(("any", "any", "nested", "reordered"))
    axes = range(len(mesh))
    if form == "any":
        return tuple(pick(every) for _ in axes)
    dim, beside = pick(range(x.ndim)), pick(every)
    order = pick([order for count in (2, len(mesh)) for order in itertools.permutations(axes, count)])
    cut = in_order(dim, sorted(order) if form == "nested" else order, mesh)
    return tuple(cut.get(axis, beside if beside != Shard(dim) else parse("R")) for axis in axes)


@functools.cache
def _numbers(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """No two alike, of both signs."""
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=dtype) * 2 - count).reshape(shape)
