"""Redistributions without an op, from any layout to any that a user may ask for.

The op is a copy and the target is what follows it: `to (S(0), R)`.  Torch redistributes to a Partial for its own use
only, and refuses a user who asks for that; so targets hold none.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from localtensor.layout import COMMUTING, KINDS, Layout, agreed, cuts, has_meaning, in_order, is_plain, parse, shorts
from strategies.inputs.schema_samples import Pick, drawn
from strategies.model.rule import Call, Claim, Leaf, Program, Sample, on_axes

# Programs on meshes of several axes: what lies where is drawn by Hypothesis, a few forms of it on purpose.
#
# | form      | what it tries                                                                                     |
# |-----------|---------------------------------------------------------------------------------------------------|
# | claimed   | on each axis a tuple of input placements that a one-axis rule claims: DTensor expands these itself |
# | planned   | the same but for one placement that no rule has: DTensor redistributes first                       |
# | anywhere  | every tensor anywhere                                                                              |
# | nested    | one claimed tuple on several axes: they cut the same dim, and the pieces of the pieces are uneven  |
# | reordered | the same, cut in another order than from left to right (strided shards)                            |
# | partial   | one tensor partial on several axes, of one kind or of "sum" and "avg"; or tensors of unlike kinds  |

T = TypeVar("T")
Row = tuple[Placement, ...]
"""One placement for each tensor, on one axis."""
FLATTENED = (False, False, False, True)
"""A flattened submesh is there in one of so many programs."""


@dataclass(frozen=True, slots=True)
class Board:
    """What there is to draw from: on each axis the rows that somebody claims, and for each tensor all it can be."""

    sample: Sample
    mesh: tuple[int, ...]
    claimed: tuple[tuple[Row, ...], ...]
    anything: tuple[tuple[Placement, ...], ...]

    @classmethod
    def of(cls, sample: Sample, claims: Mapping[int, Sequence[Claim]], mesh: tuple[int, ...]) -> Board:
        rows = {size: _rows(sample, claims.get(size, ())) for size in mesh}
        return cls(sample, mesh, tuple(rows[size] for size in mesh), tuple(map(options, sample.tensors)))

    @property
    def tensors(self) -> range:
        return range(len(self.sample.tensors))

    @property
    def axes(self) -> range:
        return range(len(self.mesh))


def _rows(sample: Sample, claims: Sequence[Claim]) -> tuple[Row, ...]:
    """The inputs that are claimed, each once; all replicated, which is right, only where nothing else is claimed."""
    nothing = (Replicate(),) * len(sample.tensors)
    found = [tuple(p or Replicate() for p in c.rule.inputs) for c in claims if all(map(_settled, c.rule.inputs))]
    return tuple(dict.fromkeys(row for row in found if row != nothing)) or (nothing,)


def _settled(placement: Placement | None) -> bool:
    return placement is None or is_plain(placement)


def options(x: Tensor) -> tuple[Placement, ...]:
    """Everything that a tensor can be on one axis."""
    return (Replicate(), *map(Shard, range(x.ndim)), *(Partial(kind) for kind in KINDS if agreed(kind, x.dtype)))


def draw_programs(
    sample: Sample, claims: Mapping[int, Sequence[Claim]], mesh: tuple[int, ...], *, seed: int, budget: int
) -> list[Program]:
    """At most `budget` different programs of this call on this mesh, the same for a seed in any process.

    `claims` are the one-axis claims by the number of ranks.  Their number in the list is their `draw`.
    """
    if not sample.tensors or any(t.numel() == 0 for t in sample.tensors):
        return []  # of an empty tensor DTensor looks for a view for ever (view_groups, torch 2.13)
    board = Board.of(sample, claims, mesh)
    number = _own(seed, sample, mesh)
    hands = drawn(lambda pick: tuple(_program(board, form, pick) for form in FORMS), seed=number, budget=_hands(budget))
    found = dict.fromkeys(one for one in _dealt(hands, number) if one is not None)
    return [
        Program(sample, mesh, layouts, seed=seed, draw=draw, flattened=flattened)
        for draw, (layouts, flattened) in enumerate(itertools.islice(found, budget))
    ]


def _dealt(hands: Sequence[tuple[T, ...]], number: int) -> Iterator[T]:
    """In each round one of each form, from another hand each, beginning with another form for each number."""
    for turn in range(len(hands)):
        for form in range(len(FORMS)):
            yield hands[(form + turn) % len(hands)][(form + number) % len(FORMS)]


def _own(seed: int, sample: Sample, mesh: tuple[int, ...]) -> int:
    """A number for Hypothesis, so that one seed draws other layouts for other calls."""
    return zlib.crc32(f"{seed} {sample.op} {sample.arguments()} {mesh}".encode())


def _hands(budget: int) -> int:
    """How many hands of one program of each form: half more than the budget, since some come twice or mean nothing.

    Three at least: the first example of Hypothesis is the simplest there is.
    """
    return max(3, -(-budget * 3 // (2 * len(FORMS)))) if budget > 0 else 0


def _program(board: Board, form: Form, pick: Pick) -> tuple[tuple[Layout, ...], bool] | None:
    tensors, drawn_rows = board.sample.tensors, form(board, pick)
    layouts = tuple(map(mended, zip(*drawn_rows, strict=True), tensors, itertools.repeat(board.mesh)))
    flattened = pick(FLATTENED)
    if not all(has_meaning(layout, x.shape, x.dtype, board.mesh) for layout, x in zip(layouts, tensors, strict=True)):
        return None
    plain = all(p == Replicate() for layout in layouts for p in layout)
    return None if plain else (layouts, flattened)


def mended(layout: Layout, x: Tensor, mesh: tuple[int, ...]) -> Layout:
    """The nearest layout with a meaning: kinds of Partial that do not mix become the first, strided shards plain."""
    first = next((p for p in layout if isinstance(p, Partial)), None)
    one_kind = tuple(first if first and isinstance(p, Partial) else p for p in layout)
    if has_meaning(layout, x.shape, x.dtype, mesh):
        return layout
    if has_meaning(one_kind, x.shape, x.dtype, mesh):
        return one_kind
    return tuple(Shard(cut[0]) if (cut := cuts(p)) else p for p in one_kind)


Rows = list[Row]
"""For each axis a row."""


def _claimed(board: Board, pick: Pick) -> Rows:
    return [pick(rows) for rows in board.claimed]


def _planned(board: Board, pick: Pick) -> Rows:
    rows = _claimed(board, pick)
    return _put(rows, pick(board.axes), pick(board.tensors), board, pick)


def _put(rows: Rows, axis: int, tensor: int, board: Board, pick: Pick) -> Rows:
    return _with(rows, axis, tensor, pick(board.anything[tensor]))


def _with(rows: Rows, axis: int, tensor: int, placement: Placement) -> Rows:
    row = (*rows[axis][:tensor], placement, *rows[axis][tensor + 1 :])
    return [*rows[:axis], row, *rows[axis + 1 :]]


def _anywhere(board: Board, pick: Pick) -> Rows:
    return [tuple(map(pick, board.anything)) for _ in board.axes]


def _nested(board: Board, pick: Pick) -> Rows:
    """One row with a shard in it on two axes or more; where none is claimed, one tensor's dim."""
    first = pick(board.axes)
    sharding = [row for row in board.claimed[first] if any(map(cuts, row))]
    if not sharding:
        return _anywhere(board, pick)
    row = pick(sharding)
    other = _another(board, pick, first)
    return [row if axis in (first, other) else pick([row, *board.claimed[axis]]) for axis in board.axes]


def _another(board: Board, pick: Pick, first: int) -> int:
    """Another axis; the same on a mesh that has but one."""
    return pick([axis for axis in board.axes if axis != first] or [first])


def _reordered(board: Board, pick: Pick) -> Rows:
    """The nested shards of every tensor that has some, cut in another order."""
    rows = _nested(board, pick)
    for tensor in board.tensors:
        dims = [p.dim if isinstance(p := row[tensor], Shard) else None for row in rows]
        dim = next((d for d in dims if d is not None and dims.count(d) > 1), None)
        if dim is None:
            continue
        axes = [axis for axis in board.axes if dims[axis] == dim]
        for axis, placement in in_order(dim, pick(list(itertools.permutations(axes))[1:]), board.mesh).items():
            rows = _with(rows, axis, tensor, placement)
    return rows


def _partial(board: Board, pick: Pick) -> Rows:
    """One tensor partial on two axes at least; the others as somebody claims them."""
    rows = _claimed(board, pick)
    kinds = [[p for p in options if isinstance(p, Partial)] for options in board.anything]
    if not any(kinds):
        return rows
    tensor = pick([t for t in board.tensors if kinds[t]])
    kind = pick(kinds[tensor])
    first = pick(board.axes)
    other = _another(board, pick, first)
    rows = _with(rows, first, tensor, kind)
    mixed = [p for p in kinds[tensor] if {p.reduce_op, kind.reduce_op} <= COMMUTING] or [kind]
    return _with(rows, other, tensor, pick(mixed))


Form = Callable[[Board, Pick], Rows]
FORMS: Sequence[Form] = (_claimed, _planned, _claimed, _anywhere, _nested, _reordered, _partial, _planned)
"""Those that stand here twice come twice as often."""


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
        lambda pick: tuple(_move(mesh, pick) for _ in range(HAND)), seed=seed, budget=-(-budget * 5 // 4 // HAND)
    )
    found = dict.fromkeys(one for hand in hands for one in hand if one is not None)
    return [
        Program(copy_of(_numbers(shape, dtype)), mesh, (source,), f"to ({shorts(target)})", seed, draw, flattened)
        for draw, (shape, dtype, source, target, flattened) in enumerate(itertools.islice(found, budget))
    ]


def _move(mesh: tuple[int, ...], pick: Pick) -> Move | None:
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


# What is to blame where a program goes wrong on a mesh: the smallest program that goes wrong as well.
#
# If the op is wrong on one of the axes alone, the finding is that of the one-axis rule, not the mesh's.  So first each
# axis is tried alone, on few ranks and on all, then two of three, then axes of two ranks, then without the flattened submesh and what follows,
# and in the end each placement is replaced by a replica.

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
