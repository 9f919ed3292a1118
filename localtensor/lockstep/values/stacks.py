"""Stacked storage: the cells behind a partition, indexing by rank, and lists that become tensors.

Tensors of one shape are rows of one stack, each a dense block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

from localtensor.errors import NotInLockstep
from localtensor.lockstep.values.partition import NOWHERE, Partition, merge_cells, partition

Cells = tuple[Tensor, ...]


def dense_strides(shape: Sequence[int], stride: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """The strides of a dense copy that keeps the order of the dims in memory, and its number of elements.

    A layout that is dense already keeps its strides.

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
    """Whether the rows of this stack are consecutive blocks that fill its storage."""
    size = cell.untyped_storage().nbytes()
    step = cell.stride(0)
    return step * cell.element_size() * cell.shape[0] == size


def copy_as_blocks(cell: Tensor) -> Tensor:
    """A copy of a stack with rows as consecutive blocks, each dense, with its dims in their order in memory."""
    strides, step = dense_strides(cell.shape[1:], cell.stride()[1:])
    fresh = torch.empty_strided(cell.shape, (step, *strides), dtype=cell.dtype, device=cell.device)
    return fresh.copy_(cell)


def as_blocks(cell: Tensor, rows: int) -> Tensor:
    """The cell if its rows are consecutive blocks, else a copy for which that holds."""
    if rows == 1 or cell.layout is not torch.strided or cell.numel() == 0 or is_in_blocks(cell):
        return cell
    return copy_as_blocks(cell)


def stack(rows: Sequence[Tensor]) -> Tensor:
    """A stack of rows of one shape; dims keep their order in memory."""
    first = rows[0]
    strides, step = dense_strides(first.shape, first.stride())
    if strides == dense_strides(first.shape, [0] * first.dim())[0]:
        return torch.stack(list(rows))
    fresh = torch.empty_strided((len(rows), *first.shape), (step, *strides), dtype=first.dtype, device=first.device)
    for place, row in zip(fresh, rows, strict=True):
        place.copy_(row)
    return fresh


def row_layout(cell: Tensor, rows: int = 1) -> tuple[Any, ...]:
    """A key of the rows of a cell: cells, or tensors, with equal keys can be stacked."""
    if cell.layout is not torch.strided:
        return (id(cell),)
    return (tuple(cell.shape[1:]), cell.stride()[1:]) if rows > 1 else (tuple(cell.shape), cell.stride())


def deduplicate(values: Sequence[Tensor]) -> list[Tensor]:
    """The values with equal ones as one object: equal to the bit, in shape, strides and dtype.

    Tensors on a GPU count as equal only if they are one object: comparing them takes longer than it saves.

    >>> a, b = deduplicate([torch.ones(2), torch.ones(2)])
    >>> a is b
    True
    """
    first: dict[Any, Tensor] = {}
    seen: dict[Any, Tensor] = {}
    for value in values:
        place = _memory_key(value)
        if place not in seen:  # a tensor that many ranks share is read once
            seen[place] = first.setdefault(_content_key(value), value)
    return [seen[_memory_key(value)] for value in values]


def _memory_key(x: Tensor) -> int | tuple[Any, ...]:
    """A key that is equal for tensors that read the same memory alike."""
    if x.layout is not torch.strided or x.device.type != "cpu":
        return id(x)
    return (x.data_ptr(), tuple(x.shape), x.stride(), x.dtype, x.is_conj(), x.is_neg())


def _content_key(x: Tensor) -> int | tuple[Any, ...]:
    """A key that is equal for equal tensors only, with a digest of 16 bytes for the bits."""
    if x.layout is not torch.strided or x.device.type != "cpu":
        return id(x)
    bits = x.resolve_conj().resolve_neg().contiguous()
    bits = bits.as_strided((bits.numel(),), (1,))  # a single element may have any stride, and bytes have none but 1
    digest = blake2b(bits.view(torch.uint8).numpy().data, digest_size=16).digest() if x.numel() else b""
    return (tuple(x.shape), x.stride(), x.dtype, digest)


def stack_with_gaps(rows: Sequence[Tensor]) -> Tensor:
    """A stack of rows of one shape and the same strides, which it has, too, also where they leave gaps or overlap."""
    first = rows[0]
    strides, _ = dense_strides(first.shape, first.stride())
    if strides == first.stride() or not first.numel():
        return stack(rows)
    extent = 1 + sum((size - 1) * step for size, step in zip(first.shape, first.stride(), strict=True))
    blocks = torch.stack([row.as_strided((extent,), (1,)) for row in rows])
    return blocks.as_strided((len(rows), *first.shape), (extent, *first.stride()))


def cells_of_rows(rows: Sequence[Tensor], whole: Partition, *, keep_gaps: bool = False) -> tuple[Cells, Partition]:
    """The cells and the partition of a value with one tensor for each row of `whole`.

    Rows that are the same object are stored once, and rows of one shape in one stack; `keep_gaps` as in `stack_with_gaps`.
    """
    place: dict[int, int] = {}
    number = np.array([place.setdefault(id(row), len(place)) for row in rows])
    kept = [rows[int(first)] for first in np.unique(number, return_index=True)[1]]
    groups: dict[Any, list[int]] = {}
    for index, row in enumerate(kept):
        groups.setdefault(row_layout(row), []).append(index)
    order = [index for group in groups.values() for index in group]
    row_of = np.empty(len(kept), np.int64)
    row_of[order] = np.arange(len(order))
    by_rank = np.where(whole.row_of >= 0, row_of[number[whole.row_of]], NOWHERE)
    joined = stack_with_gaps if keep_gaps else stack
    cells = tuple(joined([kept[i] for i in group]) if len(group) > 1 else kept[group[0]] for group in groups.values())
    return cells, partition(by_rank, [len(group) for group in groups.values()])


def merge_alike(cells: Cells, held: Partition, *, by_shape: bool = False) -> tuple[Cells, Partition]:
    """The cells with those of one shape and strides merged into one stack; `by_shape` lets strides differ."""
    if len(cells) == 1:
        return cells, held
    kinds = tuple(row_layout(*pair) for pair in zip(cells, held.sizes, strict=True))
    if by_shape:
        kinds = tuple(kind[:1] for kind in kinds)
    if len(set(kinds)) == len(kinds):
        return cells, held
    whole, groups = merge_cells(held, kinds)
    return tuple(_merge_group(group, cells, held) for group in groups), whole


def _merge_group(group: tuple[int, ...], cells: Cells, held: Partition) -> Tensor:
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


def has_sym_ints(index: object) -> bool:
    """Whether an index contains ints that may differ between ranks."""
    if type(index) is tuple or type(index) is list:
        return any(isinstance(one, torch.SymInt) or (type(one) is list and has_sym_ints(one)) for one in index)
    return isinstance(index, torch.SymInt)


def index_by_rank(x: Tensor, index: Any) -> Tensor:
    """`x[index]`, where ints may differ between ranks; a view unless tensors are among the index.

    Raises `NotInLockstep` for a bool in the index.

    >>> index_by_rank(torch.arange(6).view(2, 3), (..., None, 1))
    tensor([[1],
            [4]])
    """
    x, rest = _view_by_rank(x, index)
    return x[rest] if rest else x


def write_by_rank(x: Tensor, index: Any, value: Any) -> None:
    """`x[index] = value`, where ints may differ between ranks.  Raises `NotInLockstep` for a bool in the index."""
    x, rest = _view_by_rank(x, index)
    x[rest or ...] = value


def _view_by_rank(x: Tensor, index: Any) -> tuple[Tensor, tuple[Any, ...]]:
    """The view that the ints and slices of an index take, and the tensors that are left of the index, by their dims."""
    parts = [_as_index(one) for one in (index if isinstance(index, tuple) else (index,))]
    dim, left = 0, sum(_dims_taken(one) for one in parts)
    rest: dict[int, Tensor] = {}
    for one in parts:
        if one is Ellipsis:
            dim = x.dim() - left
        elif one is None:
            x, dim = x.unsqueeze(dim), dim + 1
        elif isinstance(one, slice):
            place = (*[slice(None)] * dim, one)
            x, dim = x[place], dim + 1
        elif isinstance(one, Tensor):
            rest[dim], dim = one, dim + _dims_taken(one)
        else:
            x = x.select(dim, one)
        left -= _dims_taken(one)
    return x, _by_dims(rest)


def _by_dims(tensors: dict[int, Tensor]) -> tuple[Any, ...]:
    """The index that takes these tensors at their dims, and all of the dims before and between them."""
    index: list[Any] = []
    dim = 0
    for at, tensor in tensors.items():
        index += [slice(None)] * (at - dim)
        index.append(tensor)
        dim = at + _dims_taken(tensor)
    return tuple(index)


def _as_index(one: Any) -> Any:
    """A part of an index: an int, slice, None, Ellipsis or tensor."""
    if isinstance(one, bool | torch.SymBool):
        raise NotInLockstep("x[...]", f"{one!r} in an index beside ints of each rank: a bool adds a dim")
    return torch.tensor(one) if isinstance(one, list | tuple | np.ndarray) else one


def _dims_taken(one: object) -> int:
    """How many dims of the tensor a part of an index stands for."""
    if one is None or one is Ellipsis:
        return 0
    return one.dim() if isinstance(one, Tensor) and one.dtype in (torch.bool, torch.uint8) else 1


def stack_nested(
    data: object, of_ranks: Callable[[Any], Tensor | None], plain: Callable[[Any], Tensor]
) -> Tensor | None:
    """The tensor of nested lists of which `of_ranks` makes some items tensors; None if it makes none.

    >>> stack_nested([torch.tensor(1), 2.5], lambda x: x if isinstance(x, Tensor) else None, torch.tensor)
    tensor([1.0000, 2.5000])
    """
    own = of_ranks(data)
    if own is not None or not isinstance(data, list | tuple):
        return own
    found = [stack_nested(one, of_ranks, plain) for one in data]
    if all(one is None for one in found):
        return None
    return torch.stack([plain(given) if one is None else one for given, one in zip(data, found, strict=True)])


def is_dense(sizes_strides: tuple[int, ...]) -> bool:
    """Whether a tensor of these sizes, and strides behind them, has its elements without gaps and overlaps."""
    half, aten = len(sizes_strides) // 2, torch.ops.aten
    with torch._C._DisableTorchDispatch():
        x = aten.empty_strided.default(sizes_strides[:half], sizes_strides[half:], device="meta")
        return bool(aten.is_non_overlapping_and_dense.default(x))
