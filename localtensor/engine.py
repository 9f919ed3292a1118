"""One op on LocalTensors: on each cell of the common refinement of its operands, and never once more."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch

from localtensor.answers import Answers, Rowwise, reshaped
from localtensor.errors import AnotherMode, NotHeld, OutsideWrite
from localtensor.folding import Partition, by_value, common, one_row_a_cell, rows_apart, takes
from localtensor.frames import origin
from localtensor.memory import make_finer, memory_of
from localtensor.physical import FORMS
from localtensor.rank_ints import is_rank_int, on_rank
from localtensor.tensor import LocalTensor
from localtensor.ways import DRAWS_INTO, SHAPE_ONLY, Facts, Way, facts

# Inside an op, its parts are dispatched as for plain tensors outside of any mode: below autograd and autocast, whose
# work is done above us, and with functorch and conjugate views in place.
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


INCLUDED, EXCLUDED = torch._C._dispatch_tls_local_include_set(), _set_of(["ADInplaceOrView", *_OFF])


def plainly() -> Any:
    """While inside, tensors are plain: no mode, no subclass, no autograd sees what is done."""
    return torch._C._ForceDispatchKeyGuard(_SERVING, EXCLUDED)


_SERVING = _set_of(["BackendSelect"])


class Operands:
    """The arguments of one call: which LocalTensors and ints per rank are among them, and what they refine to."""

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
        final = self.final
        if final is None or final is other:
            self.final = other
        else:
            self.final = common(final, other)


def run(mode: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The op on every rank, as LocalTensors."""
    known = facts(func)
    if known.way is Way.PARTS:
        return func.decompose(*args, **kwargs)
    operands = Operands(mode, func, args, kwargs)
    final = operands.final
    if final is None:
        final = mode.everyone
    elif final.rows == 0:
        raise NotHeld(str(func), [], [])
    if known.value_free:
        final = one_row_a_cell(final)
    if known.way is Way.DRAWS:
        return drawn(mode, func, known, args, kwargs, final)
    try:
        return _run(mode, func, known, args, kwargs, operands.found, final)
    except _RowsApart:
        return _run(mode, func, known, args, kwargs, operands.found, rows_apart(final))


def _run(mode: Any, func: Any, known: Facts, args: Any, kwargs: Any, found: list[LocalTensor], final: Partition) -> Any:
    if known.writes:
        prepare_writes(func, known, args, kwargs, final)
    memory = None
    if known.views and found:
        first = found[0]
        make_finer(first, final)  # where each rank takes another view, each needs a memory of its own
        memory = memory_of(first)
    with plainly():
        results = [_on_cell(func, known, args, kwargs, final, cell) for cell in range(len(final.sizes))]
    if known.reshapes:
        return reshaped(func, args, kwargs, results, final)
    return Answers(mode, func, known, args, kwargs, final, memory).of(results)


class _RowsApart(Exception):
    """A view that can only be taken row by row: each row has to be a cell."""


def _written(known: Facts, args: Any, kwargs: dict[str, Any]) -> list[Any]:
    found: list[Any] = []
    for index, name in known.writes:
        value = args[index] if index < len(args) else kwargs.get(name)
        found.extend(value if isinstance(value, list | tuple) else [value])
    return [x for x in found if isinstance(x, Tensor)]


def prepare_writes(func: Any, known: Facts, args: Any, kwargs: dict[str, Any], final: Partition) -> None:
    """What is written can hold what will be written; what a collective still reads is not written."""
    for x in _written(known, args, kwargs):
        if type(x) is LocalTensor:
            check_write(x._mode, x, str(func))
            if x._partition is final:
                continue
            if x._memory is not None and x._memory.outside:
                raise OutsideWrite(str(func), origin(sys._getframe(3)).place, brief(x))
            make_finer(x, final)
        elif final.rows > 1 or not final.complete:
            raise OutsideWrite(str(func), origin(sys._getframe(3)).place, brief(x))


def check_write(mode: Any, x: Tensor, op: str) -> None:
    """Raises `BufferReused` if a collective that was not waited for still reads or writes it."""
    if mode.in_flight:
        mode.check_not_in_flight(x, op)


def brief(x: Tensor) -> str:
    """A tensor in short form: f32[4,2]."""
    return f"{str(x.dtype).removeprefix('torch.')}[{','.join(map(str, x.shape))}]"


# -- one cell


def _on_cell(func: Any, known: Facts, args: Any, kwargs: Any, final: Partition, cell: int) -> Any:
    """What the op gives on one cell: a stack of results if the cell has several rows."""
    rows = final.sizes[cell]
    reader = Reader(final, cell)
    if rows == 1:
        return func(*reader.map(args), **{name: reader(value) for name, value in kwargs.items()})
    if known.way is Way.STACK:
        done = _on_stack(func, reader, args, kwargs)
        if done is not NotImplemented:
            return done
    if known.way is not Way.RANKS:
        try:
            return _under_vmap(func, reader, args, kwargs, rows)
        except RuntimeError:  # vmap cannot, for whatever reason; if the op itself cannot, the rows will say so
            pass
    if known.views or known.reshapes:
        raise _RowsApart
    return row_after_row(func, reader, args, kwargs, rows)


class Reader:
    """What of each argument one cell reads."""

    __slots__ = ("cell", "final", "rank", "stacked")

    def __init__(self, final: Partition, cell: int) -> None:
        self.final, self.cell = final, cell
        self.stacked = False  # whether the last tensor read has a row for each value
        self.rank = -1

    def __call__(self, value: Any) -> Any:
        kind = type(value)
        if kind is LocalTensor:
            if value._partition is self.final:
                self.stacked = self.final.sizes[self.cell] > 1
                return value._cells[self.cell]
            take = takes(self.final, value._partition)[self.cell]
            self.stacked = take.stacked
            return take.of(value._cells)
        self.stacked = False
        if kind is list or kind is tuple:
            return self.map(value)
        if kind is torch.SymInt and is_rank_int(value):
            if self.rank < 0:
                self.rank = self.final.ranks(self.final.starts[self.cell])[0]
            return on_rank(value, self.rank)
        return value

    def map(self, values: Any) -> Any:
        any_stacked, found = False, []
        for value in values:
            found.append(self(value))
            any_stacked = any_stacked or self.stacked
        self.stacked = any_stacked
        return found if type(values) is list else tuple(found)


def _on_stack(func: Any, reader: Reader, args: Any, kwargs: Any) -> Any:
    flat, stacked = [], []
    for value in args:
        flat.append(reader(value))
        stacked.append(reader.stacked)
    named = {}
    for name, value in kwargs.items():
        named[name] = reader(value)
        if reader.stacked:
            stacked.append(True)
    form = FORMS.get(func.name())
    if form is not None:
        return NotImplemented if len(stacked) > len(args) else form(func, tuple(stacked), *flat, **named)
    return _pointwise(func, flat, named, stacked)


def _pointwise(func: Any, args: list[Any], named: dict[str, Any], stacked: list[bool]) -> Any:
    """A pointwise op broadcasts: a row with fewer dims gets new ones behind the dim of rows, not before it."""
    if len(stacked) > len(args):
        return NotImplemented
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
                alike = False  # a scalar in a stack is no scalar: it would count when dtypes are promoted
            args[index] = args[index][(slice(None), *(None,) * (most - dim))]
    if not alike and len({x.dtype for x, dim in zip(args, dims, strict=True) if dim >= 0}) > 1:
        return NotImplemented
    return func(*args, **named)


def _under_vmap(func: Any, reader: Reader, args: Any, kwargs: Any, rows: int) -> Any:
    level = _functorch._vmap_increment_nesting(rows, "error")
    try:

        def lift(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return type(value)([lift(one) for one in value])
            found = reader(value)
            return _functorch._add_batch_dim(found, 0, level) if reader.stacked else found

        batched = func(*[lift(value) for value in args], **{name: lift(value) for name, value in kwargs.items()})
        return _lowered(batched, lambda x: _functorch._remove_batch_dim(x, level, rows, 0))
    finally:
        _functorch._vmap_decrement_nesting()


def _lowered(value: Any, lower: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return lower(value)
    return type(value)([_lowered(one, lower) for one in value]) if isinstance(value, list | tuple) else value


def row_after_row(func: Any, reader: Reader, args: Any, kwargs: Any, rows: int) -> Rowwise:
    """The result of each row, in order."""
    return Rowwise([func(*each, **named) for each, named in each_row(reader, args, kwargs, rows)])


def each_row(reader: Reader, args: Any, kwargs: Any, rows: int) -> Any:
    """The arguments of each row."""

    def of_row(value: Any, row: int) -> Any:
        if isinstance(value, list | tuple):
            return type(value)([of_row(one, row) for one in value])
        found = reader(value)
        return found[row] if reader.stacked else found

    for row in range(rows):
        yield [of_row(value, row) for value in args], {name: of_row(value, row) for name, value in kwargs.items()}


def drawn(mode: Any, func: Any, known: Facts, args: Any, kwargs: Any, final: Partition) -> Any:
    """A random op: once for each different stream and value; ranks whose streams agree draw the same."""
    stream = mode.streams.of(kwargs.get("generator"))
    if known.writes and func.name() in DRAWS_INTO and type(args[0]) is LocalTensor:
        return _drawn_into(stream, func, args[0], args[1:], kwargs)
    wanted = common(one_row_a_cell(final) if func.name() in SHAPE_ONLY else final, stream.partition)
    if known.writes:
        prepare_writes(func, known, args, kwargs, wanted)
    results = []
    with plainly():
        for cell, rows in enumerate(wanted.sizes):
            reader = Reader(wanted, cell)
            done = Rowwise()
            for row, (each, named) in enumerate(each_row(reader, args, kwargs, rows)):
                with stream.at(wanted, wanted.starts[cell] + row):
                    done.append(func(*each, **named))
            results.append(done)
    stream.settle(wanted)
    return Answers(mode, func, known, args, kwargs, wanted, None).of(results)


def _drawn_into(stream: Any, func: Any, x: LocalTensor, rest: Any, kwargs: Any) -> LocalTensor:
    """A tensor is overwritten with random numbers: drawn once for each stream and shape, then dealt to all ranks."""
    others = Operands(x._mode, func, rest, kwargs).final
    wanted = common(one_row_a_cell(x._partition), stream.partition)
    wanted = wanted if others is None else common(wanted, others)
    final = common(x._partition, wanted)
    prepare_writes(func, facts(func), (x,), {}, final)
    fresh = []
    with plainly():
        for cell, rows in enumerate(wanted.sizes):
            reader = Reader(wanted, cell)
            for row, (each, named) in enumerate(each_row(reader, rest, kwargs, rows)):
                rank = wanted.ranks(wanted.starts[cell] + row)[0]
                with stream.at(wanted, wanted.starts[cell] + row):
                    fresh.append(func(torch.empty_like(x.__localtensor_on__(rank)), *each, **named))
        for cell, take in enumerate(takes(rows_apart(final), rows_apart(wanted))):
            place, row = final.cell_of[cell], cell
            target = x._cells[place]
            (target[row - final.starts[place]] if final.sizes[place] > 1 else target).copy_(fresh[take.cell])
    stream.settle(wanted)
    return x
