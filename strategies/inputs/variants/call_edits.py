"""Edits of calls (a scalar replaced, tensors removed), and the types of input variants, `InputForm` and `Values`."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from strategies.model.rule import Call, Leaf, Program, Sample, overload

Path = tuple[int | str, ...]
"""The path to a value: the position or the keyword of its argument, then positions in nested lists."""
Change = Callable[[str, Any], Any]
"""From an argument's name and a value in it, neither tensor nor list, to another value."""


@dataclass(frozen=True, slots=True)
class ScalarArgument:
    """One value of a call that is neither tensor nor list, with its path and the name of its argument."""

    path: Path
    name: str
    value: Any


def counts_dims(name: str) -> bool:
    """Whether an argument of that name holds dims rather than sizes."""
    return name in ("axis", "axes") or name.startswith("dim") or name.endswith(("_dim", "_dims"))


def named_arguments(call: Call) -> list[tuple[int | str, str, Any]]:
    """Every given argument: its position or keyword, its name in the schema, its value."""
    schema = overload(call.op)._schema.arguments
    return [(i, schema[i].name, value) for i, value in enumerate(call.args)] + [(n, n, v) for n, v in call.kwargs]


def scalar_arguments(call: Call) -> list[ScalarArgument]:
    """Every value that is neither tensor nor list, in the order of the call."""

    def within(path: Path, name: str, value: Any) -> Iterator[ScalarArgument]:
        if isinstance(value, (list, tuple)):
            for i, v in enumerate(value):
                yield from within((*path, i), name, v)
        elif not isinstance(value, Leaf):
            yield ScalarArgument(path, name, value)

    return [spot for where, name, value in named_arguments(call) for spot in within((where,), name, value)]


def with_scalars_changed(call: Call, change: Change) -> Call:
    """The call with every value that is neither tensor nor list changed."""

    def walk(name: str, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)([walk(name, v) for v in value])
        return value if isinstance(value, Leaf) else change(name, value)

    return with_arguments_changed(call, walk)


def with_arguments_changed(call: Call, change: Change) -> Call:
    """The call with every argument changed, lists as a whole."""
    made = {where: change(name, value) for where, name, value in named_arguments(call)}
    return Call(call.op, tuple(made[i] for i in range(len(call.args))), tuple((n, made[n]) for n, _ in call.kwargs))


def with_value_at(call: Call, path: Path, value: Any) -> Call:
    """The call with this value at that path."""

    def within(old: Any, rest: Path) -> Any:
        if not rest:
            return value
        return type(old)([within(v, rest[1:]) if i == rest[0] else v for i, v in enumerate(old)])

    args = tuple(within(v, path[1:]) if i == path[0] else v for i, v in enumerate(call.args))
    return Call(call.op, args, tuple((n, within(v, path[1:]) if n == path[0] else v) for n, v in call.kwargs))


def with_call(program: Program, call: Call) -> Program:
    """The program with another call on the same tensors."""
    return replace(program, sample=replace(program.sample, call=call))


def with_tensors(program: Program, changed: dict[int, Tensor]) -> Program:
    """The program with some of its tensors replaced, by leaf number."""
    tensors = tuple(changed.get(i, x) for i, x in enumerate(program.sample.tensors))
    return replace(program, sample=replace(program.sample, tensors=tensors))


def without_tensors(program: Program, call: Call, gone: Collection[int]) -> Program:
    """The program with that call and without these tensors; the others are renumbered."""
    left = [i for i in range(len(program.sample.tensors)) if i not in gone]
    number = {old: new for new, old in enumerate(left)}

    def renumbered(value: Any) -> Any:
        if isinstance(value, Leaf):
            return Leaf(number[value.index])
        return type(value)([renumbered(v) for v in value]) if isinstance(value, (list, tuple)) else value

    call = Call(call.op, tuple(map(renumbered, call.args)), tuple((n, renumbered(v)) for n, v in call.kwargs))
    sample = replace(program.sample, call=call, tensors=tuple(program.sample.tensors[i] for i in left))
    return replace(program, sample=sample, inputs=tuple(program.inputs[i] for i in left))


@dataclass(frozen=True, slots=True)
class InputForm:
    """A named way to make other calls from a sample; `why` is the reason for which it may expose a wrong rule.

    `same` promises equal results, which the caller must check.  Otherwise the op may reject the new call.
    """

    name: str
    why: str
    make: Callable[[Sample], Iterable[Sample]]
    same: bool = False
    weight: int = 1
    """Turns while another form has one: more for forms that make many calls or find much."""
    always: int = 0
    """The number of first samples of an overload on which it is tested in addition to the budget."""


@dataclass(frozen=True, slots=True)
class Values:
    """Other values for the same call, or another decomposition of its partial inputs.

    `partial` selects the rules tested with them: those without a partial input ("never"), all ("also"), or those with
    one ("only").  `split` names the decomposition ("" for the default).  `wild` values contain NaN or infinities: then
    results that are not floats are not compared.
    """

    name: str
    why: str
    make: Callable[[Sample, torch.Generator], tuple[Tensor, ...] | None]
    partial: str = "also"
    split: str = ""
    wild: bool = False

    def asks(self, partial: bool) -> bool:
        """Whether a rule with, or without, a partial input is tested with these values."""
        return self.partial == "also" or partial == (self.partial == "only")


def values_generator(name: str, seed: int) -> torch.Generator:
    """The random generator of one kind of values, determined by its name and the seed."""
    return torch.Generator().manual_seed(zlib.crc32(f"{name} {seed}".encode()))
