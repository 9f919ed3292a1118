"""Who does what in a collective, as integers: which rows meet, and which rank reads which row of the result.

Worked out once for a partition and a family, and kept.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from localtensor.lockstep.comms import stacked_collectives as folded
from localtensor.lockstep.comms.group_families import Family, one_size
from localtensor.lockstep.comms.stacked_collectives import Pick, Plan, pick
from localtensor.lockstep.values.partition import NOWHERE, Partition, partition

_MOST_KEPT = 4096


class Spot(NamedTuple):
    """Groups of one size whose members bring rows of one cell."""

    cell: int
    ids: Any  # the row of each member in that cell: int64 of shape [groups, members]
    ranks: Any  # of the same shape


class Recipe(NamedTuple):
    """The plans, each with its cell; what ranks in no group keep; and who reads which row of the results."""

    steps: tuple[tuple[int, Plan], ...]
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


def by_fold(spot: Spot, root: int) -> tuple[Plan, int, Any, Any]:
    """All members read what their group folds into."""
    plan = folded.fold_plan(spot.ids)
    return plan, plan.rows, plan.places[:, None], spot.ranks


def to_root(spot: Spot, root: int) -> tuple[Plan, int, Any, Any]:
    """The root alone reads what its group folds into."""
    plan = folded.fold_plan(spot.ids)
    return plan, plan.rows, plan.places[:, None], spot.ranks[:, root : root + 1]


def dealt(spot: Spot, root: int) -> tuple[Plan, int, Any, Any]:
    """Each member reads its piece of what its group folds into."""
    plan = folded.fold_plan(spot.ids)
    return plan, plan.rows * plan.members, folded.of_members(plan), spot.ranks


def together(spot: Spot, root: int) -> tuple[Plan, int, Any, Any]:
    """All members read the table of their group's rows."""
    plan = folded.table_plan(spot.ids)
    return plan, plan.rows, plan.places[:, None], spot.ranks


def at_root(spot: Spot, root: int) -> tuple[Plan, int, Any, Any]:
    """The root alone reads the table of its group's rows."""
    plan = folded.table_plan(spot.ids)
    return plan, plan.rows, plan.places[:, None], spot.ranks[:, root : root + 1]


def crosswise(spot: Spot, root: int) -> tuple[Plan, int, Any, Any]:
    """Each member reads the pieces that its group's members have for it."""
    plan = folded.table_plan(spot.ids)
    return plan, plan.rows * plan.members, folded.of_members(plan), spot.ranks


Planned = Callable[[Spot, int], tuple[Plan, int, Any, Any]]
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
