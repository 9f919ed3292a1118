"""Collectives on stacked values: what every rank holds afterwards, for all groups of a family at once.

Cost grows with the different values and the groups, not with the ranks.  The index plans of
lockstep/comms/stacked_collectives.py are computed once for a partition and a family, and cached.  Calls that stacks do
not cover, and errors, go to collectives/reference.py on each rank's own tensors, so that messages are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
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


stacked: Callable[[tuple[Cells, Partition]], StackedValue] = partial(tuple.__new__, StackedValue)
"""The value of (cells, partition), as `StackedValue(*each)` makes it, without a call of a function in Python."""


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


@dataclass(frozen=True, eq=False, slots=True)
class StackKernel:
    """A collective on stacks: `do` makes the stack of results of a stack and its index plan, `plan_of` the plan.

    Where shapes differ within a group, `plain` makes its results of the tensors of one group; it gets the reduction and the root, too.
    With `keep`, ranks outside of all groups keep their tensors.
    """

    call: str
    plan_of: stacked_collectives.PlanFunction | None
    readers: Readers
    do: Callable[[Tensor, IndexPlan, Any], Tensor] | None
    plain: Callable[[list[Any], Any, int], Sequence[Any]]
    keep: bool = False


def run_on_stacks(
    kernel: StackKernel, value: StackedValue, family: GroupFamily, op: Any = None, root: int = 0
) -> StackedValue:
    """The collective cell by cell, or group by group where shapes differ; `op` is the reduction."""
    cells, held = value
    if not held.complete:
        check_all_hold(kernel.call, held, family)
    if len(cells) > 1:
        value = cells, held = stacked(merge_alike(cells, held, by_shape=True))  # strides are not sent
    keep, do = kernel.keep, kernel.do
    how = stacked_collectives.collective_plan(kernel.plan_of, kernel.readers, root, held, family, keep)
    stacks = []
    try:
        for cell, plan in how.steps if how is not None else ():
            stacks.append(do(cells[cell] if held.sizes[cell] > 1 else cells[cell][None], plan, op))  # type: ignore[misc]
    except _ShapesDiffer:
        how = None
    if how is None:
        return group_by_group(value, family, lambda mine: kernel.plain(mine, op, root), keep=keep)
    for cell, rows in how.kept:
        stacks.append(take_rows(cells[cell] if held.sizes[cell] > 1 else cells[cell][None], rows))
    return _value_of_stacks(stacks, how.held, cells)


def _value_of_stacks(stacks: Sequence[Tensor], held: Partition, brought: Sequence[Tensor]) -> StackedValue:
    """The value of these stacks, which shares no memory with the inputs `brought`."""
    if len(stacks) == len(brought) == 1:
        cell = stacks[0] if stacks[0].shape[0] > 1 else stacks[0][0]
        taken = cell.untyped_storage().data_ptr() == brought[0].untyped_storage().data_ptr()
        return stacked(((cell.clone() if taken else cell,), held))
    cells, held = merge_alike(tuple(x if x.shape[0] > 1 else x[0] for x in stacks), held)
    taken_up = {cell.untyped_storage().data_ptr() for cell in brought}
    return StackedValue(tuple(x.clone() if x.untyped_storage().data_ptr() in taken_up else x for x in cells), held)


def group_by_group(value: StackedValue, family: GroupFamily, plain: Reference, *, keep: bool) -> StackedValue:
    """The plain function on the tensors of one group after the other."""
    found: dict[int, Tensor] = {}
    for group in family.groups:
        results = zip(group, plain([value.on(rank) for rank in group]), strict=True)
        found.update((rank, x) for rank, x in results if x is not None)
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


all_reduce = partial(run_on_stacks, StackKernel(
    "all_reduce", stacked_collectives.fold_plan, Readers.ALL, stacked_collectives.reduce_rows,
    lambda held, op, root: reference.all_reduce(held, op), keep=True,
))  # fmt: skip
"""The reduction of each group's tensors, on every member."""

reduce = partial(run_on_stacks, StackKernel(
    "reduce", stacked_collectives.fold_plan, Readers.ROOT, partial(stacked_collectives.reduce_rows, rooted=True),
    lambda held, op, root: reference.reduce(held, op, root=root), keep=True,
))  # fmt: skip
"""The reduction of each group's tensors, on its root alone; other ranks keep their tensors."""

broadcast = partial(run_on_stacks, StackKernel(
    "broadcast", None, Readers.OF_ROOT, None, lambda held, op, root: reference.broadcast(held, root), keep=True
))  # fmt: skip
"""The tensor of each group's root, on every member."""


def _reference_all_gather(held: list[Tensor], op: object = None, root: int = 0) -> list[Tensor]:
    return [torch.stack(each) for each in reference.all_gather(held)]


all_gather = partial(run_on_stacks, StackKernel(
    "all_gather", stacked_collectives.gather_plan, Readers.ALL, stacked_collectives.gather_rows, _reference_all_gather
))  # fmt: skip
"""The tensors of each group along a new dim 0, on every member."""

all_gather_into_tensor = partial(run_on_stacks, StackKernel(
    "all_gather", stacked_collectives.gather_plan, Readers.ALL, stacked_collectives.concatenate_rows,
    lambda held, op, root: [x.flatten(0, 1) if x.dim() > 1 else x for x in _reference_all_gather(held)],
))  # fmt: skip
"""The tensors of each group along dim 0, on every member; scalars make one row."""

gather = partial(run_on_stacks, StackKernel(
    "gather", stacked_collectives.gather_plan, Readers.ROOT, stacked_collectives.gather_rows,
    lambda held, op, root: [x if i == root else None for i, x in enumerate(_reference_all_gather(held))],
))  # fmt: skip
"""The tensors of each group along a new dim 0, on its root alone; other ranks hold nothing."""


def _reduce_and_cut(x: Tensor, plan: IndexPlan, op: ReductionOp) -> Tensor:
    members = plan.members
    if x.dim() < 2 or x.shape[1] % members:
        raise _ShapesDiffer
    done = stacked_collectives.reduce_rows(x, plan, op)
    return done.reshape(done.shape[0] * members, done.shape[1] // members, *done.shape[2:])


reduce_scatter = partial(run_on_stacks, StackKernel(
    "reduce_scatter_tensor", stacked_collectives.fold_plan, Readers.PIECES, _reduce_and_cut,
    lambda held, op, root: reference.reduce_scatter_tensor(held, op=op),
))  # fmt: skip
"""Each member's piece, along dim 0, of the reduction of its group's tensors; dim 0 must divide."""


def all_to_all_single(value: StackedValue, family: GroupFamily, sent: Sizes = None, got: Sizes = None) -> StackedValue:
    """All-to-all along dim 0.

    `sent` and `got` are the rows to and from each member, ints that may differ by rank; None means equal pieces.
    """
    if is_contiguous(value) and (not (sent or got) or all(_rows_are_even(value, family, each) for each in (sent, got))):
        return run_on_stacks(_exchange, value, family)
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


def _exchange_dim_0(x: Tensor, plan: IndexPlan, op: object) -> Tensor:
    shape, members = x.shape, plan.members
    if len(shape) < 2 or shape[1] % members:
        raise _ShapesDiffer
    rows = stacked_collectives.exchange_rows(x.reshape(shape[0], members, shape[1] // members, *shape[2:]), plan)
    return rows.reshape(rows.shape[0], *shape[1:])


_exchange = StackKernel(
    "all_to_all_single", stacked_collectives.gather_plan, Readers.PIECES, _exchange_dim_0,
    lambda held, op, root: reference.all_to_all_single(held),
)  # fmt: skip


def _rows_are_even(value: StackedValue, family: GroupFamily, splits: Sizes) -> bool:
    if splits is None or len(splits) == 0:
        return True
    if set(map(type, splits)) != {int} or splits.count(splits[0]) < len(splits):
        return False
    rows = [tuple(cell.shape[count > 1 :])[:1] for cell, count in zip(value.cells, value.held.sizes, strict=True)]
    members = family.matrix is not None and family.matrix.shape[1] == len(splits)
    return members and set(rows) == {(splits[0] * len(splits),)}


def shard_dim_alltoall(value: StackedValue, family: GroupFamily, gather_dim: int, shard_dim: int) -> StackedValue:
    """Shards of `gather_dim` become shards of `shard_dim`, which must divide."""

    def do(x: Tensor, plan: IndexPlan, op: object) -> Tensor:
        members, dims = plan.members, range(x.dim() - 1)
        if shard_dim not in dims or gather_dim not in dims or x.shape[shard_dim + 1] % members:
            raise _ShapesDiffer
        size = x.shape[shard_dim + 1] // members
        cut = x.unflatten(shard_dim + 1, (members, size)).movedim(shard_dim + 1, 1)
        rows = stacked_collectives.exchange_rows(cut, plan)
        return rows.movedim(1, gather_dim + 1).flatten(gather_dim + 1, gather_dim + 2).contiguous()

    plain = lambda held, op, root: reference.shard_dim_alltoall(held, gather_dim=gather_dim, shard_dim=shard_dim)  # noqa: E731
    kernel = StackKernel("shard_dim_alltoall", stacked_collectives.gather_plan, Readers.PIECES, do, plain)
    return run_on_stacks(kernel, value, family)


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
        return stacked((x._cells, x._partition))
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


def unbind_value(value: StackedValue) -> list[StackedValue]:
    """The slices along dim 0 of each rank's tensor, as views."""
    cells, held = value
    columns = [cell.unbind(int(rows > 1)) for cell, rows in zip(cells, held.sizes, strict=True)]
    return [stacked((each, held)) for each in zip(*columns, strict=True)]


def is_contiguous(value: StackedValue) -> bool:
    """Whether each rank's tensor is contiguous."""
    if len(value.cells) == 1 and value.cells[0].is_contiguous():
        return True
    pairs = zip(value.cells, value.held.sizes, strict=True)
    return all((cell[0] if rows > 1 else cell).is_contiguous() for cell, rows in pairs)


def make_contiguous(value: StackedValue) -> StackedValue:
    """The value with each rank's tensor contiguous."""
    return StackedValue(tuple(cell.contiguous() for cell in value.cells), value.held)
