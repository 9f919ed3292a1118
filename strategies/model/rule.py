"""Claims as values: a rule, the call it speaks of, and what each rank would run under it."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _pytree as pytree

from localtensor.layout import Layout, cuts, factors_of, in_order, is_plain, order_of, parse, shape_text, short, shorts


@dataclass(frozen=True, slots=True)
class Leaf:
    """Stands for tensor number `index` in the arguments of a call."""

    index: int


LEAVES = tuple(Leaf(i) for i in range(64))
"""The same leaves for all: a call that is made of these is found sooner where answers are remembered."""


SEARCHED: Sequence[str] = ("sum", "avg", "min", "max")
"""Partial kinds that a search tries; products are judged where they are claimed."""


def leaf_at(index: int) -> Leaf:
    """The leaf of that number, one of `LEAVES` if it can be."""
    return LEAVES[index] if 0 <= index < len(LEAVES) else Leaf(index)


@dataclass(frozen=True, slots=True)
class Call:
    """An op and its arguments with a `Leaf` where each tensor goes."""

    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        """Run it on these tensors."""
        args, kwargs = self.filled(tensors)
        return overload(self.op)(*args, **kwargs)

    def filled(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with these tensors in their places."""

        def fill(value: Any) -> Any:
            if type(value) is Leaf:
                return tensors[value.index]
            return type(value)(map(fill, value)) if type(value) in (list, tuple) else value

        return tuple(map(fill, self.args)), {name: fill(value) for name, value in self.kwargs}


@dataclass(frozen=True, slots=True)
class Sample:
    """One concrete call of an overload: the whole tensors, before any rank has a piece."""

    call: Call
    tensors: tuple[Tensor, ...]
    origin: str

    @property
    def op(self) -> str:
        return self.call.op

    @property
    def size(self) -> int:
        return sum(t.numel() for t in self.tensors)

    def arguments(self, placed: Sequence[Placement] = ()) -> list[str]:
        """Short form of each argument: `f32[8,4]`, `dim=1`, in the order of the call; `f32[8,4] S(0)` where it is placed."""

        def show(value: Any) -> str:
            if isinstance(value, Leaf):
                x = self.tensors[value.index]
                where = f" {short(placed[value.index])}" if placed else ""
                return shape_text(x.shape, x.dtype) + where
            if isinstance(value, (list, tuple)):
                return f"[{', '.join(map(show, value))}]"
            return repr(value)

        return [show(a) for a in self.call.args] + [f"{name}={show(v)}" for name, v in self.call.kwargs]


@dataclass(frozen=True, slots=True)
class Rule:
    """`op: inputs -> outputs` along one mesh axis; one placement per tensor argument and result.

    None stands where the op has no tensor there (a result that is masked off).
    """

    op: str
    inputs: tuple[Placement | None, ...]
    outputs: tuple[Placement | None, ...]

    def __str__(self) -> str:
        return f"{self.op}: {shorts(self.inputs)} -> {shorts(self.outputs)}"

    @property
    def plain(self) -> bool:
        """Whether every placement is R, S or one of the five P, whose meaning is arithmetic."""
        return all(p is None or is_plain(p) for p in (*self.inputs, *self.outputs))


@dataclass(frozen=True, slots=True)
class Claim:
    """A rule as its source applies it to one sample: `local[rank]` is what that rank runs.

    `local` is None where every rank runs the sample's own call on its pieces.  `whole` says why the
    claim can only be judged by running the source's own dispatch end to end, or is empty.
    """

    rule: Rule
    source: str
    local: tuple[Call, ...] | None = None
    whole: str = ""


def overload(name: str) -> torch._ops.OpOverload:
    """The overload of that name: `aten.add.Tensor`."""
    namespace, packet, which = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), which)  # type: ignore[no-any-return]


def call_of(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Call, list[Tensor]]:
    """A call with its tensors taken out, numbered in the order in which DTensor flattens them."""
    tensors: list[Tensor] = []

    def take(value: Any) -> Any:  # pytree does the same at five times the price, for each call of a sweep
        if isinstance(value, Tensor):
            tensors.append(value)
            return leaf_at(len(tensors) - 1)
        if isinstance(value, list):
            return [take(v) for v in value]
        return tuple(take(v) for v in value) if isinstance(value, tuple) else value

    taken = take(tuple(args))
    return Call(str(op), taken, tuple((name, take(value)) for name, value in kwargs.items())), tensors


def frozen(value: Any) -> Any:
    """The same argument, of which nothing can change: lists are tuples, which every op takes for lists."""
    return tuple(map(frozen, value)) if isinstance(value, (list, tuple)) else value


def results(out: Any) -> list[Any]:
    """The results of an op as a flat list; what is no tensor stays in its place, and nothing is nothing."""
    return [] if out is None else pytree.tree_leaves(out)


@functools.cache
def _writes_to(name: str) -> tuple[int, ...]:
    """The schema's arguments that the op writes to and does not return, by position."""
    schema = overload(name)._schema
    returned = {name for r in schema.returns if r.alias_info for name in r.alias_info.before_set}

    def unseen(argument: Any) -> bool:
        alias = argument.alias_info
        return alias is not None and alias.is_write and not set(alias.before_set) & returned

    return tuple(i for i, argument in enumerate(schema.arguments) if unseen(argument))


def written(call: Call) -> tuple[int, ...]:
    """The tensors of the call, by leaf number, that it writes to without returning them.

    They are judged beside the results, under the placement with which they came in.
    """
    spots = _writes_to(call.op)
    if not spots:
        return ()
    arguments = overload(call.op)._schema.arguments
    given = dict(call.kwargs) | {arguments[i].name: value for i, value in enumerate(call.args)}
    values = [given.get(arguments[i].name) for i in spots]
    return tuple(leaf.index for leaf in pytree.tree_leaves(values) if isinstance(leaf, Leaf))


def out_leaves(call: Call) -> tuple[int, ...]:
    """The tensors given as `out=`, by leaf number, in the order of the results that they become."""
    given = dict(call.kwargs)
    values = [given.get(argument.name) for argument in overload(call.op)._schema.arguments if argument.is_out]
    return tuple(leaf.index for leaf in pytree.tree_leaves(values) if isinstance(leaf, Leaf))


# One call of an op through DTensor itself, on a mesh of one or more axes, and what follows it: as a value.


@dataclass(frozen=True, slots=True)
class Program:
    """One call of an op through DTensor itself on a mesh of one or more axes, and a cheap op after it.

    `inputs` has, for each tensor of the call, one placement per mesh axis.  `then` names a follower (see
    `followers`), and is empty where nothing follows.  `(seed, draw)` fix how partial inputs are decomposed.
    With `flattened`, a flattened submesh exists before the op runs.
    """

    sample: Sample
    mesh: tuple[int, ...]
    inputs: tuple[tuple[Placement, ...], ...]
    then: str = ""
    seed: int = 0
    draw: int = 0
    flattened: bool = False

    @property
    def ranks(self) -> int:
        return math.prod(self.mesh)

    def __str__(self) -> str:
        """`aten.add.Tensor on (2, 2): (S(0), R), R, then sum`: one placement where a tensor has the same on each axis."""
        held = ", ".join(held_text(placements) for placements in self.inputs)
        shown = f"{self.sample.op} on {self.mesh}: {held}"
        shown += f", then {self.then}" if self.then else ""
        return shown + (", a flattened submesh present" if self.flattened else "")


def held_text(placements: tuple[Placement, ...]) -> str:
    """`(S(0), R)`; one placement where it is the same on each axis."""
    return shorts(placements[:1]) if len(set(placements)) == 1 else f"({shorts(placements)})"


# Layouts as a finding writes them, and on fewer axes, as the search for a smaller one asks for them.
#
# What a layout means is said in `localtensor.layout.shards`.

_BETWEEN = re.compile(r", (?![^()]*\))")
"""The commas between placements, and not those within one."""


def read_layout(text: str) -> Layout:
    """The layout that a text stands for: `S(0)` on one axis, `(S(0), R)` on two.  Raises `BadPlacement`.

    >>> read_layout("(S(0), SS(1,2), R)")
    (Shard(dim=0), _StridedShard(dim=1, sf=2), Replicate())
    """
    inner = text[1:-1] if text.startswith("(") else text
    return tuple(parse(part) for part in _BETWEEN.split(inner))


def on_axes(layout: Layout, mesh: Sequence[int], axes: Sequence[int], sizes: Sequence[int]) -> Layout:
    """The layout on some of the axes alone, which now have these sizes; a dim is cut in the order in which it was.

    >>> whole = read_layout("(SS(0,3), S(0))")
    >>> on_axes(whole, (2, 3), (0, 1), (2, 2)), on_axes(whole, (2, 3), (0,), (2,))
    ((_StridedShard(dim=0, sf=2), Shard(dim=0)), (Shard(dim=0),))
    """
    made = [layout[axis] for axis in axes]
    for dim in sorted({cut[0] for cut in map(cuts, layout) if cut is not None}):
        order = order_of(factors_of(layout, dim), mesh)
        left = [axes.index(axis) for axis in order or () if axis in axes]
        for axis, placement in in_order(dim, left, sizes).items():
            made[axis] = placement
    return tuple(made)
