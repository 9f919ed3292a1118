"""From a call of one overload to a call of its sibling: the same arguments by name, converted to the other schema.

Samples of `add.Tensor` become samples of `add_.Tensor`, `add.out`, `add.Scalar` and `prims.add`: tensors become
numbers, numbers tensors, and an `out=` gets the shape that the op without it returns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from localtensor.errors import error_in_one_line
from localtensor.layout import all_finite
from strategies.model.arguments import argument_kind
from strategies.model.kernels import REJECTIONS, run_call
from strategies.model.oracle import metadata_only
from strategies.model.rule import Leaf, Sample, call_of, flat_results, overload

OUT_FILL = 3
"""The value of an `out=` before the op writes to it, which exposes elements that the op does not write."""
T = TypeVar("T")
ABSENT = object()
"""The value of an argument that is left out."""


class Unbound(ValueError):
    """The arguments do not fit the other overload, or it rejects them."""


@dataclass(frozen=True, slots=True)
class BoundCall:
    """A call that its op accepts, and whether all results are finite.

    Where an op divides by zero, its results on parts do not add up to its result on their sum.
    """

    sample: Sample
    finite: bool


def bind_to_sibling(sample: Sample, target: str) -> BoundCall:
    """The call of the overload `target` with the sample's arguments.  Raises `Unbound`."""
    given = _named(sample)
    arguments = [a for a in overload(target)._schema.arguments if not a.is_out]
    values: list[Any] = []
    for place, argument in enumerate(arguments):
        value = _converted(_found(argument, place, given, arguments), argument, given)
        if value is ABSENT and not argument.has_default_value():
            raise Unbound(f"nothing is known that could be its argument {argument.name!r}")
        values.append(value)
    return complete_call(target, values, f"{sample.origin}, as {target}")


def complete_call(target: str, values: Sequence[Any], origin: str) -> BoundCall:
    """The call of `target` with these values of all arguments but `out=`, which is created; ABSENT ones are left out.

    Raises `Unbound` if the op rejects it.
    """
    arguments = [a for a in overload(target)._schema.arguments if not a.is_out]
    given = [i for i, (a, v) in enumerate(zip(arguments, values, strict=True)) if not a.kwarg_only and v is not ABSENT]
    last = max(given, default=-1)
    args = [values[i] if values[i] is not ABSENT else arguments[i].default_value for i in range(last + 1)]
    named = [(a.name, v) for a, v in zip(arguments, values, strict=True) if a.kwarg_only and v is not ABSENT]
    kwargs: dict[str, Any] = dict(named)
    outs = [a.name for a in overload(target)._schema.arguments if a.is_out]
    if outs:
        kwargs |= dict(zip(outs, _out_tensors(target, args, kwargs, len(outs)), strict=True))
    call, tensors = call_of(overload(target), args, kwargs)
    made = Sample(call, tuple(t.detach() for t in tensors), origin)
    clones = [t.clone() for t in made.tensors]
    flat = _try(lambda given: run_call(call, given, mutates=False)[1], clones)
    every = [x for x in (*clones, *flat) if isinstance(x, Tensor)]
    return BoundCall(made, bool(metadata_only(target)) or all(map(all_finite, every)))


def prefer_finite(found: Iterable[BoundCall]) -> list[Sample]:
    """The samples with finite results; all samples if there are none."""
    kept = list(found)
    return [bound.sample for bound in kept if bound.finite] or [bound.sample for bound in kept]


def _try(call: Callable[[Sequence[Tensor]], T], tensors: Sequence[Tensor]) -> T:
    try:
        with torch.no_grad():
            return call(tensors)
    except REJECTIONS as error:
        raise Unbound(error_in_one_line(error, 110)) from error


def _named(sample: Sample) -> dict[str, Any]:
    """The arguments of the call by name, with the tensors themselves in them, in the order of the schema."""

    def full(value: object) -> object:
        if type(value) is Leaf:
            return sample.tensors[value.index]
        return [full(v) for v in value] if isinstance(value, (list, tuple)) else value

    outs = {a.name for a in overload(sample.op)._schema.arguments if a.is_out}
    return {name: full(value) for name, value in sample.call.named().items() if name not in outs}


def _found(
    argument: torch._C.Argument, place: int, given: dict[str, Any], wanted: Sequence[torch._C.Argument]
) -> object:
    """The value of that name, else the one at that position if its name is unknown to the other schema."""
    if argument.name in given:
        return given[argument.name]
    names = list(given)
    if place < len(names) and names[place] not in {a.name for a in wanted} and not argument.kwarg_only:
        return given[names[place]]
    return ABSENT


def _converted(value: object, argument: torch._C.Argument, given: dict[str, Any]) -> object:
    """The value converted to the argument's type; `ABSENT` if that is impossible."""
    if value is ABSENT or value is None:
        return value if value is ABSENT or str(argument.type).startswith("Optional") else ABSENT
    wanted = argument_kind(argument)
    if wanted == "Tensor":
        return _tensor(value, given)
    if wanted in ("number", "int", "float") and isinstance(value, Tensor):
        return _number(value, wanted)
    if wanted in ("int", "float") and isinstance(value, (int, float)) and not isinstance(value, bool):
        return int(value) if wanted == "int" and math.isfinite(value) else float(value)
    if wanted == "number":
        return value if isinstance(value, (bool, int, float, complex)) else ABSENT
    if wanted == "numbers" and not isinstance(value, list):
        length = next((len(v) for v in given.values() if isinstance(v, list)), 0)
        return [_number(value, "number")] * length if isinstance(value, Tensor) else [value] * length
    if wanted == "Tensors":
        return value if isinstance(value, list) else ABSENT
    if wanted == "ints" and isinstance(value, int):
        return [value]
    return value if not isinstance(value, Tensor) else ABSENT


def _tensor(value: object, given: dict[str, Any]) -> object:
    if isinstance(value, Tensor):
        return value
    first = next((v for v in given.values() if isinstance(v, Tensor)), None)
    if first is None or not isinstance(value, (bool, int, float, complex)):
        return ABSENT
    dtype = first.dtype
    fits = dtype.is_floating_point or dtype.is_complex or (isinstance(value, int) and dtype != torch.bool)
    if isinstance(value, complex):
        fits = dtype.is_complex
    return torch.full(first.shape, value, dtype=dtype if fits else None)


def _number(x: Tensor, wanted: str) -> object:
    """The middle element of the tensor as a number of the wanted type; `ABSENT` if there is none."""
    if not x.numel():
        return ABSENT
    value = x.flatten()[x.numel() // 2].item()
    if wanted == "number":
        return value
    if isinstance(value, complex) or not math.isfinite(value):
        return ABSENT
    return int(value) if wanted == "int" else float(value)


def _out_tensors(target: str, args: Sequence[Any], kwargs: dict[str, Any], outs: int) -> list[Tensor]:
    """A tensor for each `out=`, of the shape and dtype that the op without `out=` returns.  Raises `Unbound`.

    If there is no such op, the op itself resizes an empty `out=`.  They are contiguous: `linalg_lu.out` writes out of
    bounds of transposed ones (torch 2.13).
    """
    twin = without_out(target)
    clones = [_cloned(a) for a in args]
    named = {name: _cloned(v) for name, v in kwargs.items()}
    if twin is None:
        dtype = next((a.dtype for a in args if isinstance(a, Tensor)), torch.float32)
        names = [a.name for a in overload(target)._schema.arguments if a.is_out]
        empty = {name: torch.empty(0, dtype=dtype) for name in names}
        found = flat_results(_try(lambda _: overload(target)(*clones, **named, **empty), ()))
    else:
        found = flat_results(_try(lambda _: twin(*clones, **named), ()))
    tensors = [r for r in found if isinstance(r, Tensor)]
    if len(tensors) < outs:
        raise Unbound(f"the op without out= returns {len(tensors)} tensors, and out= are {outs}")
    return [torch.full(tuple(r.shape), OUT_FILL, dtype=r.dtype) for r in tensors[:outs]]


def _cloned(value: object) -> object:
    if isinstance(value, Tensor):
        return value.clone()
    return [_cloned(v) for v in value] if isinstance(value, list) else value


def without_out(target: str) -> torch._ops.OpOverload | None:
    """The overload of the same op with the same arguments but `out=`, or None.  Further arguments must have defaults."""
    op = overload(target)
    wanted = [(a.name, argument_kind(a)) for a in op._schema.arguments if not a.is_out]
    for name in op.overloadpacket.overloads():
        other = getattr(op.overloadpacket, name)
        arguments = other._schema.arguments
        extra = [a for a in arguments if (a.name, argument_kind(a)) not in wanted]
        same = [pair for a in arguments if (pair := (a.name, argument_kind(a))) in wanted] == wanted
        if same and all(a.has_default_value() and not a.is_out for a in extra) and not other._schema.is_mutable:
            return other  # type: ignore[no-any-return]
    return None
