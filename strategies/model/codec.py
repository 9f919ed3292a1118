"""Samples, rules and evidence as JSON, and back: what a journal holds is data, and is read as data.

Tensors are their bytes in base64, beside dtype, shape and strides, so that a case comes back to the last bit.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Placement

from localtensor.errors import BadPlacement
from localtensor.layout import parse, short
from strategies.model.rule import Call, Leaf, Rule, Sample


class NotData(Exception):
    """A value that has no form in JSON: a generator, say, or a tensor of a layout with no strides."""


@dataclass(frozen=True)
class NamedPlacement(Placement):
    """A placement of DTensor's own, of which only the name is known: it is shown, and never split."""

    text: str

    def __str__(self) -> str:
        return self.text

    def __reduce__(self) -> tuple[Any, ...]:
        return NamedPlacement, (self.text,)  # the base is torch's own C++ class, which cannot be pickled


_NAMED = {torch.dtype: "dtype", torch.device: "device", torch.layout: "layout", torch.memory_format: "memory_format"}


def value(x: Any) -> Any:
    """The JSON form of an argument.  Raises `NotData`."""
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
    if type(x) in _NAMED:
        return {_NAMED[type(x)]: str(x).removeprefix("torch.")}
    if isinstance(x, Tensor):
        return {"tensor": tensor(x)}
    raise NotData(f"an argument of type {type(x).__name__}")  # its repr may hold an address, another in each run


def read_value(told: Any) -> Any:
    """What `value` wrote."""
    if isinstance(told, list):
        return [read_value(v) for v in told]
    if not isinstance(told, dict):
        return told
    ((kind, inner),) = told.items()
    if kind == "float":
        return float(inner)
    if kind == "complex":
        return complex(*map(read_value, inner))
    if kind == "leaf":
        return Leaf(inner)
    if kind == "tuple":
        return tuple(read_value(v) for v in inner)
    if kind == "tensor":
        return read_tensor(inner)
    return torch.device(inner) if kind == "device" else _named(kind, inner)


def _named(kind: str, name: str) -> Any:
    """torch's own constant of that kind and name, and nothing else that torch may hold under it."""
    found = getattr(torch, name, None)
    if _NAMED.get(type(found)) != kind:
        raise NotData(f"torch has no {kind} called {name!r:.60}")
    return found


def tensor(x: Tensor) -> list[Any]:
    """`[dtype, shape, bytes, strides, device]`, the last two where they are not the usual ones; the elements in
    order of their indices.  Raises `NotData`.
    """
    if x.layout != torch.strided or x.is_quantized:
        raise NotData(f"a tensor of layout {x.layout}")
    plain = x.detach().cpu().resolve_conj().resolve_neg()
    raw = torch.empty(x.numel(), dtype=x.dtype).copy_(plain.reshape(-1))
    data = raw.view(torch.uint8).numpy().tobytes() if raw.numel() else b""
    made: list[Any] = [str(x.dtype).removeprefix("torch."), list(x.shape), base64.b64encode(data).decode()]
    contiguous = x.stride() == torch.empty(x.shape, device="meta").stride()
    if x.device.type != "cpu":
        return [*made, None if contiguous else list(x.stride()), str(x.device)]
    return made if contiguous else [*made, list(x.stride())]


def read_tensor(told: Sequence[Any]) -> Tensor:
    """What `tensor` wrote, strides included; expanded tensors are expanded again."""
    name, shape, data, strides, device = (*told, None, None)[:5]
    made = _laid(name, shape, data, strides)
    return made if device is None else _moved(made, torch.device(device))


def _moved(x: Tensor, device: torch.device) -> Tensor:
    there = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    return there.copy_(x) if 0 not in x.stride() else x.to(device)


def _laid(name: str, shape: Sequence[int], data: str, strides: Sequence[int] | None) -> Tensor:
    dtype = _named("dtype", name)
    raw = base64.b64decode(data)
    flat = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    whole = flat.reshape(shape)
    if strides is None:
        return whole
    made = torch.empty_strided(shape, strides, dtype=dtype)
    if any(step == 0 and size > 1 for step, size in zip(strides, shape, strict=True)):
        seen = tuple(slice(0, 1) if step == 0 else slice(None) for step in strides)
        made[seen].copy_(whole[seen])
        return made
    return made.copy_(whole)


def sample(x: Sample) -> dict[str, Any]:
    """A sample with its tensors.  Raises `NotData`."""
    call = [value(list(x.call.args)), [[name, value(v)] for name, v in x.call.kwargs]]
    return {"op": x.call.op, "call": call, "tensors": [tensor(t) for t in x.tensors], "origin": x.origin}


def has_form(x: Sample) -> bool:
    """Whether `sample` can write it."""
    try:
        value([list(x.call.args), [list(pair) for pair in x.call.kwargs]])
    except NotData:
        return False
    return all(t.layout == torch.strided and not t.is_quantized for t in x.tensors)


def read_sample(told: dict[str, Any]) -> Sample:
    """What `sample` wrote."""
    args, kwargs = told["call"]
    call = Call(told["op"], tuple(read_value(args)), tuple((name, read_value(v)) for name, v in kwargs))
    return Sample(call, tuple(map(read_tensor, told["tensors"])), told["origin"])


def rule(x: Rule) -> list[Any]:
    """`[op, inputs, outputs]` in the short print of placements."""
    return [x.op, [short(p) for p in x.inputs], [short(p) for p in x.outputs]]


def read_rule(told: Sequence[Any]) -> Rule:
    """What `rule` wrote; placements of DTensor's own come back as `NamedPlacement`."""
    op, inputs, outputs = told
    return Rule(op, tuple(map(read_placement, inputs)), tuple(map(read_placement, outputs)))


def read_placement(text: str) -> Placement | None:
    """The placement of that short print; None for "-"."""
    if text == "-":
        return None
    try:
        return parse(text)
    except BadPlacement:
        return NamedPlacement(text)
