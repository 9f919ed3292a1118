"""Rules of our own as values: what holds for a call of an op along one mesh axis, whatever the size of the axis.

A rule is a function from an `Ask`, a call without its tensors' values, to some `Line`s: how the inputs may lie along one
axis, and how the results lie then.  That everything is replicated needs no line: it always holds.  A rule sees neither
a mesh nor a rank; what depends on them is said by the line's `cut`, and by `shapes`, `own` and `instead` of the entry.
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
from torch.utils import _pytree as pytree

from localtensor.layout import shape_text, shorts
from strategies.model.rule import Call, Leaf, overload, results

Placements = tuple[Placement | None, ...]
Cut = Literal["any", "filled", "even"]


@dataclass(frozen=True, slots=True)
class Meta:
    """What a rule knows of a tensor.  Strides do not count: a rule holds for every layout in memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __repr__(self) -> str:
        return shape_text(self.shape, self.dtype)


@dataclass(frozen=True, slots=True)
class Line:
    """Inputs by leaf number, then results: one placement for each tensor, None where a result is masked off.

    `cut` says of the dims that it shards, of inputs and results, along its axis: `any` sizes will do; each rank must have
    some of them (`filled`); or all ranks as much (`even`).
    """

    inputs: Placements
    outputs: Placements
    cut: Cut = "any"

    def __str__(self) -> str:
        return f"{shorts(self.inputs)} -> {shorts(self.outputs)}" + (f", {self.cut}" if self.cut != "any" else "")


@dataclass(frozen=True, slots=True)
class Ask:
    """One call of an op: `tensors` by leaf number, `outputs` as a flat list, None for what is no tensor.

    >>> ask = ask_of("aten.sum.dim_IntList", (Leaf(0), [-1]), {}, (Meta((4, 3), torch.float32),))
    >>> ask["dim"], ask["keepdim"], ask.dims("dim"), ask.outputs
    ([-1], False, (1,), (f32[4],))
    """

    op: str
    arguments: Mapping[str, Any]
    """Every argument of the schema by its name, defaults filled in, a `Leaf` for each tensor."""
    tensors: tuple[Meta, ...]
    outputs: tuple[Meta | None, ...]

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str) -> Any:
        """The argument of that name, or None where the schema has none."""
        return self.arguments.get(name)

    def leaf(self, name: str) -> int | None:
        """The leaf number of a tensor argument; None if it was not given, or is none."""
        value = self.arguments.get(name)
        return value.index if isinstance(value, Leaf) else None

    def given(self, name: str) -> int:
        """The leaf number of a tensor argument that a call cannot lack.  Raises `LookupError` if it is none."""
        leaf = self.leaf(name)
        if leaf is None:
            raise LookupError(f"{self.op} has no tensor as {name}")
        return leaf

    def leaves(self, name: str) -> tuple[int, ...]:
        """The leaf numbers of a tensor or of a list of tensors, None left out."""
        return tuple(leaf.index for leaf in pytree.tree_leaves(self.arguments.get(name)) if isinstance(leaf, Leaf))

    def meta(self, name: str) -> Meta:
        """The tensor given as that argument.  Raises `LookupError` if there is none."""
        return self.tensors[self.given(name)]

    def dims(self, name: str, of: int = 0) -> tuple[int, ...]:
        """An argument that names dims of tensor `of`, none of them negative; None and [] are all dims."""
        value, ndim = self.arguments.get(name), self.tensors[of].ndim
        given = [] if value is None else [value] if isinstance(value, int) else list(value)
        return tuple(dim % max(ndim, 1) for dim in given) if given else tuple(range(ndim))

    def masked(self, outputs: Sequence[Placement]) -> list[Placement | None]:
        """These placements for the results, and None for a result that is no tensor, since it was not asked for."""
        return [p if meta is not None else None for p, meta in zip(outputs, self.outputs, strict=True)]

    def line(self, inputs: Mapping[int, Placement], outputs: Sequence[Placement | None], cut: Cut = "any") -> Line:
        """The line in which the inputs that are not named are replicated."""
        return Line(tuple(inputs.get(i, Replicate()) for i in range(len(self.tensors))), tuple(outputs), cut)


RuleFunction = Callable[[Ask], Iterable[Line]]
OwnArguments = Callable[[Ask, Ask], Mapping[str, Any]]
"""From the question about a piece, and that about what it is a piece of: the arguments that the piece has of its own."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The rule of one overload, why it holds, and where it was written.

    `shapes` names arguments that are the shape of the first result: each rank gets that of its own piece there.  `own`
    gives from the question about a rank's pieces all other arguments that the rank has of its own, as a number of rows.

    `instead` gives from the question about the whole call the call that every rank makes in place of it, of the same
    tensors, for an op that would do something else to a piece.  The rule is asked about that call.
    """

    op: str
    lines: RuleFunction
    family: str
    reason: str
    shapes: tuple[str, ...] = ()
    own: Callable[[Ask], Mapping[str, Any]] | None = None
    instead: Callable[[Ask], Call] | None = None

    @property
    def where(self) -> str:
        """`file:line` of the function."""
        code = getattr(inspect.unwrap(getattr(self.lines, "func", self.lines)), "__code__", None)
        return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(self.lines)


@dataclass(frozen=True, slots=True)
class Book:
    """Entries by overload.  `first | second` has those of both, the second's where both have one.

    >>> import torch
    >>> book = Book.of(*rules("copy", "each element goes by itself", ["aten.clone.default"], lambda ask: []))
    >>> "aten.clone.default" in book, len(book | Book.of())
    (True, 1)
    """

    entries: Mapping[str, Entry] = field(default_factory=dict)

    @classmethod
    def of(cls, *entries: Entry) -> Book:
        return cls({entry.op: entry for entry in entries})

    def get(self, op: str) -> Entry | None:
        return self.entries.get(op)

    def __contains__(self, op: object) -> bool:
        return op in self.entries

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries.values())

    def __len__(self) -> int:
        return len(self.entries)

    def __or__(self, other: Book) -> Book:
        return Book({**self.entries, **other.entries})


def rules(
    family: str,
    reason: str,
    ops: Sequence[str],
    lines: RuleFunction,
    *,
    shapes: Sequence[str] = (),
    own: Callable[[Ask], Mapping[str, Any]] | None = None,
    instead: Callable[[Ask], Call] | None = None,
) -> tuple[Entry, ...]:
    """One entry for each overload that this torch has: an op may be newer than the torch that runs."""
    return tuple(Entry(op, lines, family, reason, tuple(shapes), own, instead) for op in ops if exists(op))


def exists(op: str) -> bool:
    """Whether this torch has an overload of that name."""
    namespace, packet, which = op.split(".")
    return which in getattr(getattr(getattr(torch.ops, namespace), packet, None), "overloads", list)()


def bound(op: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by the names of the schema, defaults filled in."""
    schema = overload(op)._schema.arguments
    given = {argument.name: value for argument, value in zip(schema, args, strict=False)} | dict(kwargs)
    return {a.name: given.get(a.name, a.default_value if a.has_default_value() else None) for a in schema}


def ask_of(
    op: str, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[Meta], outputs: Any = None
) -> Ask:
    """The question about a call; `outputs` is its result, or one of the same shapes, else it is run on meta tensors."""
    if outputs is None and overload(op)._schema.returns:
        outputs = Call(op, tuple(args), tuple(kwargs.items()))(
            [torch.empty(meta.shape, dtype=meta.dtype, device="meta") for meta in tensors]
        )
    metas = tuple(Meta(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else None for x in results(outputs))
    return Ask(op, bound(op, args, kwargs), tuple(tensors), metas)
