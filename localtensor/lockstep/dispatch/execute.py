"""One op on one cell: on its stacks, under vmap, or row by row; then its results as LocalTensors, ints of each rank, or
plain values."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C import _functorch
from torch._ops import OpOverload as Op

from localtensor._util.call_sites import Args, Kwargs, origin
from localtensor.errors import NotInLockstep, RanksDiverge
from localtensor.lockstep.dispatch.batching import add_dims
from localtensor.lockstep.dispatch.op_table import Execution, OpTraits
from localtensor.lockstep.values.local_tensor import LocalTensor, Mode, wrap
from localtensor.lockstep.values.partition import Partition, selections
from localtensor.lockstep.values.rank_int import RankBool, RankInt, on_rank, rank_bool, rank_int
from localtensor.lockstep.values.stacks import cells_of_rows, copy_as_blocks, dense_strides, is_in_blocks, merge_alike
from localtensor.lockstep.values.storage import Memory, SeparateRows


class PerRow(list[Any]):
    """The results of the rows of one cell, not yet stacked."""


class ResultBuilder:
    """Builds the return value of a call from the results of its cells."""

    def __init__(
        self, mode: Mode, func: Op, traits: OpTraits, args: Args, kwargs: Kwargs, final: Partition,
        memory: Memory | None
    ) -> None:  # fmt: skip
        self.mode, self.func, self.traits, self.args, self.kwargs = mode, func, traits, args, kwargs
        self.final, self.memory = final, memory

    def of(self, results: list[Any]) -> Any:
        """The return value of the op."""
        returns = self.traits.returns
        if len(returns) == 1:
            return self.one(0, results)
        if not returns:
            return None
        columns = [result_at(results, index) for index in range(len(returns))]
        return tuple(self.one(index, each) for index, each in enumerate(columns))

    def one(self, index: int, results: list[Any]) -> object:
        """The result at this position: the argument that was written, or the value of the cells' results."""
        written = self.traits.returns[index]
        if written is None:
            return self.value(results)
        if written < len(self.args):
            return self.args[written]
        return self.kwargs[self.func._schema.arguments[written].name]

    def value(self, results: list[Any]) -> Any:
        """One result of the op, from that of each cell."""
        first = results[0][0] if type(results[0]) is PerRow else results[0]
        if isinstance(first, Tensor):
            return self.tensor(results)
        if first is None:
            return None
        if isinstance(first, list | tuple):
            lengths = {len(one) for each in results for one in (each if type(each) is PerRow else (each,))}
            if len(lengths) > 1:
                raise NotInLockstep(str(self.func), f"ranks get lists of different lengths: {sorted(lengths)}")
            found = [self.value(result_at(results, index)) for index in range(len(first))]
            return type(first)(found)
        return self.plain(results)

    def tensor(self, results: list[Any]) -> LocalTensor:
        """The LocalTensor of these cells; cells of one shape are stacked."""
        final = self.final
        if any(type(one) is PerRow for one in results):
            rows = [row for one in results for row in (one if type(one) is PerRow else [one])]
            cells, final = cells_of_rows(rows, final)
            return wrap(cells, final, self.mode)
        if self.memory is not None:
            return copy_lazy_flags(wrap(tuple(results), final, self.mode, self.memory))
        for cell, size in enumerate(final.sizes):
            if size > 1:
                results[cell] = dense_rows(results[cell])
        if len(results) == 1:
            return wrap((results[0],), final, self.mode)
        return wrap(*merge_alike(tuple(results), final), self.mode)

    def plain(self, results: list[Any]) -> object:
        """A plain value: the same on all ranks, or an int of each rank."""
        final = self.final
        rows: list[Any] = []
        for cell, one in enumerate(results):
            rows.extend(one if type(one) is PerRow else [one] * final.sizes[cell])
        first = rows[0]
        if self.mode.answers is not None and self.func.name() == "aten::equal":
            self.mode.answers.extend(rows)
            return first
        if all(equal_or_nan(row, first) for row in rows):
            return first
        if type(first) is int:
            return rank_int(np.array(rows)[final.row_of], final.held)
        call = "Tensor.item" if self.func.name() == "aten::_local_scalar_dense" else str(self.func)
        if type(first) is bool and call == "Tensor.item":
            return rank_bool(np.array(rows)[final.row_of], final.held)
        values = {rank: rows[row] for rank, row in enumerate(final.row_of) if row >= 0}
        raise RanksDiverge(call, "", values, origin(sys._getframe(4)).place)


def copy_lazy_flags(x: LocalTensor) -> LocalTensor:
    """Copy the lazy conjugate and negative flags of the cells, unless sizes differ, where torch cannot resolve them."""
    first = x._cells[0]
    if (first.is_conj() or first.is_neg()) and all(type(size) is int for size in x.shape):
        torch._C._set_conj(x, first.is_conj())
        torch._C._set_neg(x, first.is_neg())
    return x


def equal_or_nan(one: Any, other: Any) -> bool:
    """Whether two values are equal, or both NaN."""
    both_floats = isinstance(one, float) and isinstance(other, float)
    return bool(one == other) or (both_floats and math.isnan(one) and math.isnan(other))


def result_at(results: Sequence[Any], index: int) -> list[Any]:
    """The result at this position of each cell."""
    return [PerRow([row[index] for row in one]) if type(one) is PerRow else one[index] for one in results]


def dense_rows(cell: Tensor) -> Tensor:
    """A stack with each row dense, as the op would lay it out alone."""
    if cell.layout is not torch.strided or cell.is_contiguous() or is_in_blocks(cell):
        return cell
    return copy_as_blocks(cell)


def run_on_cell(func: Op, traits: OpTraits, args: Args, kwargs: Kwargs, final: Partition, cell: int) -> Any:
    """The result of the op on one cell: a stack of results if the cell has several rows."""
    rows = final.sizes[cell]
    reader = CellReader(final, cell)
    if rows == 1:
        return func(*reader.map(args), **{name: reader(value) for name, value in kwargs.items()})
    if traits.way is Execution.STACK:
        try:
            done = _on_stack(func, traits, reader, args, kwargs)
            if done is not NotImplemented:
                return done
        except (RuntimeError, IndexError):  # the op on a row raises the error, unless our rule was wrong
            if traits.lists and traits.writes:  # some tensors may be written already
                raise
    if traits.vmap and not _is_mixed_precision(args):
        try:
            return _under_vmap(func, traits, reader, args, kwargs)
        except (RuntimeError, IndexError):  # vmap does not cover the call; a wrong call raises again row by row
            pass
    if traits.views:
        raise SeparateRows
    return row_after_row(func, reader, args, kwargs)


def _is_mixed_precision(args: Args) -> bool:
    """Whether float dtypes differ: batching rules promote where ops do not, as layer_norm's under autocast."""
    return len({x.dtype for x in args if isinstance(x, Tensor) and x.dtype.is_floating_point}) > 1


class CellReader:
    """The part of each argument that one cell reads."""

    __slots__ = ("cell", "final", "rank", "rows", "stacked")

    def __init__(self, final: Partition, cell: int) -> None:
        self.final, self.cell, self.rows = final, cell, final.sizes[cell]
        self.stacked = False  # whether the last tensor read has a row for each value
        self.rank = -1

    def __call__(self, value: Any) -> Any:
        kind = type(value)
        if kind is LocalTensor:
            if value._partition is self.final:
                self.stacked = self.rows > 1
                return value._cells[self.cell]
            take = selections(self.final, value._partition)[self.cell]
            self.stacked = take.stacked
            return take.of(value._cells)
        self.stacked = False
        if kind is list or kind is tuple:
            return self.map(value)
        if kind is RankInt or kind is RankBool:
            if self.rank < 0:
                self.rank = self.final.ranks(self.final.starts[self.cell])[0]
            return on_rank(value, self.rank)
        return value

    def map(self, values: Sequence[Any]) -> Any:
        """The part of each of several arguments; `stacked` is set if any has a row for each value."""
        any_stacked, found = False, []
        for value in values:
            found.append(self(value))
            any_stacked = any_stacked or self.stacked
        self.stacked = any_stacked
        return found if type(values) is list else tuple(found)


# -- on the stacks


def _on_stack(func: Op, traits: OpTraits, reader: CellReader, args: Args, kwargs: Kwargs) -> object:
    flat: list[Any] = []
    stacked: list[Any] = []
    for value in args:
        kind = type(value)
        if kind is list or kind is tuple:
            items, flags = [], []
            for one in value:
                items.append(reader(one))
                flags.append(reader.stacked)
            flat.append(items)
            stacked.append(tuple(flags) if True in flags else False)
        else:
            flat.append(reader(value))
            stacked.append(reader.stacked)
    named = {}
    for name, value in kwargs.items():
        named[name] = reader(value)
        if reader.stacked:
            return NotImplemented
    if traits.rule is not None:
        return traits.rule(func, tuple(stacked), *flat, **named)
    return _pointwise(func, flat, named, stacked)


def _pointwise(func: Op, args: list[Any], named: dict[str, Any], stacked: list[bool]) -> object:
    """A pointwise op, with dims added behind the dim of rows so that rows broadcast."""
    dims, most, alike = [], 0, True
    for value, is_stacked in zip(args, stacked, strict=True):
        if isinstance(value, Tensor):
            dim = value.dim() - is_stacked
            dims.append(dim)
            most = max(most, dim)
        else:
            if is_stacked:
                return NotImplemented
            dims.append(-1)
    for index, dim in enumerate(dims):
        if dim < 0:
            continue
        if dim < most and stacked[index]:
            if dim == 0:
                alike = False  # a scalar in a stack is no scalar: it would take part in type promotion
            args[index] = add_dims(args[index], most - dim)
    if not alike and len({x.dtype for x, dim in zip(args, dims, strict=True) if dim >= 0}) > 1:
        return NotImplemented
    return func(*args, **named)


# -- under vmap


def _under_vmap(func: Op, traits: OpTraits, reader: CellReader, args: Args, kwargs: Kwargs) -> Any:
    """The op under vmap.  It writes to copies, which are copied back at the end: a batching rule may write to a copy of
    its own, or fail half-way."""
    level = _functorch._vmap_increment_nesting(reader.rows, "error")
    written = {index for index, _ in traits.writes}
    names = {name for _, name in traits.writes}
    fresh: list[tuple[Tensor, Tensor]] = []
    plain_order = True

    def lift(value: object, *, writes: bool) -> Any:
        nonlocal plain_order
        if isinstance(value, list | tuple):
            return type(value)([lift(one, writes=writes) for one in value])
        found = reader(value)
        if not reader.stacked:
            return found
        plain_order = plain_order and found.is_contiguous()
        if writes:
            fresh.append((found, found.clone(memory_format=torch.contiguous_format)))
            found = fresh[-1][1]
        return _functorch._add_batch_dim(found, 0, level)

    try:
        lifted = [lift(value, writes=index in written) for index, value in enumerate(args)]
        batched = func(*lifted, **{name: lift(value, writes=name in names) for name, value in kwargs.items()})
        done = _remove_batch_dims(batched, lambda x: _functorch._remove_batch_dim(x, level, reader.rows, 0))
    finally:
        _functorch._vmap_decrement_nesting()
    for cell, values in fresh:
        cell.copy_(values)
    if traits.views or traits.writes or (plain_order and _is_contiguous(done)):
        return done
    return _with_layout_of_op(func, reader, args, kwargs, done)


def _is_contiguous(done: object) -> bool:
    if isinstance(done, list | tuple):
        return all(_is_contiguous(one) for one in done)
    return not isinstance(done, Tensor) or done.is_contiguous()


def _remove_batch_dims(value: object, lower: Callable[[Tensor], Tensor]) -> object:
    if isinstance(value, Tensor):
        return lower(value)
    return type(value)([_remove_batch_dims(one, lower) for one in value]) if isinstance(value, list | tuple) else value


def _with_layout_of_op(func: Op, reader: CellReader, args: Args, kwargs: Kwargs, done: object) -> object:
    """The results, with rows laid out in memory as the op lays out the first."""
    first, named = next(row_args(reader, args, kwargs))
    return _with_layout(done, func(*first, **named))


def _with_layout(done: object, alone: Any) -> object:
    if isinstance(done, list | tuple):
        return type(done)([_with_layout(*each) for each in zip(done, alone, strict=True)])
    if not isinstance(done, Tensor):
        return done
    strides, step = dense_strides(alone.shape, alone.stride())
    if done.stride()[1:] == strides:
        return done
    return torch.empty_strided(done.shape, (step, *strides), dtype=done.dtype, device=done.device).copy_(done)


# -- row after row


def row_after_row(func: Op, reader: CellReader, args: Args, kwargs: Kwargs) -> PerRow:
    """The op on each row, in order."""
    return PerRow([func(*each, **named) for each, named in row_args(reader, args, kwargs)])


def row_args(reader: CellReader, args: Args, kwargs: Kwargs) -> Iterator[Any]:
    """The arguments of each row."""

    def of_row(value: object, row: int) -> Any:
        if isinstance(value, list | tuple):
            return type(value)([of_row(one, row) for one in value])
        found = reader(value)
        return found[row] if reader.stacked else found

    for row in range(reader.rows):
        yield [of_row(value, row) for value in args], {name: of_row(value, row) for name, value in kwargs.items()}
