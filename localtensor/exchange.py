"""Collectives on values with a partition: what every rank holds afterwards, for all groups of a family at once.

Cost follows the different values and the groups, not the ranks (folded.py).  Whatever these do not cover is done by
the plain functions of collectives.py, on each rank's own tensors; so are refusals, which are then in the same words.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from localtensor import folded
from localtensor.cells import Cells, gathered, joined
from localtensor.errors import NotHeld
from localtensor.families import Family, one_size
from localtensor.folding import NOWHERE, Partition, partition, rows_apart
from localtensor.reductions import Op

Plain = Callable[[list[Any]], Sequence[Any]]  # a function of collectives.py, on the tensors of one group


class Value(NamedTuple):
    """Cells, and which rank reads what."""

    cells: Cells
    held: Partition

    def on(self, rank: int) -> Tensor:
        cell, row = self.held.place(rank)
        return self.cells[cell][row] if self.held.sizes[cell] > 1 else self.cells[cell]


class Batch(NamedTuple):
    """Groups of one size whose members bring tensors of one shape: rows, and who brings which."""

    rows: Tensor
    ids: Any  # int64 of shape [groups, members]
    ranks: Any  # of the same shape


class _Unlike(Exception):
    """Members of one group bring different shapes: the plain function says so, or can do it."""


def batches(call: str, value: Value, whole: Family) -> list[Batch]:
    """What the members of all groups bring.  Raises `NotHeld`, or `_Unlike` if shapes differ within a group."""
    held = value.held
    if not held.complete and (held.row_of[whole.members] < 0).any():
        missing = [int(rank) for rank in np.flatnonzero(whole.members & (held.row_of < 0))]
        raise NotHeld(call, missing, [int(rank) for rank in np.flatnonzero(held.row_of >= 0)])
    cells, held = joined(*value)
    stacks = [cell if rows > 1 else cell[None] for cell, rows in zip(cells, held.sizes, strict=True)]
    if len(stacks) == 1:
        return [Batch(stacks[0], held.row_of[part.matrix], part.matrix) for part in one_size(whole)]
    found = []
    for part in one_size(whole):
        cell_of = held.cell_of[held.row_of[part.matrix]]
        if (cell_of != cell_of[:, :1]).any():
            raise _Unlike
        for cell in np.unique(cell_of[:, 0]):
            ranks = part.matrix[cell_of[:, 0] == cell]
            found.append(Batch(stacks[cell], held.row_of[ranks] - held.starts[cell], ranks))
    return found


def everywhere(world: int, parts: Sequence[Batch], kept: Value | None = None) -> Value:
    """The value of which each batch gives its ranks' rows; ranks in no batch keep what they had, or hold nothing."""
    row_of, cells, sizes, start = np.full(world, NOWHERE), [], [], 0
    for rows, ids, ranks in parts:
        row_of[ranks] = start + ids
        cells.append(rows if rows.shape[0] > 1 else rows[0])
        sizes.append(rows.shape[0])
        start += rows.shape[0]
    rest = np.flatnonzero((row_of < 0) & (kept.held.row_of >= 0)) if kept is not None else ()
    if kept is not None and len(rest):
        for row in np.unique(kept.held.row_of[rest]):
            row_of[rest[kept.held.row_of[rest] == row]] = start
            cells.append(kept.on(kept.held.ranks(int(row))[0]).clone())
            sizes.append(1)
            start += 1
    return Value(*joined(tuple(cells), partition(row_of, sizes)))


def _over(call: str, value: Value, whole: Family, one: Callable[[Batch], Batch], plain: Plain, keep: bool) -> Value:
    """The collective on each batch; rank by rank where shapes differ."""
    try:
        parts = [_fresh(one(batch), batch) for batch in batches(call, value, whole)]
    except _Unlike:
        return rank_by_rank(value, whole, plain, keep=keep)
    return everywhere(whole.world, parts, value if keep else None)


def _fresh(result: Batch, brought: Batch) -> Batch:
    """Nothing that comes out shares memory with what was brought."""
    same = result.rows.untyped_storage().data_ptr() == brought.rows.untyped_storage().data_ptr()
    return result._replace(rows=result.rows.clone()) if same else result


def rank_by_rank(value: Value, whole: Family, plain: Plain, *, keep: bool) -> Value:
    """The plain function on the tensors of each group, one after the other."""
    found: dict[int, Tensor] = {}
    for group in whole.groups:
        found.update(zip(group, plain([value.on(rank) for rank in group]), strict=True))
    if keep:
        found.update({rank: value.on(rank) for rank in range(whole.world) if rank not in found and value.held.row_of[rank] >= 0})
    return of_ranks(found, whole.world)


def of_ranks(values: dict[int, Tensor], world: int) -> Value:
    """The value of which these ranks hold these tensors."""
    row_of = np.full(world, NOWHERE)
    row_of[list(values)] = np.arange(len(values))
    return Value(*gathered(list(values.values()), rows_apart(partition(row_of, [len(values)]))))


def all_reduce(value: Value, whole: Family, op: Op, plain: Plain) -> Value:
    """Every member holds what its group's tensors fold into."""

    def one(batch: Batch) -> Batch:
        rows, places = folded.reduced(batch.rows, batch.ids, op)
        return Batch(rows, _for_all(places, batch), batch.ranks)

    return _over("all_reduce", value, whole, one, plain, keep=True)


def reduce(value: Value, whole: Family, op: Op, root: int, plain: Plain) -> Value:
    """The root of each group holds what its tensors fold into; the others hold what they had."""

    def one(batch: Batch) -> Batch:
        rows, places = folded.reduced(batch.rows, batch.ids, op)
        return Batch(rows, places[:, None], batch.ranks[:, root : root + 1])

    return _over("reduce", value, whole, one, plain, keep=True)


def broadcast(value: Value, whole: Family, root: int, plain: Plain) -> Value:
    """Every member holds its root's tensor."""

    def one(batch: Batch) -> Batch:
        rows, places = np.unique(batch.ids[:, root], return_inverse=True)
        return Batch(batch.rows[torch.from_numpy(rows)], _for_all(places.reshape(-1), batch), batch.ranks)

    return _over("broadcast", value, whole, one, plain, keep=True)


def all_gather(value: Value, whole: Family, plain: Plain) -> Value:
    """Every member holds its group's tensors along a new dim 0."""

    def one(batch: Batch) -> Batch:
        rows, places = folded.gathered(batch.rows, batch.ids)
        return Batch(rows, _for_all(places, batch), batch.ranks)

    return _over("all_gather", value, whole, one, plain, keep=False)


def reduce_scatter(value: Value, whole: Family, op: Op, plain: Plain) -> Value:
    """Each member holds its piece, along dim 0, of what its group's tensors fold into; dim 0 must divide."""

    def one(batch: Batch) -> Batch:
        members = batch.ids.shape[1]
        if batch.rows.dim() < 2 or batch.rows.shape[1] % members:
            raise _Unlike
        rows, places = folded.reduced(batch.rows, batch.ids, op)
        pieces = rows.reshape(rows.shape[0], members, rows.shape[1] // members, *rows.shape[2:])
        return Batch(*folded.dealt(pieces, places, members), batch.ranks)

    return _over("reduce_scatter_tensor", value, whole, one, plain, keep=False)


def all_to_all(value: Value, whole: Family, plain: Plain) -> Value:
    """Each member holds the pieces that the others have for it, one behind the other; dim 0 must divide."""

    def one(batch: Batch) -> Batch:
        members, shape = batch.ids.shape[1], batch.rows.shape
        if len(shape) < 2 or shape[1] % members:
            raise _Unlike
        pieces = batch.rows.reshape(shape[0], members, shape[1] // members, *shape[2:])
        rows, ids = folded.exchanged(pieces, batch.ids)
        return Batch(rows.reshape(rows.shape[0], *shape[1:]), ids, batch.ranks)

    return _over("all_to_all_single", value, whole, one, plain, keep=False)


def scatter(pieces: Sequence[Value], whole: Family, root: int) -> Value | None:
    """Member i holds the i-th of its root's tensors; None if they are not of one shape."""
    if any(value.cells[0].shape != pieces[0].cells[0].shape or not value.held.uniform for value in pieces):
        return None
    rows = torch.stack([value.cells[0] for value in pieces])
    parts = []
    for part in one_size(whole):
        if part.matrix is None or part.matrix.shape[1] != len(pieces):
            return None
        parts.append(Batch(rows, np.broadcast_to(np.arange(len(pieces)), part.matrix.shape), part.matrix))
    return everywhere(whole.world, parts)


def _for_all(places: Any, batch: Batch) -> Any:
    return np.broadcast_to(places[:, None], batch.ids.shape)


def move_shards(value: Value, whole: Family, gather_dim: int, shard_dim: int, plain: Plain) -> Value:
    """Shards of one dim have become shards of another; that dim must divide."""

    def one(batch: Batch) -> Batch:
        members, x = batch.ids.shape[1], batch.rows
        if not (0 <= shard_dim < x.dim() - 1 and 0 <= gather_dim < x.dim() - 1) or x.shape[shard_dim + 1] % members:
            raise _Unlike
        cut = x.unflatten(shard_dim + 1, (members, -1)).movedim(shard_dim + 1, 1)
        rows, ids = folded.exchanged(cut, batch.ids)
        whole_dim = rows.movedim(1, gather_dim + 1).flatten(gather_dim + 1, gather_dim + 2)
        return Batch(whole_dim.contiguous(), ids, batch.ranks)

    return _over("shard_dim_alltoall", value, whole, one, plain, keep=False)
