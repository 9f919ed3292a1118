"""Programs on meshes of several axes, redistributions without an op, and the smallest wrong program.

The layouts of a call's tensors are drawn, some of them in special forms, which take turns:

| form      | layouts                                                                                           |
|-----------|---------------------------------------------------------------------------------------------------|
| claimed   | on each axis a tuple of input placements that a one-axis rule claims: DTensor expands these itself |
| planned   | the same, except for one placement that no rule has: DTensor redistributes first                   |
| anywhere  | every tensor with any placements                                                                   |
| nested    | one claimed tuple on several axes: they cut the same dim, and the pieces of the pieces are uneven  |
| reordered | the same, cut in another order than from left to right (strided shards)                            |
| mixed     | a claimed tuple with a sum on one axis, one with a shard on another                                |
| partial   | one tensor partial on several axes, of one kind or of "sum" and "avg"; or tensors of unlike kinds  |

A redistribution without an op is a copy with the target layout as the follow-up step: `to (S(0), R)`.  Targets have no
Partial, which torch's `redistribute` refuses.  In either layout a strided shard may stand alone.
"""

from __future__ import annotations

import functools
import itertools
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from localtensor.layout import (
    COMMUTING_KINDS,
    PARTIAL_KINDS,
    Layout,
    StridedShard,
    has_one_meaning,
    is_arithmetic,
    is_standard,
    is_unambiguous,
    placements_in_order,
    shard_cut,
    shorts,
)
from strategies.inputs.typed_values import Picker, drawn
from strategies.model.rule import Call, Claim, Leaf, Program, Sample, layout_on_axes
from strategies.programs.run.follow_ups import shorter_chains
from strategies.programs.run.verdict import Confirmation
from strategies.programs.shrink.sizes import more_replicas

T = TypeVar("T")
Row = tuple[Placement, ...]
"""One placement for each tensor, on one axis."""
FLATTENED = (False, False, False, True)
"""Whether a program has a flattened submesh: one in four has."""


@dataclass(frozen=True, slots=True)
class PlacementChoices:
    """The choices to draw from: the claimed rows of each axis, and all placements of each tensor."""

    sample: Sample
    mesh: tuple[int, ...]
    claimed: tuple[tuple[Row, ...], ...]
    anything: tuple[tuple[Placement, ...], ...]

    @classmethod
    def of(cls, sample: Sample, claims: Mapping[int, Sequence[Claim]], mesh: tuple[int, ...]) -> PlacementChoices:
        rows = {size: _rows(sample, claims.get(size, ())) for size in mesh}
        return cls(sample, mesh, tuple(rows[size] for size in mesh), tuple(map(placement_options, sample.tensors)))

    @property
    def tensors(self) -> range:
        return range(len(self.sample.tensors))

    @property
    def axes(self) -> range:
        return range(len(self.mesh))


def _rows(sample: Sample, claims: Sequence[Claim]) -> tuple[Row, ...]:
    """The inputs that are claimed, each once; all replicated, which is right, only where nothing else is claimed."""
    nothing = (Replicate(),) * len(sample.tensors)
    found = [tuple(p or Replicate() for p in c.rule.inputs) for c in claims]
    return tuple(dict.fromkeys(row for row in found if row != nothing and all(map(is_standard, row)))) or (nothing,)


def placement_options(x: Tensor) -> tuple[Placement, ...]:
    """All placements that a tensor can have on one axis."""
    kinds = (k for k in PARTIAL_KINDS if is_unambiguous(k, x.dtype) and is_arithmetic(k, x.dtype))
    partials = map(Partial, kinds)
    return (Replicate(), *map(Shard, range(x.ndim)), *partials)


def draw_programs(
    sample: Sample, claims: Mapping[int, Sequence[Claim]], mesh: tuple[int, ...], *, seed: int, budget: int
) -> list[Program]:
    """At most `budget` different programs of this call on this mesh, the same for a seed in any process.

    `claims` are the one-axis claims by the number of ranks.  Their number in the list is their `draw`.
    """
    if not sample.tensors or any(t.numel() == 0 for t in sample.tensors):
        return []  # DTensor searches for a view of an empty tensor for ever (view_groups, torch 2.13)
    board = PlacementChoices.of(sample, claims, mesh)
    number = zlib.crc32(f"{seed} {sample.op} {sample.arguments()} {mesh}".encode())  # other layouts for other calls
    forms = itertools.cycle((*FORMS[number % len(FORMS) :], *FORMS[: number % len(FORMS)]))
    found = drawn(lambda pick: _program(board, next(forms), pick), seed=number, budget=budget)
    return [
        Program(sample, mesh, layouts, seed=seed, draw=draw, flattened=flattened)
        for draw, (layouts, flattened) in enumerate(found)
    ]


def _program(board: PlacementChoices, form: Form, pick: Picker) -> tuple[tuple[Layout, ...], bool] | None:
    tensors, drawn_rows = board.sample.tensors, form(board, pick)
    layouts = tuple(map(nearest_meaningful, zip(*drawn_rows, strict=True), tensors, itertools.repeat(board.mesh)))
    flattened = pick(FLATTENED) and len(board.mesh) > 1
    placed = zip(layouts, tensors, strict=True)
    plain = all(p == Replicate() for layout in layouts for p in layout)
    meaningful = all(has_one_meaning(layout, x.shape, x.dtype, board.mesh) for layout, x in placed)
    return (layouts, flattened) if meaningful and not plain else None


def nearest_meaningful(layout: Layout, x: Tensor, mesh: tuple[int, ...]) -> Layout:
    """The nearest layout with a meaning: with one kind of Partial, then with plain shards for strided ones."""
    first = next((p for p in layout if isinstance(p, Partial)), None)
    one_kind = tuple(first if first and isinstance(p, Partial) else p for p in layout)
    if has_one_meaning(layout, x.shape, x.dtype, mesh):
        return layout
    if has_one_meaning(one_kind, x.shape, x.dtype, mesh):
        return one_kind
    return tuple(Shard(cut[0]) if (cut := shard_cut(p)) else p for p in one_kind)


Rows = list[Row]
"""For each axis a row."""


def _claimed(board: PlacementChoices, pick: Picker) -> Rows:
    return [pick(rows) for rows in board.claimed]


def _planned(board: PlacementChoices, pick: Picker) -> Rows:
    rows, axis, tensor = _claimed(board, pick), pick(board.axes), pick(board.tensors)
    return _with(rows, axis, tensor, pick(board.anything[tensor]))


def _with(rows: Rows, axis: int, tensor: int, placement: Placement) -> Rows:
    row = (*rows[axis][:tensor], placement, *rows[axis][tensor + 1 :])
    return [*rows[:axis], row, *rows[axis + 1 :]]


def _anywhere(board: PlacementChoices, pick: Picker) -> Rows:
    return [tuple(map(pick, board.anything)) for _ in board.axes]


def _nested(board: PlacementChoices, pick: Picker) -> Rows:
    """One claimed row with a shard on two axes or more; any placements where no shard is claimed."""
    first = pick(board.axes)
    sharding = [row for row in board.claimed[first] if any(map(shard_cut, row))]
    if not sharding:
        return _anywhere(board, pick)
    row = pick(sharding)
    other = _another(board, pick, first)
    return [row if axis in (first, other) else pick([row, *board.claimed[axis]]) for axis in board.axes]


def _another(board: PlacementChoices, pick: Picker, first: int) -> int:
    """Another axis; the same on a mesh of one axis."""
    return pick([axis for axis in board.axes if axis != first] or [first])


def _reordered(board: PlacementChoices, pick: Picker) -> Rows:
    """The nested form with the nested shards of each tensor cut in another order."""
    rows = _nested(board, pick)
    for tensor in board.tensors:
        dims = [p.dim if isinstance(p := row[tensor], Shard) else None for row in rows]
        dim = next((d for d in dims if d is not None and dims.count(d) > 1), None)
        if dim is None:
            continue
        axes = [axis for axis in board.axes if dims[axis] == dim]
        order = pick(list(itertools.permutations(axes))[1:])
        for axis, placement in placements_in_order(dim, order, board.mesh).items():
            rows = _with(rows, axis, tensor, placement)
    return rows


def _partial(board: PlacementChoices, pick: Picker) -> Rows:
    """One tensor partial on two axes or more; the others as claimed."""
    rows = _claimed(board, pick)
    kinds = [[p for p in options if isinstance(p, Partial)] for options in board.anything]
    if not any(kinds):
        return rows
    tensor = pick([t for t in board.tensors if kinds[t]])
    kind = pick(kinds[tensor])
    first = pick(board.axes)
    other = _another(board, pick, first)
    rows = _with(rows, first, tensor, kind)
    mixed = [p for p in kinds[tensor] if {p.reduce_op, kind.reduce_op} <= COMMUTING_KINDS] or [kind]
    return _with(rows, other, tensor, pick(mixed))


def _mixed(board: PlacementChoices, pick: Picker) -> Rows:
    """A claimed row with a sum on one axis, and one with a shard on another; as claimed where there are none."""
    rows, first = _claimed(board, pick), pick(board.axes)
    other = _another(board, pick, first)
    sums = [row for row in board.claimed[first] if Partial("sum") in row]
    shards = [row for row in board.claimed[other] if any(map(shard_cut, row))]
    if sums and shards and first != other:
        rows[first], rows[other] = pick(sums), pick(shards)
    return rows


Form = Callable[[PlacementChoices, Picker], Rows]
FORMS: Sequence[Form] = (_claimed, _planned, _mixed, _anywhere, _nested, _reordered, _partial, _planned)
"""The forms in turn; one of them comes twice."""
SHAPES: tuple[tuple[int, ...], ...] = ((7, 6), (8, 8), (5, 3), (1, 4), (3,), (4, 2, 6))
"""Shapes that are uneven, even, shorter than the mesh, of one row, of one dim and of three."""
DTYPES = (torch.float64, torch.float64, torch.int64)
"""Floats twice as often."""
COPY = "aten.clone.default"
RedistributionDraw = tuple[tuple[int, ...], torch.dtype, Layout, Layout, bool]
"""Shape, dtype, source layout, target layout, and whether there is a flattened submesh."""


def copy_sample(x: Tensor) -> Sample:
    """A sample whose call only copies x."""
    return Sample(Call(COPY, (Leaf(0),)), (x,), "a redistribution without an op")


def draw_redistributions(mesh: tuple[int, ...], *, seed: int, budget: int) -> list[Program]:
    """At most `budget` different programs on this mesh, the same for a seed in any process."""
    found = drawn(lambda pick: _move(mesh, pick), seed=seed, budget=budget)
    return [
        Program(copy_sample(_numbers(shape, dtype)), mesh, (source,), f"to ({shorts(target)})", seed, draw, flattened)
        for draw, (shape, dtype, source, target, flattened) in enumerate(found)
    ]


def every_redistribution(mesh: tuple[int, ...], *, seed: int) -> list[Program]:
    """On a mesh of two axes, from each layout without a partial to each other, strided shards among them.

    The tensor has two dims of even shards, so that nothing hides a fault that depends on the two layouts alone.
    """
    if len(mesh) != 2:
        return []
    size = 2 * math.prod(mesh)
    x = _numbers((size, size), torch.float64)
    one = (Replicate(), Shard(0), Shard(1))
    strided = [StridedShard(dim, split_factor=mesh[1]) for dim in range(2)]
    layouts = [
        layout for layout in itertools.product((*one, *strided), one) if has_one_meaning(layout, x.shape, x.dtype, mesh)
    ]
    return [
        Program(copy_sample(x), mesh, (source,), f"to ({shorts(target)})", seed)
        for source, target in itertools.permutations(layouts, 2)
    ]


def _move(mesh: tuple[int, ...], pick: Picker) -> RedistributionDraw | None:
    shape, dtype = pick(SHAPES), pick(DTYPES)
    x = _numbers(shape, dtype)
    source = nearest_meaningful(_layout(x, mesh, pick, partial=True), x, mesh)
    target = nearest_meaningful(_layout(x, mesh, pick, partial=False), x, mesh)
    flattened = pick(FLATTENED)
    meaningful = all(has_one_meaning(layout, shape, dtype, mesh) for layout in (source, target))
    return (shape, dtype, source, target, flattened) if meaningful and source != target else None


def _layout(x: Tensor, mesh: Sequence[int], pick: Picker, *, partial: bool) -> Layout:
    every = placement_options(x) if partial else (Replicate(), *map(Shard, range(x.ndim)))
    form = pick(("any", "any", "nested", "reordered", "strided"))
    axes = range(len(mesh))
    if form == "any":
        return tuple(pick(every) for _ in axes)
    dim, beside = pick(range(x.ndim)), pick(every)
    order = pick([order for count in (2, len(mesh)) for order in itertools.permutations(axes, count)])
    cut = placements_in_order(dim, sorted(order) if form == "nested" else order, mesh)
    if form == "strided":  # alone, as it stays where the other axis was gathered
        cut = {axis: p for axis, p in cut.items() if isinstance(p, StridedShard)}
    return tuple(cut.get(axis, beside if beside != Shard(dim) else Replicate()) for axis in axes)


@functools.cache
def _numbers(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of different numbers of both signs."""
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=dtype) * 2 - count).reshape(shape)


MAX_RUNS = 60
"""The largest number of smaller programs run for one finding."""


def smallest_wrong_program(program: Program, confirm: Callable[[Program], Confirmation]) -> Program:
    """The smallest program, of those on the way down, that is still wrong; the given one if no smaller one is.

    `confirm` runs a program.  If an op is wrong on one axis alone, the finding is that of the one-axis rule, not the
    mesh's.  So first each axis is tried alone, on few ranks and on all, then two of three, then axes of two ranks, then
    without the flattened submesh and the follow-up step, and in the end each placement is replaced by a replica.  The
    order is fixed, so the result is deterministic.
    """
    runs, again = 0, True
    while again:
        again = False
        for smaller in smaller_programs(program):
            runs += 1
            if runs > MAX_RUNS:
                return program
            if confirm(smaller).wrong:
                program, again = smaller, True
                break
    return program


def smaller_programs(program: Program) -> Iterator[Program]:
    """The programs one step smaller, the most informative first."""
    count = len(program.mesh)
    for few in range(1, count):
        for axes in itertools.combinations(range(count), few):
            for sizes in _sizes(program, axes):
                yield from _meaningful(on_some_axes(program, axes, sizes))
    for axis in range(count):
        if program.mesh[axis] > 2:
            sizes = tuple(2 if a == axis else size for a, size in enumerate(program.mesh))
            yield from _meaningful(on_some_axes(program, range(count), sizes))
    if program.flattened:
        yield replace(program, flattened=False)
    for then in shorter_chains(program.then):
        yield replace(program, then=then)
    for one in more_replicas(program):
        yield from _meaningful(one)


def _sizes(program: Program, axes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Sizes for these axes: two ranks, their own, three; and all ranks for one axis alone, where shards are empty."""
    own = tuple(program.mesh[axis] for axis in axes)
    alone = [(3,), (program.ranks,)] if len(axes) == 1 else []
    yield from dict.fromkeys([(2,) * len(axes), own, *alone])


def on_some_axes(program: Program, axes: Sequence[int], sizes: Sequence[int]) -> Program:
    """The program on some of its axes alone, with these sizes; without a flattened submesh on one axis."""
    layouts = tuple(layout_on_axes(layout, program.mesh, axes, sizes) for layout in program.inputs)
    flattened = program.flattened and len(axes) > 1
    return replace(program, mesh=tuple(sizes), inputs=layouts, flattened=flattened)


def _meaningful(program: Program) -> Iterator[Program]:
    given = zip(program.inputs, program.sample.tensors, strict=True)
    split = any(p != Replicate() for layout in program.inputs for p in layout)
    if split and all(has_one_meaning(layout, x.shape, x.dtype, program.mesh) for layout, x in given):
        yield program
