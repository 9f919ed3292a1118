"""Collectives on LocalTensors: each is a function of all ranks' tensors, in every group of ranks at once.

`group` names the ranks: None for all of them; a process group or a DeviceMesh of one axis; (mesh, axis); a list of
ranks; or a list of disjoint lists, where each rank is in its own.  A `root` is a position in its group.  A plain tensor
is the same on every rank.  Results share no memory with inputs.  A rank outside of all groups keeps its tensor if the
result has the shape of the input, and else holds nothing.

Results and errors equal those of localtensor.collectives.reference, to the bit.  Gradients are the true adjoint: each
rank's backward exchanges gradients in turn.  All raise `BadGroup`, `NotHeld`, and `NoMode` outside of any mode.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from localtensor._util.call_sites import origin
from localtensor.collectives import argument_checks as checks
from localtensor.collectives import reference
from localtensor.errors import ComplexNotGathered, WrongType
from localtensor.layout.reductions import PremulSum, ReductionOp, divide, fold
from localtensor.lockstep.comms import c10d_kernels, collectives, stacked_collectives
from localtensor.lockstep.comms.autograd import CollectiveCall, apply_linear, apply_linear_to_lists, select_tensors
from localtensor.lockstep.comms.collectives import Sizes, StackedValue
from localtensor.lockstep.comms.process_groups import Groups
from localtensor.lockstep.comms.stacked_collectives import GroupFamily, split_by_size
from localtensor.lockstep.dispatch.dispatcher import plain_dispatch
from localtensor.lockstep.mode import current_mode
from localtensor.lockstep.values.local_tensor import LocalTensor
from localtensor.lockstep.values.partition import Array
from localtensor.lockstep.values.rank_int import on_rank, rank_int

_LINEAR = ("sum", "avg")


def all_reduce(x: Tensor, op: checks.AnyOp = "sum", group: Groups = None) -> LocalTensor:
    """The reduction of each group's tensors, on every rank; `op` is a name, a `PremulSum` or a ReduceOp.

    >>> from localtensor import LocalTensorMode, rank_map
    >>> import torch
    >>> with LocalTensorMode(4):
    ...     all_reduce(rank_map(torch.tensor), "max", [[0, 1], [2, 3]])
    LocalTensor(4 ranks, 2 different values,
      ranks 0, 1: tensor(1),
      ranks 2, 3: tensor(3))
    """
    call = _checked_call("all_reduce", group, [x], op)
    family, by = call.family, call.op
    if _is_linear(by) or not call.wants_gradient(x):
        done = lambda value: collectives.all_reduce(value, family, by)  # noqa: E731
        return apply_linear(call, x, done, done)
    found = [fold(_all_gather(call.over(part), x).unbind(0), by) for part in split_by_size(family)]
    number = _part_numbers(family)
    return select_tensors(call, [*found, x], np.where(number < 0, len(found), number))  # ranks in no group keep theirs


def reduce(x: Tensor, root: int, op: checks.AnyOp = "sum", group: Groups = None) -> LocalTensor:
    """The reduction of each group's tensors, on its root; other ranks hold their own tensors."""
    call = _checked_call("reduce", group, [x], op, root)
    number = np.where(call.family.position == root, 0, 1)
    return select_tensors(call, [all_reduce(x, call.op, call.family), x], number)


def broadcast(x: Tensor, root: int, group: Groups = None) -> LocalTensor:
    """The tensor of each group's root, on every rank."""
    call = _checked_call("broadcast", group, [x], root=root)
    family = call.family

    def to_root(value: StackedValue) -> StackedValue:
        total = collectives.all_reduce(value, family, "sum")
        others = family.members & (family.position != root)
        return collectives.select([total, collectives.zeros_like(total)], np.where(total.held.row_of >= 0, others, -1))

    return apply_linear(call, x, lambda value: collectives.broadcast(value, family, root=root), to_root)


def all_gather(x: Tensor, group: Groups = None) -> list[Any]:
    """The tensors of each group, on every rank: one LocalTensor for each position."""
    return [row.clone() for row in _all_gather(_checked_call("all_gather", group, [x]), x).unbind(0)]


def all_gather_into_tensor(x: Tensor, group: Groups = None, dim: int = 0) -> LocalTensor:
    """The tensors of each group, concatenated along `dim`, on every rank."""
    name = "all_gather_into_tensor"
    call = _checked_call(name, group, [x])
    checks.check_dim(name, dim, x.shape, for_scalars="Pass x.reshape(1).")
    family = call.family

    def done(value: StackedValue) -> StackedValue:
        return collectives.make_contiguous(collectives.merge_rows(collectives.all_gather(value, family), dim))

    return apply_linear(call, x, done, lambda value: _reduce_scatter_dim(value, family, "sum", dim))


def gather(x: Tensor, root: int, group: Groups = None) -> list[Any]:
    """The tensors of each group, on its root alone: one LocalTensor for each position."""
    call = _checked_call("gather", group, [x], root=root)
    family = call.family
    if x.is_complex():
        raise ComplexNotGathered("gather", x.dtype)

    def from_root(value: StackedValue) -> StackedValue:
        return collectives.scatter_from_roots(collectives.unbind_value(value), family, root)

    whole = apply_linear(call, x, lambda value: collectives.gather(value, family, root=root), from_root)
    return [row.clone() for row in whole.unbind(0)]


def scatter(pieces: Sequence[Tensor] | None, root: int, group: Groups = None) -> LocalTensor:
    """The tensor at each rank's position in its root's list; other ranks need not hold the list."""
    pieces = [] if pieces is None else _listed("scatter", pieces)
    call = _checked_call("scatter", group, pieces, root=root)
    with plain_dispatch():
        values = [call.value(x) for x in pieces]
        if c10d_kernels.scatter_lists(values, call.family, root) is None:
            call.as_ranks_do("scatter_", pieces)
    number = call.family.position
    roots = np.array([ranks[root] for ranks in call.family.groups])
    return select_tensors(call, pieces, number, np.where(number >= 0, roots[call.family.index], 0))


def reduce_scatter(pieces: Sequence[Tensor], op: checks.AnyOp = "sum", group: Groups = None) -> LocalTensor:
    """The reduction of the tensors at each rank's position in all lists of its group."""
    call = _checked_call("reduce_scatter", group, pieces := _listed("reduce_scatter", pieces), op)
    with plain_dispatch():
        if not c10d_kernels.can_reduce_scatter([call.value(x) for x in pieces], call.family):
            call.as_ranks_do("reduce_scatter_", pieces)
    return select_tensors(call, [all_reduce(x, call.op, call.family) for x in pieces], call.family.position)


def reduce_scatter_tensor(x: Tensor, op: checks.AnyOp = "sum", group: Groups = None, dim: int = 0) -> LocalTensor:
    """Each rank's piece, of equal ones along `dim`, of the reduction of its group's tensors."""
    name = "reduce_scatter_tensor"
    call = _checked_call(name, group, [x], op)
    family, by = call.family, call.op
    _check_even(name, call, x, dim, by)
    if _is_linear(by) or not call.wants_gradient(x):
        return apply_linear(
            call,
            x,
            lambda value: _reduce_scatter_dim(value, family, by, dim),
            lambda value: collectives.merge_rows(collectives.all_gather(_weighted(value, family, by), family), dim),
        )
    x, found = x.movedim(dim, 0).contiguous(), []
    for part in split_by_size(family):
        whole = fold(_all_gather(call.over(part), x).unbind(0), by)  # the order of adding depends on the place in it
        found.append(select_tensors(call, whole.tensor_split(len(part.groups[0])), part.position))
    done: LocalTensor = select_tensors(call, found, _part_numbers(family)).movedim(0, dim).contiguous()  # type: ignore[assignment]
    return done


def all_to_all(pieces: Sequence[Tensor], group: Groups = None) -> list[LocalTensor]:
    """Position j gets as its i-th tensor the j-th of position i."""
    call = _checked_call("all_to_all", group, pieces := _listed("all_to_all", pieces))

    def crossed(values: list[StackedValue]) -> list[StackedValue]:
        found = c10d_kernels.exchange_lists(values, call.family)
        return found if found is not None else call.as_ranks_do("alltoall_", pieces)

    return apply_linear_to_lists(call, pieces, crossed)


def all_to_all_single(
    x: Tensor,
    group: Groups = None,
    input_splits: Sequence[Any] | None = None,
    output_splits: Sequence[Any] | None = None,
) -> LocalTensor:
    """The pieces along dim 0 that each rank's group has for it, concatenated in group order.

    `input_splits` are the rows that a rank sends to each position: ints that may differ by rank, or a list of such for
    each position; None means equal pieces.  `output_splits` are the rows expected; None accepts what is sent.
    """
    call = _checked_call("all_to_all_single", group, [x])
    sent, got = _splits(call, input_splits), _splits(call, output_splits)
    if sent is not None and got is None:
        got = _received_splits(call, sent)
    return _all_to_all_single(call, x, sent, got)


def permute(x: Tensor, destinations: Sequence[int], group: Groups = None) -> LocalTensor:
    """The rank at position destinations[i] holds the tensor of position i."""
    call = _checked_call("permute", group, [x])
    family, order = call.family, [int(place) for place in destinations]
    back = [int(place) for place in np.argsort(order)]
    with plain_dispatch():
        value = call.value(x)
        collectives.check_all_hold("permute", value.held, family)
        wrong = any(sorted(order) != list(range(len(part.groups[0]))) for part in split_by_size(family))
        if wrong or stacked_collectives.groups_by_cell(value.held, family) is None:
            collectives.group_by_group(value, family, lambda held: reference.permute(held, order), keep=True)
    return apply_linear(
        call,
        x,
        lambda value: collectives.permute(value, family, order),
        lambda value: collectives.permute(value, family, back),
    )


def shard_dim_alltoall(x: Tensor, gather_dim: int, shard_dim: int, group: Groups = None) -> LocalTensor:
    """Shards of `gather_dim` become shards of `shard_dim`."""
    call = _checked_call("shard_dim_alltoall", group, [x])
    family = call.family
    return apply_linear(
        call,
        x,
        lambda value: collectives.shard_dim_alltoall(value, family, gather_dim, shard_dim),
        lambda value: collectives.shard_dim_alltoall(value, family, shard_dim, gather_dim),
    )


def barrier(group: Groups = None) -> None:
    """Check the group and return: in one control flow all ranks have arrived."""
    CollectiveCall(current_mode("barrier"), "barrier", group)


# -- parts


def _listed(name: str, pieces: object) -> list[Tensor]:
    if not isinstance(pieces, Iterable):
        raise WrongType(name, "pieces", pieces, "it is no list of tensors", "Pass one for each rank of the group.")
    return list(pieces)


def _checked_call(
    name: str, group: Groups, tensors: Sequence[Tensor], op: checks.AnyOp | None = None, root: int | None = None
) -> CollectiveCall:
    for x in tensors:
        if not isinstance(x, Tensor):
            raise WrongType(name, "x", x, "each rank brings a tensor", "Pass a tensor, or a LocalTensor.")
    if root is not None and not hasattr(root, "__index__"):
        raise WrongType(name, "root", root, "it is no rank", "Name a rank, counted within the group.")
    found = next((x._mode for x in tensors if isinstance(x, LocalTensor)), None)
    call = CollectiveCall(found if found is not None else current_mode(name), name, group, op, root)
    call.check(tensors)
    if call.mode.recorder is not None and not isinstance(group, GroupFamily):  # else a part of another call
        sent = tensors[:1] if name == "scatter" else tensors
        call.mode.recorder.called(name, sent, call.family.groups, origin(sys._getframe(2)).place)
    return call


def _is_linear(op: ReductionOp) -> bool:
    return isinstance(op, PremulSum) or op in _LINEAR


def _all_gather(call: CollectiveCall, x: Tensor) -> LocalTensor:
    """All members' tensors along a new dim 0; the adjoint adds up the gradients of each one's copies."""
    family = call.family

    def added(value: StackedValue) -> StackedValue:
        return collectives.unbind_value(collectives.reduce_scatter(value, family, "sum"))[0]

    return apply_linear(call, x, lambda value: collectives.all_gather(value, family), added)


def _reduce_scatter_dim(value: StackedValue, family: GroupFamily, op: ReductionOp, dim: int) -> StackedValue:
    """A reduce-scatter along this dim."""
    found = collectives.reduce_scatter(collectives.move_dim(value, dim, 0), family, op)
    return collectives.make_contiguous(collectives.move_dim(found, 0, dim))


def _all_to_all_single(call: CollectiveCall, x: Tensor, sent: Sizes, got: Sizes) -> LocalTensor:
    family = call.family
    return apply_linear(
        call,
        x,
        lambda value: collectives.all_to_all_single(value, family, sent, got),
        lambda value: collectives.all_to_all_single(collectives.make_contiguous(value), family, got, sent),
    )


def _part_numbers(family: GroupFamily) -> Array:
    """For each rank, the number of its part in `split_by_size(family)`: int64 of shape [world], -1 in no group."""
    number = np.full(family.world, -1)
    for index, part in enumerate(split_by_size(family)):
        number[part.members] = index
    return number


def _weighted(value: StackedValue, family: GroupFamily, op: ReductionOp) -> StackedValue:
    """The gradient times the weights of a linear reduction."""
    if isinstance(op, PremulSum):
        return StackedValue(tuple(op.times(cell) for cell in value.cells), value.held)
    if op == "sum":
        return value
    parts = split_by_size(family)
    each = [
        StackedValue(tuple(divide(cell, len(part.groups[0])) for cell in value.cells), value.held) for part in parts
    ]
    return each[0] if len(each) == 1 else collectives.select(each, _part_numbers(family))


def _check_even(name: str, call: CollectiveCall, x: Tensor, dim: int, op: ReductionOp) -> None:
    """Raises the errors of collectives/reference.py unless each group's shapes are equal and divide along `dim`."""
    with plain_dispatch():
        value = call.value(x)
        collectives.check_all_hold(name, value.held, call.family)
        found = stacked_collectives.groups_by_cell(value.held, call.family)
        for spot in found or ():
            shape, members = value.stack(spot.cell).shape[1:], spot.ranks.shape[1]
            if not 0 <= dim < len(shape) or shape[dim] % members:
                found = None
        if found is None:
            done = lambda held: reference.reduce_scatter_tensor(held, op, dim=dim)  # noqa: E731
            collectives.group_by_group(value, call.family, done, keep=False)


def _splits(call: CollectiveCall, splits: Sequence[Any] | None) -> list[Any] | None:
    """The rows to each position: an int, or an int for each rank."""
    if splits is None or not len(splits) or not isinstance(splits[0], list | tuple):
        return None if splits is None else list(splits)
    rows = np.array(splits)[np.maximum(call.family.position, 0)]
    return [rank_int(rows[:, place], call.family.member_mask) for place in range(rows.shape[1])]


def _received_splits(call: CollectiveCall, sent: list[Any]) -> list[Any]:
    """The rows that each rank gets from each position if all send `sent`."""
    family = call.family
    got = np.zeros((family.world, len(sent)), np.int64)
    for group in family.groups:
        for place, rank in enumerate(group[: len(sent)]):
            got[rank] = [on_rank(sent[place], sender) for sender in group[: len(sent)]] + [0] * (len(sent) - len(group))
    return [rank_int(got[:, place], family.member_mask) for place in range(len(sent))]
