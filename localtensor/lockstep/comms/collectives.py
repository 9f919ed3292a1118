"""Collectives on stacked values: what every rank holds afterwards, for all groups of a family at once.

Cost grows with the different values and the groups, not with the ranks.  The index plans of
lockstep/comms/stacked_collectives.py are computed once for a partition and a family, and cached.  Calls that stacks do
not cover, and errors, go to collectives/reference.py on each rank's own tensors, so that messages are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from localtensor.collectives import reference
from localtensor.errors import NotHeld
from localtensor.layout.reductions import Op
from localtensor.lockstep.comms import stacked_collectives
from localtensor.lockstep.comms.stacked_collectives import Family, IndexPlan, taken
from localtensor.lockstep.values.local_tensor import LocalTensor
from localtensor.lockstep.values.partition import NOWHERE, Partition, partition, rows_apart
from localtensor.lockstep.values.rank_int import on_rank
from localtensor.lockstep.values.stacks import Cells, joined, of_rows

Plain = Callable[[list[Any]], Sequence[Any]]  # a function of collectives/reference.py on the tensors of one group
_MOST_KEPT = 4096


class Value(NamedTuple):
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


class _Unlike(Exception):
    """Shapes differ within a group, or do not divide: the plain function handles or refuses them."""


def check_held(call: str, held: Partition, whole: Family) -> None:
    """Raises `NotHeld` unless every member of a group holds a tensor."""
    if not held.complete and (held.row_of[whole.members] < 0).any():
        missing = np.flatnonzero(whole.members & (held.row_of < 0))
        raise NotHeld(call, missing.tolist(), np.flatnonzero(held.row_of >= 0).tolist())


def _over(
    call: str, value: Value, whole: Family, planned: stacked_collectives.Planned, do: Callable[[Tensor, IndexPlan], Tensor], plain: Plain,
    *, keep: bool = False, root: int = 0,
) -> Value:  # fmt: skip
    """The collective cell by cell, or group by group where shapes differ.  With `keep`, ranks outside of all groups keep
    their tensors."""
    check_held(call, value.held, whole)
    value = Value(*joined(*value, by_shape=True))  # strides are not sent
    how = stacked_collectives.recipe(planned, root, value.held, whole, keep)
    if how is None:
        return rank_by_rank(value, whole, plain, keep=keep)
    try:
        stacks = [do(value.stack(cell), plan) for cell, plan in how.steps]
    except _Unlike:
        return rank_by_rank(value, whole, plain, keep=keep)
    stacks += [taken(value.stack(cell), rows) for cell, rows in how.kept]
    return _of_stacks(stacks, how.held, value.cells)


def _of_stacks(stacks: Sequence[Tensor], held: Partition, brought: Sequence[Tensor]) -> Value:
    """The value of these stacks, which shares no memory with the inputs `brought`."""
    cells, held = joined(tuple(x if x.shape[0] > 1 else x[0] for x in stacks), held)
    taken_up = {cell.untyped_storage().data_ptr() for cell in brought}
    return Value(tuple(x.clone() if x.untyped_storage().data_ptr() in taken_up else x for x in cells), held)


def rank_by_rank(value: Value, whole: Family, plain: Plain, *, keep: bool) -> Value:
    """The plain function on the tensors of one group after the other."""
    found: dict[int, Tensor] = {}
    for group in whole.groups:
        found.update(zip(group, plain([value.on(rank) for rank in group]), strict=True))
    done = of_ranks(found, whole.world)
    rest = ~whole.members & (value.held.row_of >= 0)
    return combined([done, value], np.where(rest, 1, 0)) if keep and rest.any() else done


def of_ranks(values: dict[int, Tensor], world: int) -> Value:
    """The value of one tensor for each of these ranks."""
    row_of = np.full(world, NOWHERE)
    row_of[list(values)] = np.arange(len(values))
    return Value(*of_rows(list(values.values()), rows_apart(partition(row_of, [len(values)]))))


def combined(values: Sequence[Value], number: Any, source: Any = None) -> Value:
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
        stacks += [taken(value.stack(c), here) for c, here in stacked_collectives.rows_by_cell(value.held, used)]
        start += len(used)
    return _of_stacks(stacks, partition(row_of, sizes), [cell for value in values for cell in value.cells])


# -- the collectives


def all_reduce(value: Value, whole: Family, op: Op) -> Value:
    """The reduction of each group's tensors, on every member."""

    def do(x: Tensor, plan: IndexPlan) -> Tensor:
        return stacked_collectives.reduced(x, plan, op)

    def plain(held: list[Tensor]) -> Sequence[Tensor]:
        return reference.all_reduce(held, op)

    return _over("all_reduce", value, whole, stacked_collectives.fold_to_all, do, plain, keep=True)


def reduce(value: Value, whole: Family, op: Op, root: int) -> Value:
    """The reduction of each group's tensors, on its root alone; other ranks keep their tensors."""

    def do(x: Tensor, plan: IndexPlan) -> Tensor:
        return stacked_collectives.reduced(x, plan, op)

    def plain(held: list[Tensor]) -> Sequence[Tensor]:
        return reference.reduce(held, op, root=root)

    return _over("reduce", value, whole, stacked_collectives.fold_to_root, do, plain, keep=True, root=root)


def broadcast(value: Value, whole: Family, root: int) -> Value:
    """The tensor of each group's root, on every member."""
    check_held("broadcast", value.held, whole)
    value = Value(*joined(*value, by_shape=True))  # strides are not sent
    how = _broadcast_plan(value.held, whole, root)
    if how is None:
        return rank_by_rank(value, whole, lambda held: reference.broadcast(held, root), keep=True)
    return _of_stacks([taken(value.stack(cell), rows) for cell, rows in how.kept], how.held, value.cells)


@lru_cache(_MOST_KEPT)
def _broadcast_plan(held: Partition, whole: Family, root: int) -> stacked_collectives.Recipe | None:
    """Members read their root's row, other ranks their own; None if shapes differ within a group."""
    if stacked_collectives.spots(held, whole) is None:
        return None
    roots = np.array([group[root] for group in whole.groups])
    rows = held.row_of[np.where(whole.members, roots[whole.index], np.arange(whole.world))]
    used, inverse = np.unique(rows[rows >= 0], return_inverse=True)
    row_of = np.full(whole.world, NOWHERE)
    row_of[rows >= 0] = inverse.reshape(-1)
    _, sizes = np.unique(held.cell_of[used], return_counts=True)
    kept = tuple(stacked_collectives.rows_by_cell(held, used))
    return stacked_collectives.Recipe((), kept, partition(row_of, sizes.tolist()))


def _gathered_plainly(held: list[Tensor]) -> list[Tensor]:
    return [torch.stack(each) for each in reference.all_gather(held)]


def all_gather(value: Value, whole: Family) -> Value:
    """The tensors of each group along a new dim 0, on every member."""
    planned, do = stacked_collectives.gather_to_all, stacked_collectives.gathered
    return _over("all_gather", value, whole, planned, do, _gathered_plainly)


def gather(value: Value, whole: Family, root: int) -> Value:
    """The tensors of each group along a new dim 0, on its root alone; other ranks hold nothing."""
    check_held("gather", value.held, whole)
    value = Value(*joined(*value, by_shape=True))  # strides are not sent
    how = stacked_collectives.recipe(stacked_collectives.gather_to_root, root, value.held, whole, False)
    if how is not None:
        stacks = [stacked_collectives.gathered(value.stack(cell), plan) for cell, plan in how.steps]
        return _of_stacks(stacks, how.held, value.cells)
    found = {group[root]: _gathered_plainly([value.on(rank) for rank in group])[root] for group in whole.groups}
    return of_ranks(found, whole.world)


def reduce_scatter(value: Value, whole: Family, op: Op) -> Value:
    """Each member's piece, along dim 0, of the reduction of its group's tensors; dim 0 must divide."""

    def do(x: Tensor, plan: IndexPlan) -> Tensor:
        _check_divides(x, plan)
        done = stacked_collectives.reduced(x, plan, op)
        return done.reshape(done.shape[0] * plan.members, done.shape[1] // plan.members, *done.shape[2:])

    def plain(held: list[Tensor]) -> Sequence[Tensor]:
        return reference.reduce_scatter_tensor(held, op)

    return _over("reduce_scatter_tensor", value, whole, stacked_collectives.fold_scattered, do, plain)


def _check_divides(x: Tensor, plan: IndexPlan) -> None:
    if x.dim() < 2 or x.shape[1] % plan.members:
        raise _Unlike


def all_to_all_single(value: Value, whole: Family, sent: Any = None, got: Any = None) -> Value:
    """All-to-all along dim 0.

    `sent` and `got` are the rows to and from each member, ints that may differ by rank; None means equal pieces.
    """
    if _rows_are_even(value, whole, sent) and _rows_are_even(value, whole, got):
        planned = stacked_collectives.exchange
        return _over("all_to_all_single", value, whole, planned, _exchange_dim_0, reference.all_to_all_single)
    check_held("all_to_all_single", value.held, whole)
    found: dict[int, Tensor] = {}
    for group in whole.groups:
        held = [value.on(rank) for rank in group]
        done = reference.all_to_all_single(held, input_splits=_on(sent, group), output_splits=_on(got, group))
        found.update(zip(group, done, strict=True))
    return of_ranks(found, whole.world)


def _exchange_dim_0(x: Tensor, plan: IndexPlan) -> Tensor:
    _check_divides(x, plan)
    rows = stacked_collectives.exchanged(x.unflatten(1, (plan.members, x.shape[1] // plan.members)), plan)
    return rows.reshape(rows.shape[0], *x.shape[1:])


def _on(splits: Any, group: tuple[int, ...]) -> Any:
    return None if splits is None else [[on_rank(size, rank) for size in splits] for rank in group]


def _rows_are_even(value: Value, whole: Family, splits: Any) -> bool:
    if splits is None or len(splits) == 0:
        return is_dense(value)
    if not all(type(size) is int and size == splits[0] for size in splits):
        return False
    rows = [tuple(cell.shape[count > 1 :])[:1] for cell, count in zip(value.cells, value.held.sizes, strict=True)]
    members = whole.matrix is not None and whole.matrix.shape[1] == len(splits)
    return members and set(rows) == {(splits[0] * len(splits),)} and is_dense(value)


def shard_dim_alltoall(value: Value, whole: Family, gather_dim: int, shard_dim: int) -> Value:
    """Shards of `gather_dim` become shards of `shard_dim`, which must divide."""

    def do(x: Tensor, plan: IndexPlan) -> Tensor:
        members, dims = plan.members, range(x.dim() - 1)
        if shard_dim not in dims or gather_dim not in dims or x.shape[shard_dim + 1] % members:
            raise _Unlike
        size = x.shape[shard_dim + 1] // members
        cut = x.unflatten(shard_dim + 1, (members, size)).movedim(shard_dim + 1, 1)
        rows = stacked_collectives.exchanged(cut, plan)
        return rows.movedim(1, gather_dim + 1).flatten(gather_dim + 1, gather_dim + 2).contiguous()

    plain = partial(reference.shard_dim_alltoall, gather_dim=gather_dim, shard_dim=shard_dim)
    return _over("shard_dim_alltoall", value, whole, stacked_collectives.exchange, do, plain)


def permute(value: Value, whole: Family, destinations: Sequence[int]) -> Value:
    """The member at `destinations[i]` holds the tensor of the i-th; each group has as many members."""
    check_held("permute", value.held, whole)
    source = np.arange(whole.world)
    matrix: Any = whole.matrix
    source[matrix[:, list(destinations)]] = matrix
    held = value.held.row_of >= 0
    return combined([value], np.where(held, 0, -1), source)


def of_roots(values: Sequence[Value], whole: Family, root: int) -> Value:
    """The i-th member holds the root's tensor of the i-th value; each group has one member for each value."""
    roots = np.array([group[root] for group in whole.groups])
    return combined(values, whole.position, np.where(whole.members, roots[whole.index], 0))


# -- reshaping


def value_of(mode: Any, x: Tensor) -> Value:
    """The tensors of all ranks; a plain tensor is the same on each."""
    return Value(x._cells, x._partition) if isinstance(x, LocalTensor) else Value((x.detach(),), mode.everyone)


def zeros_like(value: Value) -> Value:
    """Zeros with the shapes and ranks of a value, expanded from one element each."""
    return Value(tuple(cell.new_zeros(()).expand(cell.shape) for cell in value.cells), value.held)


def joined_rows(value: Value, dim: int = 0) -> Value:
    """Dim 0 of each rank's tensor is merged into dim `dim` of its rows; scalars make one row."""
    return _each_stack(value, lambda x: x.movedim(1, dim + 1).flatten(dim + 1, dim + 2) if x.dim() > 2 else x)


def moved_dim(value: Value, source: int, to: int) -> Value:
    """Each rank's tensor with dim `source` moved to `to`."""
    return value if source == to else _each_stack(value, lambda x: x.movedim(source + 1, to + 1))


def _each_stack(value: Value, change: Callable[[Tensor], Tensor]) -> Value:
    cells = []
    for cell, rows in enumerate(value.held.sizes):
        changed = change(value.stack(cell))
        cells.append(changed if rows > 1 else changed[0])
    return Value(tuple(cells), value.held)


def pieces(value: Value, count: int) -> list[Value]:
    """The `count` slices along dim 0 of each rank's tensor, as views."""
    pairs = list(zip(value.cells, value.held.sizes, strict=True))
    return [Value(tuple(cell[:, i] if rows > 1 else cell[i] for cell, rows in pairs), value.held) for i in range(count)]


def is_dense(value: Value) -> bool:
    """Whether each rank's tensor is contiguous."""
    pairs = zip(value.cells, value.held.sizes, strict=True)
    return all((cell[0] if rows > 1 else cell).is_contiguous() for cell, rows in pairs)


def contiguous(value: Value) -> Value:
    """The value with each rank's tensor contiguous."""
    return Value(tuple(cell.contiguous() for cell in value.cells), value.held)
