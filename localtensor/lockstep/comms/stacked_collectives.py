"""Collectives on stacks: all groups at once, each different value once.

The arithmetic is that of layout/reductions.py and the meaning that of collectives/reference.py, to the bit; what is new is that equal
operands are met once.  The operands are a stack of rows and `ids`, the row of each member of each group, int64 of
shape [groups, members].  What is to be done with the rows depends on `ids` alone: a plan says it, and can be kept.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from localtensor.layout.fold_order import IN_A_ROW
from localtensor.layout.reductions import Op, divided, fold, premultiplied

Ids = np.ndarray[Any, Any]
Pick = slice | Tensor  # which rows of a stack; a slice where it can be, for that is a view


class Level(NamedTuple):
    """One step of a fold: neighbours, left and right, and those that have no neighbour yet."""

    left: Pick
    right: Pick
    rest: Pick | None


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
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


def fold_plan(ids: Ids) -> Plan:
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
    return Plan(len(rows), places.reshape(-1), pick(rows), tuple(levels), members)


def table_plan(ids: Ids) -> Plan:
    """All members' rows for each group; groups with the same have them once.  `rows` are different groups here."""
    found, places = np.unique(ids, axis=0, return_inverse=True)
    return Plan(len(found), places.reshape(-1), pick(found), (), ids.shape[1])


def reduced(x: Tensor, plan: Plan, op: Op) -> Tensor:
    """What the groups fold into, a row for each different result."""
    op, x = premultiplied(op, x)
    pair = "sum" if op == "avg" else op
    for left, right, rest in plan.levels:
        done = fold([taken(x, left), taken(x, right)], pair)
        x = done if rest is None else torch.cat([done, taken(x, rest)])
    x = taken(x, plan.last)
    return divided(x, plan.members) if op == "avg" else x


def gathered(x: Tensor, plan: Plan) -> Tensor:
    """All members' tensors one behind the other, along a new dim 1; a row for each different group."""
    return taken(x, plan.last).reshape(plan.rows, plan.members, *x.shape[1:])


def exchanged(x: Tensor, plan: Plan) -> Tensor:
    """Each member's piece for each other, dim 1 of x being the pieces: rows [groups * members, members, ...]."""
    members, shape = plan.members, x.shape[2:]
    pieces = taken(x, plan.last).reshape(plan.rows, members, members, *shape).transpose(1, 2)
    return pieces.reshape(plan.rows * members, members, *shape)


def of_members(plan: Plan) -> Ids:
    """The row of each member, where each different group has a row for each of its members."""
    return plan.places[:, None] * plan.members + np.arange(plan.members)
