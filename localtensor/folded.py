"""Collectives on stacks: all groups at once, each different value once.

The arithmetic is that of reductions.py and the meaning that of collectives.py, to the bit; what is new is that equal
operands are met once.  A value is a stack `x` of shape [rows, *shape] and `ids`, the row of each member of each group,
int64 of shape [groups, members]; results are again rows and who reads which.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from localtensor.reductions import Op, fold, premultiplied

Ids = np.ndarray[Any, Any]


def _distinct(keys: Ids) -> tuple[Ids, Ids]:
    """The different rows of a table, and which of them each row is."""
    if keys.ndim == 1:
        return np.unique(keys, return_inverse=True)
    if len(keys) == 1:
        return keys, np.zeros(1, np.int64)
    found, inverse = np.unique(keys, axis=0, return_inverse=True)
    return found, inverse.reshape(-1)


def _rows(x: Tensor, ids: Any) -> Tensor:
    """Some rows of a stack, which may be all of it."""
    ids = np.ascontiguousarray(ids).reshape(-1)
    if len(ids) == x.shape[0] and (ids == np.arange(len(ids))).all():
        return x
    return x.index_select(0, torch.from_numpy(ids).to(x.device))


def reduced(x: Tensor, ids: Ids, op: Op) -> tuple[Tensor, Ids]:
    """What each group folds into: rows, and the row of each group.

    Neighbours are folded in pairs, then their results, as `reductions.fold` does; a pair that occurs twice is folded
    once, so that ranks with equal values cost next to nothing.
    """
    op, x = premultiplied(op, x)
    members = ids.shape[1]
    while ids.shape[1] > 1:
        even = ids.shape[1] // 2 * 2
        pairs = np.stack([ids[:, 0:even:2], ids[:, 1:even:2]], -1).reshape(-1, 2)
        codes, inverse = np.unique(pairs[:, 0] * x.shape[0] + pairs[:, 1], return_inverse=True)
        done = fold([_rows(x, codes // x.shape[0]), _rows(x, codes % x.shape[0])], "sum" if op == "avg" else op)
        next_ids = inverse.reshape(ids.shape[0], even // 2)
        if even < ids.shape[1]:  # the last one has no neighbour yet
            rest, places = np.unique(ids[:, -1], return_inverse=True)
            next_ids = np.concatenate([next_ids, places.reshape(-1, 1) + done.shape[0]], 1)
            done = torch.cat([done, _rows(x, rest)])
        x, ids = done, next_ids
    rows, places = np.unique(ids[:, 0], return_inverse=True)
    x = _rows(x, rows)
    return x / members if op == "avg" else x, places.reshape(-1)


def gathered(x: Tensor, ids: Ids) -> tuple[Tensor, Ids]:
    """All members' tensors one behind the other, along a new dim 0 of the results."""
    keys, places = _distinct(ids)
    rows = _rows(x, keys)
    return rows.reshape(len(keys), ids.shape[1], *x.shape[1:]), places


def exchanged(x: Tensor, ids: Ids) -> tuple[Tensor, Ids]:
    """Each member's piece for each other, dim 1 of x being the pieces: result [rows, members, ...], ids for members."""
    keys, places = _distinct(ids)
    groups, members = keys.shape
    pieces = _rows(x, keys).reshape(groups, members, members, *x.shape[2:]).transpose(1, 2)
    whole = pieces.reshape(groups * members, members, *x.shape[2:])
    return whole, places[:, None] * members + np.arange(members)


def dealt(x: Tensor, places: Ids, members: int) -> tuple[Tensor, Ids]:
    """Each group's row, dim 0 of which are the members' pieces, cut up: rows of pieces, and the row of each member."""
    cut = x.reshape(x.shape[0] * members, *x.shape[2:])
    return cut, places[:, None] * members + np.arange(members)
