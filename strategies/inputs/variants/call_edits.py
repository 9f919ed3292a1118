"""A call with something changed in its arguments: a scalar put, an argument left out, tensors taken away."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from strategies.model.rule import Call, Leaf, Program, Sample, overload

Path = tuple[int | str, ...]
"""Where a value stands: the position or the keyword of its argument, then places in lists."""
Change = Callable[[str, Any], Any]
"""From an argument's name and a value in it, which is no tensor and no list, to another value."""


@dataclass(frozen=True, slots=True)
class Spot:
    """One value of a call that is no tensor and no list, and the name of the argument that it stands in."""

    path: Path
    name: str
    value: Any


def counts_dims(name: str) -> bool:
    """Whether an argument of that name holds dims rather than sizes."""
    return name in ("axis", "axes") or name.startswith("dim") or name.endswith(("_dim", "_dims"))


def named(call: Call) -> list[tuple[int | str, str, Any]]:
    """Every argument that is given: its position or keyword, its name in the schema, its value."""
    schema = overload(call.op)._schema.arguments
    return [(i, schema[i].name, value) for i, value in enumerate(call.args)] + [(n, n, v) for n, v in call.kwargs]


def spots(call: Call) -> list[Spot]:
    """Every value that is no tensor, in the order of the call."""

    def within(path: Path, name: str, value: Any) -> Iterator[Spot]:
        if isinstance(value, (list, tuple)):
            for i, v in enumerate(value):
                yield from within((*path, i), name, v)
        elif not isinstance(value, Leaf):
            yield Spot(path, name, value)

    return [spot for where, name, value in named(call) for spot in within((where,), name, value)]


def changed(call: Call, change: Change) -> Call:
    """The call with every value that is no tensor changed."""

    def walk(name: str, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)([walk(name, v) for v in value])
        return value if isinstance(value, Leaf) else change(name, value)

    return lists_changed(call, walk)


def lists_changed(call: Call, change: Change) -> Call:
    """The call with every argument as `change` makes it, lists whole."""
    made = {where: change(name, value) for where, name, value in named(call)}
    return Call(call.op, tuple(made[i] for i in range(len(call.args))), tuple((n, made[n]) for n, _ in call.kwargs))


def put(call: Call, path: Path, value: Any) -> Call:
    """The call with this value at that place."""

    def within(old: Any, rest: Path) -> Any:
        if not rest:
            return value
        return type(old)([within(v, rest[1:]) if i == rest[0] else v for i, v in enumerate(old)])

    args = tuple(within(v, path[1:]) if i == path[0] else v for i, v in enumerate(call.args))
    return Call(call.op, args, tuple((n, within(v, path[1:]) if n == path[0] else v) for n, v in call.kwargs))


def with_call(program: Program, call: Call) -> Program:
    return replace(program, sample=replace(program.sample, call=call))


def with_tensors(program: Program, changed: dict[int, Tensor]) -> Program:
    """The program with some of its tensors replaced, by their number."""
    tensors = tuple(changed.get(i, x) for i, x in enumerate(program.sample.tensors))
    return replace(program, sample=replace(program.sample, tensors=tensors))


def without(program: Program, call: Call, gone: Collection[int]) -> Program:
    """The program with that call, in which these tensors no longer stand; the others are numbered anew."""
    left = [i for i in range(len(program.sample.tensors)) if i not in gone]
    number = {old: new for new, old in enumerate(left)}

    def renumbered(value: Any) -> Any:
        if isinstance(value, Leaf):
            return Leaf(number[value.index])
        return type(value)([renumbered(v) for v in value]) if isinstance(value, (list, tuple)) else value

    call = Call(call.op, tuple(map(renumbered, call.args)), tuple((n, renumbered(v)) for n, v in call.kwargs))
    sample = replace(program.sample, call=call, tensors=tuple(program.sample.tensors[i] for i in left))
    return replace(program, sample=sample, inputs=tuple(program.inputs[i] for i in left))


# What a form is: a named way to make other calls, or other values, from a sample.


@dataclass(frozen=True, slots=True)
class Form:
    """Other calls made from one.  `same` promises the very same results, which the caller must check; without
    it the call is a new one, which the op may refuse."""

    name: str
    why: str
    make: Callable[[Sample], Iterable[Sample]]
    same: bool = False
    weight: int = 1
    """Turns that it has while another form has one: more for those that make many calls, or find much."""
    always: int = 0
    """On so many samples of an overload, the first, it is tried besides all others."""


@dataclass(frozen=True, slots=True)
class Values:
    """Other values for the same call, or another decomposition of its partial inputs.

    `partial` says of which rules they are asked: those without a partial input ("never"), all ("also"), or
    those with one ("only").  `split` names how parts are made ("" for the usual ways).  `wild` are values with
    NaN or infinities, for which a result that is no float means nothing.
    """

    name: str
    why: str
    make: Callable[[Sample, torch.Generator], tuple[Tensor, ...] | None]
    partial: str = "also"
    split: str = ""
    wild: bool = False

    def asks(self, partial: bool) -> bool:
        """Whether a rule with, or without, a partial input is asked."""
        return self.partial == "also" or partial == (self.partial == "only")


def generator(name: str, seed: int) -> torch.Generator:
    """The random numbers of one kind of values: the same for a name and a seed, whatever was drawn before."""
    return torch.Generator().manual_seed(zlib.crc32(f"{name} {seed}".encode()))
