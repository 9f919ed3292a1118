"""Programs on meshes of several axes: what lies where is drawn by Hypothesis, a few forms of it on purpose.

| form      | what it tries                                                                                     |
|-----------|---------------------------------------------------------------------------------------------------|
| claimed   | on each axis a tuple of input placements that a one-axis rule claims: DTensor expands these itself |
| planned   | the same but for one placement that no rule has: DTensor redistributes first                       |
| anywhere  | every tensor anywhere                                                                              |
| nested    | one claimed tuple on several axes: they cut the same dim, and the pieces of the pieces are uneven  |
| reordered | the same, cut in another order than from left to right (strided shards)                            |
| partial   | one tensor partial on several axes, of one kind or of "sum" and "avg"; or tensors of unlike kinds  |
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from localtensor.layout.meaning import COMMUTING, Layout, has_meaning, in_order
from localtensor.layout.partials import agreed
from localtensor.layout.spec import KINDS, cuts, is_plain
from strategies.inputs.hypothesis_source import Pick, drawn
from strategies.model.program import Program
from strategies.model.rule import Claim, Sample

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
    hands = drawn(lambda pick: tuple(_one(board, form, pick) for form in FORMS), seed=number, budget=_hands(budget))
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


def _one(board: Board, form: Form, pick: Pick) -> tuple[tuple[Layout, ...], bool] | None:
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
