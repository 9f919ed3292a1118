"""Sharding rules of our own as values: what holds for a call of an op along one mesh axis of any size.

A rule is a function from a query (a call without the values of its tensors) to placement rules: placements of the
inputs along one mesh axis, and the placements of the results that follow.  The all-replicated placement rule is
implied.  A rule sees neither a mesh nor a rank.  What depends on them is declared by the placement rule's `cut`, and by
the rule's `shapes`, `own` and `instead`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from localtensor.layout import shape_text, shorts
from strategies.model.rule import Call, Leaf, flat_results, leaf_numbers, overload

OptionalPlacements = tuple[Placement | None, ...]
Cut = Literal["any", "filled", "even", "aligned"]


@dataclass(frozen=True, slots=True)
class Meta:
    """The shape and dtype of a tensor; a rule does not depend on strides."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __repr__(self) -> str:
        return shape_text(self.shape, self.dtype)


@dataclass(frozen=True, slots=True)
class PlacementRule:
    """A placement rule: one placement for each input by leaf number, and for each result; None for a masked result.

    `cut` is the condition on the sharded dims of inputs and results: none (`any`), at least one row on each rank
    (`filled`), equally many on each (`even`), or equally many that fill multiples of 16 bytes (`aligned`).
    """

    inputs: OptionalPlacements
    outputs: OptionalPlacements
    cut: Cut = "any"

    def __str__(self) -> str:
        return f"{shorts(self.inputs)} -> {shorts(self.outputs)}" + (f", {self.cut}" if self.cut != "any" else "")


@dataclass(frozen=True, slots=True)
class RuleQuery:
    """A rule query, one call of an op: `tensors` by leaf number, flat `outputs`, None for a result that is not a tensor.

    >>> query = query_of("aten.sum.dim_IntList", (Leaf(0), [-1]), {}, (Meta((4, 3), torch.float32),))
    >>> query["dim"], query["keepdim"], query.dims("dim"), query.outputs
    ([-1], False, (1,), (f32[4],))
    """

    op: str
    arguments: Mapping[str, Any]
    """Every argument of the schema by name, defaults filled in, a `Leaf` for each tensor."""
    tensors: tuple[Meta, ...]
    outputs: tuple[Meta | None, ...]

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str) -> Any:
        """The argument of that name; None if the schema has none."""
        return self.arguments.get(name)

    def leaf(self, name: str) -> int | None:
        """The leaf number of a tensor argument; None if it is not a tensor."""
        value = self.arguments.get(name)
        return value.index if isinstance(value, Leaf) else None

    def given(self, name: str) -> int:
        """The leaf number of a required tensor argument.  Raises `LookupError` if it is not a tensor."""
        leaf = self.leaf(name)
        if leaf is None:
            raise LookupError(f"{self.op} has no tensor as {name}")
        return leaf

    def leaves(self, name: str) -> tuple[int, ...]:
        """The leaf numbers of a tensor or of a list of tensors, None left out."""
        return leaf_numbers(self.arguments.get(name))

    def meta(self, name: str) -> Meta:
        """The tensor of that argument.  Raises `LookupError` if it is not a tensor."""
        return self.tensors[self.given(name)]

    def dims(self, name: str, of: int = 0) -> tuple[int, ...]:
        """The dims of tensor `of` that the argument names, not negative; all dims for None and []."""
        value, ndim = self.arguments.get(name), self.tensors[of].ndim
        given = [] if value is None else [value] if isinstance(value, int) else list(value)
        return tuple(dim % max(ndim, 1) for dim in given) if given else tuple(range(ndim))

    def masked(self, outputs: Sequence[Placement]) -> list[Placement | None]:
        """These placements for the results, None for a result that is not a tensor."""
        return [p if meta is not None else None for p, meta in zip(outputs, self.outputs, strict=True)]

    def on_each(self, placement: Placement) -> list[Placement | None]:
        """The placement for every result that is a tensor, None for the others."""
        return [None if meta is None else placement for meta in self.outputs]

    def line(
        self, inputs: Mapping[int, Placement], outputs: Sequence[Placement | None], cut: Cut = "any"
    ) -> PlacementRule:
        """The placement rule in which all other inputs are replicated."""
        return PlacementRule(tuple(inputs.get(i, Replicate()) for i in range(len(self.tensors))), tuple(outputs), cut)


RuleFunction = Callable[[RuleQuery], Iterable[PlacementRule]]
OwnArguments = Callable[[RuleQuery, RuleQuery], Mapping[str, Any]]
"""From the query of a piece and that of the whole call: the arguments of the call on the piece that differ, by name."""


@dataclass(frozen=True, slots=True)
class OpRule:
    """The rule of one overload, with its family and the reason for which it holds.

    `shapes` names arguments that are the shape of the first result, and become the shape of the rank's piece.  `own`
    returns, for the query of a rank's pieces, all other arguments that differ by rank, such as a number of rows.

    `instead` returns, for the query of the whole call, the call of the same tensors that every rank makes in its place,
    for an op that would behave differently on a piece.  The rule is then queried for that call.
    """

    op: str
    lines: RuleFunction
    family: str
    reason: str
    shapes: tuple[str, ...] = ()
    own: Callable[[RuleQuery], Mapping[str, Any]] | None = None
    instead: Callable[[RuleQuery], Call] | None = None

    @property
    def where(self) -> str:
        """`file:line` of the rule's function."""
        code = getattr(inspect.unwrap(getattr(self.lines, "func", self.lines)), "__code__", None)
        return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(self.lines)


@dataclass(frozen=True, slots=True)
class RuleRegistry:
    """Rules by overload.  `first | second` has those of both, and the second's where both have one.

    >>> import torch
    >>> book = RuleRegistry.of(*rules("copy", "each element goes by itself", ["aten.clone.default"], lambda query: []))
    >>> "aten.clone.default" in book, len(book | RuleRegistry.of())
    (True, 1)
    """

    entries: Mapping[str, OpRule] = field(default_factory=dict)

    @classmethod
    def of(cls, *entries: OpRule) -> RuleRegistry:
        return cls({entry.op: entry for entry in entries})

    def get(self, op: str) -> OpRule | None:
        return self.entries.get(op)

    def __contains__(self, op: object) -> bool:
        return op in self.entries

    def __iter__(self) -> Iterator[OpRule]:
        return iter(self.entries.values())

    def __len__(self) -> int:
        return len(self.entries)

    def __or__(self, other: RuleRegistry) -> RuleRegistry:
        return RuleRegistry({**self.entries, **other.entries})


def rules(
    family: str,
    reason: str,
    ops: Sequence[str],
    lines: RuleFunction,
    *,
    shapes: Sequence[str] = (),
    own: Callable[[RuleQuery], Mapping[str, Any]] | None = None,
    instead: Callable[[RuleQuery], Call] | None = None,
) -> tuple[OpRule, ...]:
    """One rule for each of these overloads that this version of torch has."""
    return tuple(OpRule(op, lines, family, reason, tuple(shapes), own, instead) for op in ops if overload_exists(op))


def overload_exists(op: str) -> bool:
    """Whether this version of torch has an overload of that name."""
    namespace, packet, which = op.split(".")
    return which in getattr(getattr(getattr(torch.ops, namespace), packet, None), "overloads", list)()


def bind_arguments(op: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by their names in the schema, defaults filled in."""
    schema = overload(op)._schema.arguments
    given = {argument.name: value for argument, value in zip(schema, args, strict=False)} | dict(kwargs)
    return {a.name: given.get(a.name, a.default_value if a.has_default_value() else None) for a in schema}


def query_of(
    op: str, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[Meta], outputs: object = None
) -> RuleQuery:
    """The query of a call; without `outputs`, its result or one of the same shapes, the op runs on meta tensors."""
    if outputs is None and overload(op)._schema.returns:
        given = [torch.empty(meta.shape, dtype=meta.dtype, device="meta") for meta in tensors]
        outputs = Call(op, tuple(args), tuple(kwargs.items()))(given)
    metas = tuple(Meta(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else None for x in flat_results(outputs))
    return RuleQuery(op, bind_arguments(op, args, kwargs), tuple(tensors), metas)
