"""How a user writes a call of an overload: the public function of its name, or the one that was seen to make it."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional
from torch import Tensor
from torch.utils import _pytree as pytree

from strategies.model.call_signature import argument_text
from strategies.model.kernels import REJECTIONS
from strategies.model.oracle import equal_within
from strategies.model.rule import Call, Leaf, Sample, overload


def is_private(sample: Sample) -> bool:
    """Whether no public function makes the call: `_foreach_add` is private, `__lshift__` is the operator `<<`.

    A function has the op's name, or gives what it gives: `F.nll_loss` that of `nll_loss_forward`.
    """
    namespace, packet, _ = sample.op.split(".")
    if namespace != "aten":
        return namespace in ("prims", "_c10d_functional")
    return packet not in OPERATORS and not any(_owners(packet)) and spelled(sample) == raw_spelling(sample.call)


OPERATORS = {"__lshift__": "<<", "__rshift__": ">>", "__and__": "&", "__or__": "|", "__xor__": "^"}
"""Overloads that are operators of Python."""
_MODULES = (
    ("torch", torch, ""), ("F", torch.nn.functional, ""), ("torch.linalg", torch.linalg, "linalg_"),
    ("torch.fft", torch.fft, "fft_"), ("torch.special", torch.special, "special_"),
)  # fmt: skip
_REDUCTIONS = ("none", "mean", "sum")
_SCOPE = {"torch": torch, "F": torch.nn.functional, "inf": math.inf, "nan": math.nan}


def _owners(name: str) -> Iterator[str]:
    """The public spellings of a function of that name: `torch.cumprod`, `F.mse_loss`."""
    if name.startswith("_"):
        return
    for text, module, prefix in _MODULES:
        bare = name.removeprefix(prefix)
        if (not prefix or bare != name) and callable(getattr(module, bare, None)):
            yield f"{text}.{bare}"
    if callable(getattr(Tensor, name, None)):
        yield f"Tensor.{name}"


def spellings(call: Call) -> Iterator[str]:
    """Python texts of the call, the public ones first: `x0 << 1`, `F.mse_loss(x0, x1)`; the overload's own last."""
    packet = call.op.split(".")[1]
    args = list(call.args)
    if packet in OPERATORS and len(args) == 2 and not call.kwargs:
        yield f"{argument_text(args[0])} {OPERATORS[packet]} {argument_text(args[1])}"
    if isinstance(args[0] if args else None, Leaf) and call.op in ("aten.slice.Tensor", "aten.alias.default"):
        yield f"{argument_text(args[0])}[{_index_text(call)}]"
    named = [(name, value) for name, value in call.kwargs]
    schema = [a.name for a in overload(call.op)._schema.arguments]
    by_name = dict(zip(schema, args, strict=False)) | dict(named)
    if type(by_name.get("reduction")) is int:  # an enumeration in the overload, a word in public
        args = [v for name, v in zip(schema, args, strict=False) if name != "reduction"]
        cut = schema.index("reduction")
        named = [(n, v) for n, v in zip(schema[cut + 1 :], call.args[cut + 1 :], strict=False)] + named
        args, word = args[:cut], _REDUCTIONS[by_name["reduction"] % 3]
        named = [(n, v) for n, v in named if n != "reduction"] + ([("reduction", word)] if word != "mean" else [])
    text = ", ".join([*map(argument_text, args), *(f"{n}={argument_text(v)}" for n, v in named)])
    rest = ", ".join([*map(argument_text, args[1:]), *(f"{n}={argument_text(v)}" for n, v in named)])
    for owner in _owners(packet):
        if not owner.startswith("Tensor."):
            yield f"{owner}({text})"
        elif args and isinstance(args[0], Leaf):
            yield f"{argument_text(args[0])}.{owner.removeprefix('Tensor.')}({rest})"
    yield raw_spelling(call)


def _index_text(call: Call) -> str:
    """The index that makes a slice, or an alias, of a tensor.

    >>> _index_text(Call("aten.slice.Tensor", (Leaf(0), 1, 2))), _index_text(Call("aten.slice.Tensor", (Leaf(0), -2, 0, 3, 2)))
    (':, 2:', '..., 0:3:2, :')
    """
    if call.op == "aten.alias.default":
        return "..."
    given = call.named()
    dim, start, end, step = (given.get(name) for name in ("dim", "start", "end", "step"))
    ends = "" if end is None or end >= torch.iinfo(torch.int64).max else f"{end}"
    one = f"{'' if start is None else start}:{ends}" + (f":{step}" if step not in (None, 1) else "")
    dim = dim or 0
    return ", ".join([":"] * dim + [one] if dim >= 0 else ["...", one] + [":"] * (-dim - 1))


def raw_spelling(call: Call) -> str:
    """The call of the overload itself: `torch.ops.aten.mul.Scalar(x0, 2)`."""
    given = ", ".join([*map(argument_text, call.args), *(f"{n}={argument_text(v)}" for n, v in call.kwargs)])
    return f"torch.ops.{call.op}({given})"


def _callers(sample: Sample) -> Iterator[str]:
    """Texts of public functions that may make the call, with arguments by position and by name.

    They are that whose sample made it, `nn.functional.nll_loss[float64,even] #0 forward`, and that of the op's name
    without what marks an overload as private.
    """
    call, packet = sample.call, sample.op.split(".")[1]
    name, bracket, _ = sample.origin.partition("[")
    bare = packet.strip("_").removeprefix("native_").removesuffix("_forward")
    values = dict(zip([a.name for a in overload(call.op)._schema.arguments], call.args, strict=False)) | dict(
        call.kwargs
    )
    if type(values.get("reduction")) is int:
        values["reduction"] = _REDUCTIONS[values["reduction"] % 3]
    first, *rest = [*values.values()] or [None]
    named = {("input" if n == "self" else n): argument_text(v) for n, v in values.items() if v is not None}
    names = [name.removeprefix("nn.functional.").replace(".", "_") if bracket else "", bare]
    # An origin comes from a journal, which may name `torch.load`: only functions of ops are called.
    ops = [one for one in dict.fromkeys(names) if one != packet and one.isidentifier() and hasattr(torch.ops.aten, one)]
    for owner in itertools.chain.from_iterable(map(_owners, ops)):
        method = owner.partition("Tensor.")[2]
        if method and isinstance(first, Leaf):
            yield f"{argument_text(first)}.{method}({', '.join(map(argument_text, rest))})"
        elif not method:
            takes = _parameters(eval(owner, _SCOPE))  # noqa: S307  # a name of torch's
            yield f"{owner}({', '.join(f'{n}={text}' for n, text in named.items() if n in takes)})"


def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    """The names of a function's parameters; none of one that is written in C."""
    try:
        return frozenset(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return frozenset()


def spelled(sample: Sample) -> str:
    """The first spelling that gives what the call gives, on these tensors.

    One of another name may give less: `F.nll_loss` has the first result of `nll_loss_forward`.
    """
    every = [*(texts := list(spellings(sample.call)))[:-1], *(callers := list(_callers(sample))), texts[-1]]
    try:
        torch.manual_seed(0)
        want = sample.call([x.clone() for x in sample.tensors])
    except REJECTIONS:
        return every[-1]
    for text in every[:-1]:
        scope = _SCOPE | {f"x{i}": x.clone() for i, x in enumerate(sample.tensors)}
        try:
            torch.manual_seed(0)
            got = eval(text, scope)  # noqa: S307  # of our own making
        except (*REJECTIONS, AttributeError):  # the public function has other arguments
            continue
        if _same(got, want, partly=text in callers):
            return text
    return every[-1]


def _same(got: object, want: object, partly: bool = False) -> bool:
    one, other = pytree.tree_leaves(got), pytree.tree_leaves(want)
    if partly and one:
        other = other[: len(one)]
    if len(one) != len(other):
        return False
    for a, b in zip(one, other, strict=True):
        if isinstance(a, Tensor) != isinstance(b, Tensor):
            return False
        same = a.dtype == b.dtype and equal_tensors(a, b) if isinstance(a, Tensor) else a == b
        if not same:
            return False
    return True


def equal_tensors(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one dtype have the same shape and values, NaN being equal to NaN."""
    return a.shape == b.shape and equal_within(a, b, torch.zeros(()))
