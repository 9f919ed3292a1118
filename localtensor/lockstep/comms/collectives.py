"""Collectives on values with a partition: what every rank holds afterwards, for all groups of a family at once.

Cost follows the different values and the groups, not the ranks (lockstep/comms/stacked_collectives.py): who reads which row is worked out once
for a partition and a family, and kept.  Whatever these do not cover is done by the plain functions of collectives/reference.py,
on each rank's own tensors; so are refusals, which are then in the same words.
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
from localtensor.lockstep.comms.stacked_collectives import Family, IndexPlan, pick, taken
from localtensor.lockstep.values.local_tensor import LocalTensor
from localtensor.lockstep.values.partition import NOWHERE, Partition, partition, rows_apart
from localtensor.lockstep.values.rank_int import on_rank
from localtensor.lockstep.values.stacks import Cells, joined, of_rows

Plain = Callable[[list[Any]], Sequence[Any]]  # a function of collectives/reference.py, on the tensors of one group
_MOST_KEPT = 4096


class Value(NamedTuple):
    """Cells, and which rank reads what."""

    cells: Cells
    held: Partition

    def on(self, rank: int) -> Tensor:
        """What a rank holds, not copied; it must hold something."""
        cell, row = self.held.place(rank)
        return self.cells[cell][row] if self.held.sizes[cell] > 1 else self.cells[cell]

    def stack(self, cell: int) -> Tensor:
        """The rows of a cell, one or more."""
        return self.cells[cell] if self.held.sizes[cell] > 1 else self.cells[cell][None]


class _Unlike(Exception):
    """Members of one group bring different shapes, or such as do not divide: the plain function says so, or can do it."""


def check_held(call: str, held: Partition, whole: Family) -> None:
    """Raises `NotHeld` unless every member of a group holds something."""
    if not held.complete and (held.row_of[whole.members] < 0).any():
        missing = np.flatnonzero(whole.members & (held.row_of < 0))
        raise NotHeld(call, missing.tolist(), np.flatnonzero(held.row_of >= 0).tolist())


def _over(
    call: str, value: Value, whole: Family, planned: stacked_collectives.Planned, do: Callable[[Tensor, IndexPlan], Tensor], plain: Plain,
    *, keep: bool = False, root: int = 0,
) -> Value:  # fmt: skip
    """The collective, cell by cell; rank by rank where shapes differ.  Who is in no group may keep what it had."""
    check_held(call, value.held, whole)
    value = Value(*joined(*value, by_shape=True))  # what travels has no strides
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
    """The value of these stacks, which shares no memory with what was brought."""
    cells, held = joined(tuple(x if x.shape[0] > 1 else x[0] for x in stacks), held)
    taken_up = {cell.untyped_storage().data_ptr() for cell in brought}
    return Value(tuple(x.clone() if x.untyped_storage().data_ptr() in taken_up else x for x in cells), held)


def rank_by_rank(value: Value, whole: Family, plain: Plain, *, keep: bool) -> Value:
    """The plain function on the tensors of each group, one after the other."""
    found: dict[int, Tensor] = {}
    for group in whole.groups:
        found.update(zip(group, plain([value.on(rank) for rank in group]), strict=True))
    done = of_ranks(found, whole.world)
    rest = ~whole.members & (value.held.row_of >= 0)
    return combined([done, value], np.where(rest, 1, 0)) if keep and rest.any() else done


def of_ranks(values: dict[int, Tensor], world: int) -> Value:
    """The value of which these ranks hold these tensors."""
    row_of = np.full(world, NOWHERE)
    row_of[list(values)] = np.arange(len(values))
    return Value(*of_rows(list(values.values()), rows_apart(partition(row_of, [len(values)]))))


def combined(values: Sequence[Value], number: Any, source: Any = None) -> Value:
    """Each rank holds what it, or the rank `source` of it, has of the value of this number; nothing if negative."""
    row_of, stacks, sizes, start = np.full(len(number), NOWHERE), [], [], 0
    order = np.argsort(number, kind="stable")
    bounds = np.searchsorted(number[order], np.arange(len(values) + 1))
    for index, value in enumerate(values):
        ranks = order[bounds[index] : bounds[index + 1]]
        rows = value.held.row_of[ranks if source is None else source[ranks]]
        ranks, rows = ranks[rows >= 0], rows[rows >= 0]
        used, inverse = np.unique(rows, return_inverse=True)
        row_of[ranks] = start + inverse
        for cell in np.unique(value.held.cell_of[used]):
            here = used[value.held.cell_of[used] == cell] - value.held.starts[cell]
            stacks.append(taken(value.stack(int(cell)), pick(here)))
            sizes.append(len(here))
        start += len(used)
    return _of_stacks(stacks, partition(row_of, sizes), [cell for value in values for cell in value.cells])


# -- the collectives


def all_reduce(value: Value, whole: Family, op: Op, plain: Plain) -> Value:
    """Every member holds what its group's tensors fold into."""
    return _over(
        "all_reduce",
        value,
        whole,
        stacked_collectives.by_fold,
        lambda x, plan: stacked_collectives.reduced(x, plan, op),
        plain,
        keep=True,
    )


def reduce(value: Value, whole: Family, op: Op, root: int, plain: Plain) -> Value:
    """The root of each group holds what its tensors fold into; the others hold what they had."""

    def do(x: Tensor, plan: IndexPlan) -> Tensor:
        return stacked_collectives.reduced(x, plan, op)

    return _over("reduce", value, whole, stacked_collectives.to_root, do, plain, keep=True, root=root)


def broadcast(value: Value, whole: Family, root: int, plain: Plain) -> Value:
    """Every member holds its root's tensor."""
    check_held("broadcast", value.held, whole)
    value = Value(*joined(*value, by_shape=True))  # what travels has no strides
    how = _as_roots_have(value.held, whole, root)
    if how is None:
        return rank_by_rank(value, whole, plain, keep=True)
    return _of_stacks([taken(value.stack(cell), rows) for cell, rows in how.kept], how.held, value.cells)


@lru_cache(_MOST_KEPT)
def _as_roots_have(held: Partition, whole: Family, root: int) -> stacked_collectives.Recipe | None:
    """Members read what their root reads, the others what they did; None if shapes differ within a group."""
    if stacked_collectives.spots(held, whole) is None:
        return None
    roots = np.array([group[root] for group in whole.groups])
    rows = held.row_of[np.where(whole.members, roots[whole.index], np.arange(whole.world))]
    used, inverse = np.unique(rows[rows >= 0], return_inverse=True)
    row_of = np.full(whole.world, NOWHERE)
    row_of[rows >= 0] = inverse.reshape(-1)
    cells, sizes = np.unique(held.cell_of[used], return_counts=True)
    kept = [(int(cell), pick(used[held.cell_of[used] == cell] - held.starts[cell])) for cell in cells]
    return stacked_collectives.Recipe((), tuple(kept), partition(row_of, sizes.tolist()))


def all_gather(value: Value, whole: Family, plain: Plain) -> Value:
    """Every member holds its group's tensors along a new dim 0."""
    return _over("all_gather", value, whole, stacked_collectives.together, stacked_collectives.gathered, plain)


def gather(value: Value, whole: Family, root: int, plain: Plain) -> Value:
    """The root of each group holds its tensors along a new dim 0; the others hold nothing."""
    check_held("gather", value.held, whole)
    value = Value(*joined(*value, by_shape=True))  # what travels has no strides
    how = stacked_collectives.recipe(stacked_collectives.at_root, root, value.held, whole, False)
    if how is not None:
        stacks = [stacked_collectives.gathered(value.stack(cell), plan) for cell, plan in how.steps]
        return _of_stacks(stacks, how.held, value.cells)
    found = {group[root]: plain([value.on(rank) for rank in group])[root] for group in whole.groups}
    return of_ranks(found, whole.world)


def reduce_scatter(value: Value, whole: Family, op: Op, plain: Plain) -> Value:
    """Each member holds its piece, along dim 0, of what its group's tensors fold into; dim 0 must divide."""

    def do(x: Tensor, plan: IndexPlan) -> Tensor:
        _must_divide(x, plan)
        return _cut(stacked_collectives.reduced(x, plan, op), plan.members)

    return _over("reduce_scatter_tensor", value, whole, stacked_collectives.dealt, do, plain)


def _must_divide(x: Tensor, plan: IndexPlan) -> None:
    if x.dim() < 2 or x.shape[1] % plan.members:
        raise _Unlike


def _cut(x: Tensor, members: int) -> Tensor:
    """Each row in so many pieces along dim 1, which become rows."""
    return x.reshape(x.shape[0] * members, x.shape[1] // members, *x.shape[2:])


def all_to_all(value: Value, whole: Family, plain: Plain) -> Value:
    """Each member holds the pieces that the others have for it, one behind the other; dim 0 must divide."""

    def do(x: Tensor, plan: IndexPlan) -> Tensor:
        _must_divide(x, plan)
        rows = stacked_collectives.exchanged(x.unflatten(1, (plan.members, x.shape[1] // plan.members)), plan)
        return rows.reshape(rows.shape[0], *x.shape[1:])

    return _over("all_to_all_single", value, whole, stacked_collectives.crosswise, do, plain)


def move_shards(value: Value, whole: Family, gather_dim: int, shard_dim: int, plain: Plain) -> Value:
    """Shards of one dim have become shards of another; that dim must divide."""

    def do(x: Tensor, plan: IndexPlan) -> Tensor:
        members, dims = plan.members, range(x.dim() - 1)
        if shard_dim not in dims or gather_dim not in dims or x.shape[shard_dim + 1] % members:
            raise _Unlike
        size = x.shape[shard_dim + 1] // members
        cut = x.unflatten(shard_dim + 1, (members, size)).movedim(shard_dim + 1, 1)
        rows = stacked_collectives.exchanged(cut, plan)
        return rows.movedim(1, gather_dim + 1).flatten(gather_dim + 1, gather_dim + 2).contiguous()

    return _over("shard_dim_alltoall", value, whole, stacked_collectives.crosswise, do, plain)


def permuted(value: Value, whole: Family, destinations: Sequence[int]) -> Value:
    """The member at `destinations[i]` holds the tensor of the i-th; each group has as many members."""
    check_held("permute", value.held, whole)
    source = np.arange(whole.world)
    matrix: Any = whole.matrix
    source[matrix[:, list(destinations)]] = matrix
    held = value.held.row_of >= 0
    return combined([value], np.where(held, 0, -1), source)


def of_roots(values: Sequence[Value], whole: Family, root: int) -> Value:
    """The i-th member holds the i-th of the values, as its root has it; each group has as many members as values."""
    roots = np.array([group[root] for group in whole.groups])
    return combined(values, whole.position, np.where(whole.members, roots[whole.index], 0))


# What the ranks hold after each collective: the quick function of lockstep/comms/collectives.py beside the plain one of collectives/reference.py.


def value_of(mode: Any, x: Tensor) -> Value:
    """What every rank brings: a plain tensor is the same on all of them."""
    return Value(x._cells, x._partition) if isinstance(x, LocalTensor) else Value((x.detach(),), mode.everyone)


def all_reduced(value: Value, whole: Family, op: Any) -> Value:
    """On every member, what its group's tensors fold into."""
    return all_reduce(value, whole, op, lambda held: reference.all_reduce(held, op))


def reduced(value: Value, whole: Family, op: Any, root: int) -> Value:
    """The same on the root of each group alone; the others hold what they brought."""
    return reduce(value, whole, op, root, lambda held: reference.reduce(held, op, root=root))


def broadcasted(value: Value, whole: Family, root: int) -> Value:
    """On every member, its root's tensor."""
    return broadcast(value, whole, root, lambda held: reference.broadcast(held, root))


def _stacked(held: list[Tensor]) -> list[Tensor]:
    return [torch.stack(each) for each in reference.all_gather(held)]


def gathered(value: Value, whole: Family) -> Value:
    """All members' tensors, along a new dim 0."""
    return all_gather(value, whole, _stacked)


def gathered_at(value: Value, whole: Family, root: int) -> Value:
    """The same, on the root of each group alone."""
    return gather(value, whole, root, _stacked)


def joined_rows(value: Value, dim: int = 0) -> Value:
    """Dim 0 of each rank's tensor has become part of what was dim `dim` of its rows; scalars make one row."""
    return _each_stack(value, lambda x: x.movedim(1, dim + 1).flatten(dim + 1, dim + 2) if x.dim() > 2 else x)


def moved_dim(value: Value, source: int, to: int) -> Value:
    """Each rank's tensor, with a dim in another place."""
    return value if source == to else _each_stack(value, lambda x: x.movedim(source + 1, to + 1))


def _each_stack(value: Value, change: Callable[[Tensor], Tensor]) -> Value:
    cells = []
    for cell, rows in enumerate(value.held.sizes):
        changed = change(value.stack(cell))
        cells.append(changed if rows > 1 else changed[0])
    return Value(tuple(cells), value.held)


def pieces(value: Value, count: int) -> list[Value]:
    """The pieces along each rank's dim 0; they are views."""
    pairs = list(zip(value.cells, value.held.sizes, strict=True))
    return [Value(tuple(cell[:, i] if rows > 1 else cell[i] for cell, rows in pairs), value.held) for i in range(count)]


def reduce_scattered(value: Value, whole: Family, op: Any) -> Value:
    """On each member, its piece along dim 0 of what its group's tensors fold into."""
    return reduce_scatter(value, whole, op, lambda held: reference.reduce_scatter_tensor(held, op))


def exchanged(value: Value, whole: Family, sent: Any = None, got: Any = None) -> Value:
    """An all-to-all along dim 0; `sent` and `got` are the rows to and from each member, ints that may differ by rank.

    None means equal pieces.
    """
    if _rows_are_even(value, whole, sent) and _rows_are_even(value, whole, got):
        return all_to_all(value, whole, reference.all_to_all_single)
    check_held("all_to_all_single", value.held, whole)
    found: dict[int, Tensor] = {}
    for group in whole.groups:
        held = [value.on(rank) for rank in group]
        done = reference.all_to_all_single(held, input_splits=_on(sent, group), output_splits=_on(got, group))
        found.update(zip(group, done, strict=True))
    return of_ranks(found, whole.world)


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


def is_dense(value: Value) -> bool:
    """Whether each rank's tensor is contiguous."""
    return all(
        (cell[0] if rows > 1 else cell).is_contiguous()
        for cell, rows in zip(value.cells, value.held.sizes, strict=True)
    )


def contiguous(value: Value) -> Value:
    """The same, each rank's tensor contiguous."""
    return Value(tuple(cell.contiguous() for cell in value.cells), value.held)


def moved_shards(value: Value, whole: Family, gather_dim: int, shard_dim: int) -> Value:
    """Cut along one dim, sent, joined along the other."""
    done = partial(reference.shard_dim_alltoall, gather_dim=gather_dim, shard_dim=shard_dim)
    return move_shards(value, whole, gather_dim, shard_dim, done)
