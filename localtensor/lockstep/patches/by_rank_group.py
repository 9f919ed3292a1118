"""One kind of ranks at a time: for functions that branch on an int which differs between ranks.

Ranks that have the same ints are of one kind, and there are few kinds: of the chunks of a dim, all but the last ones
are of one size.  For each kind the function runs once, in the mode narrowed to its ranks, with plain ints; stacks
stay stacks.  It may communicate, in groups that lie within a kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils import _python_dispatch

from localtensor.errors import NotInLockstep, RanksDiverge
from localtensor.lockstep.comms.collectives import Value, combined
from localtensor.lockstep.comms.outcomes import value_of
from localtensor.lockstep.comms.stacked_collectives import pick, taken
from localtensor.lockstep.dispatch.dispatcher import plainly
from localtensor.lockstep.values.local_tensor import LocalTensor, wrap
from localtensor.lockstep.values.partition import NOWHERE, Partition, by_value, common, partition
from localtensor.lockstep.values.rank_int import is_rank_int, rank_int
from localtensor.lockstep.values.texts import place_here

# Private part of torch: why it is needed.  Tried on torch 2.13.0 and 2.15.0; read in the sources of 2.11 to 2.14.
PRIVATE = {
    "torch.distributed._functional_collectives.AsyncCollectiveTensor": "a tensor that a collective brings is wrapped",
    "torch.utils._python_dispatch._disable_current_modes": "an op that is done for each kind shows once to other modes",
    "torch.utils._python_dispatch._push_mode": "the same",
    "torch.utils._python_dispatch._pop_mode": "the same",
}

Narrow = Callable[[Any], Any]  # from what all ranks have to what a kind has


def arrived(value: Any) -> Any:
    """The value, waited for if a collective brings it."""
    if isinstance(value, AsyncCollectiveTensor):
        return value.wait()
    if type(value) in (list, tuple):
        return type(value)(arrived(item) for item in value)
    return value


def for_each_kind(mode: Any, ints: Iterable[Any], do: Callable[[Narrow], Any]) -> Any:
    """What `do` gives for each rank; it runs once for all ranks that have the same of these ints.

    It is given a function that takes what all ranks have, tensors and ints, to what the kind has.
    """
    held: Partition | None = None
    for value in ints:
        if is_rank_int(value):
            other = by_value(value.node.values, value.node.held)
            held = other if held is None else common(held, other)
    if held is None:
        return do(lambda value: value)
    found = []
    for row in range(held.rows):
        kind = _of_row(held, row)
        with narrowed(mode, kind), _alone(mode) if row else nullcontext():
            found.append(do(lambda value, kind=kind: _narrow(mode, value, kind)))  # type: ignore[misc]
    return joined(mode, found, held)


@contextmanager
def _alone(mode: Any) -> Iterator[None]:
    """While inside, no other mode sees the ops: a rank does them once, for whichever kind it is of.

    Torch's CommDebugMode, for one, counts what one rank does.
    """
    if torch._C._len_torch_dispatch_stack() < 2:
        yield
        return
    with _python_dispatch._disable_current_modes():
        _python_dispatch._push_mode(mode)
        try:
            yield
        finally:
            _python_dispatch._pop_mode()


@lru_cache(1024)
def _of_row(held: Partition, row: int) -> Partition:
    return partition(np.where(held.row_of == row, 0, NOWHERE), [1])


@contextmanager
def narrowed(mode: Any, kind: Partition) -> Iterator[None]:
    """While inside, the mode has the ranks of this kind only."""
    before = mode.everyone, mode.groups.only
    mode.everyone = mode.groups.only = kind
    try:
        yield
    finally:
        mode.everyone, mode.groups.only = before


def _narrow(mode: Any, value: Any, kind: Partition) -> Any:
    if isinstance(value, LocalTensor):
        with torch._C._DisableTorchDispatch():
            return wrap(*_of_ranks(Value(value._cells, value._partition), kind), mode)
    if is_rank_int(value):
        held = kind.held if value.node.held is None else kind.held & value.node.held
        return rank_int(value.node.values, held)
    if type(value) in (list, tuple, torch.Size):
        return (list if type(value) is list else tuple)(_narrow(mode, item, kind) for item in value)
    return value


def _of_ranks(value: Value, kind: Partition) -> Value:
    """What these ranks hold of it, to be read."""
    rows = np.where(kind.row_of >= 0, value.held.row_of, NOWHERE)
    used, inverse = np.unique(rows[rows >= 0], return_inverse=True)
    row_of = np.full(len(rows), NOWHERE)
    row_of[rows >= 0] = inverse
    cells, sizes = [], []
    for cell in np.unique(value.held.cell_of[used]):
        here = used[value.held.cell_of[used] == cell] - value.held.starts[cell]
        stack = taken(value.stack(int(cell)), pick(here))
        cells.append(stack if len(here) > 1 else stack[0])
        sizes.append(len(here))
    return Value(tuple(cells), partition(row_of, sizes))


def only(mode: Any, x: Any, kind: Partition | None) -> Any:
    """What these ranks have of a tensor, a copy; the tensor itself if None are meant."""
    if kind is None or not isinstance(x, Tensor):
        return x
    with plainly():
        return wrap(*combined([value_of(mode, x)], np.where(kind.row_of >= 0, 0, NOWHERE)), mode)


def joined(mode: Any, found: Sequence[Any], held: Partition) -> Any:
    """One result for each row of a partition, as one value."""
    found = [arrived(one) for one in found]
    first = found[0]
    if isinstance(first, Tensor):
        with torch._C._DisableTorchDispatch():
            return wrap(*combined([value_of(mode, one) for one in found], held.row_of), mode)
    if isinstance(first, list | tuple):
        if len({len(one) for one in found}) > 1:
            raise NotInLockstep("DTensor", "ranks get lists of different lengths")
        items = [joined(mode, column, held) for column in zip(*found, strict=True)]
        return items if isinstance(first, list) else tuple(items)
    if (type(first) is int or is_rank_int(first)) and all(isinstance(one, int | torch.SymInt) for one in found):
        return _one_int(found, held)
    if any(one != first for one in found):
        values = {rank: found[row] for rank, row in enumerate(held.row_of) if row >= 0}
        raise RanksDiverge("DTensor", "", values, place_here())
    return first


def _one_int(found: Sequence[Any], held: Partition) -> Any:
    values = np.zeros(held.world, np.int64)
    for row, one in enumerate(found):
        ranks = held.row_of == row
        values[ranks] = one.node.values[ranks] if is_rank_int(one) else one
    return rank_int(values, held.held)
