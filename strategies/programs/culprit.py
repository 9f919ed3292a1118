"""What is to blame where a program goes wrong on a mesh: the smallest program that goes wrong as well.

If the op is wrong on one of the axes alone, the finding is that of the one-axis rule, not the mesh's.  So first each
axis is tried alone, on few ranks and on all, then two of three, then axes of two ranks, then without the flattened submesh and what follows,
and in the end each placement is replaced by a replica.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from torch.distributed.tensor import Replicate

from localtensor.layout.meaning import Layout, has_meaning
from strategies.model.layouts import on_axes
from strategies.model.program import Program

MOST_ASKED = 60
"""How many smaller programs are run for one finding at the most."""


class Weighed(Protocol):
    """What a run of a program came to: a `Confirmation`."""

    @property
    def wrong(self) -> str: ...


def blame(program: Program, confirm: Callable[[Program], Weighed]) -> Program:
    """The smallest program on the way down that is still wrong; the same as given if none of the smaller ones is.

    `confirm` runs a program.  The order in which smaller ones are tried is fixed, so the same program has the same
    answer.
    """
    asked, again = 0, True
    while again:
        again = False
        for smaller in smaller_programs(program):
            asked += 1
            if asked > MOST_ASKED:
                return program
            if confirm(smaller).wrong:
                program, again = smaller, True
                break
    return program


def smaller_programs(program: Program) -> Iterator[Program]:
    """The programs one step smaller, those that say most first."""
    count = len(program.mesh)
    for few in range(1, count):
        for axes in itertools.combinations(range(count), few):
            for sizes in _sizes(program, axes):
                yield from _meaningful(projected(program, axes, sizes))
    for axis in range(count):
        if program.mesh[axis] > 2:
            sizes = tuple(2 if a == axis else size for a, size in enumerate(program.mesh))
            yield from _meaningful(projected(program, range(count), sizes))
    if program.flattened:
        yield replace(program, flattened=False)
    if program.then:
        yield replace(program, then="")
    yield from _replicated(program)


def _sizes(program: Program, axes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Of two ranks, of three, as long as they were; and one axis of all the ranks, where empty shards are."""
    own = tuple(program.mesh[axis] for axis in axes)
    alone = [(3,), (program.ranks,)] if len(axes) == 1 else []
    yield from dict.fromkeys([(2,) * len(axes), own, *alone])


def projected(program: Program, axes: Sequence[int], sizes: Sequence[int]) -> Program:
    """The program on some of its axes alone, with these sizes.  A mesh of one axis has nothing to flatten."""
    layouts = tuple(on_axes(layout, program.mesh, axes, sizes) for layout in program.inputs)
    flattened = program.flattened and len(axes) > 1
    return replace(program, mesh=tuple(sizes), inputs=layouts, flattened=flattened)


def _meaningful(program: Program) -> Iterator[Program]:
    given = zip(program.inputs, program.sample.tensors, strict=True)
    split = any(p != Replicate() for layout in program.inputs for p in layout)
    if split and all(has_meaning(layout, x.shape, x.dtype, program.mesh) for layout, x in given):
        yield program


def _replicated(program: Program) -> Iterator[Program]:
    for tensor, layout in enumerate(program.inputs):
        for axis, placement in enumerate(layout):
            if placement != Replicate():
                less: Layout = (*layout[:axis], Replicate(), *layout[axis + 1 :])
                inputs = (*program.inputs[:tensor], less, *program.inputs[tensor + 1 :])
                yield from _meaningful(replace(program, inputs=inputs))
