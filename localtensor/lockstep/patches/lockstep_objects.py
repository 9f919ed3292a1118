"""Python objects that travel between ranks in lockstep: one object for all ranks, whose parts may differ by rank.

Tensors in it, and ints that differ by rank, are taken from the sender's rank; the rest is the same on all ranks, and
is copied by pickle as torch.distributed does it.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree

from localtensor.errors import NotInLockstep
from localtensor.lockstep.comms import collectives as exchange
from localtensor.lockstep.comms.outcomes import value_of
from localtensor.lockstep.dispatch.dispatcher import plainly
from localtensor.lockstep.values.local_tensor import wrap
from localtensor.lockstep.values.rank_int import is_rank_int, rank_int


def as_sent(mode: Any, thing: Any, source: Any) -> Any:
    """What each rank gets of an object from the rank `source[rank]`; nothing where that is negative."""
    return picked(mode, [thing], np.where(source >= 0, 0, -1), source)


def picked(mode: Any, things: Sequence[Any], number: Any, source: Any) -> Any:
    """Each rank gets the object of this number, as its source has it.

    Raises `NotInLockstep` if that is not one object for all ranks, apart from tensors and ints.
    """
    flat = [_pytree.tree_flatten(thing, is_leaf=is_rank_int) for thing in things]
    used = [int(one) for one in np.unique(number[number >= 0])]
    structures = {str(flat[index][1]) for index in used}
    if len(structures) > 1:
        raise NotInLockstep("an object collective", "ranks get objects that are built differently")
    leaves = [_leaf(mode, [each[0][at] for each in flat], number, source, used) for at in range(len(flat[used[0]][0]))]
    return _pytree.tree_unflatten(leaves, flat[used[0]][1])


def _leaf(mode: Any, leaves: list[Any], number: Any, source: Any, used: list[int]) -> Any:
    first = leaves[used[0]]
    if all(isinstance(leaves[index], Tensor) for index in used):
        with plainly():
            values = [value_of(mode, x if isinstance(x, Tensor) else first) for x in leaves]
            return wrap(*exchange.combined(values, number, source), mode)
    if all(type(leaves[index]) in (int, torch.SymInt) for index in used):
        table = [x.node.values if is_rank_int(x) else np.full(mode.world, x if type(x) is int else 0) for x in leaves]
        held = (number >= 0) & (mode.everyone.row_of >= 0)
        return rank_int(np.array(table)[np.maximum(number, 0), np.maximum(source, 0)], None if held.all() else held)
    copies = [pickle.dumps(leaves[index]) for index in used]
    if len(set(copies)) > 1:
        raise NotInLockstep("an object collective", f"ranks get different objects: {first!r} and others")
    return pickle.loads(copies[0])
