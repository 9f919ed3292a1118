"""What the ranks hold after each collective: quickly for all groups at once, or as rank threads do it.

The table goes by the kinds of kernels.py.  A quick way that cannot, or must not, says None: then each rank's own
tensors go to the function that serves rank threads, which does it or refuses it in its own words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from localtensor import collectives, exchange
from localtensor.errors import NotHeld
from localtensor.exchange import Value
from localtensor.families import Family
from localtensor.kernels import Brought, Served
from localtensor.meetings import Group, Part
from localtensor.rank_ints import on_rank
from localtensor.tensor import LocalTensor


def value_of(mode: Any, x: Tensor) -> Value:
    """What every rank brings: a plain tensor is the same on all of them."""
    return Value(x._cells, x._partition) if isinstance(x, LocalTensor) else Value((x.detach(),), mode.everyone)


def results(mode: Any, served: Served, brought: Brought, whole: Family) -> Sequence[Value]:
    """What each written buffer holds afterwards."""
    quick = _QUICK.get(served.kind)
    found = None if quick is None else quick(mode, brought, whole)
    return found if found is not None else by_ranks(mode, served, brought, whole)


# -- on values


def all_reduced(value: Value, whole: Family, op: Any) -> Value:
    return exchange.all_reduce(value, whole, op, lambda held: collectives.all_reduce(held, op))


def reduced(value: Value, whole: Family, op: Any, root: int) -> Value:
    return exchange.reduce(value, whole, op, root, lambda held: collectives.reduce(held, op, root=root))


def broadcasted(value: Value, whole: Family, root: int) -> Value:
    return exchange.broadcast(value, whole, root, lambda held: collectives.broadcast(held, root))


def _stacked(held: list[Tensor]) -> list[Tensor]:
    return [torch.stack(each) for each in collectives.all_gather(held)]


def gathered(value: Value, whole: Family) -> Value:
    """All members' tensors, along a new dim 0."""
    return exchange.all_gather(value, whole, _stacked)


def gathered_at(value: Value, whole: Family, root: int) -> Value:
    """The same, on the root of each group alone."""
    return exchange.gather(value, whole, root, _stacked)


def joined_rows(value: Value, dim: int = 0) -> Value:
    """Dim 0 of each rank's tensor has become part of what was dim `dim` of its rows; scalars make one row."""
    return _each_stack(value, lambda x: x.movedim(1, dim + 1).flatten(dim + 1, dim + 2) if x.dim() > 2 else x)


def moved_dim(value: Value, source: int, to: int) -> Value:
    """Each rank's tensor, with a dim in another place."""
    return value if source == to else _each_stack(value, lambda x: x.movedim(source + 1, to + 1))


def _each_stack(value: Value, change: Callable[[Tensor], Tensor]) -> Value:
    cells = []
    for cell, rows in enumerate(value.held.sizes):
        changed = change(value.stack(cell))
        cells.append(changed if rows > 1 else changed[0])
    return Value(tuple(cells), value.held)


def pieces(value: Value, count: int) -> list[Value]:
    """The pieces along each rank's dim 0; they are views."""
    pairs = list(zip(value.cells, value.held.sizes, strict=True))
    return [Value(tuple(cell[:, i] if rows > 1 else cell[i] for cell, rows in pairs), value.held) for i in range(count)]


def reduce_scattered(value: Value, whole: Family, op: Any) -> Value:
    return exchange.reduce_scatter(value, whole, op, lambda held: collectives.reduce_scatter_tensor(held, op))


def exchanged(value: Value, whole: Family, sent: Any = None, got: Any = None) -> Value:
    """An all-to-all along dim 0; `sent` and `got` are the rows to and from each member, ints that may differ by rank.

    None means equal pieces.
    """
    if _rows_are_even(value, whole, sent) and _rows_are_even(value, whole, got):
        return exchange.all_to_all(value, whole, collectives.all_to_all_single)
    exchange.check_held("all_to_all_single", value.held, whole)
    found: dict[int, Tensor] = {}
    for group in whole.groups:
        held = [value.on(rank) for rank in group]
        done = collectives.all_to_all_single(held, input_splits=_on(sent, group), output_splits=_on(got, group))
        found.update(zip(group, done, strict=True))
    return exchange.of_ranks(found, whole.world)


def _on(splits: Any, group: tuple[int, ...]) -> Any:
    return None if splits is None else [[on_rank(size, rank) for size in splits] for rank in group]


def _rows_are_even(value: Value, whole: Family, splits: Any) -> bool:
    if splits is None or len(splits) == 0:
        return is_dense(value)
    if not all(type(size) is int and size == splits[0] for size in splits):
        return False
    rows = [tuple(cell.shape[count > 1 :])[:1] for cell, count in zip(value.cells, value.held.sizes, strict=True)]
    members = whole.matrix is not None and whole.matrix.shape[1] == len(splits)
    return members and set(rows) == {(splits[0] * len(splits),)} and is_dense(value)


def is_dense(value: Value) -> bool:
    """Whether each rank's tensor is contiguous."""
    return all(
        (cell[0] if rows > 1 else cell).is_contiguous()
        for cell, rows in zip(value.cells, value.held.sizes, strict=True)
    )


def contiguous(value: Value) -> Value:
    """The same, each rank's tensor contiguous."""
    return Value(tuple(cell.contiguous() for cell in value.cells), value.held)


def moved_shards(value: Value, whole: Family, gather_dim: int, shard_dim: int) -> Value:
    """Cut along one dim, sent, joined along the other."""
    done = partial(collectives.shard_dim_alltoall, gather_dim=gather_dim, shard_dim=shard_dim)
    return exchange.move_shards(value, whole, gather_dim, shard_dim, done)


# -- the quick ways, by kind


def _all_reduce(mode: Any, brought: Brought, whole: Family) -> list[Value]:
    return [all_reduced(value_of(mode, brought.reads), whole, brought.op)]


def _all_reduce_coalesced(mode: Any, brought: Brought, whole: Family) -> list[Value] | None:
    if len({x.dtype for x in brought.reads}) != 1:
        return None
    return [all_reduced(value_of(mode, x), whole, brought.op) for x in brought.reads]


def _reduce(mode: Any, brought: Brought, whole: Family) -> list[Value]:
    return [reduced(value_of(mode, brought.reads), whole, brought.op, brought.root or 0)]


def _broadcast(mode: Any, brought: Brought, whole: Family) -> list[Value]:
    return [broadcasted(value_of(mode, brought.reads), whole, brought.root or 0)]


def _all_gather(mode: Any, brought: Brought, whole: Family) -> list[Value]:
    return pieces(gathered(value_of(mode, brought.reads), whole), len(brought.writes))


def _all_gather_coalesced(mode: Any, brought: Brought, whole: Family) -> list[Value]:
    many = len(brought.writes) // len(brought.reads)
    columns = [pieces(gathered(value_of(mode, x), whole), many) for x in brought.reads]
    return [column[source] for source in range(many) for column in columns]


def _all_gather_into_tensor(mode: Any, brought: Brought, whole: Family) -> list[Value]:
    return [joined_rows(gathered(value_of(mode, brought.reads), whole))]


def _gather(mode: Any, brought: Brought, whole: Family) -> list[Value] | None:
    if brought.reads.is_complex():
        return None
    return pieces(gathered_at(value_of(mode, brought.reads), whole, brought.root or 0), len(brought.writes))


def _scatter(mode: Any, brought: Brought, whole: Family) -> list[Value] | None:
    return [found] if (found := from_roots(_values(mode, brought.reads), whole, brought.root or 0)) else None


def from_roots(values: Sequence[Value], whole: Family, root: int) -> Value | None:
    """The i-th member holds the i-th value of its root; None if they are not alike, or not one for each member."""
    roots = [group[root] for group in whole.groups]
    alike = len({(_shape(value), value.cells[0].dtype) for value in values}) == 1 and all(map(is_dense, values))
    if not alike or not _one_each(values, whole) or any((value.held.row_of[roots] < 0).any() for value in values):
        return None
    return exchange.of_roots(values, whole, root)


def _shape(value: Value) -> Any:
    """The shape that all ranks have, or one that nobody has."""
    shapes = {
        tuple(cell.shape[rows > 1 :]) for cell, rows in zip(value.cells, value.held.sizes, strict=True)
    }  # fmt: skip
    return shapes.pop() if len(shapes) == 1 else id(value)


def _one_each(values: Sequence[Value], whole: Family) -> bool:
    return whole.matrix is not None and whole.matrix.shape[1] == len(values)


def _values(mode: Any, tensors: Sequence[Tensor]) -> list[Value]:
    return [value_of(mode, x) for x in tensors]


def _reduce_scatter(mode: Any, brought: Brought, whole: Family) -> list[Value] | None:
    values = _values(mode, brought.reads)
    if not fit_to_deal(values, whole):
        return None
    return [exchange.combined([all_reduced(value, whole, brought.op) for value in values], whole.position)]


def fit_to_deal(values: Sequence[Value], whole: Family) -> bool:
    """Whether there is one for each member, contiguous, all of one dtype."""
    one_dtype = len({value.cells[0].dtype for value in values}) == 1
    return _one_each(values, whole) and one_dtype and all(map(is_dense, values))


def _reduce_scatter_tensor(mode: Any, brought: Brought, whole: Family) -> list[Value]:
    return [reduce_scattered(value_of(mode, brought.reads), whole, brought.op)]


def _all_to_all(mode: Any, brought: Brought, whole: Family) -> list[Value] | None:
    return crosswise(_values(mode, brought.reads), whole)


def crosswise(values: Sequence[Value], whole: Family) -> list[Value] | None:
    """The j-th tensor of member i is the i-th that member j gets; None if there is not one for each member."""
    if not _one_each(values, whole) or len({value.cells[0].dtype for value in values}) > 1:
        return None
    for value in values:
        exchange.check_held("all_to_all", value.held, whole)
    columns = [np.where(whole.members, whole.matrix[whole.index, j], 0) for j in range(len(values))]  # type: ignore[index]
    return [exchange.combined(values, whole.position, column) for column in columns]


def _all_to_all_single(mode: Any, brought: Brought, whole: Family) -> list[Value]:
    return [exchanged(value_of(mode, brought.reads), whole, brought.input_splits, brought.output_splits)]


_Quick = Callable[[Any, Brought, Family], "list[Value] | None"]


def _each(one: _Quick) -> _Quick:
    """The coalesced form: the same for each tensor."""

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


# -- as rank threads do it


def by_ranks(mode: Any, served: Served, brought: Brought, whole: Family) -> list[Value]:
    """Each rank's own tensors, group by group."""
    outputs: list[dict[int, Tensor]] = [{} for _ in brought.writes]
    for number, ranks in enumerate(whole.groups):
        group = Group(str(number), ranks)
        parts = [_part(mode, served, brought, rank, group) for rank in ranks]
        for rank, mine in zip(ranks, served.compute(parts), strict=True):
            for output, x in zip(outputs, mine, strict=False):  # the root alone gets a gathered list
                output[rank] = x
    return [exchange.of_ranks(output, mode.world) for output in outputs]


def _part(mode: Any, served: Served, brought: Brought, rank: int, group: Group) -> Part:
    reads = _held_on(mode, served.kind, brought.reads, rank)
    if served.kind == "scatter" and rank != group.ranks[brought.root or 0]:
        reads = []
    part = Part(rank, served.kind, group, reads, (), None, op=brought.op)
    part.root = None if brought.root is None else group.ranks[brought.root]
    return part


def _held_on(mode: Any, call: str, reads: Any, rank: int) -> Any:
    if not isinstance(reads, Tensor):
        return [_held_on(mode, call, each, rank) for each in reads]
    value = value_of(mode, reads)
    if value.held.row_of[rank] < 0:
        raise NotHeld(call, [rank], np.flatnonzero(value.held.row_of >= 0).tolist())
    return value.on(rank)
