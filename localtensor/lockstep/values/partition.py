"""Partitions of the ranks into those that hold equal values, and common refinements of partitions.

A value that many ranks share is stored once.  Values of one shape are rows of one stack; a cell is such a stack, or a
single tensor if there is one value.  A `Partition` maps each rank to its row.  It holds no tensor, is immutable, and
there is one object for equal contents, so that `is` compares partitions and functions of them are cached.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch

Array = np.ndarray[Any, Any]  # of int64 or bool
NOWHERE = -1  # the row of a rank that holds nothing
_MOST_KEPT = 4096


@dataclass(frozen=True, eq=False, repr=False)  # no slots: they would need a weakref_slot, which Python 3.10 has not
class Partition:
    """The row that each rank reads.  Rows are counted through all cells; cell c has `sizes[c]` of them.

    Made by `partition` and the functions below it, which return one object for equal contents.
    """

    row_of: Array  # int64 of shape [world]; NOWHERE if the rank holds nothing
    sizes: tuple[int, ...]
    cell_of: Array  # the cell of each row
    starts: tuple[int, ...]  # the first row of each cell
    rows: int
    complete: bool  # every rank holds something
    uniform: bool  # every rank holds the same

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.row_of)

    @property
    def held(self) -> Array | None:
        """The ranks that hold something: bools of shape [world]; None if all do."""
        return None if self.complete else self.row_of != NOWHERE

    def place(self, rank: int) -> tuple[int, int]:
        """The cell that a rank reads, and the row in that cell; the rank must hold something."""
        row = int(self.row_of[rank])
        cell = int(self.cell_of[row])
        return cell, row - self.starts[cell]

    def ranks(self, row: int) -> list[int]:
        """The ranks that read a row."""
        found: list[int] = np.flatnonzero(self.row_of == row).tolist()
        return found

    def __repr__(self) -> str:
        return f"Partition({self.world} ranks, rows {' + '.join(map(str, self.sizes)) or 'none'})"

    def __reduce__(self) -> tuple[Any, ...]:
        return partition, (self.row_of.tolist(), self.sizes)  # lists, since torch.load refuses NumPy arrays


_known: WeakValueDictionary[Hashable, Partition] = WeakValueDictionary()


def partition(row_of: Array | Sequence[int], sizes: Array | Sequence[int]) -> Partition:
    """The partition in which rank r reads row `row_of[r]`, and cells have these numbers of rows.

    >>> partition([0, 0, 1, 1], [2]) is partition([0, 0, 1, 1], [2])
    True
    """
    rows = np.ascontiguousarray(row_of, dtype=np.int64)
    key = (rows.tobytes(), tuple(sizes))
    found = _known.get(key)
    if found is None:
        rows = rows.copy()
        rows.setflags(write=False)
        starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        complete = bool((rows >= 0).all())
        found = Partition(
            row_of=rows,
            sizes=tuple(int(size) for size in sizes),
            cell_of=np.repeat(np.arange(len(sizes)), sizes),
            starts=tuple(int(start) for start in starts[:-1]),
            rows=int(starts[-1]),
            complete=complete,
            uniform=complete and starts[-1] == 1,
        )
        found = _known.setdefault(key, found)
    return found


@lru_cache(256)
def everyone(world: int) -> Partition:
    """The partition in which all ranks hold the same value.

    >>> everyone(4)
    Partition(4 ranks, rows 1)
    """
    return partition(np.zeros(world, np.int64), [1])


@lru_cache(256)
def every_rank_alone(world: int) -> Partition:
    """The partition in which each rank has its own row, in one stack.

    >>> every_rank_alone(4)
    Partition(4 ranks, rows 4)
    """
    return partition(np.arange(world), [world])


def one_row_per_rank(held: Sequence[int], world: int) -> Partition:
    """The partition in which each of these ranks has its own row, in one stack; the others hold nothing."""
    rows = np.full(world, NOWHERE)
    rows[list(held)] = np.arange(len(held))
    return partition(rows, [len(held)])


def by_value(values: Array, held: Array | None = None) -> Partition:
    """The partition in which ranks with equal values share a row; each row is a cell, in the order of the values.

    >>> by_value([7, 7, 3]).row_of.tolist()
    [1, 1, 0]
    """
    array = np.ascontiguousarray(values)
    return _by_value(array.tobytes(), array.dtype.str, None if held is None else np.asarray(held, bool).tobytes())


@lru_cache(_MOST_KEPT)
def _by_value(values: bytes, dtype: str, held: bytes | None) -> Partition:
    array = np.frombuffer(values, dtype)
    mask = np.ones(len(array), bool) if held is None else np.frombuffer(held, bool)
    rows = np.full(len(array), NOWHERE)
    distinct, rows[mask] = np.unique(array[mask], return_inverse=True)
    return partition(rows, [1] * len(distinct))


@lru_cache(_MOST_KEPT)
def refinement(one: Partition, other: Partition) -> Partition:
    """The common refinement: the coarsest partition whose every cell lies within one cell of each.

    A rank that holds nothing in one of them holds nothing.

    >>> refinement(partition([0, 0, 1, 1], [2]), partition([0, 1, 0, 1], [2])).row_of.tolist()
    [0, 1, 2, 3]
    """
    if one is other or other.uniform:
        return one
    if one.uniform:
        return other
    both = (one.row_of >= 0) & (other.row_of >= 0)
    a, b = one.row_of[both], other.row_of[both]
    pairs = (one.cell_of[a] * len(other.sizes) + other.cell_of[b]) * one.rows * other.rows + a * other.rows + b
    distinct, inverse = np.unique(pairs, return_inverse=True)
    _, sizes = np.unique(distinct // (one.rows * other.rows), return_counts=True)
    rows = np.full(one.world, NOWHERE)
    rows[both] = inverse
    return partition(rows, sizes)


@dataclass(frozen=True, slots=True)
class RowSelection:
    """The rows of a coarser value that a cell of a finer partition reads: all rows of a cell, one, or several.

    `rows` is None for the whole cell, a number for one row of a stack, else int64 of shape [rows].  `stacked` is
    whether the result has a row for each value.
    """

    cell: int
    rows: int | torch.Tensor | None
    stacked: bool

    def of(self, cells: Sequence[torch.Tensor]) -> torch.Tensor:
        """The selected rows of these cells; a view where possible."""
        cell = cells[self.cell]
        if self.rows is None:
            return cell
        return cell[self.rows] if isinstance(self.rows, int) else _select_rows(cell, self.rows.to(cell.device))


def _select_rows(cell: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """These rows of a stack; dims keep their order in memory."""
    if cell.layout is not torch.strided or cell.is_contiguous():
        return cell.index_select(0, rows)
    strides = cell.stride()
    order = sorted(range(1, cell.dim()), key=lambda dim: (-strides[dim], dim))
    back = sorted(range(1, cell.dim()), key=lambda dim: order[dim - 1])
    return cell.permute(0, *order).index_select(0, rows).permute(0, *back)


@lru_cache(_MOST_KEPT)
def selections(fine: Partition, coarse: Partition) -> tuple[RowSelection, ...]:
    """For each cell of the finer partition, the rows of the coarser one that it reads."""
    first = np.zeros(fine.rows, np.int64)  # the first rank that reads this row
    ranks = np.flatnonzero(fine.row_of >= 0)[::-1]
    first[fine.row_of[ranks]] = ranks
    wanted = coarse.row_of[first]
    found = []
    for start, size in zip(fine.starts, fine.sizes, strict=True):
        rows = wanted[start : start + size]
        cell = int(coarse.cell_of[rows[0]])
        found.append(_row_selection(cell, rows - coarse.starts[cell], coarse.sizes[cell]))
    return tuple(found)


def _row_selection(cell: int, rows: Array, size: int) -> RowSelection:
    if size == 1:
        return RowSelection(cell, None, stacked=False)
    if (rows == rows[0]).all():
        return RowSelection(cell, int(rows[0]), stacked=False)
    if len(rows) == size and (rows == np.arange(size)).all():
        return RowSelection(cell, None, stacked=True)
    return RowSelection(cell, torch.from_numpy(np.ascontiguousarray(rows)), stacked=True)


@lru_cache(_MOST_KEPT)
def merge_cells(old: Partition, kinds: tuple[Hashable, ...]) -> tuple[Partition, tuple[tuple[int, ...], ...]]:
    """The partition with cells of one kind merged, and for each new cell the old cells that it consists of, in order.

    >>> merge_cells(by_value([0, 1, 2]), ("a", "b", "a"))
    (Partition(3 ranks, rows 2 + 1), ((0, 2), (1,)))
    """
    groups: dict[Hashable, list[int]] = {}
    for cell, kind in enumerate(kinds):
        groups.setdefault(kind, []).append(cell)
    order = np.concatenate(
        [np.arange(old.starts[c], old.starts[c] + old.sizes[c]) for cells in groups.values() for c in cells]
    )
    place = np.empty(old.rows, np.int64)
    place[order] = np.arange(old.rows)
    rows = np.where(old.row_of >= 0, place[old.row_of], NOWHERE)
    sizes = [sum(old.sizes[c] for c in cells) for cells in groups.values()]
    return partition(rows, sizes), tuple(map(tuple, groups.values()))


@lru_cache(_MOST_KEPT)
def one_row_per_cell(held: Partition) -> Partition:
    """The partition in which ranks that read one cell share a row."""
    if held.rows == len(held.sizes):
        return held
    return partition(np.where(held.row_of >= 0, held.cell_of[held.row_of], NOWHERE), [1] * len(held.sizes))


@lru_cache(_MOST_KEPT)
def one_cell_per_row(held: Partition) -> Partition:
    """The partition with the same rows, each a cell of its own."""
    return held if held.rows == len(held.sizes) else partition(held.row_of, [1] * held.rows)


@lru_cache(_MOST_KEPT)
def with_remaining_ranks(fine: Partition, coarse: Partition) -> Partition:
    """The finer partition, followed by cells of the ranks that hold something only in the coarser one.

    >>> with_remaining_ranks(one_row_per_rank([0], 3), everyone(3)).row_of.tolist()
    [0, 1, 1]
    """
    rest = (fine.row_of < 0) & (coarse.row_of >= 0)
    if not rest.any():
        return fine
    cells, used = coarse.cell_of[coarse.row_of[rest]], coarse.row_of[rest]
    distinct, inverse = np.unique(cells * coarse.rows + used, return_inverse=True)
    rows = np.array(fine.row_of)
    rows[rest] = fine.rows + inverse
    return partition(rows, [*fine.sizes, *np.unique(distinct // coarse.rows, return_counts=True)[1]])
