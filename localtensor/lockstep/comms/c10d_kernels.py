"""Kernels for each kind of collectives/c10d_table.py: all groups at once, or rank by rank as for rank threads.

A kernel of `_KERNELS` returns None for a call that it does not cover: then each rank's own tensors go to the function
that serves rank threads, which computes the result or raises its error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from localtensor.collectives.argument_checks import Reads
from localtensor.collectives.c10d_table import CallArguments, CollectiveOp
from localtensor.collectives.rendezvous import Contribution, Group
from localtensor.errors import NotHeld
from localtensor.lockstep.comms import collectives
from localtensor.lockstep.comms.collectives import StackedValue, stacked, stacked_value
from localtensor.lockstep.comms.stacked_collectives import GroupFamily
from localtensor.lockstep.values.local_tensor import LocalTensor, Mode


def run_kernel(mode: Mode, served: CollectiveOp, brought: CallArguments, family: GroupFamily) -> Sequence[StackedValue]:
    """The new value of each written buffer."""
    one = _OF_EACH_TENSOR.get(served.kind)
    if one is not None:
        reads, op, root = brought.reads, brought.op, brought.root or 0
        if type(reads) is LocalTensor:
            return [one(stacked((reads._cells, reads._partition)), family, op, root)]
        if isinstance(reads, Tensor):
            return [one(stacked_value(mode, reads), family, op, root)]
        if served.kind != "all_reduce_coalesced" or len({x.dtype for x in reads}) == 1:
            return [one(stacked_value(mode, x), family, op, root) for x in reads]
    quick = _KERNELS.get(served.kind)
    found = None if quick is None else quick(mode, brought, family)
    return found if found is not None else run_rank_by_rank(mode, served, brought, family)


# -- kernels on stacks, by kind


def _all_gather(mode: Mode, brought: CallArguments, family: GroupFamily) -> list[StackedValue]:
    return collectives.unbind_value(collectives.all_gather(stacked_value(mode, brought.reads), family))


def _all_gather_coalesced(mode: Mode, brought: CallArguments, family: GroupFamily) -> list[StackedValue]:
    columns = [collectives.unbind_value(collectives.all_gather(stacked_value(mode, x), family)) for x in brought.reads]
    return [column[source] for source in range(len(columns[0])) for column in columns]


def _gather(mode: Mode, brought: CallArguments, family: GroupFamily) -> list[StackedValue] | None:
    if brought.reads.is_complex():
        return None
    return collectives.unbind_value(
        collectives.gather(stacked_value(mode, brought.reads), family, root=brought.root or 0)
    )


def _scatter(mode: Mode, brought: CallArguments, family: GroupFamily) -> list[StackedValue] | None:
    found = scatter_lists(_values(mode, brought.reads), family, brought.root or 0)
    return None if found is None else [found]


def scatter_lists(values: Sequence[StackedValue], family: GroupFamily, root: int) -> StackedValue | None:
    """The i-th member holds its root's tensor of the i-th value.

    None if shapes or dtypes differ, a tensor is not contiguous, or there is not one value for each member.
    """
    roots = [group[root] for group in family.groups]
    alike = len({(_shape(value), value.cells[0].dtype) for value in values}) == 1 and all(
        map(collectives.is_contiguous, values)
    )
    if not alike or not _one_each(values, family) or any((value.held.row_of[roots] < 0).any() for value in values):
        return None
    return collectives.scatter_from_roots(values, family, root)


def _shape(value: StackedValue) -> tuple[int, ...] | int:
    """The shape that all ranks have; an id that equals no shape where they differ."""
    pairs = zip(value.cells, value.held.sizes, strict=True)
    shapes = {tuple(cell.shape[rows > 1 :]) for cell, rows in pairs}
    return shapes.pop() if len(shapes) == 1 else id(value)


def _one_each(values: Sequence[StackedValue], family: GroupFamily) -> bool:
    return family.matrix is not None and family.matrix.shape[1] == len(values)


def _values(mode: Mode, tensors: Sequence[Tensor]) -> list[StackedValue]:
    return [stacked_value(mode, x) for x in tensors]


def _reduce_scatter(mode: Mode, brought: CallArguments, family: GroupFamily) -> list[StackedValue] | None:
    values = _values(mode, brought.reads)
    if not can_reduce_scatter(values, family):
        return None
    reduced = [collectives.all_reduce(value, family, brought.op) for value in values]
    return [collectives.select(reduced, family.position)]


def can_reduce_scatter(values: Sequence[StackedValue], family: GroupFamily) -> bool:
    """Whether there is one value for each member, all contiguous and of one dtype."""
    one_dtype = len({value.cells[0].dtype for value in values}) == 1
    return _one_each(values, family) and one_dtype and all(map(collectives.is_contiguous, values))


def exchange_lists(values: Sequence[StackedValue], family: GroupFamily) -> list[StackedValue] | None:
    """Member j gets as its i-th tensor the j-th of member i; None if there is not one tensor for each member."""
    if not _one_each(values, family) or len({value.cells[0].dtype for value in values}) > 1:
        return None
    for value in values:
        collectives.check_all_hold("all_to_all", value.held, family)
    columns = [np.where(family.members, family.matrix[family.index, j], 0) for j in range(len(values))]  # type: ignore[index]
    return [collectives.select(values, family.position, column) for column in columns]


# Of one tensor, or of each tensor of a coalesced collective: f(value, family, op, root).
_OF_EACH_TENSOR: dict[str, Callable[..., StackedValue]] = {
    "all_reduce": collectives.all_reduce,
    "all_reduce_coalesced": collectives.all_reduce,
    "reduce": collectives.reduce,
    "broadcast": collectives.broadcast,
    "all_gather_into_tensor": collectives.all_gather_into_tensor,
    "all_gather_into_tensor_coalesced": collectives.all_gather_into_tensor,
    "reduce_scatter_tensor": collectives.reduce_scatter,
    "reduce_scatter_tensor_coalesced": collectives.reduce_scatter,
}

_KERNELS: dict[str, Callable[[Any, CallArguments, GroupFamily], list[StackedValue] | None]] = {
    "all_gather": _all_gather,
    "all_gather_coalesced": _all_gather_coalesced,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": lambda mode, brought, family: exchange_lists(_values(mode, brought.reads), family),
    "all_to_all_single": lambda mode, brought, family: [
        collectives.all_to_all_single(
            stacked_value(mode, brought.reads), family, brought.input_splits, brought.output_splits
        )
    ],
}


# -- rank by rank, as for rank threads


def run_rank_by_rank(
    mode: Mode, served: CollectiveOp, brought: CallArguments, family: GroupFamily
) -> list[StackedValue]:
    """The function that serves rank threads, on each rank's own tensors, group by group."""
    outputs: list[dict[int, Tensor]] = [{} for _ in brought.writes]
    for number, ranks in enumerate(family.groups):
        group = Group(str(number), ranks)
        parts = [_contribution(mode, served, brought, rank, group) for rank in ranks]
        for rank, mine in zip(ranks, served.compute(parts), strict=True):
            for output, x in zip(outputs, mine, strict=False):  # only the root gets a gathered list
                output[rank] = x
    return [collectives.value_of_ranks(output, mode.world) for output in outputs]


def _contribution(mode: Mode, served: CollectiveOp, brought: CallArguments, rank: int, group: Group) -> Contribution:
    reads = _held_on(mode, served.kind, brought.reads, rank)
    if served.kind == "scatter" and rank != group.ranks[brought.root or 0]:
        reads = []
    part = Contribution(rank, served.kind, group, reads, (), None, op=brought.op)
    part.root = None if brought.root is None else group.ranks[brought.root]
    return part


def _held_on(mode: Mode, call: str, reads: Reads, rank: int) -> object:
    if not isinstance(reads, Tensor):
        return [_held_on(mode, call, each, rank) for each in reads]
    value = stacked_value(mode, reads)
    if value.held.row_of[rank] < 0:
        raise NotHeld(call, [rank], np.flatnonzero(value.held.row_of >= 0).tolist())
    return value.on(rank)
