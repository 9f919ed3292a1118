"""What the ranks hold after each collective: the quick function of lockstep/comms/collectives.py beside the plain one of collectives/reference.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from localtensor.collectives import reference as collectives
from localtensor.lockstep.comms import collectives as exchange
from localtensor.lockstep.comms.collectives import Value
from localtensor.lockstep.comms.group_families import Family
from localtensor.lockstep.values.local_tensor import LocalTensor
from localtensor.lockstep.values.rank_int import on_rank


def value_of(mode: Any, x: Tensor) -> Value:
    """What every rank brings: a plain tensor is the same on all of them."""
    return Value(x._cells, x._partition) if isinstance(x, LocalTensor) else Value((x.detach(),), mode.everyone)


def all_reduced(value: Value, whole: Family, op: Any) -> Value:
    """On every member, what its group's tensors fold into."""
    return exchange.all_reduce(value, whole, op, lambda held: collectives.all_reduce(held, op))


def reduced(value: Value, whole: Family, op: Any, root: int) -> Value:
    """The same on the root of each group alone; the others hold what they brought."""
    return exchange.reduce(value, whole, op, root, lambda held: collectives.reduce(held, op, root=root))


def broadcasted(value: Value, whole: Family, root: int) -> Value:
    """On every member, its root's tensor."""
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
    """On each member, its piece along dim 0 of what its group's tensors fold into."""
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
