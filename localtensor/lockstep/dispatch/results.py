"""From the results of an op on each cell to what the op returns: LocalTensors, ints per rank, or one plain value."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from localtensor._util.call_sites import origin
from localtensor.errors import NotInLockstep, RanksDiverge
from localtensor.lockstep.dispatch.op_table import Facts
from localtensor.lockstep.values.local_tensor import LocalTensor, wrap
from localtensor.lockstep.values.partition import Partition
from localtensor.lockstep.values.rank_int import rank_int
from localtensor.lockstep.values.stacks import is_in_blocks, joined, of_rows, row_by_row
from localtensor.lockstep.values.storage import Memory


class Rowwise(list[Any]):
    """The results of the rows of one cell, not stacked yet."""


class Answers:
    """What a call returns."""

    def __init__(
        self, mode: Any, func: Any, known: Facts, args: Any, kwargs: Any, final: Partition, memory: Memory | None
    ) -> None:
        self.mode, self.func, self.known, self.args, self.kwargs = mode, func, known, args, kwargs
        self.final, self.memory = final, memory

    def of(self, results: list[Any]) -> Any:
        """The results of all cells, in the structure that the op returns."""
        returns = self.known.returns
        if len(returns) == 1:
            return self.one(0, results)
        if not returns:
            return None
        columns = [column(results, index) for index in range(len(returns))]
        return tuple(self.one(index, each) for index, each in enumerate(columns))

    def one(self, index: int, results: list[Any]) -> Any:
        """The result of this number: the argument that was written, or what the cells have."""
        written = self.known.returns[index]
        if written is None:
            return self.value(results)
        if written < len(self.args):
            return self.args[written]
        return self.kwargs[self.func._schema.arguments[written].name]

    def value(self, results: list[Any]) -> Any:
        """One result, of which each cell has its own."""
        first = results[0][0] if type(results[0]) is Rowwise else results[0]
        if isinstance(first, Tensor):
            return self.tensor(results)
        if first is None:
            return None
        if isinstance(first, list | tuple):
            lengths = {len(one) for one in _each(results)}
            if len(lengths) > 1:
                raise NotInLockstep(str(self.func), f"ranks get lists of different lengths: {sorted(lengths)}")
            found = [self.value(column(results, index)) for index in range(len(first))]
            return type(first)(found)
        return self.plain(results)

    def tensor(self, results: list[Any]) -> LocalTensor:
        """The LocalTensor of these cells, those of one shape in one stack."""
        final = self.final
        if any(type(one) is Rowwise for one in results):
            rows = [row for one in results for row in (one if type(one) is Rowwise else [one])]
            cells, final = of_rows(rows, final)
            return wrap(cells, final, self.mode)
        if self.memory is not None:
            return seen_alike(wrap(tuple(results), final, self.mode, self.memory))
        for cell, size in enumerate(final.sizes):
            if size > 1:
                results[cell] = tidy(results[cell])
        if len(results) == 1:
            return wrap((results[0],), final, self.mode)
        return wrap(*joined(tuple(results), final), self.mode)

    def plain(self, results: list[Any]) -> Any:
        """A number or the like: the same on all ranks, or an int for each."""
        final = self.final
        rows: list[Any] = []
        for cell, one in enumerate(results):
            rows.extend(one if type(one) is Rowwise else [one] * final.sizes[cell])
        first = rows[0]
        if all(same(row, first) for row in rows):
            return first
        if type(first) is int and self.func.name() != "aten::_local_scalar_dense":
            return rank_int(np.array(rows)[final.row_of], final.held)
        values = {rank: rows[row] for rank, row in enumerate(final.row_of) if row >= 0}
        place = origin(sys._getframe(4)).place
        raise RanksDiverge(_asked(self.func), "", values, place)


def seen_alike(x: LocalTensor) -> LocalTensor:
    """A lazy conjugate or negative is one from outside, too, but where sizes differ, which torch cannot resolve."""
    first = x._cells[0]
    if (first.is_conj() or first.is_neg()) and all(type(size) is int for size in x.shape):
        torch._C._set_conj(x, first.is_conj())
        torch._C._set_neg(x, first.is_neg())
    return x


def same(one: Any, other: Any) -> bool:
    """Equal, or both not a number."""
    both_floats = isinstance(one, float) and isinstance(other, float)
    return bool(one == other) or (both_floats and math.isnan(one) and math.isnan(other))


def _asked(func: Any) -> str:
    return "Tensor.item" if func.name() == "aten::_local_scalar_dense" else str(func)


def _each(results: Sequence[Any]) -> Any:
    for one in results:
        if type(one) is Rowwise:
            yield from one
        else:
            yield one


def column(results: Sequence[Any], index: int) -> list[Any]:
    """One of the several results of each cell."""
    return [Rowwise([row[index] for row in one]) if type(one) is Rowwise else one[index] for one in results]


def tidy(cell: Tensor) -> Tensor:
    """A stack whose rows lie as the op alone would have left them: each dense."""
    if cell.layout is not torch.strided or cell.is_contiguous() or is_in_blocks(cell):
        return cell
    return row_by_row(cell)
