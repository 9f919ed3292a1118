"""Memory that views share: a write of finer values splits it for all its views at once.

A cell with k rows is k consecutive blocks of equal size in one storage, so that every view of a row has the same offset
in its block.  Splitting copies blocks and puts each view at its old offset in the new block.
"""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from localtensor.lockstep.values.partition import Partition, RowSelection, refinement, selections, with_remaining_ranks
from localtensor.lockstep.values.stacks import as_blocks, merge_alike


class MemoryMember(Protocol):
    """A LocalTensor, as a view of a memory."""

    _cells: tuple[Tensor, ...]
    _partition: Partition
    _memory: Memory | None


class Memory:
    """The blocks behind a tensor and its views.

    `outside` marks the memory of a tensor that was made outside of the mode, and is the same on all ranks.
    """

    __slots__ = ("__weakref__", "_members", "_most", "outside")

    def __init__(self, first: MemoryMember | None = None, *, outside: bool = False) -> None:
        self._members = [] if first is None else [weakref.ref(first)]
        self._most = 64
        self.outside = outside

    def __reduce__(self) -> tuple[type[Memory], tuple[()]]:
        return Memory, ()  # what shares a memory shares one where it is read, too; its tensors join it there

    def holds(self, cells: Sequence[Tensor]) -> bool:
        """Whether these cells lie in it, or it has none yet: pickle, other than torch.save, writes a storage for each tensor."""
        for member in self.members()[:1]:
            pairs = zip(cells, member._cells, strict=True)
            return all(x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr() for x, y in pairs)
        return True

    def join(self, member: MemoryMember) -> None:
        """Move a tensor to this memory from its former one."""
        if member._memory is not None:
            member._memory.leave(member)
        self._members.append(weakref.ref(member))
        member._memory = self
        if len(self._members) >= self._most:  # a base of many short-lived views
            self._members = [one for one in self._members if one() is not None]
            self._most = max(64, 2 * len(self._members))

    def leave(self, member: MemoryMember) -> None:
        """Remove a tensor from this memory."""
        self._members = [one for one in self._members if one() is not member]

    def members(self) -> list[MemoryMember]:
        """The tensors that are still alive."""
        return [member for one in self._members if (member := one()) is not None]

    def split(self, finer: Partition) -> None:
        """Refine all members to this partition."""
        members = self.members()
        wanted = selections(finer, members[0]._partition)
        once = _cells_used_once(wanted, finer)
        unit = max(member._cells[0].element_size() for member in members)
        blocks = [
            _block(take, members[0]._cells[take.cell], rows, unit, keep=take.cell in once)
            for take, rows in zip(wanted, finer.sizes, strict=True)
        ]
        for member in members:
            member._cells = tuple(
                _view_in_storage(member._cells[take.cell], block, finer.sizes[cell], member._partition.sizes[take.cell])
                for cell, (take, block) in enumerate(zip(wanted, blocks, strict=True))
            )
            member._partition = finer


class SeparateRows(Exception):
    """The op has to run with a cell for each row: no stack can hold them, or its result is no view of a stack."""


def memory_of(x: MemoryMember) -> Memory:
    """The memory of a tensor, made if it has none."""
    if x._memory is None:
        x._cells = _cells_as_blocks(x)
        x._memory = Memory(x)
    return x._memory


def shared_cells(x: MemoryMember, memo: dict[int, Any] | None) -> tuple[tuple[Tensor, ...], Memory | None]:
    """The cells of a copy, and its memory, which it shares with the copies of what x shares memory with.

    They are the cells themselves, for a pickler, or copies by the memo of `copy.deepcopy`.  The copy of a tensor from outside has no memory.
    """
    outside = x._memory is not None and x._memory.outside
    if outside or x._cells[0].layout is not torch.strided:
        return tuple(cell.detach().clone() for cell in x._cells), None
    memory = memory_of(x)
    if memo is None:
        return tuple(cell.detach() for cell in x._cells), memory
    cells = []
    for cell, rows in zip(x._cells, x._partition.sizes, strict=True):
        cells.append(_view_in_storage(cell, copy.deepcopy(cell.untyped_storage(), memo), rows, rows))
    return tuple(cells), memo.setdefault(id(memory), Memory())


def refine(x: MemoryMember, finer: Partition) -> None:
    """Refine a tensor, and all that share memory with it, to this partition.

    Ranks that hold nothing in the finer partition keep their values, in cells behind the others.
    """
    if x._partition is finer:
        return
    if not finer.complete:
        finer = with_remaining_ranks(finer, x._partition)
    if x._memory is not None:
        x._memory.split(finer)
    elif x._cells[0].layout is torch.strided:
        x._cells = _cells_as_blocks(x)
        Memory(x).split(finer)
    elif finer.rows > len(finer.sizes):
        raise SeparateRows
    else:
        wanted = selections(finer, x._partition)
        x._cells, x._partition = tuple(x._cells[take.cell].clone() for take in wanted), finer


def _cells_as_blocks(x: MemoryMember) -> tuple[Tensor, ...]:
    return tuple(as_blocks(cell, size) for cell, size in zip(x._cells, x._partition.sizes, strict=True))


def _cells_used_once(wanted: tuple[RowSelection, ...], finer: Partition) -> set[int]:
    """The old cells that a single new cell takes unchanged, so that nothing is copied."""
    users = Counter(take.cell for take in wanted)
    return {
        take.cell
        for take, rows in zip(wanted, finer.sizes, strict=True)
        if users[take.cell] == 1 and take.rows is None and take.stacked == (rows > 1)
    }


def _block(take: RowSelection, cell: Tensor, rows: int, unit: int, *, keep: bool) -> torch.UntypedStorage:
    """The storage of a new cell's rows; blocks are padded to the item size `unit`, so that all views stay aligned."""
    storage = cell.untyped_storage()
    if keep:
        return storage
    if storage.nbytes() == 0:
        return torch.UntypedStorage(0, device=cell.device)  # a new one: an op may resize it
    flat = torch.empty(0, dtype=torch.uint8, device=cell.device).set_(storage)
    if take.rows is not None or take.stacked:
        blocks = flat.view(cell.shape[0], storage.nbytes() // cell.shape[0])
        flat = blocks if take.rows is None else blocks[take.rows]
    if not take.stacked:
        flat = flat.expand(rows, flat.shape[0])
    if rows > 1 and flat.shape[1] % unit:
        flat = torch.nn.functional.pad(flat, (0, -flat.shape[1] % unit))
    return flat.clone(memory_format=torch.contiguous_format).untyped_storage()


def _view_in_storage(old: Tensor, storage: torch.UntypedStorage, rows: int, rows_before: int) -> Tensor:
    """The view of each row at its old offset in the new blocks."""
    size, stride = tuple(old.shape), old.stride()
    if rows_before > 1:
        size, stride = size[1:], stride[1:]
    if rows > 1:
        block = storage.nbytes() // rows // old.element_size()
        size, stride = (rows, *size), (block, *stride)
    fresh = torch.empty(0, dtype=old.dtype, device=old.device)
    fresh.set_(storage, old.storage_offset(), size, stride)
    if old.is_conj():
        torch._C._set_conj(fresh, True)
    if old.is_neg():
        torch._C._set_neg(fresh, True)
    return fresh


def any_overlap(written: Sequence[object], read: Sequence[MemoryMember]) -> bool:
    """Whether a tensor that is written and another one overlap in memory."""
    for x in written:
        memory = getattr(x, "_memory", None)
        for y in read if memory is not None else ():
            if y is not x and y._memory is memory and _overlap_on_some_rank(x, y):  # type: ignore[arg-type]
                return True
    return False


def _overlap_on_some_rank(x: MemoryMember, y: MemoryMember) -> bool:
    """Whether both overlap in memory on some rank."""
    for mine, theirs, rows in zip(x._cells, y._cells, x._partition.sizes, strict=False):
        (a, b), (c, d) = (_byte_range(cell[0] if rows > 1 else cell) for cell in (mine, theirs))
        if a < d and c < b:
            return True
    return False


def _byte_range(row: Tensor) -> tuple[int, int]:
    """The first byte of a row in its block, and the byte behind its last."""
    start = int(row.storage_offset()) * row.element_size()
    far = sum((size - 1) * step for size, step in zip(row.shape, row.stride(), strict=True))
    return start, start + (int(far) + 1) * row.element_size() if row.numel() else start


def overwrite(x: MemoryMember, cells: tuple[Tensor, ...], held: Partition) -> None:
    """Write these values, which share no memory with others, to a tensor and its views.

    A tensor that fills its memory takes the cells and their partition, however coarse; else values are copied in place.
    Each rank's value has as many elements as its tensor.
    """
    memory, own = x._memory, x._cells[0]
    outside = memory is not None and memory.outside
    if (
        len(x._cells) == 1 and not outside and own.is_contiguous() and _fills(own)
    ):  # dense, and of one shape on all ranks
        shape = own.shape[1:] if x._partition.sizes[0] > 1 else own.shape
        if (
            memory is None
            and len(cells) == 1
            and cells[0].numel() == shape.numel() * held.rows
            and not own.is_conj() | own.is_neg()
        ):
            fresh = cells[0].contiguous()
            fresh = fresh if _fills(fresh) else fresh.clone()
            x._cells = (fresh.view(held.rows, *shape) if held.rows > 1 else fresh.view(shape),)
            x._partition = held
            return
        shaped: list[Tensor] = []
        for cell, rows in zip(cells, held.sizes, strict=True):
            if cell.numel() != shape.numel() * rows:
                break
            shaped.append(cell.reshape(rows, *shape) if rows > 1 else cell.reshape(shape))
        else:
            _replace_cells(x, shaped, held)
            return
    refine(x, refinement(x._partition, held))
    for cell, rows, take in zip(x._cells, x._partition.sizes, selections(x._partition, held), strict=True):
        shape = cell.shape[1:] if rows > 1 else cell.shape
        value = take.of(cells)
        cell.copy_(value.reshape(rows, *shape) if take.stacked else value.reshape(shape))


def _fills(x: Tensor) -> bool:
    """Whether a dense tensor fills its memory."""
    return x.untyped_storage().nbytes() == x.numel() * x.element_size()


def _replace_cells(x: MemoryMember, cells: list[Tensor], held: Partition) -> None:
    if len(cells) > 1:
        merged, held = merge_alike(tuple(cells), held, by_shape=True)
        cells = list(merged)
    for place, cell in enumerate(cells):
        dense = cell.contiguous()
        cells[place] = dense if _fills(dense) else dense.clone()
    for member in [x] if x._memory is None else x._memory.members():
        old, before = member._cells[0], member._partition.sizes[0]
        fresh = []
        for cell, rows in zip(cells, held.sizes, strict=True):
            fresh.append(_view_in_storage(old, cell.untyped_storage(), rows, before))
        member._cells = tuple(fresh)
        member._partition = held
