"""Ops that make a tensor of the shape or dtype of another, or overwrite it: its values do not matter.

So each rank makes its piece, whatever the other holds; the result is a constant, and a constant is its own part in an
average, a minimum and a maximum, in a sum if it is zero, and in a product if it is zero or one.  The `new_` ops are given
their shape, which is local for a result that is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from localtensor.layout import KINDS, agreed
from strategies.ops.lib.elementwise import carries, elementwise, real, shards
from strategies.ops.lib.overload_variants import named, with_variants
from strategies.ops.semantics.rulebook import Ask, Entry, Line, rules

Value = Callable[[Ask], Any]


def argument(name: str) -> Value:
    """The constant is that argument; None where it is a tensor, whose value is not known."""
    return lambda ask: None if ask.leaf(name) is not None else ask.get(name)


def constant(value: Value) -> Callable[[Ask], Iterator[Line]]:
    """What the first tensor holds in parts, the result is whole, and may be taken for parts of the same reduction."""

    def lines(ask: Ask) -> Iterator[Line]:
        for kind in KINDS:
            if agreed(kind, ask.tensors[0].dtype):
                yield ask.line({0: Partial(kind)}, [Replicate()])
                if idempotent(kind, value(ask), ask):
                    yield ask.line({0: Partial(kind)}, [Partial(kind)])

    return lines


def idempotent(kind: str, value: Any, ask: Ask) -> bool:
    """Whether the constant on every rank is the constant."""
    result = ask.outputs[0]
    if result is None or not agreed(kind, result.dtype) or (result.dtype.is_floating_point and not real(result.dtype)):
        return False
    if kind in ("sum", "product") and result.dtype != torch.bool:
        return isinstance(value, (int, float)) and value in ((0,) if kind == "sum" else (0, 1))
    return True


def of_own_size(ask: Ask) -> Iterator[Line]:
    """The first tensor is asked for its dtype only, the shape is given: the result may be cut along any dim."""
    (given,), result = ask.tensors[:1], ask.outputs[0]
    for dim in range(given.ndim):
        yield ask.line({0: Shard(dim)}, [Replicate()])
    for dim in range(result.ndim if result is not None else 0):
        yield ask.line({}, [Shard(dim)])
        if result is not None and result.shape == given.shape:
            yield ask.line({0: Shard(dim)}, [Shard(dim)])


def fresh(value: Value) -> Callable[[Ask], Iterator[Line]]:
    def lines(ask: Ask) -> Iterator[Line]:
        yield from of_own_size(ask)
        yield from constant(value)(ask)

    return lines


def copied(ask: Ask) -> Iterator[Line]:
    """`copy`: the result is what comes from `src`, cast; what was there before may be anything of its shape."""
    mine, theirs = ask.leaf("self"), ask.leaf("src")
    if mine is None or theirs is None:
        return
    target, source = ask.tensors[mine].dtype, ask.tensors[theirs].dtype
    for kind in KINDS:
        if carries(kind, source, target):
            yield ask.line({mine: Partial(kind), theirs: Partial(kind)}, [Partial(kind)])
        if kind not in ("sum", "product") and agreed(kind, target):
            yield ask.line({mine: Partial(kind)}, [Partial(kind)])


def zero(ask: Ask) -> int:
    return 0


def one(ask: Ask) -> int:
    return 1


# Random ops: a piece of independent draws is as many independent draws.
#
# Each rank may draw the numbers of its shard by itself, if no two ranks draw from the same stream at the same place: then
# the whole is distributed as it should be, though it is not the very tensor that one rank would have drawn.  Replicated stays
# what every rule takes for granted, and holds only if all ranks draw from the same stream.  There is no line for parts: what
# ranks draw apart is neither the sum nor the greatest of anything that was asked for.


def forgotten(ask: Ask) -> Iterator[Line]:
    """The tensor is asked for its shape and dtype only, so its parts will do."""
    for kind in KINDS:
        if agreed(kind, ask.tensors[0].dtype):
            yield ask.line({0: Partial(kind)}, [Replicate()])


def rows(ask: Ask) -> Iterator[Line]:
    """`multinomial` draws for each row of probabilities by itself."""
    if ask.tensors[0].ndim == 2:
        yield ask.line({0: Shard(0)}, [Shard(0)])


def filled(ask: Ask) -> Iterator[Line]:
    """As elementwise, where each rank has some elements."""
    yield from (replace(line, cut="filled") for line in shards(ask))


LIKE = named("rand_like randn_like randint_like randint_like.low_dtype")
OVERWRITING = named("""uniform.default normal_functional.default exponential.default geometric.default log_normal.default
    cauchy.default random.default random.from random.to""")
OF_THEIR_OWN = named("""bernoulli.default bernoulli.p poisson.default binomial.default normal.Tensor_float
    normal.float_Tensor normal.Tensor_Tensor rrelu_with_noise_functional.default""")

RULES: tuple[Entry, ...] = with_variants(
    rules("factory", "zeros of the same shape", ["aten.zeros_like.default", "aten.zero.default"],
          elementwise(constant(zero))),
    rules("factory", "nothing is said of what an empty tensor holds", ["aten.empty_like.default"],
          elementwise(constant(zero))),
    rules("factory", "ones of the same shape", ["aten.ones_like.default"], elementwise(constant(one))),
    rules("factory", "a constant of the same shape", ["aten.full_like.default"],
          elementwise(constant(argument("fill_value")))),
    rules("factory", "what was there is written over", ["aten.fill.Scalar", "aten.fill.Tensor"],
          elementwise(constant(argument("value")))),
    rules("factory", "what was there is written over", ["aten.copy.default"], elementwise(copied)),
    rules("factory", "each rank makes its piece", ["aten.new_zeros.default", "aten.new_empty.default",
          "aten.new_empty_strided.default"], fresh(zero), shapes=("size",)),
    rules("factory", "each rank makes its piece", ["aten.new_ones.default"], fresh(one), shapes=("size",)),
    rules("factory", "each rank makes its piece", ["aten.new_full.default"], fresh(argument("fill_value")),
          shapes=("size",)),
    rules("random", "each element is drawn by itself", LIKE, elementwise(forgotten)),
    rules("random", "each element is drawn by itself, whatever was there", OVERWRITING,
          elementwise(forgotten)),
    rules("random", "each element is drawn by itself, with chances of its own", OF_THEIR_OWN,
          elementwise()),
    rules("random", "each element is dropped by itself; of none, torch gives a mask of the input's dtype",
          ["aten.native_dropout.default"], filled),
    rules("random", "as normal_functional, in place", ["aten.normal_.default", "aten.normal.out"], elementwise()),
    rules("random", "each row is drawn by itself", ["aten.multinomial.default"], rows),
)  # fmt: skip
