"""Collectives on stacked values: what every rank holds afterwards, for all groups of a family at once.

Cost grows with the different values and the groups, not with the ranks.  The index plans of
lockstep/comms/stacked_collectives.py are computed once for a partition and a family, and cached.  Calls that stacks do
not cover, and errors, go to collectives/reference.py on each rank's own tensors, so that messages are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from localtensor.collectives import reference
from localtensor.collectives.argument_checks import check_rank_arguments, flat_tensors
from localtensor.collectives.c10d_table import CallArguments
from localtensor.errors import NotHeld, NotTraceable
from localtensor.layout.reductions import ReductionOp
from localtensor.lockstep.comms import stacked_collectives
from localtensor.lockstep.comms.stacked_collectives import GroupFamily, IndexPlan, Readers, split_by_size, take_rows
from localtensor.lockstep.dispatch.dispatcher import plain_dispatch
from localtensor.lockstep.values.formatting import user_place
from localtensor.lockstep.values.local_tensor import LocalTensor, Mode
from localtensor.lockstep.values.partition import NOWHERE, Array, Partition, one_cell_per_row, partition
from localtensor.lockstep.values.rank_int import Int, on_rank
from localtensor.lockstep.values.stacks import Cells, cells_of_rows, merge_alike

Reference = Callable[[list[Any]], Sequence[Any]]  # a function of collectives/reference.py on the tensors of one group
Sizes = Sequence[Int] | None  # rows by member
_MOST_KEPT = 4096


class StackedValue(NamedTuple):
    """One tensor for each rank: stacked storage, and the partition that says which rank reads which row."""

    cells: Cells
    held: Partition

    def on(self, rank: int) -> Tensor:
        """The tensor of a rank, not copied; the rank must hold one."""
        cell, row = self.held.place(rank)
        return self.cells[cell][row] if self.held.sizes[cell] > 1 else self.cells[cell]

    def stack(self, cell: int) -> Tensor:
        """A cell as a stack, also where it has one row."""
        return self.cells[cell] if self.held.sizes[cell] > 1 else self.cells[cell][None]


class _ShapesDiffer(Exception):
    """Shapes differ within a group, or do not divide: the plain function handles or refuses them."""


_checked: dict[tuple[Any, ...], None] = {}
"""The calls that were checked and found right: what a check depends on, which is the metadata of the tensors."""


def check_arguments(kind: str, brought: CallArguments, family: GroupFamily) -> None:
    """Check each shape that ranks bring to a collective by itself; see collectives/argument_checks.py."""
    key = [kind, brought.op, brought.root, brought.lists, family]
    reads = brought.reads
    for x in [reads, *brought.writes] if isinstance(reads, Tensor) else [*reads, *brought.writes]:
        if not isinstance(x, Tensor) or x.layout is not torch.strided:
            key.clear()  # lists of lists, and sparse tensors
            break
        if type(x) is LocalTensor:
            key.append(x._partition.sizes)
            for cell in x._cells:
                key += (cell.dtype, cell.shape, cell.stride())
        else:
            key += (x.dtype, x.shape, x.stride())
    known = tuple(key) if key and (brought.op is None or type(brought.op) is str) else None
    if known is None or known not in _checked:
        _check_cells(kind, brought, family)
        if known is not None:
            if len(_checked) == _MOST_KEPT:
                _checked.pop(next(iter(_checked)), None)
            _checked[known] = None


def _check_cells(kind: str, brought: CallArguments, family: GroupFamily) -> None:
    tensors = (*flat_tensors(brought.reads), *brought.writes)
    cells = max([len(x._cells) for x in tensors if isinstance(x, LocalTensor)], default=1)
    with plain_dispatch():
        for cell in range(cells):  # plain tensors, as one rank of each cell has them
            writes = [_arguments_of_cell(x, cell) for x in brought.writes]
            each = replace(brought, reads=_arguments_of_cell(brought.reads, cell), writes=writes)
            for part in split_by_size(family):
                group, root = part.groups[0], brought.root or 0
                check_rank_arguments(kind, each, group[root] if 0 <= root < len(group) else -1, group)


def _arguments_of_cell(x: Any, cell: int) -> Any:
    if isinstance(x, LocalTensor):
        cell = min(cell, len(x._cells) - 1)
        return x._cells[cell][0] if x._partition.sizes[cell] > 1 else x._cells[cell]
    return x if isinstance(x, Tensor) else [_arguments_of_cell(each, cell) for each in x]


def check_all_hold(call: str, held: Partition, family: GroupFamily) -> None:
    """Raises `NotHeld` unless every member of a group holds a tensor."""
    if not held.complete and (held.row_of[family.members] < 0).any():
        missing = np.flatnonzero(family.members & (held.row_of < 0))
        raise NotHeld(call, missing.tolist(), np.flatnonzero(held.row_of >= 0).tolist())


def _run_on_stacks(
    call: str, value: StackedValue, family: GroupFamily, plan_of: stacked_collectives.PlanFunction, readers: Readers,
    do: Callable[[Tensor, IndexPlan], Tensor], plain: Reference, *, keep: bool = False, root: int = 0,
) -> StackedValue:  # fmt: skip
    """The collective cell by cell, or group by group where shapes differ.  With `keep`, ranks outside of all groups
    keep their tensors."""
    if not value.held.complete:
        check_all_hold(call, value.held, family)
    if len(value.cells) > 1:
        value = StackedValue(*merge_alike(*value, by_shape=True))  # strides are not sent
    how = stacked_collectives.collective_plan(plan_of, readers, root, value.held, family, keep)
    if how is None:
        return group_by_group(value, family, plain, keep=keep)
    stacks = []
    try:
        for cell, plan in how.steps:
            stacks.append(do(value.stack(cell), plan))
    except _ShapesDiffer:
        return group_by_group(value, family, plain, keep=keep)
    for cell, rows in how.kept:
        stacks.append(take_rows(value.stack(cell), rows))
    return _value_of_stacks(stacks, how.held, value.cells)


def _value_of_stacks(stacks: Sequence[Tensor], held: Partition, brought: Sequence[Tensor]) -> StackedValue:
    """The value of these stacks, which shares no memory with the inputs `brought`."""
    if len(stacks) == len(brought) == 1:
        cell = stacks[0] if stacks[0].shape[0] > 1 else stacks[0][0]
        taken = cell.untyped_storage().data_ptr() == brought[0].untyped_storage().data_ptr()
        return StackedValue((cell.clone() if taken else cell,), held)
    cells, held = merge_alike(tuple(x if x.shape[0] > 1 else x[0] for x in stacks), held)
    taken_up = {cell.untyped_storage().data_ptr() for cell in brought}
    return StackedValue(tuple(x.clone() if x.untyped_storage().data_ptr() in taken_up else x for x in cells), held)


def group_by_group(value: StackedValue, family: GroupFamily, plain: Reference, *, keep: bool) -> StackedValue:
    """The plain function on the tensors of one group after the other."""
    found: dict[int, Tensor] = {}
    for group in family.groups:
        found.update(zip(group, plain([value.on(rank) for rank in group]), strict=True))
    done = value_of_ranks(found, family.world)
    rest = ~family.members & (value.held.row_of >= 0)
    return select([done, value], np.where(rest, 1, 0)) if keep and rest.any() else done


def value_of_ranks(values: dict[int, Tensor], world: int) -> StackedValue:
    """The value of one tensor for each of these ranks."""
    row_of = np.full(world, NOWHERE)
    row_of[list(values)] = np.arange(len(values))
    return StackedValue(*cells_of_rows(list(values.values()), one_cell_per_row(partition(row_of, [len(values)]))))


def select(values: Sequence[StackedValue], number: Array, source: Array | None = None) -> StackedValue:
    """A selection among values: rank r gets the tensor that rank `source[r]` (r itself if None) has in
    `values[number[r]]`, or nothing if `number[r]` is negative."""
    row_of, stacks, sizes, start = np.full(len(number), NOWHERE), [], [], 0
    order = np.argsort(number, kind="stable")
    bounds = np.searchsorted(number[order], np.arange(len(values) + 1))
    for index, value in enumerate(values):
        ranks = order[bounds[index] : bounds[index + 1]]
        rows = value.held.row_of[ranks if source is None else source[ranks]]
        ranks, rows = ranks[rows >= 0], rows[rows >= 0]
        used, inverse = np.unique(rows, return_inverse=True)
        row_of[ranks] = start + inverse
        sizes += np.unique(value.held.cell_of[used], return_counts=True)[1].tolist()
        stacks += [take_rows(value.stack(c), here) for c, here in stacked_collectives.rows_by_cell(value.held, used)]
        start += len(used)
    return _value_of_stacks(stacks, partition(row_of, sizes), [cell for value in values for cell in value.cells])


# -- the collectives


def all_reduce(value: StackedValue, family: GroupFamily, op: ReductionOp) -> StackedValue:
    """The reduction of each group's tensors, on every member."""
    do, plain = partial(stacked_collectives.reduce_rows, op=op), partial(reference.all_reduce, op=op)
    return _run_on_stacks("all_reduce", value, family, stacked_collectives.fold_plan, Readers.ALL, do, plain, keep=True)


def reduce(value: StackedValue, family: GroupFamily, op: ReductionOp, root: int) -> StackedValue:
    """The reduction of each group's tensors, on its root alone; other ranks keep their tensors."""
    do = partial(stacked_collectives.reduce_rows, op=op, rooted=True)
    plain = partial(reference.reduce, op=op, root=root)
    return _run_on_stacks(
        "reduce", value, family, stacked_collectives.fold_plan, Readers.ROOT, do, plain, keep=True, root=root
    )


def broadcast(value: StackedValue, family: GroupFamily, root: int) -> StackedValue:
    """The tensor of each group's root, on every member."""
    check_all_hold("broadcast", value.held, family)
    value = StackedValue(*merge_alike(*value, by_shape=True))  # strides are not sent
    how = _broadcast_plan(value.held, family, root)
    if how is None:
        return group_by_group(value, family, lambda held: reference.broadcast(held, root), keep=True)
    return _value_of_stacks([take_rows(value.stack(cell), rows) for cell, rows in how.kept], how.held, value.cells)


@lru_cache(_MOST_KEPT)
def _broadcast_plan(held: Partition, family: GroupFamily, root: int) -> stacked_collectives.CollectivePlan | None:
    """Members read their root's row, other ranks their own; None if shapes differ within a group."""
    if stacked_collectives.groups_by_cell(held, family) is None:
        return None
    roots = np.array([group[root] for group in family.groups])
    rows = held.row_of[np.where(family.members, roots[family.index], np.arange(family.world))]
    used, inverse = np.unique(rows[rows >= 0], return_inverse=True)
    row_of = np.full(family.world, NOWHERE)
    row_of[rows >= 0] = inverse.reshape(-1)
    _, sizes = np.unique(held.cell_of[used], return_counts=True)
    kept = tuple(stacked_collectives.rows_by_cell(held, used))
    return stacked_collectives.CollectivePlan((), kept, partition(row_of, sizes.tolist()))


def _reference_all_gather(held: list[Tensor]) -> list[Tensor]:
    return [torch.stack(each) for each in reference.all_gather(held)]


def all_gather(value: StackedValue, family: GroupFamily) -> StackedValue:
    """The tensors of each group along a new dim 0, on every member."""
    do = stacked_collectives.gather_rows
    return _run_on_stacks(
        "all_gather", value, family, stacked_collectives.gather_plan, Readers.ALL, do, _reference_all_gather
    )


def gather(value: StackedValue, family: GroupFamily, root: int) -> StackedValue:
    """The tensors of each group along a new dim 0, on its root alone; other ranks hold nothing."""
    check_all_hold("gather", value.held, family)
    value = StackedValue(*merge_alike(*value, by_shape=True))  # strides are not sent
    how = stacked_collectives.collective_plan(
        stacked_collectives.gather_plan, Readers.ROOT, root, value.held, family, False
    )
    if how is not None:
        stacks = [stacked_collectives.gather_rows(value.stack(cell), plan) for cell, plan in how.steps]
        return _value_of_stacks(stacks, how.held, value.cells)
    found = {group[root]: _reference_all_gather([value.on(rank) for rank in group])[root] for group in family.groups}
    return value_of_ranks(found, family.world)


def reduce_scatter(value: StackedValue, family: GroupFamily, op: ReductionOp) -> StackedValue:
    """Each member's piece, along dim 0, of the reduction of its group's tensors; dim 0 must divide."""

    def do(x: Tensor, plan: IndexPlan) -> Tensor:
        _check_divides(x, plan)
        done = stacked_collectives.reduce_rows(x, plan, op)
        return done.reshape(done.shape[0] * plan.members, done.shape[1] // plan.members, *done.shape[2:])

    plain = partial(reference.reduce_scatter_tensor, op=op)
    return _run_on_stacks(
        "reduce_scatter_tensor", value, family, stacked_collectives.fold_plan, Readers.PIECES, do, plain
    )


def _check_divides(x: Tensor, plan: IndexPlan) -> None:
    if x.dim() < 2 or x.shape[1] % plan.members:
        raise _ShapesDiffer


def all_to_all_single(value: StackedValue, family: GroupFamily, sent: Sizes = None, got: Sizes = None) -> StackedValue:
    """All-to-all along dim 0.

    `sent` and `got` are the rows to and from each member, ints that may differ by rank; None means equal pieces.
    """
    if _rows_are_even(value, family, sent) and _rows_are_even(value, family, got):
        do, plain = _exchange_dim_0, reference.all_to_all_single
        return _run_on_stacks(
            "all_to_all_single", value, family, stacked_collectives.gather_plan, Readers.PIECES, do, plain
        )
    check_all_hold("all_to_all_single", value.held, family)
    found: dict[int, Tensor] = {}
    for group in family.groups:
        held = [value.on(rank) for rank in group]
        splits = [
            None if each is None else [[on_rank(size, rank) for size in each] for rank in group] for each in (sent, got)
        ]
        done = reference.all_to_all_single(held, input_splits=splits[0], output_splits=splits[1])
        found.update(zip(group, done, strict=True))
    return value_of_ranks(found, family.world)


def _exchange_dim_0(x: Tensor, plan: IndexPlan) -> Tensor:
    _check_divides(x, plan)
    rows = stacked_collectives.exchange_rows(x.unflatten(1, (plan.members, x.shape[1] // plan.members)), plan)
    return rows.reshape(rows.shape[0], *x.shape[1:])


def _rows_are_even(value: StackedValue, family: GroupFamily, splits: Sizes) -> bool:
    if splits is None or len(splits) == 0:
        return is_contiguous(value)
    if not all(type(size) is int and size == splits[0] for size in splits):
        return False
    rows = [tuple(cell.shape[count > 1 :])[:1] for cell, count in zip(value.cells, value.held.sizes, strict=True)]
    members = family.matrix is not None and family.matrix.shape[1] == len(splits)
    return members and set(rows) == {(splits[0] * len(splits),)} and is_contiguous(value)


def shard_dim_alltoall(value: StackedValue, family: GroupFamily, gather_dim: int, shard_dim: int) -> StackedValue:
    """Shards of `gather_dim` become shards of `shard_dim`, which must divide."""

    def do(x: Tensor, plan: IndexPlan) -> Tensor:
        members, dims = plan.members, range(x.dim() - 1)
        if shard_dim not in dims or gather_dim not in dims or x.shape[shard_dim + 1] % members:
            raise _ShapesDiffer
        size = x.shape[shard_dim + 1] // members
        cut = x.unflatten(shard_dim + 1, (members, size)).movedim(shard_dim + 1, 1)
        rows = stacked_collectives.exchange_rows(cut, plan)
        return rows.movedim(1, gather_dim + 1).flatten(gather_dim + 1, gather_dim + 2).contiguous()

    plain = partial(reference.shard_dim_alltoall, gather_dim=gather_dim, shard_dim=shard_dim)
    return _run_on_stacks(
        "shard_dim_alltoall", value, family, stacked_collectives.gather_plan, Readers.PIECES, do, plain
    )


def permute(value: StackedValue, family: GroupFamily, destinations: Sequence[int]) -> StackedValue:
    """The member at `destinations[i]` holds the tensor of the i-th; each group has as many members."""
    check_all_hold("permute", value.held, family)
    source = np.arange(family.world)
    matrix: Any = family.matrix
    source[matrix[:, list(destinations)]] = matrix
    held = value.held.row_of >= 0
    return select([value], np.where(held, 0, -1), source)


def scatter_from_roots(values: Sequence[StackedValue], family: GroupFamily, root: int) -> StackedValue:
    """The i-th member holds the root's tensor of the i-th value; each group has one member for each value."""
    roots = np.array([group[root] for group in family.groups])
    return select(values, family.position, np.where(family.members, roots[family.index], 0))


# -- reshaping


def stacked_value(mode: Mode, x: Tensor) -> StackedValue:
    """The tensors of all ranks; a plain tensor is the same on each.

    Raises `NotTraceable` for a tensor without values, as there are where a graph is recorded: an op on it would end in a native crash.
    """
    if isinstance(x, LocalTensor):
        return StackedValue(x._cells, x._partition)
    if has_no_values(x):
        problem = "it stands for one rank's tensor, and each rank takes its own part of it"
        raise NotTraceable("LocalTensorMode", f"a {type(x).__name__}", problem, "Run this part op by op.", user_place())
    return StackedValue((x.detach(),), mode.everyone)


def has_no_values(x: Tensor) -> bool:
    """Whether a tensor stands for one of each rank while a graph is recorded, as fake and functional ones do."""
    return type(x) not in (Tensor, LocalTensor) and torch._C._dispatch_keys(x).has(torch._C.DispatchKey.Python)


def zeros_like(value: StackedValue) -> StackedValue:
    """Zeros with the shapes and ranks of a value, expanded from one element each."""
    return StackedValue(tuple(cell.new_zeros(()).expand(cell.shape) for cell in value.cells), value.held)


def merge_rows(value: StackedValue, dim: int = 0) -> StackedValue:
    """Dim 0 of each rank's tensor is merged into dim `dim` of its rows; scalars make one row."""
    return _map_stacks(value, lambda x: x.movedim(1, dim + 1).flatten(dim + 1, dim + 2) if x.dim() > 2 else x)


def move_dim(value: StackedValue, source: int, to: int) -> StackedValue:
    """Each rank's tensor with dim `source` moved to `to`."""
    return value if source == to else _map_stacks(value, lambda x: x.movedim(source + 1, to + 1))


def _map_stacks(value: StackedValue, change: Callable[[Tensor], Tensor]) -> StackedValue:
    cells = []
    for cell, rows in enumerate(value.held.sizes):
        changed = change(value.stack(cell))
        cells.append(changed if rows > 1 else changed[0])
    return StackedValue(tuple(cells), value.held)


def unbind_value(value: StackedValue, count: int) -> list[StackedValue]:
    """The `count` slices along dim 0 of each rank's tensor, as views."""
    pairs = list(zip(value.cells, value.held.sizes, strict=True))
    cells = [tuple(cell[:, i] if rows > 1 else cell[i] for cell, rows in pairs) for i in range(count)]
    return [StackedValue(each, value.held) for each in cells]


def is_contiguous(value: StackedValue) -> bool:
    """Whether each rank's tensor is contiguous."""
    pairs = zip(value.cells, value.held.sizes, strict=True)
    return all((cell[0] if rows > 1 else cell).is_contiguous() for cell, rows in pairs)


def make_contiguous(value: StackedValue) -> StackedValue:
    """The value with each rank's tensor contiguous."""
    return StackedValue(tuple(cell.contiguous() for cell in value.cells), value.held)
