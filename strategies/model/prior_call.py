"""The same op called before with other arguments, as text: what DTensor remembers of one call must not reach another.

`again(x0, [1], True)` are the arguments of the call before, `x0` the first tensor of the call that is judged.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from strategies.model.rule import Call, Leaf, Sample

_NAMES = {"inf": float("inf"), "nan": float("nan")}


def text_of(value: Any, letter: str = "x") -> str:
    """Python text of an argument, `x0` where the first tensor goes."""
    if isinstance(value, Leaf):
        return f"{letter}{value.index}"
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
