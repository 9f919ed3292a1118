"""One op on LocalTensors: it runs once on each cell of the common refinement of its operands."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._ops import OpOverload as Op

from localtensor._util.call_sites import Args, Kwargs, origin
from localtensor.errors import AnotherMode, NotHeld, OutsideWrite
from localtensor.lockstep.dispatch import op_table
from localtensor.lockstep.dispatch.execute import CellReader, PerRow, ResultBuilder, result_at, row_args, run_on_cell
from localtensor.lockstep.dispatch.op_table import Execution, OpTraits, op_traits, reshape_in_place, resize_out
from localtensor.lockstep.values.local_tensor import LocalTensor, Mode
from localtensor.lockstep.values.partition import (
    Partition,
    by_value,
    one_cell_per_row,
    one_row_per_cell,
    refinement,
    selections,
)
from localtensor.lockstep.values.rank_int import RankBool, RankInt
from localtensor.lockstep.values.rng_streams import Stream
from localtensor.lockstep.values.storage import Memory, SeparateRows, any_overlap, memory_of, refine

# Within an op, its parts are dispatched as for plain tensors outside of any mode: below autograd and autocast, which
# have run already, and with functorch and conjugate views in place.
_KEYS = torch._C.DispatchKeySet
_EXCLUDED_NAMES = [
    name
    for name in torch._C.DispatchKey.__members__
    if name.startswith("Autocast") or (name.startswith("Autograd") and name != "AutogradFunctionality")
]


def _key_set(names: Sequence[str]) -> torch._C.DispatchKeySet:
    found = _KEYS.from_raw_repr(0)
    for name in names:
        found = found.add(getattr(torch._C.DispatchKey, name))
    return found


EXCLUDED = _key_set(["Python", "PythonTLSSnapshot", "ADInplaceOrView", *_EXCLUDED_NAMES])
_INCLUDED = _key_set(["BackendSelect"])


plain_dispatch: Callable[[], AbstractContextManager[object]] = partial(
    torch._C._ForceDispatchKeyGuard, _INCLUDED, EXCLUDED
)
"""While inside, ops see plain tensors: no mode, subclass or autograd takes part."""


_LIFT_FRESH = torch.ops.aten.lift_fresh.default  # the result of `torch.tensor`, as a "view" of it


class Operands:
    """The LocalTensors and ints of each rank among the arguments of a call, and their common refinement `final`."""

    __slots__ = ("final", "found", "mode")

    def __init__(self, mode: Mode, func: Op, args: Args, kwargs: Kwargs) -> None:
        self.mode = mode
        self.final: Partition | None = None
        self.found: list[LocalTensor] = []
        self._look(func, args)
        if kwargs:
            self._look(func, kwargs.values())

    def _look(self, func: Op, values: Iterable[Any]) -> None:
        for value in values:
            kind = type(value)
            if kind is LocalTensor:
                if value._mode is not self.mode:
                    raise AnotherMode(str(func), origin(sys._getframe(4)).place)
                self.found.append(value)
                self.add(value._partition)
            elif kind is list or kind is tuple:
                self._look(func, value)
            elif kind is RankInt or kind is RankBool:
                self.add(by_value(value.node.values.astype(np.int64, copy=False), value.node.held))

    def add(self, other: Partition) -> None:
        """Refine by the partition of one more operand."""
        final = self.final
        if final is None or final is other:
            self.final = other
        else:
            self.final = refinement(final, other)


def run_op(mode: Mode, func: Op, args: Args, kwargs: Kwargs) -> object:
    """Run the op on every rank; results are LocalTensors."""
    traits = op_traits(func)
    if traits.way is Execution.PARTS:
        return func.decompose(*args, **kwargs)
    operands = Operands(mode, func, args, kwargs)
    final = operands.final
    if traits.rewrite is not None:
        done = traits.rewrite(mode, func, traits, args, kwargs)
        if done is not NotImplemented:
            return done
    if final is None:
        if traits.views and func is not _LIFT_FRESH:
            return func(*args, **kwargs)  # a tensor from outside stays plain, and numpy() reads it in place
        final = mode.everyone
    elif final.rows == 0:
        raise NotHeld(str(func), [], [])
    if mode.in_flight and not traits.views and not traits.value_free:
        check_reads(mode, func, traits, args, kwargs, operands.found)
    if traits.reshapes and type(args[0]) is LocalTensor:
        return reshape_in_place(mode, func, args, kwargs)
    if traits.value_free:
        final = one_row_per_cell(final)
    if traits.way is Execution.DRAWS:
        return run_random_op(mode, func, traits, args, kwargs, final)
    try:
        return _run_on_cells(mode, func, traits, args, kwargs, operands.found, final)
    except SeparateRows:
        return _run_on_cells(mode, func, traits, args, kwargs, operands.found, one_cell_per_row(final))


def _run_on_cells(
    mode: Mode, func: Op, traits: OpTraits, args: Args, kwargs: Kwargs, found: list[LocalTensor], final: Partition
) -> object:  # fmt: skip
    if traits.writes:
        prepare_writes(mode, func, traits, args, kwargs, final)
    if traits.writes and len(found) > 1 and any_overlap(_written_tensors(traits, args, kwargs), found):
        traits = replace(traits, way=Execution.RANKS, vmap=False)  # the op checks the memory of a row, and may raise
    memory = _memory_of_views(func, found, final) if traits.views else None
    with plain_dispatch():
        try:
            results = [run_on_cell(func, traits, args, kwargs, final, cell) for cell in range(len(final.sizes))]
        except _REJECTIONS as error:
            if final.rows > 1 and not traits.writes and _runs_on_some(func, args, kwargs, final):
                mode.caught.note(error, "an error of some ranks")
            raise
    if kwargs and traits.writes:
        _refit_outs(func, traits, args, kwargs, results)
    return ResultBuilder(mode, func, traits, args, kwargs, final, memory).of(results)


_REJECTIONS = (RuntimeError, TypeError, ValueError, IndexError)


def _runs_on_some(func: Op, args: Args, kwargs: Kwargs, final: Partition) -> bool:
    """Whether an op that has raised runs for some kind of rank."""
    for cell in range(len(final.sizes)):
        for own, named in row_args(CellReader(final, cell), args, kwargs):
            try:
                func(*own, **named)
            except _REJECTIONS:
                continue
            return True
    return False


def _memory_of_views(func: Op, found: list[LocalTensor], final: Partition) -> Memory | None:
    """The memory of the views that an op takes of its first tensor."""
    if not found:
        return None if func is _LIFT_FRESH else Memory(outside=True)  # a view of it that differs between ranks
    first = found[0]
    memory = first._memory
    if memory is None or not memory.outside:
        refine(first, final)  # where each rank takes another view, each needs a memory of its own
        if first._partition is not final:
            raise NotHeld(
                str(func), sorted({*first.ranks} - {*np.flatnonzero(final.row_of >= 0).tolist()}), first.ranks
            )
        memory = memory_of(first)
    return memory


def _written_tensors(traits: OpTraits, args: Args, kwargs: Kwargs) -> list[Any]:
    found: list[Any] = []
    if traits.if_training is not None and not argument_at(traits.if_training, args, kwargs):
        return found
    for index, name in traits.writes:
        value = argument_at((index, name), args, kwargs)
        found.extend(value if isinstance(value, list | tuple) else [value])
    return [x for x in found if isinstance(x, Tensor)]


def argument_at(place: tuple[int, str], args: Args, kwargs: Kwargs) -> object:
    """The argument at this position or of this name; None if it is not given."""
    index, name = place
    return args[index] if index < len(args) else kwargs.get(name)


def prepare_writes(mode: Mode, func: Op, traits: OpTraits, args: Args, kwargs: Kwargs, final: Partition) -> None:
    """Refine what the op writes, so that it can hold the results.  Raises `OutsideWrite`, `BufferReused`."""
    for x in _written_tensors(traits, args, kwargs):
        check_write(mode, x, str(func))
        if type(x) is LocalTensor and (x._memory is None or not x._memory.outside):
            refine(x, final)
            continue
        if final is not mode.everyone:
            raise OutsideWrite(str(func), origin(sys._getframe(3)).place, dtype_and_shape(x))


def _refit_outs(func: Op, traits: OpTraits, args: Args, kwargs: Kwargs, results: Sequence[Any]) -> None:
    """Update the sizes of tensors given as out= to those of their cells."""
    for index, written in enumerate(traits.returns):
        if written is not None and written >= len(args):
            x = kwargs.get(func._schema.arguments[written].name)
            if type(x) is LocalTensor:
                resize_out(func, x, results if len(traits.returns) == 1 else result_at(results, index))


def check_write(mode: Mode, x: Tensor, op: str) -> None:
    """Raises `BufferReused` if an unfinished collective has the tensor, `NotInLockstep` if it is on each rank another one of several."""
    if mode.in_flight:
        mode.check_not_in_flight(x, op)
    mode.joined.check_write(x, op)


def check_reads(mode: Mode, func: Op, traits: OpTraits, args: Args, kwargs: Kwargs, found: list[LocalTensor]) -> None:
    """Raises `ReadBeforeWait` if an unfinished collective writes what the op reads."""
    written = {id(x) for x in _written_tensors(traits, args, kwargs)}
    for x in (*found, *(x for x in (*args, *kwargs.values()) if type(x) is Tensor)):
        if id(x) not in written:
            mode.check_read(x, str(func))


def dtype_and_shape(x: Tensor) -> str:
    """The dtype and shape of a tensor, as float32[4,2]."""
    return f"{str(x.dtype).removeprefix('torch.')}[{','.join(map(str, x.shape))}]"


# -- random ops


def run_random_op(mode: Mode, func: Op, traits: OpTraits, args: Args, kwargs: Kwargs, final: Partition) -> object:
    """A random op, once for each different stream and value; ranks with equal streams draw the same."""
    stream = mode.streams.of_call(args, kwargs)
    if traits.writes and func.name() in op_table.RANDOM_FILLS and type(args[0]) is LocalTensor:
        return _fill_randomly(stream, func, args[0], args[1:], kwargs)
    wanted = refinement(one_row_per_cell(final) if func.name() in op_table.RANDOM_LIKE_OPS else final, stream.partition)
    if traits.writes:
        prepare_writes(mode, func, traits, args, kwargs, wanted)
    results: list[Any] = []
    with plain_dispatch(), stream.drawing(wanted) as at:
        for cell, rows in enumerate(wanted.sizes):
            done = PerRow()
            for row, (each, named) in enumerate(row_args(CellReader(wanted, cell), args, kwargs)):
                at(wanted.starts[cell] + row)
                done.append(func(*each, **named))
            results.append(done if rows > 1 else done[0])
    if kwargs and traits.writes:
        _refit_outs(func, traits, args, kwargs, results)
    return ResultBuilder(mode, func, traits, args, kwargs, wanted, None).of(results)


def _fill_randomly(stream: Stream, func: Op, x: LocalTensor, rest: Args, kwargs: Kwargs) -> LocalTensor:
    """A tensor overwritten with random numbers: drawn once for each stream and shape, then copied to all ranks."""
    others = Operands(x._mode, func, rest, kwargs).final
    wanted = refinement(one_row_per_cell(x._partition), stream.partition)
    wanted = wanted if others is None else refinement(wanted, others)
    final = refinement(x._partition, wanted)
    prepare_writes(x._mode, func, op_traits(func), (x,), {}, final)
    fresh = []
    with plain_dispatch(), stream.drawing(wanted) as at:
        for cell in range(len(wanted.sizes)):
            for row, (each, named) in enumerate(row_args(CellReader(wanted, cell), rest, kwargs), wanted.starts[cell]):
                like = x.__localtensor_on__(wanted.ranks(row)[0])
                at(row)  # numbers are drawn in memory order, so the strides must be the tensor's
                target = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
                fresh.append(func(target, *each, **named))
    with plain_dispatch():
        for row, take in enumerate(selections(one_cell_per_row(final), one_cell_per_row(wanted))):
            place = int(final.cell_of[row])
            target = x._cells[place]
            (target[row - final.starts[place]] if final.sizes[place] > 1 else target).copy_(fresh[take.cell])
    return x
