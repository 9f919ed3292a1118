"""Calls on tensors of other sizes: uneven, square, too short for all ranks, of one row, of none, of no dims.

Sizes that belong together change together: every dim of one size, in all tensors and in the arguments
that name it.  Whether the op takes that is the op's to say; ops that trust their caller are not asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from strategies.inputs.variants.variant import Form
from strategies.model.arguments import DIMS, SORTED, called, is_index, is_places, names, trusts, values, with_tensors
from strategies.model.rule import Sample

LARGEST = 4096
"""Elements that a tensor may grow to."""
EVEN, SHORT, FEW = 12, 11, 3
"""Rows that 2, 3 and 4 ranks share evenly; one row less than that; too few for 4 ranks."""


def shortened(sample: Sample) -> list[Sample]:
    """The same call with one operand shorter than the first along one dim: what gather and scatter take."""
    if trusts(sample.op) or not sample.tensors:
        return []
    first, made = sample.tensors[0], []
    for i, other in enumerate(sample.tensors[1:], 1):
        for dim in range(other.ndim if other.ndim == first.ndim else 0):
            if other.shape[dim] == first.shape[dim] and other.shape[dim] >= 4:
                short = other.narrow(dim, 0, other.shape[dim] // 2 + 1).clone()
                tensors = (*sample.tensors[:i], short, *sample.tensors[i + 1 :])
                made.append(replace(sample, tensors=tensors, origin=f"{sample.origin}, operand {i} shortened"))
    return made


def _distinct(sample: Sample) -> list[int]:
    """The sizes of the tensors, in the order in which they are met."""
    return list(dict.fromkeys(size for x in sample.tensors for size in x.shape if size > 1))


def resized(sample: Sample, new: Callable[[int], int], what: str) -> Iterator[Sample]:
    """The call with its sizes changed: all at once, then each alone; first with the numbers in its other
    arguments that are those sizes changed alike, then with them as they are."""
    if trusts(sample.op):
        return
    sizes = _distinct(sample)
    for chosen in [sizes, *([size] for size in sizes if len(sizes) > 1)]:
        to = {size: new(size) for size in chosen if new(size) != size}
        if not to:
            continue
        tensors = {i: resize(x, [to.get(size, size) for size in x.shape]) for i, x in enumerate(sample.tensors)}
        tensors = _in_range(sample, tensors)
        if any(x.numel() > LARGEST for x in tensors.values()):
            continue
        other = with_tensors(sample, tensors, f"{what} {to}")
        given = values(other)
        also = {name: _renamed(v, to) for name, v in given.items() if name not in DIMS}
        if any(isinstance(v, (list, tuple)) and v != given[name] for name, v in also.items() if not _has_tensor(v)):
            yield called(sample, given | also, f"{what} {to}")
        yield other


def _in_range(sample: Sample, tensors: dict[int, Tensor]) -> dict[int, Tensor]:
    """Indices below the smallest size are places in every dim, and what must be sorted is.  On a GPU an index out
    of range costs the process."""
    sizes = [size for x in tensors.values() if not is_places(x) for size in x.shape]
    least = min(sizes, default=0)
    spots = [i for i, name in enumerate(names(sample)) if is_index(name) and is_places(tensors[i])]
    tensors = _in_order(sample, tensors)
    return tensors | {i: torch.where(tensors[i] >= least, tensors[i] % least, tensors[i]) for i in spots if least}


def _in_order(sample: Sample, tensors: dict[int, Tensor]) -> dict[int, Tensor]:
    """What must be sorted is, among these tensors of the call."""
    wanted = [i for i, name in enumerate(names(sample)) if name in SORTED and i in tensors]
    return tensors | {i: tensors[i].sort(-1).values for i in wanted}


def _has_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, (list, tuple)) and any(map(_has_tensor, value)))


def _renamed(value: Any, to: dict[int, int]) -> Any:
    """Lists of sizes with the new ones; a number alone is rarely a size."""
    if isinstance(value, (list, tuple)) and not _has_tensor(value):
        return type(value)(to.get(v, v) if type(v) is int else v for v in value)
    return value


def resize(x: Tensor, shape: list[int]) -> Tensor:
    """The tensor with so many rows along each dim: the first ones, or all and then some again, floats larger."""
    for dim, size in enumerate(shape):
        if size == x.shape[dim]:
            continue
        rows = torch.arange(size, device=x.device)
        again = rows // x.shape[dim]
        x = x.index_select(dim, rows % x.shape[dim])
        if x.dtype.is_floating_point or x.dtype.is_complex:
            x = x * (1 + 0.17 * again.view(-1, *[1] * (x.ndim - dim - 1))).to(x.dtype)
    return x


def even(sample: Sample) -> Iterator[Sample]:
    yield from resized(sample, lambda _: EVEN, "sizes")


def short(sample: Sample) -> Iterator[Sample]:
    yield from resized(sample, lambda _: SHORT, "sizes")


def uneven(sample: Sample) -> Iterator[Sample]:
    yield from resized(sample, lambda size: size + 1 if size % 2 == 0 else size + 2, "sizes")


def few(sample: Sample) -> Iterator[Sample]:
    yield from resized(sample, lambda _: FEW, "sizes")


def empty(sample: Sample) -> Iterator[Sample]:
    yield from resized(sample, lambda _: 0, "sizes")


def one_row(sample: Sample) -> Iterator[Sample]:
    yield from resized(sample, lambda _: 1, "sizes")


def oblong(sample: Sample) -> Iterator[Sample]:
    """Tensors with two dims of one size, with the first dim, or the last, of another size in all of them."""
    if trusts(sample.op) or not any(len(set(x.shape)) < x.ndim for x in sample.tensors):
        return
    most = max(x.ndim for x in sample.tensors)
    for dim in (-1, 0):
        large = {i: x for i, x in enumerate(sample.tensors) if x.ndim == most and x.shape[dim] > 1}
        longer = {i: resize(x, _with(x.shape, dim, x.shape[dim] + 2)) for i, x in large.items()}
        if longer:
            yield with_tensors(sample, _in_order(sample, longer), f"dim {dim} longer by 2")


def _with(shape: torch.Size, dim: int, size: int) -> list[int]:
    changed = list(shape)
    changed[dim] = size
    return changed


_NO_BROADCAST = ("binary_cross_entropy",)
"""Ops whose operands must have one shape, which torch checks in Python only: the overload resizes its result to
the shape of whatever comes, and calls that deprecated (2.13)."""


def broadcast(sample: Sample) -> Iterator[Sample]:
    """Each operand in turn with one row along a dim, and without its first dim, so that it must be broadcast."""
    if trusts(sample.op) or len(sample.tensors) < 2 or sample.op.split(".")[1].startswith(_NO_BROADCAST):
        return
    for i, x in enumerate(sample.tensors):
        for dim in range(x.ndim):
            if x.shape[dim] > 1:
                yield with_tensors(sample, {i: x.narrow(dim, 0, 1).clone()}, f"one row in dim {dim} of operand {i}")
        if x.ndim > 1 and x.shape[0]:
            yield with_tensors(sample, {i: x[0].clone()}, f"operand {i} without its first dim")


def scalar_tensors(sample: Sample) -> Iterator[Sample]:
    """Tensors without dims: all, then each operand in turn."""
    if trusts(sample.op) or any(not x.numel() for x in sample.tensors):
        return
    points = {i: x.flatten()[0].clone() for i, x in enumerate(sample.tensors) if x.ndim}
    if points:
        yield with_tensors(sample, points, "without dims")
    alone = len(sample.tensors) > 1 and not sample.op.split(".")[1].startswith(_NO_BROADCAST)
    for i, x in points.items() if alone else ():
        yield with_tensors(sample, {i: x}, f"operand {i} without dims")


SIZES = (
    Form("operand shortened", "rules that pair the shards of two operands take them to be equally long", shortened, weight=2, always=4),
    Form("even", "what divides among 2, 3 and 4 ranks is not refused for being uneven", even),
    Form("one row short", "the last rank has one row less: means, offsets and paddings show", short),
    Form("uneven", "sizes that differ by rank break what is computed from the first rank's", uneven),
    Form("square", "rows and columns of one number hide nothing and confuse what is told apart by size", few),
    Form("oblong", "in a square tensor the wrong dim has the right size", oblong),
    Form("no rows", "a reduction of nothing has a value of its own, or none", empty),
    Form("one row", "a dim of size one cannot be split, and may be dropped or broadcast", one_row),
    Form("broadcast", "a dim of size one, or none, is not where the other operand is sharded", broadcast, weight=2),
    Form("without dims", "a tensor without dims has no dim to shard, and promotes types otherwise", scalar_tensors),
)  # fmt: skip
