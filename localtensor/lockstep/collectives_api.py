"""Collectives on LocalTensors: each is a function of what all ranks bring, in every group of ranks at once.

`group` says which ranks meet: None are all of them; a process group or a DeviceMesh of one axis; (mesh, axis); a list
of ranks; or a list of such lists, disjoint ones, in which each rank meets those of its own list.  A `root` is a
position in its group.  A plain tensor is the same on every rank.  Results are fresh.  Where groups leave ranks out,
these keep what they had, if the result has the shape of the input, and hold nothing else.

Meaning and refusals are those of localtensor.collectives.reference, to the bit; so are gradients: each rank's backward is the
true adjoint, which exchanges gradients in turn.  All raise `BadGroup`, `NotHeld`, `NoMode` outside of any mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from localtensor.collectives import argument_checks as checks
from localtensor.collectives import reference
from localtensor.errors import ComplexNotGathered
from localtensor.layout.reductions import Op, PremulSum, divided, fold
from localtensor.lockstep.comms import c10d_kernels, collectives, stacked_collectives
from localtensor.lockstep.comms.autograd import Meeting, choose, linear, linear_lists
from localtensor.lockstep.comms.collectives import Value
from localtensor.lockstep.comms.stacked_collectives import Family, one_size
from localtensor.lockstep.dispatch.dispatcher import plainly
from localtensor.lockstep.mode import current
from localtensor.lockstep.values.local_tensor import LocalTensor
from localtensor.lockstep.values.rank_int import on_rank, rank_int

_LINEAR = ("sum", "avg")


def all_reduce(x: Tensor, op: Any = "sum", group: Any = None) -> LocalTensor:
    """Every rank holds what its group's tensors fold into; `op` as in localtensor.collectives.reference, or a ReduceOp.

    >>> from localtensor import LocalTensorMode, rank_map
    >>> import torch
    >>> with LocalTensorMode(4):
    ...     all_reduce(rank_map(torch.tensor), "max", [[0, 1], [2, 3]])
    LocalTensor(4 ranks, 2 different values,
      ranks 0, 1: tensor(1),
      ranks 2, 3: tensor(3))
    """
    meeting = _meeting("all_reduce", group, [x], op)
    whole, op = meeting.whole, meeting.op
    if _is_linear(op) or not meeting.wants_gradient(x):
        done = lambda value: collectives.all_reduced(value, whole, op)  # noqa: E731
        return linear(meeting, x, done, done)
    number = np.full(whole.world, len(one_size(whole)))  # who is in no group keeps what it had
    found = []
    for index, part in enumerate(one_size(whole)):
        number[part.members] = index
        found.append(fold(_gathered(meeting.over(part), x).unbind(0), op))
    return choose(meeting, [*found, x], number)


def reduce(x: Tensor, root: int, op: Any = "sum", group: Any = None) -> LocalTensor:
    """The root of each group holds what its tensors fold into; the others hold what they brought."""
    meeting = _meeting("reduce", group, [x], op, root)
    number = np.where(meeting.whole.position == root, 0, 1)
    return choose(meeting, [all_reduce(x, meeting.op, meeting.whole), x], number)


def broadcast(x: Tensor, root: int, group: Any = None) -> LocalTensor:
    """Every rank holds the tensor of its group's root."""
    meeting = _meeting("broadcast", group, [x], root=root)
    whole = meeting.whole

    def to_root(value: Value) -> Value:
        total = collectives.all_reduced(value, whole, "sum")
        others = whole.members & (whole.position != root)
        return collectives.combined([total, meeting.zeros(total)], _where_held(total, others.astype(int)))

    return linear(meeting, x, lambda value: collectives.broadcasted(value, whole, root), to_root)


def all_gather(x: Tensor, group: Any = None) -> list[Any]:
    """Every rank holds the tensors of its group's ranks: one LocalTensor for each position."""
    return _apart(_gathered(_meeting("all_gather", group, [x]), x))


def all_gather_into_tensor(x: Tensor, group: Any = None, dim: int = 0) -> LocalTensor:
    """Every rank holds its group's tensors, joined along `dim`."""
    call = "all_gather_into_tensor"
    meeting = _meeting(call, group, [x])
    checks.check_dim(call, dim, x.shape, for_scalars="Pass x.reshape(1).")
    whole = meeting.whole
    return linear(
        meeting, x, lambda value: collectives.contiguous(collectives.joined_rows(collectives.gathered(value, whole), dim)),
        lambda value: _dealt(value, whole, "sum", dim),
    )  # fmt: skip


def gather(x: Tensor, root: int, group: Any = None) -> list[Any]:
    """The tensors of each group's ranks, which its root alone holds: one LocalTensor for each position."""
    meeting = _meeting("gather", group, [x], root=root)
    whole = meeting.whole
    if x.is_complex():
        raise ComplexNotGathered("gather", x.dtype)

    def from_root(value: Value) -> Value:
        return collectives.of_roots(collectives.pieces(value, len(whole.groups[0])), whole, root)

    return _apart(linear(meeting, x, lambda value: collectives.gathered_at(value, whole, root), from_root))


def scatter(pieces: Sequence[Tensor] | None, root: int, group: Any = None) -> LocalTensor:
    """Each rank holds the tensor at its own position in its root's list; no other rank needs to hold the list."""
    pieces = list(pieces or ())
    meeting = _meeting("scatter", group, pieces, root=root)
    with plainly():
        values = [meeting.value(x) for x in pieces]
        if c10d_kernels.from_roots(values, meeting.whole, root) is None:
            meeting.as_ranks_do("scatter_", pieces)
    number = meeting.whole.position
    roots = np.array([ranks[root] for ranks in meeting.whole.groups])
    return choose(meeting, pieces, number, np.where(number >= 0, roots[meeting.whole.index], 0))


def reduce_scatter(pieces: Sequence[Tensor], op: Any = "sum", group: Any = None) -> LocalTensor:
    """Each rank holds what the tensors at its own position in all lists of its group fold into."""
    meeting = _meeting("reduce_scatter", group, pieces, op)
    with plainly():
        if not c10d_kernels.fit_to_deal([meeting.value(x) for x in pieces], meeting.whole):
            meeting.as_ranks_do("reduce_scatter_", pieces)
    return choose(meeting, [all_reduce(x, meeting.op, meeting.whole) for x in pieces], meeting.whole.position)


def reduce_scatter_tensor(x: Tensor, op: Any = "sum", group: Any = None, dim: int = 0) -> LocalTensor:
    """Each rank holds its piece, of equal ones along `dim`, of what its group's tensors fold into."""
    call = "reduce_scatter_tensor"
    meeting = _meeting(call, group, [x], op)
    whole, op = meeting.whole, meeting.op
    _check_even(call, meeting, x, dim, op)
    if _is_linear(op) or not meeting.wants_gradient(x):
        return linear(
            meeting, x, lambda value: _dealt(value, whole, op, dim),
            lambda value: collectives.joined_rows(collectives.gathered(_weighed(value, whole, op), whole), dim),
        )  # fmt: skip
    x, number, found = x.movedim(dim, 0).contiguous(), np.full(whole.world, -1), []
    for index, part in enumerate(one_size(whole)):
        number[part.members] = index
        mine = _exchanged(meeting.over(part), x, None, None)
        found.append(fold(mine.unflatten(0, (len(part.groups[0]), -1)).unbind(0), op))
    done: LocalTensor = choose(meeting, found, number).movedim(0, dim).contiguous()  # type: ignore[assignment]
    return done


def all_to_all(pieces: Sequence[Tensor], group: Any = None) -> list[LocalTensor]:
    """The j-th tensor that position i brings is the i-th that position j holds."""
    meeting = _meeting("all_to_all", group, pieces)

    def crossed(values: list[Value]) -> list[Value]:
        found = c10d_kernels.crosswise(values, meeting.whole)
        return found if found is not None else meeting.as_ranks_do("alltoall_", pieces)

    return linear_lists(meeting, pieces, crossed)


def all_to_all_single(
    x: Tensor, group: Any = None, input_splits: Sequence[Any] | None = None, output_splits: Sequence[Any] | None = None
) -> LocalTensor:
    """Each rank holds the pieces, along dim 0, that its group's ranks have for it, joined in their order.

    `input_splits` are the rows that a rank sends to each position, ints that may differ by rank, or a list of such
    for each position; None means equal pieces.  `output_splits` say what is expected; None means whatever is sent.
    """
    meeting = _meeting("all_to_all_single", group, [x])
    sent, got = _splits(meeting, input_splits), _splits(meeting, output_splits)
    if sent is not None and got is None:
        got = _turned(meeting, sent)
    return _exchanged(meeting, x, sent, got)


def permute(x: Tensor, destinations: Sequence[int], group: Any = None) -> LocalTensor:
    """The rank at position destinations[i] holds the tensor of position i."""
    meeting = _meeting("permute", group, [x])
    whole, order = meeting.whole, [int(place) for place in destinations]
    back = [int(place) for place in np.argsort(order)]
    with plainly():
        value = meeting.value(x)
        collectives.check_held("permute", value.held, whole)
        wrong = any(sorted(order) != list(range(len(part.groups[0]))) for part in one_size(whole))
        if wrong or stacked_collectives.spots(value.held, whole) is None:
            collectives.rank_by_rank(value, whole, lambda held: reference.permute(held, order), keep=True)
    return linear(
        meeting, x, lambda value: collectives.permuted(value, whole, order),
        lambda value: collectives.permuted(value, whole, back),
    )  # fmt: skip


def shard_dim_alltoall(x: Tensor, gather_dim: int, shard_dim: int, group: Any = None) -> LocalTensor:
    """Shards of `gather_dim` have become shards of `shard_dim`: cut along the one, joined along the other."""
    meeting = _meeting("shard_dim_alltoall", group, [x])
    whole = meeting.whole
    return linear(
        meeting, x, lambda value: collectives.moved_shards(value, whole, gather_dim, shard_dim),
        lambda value: collectives.moved_shards(value, whole, shard_dim, gather_dim),
    )  # fmt: skip


def barrier(group: Any = None) -> None:
    """All ranks of each group are here: in one control flow, they always are."""
    Meeting(current("barrier"), "barrier", group)


# -- parts


def _meeting(call: str, group: Any, tensors: Sequence[Tensor], op: Any = None, root: int | None = None) -> Meeting:
    found = next((x._mode for x in tensors if isinstance(x, LocalTensor)), None)
    meeting = Meeting(found if found is not None else current(call), call, group, op, root)
    meeting.check(tensors)
    return meeting


def _is_linear(op: Op) -> bool:
    return isinstance(op, PremulSum) or op in _LINEAR


def _gathered(meeting: Meeting, x: Tensor) -> LocalTensor:
    """All members' tensors along a new dim 0; its adjoint adds up what each one's copies get."""
    whole = meeting.whole

    def added(value: Value) -> Value:
        pieces = collectives.reduce_scattered(value, whole, "sum")
        return collectives.pieces(pieces, 1)[0]

    return linear(meeting, x, lambda value: collectives.gathered(value, whole), added)


def _dealt(value: Value, whole: Family, op: Op, dim: int) -> Value:
    """A reduce-scatter along this dim."""
    found = collectives.reduce_scattered(collectives.moved_dim(value, dim, 0), whole, op)
    return collectives.contiguous(collectives.moved_dim(found, 0, dim))


def _exchanged(meeting: Meeting, x: Tensor, sent: Any, got: Any) -> LocalTensor:
    whole = meeting.whole
    return linear(
        meeting, x, lambda value: collectives.exchanged(value, whole, sent, got),
        lambda value: collectives.exchanged(collectives.contiguous(value), whole, got, sent),
    )  # fmt: skip


def _apart(x: LocalTensor) -> list[Any]:
    """Its rows, each a tensor of its own."""
    return [row.clone() for row in x.unbind(0)]


def _where_held(value: Value, number: Any) -> Any:
    return np.where(value.held.row_of >= 0, number, -1)


def _weighed(value: Value, whole: Family, op: Op) -> Value:
    """What the adjoint of a reduction weighs gradients with."""
    if isinstance(op, PremulSum):
        return Value(tuple(op.times(cell) for cell in value.cells), value.held)
    if op == "sum":
        return value
    parts = one_size(whole)
    each = [Value(tuple(divided(cell, len(part.groups[0])) for cell in value.cells), value.held) for part in parts]
    number = np.full(whole.world, -1)
    for index, part in enumerate(parts):
        number[part.members] = index
    return each[0] if len(each) == 1 else collectives.combined(each, number)


def _check_even(call: str, meeting: Meeting, x: Tensor, dim: int, op: Op) -> None:
    """Refused as collectives/reference.py does, in terms of this dim."""
    with plainly():
        value = meeting.value(x)
        collectives.check_held(call, value.held, meeting.whole)
        found = stacked_collectives.spots(value.held, meeting.whole)
        for spot in found or ():
            shape, members = value.stack(spot.cell).shape[1:], spot.ranks.shape[1]
            if not 0 <= dim < len(shape) or shape[dim] % members:
                found = None
        if found is None:
            done = lambda held: reference.reduce_scatter_tensor(held, op, dim=dim)  # noqa: E731
            collectives.rank_by_rank(value, meeting.whole, done, keep=False)


def _splits(meeting: Meeting, splits: Sequence[Any] | None) -> list[Any] | None:
    """The rows to each position: an int, or an int for each rank."""
    if splits is None or not len(splits) or not isinstance(splits[0], list | tuple):
        return None if splits is None else list(splits)
    return _by_rank(meeting, np.array(splits))


def _by_rank(meeting: Meeting, table: Any) -> list[Any]:
    whole = meeting.whole
    held = None if whole.everybody else whole.members
    return [rank_int(table[np.maximum(whole.position, 0), place], held) for place in range(table.shape[1])]


def _turned(meeting: Meeting, sent: list[Any]) -> list[Any]:
    """What each rank gets, if the others send this."""
    whole = meeting.whole
    got = np.zeros((whole.world, len(sent)), np.int64)
    for group in whole.groups:
        for place, rank in enumerate(group[: len(sent)]):
            got[rank] = [on_rank(sent[place], sender) for sender in group[: len(sent)]] + [0] * (len(sent) - len(group))
    held = None if whole.everybody else whole.members
    return [rank_int(got[:, place], held) for place in range(len(sent))]
