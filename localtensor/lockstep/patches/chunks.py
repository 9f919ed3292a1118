"""Each rank takes its own chunk of what it holds: one pass for all of them, where a split for each would be quadratic."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from localtensor.layout.shards import bounds
from localtensor.lockstep.comms.collectives import Value
from localtensor.lockstep.values.partition import NOWHERE, Partition, partition
from localtensor.lockstep.values.stacks import Cells, joined


def take_chunk(value: Value, dim: int, chunks: int, index: Any, *, keep_order: bool = False) -> Value:
    """Each rank's chunk: the `index`-th of `chunks` along `dim`, as torch.chunk cuts; fresh, and contiguous.

    `index` is int64 of shape [world]; a rank whose index is negative takes nothing.  With `keep_order`, the dims of a
    chunk lie in memory in the order that those of the whole have, as in a clone.
    """
    held = value.held
    row_of, cells, sizes, start = np.full(held.world, NOWHERE), [], [], 0
    for cell, rows, first in zip(value.cells, held.sizes, held.starts, strict=True):
        stack = cell if rows > 1 else cell[None]
        order = _order(stack) if keep_order else list(range(stack.dim()))
        stack = stack.permute(order)
        here = (held.row_of >= first) & (held.row_of < first + rows) & (index >= 0)
        for taken, codes, ranks in _pieces(stack, order.index(dim + 1), chunks, held.row_of - first, index, here):
            distinct, places = np.unique(codes, return_inverse=True)
            row_of[ranks] = start + places.reshape(-1)
            wanted = torch.from_numpy(distinct).to(taken.device)
            all_in_order = len(distinct) == taken.shape[0]  # codes are row numbers of `taken`, in order
            fresh = (
                taken.clone(memory_format=torch.contiguous_format) if all_in_order else taken.index_select(0, wanted)
            )
            fresh = fresh.permute(np.argsort(order).tolist())
            cells.append(fresh if len(distinct) > 1 else fresh[0])
            sizes.append(len(distinct))
            start += len(distinct)
    found: tuple[Cells, Partition] = joined(tuple(cells), partition(row_of, sizes))
    return Value(*found)


def _order(stack: Tensor) -> list[int]:
    """The dims of the rows, the one with the largest step in memory first; behind the dim of rows."""
    return [0, *sorted(range(1, stack.dim()), key=lambda dim: -int(stack.stride()[dim]))]


def _pieces(stack: Tensor, dim: int, chunks: int, row: Any, index: Any, here: Any) -> Any:
    """Chunks of one size as rows of one stack, the row of it that each rank takes, and which ranks do."""
    size = stack.shape[dim]
    lengths = [length for _, length in bounds(size, chunks)]
    full = lengths[0]
    count = sum(length == full for length in lengths) if full else 0
    if count:
        ranks = np.flatnonzero(here & (index < count))
        if len(ranks):
            cut = stack.narrow(dim, 0, count * full).unflatten(dim, (count, full)).movedim(dim, 1).flatten(0, 1)
            yield cut, row[ranks] * count + index[ranks], ranks
    for place in range(count, chunks):
        ranks = np.flatnonzero(here & (index == place if lengths[place] else index >= place))
        if len(ranks):
            start = min(full * place, size)
            codes = row[ranks] if lengths[place] else np.zeros(len(ranks), np.int64)
            piece = stack.narrow(dim, start, lengths[place])
            yield (piece if lengths[place] else piece[:1]), codes, ranks
        if not lengths[place]:
            break
