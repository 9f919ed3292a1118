"""Calls, samples, sharding rules and programs as immutable values.

A `Call` is an op with its arguments.  A `Sample` adds the whole tensors.  A `Rule` gives the placements of inputs and
results along one mesh axis, and a `Claim` is a rule as a source applies it to a sample.  A `Program` is a call through
DTensor on a mesh of one or more axes, and the op that follows it.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _pytree as pytree

from localtensor.layout import (
    Layout,
    cut_order,
    is_standard,
    parse,
    placements_in_order,
    shape_text,
    shard_cut,
    short,
    shorts,
    split_factors,
)


@dataclass(frozen=True, slots=True)
class Leaf:
    """A placeholder for tensor number `index` in the arguments of a call."""

    index: int


LEAVES = tuple(Leaf(i) for i in range(64))
"""Shared leaves: calls made of the same objects are compared faster in the propagation cache."""
SEARCHED_KINDS: Sequence[str] = ("sum", "avg", "min", "max")
"""Partial kinds that a search tries; products are tested only where a source registers them."""


def leaf_at(index: int) -> Leaf:
    """The leaf of that number, from `LEAVES` where possible."""
    return LEAVES[index] if 0 <= index < len(LEAVES) else Leaf(index)


@dataclass(frozen=True, slots=True)
class Call:
    """An op and its arguments, with a `Leaf` for each tensor."""

    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        """The op's result on these tensors."""
        args, kwargs = self.filled(tensors)
        return overload(self.op)(*args, **kwargs)

    def filled(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with these tensors in their places."""

        def fill(value: Any) -> object:
            if type(value) is Leaf:
                return tensors[value.index]
            return type(value)(map(fill, value)) if type(value) in (list, tuple) else value

        return tuple(map(fill, self.args)), {name: fill(value) for name, value in self.kwargs}

    def named(self) -> dict[str, Any]:
        """The arguments of the call by their names in the schema; defaults are not filled in."""
        return dict(zip(names_in_schema(overload(self.op)), self.args, strict=False)) | dict(self.kwargs)


@dataclass(frozen=True, slots=True)
class Sample:
    """One concrete call of an overload with whole, unsharded tensors; `origin` describes where it comes from."""

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
        """Each argument in short form, in call order: `f32[8,4]`, `dim=1`; `f32[8,4] S(0)` with placements by leaf number."""

        def show(value: object) -> str:
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
    """`op: inputs -> outputs` along one mesh axis: one placement for each tensor argument and result.

    None is the placement of a result that is not a tensor (masked off).
    """

    op: str
    inputs: tuple[Placement | None, ...]
    outputs: tuple[Placement | None, ...]

    def __str__(self) -> str:
        return f"{self.op}: {shorts(self.inputs)} -> {shorts(self.outputs)}"

    @property
    def plain(self) -> bool:
        """Whether every placement is R, S or one of the five P, which have an arithmetic meaning."""
        return all(p is None or is_standard(p) for p in (*self.inputs, *self.outputs))


LocalRun = Callable[[Sequence[Sequence[Tensor]], int], list[tuple[Any, ...]]]
"""From `held[leaf][rank]`, each rank's piece of each tensor, and the number of ranks to the flat results of each rank."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A rule as its source applies it to one sample: `local[rank]` is the call that rank makes.

    `local` is None where every rank makes the sample's own call on its pieces.  `whole` is the reason why only the
    source's own dispatch, run end to end, can test the claim; it is empty for most claims.  `run` runs all ranks together,
    where their calls communicate; `local` is None then.  With `parts`, that run takes parts of sums, beside those of the rule's
    own axis.  With `concatenated`, the shards of a result may have any sizes that make the whole, and not those of
    torch.chunk alone.
    """

    rule: Rule
    source: str
    local: tuple[Call, ...] | None = None
    whole: str = ""
    run: LocalRun | None = None
    parts: bool = False
    concatenated: bool = False


def overload(name: str) -> torch._ops.OpOverload:
    """The overload of that name: `aten.add.Tensor`.  Raises AttributeError if there is none."""
    return _aten_overload(name) if name.startswith("aten.") else _overload(name)


@functools.lru_cache(1 << 12)
def names_in_schema(op: torch._ops.OpOverload) -> tuple[str, ...]:
    """The names of the arguments of an overload, in order."""
    return tuple([a.name for a in op._schema.arguments])


def _overload(name: str) -> torch._ops.OpOverload:
    namespace, packet, which = name.split(".")
    found = getattr(getattr(getattr(torch.ops, namespace), packet), which)
    if not isinstance(found, torch._ops.OpOverload):  # `import_module.__call__.__call__` is a function of `torch.ops`
        raise AttributeError(f"{name} is no overload")  # noqa: TRY004  # as torch does for a name that it does not have
    return found


_aten_overload = functools.lru_cache(1 << 12)(_overload)  # of other namespaces, libraries come and go


def call_of(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Call, list[Tensor]]:
    """A call with its tensors taken out, numbered in the order in which DTensor flattens them."""
    tensors: list[Tensor] = []

    def take(value: object) -> Any:  # pytree does the same in five times the time
        if isinstance(value, Tensor):
            tensors.append(value)
            return leaf_at(len(tensors) - 1)
        if isinstance(value, list):
            return [take(v) for v in value]
        return tuple(take(v) for v in value) if isinstance(value, tuple) else value

    taken = take(tuple(args))
    return Call(str(op), taken, tuple((name, take(value)) for name, value in kwargs.items())), tensors


def frozen(value: object) -> Any:
    """The same argument with tuples for lists, which every op accepts."""
    return tuple(map(frozen, value)) if isinstance(value, (list, tuple)) else value


def flat_results(out: object) -> list[Any]:
    """The results of an op as a flat list, non-tensors included; empty for None."""
    if type(out) is Tensor:
        return [out]
    if type(out) is tuple and all(type(x) is Tensor for x in out):
        return list(out)
    return [] if out is None else pytree.tree_leaves(out)


def leaf_numbers(value: object) -> tuple[int, ...]:
    """The numbers of the leaves in an argument, nested lists included, in order."""
    if type(value) is Leaf:
        return (value.index,)
    within = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return tuple([number for one in within for number in leaf_numbers(one)])


WRITTEN_UNDECLARED = {"aten.native_batch_norm": ("running_mean", "running_var")}
"""Arguments of a packet to which its kernel writes although the schema does not say so, on torch 2.11 to 2.15.

Of the 539 functional overloads that OpInfo and ModuleInfo reach on a CPU it is the only one.
"""


@functools.cache
def _written_unreturned(name: str) -> tuple[str, ...]:
    """The names of the arguments that the op writes to and does not return."""
    schema = overload(name)._schema
    returned = {name for r in schema.returns if r.alias_info for name in r.alias_info.before_set}
    aliases = [(a.name, a.alias_info) for a in schema.arguments if a.alias_info is not None]
    declared = (name for name, alias in aliases if alias.is_write and not set(alias.before_set) & returned)
    return (*declared, *WRITTEN_UNDECLARED.get(name.rpartition(".")[0], ()))


def written_leaves(call: Call) -> tuple[int, ...]:
    """The tensors of the call, by leaf number, that it writes to without returning them.

    They are compared like results, under the placements of the inputs.
    """
    names = _written_unreturned(call.op)
    if not names:
        return ()
    given = call.named()
    return leaf_numbers([given.get(name) for name in names])


def out_leaves(call: Call) -> tuple[int, ...]:
    """The tensors given as `out=`, by leaf number, in the order of the results."""
    names = _out_names(overload(call.op))
    if not names:
        return ()
    given = dict(call.kwargs)
    return leaf_numbers([given.get(name) for name in names])


@functools.lru_cache(1 << 12)
def _out_names(op: torch._ops.OpOverload) -> tuple[str, ...]:
    """The names of the op's `out=` arguments."""
    return tuple(a.name for a in op._schema.arguments if a.is_out)


DTYPE_CLASSES = ("real", "complex", "integer", "bool")
"""Classes of dtypes: a sample's class is the first of complex, real, integer and bool among its tensors."""


def dtype_class(sample: Sample) -> str:
    """The dtype class of a sample; "real" for a call without tensors."""
    if any(t.dtype.is_complex for t in sample.tensors):
        return "complex"
    if not sample.tensors or any(t.dtype.is_floating_point for t in sample.tensors):
        return "real"
    return "bool" if all("bool" in str(t.dtype) for t in sample.tensors) else "integer"


PUBLIC = "public "
"""How the step of a program begins that is a use of DTensor's public calls."""


@dataclass(frozen=True, slots=True)
class Program:
    """One call of an op through DTensor on a mesh of one or more axes, and a cheap op after it.

    `inputs` has one placement per mesh axis for each tensor of the call.  `then` names the following op (see
    `strategies.programs.chained`); it is empty without one.  `(seed, draw)` determine how partial inputs are
    decomposed.  With `flattened`, a flattened submesh exists before the op runs.
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

    @property
    def public_call(self) -> str:
        """The use of DTensor's public calls that the program tests, as a user writes it; empty where it tests an op."""
        return self.then.removeprefix(PUBLIC) if self.then.startswith(PUBLIC) else ""

    def __str__(self) -> str:
        """`aten.add.Tensor on (2, 2): (S(0), R), R, then sum`: one placement where a tensor has the same on each axis.

        A program of a public call is `DTensor.full_tensor() on (2,): S(0)`.
        """
        held = ", ".join(placements_text(placements) for placements in self.inputs)
        if self.public_call:
            return f"{self.public_call} on {self.mesh}: {held}"
        shown = f"{self.sample.op} on {self.mesh}: {held}"
        shown += then_text(self.then)
        return shown + (", a flattened submesh present" if self.flattened else "")


def split_prior_call(then: str) -> tuple[str, str]:
    """The steps after a call, and the prior call that comes before all of them; either may be empty.

    >>> split_prior_call("strides | again(x0, 2)"), split_prior_call("again(x0)"), split_prior_call("sum")
    (('strides', 'again(x0, 2)'), ('', 'again(x0)'), ('sum', ''))
    """
    found = re.fullmatch(r"(?:([\w ]+) \| )?(again\(.*)", then, re.DOTALL)
    return (found[1] or "", found[2]) if found else (then, "")


def then_text(then: str) -> str:
    """What stands after a call in a title: `, then sum`; a call before it comes `after` that: `, after a call with (x0, 2)`."""
    steps, prior = split_prior_call(then)
    after = f", after a call with {prior.removeprefix('again')}" if prior else ""
    return (f", then {steps}" if steps else "") + after


def placements_text(placements: tuple[Placement, ...]) -> str:
    """`(S(0), R)`; one placement where it is the same on each axis."""
    return shorts(placements[:1]) if len(set(placements)) == 1 else f"({shorts(placements)})"


_SEPARATOR = re.compile(r", (?![^()]*\))")
"""A comma between placements, not within one."""


def read_layout(text: str) -> Layout:
    """The layout of a text as findings print it: `S(0)` on one axis, `(S(0), R)` on two.  Raises `BadPlacement`.

    >>> read_layout("(S(0), SS(1,2), R)")
    (Shard(dim=0), _StridedShard(dim=1, sf=2), Replicate())
    """
    inner = text[1:-1] if text.startswith("(") else text
    return tuple(parse(part) for part in _SEPARATOR.split(inner))


def layout_on_axes(layout: Layout, mesh: Sequence[int], axes: Sequence[int], sizes: Sequence[int]) -> Layout:
    """The layout reduced to the mesh axes `axes`, which now have the sizes `sizes`; the shard order of each dim stays.

    >>> whole = read_layout("(SS(0,3), S(0))")
    >>> layout_on_axes(whole, (2, 3), (0, 1), (2, 2)), layout_on_axes(whole, (2, 3), (0,), (2,))
    ((_StridedShard(dim=0, sf=2), Shard(dim=0)), (Shard(dim=0),))
    """
    made = [layout[axis] for axis in axes]
    for dim in sorted({cut[0] for cut in map(shard_cut, layout) if cut is not None}):
        order = cut_order(split_factors(layout, dim), mesh)
        left = [axes.index(axis) for axis in order or () if axis in axes]
        for axis, placement in placements_in_order(dim, left, sizes).items():
            made[axis] = placement
    return tuple(made)
