"""One op on LocalTensors: it runs once on each cell of the common refinement of its operands."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from localtensor._util.call_sites import origin
from localtensor.errors import AnotherMode, NotHeld, OutsideWrite
from localtensor.lockstep.dispatch.execute import Answers, Reader, Rowwise, column, each_row, on_cell
from localtensor.lockstep.dispatch.op_table import DRAWS_INTO, SHAPE_ONLY, Facts, Way, facts, refit, reshaped
from localtensor.lockstep.values.local_tensor import LocalTensor
from localtensor.lockstep.values.partition import Partition, by_value, common, one_row_a_cell, rows_apart, takes
from localtensor.lockstep.values.rank_int import is_rank_int
from localtensor.lockstep.values.storage import Memory, RowsApart, make_finer, memory_of, overlaps

# Within an op, its parts are dispatched as for plain tensors outside of any mode: below autograd and autocast, which
# have run already, and with functorch and conjugate views in place.
_KEYS = torch._C.DispatchKeySet
_OFF = [
    name
    for name in torch._C.DispatchKey.__members__
    if name.startswith("Autocast") or (name.startswith("Autograd") and name != "AutogradFunctionality")
]


def _set_of(names: Sequence[str]) -> Any:
    found = _KEYS.from_raw_repr(0)
    for name in names:
        found = found.add(getattr(torch._C.DispatchKey, name))
    return found


EXCLUDED = _set_of(["Python", "PythonTLSSnapshot", "ADInplaceOrView", *_OFF])
_INCLUDED = _set_of(["BackendSelect"])


def plainly() -> Any:
    """While inside, ops see plain tensors: no mode, subclass or autograd takes part."""
    return torch._C._ForceDispatchKeyGuard(_INCLUDED, EXCLUDED)


_LIFT_FRESH = torch.ops.aten.lift_fresh.default  # the result of `torch.tensor`, as a "view" of it


class Operands:
    """The LocalTensors and ints of each rank among the arguments of a call, and their common refinement `final`."""

    __slots__ = ("final", "found", "mode")

    def __init__(self, mode: Any, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self.mode = mode
        self.final: Partition | None = None
        self.found: list[LocalTensor] = []
        self._look(func, args)
        if kwargs:
            self._look(func, kwargs.values())

    def _look(self, func: Any, values: Any) -> None:
        for value in values:
            kind = type(value)
            if kind is LocalTensor:
                if value._mode is not self.mode:
                    raise AnotherMode(str(func), origin(sys._getframe(4)).place)
                self.found.append(value)
                self.add(value._partition)
            elif kind is list or kind is tuple:
                self._look(func, value)
            elif kind is torch.SymInt and is_rank_int(value):
                self.add(by_value(value.node.values, value.node.held))

    def add(self, other: Partition) -> None:
        """Refine by the partition of one more operand."""
        final = self.final
        if final is None or final is other:
            self.final = other
        else:
            self.final = common(final, other)


def run(mode: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the op on every rank; results are LocalTensors."""
    known = facts(func)
    if known.way is Way.PARTS:
        return func.decompose(*args, **kwargs)
    operands = Operands(mode, func, args, kwargs)
    final = operands.final
    if known.another is not None:
        done = known.another(mode, func, known, args, kwargs)
        if done is not NotImplemented:
            return done
    if final is None:
        if known.views and func is not _LIFT_FRESH:
            return func(*args, **kwargs)  # a tensor from outside stays plain, and numpy() reads it in place
        final = mode.everyone
    elif final.rows == 0:
        raise NotHeld(str(func), [], [])
    if mode.in_flight and not known.views and not known.value_free:
        check_reads(mode, func, known, args, kwargs, operands.found)
    if known.reshapes and type(args[0]) is LocalTensor:
        return reshaped(mode, func, args, kwargs)
    if known.value_free:
        final = one_row_a_cell(final)
    if known.way is Way.DRAWS:
        return drawn(mode, func, known, args, kwargs, final)
    try:
        return _run(mode, func, known, args, kwargs, operands.found, final)
    except RowsApart:
        return _run(mode, func, known, args, kwargs, operands.found, rows_apart(final))


def _run(mode: Any, func: Any, known: Facts, args: Any, kwargs: Any, found: list[LocalTensor], final: Partition) -> Any:
    if known.writes:
        prepare_writes(mode, func, known, args, kwargs, final)
    if known.writes and len(found) > 1 and overlaps(_written(known, args, kwargs), found):
        known = replace(known, way=Way.RANKS, vmap=False)  # the op checks the memory of a row, and may raise
    memory = _memory(func, found, final) if known.views else None
    with plainly():
        results = [on_cell(func, known, args, kwargs, final, cell) for cell in range(len(final.sizes))]
    if kwargs and known.writes:
        _refit_outs(func, known, args, kwargs, results)
    return Answers(mode, func, known, args, kwargs, final, memory).of(results)


def _memory(func: Any, found: list[LocalTensor], final: Partition) -> Memory | None:
    """The memory of the views that an op takes of its first tensor."""
    if not found:
        return None if func is _LIFT_FRESH else Memory(outside=True)  # a view of it that differs between ranks
    first = found[0]
    memory = first._memory
    if memory is None or not memory.outside:
        make_finer(first, final)  # where each rank takes another view, each needs a memory of its own
        if first._partition is not final:
            raise NotHeld(
                str(func), sorted({*first.ranks} - {*np.flatnonzero(final.row_of >= 0).tolist()}), first.ranks
            )
        memory = memory_of(first)
    return memory


def _written(known: Facts, args: Any, kwargs: dict[str, Any]) -> list[Any]:
    found: list[Any] = []
    if known.if_training is not None and not argument(known.if_training, args, kwargs):
        return found
    for index, name in known.writes:
        value = argument((index, name), args, kwargs)
        found.extend(value if isinstance(value, list | tuple) else [value])
    return [x for x in found if isinstance(x, Tensor)]


def argument(place: tuple[int, str], args: Any, kwargs: dict[str, Any]) -> Any:
    """The argument at this position or of this name; None if it is not given."""
    index, name = place
    return args[index] if index < len(args) else kwargs.get(name)


def prepare_writes(mode: Any, func: Any, known: Facts, args: Any, kwargs: dict[str, Any], final: Partition) -> None:
    """Refine what the op writes, so that it can hold the results.  Raises `OutsideWrite`, `BufferReused`."""
    for x in _written(known, args, kwargs):
        check_write(mode, x, str(func))
        if type(x) is LocalTensor and (x._memory is None or not x._memory.outside):
            make_finer(x, final)
            continue
        if final is not mode.everyone:
            raise OutsideWrite(str(func), origin(sys._getframe(3)).place, brief(x))


def _refit_outs(func: Any, known: Facts, args: Any, kwargs: dict[str, Any], results: Sequence[Any]) -> None:
    """Update the sizes of tensors given as out= to those of their cells."""
    for index, written in enumerate(known.returns):
        if written is not None and written >= len(args):
            x = kwargs.get(func._schema.arguments[written].name)
            if type(x) is LocalTensor:
                refit(func, x, results if len(known.returns) == 1 else column(results, index))


def check_write(mode: Any, x: Tensor, op: str) -> None:
    """Raises `BufferReused` if an unfinished collective reads or writes the tensor."""
    if mode.in_flight:
        mode.check_not_in_flight(x, op)


def check_reads(mode: Any, func: Any, known: Facts, args: Any, kwargs: Any, found: list[LocalTensor]) -> None:
    """Raises `ReadBeforeWait` if an unfinished collective writes what the op reads."""
    written = {id(x) for x in _written(known, args, kwargs)}
    for x in (*found, *(x for x in (*args, *kwargs.values()) if type(x) is Tensor)):
        if id(x) not in written:
            mode.check_read(x, str(func))


def brief(x: Tensor) -> str:
    """The dtype and shape of a tensor, as float32[4,2]."""
    return f"{str(x.dtype).removeprefix('torch.')}[{','.join(map(str, x.shape))}]"


# -- random ops


def drawn(mode: Any, func: Any, known: Facts, args: Any, kwargs: Any, final: Partition) -> Any:
    """A random op, once for each different stream and value; ranks with equal streams draw the same."""
    stream = mode.streams.of_call(args, kwargs)
    if known.writes and func.name() in DRAWS_INTO and type(args[0]) is LocalTensor:
        return _drawn_into(stream, func, args[0], args[1:], kwargs)
    wanted = common(one_row_a_cell(final) if func.name() in SHAPE_ONLY else final, stream.partition)
    if known.writes:
        prepare_writes(mode, func, known, args, kwargs, wanted)
    results: list[Any] = []
    with plainly(), stream.drawing(wanted) as at:
        for cell, rows in enumerate(wanted.sizes):
            done = Rowwise()
            for row, (each, named) in enumerate(each_row(Reader(wanted, cell), args, kwargs)):
                at(wanted.starts[cell] + row)
                done.append(func(*each, **named))
            results.append(done if rows > 1 else done[0])
    if kwargs and known.writes:
        _refit_outs(func, known, args, kwargs, results)
    return Answers(mode, func, known, args, kwargs, wanted, None).of(results)


def _drawn_into(stream: Any, func: Any, x: LocalTensor, rest: Any, kwargs: Any) -> LocalTensor:
    """A tensor overwritten with random numbers: drawn once for each stream and shape, then copied to all ranks."""
    others = Operands(x._mode, func, rest, kwargs).final
    wanted = common(one_row_a_cell(x._partition), stream.partition)
    wanted = wanted if others is None else common(wanted, others)
    final = common(x._partition, wanted)
    prepare_writes(x._mode, func, facts(func), (x,), {}, final)
    fresh = []
    with plainly(), stream.drawing(wanted) as at:
        for cell in range(len(wanted.sizes)):
            for row, (each, named) in enumerate(each_row(Reader(wanted, cell), rest, kwargs), wanted.starts[cell]):
                like = x.__localtensor_on__(wanted.ranks(row)[0])
                at(row)  # numbers are drawn in memory order, so the strides must be the tensor's
                target = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
                fresh.append(func(target, *each, **named))
    with plainly():
        for row, take in enumerate(takes(rows_apart(final), rows_apart(wanted))):
            place = int(final.cell_of[row])
            target = x._cells[place]
            (target[row - final.starts[place]] if final.sizes[place] > 1 else target).copy_(fresh[take.cell])
    return x
