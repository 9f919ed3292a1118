"""Samples, rules and tensors as JSON, and back.

A tensor is its bytes in base64 beside dtype, shape and strides, so that a case is restored bit for bit.
"""

from __future__ import annotations

import base64
import math
import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Placement

from localtensor.errors import BadPlacement, error_in_one_line
from localtensor.layout import parse, short
from strategies.model.rule import Call, Leaf, Rule, Sample, leaf_numbers


class NotEncodable(ValueError):
    """A value without a JSON form, such as a generator or a sparse tensor; or JSON that is the form of none."""


NOT_READABLE = (
    AssertionError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Errors of torch and Python on JSON that is no form of a value: RecursionError and unknown devices are among them."""
MOST_ELEMENTS = 1 << 24
"""Elements of the storage of a tensor that is read: as many as no case of a sweep has by far."""


@dataclass(frozen=True)
class NamedPlacement(Placement):
    """A placement class private to DTensor, known by name only: it can be printed, and not used to split a tensor."""

    text: str

    def __str__(self) -> str:
        return self.text

    def __reduce__(self) -> tuple[Any, ...]:
        return NamedPlacement, (self.text,)  # torch's C++ base class cannot be pickled


_CONSTANTS = {getattr(torch, kind): kind for kind in ("dtype", "device", "layout", "memory_format")}


def value(x: object) -> object:
    """The JSON form of an argument.  Raises `NotEncodable`."""
    if x is None or isinstance(x, (bool, str)) or type(x) is int:
        return x
    if isinstance(x, float):
        return x if math.isfinite(x) else {"float": repr(x)}
    if isinstance(x, complex):
        return {"complex": [value(x.real), value(x.imag)]}
    if isinstance(x, Leaf):
        return {"leaf": x.index}
    if isinstance(x, list):
        return [value(v) for v in x]
    if isinstance(x, tuple):
        return {"tuple": [value(v) for v in x]}
    if type(x) in _CONSTANTS:
        return {_CONSTANTS[type(x)]: str(x).removeprefix("torch.")}
    if isinstance(x, Tensor):
        return {"tensor": tensor(x)}
    # Its repr may contain an address, which differs by run.
    raise NotEncodable(f"an argument of type {type(x).__name__}")


def read_value(data: object) -> Any:
    """The argument of that JSON form; the inverse of `value`.  Raises as `read_sample`, before it says which error it is."""
    if isinstance(data, list):
        return [read_value(v) for v in data]
    if not isinstance(data, dict):
        return data
    ((kind, inner),) = data.items()
    if kind == "float":
        return float(inner)
    if kind == "complex":
        return complex(*map(read_value, inner))
    if kind == "leaf":
        return Leaf(operator.index(inner))
    if kind == "tuple":
        return tuple(read_value(v) for v in inner)
    if kind == "tensor":
        return read_tensor(inner)
    return torch.device(inner) if kind == "device" else _constant(kind, inner)


def _constant(kind: str, name: str) -> Any:
    """torch's constant of that kind and name.  Raises `NotEncodable` for any other attribute of torch."""
    found = getattr(torch, name, None)
    if _CONSTANTS.get(type(found)) != kind:
        raise NotEncodable(f"torch has no {kind} called {name!r:.60}")
    return found


def tensor(x: Tensor) -> list[Any]:
    """`[dtype, shape, bytes, strides, device]`, elements in index order; the last two only where they are not the default.

    Raises `NotEncodable`.
    """
    if not _is_dense(x):
        raise NotEncodable(f"a tensor of layout {x.layout}")
    plain = x.detach().cpu().resolve_conj().resolve_neg()
    raw = torch.empty(x.numel(), dtype=x.dtype).copy_(plain.reshape(-1))
    data = raw.view(torch.uint8).numpy().tobytes() if raw.numel() else b""
    made: list[Any] = [str(x.dtype).removeprefix("torch."), list(x.shape), base64.b64encode(data).decode()]
    contiguous = x.stride() == torch.empty(x.shape, device="meta").stride()
    if x.device.type != "cpu":
        return [*made, None if contiguous else list(x.stride()), str(x.device)]
    return made if contiguous else [*made, list(x.stride())]


def _is_dense(x: Tensor) -> bool:
    return x.layout == torch.strided and not x.is_quantized


def read_tensor(data: Sequence[Any]) -> Tensor:
    """The tensor of that JSON form, with its strides; the inverse of `tensor`.  Expanded tensors are expanded again."""
    name, shape, text, strides, device = (*data, None, None)[:5]
    made = _read_on_cpu(name, shape, text, strides)
    if device is None:
        return made
    there = torch.empty_strided(made.shape, made.stride(), dtype=made.dtype, device=device)
    return there.copy_(made) if 0 not in made.stride() else made.to(device)


def _read_on_cpu(name: str, shape: Sequence[int], data: str, strides: Sequence[int] | None) -> Tensor:
    dtype = _constant("dtype", name)
    raw = base64.b64decode(data)
    flat = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    whole = flat.reshape(shape)
    if strides is None:
        return whole
    reach = 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    if whole.numel() and reach > MOST_ELEMENTS:
        raise NotEncodable(f"a tensor of {reach} elements")
    made = torch.empty_strided(shape, strides, dtype=dtype)
    if any(step == 0 and size > 1 for step, size in zip(strides, shape, strict=True)):
        seen = tuple(slice(0, 1) if step == 0 else slice(None) for step in strides)
        made[seen].copy_(whole[seen])
        return made
    return made.copy_(whole)


def sample(x: Sample) -> dict[str, Any]:
    """The JSON form of a sample with its tensors.  Raises `NotEncodable`."""
    call = [value(list(x.call.args)), [[name, value(v)] for name, v in x.call.kwargs]]
    return {"op": x.call.op, "call": call, "tensors": [tensor(t) for t in x.tensors], "origin": x.origin}


def is_encodable(x: Sample) -> bool:
    """Whether the sample has a JSON form."""
    try:
        value([list(x.call.args), [list(pair) for pair in x.call.kwargs]])
    except NotEncodable:
        return False
    return all(map(_is_dense, x.tensors))


def read_sample(data: dict[str, Any]) -> Sample:
    """The sample of that JSON form; the inverse of `sample`.  Raises `NotEncodable` for any other JSON."""
    try:
        args, kwargs = data["call"]
        named = tuple((_text(name), read_value(v)) for name, v in kwargs)
        call = Call(_op_name(data["op"]), tuple(read_value(args)), named)
        tensors = tuple(map(read_tensor, data["tensors"]))
        if any(leaf not in range(len(tensors)) for leaf in leaf_numbers([call.args, [v for _, v in named]])):
            raise NotEncodable("a leaf without a tensor")
        return Sample(call, tensors, _text(data["origin"]))
    except NOT_READABLE as error:
        raise NotEncodable(f"no sample ({error_in_one_line(error, 90)})") from None


def _op_name(name: Any) -> str:
    """The name of an overload, which is no path and no code.  Raises `NotEncodable`."""
    if not isinstance(name, str) or not re.fullmatch(r"\w+\.\w+\.\w+", name):
        raise NotEncodable(f"{name!r:.60} names no overload")
    return name


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise NotEncodable(f"{value!r:.60} is no text")
    return value


def rule(x: Rule) -> list[Any]:
    """`[op, inputs, outputs]` with placements in short form."""
    return [x.op, [short(p) for p in x.inputs], [short(p) for p in x.outputs]]


def read_rule(data: Sequence[Any]) -> Rule:
    """The rule of that JSON form; the inverse of `rule`.  DTensor's private placements become `NamedPlacement`.

    Raises `NotEncodable` for what names no overload, TypeError or ValueError for data of another form.
    """
    op, inputs, outputs = data
    return Rule(_op_name(op), tuple(map(read_placement, inputs)), tuple(map(read_placement, outputs)))


def read_placement(text: str) -> Placement | None:
    """The placement of that short form; None for "-"."""
    text = _text(text)
    if text == "-":
        return None
    try:
        return parse(text)
    except BadPlacement:
        return NamedPlacement(text)
