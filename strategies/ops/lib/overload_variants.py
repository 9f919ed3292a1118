"""Rules derived for the variants of an op: in place, with `out=`, the copy of a view, and the `_foreach_` ops on lists.

A variant that writes has the placement rules of the op that does not, and what it writes to is placed as the result.
There are two restrictions:

* A tensor that is written to is never redistributed, so placement rules with different placements of that input and the
  result are dropped.  An `out=` of another shape is resized, and its pieces are not those of the result: no rules then.
* The written dtype may differ from the op's own (`add(i32, i32, out=f32)`, `add_(i8, i64)`).  A cast does not commute
  with every reduction (integers wrap, floats are truncated), so then no placement rule has a Partial.

A foreach op is one call for each element of its lists.  Each element may have its own placements, but their
combinations are too many.  So there is a placement rule for each one of the single op, applied to all elements that
have it, the others replicated; and, for short lists, for each element alone.  A caller that can propagate call by call
uses `Each.elements`.
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

from strategies.model.rule import Call, Leaf, flat_results, overload
from strategies.ops.semantics.rule_registry import Cut, Meta, OpRule, PlacementRule, RuleQuery, overload_exists

IMPLIED_BY_OUT = frozenset({"dtype", "layout", "device", "pin_memory"})
"""Arguments that an op with `out=` does not have, since the given tensor determines them."""
LONGEST_LIST_ONE_BY_ONE = 2
"""The longest list with placement rules for each element alone."""
ELEMENT_OP = {
    "_foreach_norm.Scalar": "linalg_vector_norm.default",
    "_foreach_powsum.Scalar": "linalg__powsum.default",
    "_foreach_max.default": "max.default",
    "_foreach_maximum.Scalar": "clamp_min.default",
    "_foreach_maximum.ScalarList": "clamp_min.default",
    "_foreach_minimum.Scalar": "clamp_max.default",
    "_foreach_minimum.ScalarList": "clamp_max.default",
}
"""Foreach ops whose elements are calls of an op with another name, or of one of several possible overloads."""
CUTS_BY_STRICTNESS: Sequence[Cut] = ("any", "filled", "even", "aligned")


def split_words(text: str) -> tuple[str, ...]:
    """The words of a table."""
    return tuple(text.split())


def overloads_of(text: str, namespace: str = "aten") -> tuple[str, ...]:
    """The overloads of a table of packets, or packets with overload names.

    >>> overloads_of("neg add.Tensor")
    ('aten.neg.default', 'aten.add.Tensor')
    """
    return tuple(f"{namespace}.{word}" if "." in word else f"{namespace}.{word}.default" for word in split_words(text))


def with_variants(*tables: Iterable[OpRule], but: Sequence[str] = ()) -> tuple[OpRule, ...]:
    """The rules, and one for each overload of this torch that writes the result of one of their ops, except `but`.

    An overload with a rule of its own keeps it.

    >>> from strategies.ops.semantics.rule_registry import rules
    >>> given = rules("example", "each element goes by itself", ["aten.relu.default"], lambda query: [])
    >>> [entry.op for entry in with_variants(given)]
    ['aten.relu.default', 'aten.relu.out', 'aten.relu_.default']
    """
    found = {entry.op: entry for table in tables for entry in table}
    for entry in list(found.values()):
        for op in writing_variants(entry.op):
            if op not in but:
                found.setdefault(op, rule_of_variant(entry, op))
    return tuple(found.values())


def rule_of_variant(entry: OpRule, op: str) -> OpRule:
    """The rule of an overload that writes the result of the rule's op."""
    names = {a.name for a in overload(op)._schema.arguments}
    shapes = tuple(name for name in entry.shapes if name in names)
    return OpRule(op, WritingRule(entry), entry.family, entry.reason, shapes, entry.own, entry.instead)


@functools.cache
def writing_variants(op: str) -> tuple[str, ...]:
    """The overloads with the arguments of this one, and perhaps `out=`: of its packet, in place, and as a copy."""
    namespace, packet, _ = op.split(".")
    bare = packet.strip("_")
    in_place = f"__i{bare}__" if packet == f"__{bare}__" else f"{packet}_"
    found = []
    for name in (packet, in_place, f"{packet}_copy"):
        for which in getattr(getattr(getattr(torch.ops, namespace), name, None), "overloads", list)():
            other = f"{namespace}.{name}.{which}"
            both_exist = other != op and overload_exists(op) and overload_exists(other)
            if both_exist and _same(op, other, copies=name.endswith("_copy")):
                found.append(other)
    return tuple(found)


def _same(op: str, other: str, *, copies: bool) -> bool:
    """Whether the other has the same arguments by name and type, and writes to more of them than this one, or is a copy.

    Batch norm writes to its running statistics, and its `out=` overload to the results, too.
    """
    mine_written, written = ({*_names(name, out=True), *_names(name, out=False)} for name in (op, other))
    if not (written > mine_written or (copies and not mine_written)):
        return False
    mine = {a.name: str(a.type) for a in overload(op)._schema.arguments}
    given = {a.name: str(a.type) for a in overload(other)._schema.arguments if not a.is_out}
    return given.items() <= mine.items() and mine.keys() - given.keys() <= IMPLIED_BY_OUT


@dataclass(frozen=True, slots=True)
class WritingRule:
    """The rule function of an overload that writes the result of the rule's op."""

    rule: OpRule

    @property
    def __wrapped__(self) -> object:
        """The function whose file and line are reported for this rule."""
        return getattr(self.rule.lines, "func", self.rule.lines)

    def __call__(self, query: RuleQuery) -> Iterator[PlacementRule]:
        outs = tuple(leaf for name in _names(query.op, out=True) for leaf in query.leaves(name))
        inner, numbers = nonwriting_query(self.rule.op, query, outs)
        if len(inner.outputs) < len(outs):
            return
        for leaf, landing in zip(outs, inner.outputs, strict=False):
            if landing is not None and landing.shape != query.tensors[leaf].shape:
                return  # the `out=` would be resized
        targets = [*_in_place(query), *((leaf, k) for k, leaf in enumerate(outs))]
        own: bool | None = None
        for line in self.rule.lines(inner):
            if any(isinstance(p, Partial) for p in (*line.inputs, *line.outputs)):
                own = has_query_results(inner) if own is None else own
                if not own:
                    continue
            inputs = dict(zip(numbers, line.inputs, strict=True))
            goes = dict(enumerate(line.outputs))
            inputs |= {leaf: goes[k] or Replicate() for k, leaf in enumerate(outs)}
            if all(inputs[leaf] == goes[k] for leaf, k in targets if goes[k] is not None):
                placed = tuple(inputs[leaf] for leaf in range(len(query.tensors)))
                yield PlacementRule(placed, line.outputs if query.outputs else (), line.cut)


@functools.cache
def _names(op: str, *, out: bool) -> tuple[str, ...]:
    """The arguments that the op writes to: those of `out=`, or those that are inputs."""
    arguments = overload(op)._schema.arguments
    return tuple(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write and a.is_out == out)


def _in_place(query: RuleQuery) -> Iterator[tuple[int, int]]:
    """Each input that is written to, by leaf number, with the number of the result that it becomes.

    The alias of a returned argument determines the result.  An op that returns nothing has a list of results for each.
    """
    schema = overload(query.op)._schema
    names = _names(query.op, out=False)
    if not schema.returns:
        yield from ((leaf, k) for k, leaf in enumerate(leaf for name in names for leaf in query.leaves(name)))
        return
    sets = {a.name: _aliases(a) for a in schema.arguments if a.name in names}
    for k, returned in enumerate(schema.returns):
        yield from ((leaf, k) for name in names if sets[name] & _aliases(returned) for leaf in query.leaves(name))


def _aliases(part: torch._C.Argument) -> set[str]:
    return set(part.alias_info.before_set) if part.alias_info is not None else set()


def nonwriting_query(op: str, query: RuleQuery, outs: Sequence[int]) -> tuple[RuleQuery, tuple[int, ...]]:
    """The query of the op that does not write, and the leaf numbers of its tensors in the query of the other op."""
    numbers = tuple(leaf for leaf in range(len(query.tensors)) if leaf not in outs)
    places = {leaf: Leaf(i) for i, leaf in enumerate(numbers)}
    given = pytree.tree_map(lambda v: places.get(v.index) if isinstance(v, Leaf) else v, dict(query.arguments))
    written = [leaf for name in _names(query.op, out=False) for leaf in query.leaves(name)] + list(outs)
    outputs = query.outputs or tuple(query.tensors[leaf] for leaf in written)
    schema = overload(op)._schema.arguments
    arguments = {a.name: given[a.name] if a.name in given else _implied(a, outputs) for a in schema}
    return RuleQuery(op, arguments, tuple(query.tensors[leaf] for leaf in numbers), outputs), numbers


def _implied(argument: torch._C.Argument, outputs: Sequence[Meta | None]) -> object:
    """The value of an argument that an op with `out=` lacks: the written dtype for `dtype`, else the default."""
    if argument.name == "dtype" and outputs and outputs[0] is not None:
        return outputs[0].dtype
    return argument.default_value if argument.has_default_value() else None


def has_query_results(query: RuleQuery) -> bool:
    """Whether the op returns results of the dtypes and shapes in the query; it runs on meta tensors."""
    schema = overload(query.op)._schema.arguments
    args = tuple(query[a.name] for a in schema if not a.kwarg_only)
    kwargs = tuple((a.name, query[a.name]) for a in schema if a.kwarg_only)
    tensors = [torch.empty(meta.shape, dtype=meta.dtype, device="meta") for meta in query.tensors]
    try:
        given = flat_results(Call(query.op, args, kwargs)(tensors))
    except (RuntimeError, TypeError, ValueError, IndexError):  # no meta kernel, or shapes that depend on values
        return False
    metas = [Meta(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else None for x in given]
    return metas == list(query.outputs)


FOREACH_NAMES = split_words("""abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min clone copy cos cosh div erf erfc exp expm1 floor
    frac lerp lgamma log log10 log1p log2 maximum minimum mm mul neg pow reciprocal round rsqrt sigmoid sign sin sinh sqrt
    sub tan tanh trunc zero""")
"""The names of ops that have a foreach op."""


def on_lists(entries: Iterable[OpRule]) -> tuple[OpRule, ...]:
    """The rules of the foreach overloads whose elements are calls of these ops, and of their in-place variants.

    Those with `out=` are left out: torch 2.13 has their schemas, but no kernels.

    >>> from strategies.ops.semantics.rule_registry import rules
    >>> given = rules("example", "each element goes by itself", ["aten.neg.default"], lambda query: [])
    >>> [entry.op for entry in on_lists(given)]
    ['aten._foreach_neg.default', 'aten._foreach_neg_.default']
    """
    by_op = {entry.op: entry for entry in entries}
    found = []
    for op, single in foreach_ops().items():
        if single in by_op:
            entry = by_op[single]
            found.append(OpRule(op, ForeachRule(entry), entry.family, f"on each element: {entry.reason}"))
    return tuple(entry for entry in with_variants(found) if not _names(entry.op, out=True))


@functools.cache
def foreach_ops() -> Mapping[str, str]:
    """Each foreach overload of this torch that does not write, with the overload of its elements."""
    found = {}
    packets = {*(name.split(".")[0] for name in ELEMENT_OP), *(f"_foreach_{name}" for name in FOREACH_NAMES)}
    for packet in sorted(packets):
        for which in getattr(getattr(torch.ops.aten, packet, None), "overloads", list)():
            single = _single(packet, which)
            if single is not None:
                found[f"aten.{packet}.{which}"] = single
    return found


def _single(packet: str, which: str) -> str | None:
    """The overload on one tensor for an element of this overload's lists, or None."""
    op = overload(f"aten.{packet}.{which}")
    if op._schema.is_mutable or any(a.is_out for a in op._schema.arguments):
        return None
    given = ELEMENT_OP.get(f"{packet}.{which}")
    if given is not None:
        return f"aten.{given}" if overload_exists(f"aten.{given}") else None
    name = packet.removeprefix("_foreach_")
    overloads: list[str] = getattr(getattr(torch.ops.aten, name, None), "overloads", list)()
    able = (f"aten.{name}.{other}" for other in sorted(overloads, key=lambda other: other != "default"))
    return next((other for other in able if _takes(other, op)), None)


def _takes(single: str, op: torch._ops.OpOverload) -> bool:
    """Whether the single op has the arguments of the list op, in order and of the same kind, and defaults for the rest."""
    theirs = overload(single)._schema
    if theirs.is_mutable or any(a.is_out for a in theirs.arguments):
        return False
    pairs = list(zip(op._schema.arguments, theirs.arguments, strict=False))
    rest = theirs.arguments[len(pairs) :]
    enough = len(pairs) == len(op._schema.arguments) and all(a.has_default_value() for a in rest)
    return enough and all(
        _kind(a) == _kind(b) or (a.name == "scalars" and str(a.type) == "Tensor")  # a number for each element
        for a, b in pairs
    )


def _kind(argument: torch._C.Argument) -> str:
    return str(argument.type).removeprefix("List[").rstrip("]") if "Optional" not in str(argument.type) else "option"


@dataclass(frozen=True, slots=True)
class ForeachElement:
    """One element of a list op: the rule and the query of its call, and the leaf numbers of its tensors in the list op."""

    rule: OpRule
    query: RuleQuery
    leaves: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ForeachRule:
    """The rule function of a list op, by the rule of the op of its elements."""

    rule: OpRule

    @property
    def __wrapped__(self) -> object:
        return getattr(self.rule.lines, "func", self.rule.lines)

    def elements(self, query: RuleQuery) -> tuple[ForeachElement, ...]:
        """The calls of which a call of the list op consists."""
        return tuple(self._element(query, i) for i in range(len(query.outputs)))

    def _element(self, query: RuleQuery, i: int) -> ForeachElement:
        names = [a.name for a in overload(query.op)._schema.arguments]
        schema = overload(self.rule.op)._schema.arguments
        arguments = {a.name: a.default_value if a.has_default_value() else None for a in schema}
        leaves: list[int] = []
        for name, argument in _paired(names, schema):
            value = query[name]
            value = value[i] if isinstance(value, (list, tuple)) else value
            if isinstance(value, Leaf):
                if "Tensor" not in str(argument.type):
                    continue
                leaves.append(value.index)
                value = Leaf(len(leaves) - 1)
            arguments[argument.name] = value
        tensors = tuple(query.tensors[leaf] for leaf in leaves)
        element = RuleQuery(self.rule.op, arguments, tensors, (query.outputs[i],))
        return ForeachElement(self.rule, element, tuple(leaves))

    def __call__(self, query: RuleQuery) -> Iterator[PlacementRule]:
        elements = self.elements(query)
        offered = [e.rule.lines(e.query) for e in elements]
        found = [{(*line.inputs, None, *line.outputs, line.cut): line for line in lines} for lines in offered]
        for name in dict.fromkeys(name for lines in found for name in lines):
            yield from _joined(query, elements, [lines.get(name) for lines in found])
        for i, lines in enumerate(found if 1 < len(found) <= LONGEST_LIST_ONE_BY_ONE else ()):
            for line in lines.values():
                yield from _joined(query, elements, [line if j == i else None for j in range(len(found))])


def _paired(names: Sequence[str], schema: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """The list op's arguments, each with the single op's of that name, else with the one at that position."""
    by_name = {a.name: a for a in schema}
    for place, name in enumerate(names):
        if name in by_name:
            yield name, by_name[name]
        elif place < len(schema):
            yield name, schema[place]


def _joined(
    query: RuleQuery, elements: Sequence[ForeachElement], lines: Sequence[PlacementRule | None]
) -> Iterator[PlacementRule]:
    """The placement rule of the whole call; none if two elements need different placements of a shared tensor."""
    inputs: dict[int, Placement | None] = {}
    outputs: list[Placement | None] = []
    cuts: list[Cut] = [line.cut for line in lines if line is not None]
    for element, line in zip(elements, lines, strict=True):
        placed = line.inputs if line is not None else (Replicate(),) * len(element.leaves)
        if any(inputs.setdefault(leaf, p) != p for leaf, p in zip(element.leaves, placed, strict=True)):
            return
        outputs += line.outputs if line is not None else [Replicate()]
    placed_inputs = tuple(inputs.get(i, Replicate()) for i in range(len(query.tensors)))
    yield PlacementRule(placed_inputs, tuple(outputs), max(cuts, key=CUTS_BY_STRICTNESS.index))
