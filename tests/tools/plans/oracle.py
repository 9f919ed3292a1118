"""The cheapest plans by brute force: Bellman and Ford's relaxation over all specs that `steps.changes` makes.

It shares nothing with the planner but the legal steps and their prices: no integers for specs, no bound, no heap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.distributed.tensor import Partial

from localtensor.layout.shards import split
from localtensor.layout.spec import Spec
from strategies.planner.steps.alpha_beta import REPLICATE
from strategies.planner.steps.legal_steps import Placement, legal_changes
from strategies.planner.steps.plan import Move, Price
from strategies.planner.steps.prices import priced_step

Cost = tuple[int, int]
"""A price and a number of steps."""


class Oracle:
    """All specs that can be reached with these placements, and the steps between them."""

    def __init__(self, offered: Sequence[Placement], flattened: Sequence[Sequence[int]] = ()) -> None:
        self.offered, self.flattened = tuple(offered), tuple(map(tuple, flattened))
        self._steps: dict[Spec, list[tuple[Spec, Move, int]]] = {}

    def steps(self, spec: Spec) -> list[tuple[Spec, Move, int]]:
        """The specs after each legal step, the move, and the memory that it needs."""
        if spec not in self._steps:
            made = [(change, priced_step(change.kind, change.axes, spec, change.now))
                    for change in legal_changes(spec, self.offered, self.flattened)]  # fmt: skip
            self._steps[spec] = [(change.now, step.move, step.memory) for change, step in made]
        return self._steps[spec]

    def costs(self, src: Spec, price: Price, memory: int | None = None) -> dict[Spec, Cost]:
        """What it costs to get from a spec to each other, with no step that needs more memory."""
        found, todo = {src: (0, 0)}, [src]
        while todo:
            spec = todo.pop(0)
            cost, count = found[spec]
            for now, move, need in self.steps(spec):
                more = cost + price(move), count + 1
                if (memory is None or need <= memory) and more < found.get(now, (more[0], more[1] + 1)):
                    found[now] = more
                    if now not in todo:
                        todo.append(now)
        return found

    def needs(self, src: Spec) -> dict[Spec, int]:
        """The least memory with which each spec can be reached."""
        found, todo = {src: 0}, [src]
        while todo:
            spec = todo.pop(0)
            for now, _, need in self.steps(spec):
                more = max(found[spec], need)
                if more < found.get(now, more + 1):
                    found[now] = more
                    todo.append(now)
        return found


def without_lone(spec: Spec) -> Spec:
    """The spec with all axes of one rank replicated: it lies as it did."""
    sizes = spec.mesh.sizes
    placements = tuple(REPLICATE if size == 1 else p for size, p in zip(sizes, spec.placements, strict=True))
    order = [(dim, tuple(axis for axis in axes if sizes[axis] > 1)) for dim, axes in spec.shard_order]
    return replace(spec, placements=placements, shard_order=tuple((dim, axes) for dim, axes in order if axes))


def held(spec: Spec) -> tuple[list[torch.Tensor], list[object]]:
    """The rows of every rank of a tensor that counts, and what each axis of more ranks than one waits for."""
    sizes = spec.mesh.sizes
    pending = [
        p if isinstance(p, Partial) and size > 1 else None for size, p in zip(sizes, spec.placements, strict=True)
    ]
    at_rest = tuple(REPLICATE if isinstance(p, Partial) else p for p in spec.placements)
    count = torch.arange(torch.Size(spec.shape).numel()).view(spec.shape)
    return split(count, Spec(spec.mesh, at_rest, spec.shape, torch.int64, spec.shard_order)), list(pending)


def alike(one: Spec, other: Spec) -> bool:
    """Whether every rank holds the same under both."""
    (mine, waits), (theirs, wait) = held(one), held(other)
    return waits == wait and all(map(torch.equal, mine, theirs))
