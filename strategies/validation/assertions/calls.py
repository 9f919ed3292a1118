"""Calls of an op for the test of a rule: drawn from its schema, torch's own samples, or given by the rule's author."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random
from typing import Any, TypeAlias, TypeVar

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import Partial

from localtensor.testing.hypothesis_strategies.op_calls import OpCall, opinfo_database
from localtensor.testing.hypothesis_strategies.search import Draw, one_of
from localtensor.testing.hypothesis_strategies.values import Drawn
from strategies.inputs.typed_values import accepts
from strategies.model.arguments import is_index
from strategies.model.rule import Sample, call_of
from strategies.validation.assertions.ops import Op, ShapePlan, accepted_plans, is_list, materialized, takes_tensor
from strategies.validation.assertions.rule import AssertedRule, NotARule, shard_dim

Call = tuple[tuple[Any, ...], dict[str, Any]]
Values = tuple[torch.dtype, tuple[str, ...]]
"""The dtype and the patterns of tensors."""
T = TypeVar("T")
Calls: TypeAlias = "st.SearchStrategy[Any] | Iterable[object]"
"""The calls of a rule: a strategy, or a list, of (args, kwargs) or `OpCall`."""
Pick = Callable[[Sequence[Any]], Any]
"""One of the options, the simplest first."""
SMALL_PATTERNS = ("ones", "small", "alternating", "ties", "normal", "rough")
PATTERNS = (SMALL_PATTERNS[0], "arange", *SMALL_PATTERNS[1:])
"""Values of tensors; zeros alone prove nothing.  Where parts are summed, values are small: exp of large ones overflows."""
LARGEST_DIM = 8
"""The largest dim that is drawn."""
_BOOLEAN_ARGUMENTS = ("condition", "mask")
_LEFT_OUT = ("dtype", "layout", "device", "memory_format", "pin_memory", "generator", "out_dtype", "output_dtype")
"""Arguments that keep their defaults: numbers that are no dtype would end the process."""
_ABSENT = object()


def schema_calls(op: Op, rule: AssertedRule, dtype: torch.dtype) -> tuple[st.SearchStrategy[Call] | None, str]:
    """Calls drawn from the op's schema, with tensors of that dtype; or None, and the reason."""
    patterns = SMALL_PATTERNS if any(isinstance(p, Partial) for p in rule.inputs) else PATTERNS
    plans, why = accepted_plans(op, rule, lambda plan, rng: _call_of_plan(op, plan, dtype, rng))
    if not plans:
        return None, why
    ways = tuple(plans)

    @st.composite
    def calls(draw: Draw) -> Call:
        plan = draw(one_of(ways))
        sizes = {letter: draw(one_of(tuple(range(1, LARGEST_DIM + 1)))) for letter in plan.letters} | {"1": 1}

        def pick(options: Sequence[T]) -> T:
            return options[draw(one_of(tuple(range(len(options)))))] if len(options) > 1 else options[0]

        return build_call(op, plan, sizes, (dtype, patterns), pick)

    return calls(), ""


def _call_of_plan(op: Op, plan: ShapePlan, dtype: torch.dtype, rng: Random) -> Call:
    sizes = {letter: place for place, letter in enumerate(plan.letters, 2)} | {"1": 1}
    args, kwargs = build_call(op, plan, sizes, (dtype, SMALL_PATTERNS), rng.choice)
    return materialized(args), materialized(kwargs)


def build_call(op: Op, plan: ShapePlan, sizes: Mapping[str, int], values: Values, pick: Pick) -> Call:
    """The call of that plan with these sizes and such values of tensors; the other arguments are picked."""
    shapes, args, kwargs = dict(plan.shapes), [], {}
    for argument in op.arguments:
        if takes_tensor(argument):
            shape = shapes.get(argument.name)
            if shape is None:
                value: Any = _ABSENT if argument.has_default_value() or argument.is_out else None
            elif is_list(shape):
                value = [_tensor(argument.name, [sizes[d] for d in one], sizes, values, pick) for one in shape]
            else:
                value = _tensor(argument.name, [sizes[str(d)] for d in shape], sizes, values, pick)
        else:
            value = _other(argument, [sizes[d] for d in plan.first], values[0], pick)
        if value is _ABSENT and not argument.kwarg_only and not argument.is_out:
            value = argument.default_value  # positional arguments after it need it
        if value is not _ABSENT:
            if argument.kwarg_only:
                kwargs[argument.name] = value
            else:
                args.append(value)
    return tuple(args), kwargs


def _tensor(name: str, shape: Sequence[int], sizes: Mapping[str, int], values: Values, pick: Pick) -> Tensor | Drawn:
    if is_index(name):
        count = torch.Size(shape).numel()
        below = min(sizes[letter] for letter in sizes if letter != "1" or len(sizes) == 1)
        factor: int = pick((1, 2, 3))
        return (torch.arange(count) * factor % below).reshape(tuple(shape))
    dtype = torch.bool if name in _BOOLEAN_ARGUMENTS else values[0]
    return Drawn(tuple(shape), dtype, pick(values[1]), pick(range(100)))


def _other(argument: torch._C.Argument, shape: Sequence[int], dtype: torch.dtype, pick: Pick) -> object:
    """A value for an argument that is no tensor."""
    kind, name = str(argument.type), argument.name
    spare = [_ABSENT] if argument.has_default_value() else [None] if kind.startswith("Optional") else []
    options = _options(kind, name, len(shape), list(shape), dtype)
    return pick([*spare, *options] or [None])


def _options(kind: str, name: str, dims: int, shape: list[int], dtype: torch.dtype) -> list[Any]:
    if name in _LEFT_OUT:
        return []
    listed = "List[" in kind or "[]" in kind
    if listed and ("int" in kind or "Int" in kind):
        if "dim" in name or name in ("axis", "axes"):
            pairs = [[i, j] for i in range(dims) for j in range(i + 1, dims)]
            turns = [list(range(dims))[::-1]] if name == "dims" else []
            return [*([d] for d in range(dims)), [-1], *pairs, *turns]
        return [[-1], shape, shape[::-1], [1] * dims, [2] * dims, [2]]
    if "bool" in kind:
        return [[True] * dims] if listed else [False, True]
    if "number" in kind or "Scalar" in kind or "float" in kind:
        whole = not (dtype.is_floating_point or dtype.is_complex)
        values: list[Any] = [2, 1, 3, -1, 0] if whole and "float" not in kind else [2.0, 0.5, 1.0, -1.5, 3.0]
        return [[value] * 2 for value in values] if listed else values
    if "int" in kind.lower():
        dim = "dim" in name or name == "axis"
        return [*range(dims), *range(-1, -dims - 1, -1)] or [0] if dim else [1, 2, 0, 3, -1]
    return ["none", "mean", "sum", "floor", "tanh"] if "str" in kind else []


def known_calls(op: Op, rule: AssertedRule, dtype: torch.dtype) -> list[Call]:
    """torch's own samples that the rule applies to; for torch's own ops only.

    The dims that the rule shards have one size, and for a pointwise op the tensors that it shards have as many dims as
    the result: then they are one dim.
    """
    namespace, packet, _ = op.name.split(".")
    if namespace != "aten":
        return []
    name = packet.rstrip("_") if not packet.startswith("_") else packet
    full = [one for one in (name, f"nn.functional.{name}") if one in opinfo_database()]
    found: list[Call] = []
    for number in range(12) if full and dtype in opinfo_database()[full[0]].supported_dtypes("cpu") else ():
        sample = OpCall(full[0], dtype, number)
        call = as_call(sample)
        made, tensors = call_of(op.overload, *call)
        if _applies_to(rule, tensors, op.pointwise) and accepts(Sample(made, tuple(tensors), "")):
            found.append(call)
    return found


def _applies_to(rule: AssertedRule, tensors: Sequence[Tensor], pointwise: bool) -> bool:
    if len(tensors) != len(rule.inputs):
        return False
    cut = [(x, dim) for x, p in zip(tensors, rule.inputs, strict=True) if (dim := shard_dim(p)) is not None]
    if any(dim >= x.ndim for x, dim in cut) or len({x.shape[dim] for x, dim in cut}) > 1:
        return False
    largest = max((x.ndim for x in tensors), default=0)
    return not pointwise or len(cut) < 2 or all(x.ndim == largest for x, _ in cut)


def given_calls(calls: Calls) -> st.SearchStrategy[Call]:
    """The author's calls: a strategy, or a list, of (args, kwargs) or `OpCall`.  Raises `NotARule`."""
    if isinstance(calls, st.SearchStrategy):
        return calls.map(as_call)
    listed = list(calls) if isinstance(calls, Iterable) and not isinstance(calls, str) else []
    if not listed:
        remedy = "Pass a list of (args, kwargs), or a strategy."
        raise NotARule("assert_rule", "calls", repr(calls), "there is no call in it", remedy)
    return one_of_calls([as_call(one) for one in listed])


def one_of_calls(calls: Sequence[T]) -> st.SearchStrategy[T]:
    """One of these."""
    return st.sampled_from(range(len(calls))).map(lambda place: calls[place])


def as_call(one: object) -> Call:
    """The call as (args, kwargs).  Raises `NotARule`."""
    if hasattr(one, "args") and hasattr(one, "kwargs") and not inspect.isfunction(one):
        return tuple(one.args), dict(one.kwargs)
    if isinstance(one, tuple) and len(one) == 2 and isinstance(one[0], tuple | list) and isinstance(one[1], Mapping):
        return tuple(one[0]), dict(one[1])
    raise NotARule("assert_rule", "calls", repr(one)[:200], "this is no call", "Give each as ((x, 2.0), {'dim': 0}).")
