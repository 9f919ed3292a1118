"""Uneven shards put together: padded, gathered and cut back in three steps, where torch takes a dozen ops."""

from typing import Any

import torch
import torch.distributed._functional_collectives as functional
from torch import Tensor

from localtensor.lockstep.comms.collectives import Value
from localtensor.lockstep.dispatch.dispatcher import plainly
from localtensor.lockstep.values.local_tensor import LocalTensor, wrap
from localtensor.lockstep.values.stacks import joined


def gather(mode: Any, local: Any, dim: int, size: int, mesh: Any, mesh_dim: int) -> LocalTensor:
    """The whole of which each rank holds a shard along `dim`, `size` long; shards may be short or empty."""
    chunks = mesh.size(mesh_dim)
    with plainly():
        fitting = wrap(*_padded(Value(local._cells, local._partition), dim, -(-size // chunks)), mode)
    one = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor  # the name before 2.13
    found: Any = one(fitting, 0, (mesh, mesh_dim))
    found = found.wait() if hasattr(found, "wait") else found
    with plainly():
        pairs = zip(found._cells, found._partition.sizes, strict=True)
        return wrap(tuple(_whole(cell, rows > 1, dim, chunks, size) for cell, rows in pairs), found._partition, mode)


def _padded(value: Value, dim: int, length: int) -> Value:
    """Every rank's tensor with zeros behind it along `dim`, so that all have this length there."""
    cells = []
    for cell, rows in zip(value.cells, value.held.sizes, strict=True):
        along = dim + (rows > 1)
        missing = [length - size if place == along else size for place, size in enumerate(cell.shape)]
        cells.append(torch.cat([cell, cell.new_zeros(missing)], along) if missing[along] else cell.contiguous())
    return Value(*joined(tuple(cells), value.held, by_shape=True))


def _whole(cell: Tensor, stacked: bool, dim: int, chunks: int, size: int) -> Tensor:
    """Chunks that lie one behind the other along dim 0 stand along `dim`, and what is over `size` is cut off."""
    first = int(stacked)
    apart: Tensor = cell.unflatten(first, (chunks, cell.shape[first] // chunks))
    whole: Tensor = apart.movedim(first, dim + first).flatten(dim + first, dim + first + 1)
    return whole.narrow(dim + first, 0, size).clone(memory_format=torch.contiguous_format)
