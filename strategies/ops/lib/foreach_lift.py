"""Foreach ops: a call for each element of some lists, each by the lines of the op on one tensor.

Every element may lie in its own way, and all those ways together are too many to write down.  So there is a line for
each way that goes for all elements that have it, the others replicated; and, in a short list, for each element alone.
Who can propagate call by call asks `elements`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from strategies.model.rule import Leaf, overload
from strategies.ops.lib.overload_variants import with_variants, words
from strategies.ops.semantics.rulebook import Ask, Cut, Entry, Line, exists

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
