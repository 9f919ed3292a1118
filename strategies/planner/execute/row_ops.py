"""The rows of a step as tensors: cut out, put together, made even, set among values that change nothing.

What goes over a wire is flat: parts one behind the other, each in a slot of its own, so that pieces need neither be even
nor lie along dim 0.  Where they lie so already, nothing is copied.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from localtensor.layout.row_intervals import Runs
from strategies.planner.execute.rows import Part, in_order, resized, rows_of

Comb = tuple[int, int, int, int]
"""Runs of one length at one distance: (start, length, distance, how many)."""


@functools.lru_cache(maxsize=65536)
def combs(runs: Runs) -> tuple[Comb, ...]:
    """The same rows in fewer words: a strided shard is one comb, or two, however many blocks it has.

    >>> combs(((0, 2), (4, 2), (8, 2), (12, 1)))
    ((0, 2, 4, 3), (12, 1, 1, 1))
    """
    found: list[Comb] = []
    for start, length in runs:
        if found:
            first, same, distance, count = found[-1]
            apart = start - first if count == 1 else distance
            if same == length and start == first + apart * count:
                found[-1] = (first, same, apart, count + 1)
                continue
        found.append((start, length, length, 1))
    return tuple(found)


def _pairs(whole: Tensor, cut: Tensor, dim: int, runs: Runs) -> Iterator[tuple[Tensor, Tensor]]:
    """The same rows as views of the whole and of what is cut out of it, one pair for each comb."""
    place = 0
    for start, length, distance, count in combs(runs):
        span = whole.narrow(dim, start, distance * (count - 1) + length)
        rows = cut.narrow(dim, place, count * length)
        yield span.unfold(dim, length, distance), rows.unfold(dim, length, length)
        place += count * length


def cut_out(x: Tensor, dim: int, runs: Runs, into: Tensor) -> None:
    """Writes these rows of x there."""
    for rows, place in _pairs(x, into, dim, runs):
        place.copy_(rows)


def put_in(x: Tensor, dim: int, runs: Runs, into: Tensor) -> None:
    """Writes x to these rows there."""
    for place, rows in _pairs(into, x, dim, runs):
        place.copy_(rows)


def take(x: Tensor, dim: int, runs: Runs) -> Tensor:
    """These rows of x: fresh and contiguous.

    >>> take(torch.arange(6), 0, ((0, 1), (3, 1), (5, 1)))
    tensor([0, 3, 5])
    """
    if len(runs) == 1:
        return x.narrow(dim, *runs[0]).clone(memory_format=torch.contiguous_format)
    found = x.new_empty(resized(tuple(x.shape), dim, rows_of(runs)))
    cut_out(x, dim, runs, found)
    return found


def flat(x: Tensor) -> Tensor:
    """x as one dense row: x itself, if it is contiguous.  A single element may have any stride until it is flat.

    >>> flat(torch.zeros(1, 2)[:, 1]).stride()
    (1,)
    """
    return x.contiguous().as_strided((x.numel(),), (1,))


def packed(x: Tensor, found: Sequence[Part], rows: int | None = None) -> Tensor:
    """These parts of x one behind the other, flat; in slots of so many rows, of zeros where a part has fewer.

    x itself, if it is contiguous and its parts lie so.

    >>> packed(torch.arange(4).view(2, 2), [Part((2, 1), 1, ((1, 1),)), Part((2, 1), 1, ((0, 1),))])
    tensor([1, 3, 0, 2])
    """
    even = all(part.rows == rows for part in found) if rows is not None else True
    if even and x.is_contiguous() and in_order(tuple(x.shape), found):
        return flat(x)
    total = sum(math.prod(_slot(part, rows)) for part in found)
    wire = x.new_empty(total) if even else x.new_zeros(total)
    for part, slot in zip(found, _cut(wire, found, rows), strict=True):
        cut_out(x, part.dim, part.runs, slot)
    return wire


def unpacked(wire: Tensor, found: Sequence[Part], shape: tuple[int, ...], rows: int | None = None) -> Tensor:
    """The tensor of this shape whose parts these are, contiguous; the inverse of `packed`.

    `wire` itself, if it is just that.
    """
    if wire.numel() == math.prod(shape) and in_order(shape, found):
        return wire.view(shape)
    out = wire.new_empty(shape)
    for part, slot in zip(found, _cut(wire, found, rows), strict=True):
        put_in(slot, part.dim, part.runs, out)
    return out


def sizes(found: Sequence[Part]) -> list[int]:
    """How many elements each part has."""
    return [math.prod(part.shape) for part in found]


def _slot(part: Part, rows: int | None) -> tuple[int, ...]:
    return part.shape if rows is None else resized(part.shape, part.dim, rows)


def _cut(wire: Tensor, found: Sequence[Part], rows: int | None) -> Iterator[Tensor]:
    """For each part its rows in its slot, shaped."""
    start = 0
    for part in found:
        shape = _slot(part, rows)
        size = math.prod(shape)
        yield wire[start : start + size].view(shape).narrow(part.dim, 0, part.rows)
        start += size


def padded(x: Tensor, dim: int, rows: int) -> Tensor:
    """x with so many rows, flat and contiguous; zeros are added.  x itself if it is that already."""
    if x.shape[dim] == rows:
        return flat(x)
    found = x.new_zeros(resized(tuple(x.shape), dim, rows))
    found.narrow(dim, 0, x.shape[dim]).copy_(x)
    return found.view(-1)


def neutral(kind: str, dtype: torch.dtype) -> float | int | bool | complex:
    """What changes no value under this reduction; of floats, -0.0 and not 0.0, since -0.0 + 0.0 is 0.0.

    >>> neutral("sum", torch.float32), neutral("max", torch.int8), neutral("min", torch.bool), neutral("product", torch.int64)
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
