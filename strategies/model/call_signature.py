"""Which calls of an op are alike: as many dims, the same kinds of numbers, the same scalars but for size and values.

What holds on one call is asked of those like it.  A rule that a search finds is stated together with the
kind of call on which it was seen: `alpha < 0` is part of the rule.
"""

from __future__ import annotations

import ast
import functools
import itertools
import math
import re
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from localtensor.concurrency import Same, brief
from localtensor.errors import Refusal
from localtensor.layout import Spec, is_plain, shape_text, short
from localtensor.layout import StridedShard as _StridedShard
from strategies.model.code_text import literal
from strategies.model.rule import Call, Leaf, Sample, overload


@dataclass(frozen=True, slots=True)
class Fact:
    """What is known of one argument that is no tensor: `alpha < 0`, `dim == 1`; in Python, as it is printed."""

    argument: str
    says: str

    def __str__(self) -> str:
        return f"{self.argument} {self.says}"


@dataclass(frozen=True, slots=True)
class Kind:
    """`dims[i]` and `numbers[i]` (f, i or b) are of tensor i; `facts` speak of the other arguments."""

    dims: tuple[int, ...]
    numbers: str
    facts: tuple[Fact, ...]


def kind_of(sample: Sample) -> Kind:
    """The kind of a call.  Numbers that the op computes with count by their sign, all other values as they are;
    of a tensor that may be left out it counts that it is there."""
    letters = "".join(letter(t.dtype) for t in sample.tensors)
    facts = [Fact(name, _says(value, computes)) for name, value, computes in scalars(sample)]
    facts += [Fact(name, "is not None") for name, value in _given(sample) if _may_lack(sample.op, name, value)]
    return Kind(tuple(t.ndim for t in sample.tensors), letters, tuple(sorted(facts, key=str)))


def scalars(sample: Sample) -> Iterator[tuple[str, Any, bool]]:
    """The arguments that hold no tensor, defaults included: name, value, and whether the op computes with the number."""
    for name, value in _given(sample):
        if not holds_tensor(value):
            yield name, value, _computes(sample.op, name) and type(value) in (int, float)


def _given(sample: Sample) -> list[tuple[str, Any]]:
    arguments = overload(sample.op)._schema.arguments
    given = {a.name: a.default_value for a in arguments if a.has_default_value()}
    given |= {a.name: value for a, value in zip(arguments, sample.call.args, strict=False)} | dict(sample.call.kwargs)
    return [(a.name, given[a.name]) for a in arguments if a.name in given]


def _may_lack(op: str, name: str, value: Any) -> bool:
    return holds_tensor(value) and any(
        a.name == name and "Optional" in str(a.type) for a in overload(op)._schema.arguments
    )


def holds_tensor(value: Any) -> bool:
    """Whether a tensor of the call stands in this argument.

    >>> holds_tensor([Leaf(0), Leaf(1)]), holds_tensor([0, 1])
    (True, False)
    """
    return any(map(holds_tensor, value)) if isinstance(value, (list, tuple)) else type(value) is Leaf


@functools.cache
def _computes(op: str, name: str) -> bool:
    kinds = {a.name: str(a.type) for a in overload(op)._schema.arguments}
    return any(word in kinds.get(name, "") for word in ("number", "float", "Scalar"))


def letter(dtype: torch.dtype) -> str:
    """f for what may be a fraction, complex numbers included, b for booleans, i for the rest."""
    if dtype == torch.bool:
        return "b"
    return "f" if dtype.is_floating_point or dtype.is_complex else "i"


def _says(value: Any, computes: bool) -> str:
    if computes and not math.isnan(value):
        return "== 0" if value == 0 else "> 0" if value > 0 else "< 0"
    return f"is {value}" if value is None or isinstance(value, bool) else f"== {source(value)}"


def source(value: Any) -> str:
    """The value as Python reads it; `torch` is imported there.

    >>> source([torch.device("cpu"), 1.5, float("inf"), "sum"])
    "[torch.device(type='cpu'), 1.5, float('inf'), 'sum']"
    """
    if isinstance(value, (list, tuple)):
        inner = ", ".join(map(source, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
    if isinstance(value, torch.device):
        return f"torch.{value!r}"
    if isinstance(value, float) and not math.isfinite(value):
        return f"float('{value}')"
    return repr(value)


# The same op called before with other arguments, as text: what DTensor remembers of one call must not reach another.
#
# `again(x0, [1], True)` are the arguments of the call before, `x0` the first tensor of the call that is judged.

_NAMES = {"inf": float("inf"), "nan": float("nan")}


def text_of(value: Any, letter: str = "x") -> str:
    """Python text of an argument, `x0` where the first tensor goes; of a tensor that stands there itself, its values."""
    if isinstance(value, Leaf):
        return f"{letter}{value.index}"
    if isinstance(value, Tensor):
        return literal(value)
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name!r}: {text_of(one, letter)}' for name, one in value.items())}}}"
    if isinstance(value, (list, tuple)):
        inner = ", ".join(text_of(v, letter) for v in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner},)" if inner else "()"
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    return repr(value)


def arguments_text(call: Call, letter: str = "x") -> str:
    """`x0, [1], keepdim=True`."""
    named = (f"{name}={text_of(value, letter)}" for name, value in call.kwargs)
    return ", ".join([*(text_of(value, letter) for value in call.args), *named])


def indexed(arguments: str) -> str:
    """The same where the tensors are in a list: `x[0], [1], keepdim=True`."""
    return re.sub(r"\bx(\d+)\b", r"x[\1]", arguments)


def again(call: Call) -> str:
    """The name of the follower: this call came before."""
    return f"again({arguments_text(call)})"


def before(op: str, text: str) -> Call:
    """The call that a text stands for; the inverse of `again`.  Raises ValueError for text that is none."""
    node = ast.parse(text, mode="eval").body
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


def others(sample: Sample, samples: Sequence[Sample]) -> Iterator[str]:
    """The calls among these samples that could have come before: the same op, and arguments that differ on tensors
    of the same shapes and dtypes, each once."""
    seen = {again(sample.call)}
    for other in samples:
        name = again(replace(other.call, op=sample.op))
        if other.op == sample.op and _alike(sample, other) and name not in seen:
            seen.add(name)
            yield name


def _alike(a: Sample, b: Sample) -> bool:
    return [(x.shape, x.dtype) for x in a.tensors] == [(x.shape, x.dtype) for x in b.tensors]


class NoKey(Refusal):
    """A call has an argument that cannot be part of a key."""

    def __init__(self, argument: str, value: object, problem: str) -> None:
        remedy = "Propagate this call without a cache, or pass a plain value"
        super().__init__("key_of", argument, f"{type(value).__name__} {_brief(value)}", problem, remedy + ".")


def _brief(value: object) -> str:
    return f"of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else brief(value, 40)


def _has_text(placement: Any) -> bool:
    """Whether its short print says all that there is."""
    if is_plain(placement):
        return not getattr(placement, "__dict__", None)
    return type(placement) is _StridedShard and type(placement.split_factor) is int


def _written(placement: Any) -> str:
    return short(placement) if _has_text(placement) else f"<{type(placement).__qualname__}>"


def _odd(placement: Any) -> Hashable:
    """Equality that a class wrote for itself is taken at its word; what it inherits may know nothing of its state."""
    kind = type(placement)
    return (kind, placement) if "__eq__" in vars(kind) and kind is not _StridedShard else Same(placement)


def spec_token(spec: Spec | None) -> Hashable:
    """All of a spec but its mesh's names.  A text, with the placements that no text can hold behind it.

    Raises `NoKey` for symbolic sizes.
    """
    if spec is None:
        return None
    for size in spec.shape:
        if type(size) is not int:
            raise NoKey("specs", size, "a size that is no plain integer is known to its own program only")
    sizes = ",".join(map(str, spec.mesh.sizes))
    placements = ", ".join(map(_written, spec.placements))
    text = f"{shape_text(spec.shape, spec.dtype)} @ {sizes}: {placements}"
    if spec.shard_order:
        text += f" by {spec.shard_order}"
    odd = tuple((i, _odd(p)) for i, p in enumerate(spec.placements) if not _has_text(p))
    return (text, *odd) if odd else text


# Which of many calls to try: those that differ most in what a rule could look at.


def features(sample: Sample) -> list[tuple[int, str]]:
    """What a rule could look at, argument by argument: dtype, number of dims, ones, evenness, scalars."""

    def show(value: Any) -> str:
        if isinstance(value, Leaf):
            x = sample.tensors[value.index]
            sizes = "".join("1" if size == 1 else "e" if size % 2 == 0 else "o" for size in x.shape)
            return f"{x.dtype}{sizes}{'' if x.is_contiguous() else ' strided'}"
        if isinstance(value, float):
            return _number(value)
        return f"{type(value).__name__}({', '.join(map(show, value))})" if isinstance(value, (list, tuple)) else repr(value)  # fmt: skip

    shown = [show(a) for a in sample.call.args] + [f"{n}={show(v)}" for n, v in sample.call.kwargs]
    shapes = {tuple(t.shape) for t in sample.tensors}
    beside = [(-3 - i, _beside(sample.tensors[0], t)) for i, t in enumerate(sample.tensors[1:])]
    return [*enumerate(shown), (-1, f"{len(shapes)} shapes"), (-2, f"{len(shown)} arguments"), *beside]


def _number(value: float) -> str:
    """Small whole numbers and infinities mean something of their own (the order of a norm); of others only the kind."""
    if not math.isfinite(value) or (value.is_integer() and abs(value) <= 4):
        return repr(value)
    return ("-" if value < 0 else "+") + ("integral" if value.is_integer() else "float")


def _beside(first: Tensor, other: Tensor) -> str:
    """Dim by dim, whether the other tensor is as long as the first, shorter or longer."""
    if first.ndim != other.ndim:
        return f"{other.ndim - first.ndim:+d} dims"
    return "".join("=" if a == b else "<" if b < a else ">" for a, b in zip(first.shape, other.shape, strict=True))


MOST_CANDIDATES = 200


def choose(found: Sequence[Sample], most: int) -> list[Sample]:
    """At most so many samples of one overload, each chosen for what it adds to those before it.

    New values of an argument count most, then new pairs of values; of equals one that can be split
    is taken before one that cannot, then the smaller, then the earlier.  The order is that of choice.
    """
    unique: dict[str, tuple[Sample, set[Any]]] = {}
    for sample in sorted(found, key=lambda s: (_largest(s) < 4, s.size)):
        seen = features(sample)
        unique.setdefault(repr(seen), (sample, _weighed(seen)))
    left = list(unique.values())[:MOST_CANDIDATES]
    covered: set[Any] = set()
    chosen: list[Sample] = []
    while left and len(chosen) < most:
        gains = [sum(_WORTH[len(f)] for f in worth - covered) for _, worth in left]
        best, worth = left.pop(max(range(len(left)), key=lambda i: (gains[i], -i)))
        covered |= worth
        chosen.append(best)
    return chosen


def _largest(sample: Sample) -> int:
    return max((t.numel() for t in sample.tensors), default=0)


_WORTH = {1: 12, 2: 1}


def _weighed(seen: Sequence[tuple[int, str]]) -> set[Any]:
    """Values alone, as 1-tuples, and pairs of them."""
    return {(f,) for f in seen} | set(itertools.combinations(seen, 2))
