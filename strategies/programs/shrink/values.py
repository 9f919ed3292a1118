"""Simpler values: tensors in float32, scalars at their default, 0 or 1, and tensors of 1, 2, 3 ..., of ones, of zeros.

Before them the changes of which all stages are made: a program with another call, or with other or fewer tensors.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from strategies.model import arguments
from strategies.model.arguments import changed_tensors, is_index, repeats_sizes, trusts_caller, with_value_at
from strategies.model.call_signature import holds_tensor
from strategies.model.rule import Call, Leaf, Program, leaf_numbers, overload

MAX_ELEMENTS_SINGLY = 16
"""The largest number of elements of a tensor that are also changed one at a time."""
LARGEST_SMALL_NUMBER = 9
"""The largest of the small whole numbers."""


def with_call(program: Program, call: Call) -> Program:
    """The program with another call on the same tensors."""
    return replace(program, sample=replace(program.sample, call=call))


def with_tensors(program: Program, changed: dict[int, Tensor]) -> Program:
    """The program with some of its tensors replaced, by leaf number: sorted where the op requires it."""
    return replace(program, sample=replace(program.sample, tensors=changed_tensors(program.sample, changed)))


def without_tensors(program: Program, call: Call, gone: Collection[int]) -> Program:
    """The program with that call and without these tensors; the others are renumbered."""
    left = [i for i in range(len(program.sample.tensors)) if i not in gone]
    number = {old: new for new, old in enumerate(left)}

    def renumbered(value: object) -> object:
        if isinstance(value, Leaf):
            return Leaf(number[value.index])
        return type(value)([renumbered(v) for v in value]) if isinstance(value, (list, tuple)) else value

    call = Call(call.op, tuple(map(renumbered, call.args)), tuple((n, renumbered(v)) for n, v in call.kwargs))
    sample = replace(program.sample, call=call, tensors=tuple(program.sample.tensors[i] for i in left))
    return replace(program, sample=sample, inputs=tuple(program.inputs[i] for i in left))


def simpler_scalars(program: Program) -> Iterator[Program]:
    """The program with an argument left out, a list of dims or sizes shortened or all ones, or a simpler number.

    Numbers become 0, 1, 2 or get fewer digits.  An op that does not check its arguments loses only arguments at their
    defaults, and digits of numbers that need not agree with its sizes.
    """
    call = program.sample.call
    for one in _left_out(call):
        yield with_call(program, one)
    for one in () if trusts_caller(call.op) else _shorter_lists(call):
        yield with_call(program, one)
    for spot in arguments.scalar_arguments(call):
        if not trusts_caller(call.op) or (isinstance(spot.value, (float, complex)) and not repeats_sizes(spot.name)):
            for value in _simpler(spot):
                yield with_call(program, with_value_at(call, spot.path, value))


def _left_out(call: Call) -> Iterator[Call]:
    schema = {a.name: a for a in overload(call.op)._schema.arguments}
    for where, name, given in arguments.named_arguments(call):
        if holds_tensor(given) or not schema[name].has_default_value():
            continue
        default = schema[name].default_value
        if trusts_caller(call.op) and given != default:
            continue
        if isinstance(where, str):
            yield replace(call, kwargs=tuple((n, v) for n, v in call.kwargs if n != where))
        elif where == len(call.args) - 1:
            yield replace(call, args=call.args[:-1])
        elif given != default:
            yield with_value_at(call, (where,), default)


def _shorter_lists(call: Call) -> Iterator[Call]:
    for where, name, value in arguments.named_arguments(call):
        if not isinstance(value, (list, tuple)) or holds_tensor(value) or not all(type(v) is int for v in value):
            continue
        if not arguments.counts_dims(name) and any(v != 1 for v in value):
            yield with_value_at(call, (where,), type(value)([1 for _ in value]))
        for i in reversed(range(len(value))) if len(value) > 1 else ():
            yield with_value_at(call, (where,), type(value)([v for j, v in enumerate(value) if j != i]))


def _simpler(spot: arguments.ScalarArgument) -> list[Any]:
    """The replacements for a number, the simplest first."""
    value = spot.value
    if isinstance(value, bool):
        return [False] if value else []
    if isinstance(value, int):
        few = [0, 1, 2, -value] if not arguments.counts_dims(spot.name) else []
        return [v for v in dict.fromkeys(few) if (v < 0, abs(v)) < (value < 0, abs(value))]
    if isinstance(value, (float, complex)):
        numbers: list[Any] = [0.0, 1.0, 2.0, 0.5, _rounded(value)]
        return [type(value)(v) for v in dict.fromkeys(numbers) if digits(v) < digits(value)]
    return []


def _rounded(value: complex) -> complex:
    if not cmath.isfinite(value):
        return value
    return complex(round(value.real, 1), round(value.imag, 1)) if isinstance(value, complex) else round(value, 1)


DECIMAL = 3
"""The rank in `digits` of a small number with one decimal."""


def digits(value: complex) -> int:
    """The rank of a number by simplicity: 0, 1, a small whole number, one decimal, any other, not finite."""
    if not cmath.isfinite(value):
        return 5
    parts = (value.real, value.imag)
    if all(abs(p) <= LARGEST_SMALL_NUMBER and p == int(p) for p in parts):
        return min(2, int(sum(parts))) if min(parts) >= 0 else 2
    return (
        DECIMAL
        if all(abs(p) <= LARGEST_SMALL_NUMBER and math.isclose(p, round(p, 1), rel_tol=1e-6) for p in parts)
        else 4
    )


def in_float32(program: Program) -> Iterator[Program]:
    """The program with all tensors in float32, then all but positions: with 1, 2, 3 ..., with 2, 3, 4 ..., with its own values.

    Real parts stand for complex numbers.  At last doubles alone become float32, beside tensors that have to be of another dtype.
    """
    tensors = program.sample.tensors
    named = program.sample.call.named().items()
    positions = frozenset(leaf for name, value in named if is_index(name) for leaf in leaf_numbers(value))
    unchecked = frozenset(i for i, x in enumerate(tensors) if _unchecked_integers(program, x))
    for kept in dict.fromkeys((unchecked, unchecked | positions)):
        real = {i: _as_float32(x) for i, x in enumerate(tensors) if i not in kept}
        if all(tensors[i].dtype == torch.float32 for i in real):
            return
        for first in (1, 2):
            yield with_tensors(program, {i: counted(x, first) for i, x in real.items()})
        yield with_tensors(program, real)
    doubles = {i: _as_float32(x) for i, x in enumerate(tensors) if x.dtype == torch.float64}
    if 0 < len(doubles) < len(tensors):
        yield with_tensors(program, doubles)


def _as_float32(x: Tensor) -> Tensor:
    return (x.real if x.is_complex() else x).to(torch.float32).contiguous()


def counted(x: Tensor, first: int = 1) -> Tensor:
    """1, 2, 3 ... in the shape and dtype of x, or as many from `first` on; after 9 it begins again.

    A tensor of booleans is true everywhere, or from 2 on at every second place.
    """
    numbers = torch.arange(x.numel(), device=x.device)
    if x.dtype == torch.bool:
        return (numbers % first == 0).reshape(x.shape)
    return ((numbers + first - 1) % LARGEST_SMALL_NUMBER + 1).reshape(x.shape).to(x.dtype)


def simpler_values(program: Program) -> Iterator[Program]:
    """The program with simpler values: all real tensors at once, then each tensor, then each element."""
    tensors = program.sample.tensors
    if len(tensors) > 1:
        for form in _FORMS:
            every = {i: _in_form(x, form) for i, x in enumerate(tensors) if has_numbers(x) and _level(x) > form}
            if len(every) > 1:
                yield with_tensors(program, every)
    for i, x in enumerate(tensors):
        for form in _FORMS if x.numel() else ():
            if _level(x) > form and (form == _ZEROS or not _unchecked_integers(program, x)):
                yield with_tensors(program, {i: _in_form(x, form)})
    for i, x in enumerate(tensors):
        if not x.is_contiguous():
            yield with_tensors(program, {i: x.contiguous()})
        for made in _element_by_element(x) if not _unchecked_integers(program, x) else ():
            yield with_tensors(program, {i: made})


_COUNT, _FROM_TWO, _ONES, _ZEROS, _WHOLE, _DECIMAL, _FINITE = range(7)
_FORMS = range(7)
"""Forms of a tensor, the plainest first: 1, 2, 3 ...; 2, 3, 4 ..., of which a product says more; ones; zeros; small whole
numbers; one decimal; finite."""


def has_numbers(x: Tensor) -> bool:
    return bool(x.numel()) and (x.dtype.is_floating_point or x.dtype.is_complex)


def _unchecked_integers(program: Program, x: Tensor) -> bool:
    """Whether the values are integers that the op uses without a check."""
    return trusts_caller(program.sample.op) and not has_numbers(x) and x.dtype != torch.bool


def _in_form(x: Tensor, form: int) -> Tensor:
    if form in (_ZEROS, _ONES):
        return torch.full_like(x, form == _ONES)
    if form in (_COUNT, _FROM_TWO):
        return counted(x, 1 + (form == _FROM_TWO))
    if not has_numbers(x):
        least = 0 if x.dtype == torch.uint8 else -LARGEST_SMALL_NUMBER
        return x.clamp(least, LARGEST_SMALL_NUMBER) if x.dtype != torch.bool else x
    if x.dtype.is_complex:
        return torch.view_as_complex(_in_form(torch.view_as_real(x.resolve_conj()).contiguous(), form))
    finite = x.nan_to_num(0.0, 1.0, -1.0)
    if form == _FINITE:
        return finite
    if form == _DECIMAL:
        return (finite * 10).round() / 10
    return finite.round().clamp(-LARGEST_SMALL_NUMBER, LARGEST_SMALL_NUMBER)


def _level(x: Tensor) -> int:
    """The plainest form that the tensor has, or one more than the last form."""
    return next((form for form in _FORMS if torch.equal(_in_form(x, form), x)), _FINITE + 1)


def _element_by_element(x: Tensor) -> Iterator[Tensor]:
    if x.numel() > MAX_ELEMENTS_SINGLY or _level(x) <= _ZEROS:
        return
    flat = x.flatten()
    for i, value in enumerate(flat.tolist()):
        for other in (1, 0, _rounded(value)):
            if _oddness(other) < _oddness(value):
                put_in = torch.full((1,), other, dtype=x.dtype, device=x.device)
                yield flat.index_copy(0, torch.tensor([i], device=x.device), put_in).reshape(x.shape)


def _oddness(value: complex) -> int:
    """The rank of an element by simplicity: as of a number among the arguments, with 1 before 0."""
    return 1 - int(value.real) if value in (0, 1) else digits(value)
