"""Collectives on stacks: all groups at once, each different value once.

Results equal those of layout/reductions.py and collectives/reference.py to the bit, but equal operands are computed
once.  The operands are a stack of rows and `ids`, the row of each member of each group, int64 of shape [groups,
members].  An index plan depends on `ids` alone: it is computed once for a partition and a family, and cached.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from localtensor.errors import NotInLockstep
from localtensor.layout.reductions import (
    MAX_SEQUENTIAL,
    PAIRS,
    PremulSum,
    ReductionOp,
    depends_on_order,
    divide,
    fold_in_ring,
)
from localtensor.lockstep.values.partition import NOWHERE, Array, Partition, partition


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class GroupFamily:
    """All groups of one collective: disjoint groups of ranks, each in group order, whether along a mesh axis or not.

    `index` is the group of each rank and `position` its place there, both int64 of shape [world], -1 for ranks in no
    group.  `members` (bools of shape [world]) marks the ranks in some group, `everybody` whether all are.  `matrix` has
    a row of ranks for each group if all groups have one size, else it is None.
    """

    groups: tuple[tuple[int, ...], ...]
    world: int
    index: Array
    position: Array
    matrix: Array | None
    members: Array
    everybody: bool

    def group_of(self, rank: int) -> tuple[int, ...]:
        """The group of a rank; empty if it is in none."""
        return self.groups[int(self.index[rank])] if self.index[rank] >= 0 else ()

    @property
    def member_mask(self) -> Array | None:
        """The ranks in some group: bools of shape [world]; None if all are."""
        return None if self.everybody else self.members

    def sizes(self) -> Array:
        """The size of each rank's group: int64 of shape [world], -1 for ranks in no group."""
        sizes = np.array([len(group) for group in self.groups])
        return np.where(self.members, sizes[self.index], -1)

    def __repr__(self) -> str:
        return f"GroupFamily({len(self.groups)} groups, {self.world} ranks)"


@lru_cache(1024)
def family_of(groups: tuple[tuple[int, ...], ...], world: int) -> GroupFamily:
    """The family of these groups; one object for equal arguments while it is cached.

    >>> family_of(((0, 2), (1, 3)), 4).position.tolist()
    [0, 0, 1, 1]
    """
    index, position = np.full(world, -1), np.full(world, -1)
    if len({len(group) for group in groups}) == 1:
        matrix = np.array(groups)
        index[matrix] = np.arange(len(groups))[:, None]
        position[matrix] = np.arange(matrix.shape[1])
    else:
        matrix = None
        for number, group in enumerate(groups):
            ranks = list(group)
            index[ranks] = number
            position[ranks] = np.arange(len(ranks))
    members = index >= 0
    return GroupFamily(groups, world, index, position, matrix, members, bool(members.all()))


def family_of_lists(groups: Sequence[Sequence[int]], world: int) -> GroupFamily:
    """The family of groups given as lists."""
    return family_of(tuple(tuple(int(rank) for rank in group) for group in groups), world)


@lru_cache(1024)
def split_by_size(family: GroupFamily) -> tuple[GroupFamily, ...]:
    """The same groups as one family for each group size, so that each has a matrix."""
    if family.matrix is not None:
        return (family,)
    sizes: dict[int, list[tuple[int, ...]]] = {}
    for group in family.groups:
        sizes.setdefault(len(group), []).append(group)
    return tuple(family_of(tuple(groups), family.world) for groups in sizes.values())


@lru_cache(1024)
def restrict_family(family: GroupFamily, kind: Partition) -> GroupFamily:
    """The groups whose ranks hold something in a partition.  Raises `NotInLockstep` if only a part of a group does."""
    inside = kind.row_of >= 0
    some = [group for group in family.groups if inside[list(group)].any()]
    if not some or not all(inside[list(group)].all() for group in some):
        raise NotInLockstep("a collective", "some ranks of a group come to it in another way than the others")
    return family_of(tuple(some), family.world)


RowIndex = slice | Tensor  # rows of a stack: a slice where possible, which makes a view


class FoldLevel(NamedTuple):
    """One step of a fold: left and right neighbours, and the rows without a neighbour."""

    left: RowIndex
    right: RowIndex
    rest: RowIndex | None


@dataclass(frozen=True, slots=True, eq=False)
class IndexPlan:
    """The levels of a fold, then the rows that are taken; `places` is the resulting row of each group.

    `rings` are the rows of all members of each different group, for folds in gloo's order; None if there are too many.
    """

    rows: int
    places: Array
    last: RowIndex
    levels: tuple[FoldLevel, ...]
    members: int
    rings: RowIndex | None = None


def row_index(ids: Array) -> RowIndex:
    """The index of these rows: a slice if they are evenly spaced and ascend, else a tensor.

    >>> row_index([1, 3, 5]), row_index([1, 3, 4])
    (slice(1, 6, 2), tensor([1, 3, 4]))
    """
    ids = np.ascontiguousarray(ids).reshape(-1)
    if len(ids) == 1:
        return slice(int(ids[0]), int(ids[0]) + 1, 1)
    step = int(ids[1] - ids[0])
    if step > 0 and (np.diff(ids) == step).all():
        return slice(int(ids[0]), int(ids[-1]) + 1, step)
    return torch.from_numpy(ids.copy())


def take_rows(x: Tensor, rows: RowIndex) -> Tensor:
    """The rows of a stack at this index."""
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows.to(x.device))


def fold_plan(ids: Array) -> IndexPlan:
    """A fold in the order of `fold_in_pairs`, in which a pair that occurs twice is folded once."""
    members, levels = ids.shape[1], []
    rings = row_index(np.unique(ids, axis=0)) if 2 < members <= MAX_SEQUENTIAL else None
    while ids.shape[1] > 1:
        even = ids.shape[1] // 2 * 2 if ids.shape[1] > MAX_SEQUENTIAL else 2
        left, right = ids[:, 0:even:2], ids[:, 1:even:2]
        many = int(ids.max()) + 1
        codes, inverse = np.unique(left * many + right, return_inverse=True)
        next_ids, rest = inverse.reshape(ids.shape[0], even // 2), None
        if even < ids.shape[1]:
            alone, places = np.unique(ids[:, even:], return_inverse=True)
            later = places.reshape(ids.shape[0], -1) + len(codes)
            next_ids, rest = np.concatenate([next_ids, later], 1), row_index(alone)
        levels.append(FoldLevel(row_index(codes // many), row_index(codes % many), rest))
        ids = next_ids
    rows, places = np.unique(ids[:, 0], return_inverse=True)
    return IndexPlan(len(rows), places.reshape(-1), row_index(rows), tuple(levels), members, rings)


def gather_plan(ids: Array) -> IndexPlan:
    """All members' rows for each group; groups with equal rows share one.  `rows` counts different groups."""
    found, places = np.unique(ids, axis=0, return_inverse=True)
    return IndexPlan(len(found), places.reshape(-1), row_index(found), (), ids.shape[1])


def reduce_rows(x: Tensor, plan: IndexPlan, op: ReductionOp, *, rooted: bool = False) -> Tensor:
    """The reduction of each group, a row for each different result; `rooted` as in `reductions.fold`."""
    if isinstance(op, PremulSum):
        x, op = op.times(x), "sum"
    pair = PAIRS[op]
    if plan.rings is not None and depends_on_order(op, x.dtype, plan.members):
        held = take_rows(x, plan.rings).reshape(plan.rows, plan.members, -1).unbind(1)
        x = fold_in_ring(pair, held, rooted=rooted).view(plan.rows, *x.shape[1:])
    else:
        for left, right, rest in plan.levels:
            if isinstance(left, slice) and isinstance(right, slice):
                done = pair(x[left], x[right])
            else:
                done = pair(take_rows(x, left), take_rows(x, right))
            x = done if rest is None else torch.cat([done, take_rows(x, rest)])
        x = take_rows(x, plan.last)
    return divide(x, plan.members) if op == "avg" else x


def gather_rows(x: Tensor, plan: IndexPlan, op: object = None) -> Tensor:
    """All members' tensors along a new dim 1; a row for each different group."""
    return take_rows(x, plan.last).reshape(plan.rows, plan.members, *x.shape[1:])


def concatenate_rows(x: Tensor, plan: IndexPlan, op: object = None) -> Tensor:
    """All members' tensors along dim 1, scalars as one element each; a row for each different group."""
    rows, sizes = take_rows(x, plan.last), x.shape[1:]
    if not sizes:
        return rows.reshape(plan.rows, plan.members)
    return rows.reshape(plan.rows, plan.members * sizes[0], *sizes[1:])


def exchange_rows(x: Tensor, plan: IndexPlan) -> Tensor:
    """The pieces (dim 1 of x) that each member gets from all others: shape [groups * members, members, ...]."""
    members, shape = plan.members, x.shape[2:]
    pieces = take_rows(x, plan.last).reshape(plan.rows, members, members, *shape).transpose(1, 2)
    return pieces.reshape(plan.rows * members, members, *shape)


def member_rows(plan: IndexPlan) -> Array:
    """The row of each member where every different group has a row for each of its members."""
    return plan.places[:, None] * plan.members + np.arange(plan.members)


_MOST_KEPT = 4096


class CellGroups(NamedTuple):
    """Groups of one size whose members read rows of one cell."""

    cell: int
    ids: Array  # the row of each member in that cell: int64 of shape [groups, members]
    ranks: Array  # the members, of the same shape


class CollectivePlan(NamedTuple):
    """Index plans with their cells; the rows that ranks in no group keep; the partition of the results."""

    steps: tuple[tuple[int, IndexPlan], ...]
    kept: tuple[tuple[int, RowIndex], ...]
    held: Partition


@lru_cache(_MOST_KEPT)
def groups_by_cell(held: Partition, family: GroupFamily) -> tuple[CellGroups, ...] | None:
    """The members' rows by group size and cell; None if a group's members read several cells.  All members hold a row."""
    found = []
    for part in split_by_size(family):
        rows = held.row_of[part.matrix]
        cell_of = held.cell_of[rows]
        if (cell_of != cell_of[:, :1]).any():
            return None
        for cell in np.unique(cell_of[:, 0]):
            here = cell_of[:, 0] == cell
            found.append(CellGroups(int(cell), rows[here] - held.starts[cell], part.matrix[here]))  # type: ignore[index]
    return tuple(found)


PlanFunction = Callable[[Array], IndexPlan]  # fold_plan or gather_plan; none is needed where rows are only read


class Readers(Enum):
    """The members of a group that read its row of a plan's results."""

    ALL = "all members read one row"
    ROOT = "only the root reads it"
    PIECES = "the row is cut into pieces, and each member reads its own"
    OF_ROOT = "all members read the root's own row"

    __hash__ = object.__hash__  # of C: each collective asks for it


@lru_cache(_MOST_KEPT)
def collective_plan(
    plan_of: PlanFunction | None, readers: Readers, root: int, held: Partition, family: GroupFamily, keep: bool
) -> CollectivePlan | None:
    """The plan of a collective; None if shapes differ within a group.  With `keep`, ranks in no group keep their rows."""
    found = groups_by_cell(held, family)
    if found is None:
        return None
    if plan_of is None:
        return _broadcast_plan(held, family, root)
    row_of, sizes, steps, kept, start = np.full(family.world, NOWHERE), [], [], [], 0
    for spot in found:
        plan = plan_of(spot.ids)
        ids = member_rows(plan) if readers is Readers.PIECES else plan.places[:, None]
        rows = plan.rows * (plan.members if readers is Readers.PIECES else 1)
        row_of[spot.ranks[:, root : root + 1] if readers is Readers.ROOT else spot.ranks] = start + ids
        steps.append((spot.cell, plan))
        sizes.append(rows)
        start += rows
    rest = (row_of < 0) & (held.row_of >= 0) if keep else np.zeros(0, bool)
    if rest.any():
        used, inverse = np.unique(held.row_of[rest], return_inverse=True)
        row_of[rest] = start + inverse
        kept += rows_by_cell(held, used)
        sizes += np.unique(held.cell_of[used], return_counts=True)[1].tolist()
    return CollectivePlan(tuple(steps), tuple(kept), partition(row_of, sizes))


def _broadcast_plan(held: Partition, family: GroupFamily, root: int) -> CollectivePlan:
    """Members read their root's row, other ranks their own."""
    roots = np.array([group[root] for group in family.groups])
    rows = held.row_of[np.where(family.members, roots[family.index], np.arange(family.world))]
    used, inverse = np.unique(rows[rows >= 0], return_inverse=True)
    row_of = np.full(family.world, NOWHERE)
    row_of[rows >= 0] = inverse.reshape(-1)
    _, sizes = np.unique(held.cell_of[used], return_counts=True)
    return CollectivePlan((), tuple(rows_by_cell(held, used)), partition(row_of, sizes.tolist()))


def rows_by_cell(held: Partition, rows: Array) -> list[tuple[int, RowIndex]]:
    """For each cell with some of these rows of a partition, sorted and different: the cell, and their index in it."""
    cells = held.cell_of[rows]
    return [(int(cell), row_index(rows[cells == cell] - held.starts[cell])) for cell in np.unique(cells)]
