"""Functions of plain tensors as ops of torch, so that one judge takes both; and their gradients, which are functions, too.

A function `torch.add` of the source `toy` is the op `toy.torch_add.default(Tensor[] tensors, str call) -> Tensor[]`: `call`
has the arguments with `x0`, `x1` for the tensors.  `toy.torch_add.gradient` takes the same tensors and a cotangent of
each differentiable result, and gives the gradients of the tensors `wrt`.
"""

from __future__ import annotations

import ast
import functools
import math
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from strategies.model.kernels import REJECTIONS
from strategies.model.rule import Call, Leaf, Sample, leaf_at

_LIBRARIES: dict[str, torch.library.Library] = {}
_FUNCTIONS: dict[str, Callable[..., Any]] = {}
FORWARD, GRADIENT = "default", "gradient"
_DTYPES = {str(v): v for v in vars(torch).values() if isinstance(v, torch.dtype)}


@dataclass(frozen=True)
class FunctionCall:
    """One call of a function with whole tensors.

    label     how a user writes the function: `torch.add`.
    function  the function.  It may write to its first argument: it gets copies.
    args      positional arguments, tensors and lists of tensors among them.
    kwargs    keyword arguments.
    origin    where the call comes from.
    wrt       the tensors, by number, whose gradients are asked for; empty for the call itself.
    """

    label: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    origin: str = ""
    wrt: tuple[int, ...] = ()

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of the call, in order."""
        return [x for x in pytree.tree_leaves((self.args, dict(self.kwargs))) if isinstance(x, Tensor)]

    def on(self, tensors: Sequence[Tensor]) -> FunctionCall:
        """The same call with other tensors in their places."""
        rest = iter(tensors)
        args, kwargs = pytree.tree_map_only(Tensor, lambda _: next(rest), (self.args, dict(self.kwargs)))
        return replace(self, args=args, kwargs=kwargs)

    def __call__(self) -> Any:
        return self.function(*self.args, **self.kwargs)

    @functools.cached_property
    def whole(self) -> Any:
        """The results on the whole tensors, of which it gets copies."""
        with torch.no_grad():
            return self.on([x.clone() for x in self.tensors])()


def packet(label: str) -> str:
    """The name of a function's op: `torch_Tensor___radd__` of `torch.Tensor.__radd__`."""
    return re.sub(r"\W", "_", label)


def register(namespace: str, label: str, function: Callable[..., Any]) -> str:
    """Register a function as an op, once; a later function of that name takes its place.  Returns the name of its packet."""
    name = f"{namespace}.{packet(label)}"
    if name not in _FUNCTIONS:
        library = _LIBRARIES.setdefault(namespace, torch.library.Library(namespace, "FRAGMENT"))
        for full, schema, impl in (
            (packet(label), "(Tensor[] tensors, str call) -> Tensor[]", _run),
            (f"{packet(label)}.{GRADIENT}", "(Tensor[] tensors, str call, int[] wrt) -> Tensor[]", _grad),
        ):
            library.define(full + schema)
            library.impl(full, functools.partial(impl, name), "CompositeImplicitAutograd")
    _FUNCTIONS[name] = function
    return name


def _run(name: str, tensors: Sequence[Tensor], call: str) -> list[Tensor]:
    function = _FUNCTIONS[name]
    if communicates(function, call):
        return list(function.on_ranks([[x] for x in tensors], 1, call, ())[0])  # type: ignore[attr-defined]
    args, kwargs = arguments(call, [x.clone() for x in tensors])
    with torch.no_grad():
        return tensor_results(_FUNCTIONS[name](*args, **kwargs))


def _grad(name: str, tensors: Sequence[Tensor], call: str, wrt: Sequence[int]) -> list[Tensor]:
    function = _FUNCTIONS[name]
    if communicates(function, call):
        return list(function.on_ranks([[x] for x in tensors], 1, call, wrt)[0])  # type: ignore[attr-defined]
    return gradients(_FUNCTIONS[name], tensors, call, wrt)


def gradients(function: Callable[..., Any], tensors: Sequence[Tensor], call: str, wrt: Sequence[int]) -> list[Tensor]:
    """The gradients of the tensors `wrt`, for the cotangents that stand behind the call's own tensors.

    Raises `RuntimeError` where a result has no gradient, or another number of them than cotangents.
    """
    count = tensor_count(call)
    with torch.enable_grad():
        leaves = [x.detach().clone().requires_grad_(i in wrt) for i, x in enumerate(tensors[:count])]
        given = [x.clone() if x.requires_grad else x for x in leaves]  # a function may write to them
        args, kwargs = arguments(call, given)
        outs = [x for x in tensor_results(function(*args, **kwargs)) if x.requires_grad]
        if not outs or len(outs) != len(tensors) - count:
            raise RuntimeError(f"{len(outs)} results have a gradient, for {len(tensors) - count} cotangents")
        found = torch.autograd.grad(outs, [leaves[i] for i in wrt], list(tensors[count:]), allow_unused=True)
    return [torch.zeros_like(leaves[i]) if g is None else g for i, g in zip(wrt, found, strict=True)]


def tensor_results(out: Any) -> list[Tensor]:
    """The tensors among the results of a call, flat, in order."""
    return [x for x in pytree.tree_leaves(out) if isinstance(x, Tensor)]


class _NoForm(Exception):
    """An argument has no form in the text of a call."""


def _text(value: Any, numbers: dict[int, int]) -> str:
    if isinstance(value, Tensor):
        return f"x{numbers.setdefault(len(numbers), len(numbers))}"
    if isinstance(value, (list, tuple)):
        inner = ", ".join(_text(one, numbers) for one in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner},)" if value else "()"
    if isinstance(value, torch.dtype):
        return str(value)
    if value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value)):
        return repr(value)
    raise _NoForm(type(value).__name__)


def call_text(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The arguments of a call as text: `x0, 1, other=x1`."""
    numbers: dict[int, int] = {}
    parts = [_text(value, numbers) for value in args]
    return ", ".join([*parts, *(f"{name}={_text(value, numbers)}" for name, value in kwargs.items())])


@functools.cache
def _parsed(text: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    made = ast.parse(f"f({text})", mode="eval").body
    assert isinstance(made, ast.Call), f"{text} is no list of arguments"

    def value(node: ast.expr) -> Any:
        if isinstance(node, ast.Name):
            return leaf_at(int(node.id[1:]))
        if isinstance(node, (ast.List, ast.Tuple)):
            return (list if isinstance(node, ast.List) else tuple)(map(value, node.elts))
        if isinstance(node, ast.Attribute):
            return _DTYPES[ast.unparse(node)]
        return ast.literal_eval(node)

    return tuple(map(value, made.args)), {k.arg: value(k.value) for k in made.keywords if k.arg is not None}


def arguments(text: str, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call from its text, with these tensors in their places."""
    args, kwargs = _parsed(text)
    return Call("", args, tuple(kwargs.items())).filled(tensors)


@functools.cache
def tensor_count(text: str) -> int:
    """The number of tensors in the text of a call."""
    return sum(isinstance(one, Leaf) for one in pytree.tree_leaves(_parsed(text)))


def sample_of(namespace: str, call: FunctionCall) -> Sample | None:
    """The call as a sample of its op; None where an argument has no form in text."""
    try:
        text = call_text(call.args, call.kwargs)
    except _NoForm:
        return None
    tensors = call.tensors
    made = Call(f"{namespace}.{packet(call.label)}.{FORWARD}", (tuple(map(leaf_at, range(len(tensors)))), text))
    return Sample(made, tuple(x.detach().clone() for x in tensors), call.origin)


def gradient_sample(namespace: str, call: FunctionCall, sample: Sample, wrt: tuple[int, ...]) -> Sample | None:
    """The gradient of a sample for drawn cotangents; None where torch has none."""
    text = sample.call.args[1]
    try:
        outs = [one for one in result_traits(call.function, sample.tensors, text, wrt) if one.requires_grad]
    except REJECTIONS:
        return None
    if not outs:
        return None
    rng = torch.Generator().manual_seed(zlib.crc32(f"{call.label} {text} {wrt}".encode()))
    cotangents = [torch.randn(x.shape, generator=rng, dtype=x.dtype) for x in outs]
    every = tuple(map(leaf_at, range(len(sample.tensors) + len(cotangents))))
    made = Call(f"{namespace}.{packet(call.label)}.{GRADIENT}", (every, text, wrt))
    return Sample(made, (*sample.tensors, *cotangents), f"{sample.origin}, gradient")


def function_call(sample: Sample, labels: Mapping[str, str]) -> FunctionCall:
    """The call of a function or of its gradient that a sample stands for, with its whole tensors."""
    name = sample.op.rpartition(".")[0]
    text = sample.call.args[1]
    args, kwargs = arguments(text, sample.tensors[: tensor_count(text)])
    wrt = tuple(sample.call.args[2]) if len(sample.call.args) > 2 else ()
    return FunctionCall(labels[name], _FUNCTIONS[name], args, kwargs, sample.origin, wrt)


def differentiable(sample: Sample) -> list[int]:
    """The results of a gradient sample's function that have a gradient, by number among its tensor results."""
    text, wrt = sample.call.args[1], sample.call.args[2]
    found = result_traits(_FUNCTIONS[sample.op.rpartition(".")[0]], sample.tensors[: tensor_count(text)], text, wrt)
    return [i for i, one in enumerate(found) if one.requires_grad]


class ResultTraits(NamedTuple):
    """What a gradient needs to know of a result."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


def result_traits(
    function: Callable[..., Any], tensors: Sequence[Tensor], text: str, wrt: Sequence[int]
) -> list[ResultTraits]:
    """The traits of each tensor result where the tensors `wrt` require a gradient.  Raises what the function raises."""
    if communicates(function, text):
        found: list[ResultTraits] = function.result_traits(tensors, text, wrt)  # type: ignore[attr-defined]
        return found
    with torch.enable_grad():
        given = [x.detach().clone().requires_grad_(i in wrt).clone() for i, x in enumerate(tensors)]
        args, kwargs = arguments(text, given)
        outs = tensor_results(function(*args, **kwargs))
    return [ResultTraits(tuple(x.shape), x.dtype, x.requires_grad) for x in outs]


def communicates(function: Any, text: str) -> bool:
    """Whether the ranks of this call communicate, so that they run together: the function has methods for it."""
    asked = getattr(function, "communicates", None)
    return asked is not None and bool(asked(text))


def local_calls(call: Call, texts: Sequence[str]) -> tuple[Call, ...]:
    """The call of each rank, with its own arguments in place of the whole call's."""
    return tuple(replace(call, args=(call.args[0], text, *call.args[2:])) for text in texts)
