"""Signatures of calls: which calls of an op are alike, prior calls as text, cache keys of specs, and diverse subsets.

Calls are alike that have tensors of as many dims, the same kinds of numbers, and scalars of the same sign.  A rule that
a search finds is reported with the kind of call for which it holds: `alpha < 0` is part of the rule.  A prior call,
`prior_call_text(x0, [1], True)`, is the same op called before with other arguments, where `x0` is the first tensor of
the tested call.
"""

from __future__ import annotations

import ast
import itertools
import math
import re
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Placement

from localtensor.concurrency import IdentityKey, short_repr
from localtensor.errors import Refusal
from localtensor.layout import Spec, is_standard, shape_text, short
from localtensor.layout import StridedShard as _StridedShard
from strategies.model.arguments import SchemaArgument, schema_arguments
from strategies.model.codec import tensor_literal
from strategies.model.rule import Call, Leaf, Sample


@dataclass(frozen=True, slots=True)
class ArgumentCondition:
    """A condition on one non-tensor argument as Python text: `alpha < 0`, `dim == 1`."""

    argument: str
    says: str

    def __str__(self) -> str:
        return f"{self.argument} {self.says}"


@dataclass(frozen=True, slots=True)
class CallKind:
    """`dims[i]` and `numbers[i]` (f, i or b) describe tensor i; `facts` describe the other arguments."""

    dims: tuple[int, ...]
    numbers: str
    facts: tuple[ArgumentCondition, ...]


def call_kind(sample: Sample) -> CallKind:
    """The kind of a call: operands of arithmetic by their sign, other values as they are, optional tensors by presence."""
    letters = "".join(dtype_letter(t.dtype) for t in sample.tensors)
    facts = [ArgumentCondition(name, _condition(value, sums)) for name, value, sums in non_tensor_arguments(sample)]
    present = [a.name for a, value in _given(sample) if "Optional" in a.kind and holds_tensor(value)]
    facts += [ArgumentCondition(name, "is not None") for name in present]
    return CallKind(tuple(t.ndim for t in sample.tensors), letters, tuple(sorted(facts, key=str)))


def non_tensor_arguments(sample: Sample) -> Iterator[tuple[str, Any, bool]]:
    """The non-tensor arguments, defaults included: name, value, and whether it is a number that the op computes with."""
    for a, value in _given(sample):
        if not holds_tensor(value):
            computes = any(word in a.kind for word in ("number", "float", "Scalar"))
            yield a.name, value, computes and type(value) in (int, float)


def numeric_arguments(call: Call) -> dict[str, int | float | bool | None]:
    """The arguments that are numbers or None by name, defaults included.

    >>> numeric_arguments(Call("aten.uniform_.default", (Leaf(0), -1.0)))
    {'from': -1.0, 'to': 1.0, 'generator': None}
    """
    given = {a.name: a.default for a in schema_arguments(call.op) if a.default is not ...} | call.named()
    return {name: value for name, value in given.items() if value is None or isinstance(value, (bool, int, float))}


def _given(sample: Sample) -> list[tuple[SchemaArgument, Any]]:
    """The arguments of the schema that have a value, default or not, in the order of the schema."""
    known = schema_arguments(sample.op)
    given = {a.name: a.default for a in known if a.default is not ...} | sample.call.named()
    return [(a, given[a.name]) for a in known if a.name in given]


def holds_tensor(value: object) -> bool:
    """Whether the argument is or contains a tensor of the call.

    >>> holds_tensor([Leaf(0), Leaf(1)]), holds_tensor([0, 1])
    (True, False)
    """
    return any(map(holds_tensor, value)) if isinstance(value, (list, tuple)) else type(value) is Leaf


def dtype_letter(dtype: torch.dtype) -> str:
    """f for floating and complex dtypes, b for booleans, i for the rest."""
    if dtype == torch.bool:
        return "b"
    return "f" if dtype.is_floating_point or dtype.is_complex else "i"


def _condition(value: Any, computes: bool) -> str:
    if computes and not math.isnan(value):
        return "== 0" if value == 0 else "> 0" if value > 0 else "< 0"
    return f"is {value}" if value is None or isinstance(value, bool) else f"== {python_text(value)}"


def python_text(value: object) -> str:
    """Python text of the value, for a program that imports `torch`.

    >>> python_text([torch.device("cpu"), 1.5, float("inf"), "sum"])
    "[torch.device(type='cpu'), 1.5, float('inf'), 'sum']"
    """
    if isinstance(value, (list, tuple)):
        inner = ", ".join(map(python_text, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
    if isinstance(value, torch.device):
        return f"torch.{value!r}"
    if isinstance(value, float) and not math.isfinite(value):
        return f"float('{value}')"
    return repr(value)


_NAMES = {"inf": float("inf"), "nan": float("nan")}


def argument_text(value: object, letter: str = "x") -> str:
    """Python text of an argument: `x0` for the first leaf, the values for a tensor that is not a leaf."""
    if isinstance(value, Leaf):
        return f"{letter}{value.index}"
    if isinstance(value, Tensor):
        return tensor_literal(value)
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name!r}: {argument_text(one, letter)}' for name, one in value.items())}}}"
    if isinstance(value, (list, tuple)):
        inner = ", ".join(argument_text(v, letter) for v in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner},)" if inner else "()"
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    return repr(value)


def arguments_text(call: Call, letter: str = "x") -> str:
    """`x0, [1], keepdim=True`."""
    named = (f"{name}={argument_text(value, letter)}" for name, value in call.kwargs)
    return ", ".join([*(argument_text(value, letter) for value in call.args), *named])


def with_indexed_tensors(arguments: str) -> str:
    """The same where the tensors are in a list: `x[0], [1], keepdim=True`."""
    return re.sub(r"\bx(\d+)\b", r"x[\1]", arguments)


def prior_call_text(call: Call) -> str:
    """The text of a prior call, which names the follower: `prior_call_text(x0, [1])`."""
    return f"again({arguments_text(call)})"


def parse_prior_call(op: str, text: str) -> Call:
    """The prior call of that text; the inverse of `prior_call_text`.  Raises ValueError for other text."""
    try:
        node = ast.parse(text, mode="eval").body
    except (SyntaxError, MemoryError, RecursionError) as error:  # the last two of many brackets
        raise ValueError(f"{text!r:.60} is no Python ({error})") from None
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "again"):
        raise ValueError(f"{text!r} is no call that came before: write again(x0, ...)")
    return Call(op, tuple(map(_value, node.args)), tuple((str(k.arg), _value(k.value)) for k in node.keywords))


def _value(node: ast.expr) -> Any:
    match node:
        case ast.List(elts=items):
            return [_value(item) for item in items]
        case ast.Tuple(elts=items):
            return tuple(_value(item) for item in items)
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.Name(id=name) if name[0] == "x" and name[1:].isdigit():
            return Leaf(int(name[1:]))
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_value(inner)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as sign, right=right):  # a complex number
            return _value(left) + _value(right) * (1 if isinstance(sign, ast.Add) else -1)
        case ast.Attribute(value=ast.Name(id="torch"), attr=name):
            return getattr(torch, name)
        case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="device"), args=[ast.Constant(value=name)]):
            return torch.device(str(name))
        case ast.Constant(value=value):
            return value
    raise ValueError(f"{ast.unparse(node)!r} is no argument of a call")


def prior_calls(sample: Sample, samples: Sequence[Sample]) -> Iterator[str]:
    """Each different prior call among these samples: the same op, tensors of the same shapes and dtypes, other arguments."""
    seen = {prior_call_text(sample.call)}
    for other in samples:
        name = prior_call_text(replace(other.call, op=sample.op))
        alike = [(x.shape, x.dtype) for x in sample.tensors] == [(x.shape, x.dtype) for x in other.tensors]
        if other.op == sample.op and alike and name not in seen:
            seen.add(name)
            yield name


class NoKey(Refusal):
    """A call has an argument that cannot be part of a cache key."""

    def __init__(self, argument: str, value: object, problem: str) -> None:
        shown = f"of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else short_repr(value, 40)
        remedy = "Propagate this call without a cache, or pass a plain value."
        super().__init__("key_of", argument, f"{type(value).__name__} {shown}", problem, remedy)


def _has_text(placement: Placement) -> bool:
    """Whether the short text of the placement determines it."""
    if is_standard(placement):
        return not getattr(placement, "__dict__", None)
    return type(placement) is _StridedShard and type(placement.split_factor) is int


def _placement_key(placement: Placement) -> Hashable:
    """Compared by `__eq__` if the class defines it itself, else by identity: an inherited one may ignore its state."""
    kind = type(placement)
    return (kind, placement) if "__eq__" in vars(kind) and kind is not _StridedShard else IdentityKey(placement)


def spec_key(spec: Spec | None) -> Hashable:
    """The cache key of a spec: a text without the mesh's names, and the placements that have no text.

    Raises `NoKey` for symbolic sizes.
    """
    if spec is None:
        return None
    for size in spec.shape:
        if type(size) is not int:
            raise NoKey("specs", size, "a size that is no plain integer is known to its own program only")
    sizes = ",".join(map(str, spec.mesh.sizes))
    placements = ", ".join(short(p) if _has_text(p) else f"<{type(p).__qualname__}>" for p in spec.placements)
    text = f"{shape_text(spec.shape, spec.dtype)} @ {sizes}: {placements}"
    if spec.shard_order:
        text += f" by {spec.shard_order}"
    textless = tuple((i, _placement_key(p)) for i, p in enumerate(spec.placements) if not _has_text(p))
    return (text, *textless) if textless else text


def call_features(sample: Sample) -> list[tuple[int, str]]:
    """What a rule could depend on, argument by argument: dtype, number of dims, sizes of one, evenness, scalars."""

    def show(value: object) -> str:
        if isinstance(value, Leaf):
            x = sample.tensors[value.index]
            sizes = "".join("1" if size == 1 else "e" if size % 2 == 0 else "o" for size in x.shape)
            return f"{x.dtype}{sizes}{'' if x.is_contiguous() else ' strided'}"
        if isinstance(value, float):
            return _number(value)
        if isinstance(value, (list, tuple)):
            return f"{type(value).__name__}({', '.join(map(show, value))})"
        return repr(value)

    shown = [show(a) for a in sample.call.args] + [f"{n}={show(v)}" for n, v in sample.call.kwargs]
    shapes = {tuple(t.shape) for t in sample.tensors}
    compared = [(-3 - i, _compare_sizes(sample.tensors[0], t)) for i, t in enumerate(sample.tensors[1:])]
    return [*enumerate(shown), (-1, f"{len(shapes)} shapes"), (-2, f"{len(shown)} arguments"), *compared]


def _number(value: float) -> str:
    """Small whole numbers and infinities as they are (they may be the order of a norm); others by sign and kind."""
    if not math.isfinite(value) or (value.is_integer() and abs(value) <= 4):
        return repr(value)
    return ("-" if value < 0 else "+") + ("integral" if value.is_integer() else "float")


def _compare_sizes(first: Tensor, other: Tensor) -> str:
    """Dim by dim, `=`, `<` or `>`: whether the other tensor is as long as the first, shorter or longer."""
    if first.ndim != other.ndim:
        return f"{other.ndim - first.ndim:+d} dims"
    return "".join("=" if a == b else "<" if b < a else ">" for a, b in zip(first.shape, other.shape, strict=True))


MOST_CANDIDATES = 200
"""Samples that `choose` considers."""
_WORTH = {1: 12, 2: 1}
"""What a new value, and a new pair of values, counts."""


def diverse_subset(found: Sequence[Sample], most: int) -> list[Sample]:
    """A diverse subset of at most `most` samples of one overload, in the order of choice.

    Each is chosen for what it adds to those before it: new values of an argument count most, then new pairs of values.
    Of equals a sample that can be split comes first, then the smaller, then the earlier one.
    """
    unique: dict[str, tuple[Sample, set[Any]]] = {}
    for sample in sorted(found, key=lambda s: (max((t.numel() for t in s.tensors), default=0) < 4, s.size)):
        seen = call_features(sample)
        unique.setdefault(repr(seen), (sample, {(f,) for f in seen} | set(itertools.combinations(seen, 2))))
    left = list(unique.values())[:MOST_CANDIDATES]
    covered: set[Any] = set()
    chosen: list[Sample] = []
    while left and len(chosen) < most:
        gains = [sum(_WORTH[len(f)] for f in combinations - covered) for _, combinations in left]
        best, combinations = left.pop(max(range(len(left)), key=lambda i: (gains[i], -i)))
        covered |= combinations
        chosen.append(best)
    return chosen
