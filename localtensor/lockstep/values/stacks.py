"""Cells: the tensors behind a partition.  What has one shape lies in one stack, each row a dense block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

from localtensor.errors import NotInLockstep
from localtensor.lockstep.values.partition import NOWHERE, Partition, merged, partition

Cells = tuple[Tensor, ...]


def dense_strides(shape: Sequence[int], stride: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """The strides of a dense copy that keeps the order of the dims in memory, and its elements.

    What is dense already keeps its strides as they are.

    >>> dense_strides((2, 3), (1, 7)), dense_strides((1, 3), (1, 1))
    (((1, 2), 6), ((1, 1), 3))
    """
    strides, step, is_dense = [0] * len(shape), 1, True
    for dim in sorted(range(len(shape)), key=lambda dim: (stride[dim], -dim)):
        strides[dim] = step
        is_dense = is_dense and (stride[dim] == step or shape[dim] == 1)
        step *= max(shape[dim], 1)
    return tuple(stride if is_dense else strides), step


def is_in_blocks(cell: Tensor) -> bool:
    """Whether the rows of this stack are blocks, one behind the other, and nothing else is in its storage."""
    size = cell.untyped_storage().nbytes()
    step = cell.stride(0)
    return step * cell.element_size() * cell.shape[0] == size


def row_by_row(cell: Tensor) -> Tensor:
    """A copy of a stack whose rows are blocks, one behind the other, each dense in the order that its dims had."""
    strides, step = dense_strides(cell.shape[1:], cell.stride()[1:])
    fresh = torch.empty_strided(cell.shape, (step, *strides), dtype=cell.dtype, device=cell.device)
    return fresh.copy_(cell)


def in_blocks(cell: Tensor, rows: int) -> Tensor:
    """The cell, if each of its rows has a block of its own; else a copy of which that is true."""
    if rows == 1 or cell.layout is not torch.strided or cell.numel() == 0 or is_in_blocks(cell):
        return cell
    return row_by_row(cell)


def stack(rows: Sequence[Tensor]) -> Tensor:
    """One stack of rows of one shape, which keep the order of their dims in memory."""
    first = rows[0]
    strides, step = dense_strides(first.shape, first.stride())
    if strides == dense_strides(first.shape, [0] * first.dim())[0]:
        return torch.stack(list(rows))
    fresh = torch.empty_strided((len(rows), *first.shape), (step, *strides), dtype=first.dtype, device=first.device)
    for place, row in zip(fresh, rows, strict=True):
        place.copy_(row)
    return fresh


def kind_of(x: Tensor) -> Any:
    """What rows of one stack have in common."""
    if x.layout is not torch.strided:
        return (id(x),)
    return (tuple(x.shape), x.stride())


def equal_once(values: Sequence[Tensor]) -> list[Tensor]:
    """The values, equal ones as one object: equal to the bit, in shape, strides and dtype.

    On the CPU; a GPU's are one only if they are the same object, since to look at them takes longer than it saves.

    >>> a, b = equal_once([torch.ones(2), torch.ones(2)])
    >>> a is b
    True
    """
    first: dict[Any, Tensor] = {}
    seen: dict[Any, Tensor] = {}
    for value in values:
        place = _place(value)
        if place not in seen:  # what many ranks share is read once
            seen[place] = first.setdefault(_meaning(value), value)
    return [seen[_place(value)] for value in values]


def _place(x: Tensor) -> Any:
    """What tensors have in common that are the same memory, read alike."""
    if x.layout is not torch.strided or x.device.type != "cpu":
        return id(x)
    return (x.data_ptr(), tuple(x.shape), x.stride(), x.dtype, x.is_conj(), x.is_neg())


def _meaning(x: Tensor) -> Any:
    """What equal tensors have in common, and no others (a digest of 16 bytes stands for the bits)."""
    if x.layout is not torch.strided or x.device.type != "cpu":
        return id(x)
    bits = x.resolve_conj().resolve_neg().contiguous()
    bits = bits.as_strided((bits.numel(),), (1,))  # a single element may have any stride, and bytes have none but 1
    digest = blake2b(bits.view(torch.uint8).numpy().data, digest_size=16).digest() if x.numel() else b""
    return (tuple(x.shape), x.stride(), x.dtype, digest)


def of_rows(rows: Sequence[Tensor], whole: Partition) -> tuple[Cells, Partition]:
    """The cells of a value with one tensor for each row of `whole`, and which rank reads what.

    Rows that are the same object are held once, and those of one shape in one stack.
    """
    place: dict[int, int] = {}
    number = np.array([place.setdefault(id(row), len(place)) for row in rows])
    kept = [rows[int(first)] for first in np.unique(number, return_index=True)[1]]
    groups: dict[Any, list[int]] = {}
    for index, row in enumerate(kept):
        groups.setdefault(kind_of(row), []).append(index)
    order = [index for group in groups.values() for index in group]
    row_of = np.empty(len(kept), np.int64)
    row_of[order] = np.arange(len(order))
    by_rank = np.where(whole.row_of >= 0, row_of[number[whole.row_of]], NOWHERE)
    cells = tuple(stack([kept[i] for i in group]) if len(group) > 1 else kept[group[0]] for group in groups.values())
    return cells, partition(by_rank, [len(group) for group in groups.values()])


def joined(cells: Cells, held: Partition, *, by_shape: bool = False) -> tuple[Cells, Partition]:
    """Fresh cells, those of one shape and with the same strides in one stack; `by_shape` lets strides differ."""
    if len(cells) == 1:
        return cells, held
    kinds = tuple(_row_kind(*pair) for pair in zip(cells, held.sizes, strict=True))
    if by_shape:
        kinds = tuple(kind[:1] for kind in kinds)
    if len(set(kinds)) == len(kinds):
        return cells, held
    whole, groups = merged(held, kinds)
    return tuple(_one(group, cells, held) for group in groups), whole


def _one(group: tuple[int, ...], cells: Cells, held: Partition) -> Tensor:
    if len(group) == 1:
        return cells[group[0]]
    if all(held.sizes[index] == 1 for index in group):
        return stack([cells[index] for index in group])
    stacks = [cells[index] if held.sizes[index] > 1 else cells[index][None] for index in group]
    if all(one.is_contiguous() for one in stacks):
        return torch.cat(stacks)
    first = stacks[0]
    strides, step = dense_strides(first.shape[1:], first.stride()[1:])
    rows = sum(one.shape[0] for one in stacks)
    fresh = torch.empty_strided((rows, *first.shape[1:]), (step, *strides), dtype=first.dtype, device=first.device)
    for place, one in zip(fresh.split([one.shape[0] for one in stacks]), stacks, strict=True):
        place.copy_(one)
    return fresh


def _row_kind(cell: Tensor, rows: int) -> Any:
    """What the rows of cells that can be one have in common."""
    if cell.layout is not torch.strided:
        return (id(cell),)
    return (tuple(cell.shape[1:]), cell.stride()[1:]) if rows > 1 else (tuple(cell.shape), cell.stride())


# What torch takes apart before any op is dispatched: the index in `x[...]`, and lists that become tensors.


def differs(index: Any) -> bool:
    """Whether an index has ints among it that may differ between ranks."""
    kind = type(index)
    return kind is torch.SymInt or (kind is tuple and any(type(one) is torch.SymInt for one in index))


def picked(x: Tensor, index: Any) -> Tensor:
    """`x[index]`, where ints may differ between ranks: a view.  Raises `NotInLockstep` if tensors are among them.

    >>> picked(torch.arange(6).view(2, 3), (..., None, 1))
    tensor([[1],
            [4]])
    """
    parts = index if isinstance(index, tuple) else (index,)
    dim, left = 0, sum(one is not None and one is not Ellipsis for one in parts)
    for one in parts:
        if one is Ellipsis:
            dim = x.dim() - left
        elif one is None:
            x, dim = x.unsqueeze(dim), dim + 1
        elif isinstance(one, slice):
            place = (*[slice(None)] * dim, one)
            x, dim, left = x[place], dim + 1, left - 1
        elif isinstance(one, int | torch.SymInt) and not isinstance(one, bool):
            x, left = x.select(dim, one), left - 1
        else:
            why = f"an int of each rank stands beside a {type(one).__name__}: take one index after the other"
            raise NotInLockstep("x[...]", why)
    return x


def stacked(data: Any, kind: type[Tensor], plain: Callable[[Any], Tensor]) -> Tensor | None:
    """The tensor of nested lists with tensors of that kind among their items; None if there are none.

    >>> stacked([torch.tensor(1), 2.5], Tensor, torch.tensor)
    tensor([1.0000, 2.5000])
    """
    if isinstance(data, kind):
        return data.detach()
    if not isinstance(data, list | tuple):
        return None
    found = [stacked(one, kind, plain) for one in data]
    if all(one is None for one in found):
        return None
    return torch.stack([plain(given) if one is None else one for given, one in zip(data, found, strict=True)])
