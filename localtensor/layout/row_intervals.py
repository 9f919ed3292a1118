"""The rows of one dim that each rank holds, as intervals: exact for uneven and empty pieces, at a cost independent of
the number of rows.

A cut is an axis and its split factor, 1 unless the shard is strided.  Every cut keeps rows in order, so that equal
intervals are the same rows at the same places.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence

from localtensor.layout.spec import Spec, shard_cut

RowIntervals = tuple[tuple[int, int], ...]
"""(start, length) of consecutive rows: ascending, none empty, and no two adjacent."""
DimCuts = tuple[tuple[int, int], ...]
"""(axis, split factor) of all cuts of one dim, in their order."""


def cuts_by_dim(spec: Spec) -> tuple[DimCuts, ...]:
    """The cuts of each dim, without those by axes of one rank, which have no effect.

    >>> import torch
    >>> from localtensor.layout.mesh import Mesh
    >>> from localtensor.layout.spec import parse
    >>> placements = tuple(map(parse, ("SS(0,3)", "S(1)", "S(0)", "S(0)")))
    >>> cuts_by_dim(Spec(Mesh.of(2, 2, 3, 1), placements, (7, 4), torch.float32))
    (((0, 3), (2, 1)), ((1, 1),))
    """
    found: list[list[tuple[int, int]]] = [[] for _ in spec.shape]
    sizes, placements = spec.mesh.sizes, spec.placements
    for axis in spec.sequence if spec.shard_order else range(len(sizes)):
        cut = shard_cut(placements[axis])
        if cut is not None and sizes[axis] > 1:
            found[cut[0]].append((axis, cut[1]))
    return tuple(map(tuple, found))


def chunk_rows(runs: RowIntervals, factor: int, ranks: int, place: int) -> RowIntervals:
    """The rows that the rank at coordinate `place` keeps: its chunk of each of `factor` blocks.

    >>> chunk_rows(((0, 5),), 1, 4, 1), chunk_rows(((0, 5),), 2, 2, 0), chunk_rows(((0, 2), (6, 2)), 1, 2, 1)
    (((2, 2),), ((0, 2), (3, 1)), ((6, 2),))
    """
    total = sum(length for _, length in runs)
    block = -(-total // factor)
    wanted = []
    for start in range(0, total, block or 1):
        length = min(block, total - start)
        step = -(-length // ranks)
        wanted.append((start + min(step * place, length), start + min(step * (place + 1), length)))
    if len(runs) == 1:
        start = runs[0][0]
        return _joined((start + first, start + last) for first, last in wanted)
    return _joined(_rows(runs, wanted))


def _rows(runs: RowIntervals, wanted: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The (first, stop) rows at these (first, stop) positions within the runs; both ascend."""
    left, before = list(reversed(runs)), 0
    for first, last in wanted:
        at = first
        while at < last:
            start, length = left[-1]
            stop = min(last, before + length)
            if at < stop:
                yield start + at - before, start + stop - before
                at = stop
            else:
                before += left.pop()[1]


def _joined(pieces: Iterator[tuple[int, int]]) -> RowIntervals:
    found: list[tuple[int, int]] = []
    for first, last in pieces:
        if found and found[-1][0] + found[-1][1] == first:
            found[-1] = (found[-1][0], last - found[-1][0])
        elif first < last:
            found.append((first, last - first))
    return tuple(found)


def rows_at(size: int, cut: DimCuts, sizes: Sequence[int], place: Sequence[int]) -> RowIntervals:
    """The rows of the rank at coordinate `place` of a mesh of these sizes."""
    runs: RowIntervals = ((0, size),) if size else ()
    for axis, factor in cut:
        runs = chunk_rows(runs, factor, sizes[axis], place[axis])
    return runs


@functools.lru_cache(maxsize=1024)
def rows_by_rank(size: int, cut: DimCuts, sizes: tuple[int, ...]) -> tuple[RowIntervals, ...]:
    """The rows of every rank, by rank number.

    >>> rows_by_rank(5, ((1, 1), (0, 1)), (2, 2))
    (((0, 2),), ((3, 1),), ((2, 1),), ((4, 1),))
    """
    held: list[RowIntervals] = [((0, size),) if size else ()] * math.prod(sizes)
    for axis, factor in cut:
        ranks, inner = sizes[axis], math.prod(sizes[axis + 1 :])
        known: dict[tuple[RowIntervals, int], RowIntervals] = {}
        for rank, runs in enumerate(held):
            key = runs, rank // inner % ranks
            if key not in known:
                known[key] = chunk_rows(runs, factor, ranks, key[1])
            held[rank] = known[key]
    return tuple(held)


def first_differing(size: int, one: DimCuts, other: DimCuts, sizes: tuple[int, ...]) -> int | None:
    """The first rank whose rows differ between two cuts; None if there is none.

    >>> first_differing(5, ((0, 1), (1, 1)), ((1, 1), (0, 1)), (2, 2))
    1
    """
    both = zip(rows_by_rank(size, one, sizes), rows_by_rank(size, other, sizes), strict=True)
    return next((rank for rank, (mine, theirs) in enumerate(both) if mine != theirs), None)


@functools.lru_cache(maxsize=4096)
def same_rows(size: int, one: DimCuts, other: DimCuts, sizes: tuple[int, ...]) -> bool:
    """Whether all ranks hold the same rows by both cuts.

    >>> [same_rows(size, ((0, 2), (1, 1)), ((1, 1), (0, 1)), (3, 2)) for size in (10**9, 10**9 + 3)]
    [True, False]
    """
    if one == other:
        return True
    for place in probe_coordinates(sizes):
        if rows_at(size, one, sizes, place) != rows_at(size, other, sizes, place):
            return False
    return first_differing(size, one, other, sizes) is None


def probe_coordinates(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The coordinates that are 1 on one axis and 0 on all others, where most different layouts differ."""
    for axis, size in enumerate(sizes):
        if size > 1:
            yield tuple(int(axis == other) for other in range(len(sizes)))


def surely_nonempty(size: int, cut: DimCuts, sizes: Sequence[int]) -> bool:
    """Whether these cuts certainly leave rows to every rank; false does not mean that some rank has none.

    One cut of n rows leaves the last rank at least n / (factor * ranks) - ranks of them.
    """
    ranks, blocks = math.prod(sizes[axis] for axis, _ in cut), math.prod(factor for _, factor in cut)
    return size > blocks * ranks * ranks


def format_rows(runs: RowIntervals) -> str:
    """Rows as text, at most the first three runs.

    >>> format_rows(((0, 2), (4, 1))), format_rows(()), format_rows(tuple((2 * i, 1) for i in range(9)))
    ('rows 0 to 1, 4', 'no rows', 'rows 0, 2, 4 and more')
    """
    shown = [str(start) if length == 1 else f"{start} to {start + length - 1}" for start, length in runs[:3]]
    if not shown:
        return "no rows"
    return "rows " + ", ".join(shown) + (" and more" if len(runs) > 3 else "")
