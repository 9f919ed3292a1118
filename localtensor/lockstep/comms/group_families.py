"""The groups of one collective, all of them: while one rank is in one of them, lockstep serves them at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from localtensor.errors import NotInLockstep
from localtensor.lockstep.values.partition import Partition


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
