"""Kernels for each kind of collectives/c10d_table.py: all groups at once, or rank by rank as for rank threads.

A kernel of `_QUICK` returns None for a call that it does not cover: then each rank's own tensors go to the function
that serves rank threads, which computes the result or raises its error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from localtensor.collectives.c10d_table import Brought, Served
from localtensor.collectives.rendezvous import Contribution, Group
from localtensor.errors import NotHeld
from localtensor.lockstep.comms import collectives
from localtensor.lockstep.comms.collectives import Value, value_of
from localtensor.lockstep.comms.stacked_collectives import Family


def results(mode: Any, served: Served, brought: Brought, whole: Family) -> Sequence[Value]:
    """The new value of each written buffer."""
    quick = _QUICK.get(served.kind)
    found = None if quick is None else quick(mode, brought, whole)
    return found if found is not None else by_ranks(mode, served, brought, whole)


# -- kernels on stacks, by kind


def _all_reduce(mode: Any, brought: Brought, whole: Family) -> list[Value]:
    return [collectives.all_reduce(value_of(mode, brought.reads), whole, brought.op)]


def _all_reduce_coalesced(mode: Any, brought: Brought, whole: Family) -> list[Value] | None:
    if len({x.dtype for x in brought.reads}) != 1:
        return None
    return [collectives.all_reduce(value_of(mode, x), whole, brought.op) for x in brought.reads]


def _reduce(mode: Any, brought: Brought, whole: Family) -> list[Value]:
    return [collectives.reduce(value_of(mode, brought.reads), whole, brought.op, brought.root or 0)]


def _broadcast(mode: Any, brought: Brought, whole: Family) -> list[Value]:
    return [collectives.broadcast(value_of(mode, brought.reads), whole, brought.root or 0)]


def _all_gather(mode: Any, brought: Brought, whole: Family) -> list[Value]:
    return collectives.pieces(collectives.all_gather(value_of(mode, brought.reads), whole), len(brought.writes))


def _all_gather_coalesced(mode: Any, brought: Brought, whole: Family) -> list[Value]:
    many = len(brought.writes) // len(brought.reads)
    columns = [collectives.pieces(collectives.all_gather(value_of(mode, x), whole), many) for x in brought.reads]
    return [column[source] for source in range(many) for column in columns]


def _all_gather_into_tensor(mode: Any, brought: Brought, whole: Family) -> list[Value]:
    return [collectives.joined_rows(collectives.all_gather(value_of(mode, brought.reads), whole))]


def _gather(mode: Any, brought: Brought, whole: Family) -> list[Value] | None:
    if brought.reads.is_complex():
        return None
    return collectives.pieces(
        collectives.gather(value_of(mode, brought.reads), whole, brought.root or 0), len(brought.writes)
    )


def _scatter(mode: Any, brought: Brought, whole: Family) -> list[Value] | None:
    found = from_roots(_values(mode, brought.reads), whole, brought.root or 0)
    return None if found is None else [found]


def from_roots(values: Sequence[Value], whole: Family, root: int) -> Value | None:
    """The i-th member holds its root's tensor of the i-th value.

    None if shapes or dtypes differ, a tensor is not contiguous, or there is not one value for each member.
    """
    roots = [group[root] for group in whole.groups]
    alike = len({(_shape(value), value.cells[0].dtype) for value in values}) == 1 and all(
        map(collectives.is_dense, values)
    )
    if not alike or not _one_each(values, whole) or any((value.held.row_of[roots] < 0).any() for value in values):
        return None
    return collectives.of_roots(values, whole, root)


def _shape(value: Value) -> Any:
    """The shape that all ranks have; an id that equals no shape where they differ."""
    pairs = zip(value.cells, value.held.sizes, strict=True)
    shapes = {tuple(cell.shape[rows > 1 :]) for cell, rows in pairs}
    return shapes.pop() if len(shapes) == 1 else id(value)


def _one_each(values: Sequence[Value], whole: Family) -> bool:
    return whole.matrix is not None and whole.matrix.shape[1] == len(values)


def _values(mode: Any, tensors: Sequence[Tensor]) -> list[Value]:
    return [value_of(mode, x) for x in tensors]


def _reduce_scatter(mode: Any, brought: Brought, whole: Family) -> list[Value] | None:
    values = _values(mode, brought.reads)
    if not fit_to_deal(values, whole):
        return None
    reduced = [collectives.all_reduce(value, whole, brought.op) for value in values]
    return [collectives.combined(reduced, whole.position)]


def fit_to_deal(values: Sequence[Value], whole: Family) -> bool:
    """Whether there is one value for each member, all contiguous and of one dtype."""
    one_dtype = len({value.cells[0].dtype for value in values}) == 1
    return _one_each(values, whole) and one_dtype and all(map(collectives.is_dense, values))


def _reduce_scatter_tensor(mode: Any, brought: Brought, whole: Family) -> list[Value]:
    return [collectives.reduce_scatter(value_of(mode, brought.reads), whole, brought.op)]


def _all_to_all(mode: Any, brought: Brought, whole: Family) -> list[Value] | None:
    return crosswise(_values(mode, brought.reads), whole)


def crosswise(values: Sequence[Value], whole: Family) -> list[Value] | None:
    """Member j gets as its i-th tensor the j-th of member i; None if there is not one tensor for each member."""
    if not _one_each(values, whole) or len({value.cells[0].dtype for value in values}) > 1:
        return None
    for value in values:
        collectives.check_held("all_to_all", value.held, whole)
    columns = [np.where(whole.members, whole.matrix[whole.index, j], 0) for j in range(len(values))]  # type: ignore[index]
    return [collectives.combined(values, whole.position, column) for column in columns]


def _all_to_all_single(mode: Any, brought: Brought, whole: Family) -> list[Value]:
    return [
        collectives.all_to_all_single(value_of(mode, brought.reads), whole, brought.input_splits, brought.output_splits)
    ]


_Quick = Callable[[Any, Brought, Family], "list[Value] | None"]


def _each(one: _Quick) -> _Quick:
    """The coalesced kernel: the kernel `one` for each tensor."""

    def quick(mode: Any, brought: Brought, whole: Family) -> list[Value] | None:
        found = [one(mode, replace(brought, reads=x), whole) for x in brought.reads]
        return [values[0] for values in found if values]

    return quick


_QUICK: dict[str, _Quick] = {
    "all_reduce": _all_reduce,
    "all_reduce_coalesced": _all_reduce_coalesced,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "all_gather_coalesced": _all_gather_coalesced,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "all_gather_into_tensor_coalesced": _each(_all_gather_into_tensor),
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "reduce_scatter_tensor_coalesced": _each(_reduce_scatter_tensor),
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
}


# -- rank by rank, as for rank threads


def by_ranks(mode: Any, served: Served, brought: Brought, whole: Family) -> list[Value]:
    """The function that serves rank threads, on each rank's own tensors, group by group."""
    outputs: list[dict[int, Tensor]] = [{} for _ in brought.writes]
    for number, ranks in enumerate(whole.groups):
        group = Group(str(number), ranks)
        parts = [_part(mode, served, brought, rank, group) for rank in ranks]
        for rank, mine in zip(ranks, served.compute(parts), strict=True):
            for output, x in zip(outputs, mine, strict=False):  # only the root gets a gathered list
                output[rank] = x
    return [collectives.of_ranks(output, mode.world) for output in outputs]


def _part(mode: Any, served: Served, brought: Brought, rank: int, group: Group) -> Contribution:
    reads = _held_on(mode, served.kind, brought.reads, rank)
    if served.kind == "scatter" and rank != group.ranks[brought.root or 0]:
        reads = []
    part = Contribution(rank, served.kind, group, reads, (), None, op=brought.op)
    part.root = None if brought.root is None else group.ranks[brought.root]
    return part


def _held_on(mode: Any, call: str, reads: Any, rank: int) -> Any:
    if not isinstance(reads, Tensor):
        return [_held_on(mode, call, each, rank) for each in reads]
    value = value_of(mode, reads)
    if value.held.row_of[rank] < 0:
        raise NotHeld(call, [rank], np.flatnonzero(value.held.row_of >= 0).tolist())
    return value.on(rank)
