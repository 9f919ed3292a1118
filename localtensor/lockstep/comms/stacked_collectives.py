"""Collectives on stacks: all groups at once, each different value once.

The arithmetic is that of layout/reductions.py and the meaning that of collectives/reference.py, to the bit; what is new is that equal
operands are met once.  The operands are a stack of rows and `ids`, the row of each member of each group, int64 of
shape [groups, members].  What is to be done with the rows depends on `ids` alone: a plan says it, and can be kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from localtensor.errors import NotInLockstep
from localtensor.layout.reductions import IN_A_ROW, Op, divided, fold, premultiplied
from localtensor.lockstep.values.partition import NOWHERE, Partition, partition

# The groups of one collective, all of them: while one rank is in one of them, lockstep serves them at once.


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class Family:
    """Disjoint groups of ranks, each in group order: any groups, not only those along an axis of a mesh.

    `index` is the group of each rank and `position` its place there, both int64 of shape [world], -1 for ranks that
    are in none; `members` says which ranks are in one, `everybody` whether all are.  `matrix` has a row for each
    group if they are of one size, else it is None.
    """

    groups: tuple[tuple[int, ...], ...]
    world: int
    index: np.ndarray[Any, Any]
    position: np.ndarray[Any, Any]
    matrix: np.ndarray[Any, Any] | None
    members: np.ndarray[Any, Any]
    everybody: bool

    def group_of(self, rank: int) -> tuple[int, ...]:
        """The group that a rank is in; empty if it is in none."""
        return self.groups[int(self.index[rank])] if self.index[rank] >= 0 else ()

    def sizes(self) -> Any:
        """How many ranks the group of each rank has: int64 of shape [world], -1 for ranks that are in none."""
        sizes = np.array([len(group) for group in self.groups])
        return np.where(self.members, sizes[self.index], -1)

    def __repr__(self) -> str:
        return f"Family({len(self.groups)} groups, {self.world} ranks)"


@lru_cache(1024)
def family(groups: tuple[tuple[int, ...], ...], world: int) -> Family:
    """The family of these groups.

    >>> family(((0, 2), (1, 3)), 4).position.tolist()
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
    return Family(groups, world, index, position, matrix, members, bool(members.all()))


def of_lists(groups: Sequence[Sequence[int]], world: int) -> Family:
    """The family of groups given as lists."""
    return family(tuple(tuple(int(rank) for rank in group) for group in groups), world)


@lru_cache(1024)
def one_size(whole: Family) -> tuple[Family, ...]:
    """The same groups, those of one size together, so that each part has a matrix."""
    if whole.matrix is not None:
        return (whole,)
    sizes: dict[int, list[tuple[int, ...]]] = {}
    for group in whole.groups:
        sizes.setdefault(len(group), []).append(group)
    return tuple(family(tuple(groups), whole.world) for groups in sizes.values())


@lru_cache(1024)
def within(whole: Family, kind: Partition) -> Family:
    """Those of the groups whose ranks hold something in a partition.  Raises `NotInLockstep` if a group is cut in two."""
    inside = kind.row_of >= 0
    some = [group for group in whole.groups if inside[list(group)].any()]
    if not some or not all(inside[list(group)].all() for group in some):
        raise NotInLockstep("a collective", "some ranks of a group come to it in another way than the others")
    return family(tuple(some), whole.world)


Ids = np.ndarray[Any, Any]
Pick = slice | Tensor  # which rows of a stack; a slice where it can be, for that is a view


class Level(NamedTuple):
    """One step of a fold: neighbours, left and right, and those that have no neighbour yet."""

    left: Pick
    right: Pick
    rest: Pick | None


@dataclass(frozen=True, slots=True, eq=False)
class IndexPlan:
    """Which rows are taken, after the levels of a fold; `places` is the resulting row of each group."""

    rows: int
    places: Ids
    last: Pick
    levels: tuple[Level, ...]
    members: int


def pick(ids: Any) -> Pick:
    """The rows of these numbers.

    >>> pick([1, 3, 5]), pick([1, 3, 4])
    (slice(1, 6, 2), tensor([1, 3, 4]))
    """
    ids = np.ascontiguousarray(ids).reshape(-1)
    if len(ids) == 1:
        return slice(int(ids[0]), int(ids[0]) + 1, 1)
    step = int(ids[1] - ids[0])
    if step > 0 and (np.diff(ids) == step).all():
        return slice(int(ids[0]), int(ids[-1]) + 1, step)
    return torch.from_numpy(ids.copy())


def taken(x: Tensor, rows: Pick) -> Tensor:
    """Those rows of a stack."""
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows.to(x.device))


def fold_plan(ids: Ids) -> IndexPlan:
    """In the order of `fold_order.by_pairs`; a pair that occurs twice is folded once.

    So ranks with equal values cost next to nothing.
    """
    members, levels = ids.shape[1], []
    while ids.shape[1] > 1:
        even = ids.shape[1] // 2 * 2 if ids.shape[1] > IN_A_ROW else 2
        left, right = ids[:, 0:even:2], ids[:, 1:even:2]
        many = int(ids.max()) + 1
        codes, inverse = np.unique(left * many + right, return_inverse=True)
        next_ids, rest = inverse.reshape(ids.shape[0], even // 2), None
        if even < ids.shape[1]:
            alone, places = np.unique(ids[:, even:], return_inverse=True)
            later = places.reshape(ids.shape[0], -1) + len(codes)
            next_ids, rest = np.concatenate([next_ids, later], 1), pick(alone)
        levels.append(Level(pick(codes // many), pick(codes % many), rest))
        ids = next_ids
    rows, places = np.unique(ids[:, 0], return_inverse=True)
    return IndexPlan(len(rows), places.reshape(-1), pick(rows), tuple(levels), members)


def table_plan(ids: Ids) -> IndexPlan:
    """All members' rows for each group; groups with the same have them once.  `rows` are different groups here."""
    found, places = np.unique(ids, axis=0, return_inverse=True)
    return IndexPlan(len(found), places.reshape(-1), pick(found), (), ids.shape[1])


def reduced(x: Tensor, plan: IndexPlan, op: Op) -> Tensor:
    """What the groups fold into, a row for each different result."""
    op, x = premultiplied(op, x)
    pair = "sum" if op == "avg" else op
    for left, right, rest in plan.levels:
        done = fold([taken(x, left), taken(x, right)], pair)
        x = done if rest is None else torch.cat([done, taken(x, rest)])
    x = taken(x, plan.last)
    return divided(x, plan.members) if op == "avg" else x


def gathered(x: Tensor, plan: IndexPlan) -> Tensor:
    """All members' tensors one behind the other, along a new dim 1; a row for each different group."""
    return taken(x, plan.last).reshape(plan.rows, plan.members, *x.shape[1:])


def exchanged(x: Tensor, plan: IndexPlan) -> Tensor:
    """Each member's piece for each other, dim 1 of x being the pieces: rows [groups * members, members, ...]."""
    members, shape = plan.members, x.shape[2:]
    pieces = taken(x, plan.last).reshape(plan.rows, members, members, *shape).transpose(1, 2)
    return pieces.reshape(plan.rows * members, members, *shape)


def of_members(plan: IndexPlan) -> Ids:
    """The row of each member, where each different group has a row for each of its members."""
    return plan.places[:, None] * plan.members + np.arange(plan.members)


# Who does what in a collective, as integers: which rows meet, and which rank reads which row of the result.
#
# Worked out once for a partition and a family, and kept.

_MOST_KEPT = 4096


class Spot(NamedTuple):
    """Groups of one size whose members bring rows of one cell."""

    cell: int
    ids: Any  # the row of each member in that cell: int64 of shape [groups, members]
    ranks: Any  # of the same shape


class Recipe(NamedTuple):
    """The plans, each with its cell; what ranks in no group keep; and who reads which row of the results."""

    steps: tuple[tuple[int, IndexPlan], ...]
    kept: tuple[tuple[int, Pick], ...]
    held: Partition


@lru_cache(_MOST_KEPT)
def spots(held: Partition, whole: Family) -> tuple[Spot, ...] | None:
    """What the members of all groups bring, who all hold something; None if shapes differ within a group."""
    found = []
    for part in one_size(whole):
        rows = held.row_of[part.matrix]
        cell_of = held.cell_of[rows]
        if (cell_of != cell_of[:, :1]).any():
            return None
        for cell in np.unique(cell_of[:, 0]):
            here = cell_of[:, 0] == cell
            found.append(Spot(int(cell), rows[here] - held.starts[cell], part.matrix[here]))  # type: ignore[index]
    return tuple(found)


def by_fold(spot: Spot, root: int) -> tuple[IndexPlan, int, Any, Any]:
    """All members read what their group folds into."""
    plan = fold_plan(spot.ids)
    return plan, plan.rows, plan.places[:, None], spot.ranks


def to_root(spot: Spot, root: int) -> tuple[IndexPlan, int, Any, Any]:
    """The root alone reads what its group folds into."""
    plan = fold_plan(spot.ids)
    return plan, plan.rows, plan.places[:, None], spot.ranks[:, root : root + 1]


def dealt(spot: Spot, root: int) -> tuple[IndexPlan, int, Any, Any]:
    """Each member reads its piece of what its group folds into."""
    plan = fold_plan(spot.ids)
    return plan, plan.rows * plan.members, of_members(plan), spot.ranks


def together(spot: Spot, root: int) -> tuple[IndexPlan, int, Any, Any]:
    """All members read the table of their group's rows."""
    plan = table_plan(spot.ids)
    return plan, plan.rows, plan.places[:, None], spot.ranks


def at_root(spot: Spot, root: int) -> tuple[IndexPlan, int, Any, Any]:
    """The root alone reads the table of its group's rows."""
    plan = table_plan(spot.ids)
    return plan, plan.rows, plan.places[:, None], spot.ranks[:, root : root + 1]


def crosswise(spot: Spot, root: int) -> tuple[IndexPlan, int, Any, Any]:
    """Each member reads the pieces that its group's members have for it."""
    plan = table_plan(spot.ids)
    return plan, plan.rows * plan.members, of_members(plan), spot.ranks


Planned = Callable[[Spot, int], tuple[IndexPlan, int, Any, Any]]
"""One of the functions above: from a spot and the root's place to the plan, how many rows it makes, and which of them
is read by which ranks (int64 of one shape, [groups, members] or what spreads to that)."""


@lru_cache(_MOST_KEPT)
def recipe(planned: Planned, root: int, held: Partition, whole: Family, keep: bool) -> Recipe | None:
    """How a collective is done; None if shapes differ within a group."""
    found = spots(held, whole)
    if found is None:
        return None
    row_of, sizes, steps, kept, start = np.full(whole.world, NOWHERE), [], [], [], 0
    for spot in found:
        plan, rows, ids, ranks = planned(spot, root)
        row_of[ranks] = start + ids
        steps.append((spot.cell, plan))
        sizes.append(rows)
        start += rows
    rest = (row_of < 0) & (held.row_of >= 0) if keep else np.zeros(0, bool)
    if rest.any():
        used, inverse = np.unique(held.row_of[rest], return_inverse=True)
        row_of[rest] = start + inverse
        for cell in np.unique(held.cell_of[used]):
            rows = used[held.cell_of[used] == cell] - held.starts[cell]
            kept.append((int(cell), pick(rows)))
            sizes.append(len(rows))
    return Recipe(tuple(steps), tuple(kept), partition(row_of, sizes))
