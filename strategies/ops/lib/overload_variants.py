"""Overloads that compute what another one computes and write it somewhere: in place, into `out=`, as a copy of a view.

They need no rule of their own.  Each rank does to its piece what the op without writing does, so the lines are that
op's, and what is written to lies as the result that is written there.  Two things differ, and both take lines away:

* A tensor that is written to is never redistributed, so a line in which it comes in otherwise than the result goes out
  is none.  An `out=` of another shape is resized, and a piece of it is no piece of the result: no line then.
* What is written may be of another dtype than the op gives by itself (`add(i32, i32, out=f32)`, `add_(i8, i64)`).  A
  cast does not go with every reduction (integers wrap, floats are cut off), so then no line has a Partial.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _pytree as pytree

from strategies.model.rule import Call, Leaf, overload, results
from strategies.ops.semantics.rulebook import Ask, Cut, Entry, Line, Meta, exists

LEFT_OUT = frozenset({"dtype", "layout", "device", "pin_memory"})
"""What an op with `out=` does not ask for, since the tensor that it is given has it."""


def words(text: str) -> tuple[str, ...]:
    """The words of a table."""
    return tuple(text.split())


def named(text: str, namespace: str = "aten") -> tuple[str, ...]:
    """The overloads that a table names by packet, or by packet and name.

    >>> named("neg add.Tensor")
    ('aten.neg.default', 'aten.add.Tensor')
    """
    return tuple(f"{namespace}.{word}" if "." in word else f"{namespace}.{word}.default" for word in words(text))


def with_variants(*tables: Iterable[Entry], but: Sequence[str] = ()) -> tuple[Entry, ...]:
    """The entries, and one for each overload of this torch that writes what an op of them computes, except `but`.

    An overload that has an entry of its own keeps that.

    >>> from strategies.ops.semantics.rulebook import rules
    >>> given = rules("example", "each element goes by itself", ["aten.relu.default"], lambda ask: [])
    >>> [entry.op for entry in with_variants(given)]
    ['aten.relu.default', 'aten.relu.out', 'aten.relu_.default']
    """
    found = {entry.op: entry for table in tables for entry in table}
    for entry in list(found.values()):
        for op in variants(entry.op):
            if op not in but:
                found.setdefault(op, written_as(entry, op))
    return tuple(found.values())


def written_as(entry: Entry, op: str) -> Entry:
    """The rule of an overload that writes what the entry's op computes."""
    names = {a.name for a in overload(op)._schema.arguments}
    shapes = tuple(name for name in entry.shapes if name in names)
    return Entry(op, Writing(entry), entry.family, entry.reason, shapes, entry.own, entry.instead)


@functools.cache
def variants(op: str) -> tuple[str, ...]:
    """The overloads that take the arguments of this one, and perhaps `out=`, in the packets of its family."""
    namespace, packet, _ = op.split(".")
    bare = packet.strip("_")
    in_place = f"__i{bare}__" if packet == f"__{bare}__" else f"{packet}_"
    found = []
    for name in (packet, in_place, f"{packet}_copy"):
        for which in getattr(getattr(getattr(torch.ops, namespace), name, None), "overloads", list)():
            other = f"{namespace}.{name}.{which}"
            if other != op and exists(op) and exists(other) and _same(op, other, copies=name.endswith("_copy")):
                found.append(other)
    return tuple(found)


def _same(op: str, other: str, *, copies: bool) -> bool:
    """Whether the other takes the same arguments by name and type, and writes to some where this one writes to none."""
    ours, theirs = overload(op)._schema.arguments, overload(other)._schema.arguments
    written = {a.name for a in theirs if a.alias_info is not None and a.alias_info.is_write}
    if _writes(ours) or not (written or copies):
        return False
    mine = {a.name: str(a.type) for a in ours}
    given = {a.name: str(a.type) for a in theirs if not a.is_out}
    return given.items() <= mine.items() and mine.keys() - given.keys() <= LEFT_OUT


def _writes(arguments: Iterable[Any]) -> bool:
    return any(a.alias_info is not None and a.alias_info.is_write for a in arguments)


@dataclass(frozen=True, slots=True)
class Writing:
    """The rule of an overload that writes what the rule's own op computes."""

    rule: Entry

    @property
    def __wrapped__(self) -> Any:
        """The function whose file and line are this rule's."""
        return getattr(self.rule.lines, "func", self.rule.lines)

    def __call__(self, ask: Ask) -> Iterator[Line]:
        outs = tuple(leaf for name in _names(ask.op, out=True) for leaf in ask.leaves(name))
        inner, numbers = plain_ask(self.rule.op, ask, outs)
        if not all(_lands(ask.tensors[leaf], inner.outputs, k) for k, leaf in enumerate(outs)):
            return
        targets = [*_in_place(ask), *((leaf, k) for k, leaf in enumerate(outs))]
        own: bool | None = None
        for line in self.rule.lines(inner):
            if any(isinstance(p, Partial) for p in (*line.inputs, *line.outputs)):
                own = gives_these(inner) if own is None else own
                if not own:
                    continue
            inputs = dict(zip(numbers, line.inputs, strict=True))
            goes = dict(enumerate(line.outputs))
            inputs |= {leaf: goes[k] or Replicate() for k, leaf in enumerate(outs)}
            if all(inputs[leaf] == goes[k] for leaf, k in targets if goes[k] is not None):
                placed = tuple(inputs[leaf] for leaf in range(len(ask.tensors)))
                yield Line(placed, line.outputs if ask.outputs else (), line.cut)


@functools.cache
def _names(op: str, *, out: bool) -> tuple[str, ...]:
    """The arguments that the op writes to: those of `out=`, or those that are inputs, too."""
    arguments = overload(op)._schema.arguments
    return tuple(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write and a.is_out == out)


def _in_place(ask: Ask) -> Iterator[tuple[int, int]]:
    """Each input that is written to, by leaf number, and the result that it becomes, by number.

    Arguments that are returned tell by their alias which; an op that returns nothing has a list of results for each.
    """
    schema = overload(ask.op)._schema
    names = _names(ask.op, out=False)
    if not schema.returns:
        yield from ((leaf, k) for k, leaf in enumerate(leaf for name in names for leaf in ask.leaves(name)))
        return
    sets = {a.name: _aliases(a) for a in schema.arguments if a.name in names}
    for k, returned in enumerate(schema.returns):
        yield from ((leaf, k) for name in names if sets[name] & _aliases(returned) for leaf in ask.leaves(name))


def _aliases(part: Any) -> set[str]:
    return set(part.alias_info.before_set) if part.alias_info is not None else set()


def _lands(meta: Meta, outputs: Sequence[Meta | None], k: int) -> bool:
    """Whether the `out=` has the shape of the result, so that nothing is resized."""
    landing = outputs[k] if k < len(outputs) else None
    return k < len(outputs) and (landing is None or landing.shape == meta.shape)


def plain_ask(op: str, ask: Ask, outs: Sequence[int]) -> tuple[Ask, tuple[int, ...]]:
    """The question to the op that does not write, and the leaf number that each of its tensors has in `ask`."""
    numbers = tuple(leaf for leaf in range(len(ask.tensors)) if leaf not in outs)
    places = {leaf: Leaf(i) for i, leaf in enumerate(numbers)}
    written = [leaf for name in _names(ask.op, out=False) for leaf in ask.leaves(name)] + list(outs)
    outputs = ask.outputs or tuple(ask.tensors[leaf] for leaf in written)
    arguments = {
        a.name: _relabelled(ask.arguments[a.name], places) if a.name in ask.arguments else _implied(a, outputs)
        for a in overload(op)._schema.arguments
    }
    return Ask(op, arguments, tuple(ask.tensors[leaf] for leaf in numbers), outputs), numbers


def _relabelled(value: Any, places: Mapping[int, Leaf]) -> Any:
    return pytree.tree_map(lambda v: places[v.index] if isinstance(v, Leaf) else v, value)


def _implied(argument: Any, outputs: Sequence[Meta | None]) -> Any:
    """What an op with `out=` does not ask for: of the dtype the one it writes to, of the rest the default."""
    if argument.name == "dtype" and outputs and outputs[0] is not None:
        return outputs[0].dtype
    return argument.default_value if argument.has_default_value() else None


def gives_these(ask: Ask) -> bool:
    """Whether the op by itself gives results of the dtypes and shapes that the question says, asked of meta tensors."""
    schema = overload(ask.op)._schema.arguments
    args = tuple(ask[a.name] for a in schema if not a.kwarg_only)
    kwargs = tuple((a.name, ask[a.name]) for a in schema if a.kwarg_only)
    tensors = [torch.empty(meta.shape, dtype=meta.dtype, device="meta") for meta in ask.tensors]
    try:
        given = results(Call(ask.op, args, kwargs)(tensors))
    except (RuntimeError, TypeError, ValueError, IndexError):  # no meta kernel, or shapes that hang on values
        return False
    metas = [Meta(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else None for x in given]
    return metas == list(ask.outputs)


# Foreach ops: a call for each element of some lists, each by the lines of the op on one tensor.
#
# Every element may lie in its own way, and all those ways together are too many to write down.  So there is a line for
# each way that goes for all elements that have it, the others replicated; and, in a short list, for each element alone.
# Who can propagate call by call asks `elements`.

ALONE = 2
"""The longest list of which there are lines for each element alone."""
ELEMENT_OP = {
    "_foreach_norm.Scalar": "linalg_vector_norm.default",
    "_foreach_powsum.Scalar": "linalg__powsum.default",
    "_foreach_max.default": "max.default",
    "_foreach_maximum.Scalar": "clamp_min.default",
    "_foreach_maximum.ScalarList": "clamp_min.default",
    "_foreach_minimum.Scalar": "clamp_max.default",
    "_foreach_minimum.ScalarList": "clamp_max.default",
}
"""Foreach ops whose elements are calls of an op of another name, or of one overload among several that would do."""
NAMES = words("""abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min clone copy cos cosh div erf erfc exp expm1 floor
    frac lerp lgamma log log10 log1p log2 maximum minimum mm mul neg pow reciprocal round rsqrt sigmoid sign sin sinh sqrt
    sub tan tanh trunc zero""")
STRICT: Sequence[Cut] = ("any", "filled", "even")


def on_lists(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """The rules of the foreach overloads whose elements are calls of these ops, and of those in place.

    Not of those with `out=`: torch (2.13) has a schema for them, and no kernel.

    >>> from strategies.ops.semantics.rulebook import rules
    >>> given = rules("example", "each element goes by itself", ["aten.neg.default"], lambda ask: [])
    >>> [entry.op for entry in on_lists(given)]
    ['aten._foreach_neg.default', 'aten._foreach_neg_.default']
    """
    by_op = {entry.op: entry for entry in entries}
    found = []
    for op, single in foreach_ops().items():
        if single in by_op:
            entry = by_op[single]
            found.append(Entry(op, Each(entry), entry.family, f"on each element: {entry.reason}"))
    return tuple(
        entry for entry in with_variants(found) if not any(a.is_out for a in overload(entry.op)._schema.arguments)
    )


@functools.cache
def foreach_ops() -> Mapping[str, str]:
    """Each foreach overload of this torch that writes to nothing, and the overload that its elements are calls of."""
    found = {}
    for packet in sorted({*(name.split(".")[0] for name in ELEMENT_OP), *(f"_foreach_{name}" for name in NAMES)}):
        for which in getattr(getattr(torch.ops.aten, packet, None), "overloads", list)():
            single = _single(packet, which)
            if single is not None:
                found[f"aten.{packet}.{which}"] = single
    return found


def _single(packet: str, which: str) -> str | None:
    """The overload on one tensor that takes what an element of this one's lists is."""
    op = overload(f"aten.{packet}.{which}")
    if op._schema.is_mutable or any(a.is_out for a in op._schema.arguments):
        return None
    given = ELEMENT_OP.get(f"{packet}.{which}")
    if given is not None:
        return f"aten.{given}" if exists(f"aten.{given}") else None
    name = packet.removeprefix("_foreach_")
    overloads: list[str] = getattr(getattr(torch.ops.aten, name, None), "overloads", list)()
    able = (f"aten.{name}.{other}" for other in sorted(overloads, key=lambda other: other != "default"))
    return next((other for other in able if _takes(other, op)), None)


def _takes(single: str, op: torch._ops.OpOverload) -> bool:
    """Whether each argument of the list op, in order, is one of the other, of its kind, and the rest may be left out."""
    theirs = overload(single)._schema
    if theirs.is_mutable or any(a.is_out for a in theirs.arguments):
        return False
    pairs = list(zip(op._schema.arguments, theirs.arguments, strict=False))
    rest = theirs.arguments[len(pairs) :]
    enough = len(pairs) == len(op._schema.arguments) and all(a.has_default_value() for a in rest)
    return enough and all(_kind(a) == _kind(b) or _of_scalars(a) for a, b in pairs)


def _kind(argument: Any) -> str:
    return str(argument.type).removeprefix("List[").rstrip("]") if "Optional" not in str(argument.type) else "option"


def _of_scalars(argument: Any) -> bool:
    """A tensor that holds a number for each element: what it is, is not known."""
    return argument.name == "scalars" and str(argument.type) == "Tensor"


@dataclass(frozen=True, slots=True)
class Element:
    """One element of a list op: the rule and the question of its own call, and where its tensors are in the list op's."""

    rule: Entry
    ask: Ask
    leaves: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Each:
    """The rule of a list op by the rule of the op that each of its elements is a call of."""

    rule: Entry

    @property
    def __wrapped__(self) -> Any:
        return getattr(self.rule.lines, "func", self.rule.lines)

    def elements(self, ask: Ask) -> tuple[Element, ...]:
        """The calls that a call of the list op is."""
        return tuple(self._element(ask, i) for i in range(len(ask.outputs)))

    def _element(self, ask: Ask, i: int) -> Element:
        names = [a.name for a in overload(ask.op)._schema.arguments]
        schema = overload(self.rule.op)._schema.arguments
        arguments = {a.name: a.default_value if a.has_default_value() else None for a in schema}
        leaves: list[int] = []
        for name, argument in _paired(names, schema):
            value = ask[name]
            value = value[i] if isinstance(value, (list, tuple)) else value
            if isinstance(value, Leaf):
                if "Tensor" not in str(argument.type):
                    continue
                leaves.append(value.index)
                value = Leaf(len(leaves) - 1)
            arguments[argument.name] = value
        tensors = tuple(ask.tensors[leaf] for leaf in leaves)
        return Element(self.rule, Ask(self.rule.op, arguments, tensors, (ask.outputs[i],)), tuple(leaves))

    def __call__(self, ask: Ask) -> Iterator[Line]:
        elements = self.elements(ask)
        found = [
            {(*line.inputs, None, *line.outputs, line.cut): line for line in e.rule.lines(e.ask)} for e in elements
        ]
        for name in dict.fromkeys(name for lines in found for name in lines):
            yield from _joined(ask, elements, [lines.get(name) for lines in found])
        for i, lines in enumerate(found if 1 < len(found) <= ALONE else ()):
            for line in lines.values():
                yield from _joined(ask, elements, [line if j == i else None for j in range(len(found))])


def _paired(names: Sequence[str], schema: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """The list op's arguments, each with the single op's of that name, else with the one at that place."""
    by_name = {a.name: a for a in schema}
    for place, name in enumerate(names):
        if name in by_name:
            yield name, by_name[name]
        elif place < len(schema):
            yield name, schema[place]


def _joined(ask: Ask, elements: Sequence[Element], lines: Sequence[Line | None]) -> Iterator[Line]:
    """The line of the whole call; none if two elements want the tensor that they share in two ways."""
    inputs: dict[int, Placement | None] = {}
    outputs: list[Placement | None] = []
    cuts: list[Cut] = [line.cut for line in lines if line is not None]
    for element, line in zip(elements, lines, strict=True):
        placed = line.inputs if line is not None else (Replicate(),) * len(element.leaves)
        if any(inputs.setdefault(leaf, p) != p for leaf, p in zip(element.leaves, placed, strict=True)):
            return
        outputs += line.outputs if line is not None else [Replicate()]
    yield Line(
        tuple(inputs.get(i, Replicate()) for i in range(len(ask.tensors))), tuple(outputs), max(cuts, key=STRICT.index)
    )
