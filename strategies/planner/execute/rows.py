"""The rows of a tensor that each rank holds, in integers, and copies between pieces.

A dim that several axes shard is a stack of cuts, each of the rows that the cuts before it leave. A step undoes or makes
the last cuts of a dim, those of its own axes. So the ranks of one group together hold a *block*: what each of them
would hold if the axes of the step did not shard; it is the same for all of them. Each rank holds a *piece* of the
block, which is all of it along every dim but one, before the step and after it. Within a block no other axes matter.

Rows are written as runs: (start, length), ascending, neither adjacent nor empty. A plain shard is one run.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from localtensor.errors import Refusal
from localtensor.layout import Mesh, RowIntervals, Spec, chunk_rows, shard_cut

Cuts = tuple[tuple[int, int, int], ...]
"""The cuts of one dim in order: split factor, number of ranks of the axis, and the coordinate of this rank."""


class NotInnermost(Refusal):
    """A step of a plan undoes or makes a cut within which another axis cuts."""

    def __init__(self, spec: Spec, axes: tuple[int, ...], dim: int) -> None:
        names = ", ".join(spec.mesh.names[axis] for axis in axes)
        inner = spec.mesh.names[next(axis for axis in reversed(spec.cut_by(dim)) if axis not in axes)]
        problem = f"{inner} cuts what {names} has left of dim {dim}, so their pieces are no pieces of one block"
        remedy = "Make plans with strategies.planner.search.api.plan."
        super().__init__("redistribute", "plan", str(spec), problem, remedy)


@dataclass(frozen=True, slots=True)
class BlockPiece:
    """One rank's share of a block: these rows of this dim, and all rows of the other dims."""

    dim: int
    runs: RowIntervals

    @property
    def rows(self) -> int:
        return sum(length for _, length in self.runs)


def all_rows(size: int) -> RowIntervals:
    """All rows of a dim.

    >>> all_rows(3), all_rows(0)
    (((0, 3),), ())
    """
    return ((0, size),) if size else ()


def row_count(runs: RowIntervals) -> int:
    return sum(length for _, length in runs)


@functools.lru_cache(maxsize=65536)
def rows_after_cuts(size: int, cut: Cuts) -> RowIntervals:
    """The rows that these cuts, applied in order, leave of a dim of this size.

    >>> rows_after_cuts(10, ((1, 2, 1),)), rows_after_cuts(10, ((2, 2, 1),)), rows_after_cuts(5, ((1, 2, 0), (1, 2, 1)))
    (((5, 5),), ((3, 2), (8, 2)), ((2, 1),))
    """
    if not cut:
        return all_rows(size)
    *before, (factor, ranks, place) = cut
    return chunk_rows(rows_after_cuts(size, tuple(before)), factor, ranks, place)


def block_shape(spec: Spec, axes: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """The shape of the block that the group of a rank holds together along these axes.

    >>> from localtensor.layout import parse
    >>> spec = Spec(Mesh.of(2, 2), (parse("S(0)"), parse("S(0)")), (5, 3), torch.float32)
    >>> block_shape(spec, (1,), 0), block_shape(spec, (0, 1), 0), block_shape(spec, (), 0)
    ((3, 3), (5, 3), (2, 3))
    """
    shape = []
    for dim, size in enumerate(spec.shape):
        others = tuple(axis for axis in spec.cut_by(dim) if axis not in axes)
        shape.append(row_count(rows_after_cuts(size, _cuts_of_rank(spec, dim, rank, others))))
    return tuple(shape)


def piece_of_rank(spec: Spec, axes: tuple[int, ...], rank: int) -> BlockPiece | None:
    """A rank's piece of the block of its group along these axes; None if it is the whole block.

    Raises `NotInnermost` where another axis, of more than one rank, cuts within one of these.

    >>> from localtensor.layout import parse
    >>> spec = Spec(Mesh.of(2, 2), (parse("S(0)"), parse("S(0)")), (6, 3), torch.float32, ((0, (1, 0)),))
    >>> piece_of_rank(spec, (0,), 3), piece_of_rank(spec, (0, 1), 3)
    (BlockPiece(dim=0, runs=((2, 1),)), BlockPiece(dim=0, runs=((5, 1),)))
    """
    found = [cut[0] for cut in (shard_cut(spec.placements[axis]) for axis in axes) if cut is not None]
    if not found:
        return None
    dim, sizes = found[0], spec.mesh.sizes
    stack = tuple(axis for axis in spec.cut_by(dim) if sizes[axis] > 1)
    last = stack[len(stack) - sum(sizes[axis] > 1 for axis in axes) :]
    if not set(last) <= set(axes):
        raise NotInnermost(spec, axes, dim)
    return BlockPiece(dim, rows_after_cuts(block_shape(spec, axes, rank)[dim], _cuts_of_rank(spec, dim, rank, last)))


def _cuts_of_rank(spec: Spec, dim: int, rank: int, axes: tuple[int, ...]) -> Cuts:
    """The cuts of a dim by these axes, in this order, for one rank."""
    at = spec.mesh.coordinate(rank)
    found = []
    for axis in axes:
        cut = shard_cut(spec.placements[axis])
        if cut is not None:
            found.append((cut[1], spec.mesh.sizes[axis], at[axis]))
    return tuple(found)


@functools.lru_cache(maxsize=65536)
def common_rows(held: RowIntervals, wanted: RowIntervals) -> RowIntervals:
    """The rows of `wanted`, as positions among the rows of `held`, ascending and merged.

    >>> common_rows(((0, 2), (6, 2)), ((1, 6),))
    ((1, 2),)
    """
    found: list[tuple[int, int]] = []
    before = place = 0
    for start, length in held:
        while place < len(wanted) and sum(wanted[place]) <= start:
            place += 1
        ahead = place
        while ahead < len(wanted) and wanted[ahead][0] < start + length:
            begin, end = max(start, wanted[ahead][0]), min(start + length, sum(wanted[ahead]))
            place_in_held = before + begin - start
            if found and sum(found[-1]) == place_in_held:
                found[-1] = (found[-1][0], found[-1][1] + end - begin)
            else:
                found.append((place_in_held, end - begin))
            ahead += 1
        before += length
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def rank_groups(mesh: Mesh, axes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The groups of ranks that differ along these axes only, each in ascending order.

    >>> rank_groups(Mesh.of(2, 2, 2), (0, 2))
    ((0, 1, 4, 5), (2, 3, 6, 7))
    """
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.ranks):
        at = mesh.coordinate(rank)
        found.setdefault(tuple(x for axis, x in enumerate(at) if axis not in axes), []).append(rank)
    return tuple(map(tuple, found.values()))


@dataclass(frozen=True, slots=True)
class Transfer:
    """The data that one rank sends to another: a tensor of this shape, which is these rows of a larger one."""

    shape: tuple[int, ...]
    dim: int
    runs: RowIntervals

    @property
    def rows(self) -> int:
        return row_count(self.runs)


def transfers(shape: tuple[int, ...], held: BlockPiece | None, pieces: Sequence[BlockPiece]) -> tuple[Transfer, ...]:
    """For each of these pieces, the part of one rank's piece `held` of a block of this shape that lies in it.

    These are the parts to send, if `pieces` are the pieces after a step, and the parts received, if they are those
    before.

    >>> mine, theirs = BlockPiece(0, ((2, 2),)), BlockPiece(1, ((0, 3),))
    >>> transfers((4, 5), mine, [theirs])
    (Transfer(shape=(2, 3), dim=1, runs=((0, 3),)),)
    >>> transfers((4, 5), mine, [BlockPiece(0, ((1, 2),))])
    (Transfer(shape=(1, 5), dim=0, runs=((0, 1),)),)
    """
    local = shape if held is None else resized(shape, held.dim, held.rows)
    found = []
    for other in pieces:
        runs = common_rows(held.runs, other.runs) if held is not None and held.dim == other.dim else other.runs
        found.append(Transfer(resized(local, other.dim, row_count(runs)), other.dim, runs))
    return tuple(found)


def resized(shape: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    """The shape with another size of one dim.

    >>> resized((4, 5), 1, 2)
    (4, 2)
    """
    return (*shape[:dim], size, *shape[dim + 1 :])


def are_in_memory_order(shape: tuple[int, ...], found: Sequence[Transfer]) -> bool:
    """Whether these parts, one behind the other, are the memory of a contiguous tensor of this shape.

    >>> are_in_memory_order((4, 5), transfers((4, 5), None, [BlockPiece(0, ((0, 3),)), BlockPiece(0, ((3, 1),))]))
    True
    >>> are_in_memory_order((4, 5), transfers((4, 5), None, [BlockPiece(1, ((0, 3),)), BlockPiece(1, ((3, 2),))]))
    False
    """
    if len({part.dim for part in found}) != 1:
        return False
    dim, end = found[0].dim, 0
    for run in (run for part in found for run in part.runs):
        if run[0] != end:
            return False
        end += run[1]
    return end == shape[dim] and math.prod(shape[:dim]) == 1


# The rows of a step as tensors: cut out, put together, made even, set among values that change nothing.
#
# What goes over a wire is flat: parts one behind the other, each in a slot of its own, so that pieces need neither be even
# nor lie along dim 0.  Where they lie so already, nothing is copied.

SpacedRuns = tuple[int, int, int, int]
"""Runs of equal length at equal distances: (start, length, distance, count)."""


@functools.lru_cache(maxsize=65536)
def spaced_runs(runs: RowIntervals) -> tuple[SpacedRuns, ...]:
    """The same rows in a shorter form: a strided shard is one or two combs, however many blocks it has.

    >>> spaced_runs(((0, 2), (4, 2), (8, 2), (12, 1)))
    ((0, 2, 4, 3), (12, 1, 1, 1))
    """
    found: list[SpacedRuns] = []
    for start, length in runs:
        if found:
            first, same, distance, count = found[-1]
            apart = start - first if count == 1 else distance
            if same == length and start == first + apart * count:
                found[-1] = (first, same, apart, count + 1)
                continue
        found.append((start, length, length, 1))
    return tuple(found)


def _row_views(whole: Tensor, cut: Tensor, dim: int, runs: RowIntervals) -> Iterator[tuple[Tensor, Tensor]]:
    """The same rows as views of the whole and of the cut-out tensor, one pair for each comb."""
    place = 0
    for start, length, distance, count in spaced_runs(runs):
        span = whole.narrow(dim, start, distance * (count - 1) + length)
        rows = cut.narrow(dim, place, count * length)
        yield span.unfold(dim, length, distance), rows.unfold(dim, length, length)
        place += count * length


def copy_rows_from(x: Tensor, dim: int, runs: RowIntervals, into: Tensor) -> None:
    """Copies these rows of x to `into`."""
    for rows, place in _row_views(x, into, dim, runs):
        place.copy_(rows)


def copy_rows_to(x: Tensor, dim: int, runs: RowIntervals, into: Tensor) -> None:
    """Copies x to these rows of `into`."""
    for place, rows in _row_views(into, x, dim, runs):
        place.copy_(rows)


def take_rows(x: Tensor, dim: int, runs: RowIntervals) -> Tensor:
    """A contiguous copy of these rows of x.

    >>> take_rows(torch.arange(6), 0, ((0, 1), (3, 1), (5, 1)))
    tensor([0, 3, 5])
    """
    if len(runs) == 1:
        return x.narrow(dim, *runs[0]).clone(memory_format=torch.contiguous_format)
    found = x.new_empty(resized(tuple(x.shape), dim, row_count(runs)))
    copy_rows_from(x, dim, runs, found)
    return found


def flattened(x: Tensor) -> Tensor:
    """x as one dense dim: x itself if it is contiguous. The stride is 1, even for a single element.

    >>> flattened(torch.zeros(1, 2)[:, 1]).stride()
    (1,)
    """
    return x.contiguous().as_strided((x.numel(),), (1,))


def pack(x: Tensor, found: Sequence[Transfer], rows: int | None = None) -> Tensor:
    """These parts of x one behind the other, flat; with `rows`, each in a slot of so many rows, padded with zeros.

    Returns x itself if it is contiguous and has just this memory.

    >>> pack(torch.arange(4).view(2, 2), [Transfer((2, 1), 1, ((1, 1),)), Transfer((2, 1), 1, ((0, 1),))])
    tensor([1, 3, 0, 2])
    """
    even = all(part.rows == rows for part in found) if rows is not None else True
    if even and x.is_contiguous() and are_in_memory_order(tuple(x.shape), found):
        return flattened(x)
    total = sum(math.prod(_slot_shape(part, rows)) for part in found)
    wire = x.new_empty(total) if even else x.new_zeros(total)
    for part, slot in zip(found, _slots(wire, found, rows), strict=True):
        copy_rows_from(x, part.dim, part.runs, slot)
    return wire


def unpack(wire: Tensor, found: Sequence[Transfer], shape: tuple[int, ...], rows: int | None = None) -> Tensor:
    """The contiguous tensor of this shape with these parts; the inverse of `pack`.

    Returns a view of `wire` if it has just this memory.
    """
    if wire.numel() == math.prod(shape) and are_in_memory_order(shape, found):
        return wire.view(shape)
    out = wire.new_empty(shape)
    for part, slot in zip(found, _slots(wire, found, rows), strict=True):
        copy_rows_to(slot, part.dim, part.runs, out)
    return out


def element_counts(found: Sequence[Transfer]) -> list[int]:
    """The number of elements of each part."""
    return [math.prod(part.shape) for part in found]


def _slot_shape(part: Transfer, rows: int | None) -> tuple[int, ...]:
    return part.shape if rows is None else resized(part.shape, part.dim, rows)


def _slots(wire: Tensor, found: Sequence[Transfer], rows: int | None) -> Iterator[Tensor]:
    """For each part a view of its rows in its slot."""
    start = 0
    for part in found:
        shape = _slot_shape(part, rows)
        size = math.prod(shape)
        yield wire[start : start + size].view(shape).narrow(part.dim, 0, part.rows)
        start += size


def pad_rows(x: Tensor, dim: int, rows: int) -> Tensor:
    """x flat and contiguous, padded with zeros to so many rows. No copy if it is that already."""
    if x.shape[dim] == rows:
        return flattened(x)
    found = x.new_zeros(resized(tuple(x.shape), dim, rows))
    found.narrow(dim, 0, x.shape[dim]).copy_(x)
    return found.view(-1)


def neutral_element(kind: str, dtype: torch.dtype) -> float | int | bool | complex:
    """The neutral element of a reduction; for sums of floats -0.0 rather than 0.0, since -0.0 + 0.0 is 0.0.

    >>> neutral_element("sum", torch.float32), neutral_element("max", torch.int8), neutral_element("min", torch.bool), neutral_element("product", torch.int64)
    (-0.0, -128, True, 1)
    """
    if dtype == torch.bool:
        return kind in ("min", "product")
    if kind == "product":
        return 1
    if kind == "sum":
        return complex(-0.0, -0.0) if dtype.is_complex else -0.0 if dtype.is_floating_point else 0
    if dtype.is_floating_point:
        return math.inf if kind == "min" else -math.inf
    ends = torch.iinfo(dtype)
    return ends.max if kind == "min" else ends.min
