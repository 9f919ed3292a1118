"""Rules of ops that create a tensor like another or overwrite it, and of random ops.

Only the shape and dtype of the given tensor matter.  The result is a constant: equal copies reduce to it in an average, a
minimum and a maximum, in a sum if it is zero, and in a product if it is zero or one.  The shape argument of the `new_` ops is
local for a sharded result.

Each rank may draw the numbers of its shard if no two ranks use the same part of a random stream: the whole is distributed as
required, although it is not the tensor that one rank would draw.  The all-replicated placement rule requires all ranks to use the
same stream.  Independent draws are not partial values of any tensor.
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
    """The constant is that argument; None if it is a tensor, whose value is unknown."""
    return lambda query: None if query.leaf(name) is not None else query.get(name)


def constant(value: Value) -> Callable[[Ask], Iterator[Line]]:
    """For a partial first tensor, the result is replicated, and partial, too, if equal copies reduce to the constant."""

    def lines(query: Ask) -> Iterator[Line]:
        for kind in KINDS:
            if agreed(kind, query.tensors[0].dtype):
                yield query.line({0: Partial(kind)}, [Replicate()])
                if idempotent(kind, value(query), query):
                    yield query.line({0: Partial(kind)}, [Partial(kind)])

    return lines


def idempotent(kind: str, value: Any, query: Ask) -> bool:
    """Whether equal copies of the constant reduce to the constant."""
    result = query.outputs[0]
    if result is None or not agreed(kind, result.dtype) or (result.dtype.is_floating_point and not real(result.dtype)):
        return False
    if kind in ("sum", "product") and result.dtype != torch.bool:
        return isinstance(value, (int, float)) and value in ((0,) if kind == "sum" else (0, 1))
    return True


def of_own_size(query: Ask) -> Iterator[Line]:
    """Only the dtype of the first tensor matters, and the shape is an argument: any dim of the result may be sharded."""
    (given,), result = query.tensors[:1], query.outputs[0]
    for dim in range(given.ndim):
        yield query.line({0: Shard(dim)}, [Replicate()])
    for dim in range(result.ndim if result is not None else 0):
        yield query.line({}, [Shard(dim)])
        if result is not None and result.shape == given.shape:
            yield query.line({0: Shard(dim)}, [Shard(dim)])


def fresh(value: Value) -> Callable[[Ask], Iterator[Line]]:
    """The rule of a new tensor of this constant."""

    def lines(query: Ask) -> Iterator[Line]:
        yield from of_own_size(query)
        yield from constant(value)(query)

    return lines


def copied(query: Ask) -> Iterator[Line]:
    """`copy`: the result is `src`, cast; the previous values of `self` do not matter."""
    mine, theirs = query.leaf("self"), query.leaf("src")
    if mine is None or theirs is None:
        return
    target, source = query.tensors[mine].dtype, query.tensors[theirs].dtype
    for kind in KINDS:
        if carries(kind, source, target):
            yield query.line({mine: Partial(kind), theirs: Partial(kind)}, [Partial(kind)])
        if kind not in ("sum", "product") and agreed(kind, target):
            yield query.line({mine: Partial(kind)}, [Partial(kind)])


def zero(query: Ask) -> int:
    return 0


def one(query: Ask) -> int:
    return 1


def forgotten(query: Ask) -> Iterator[Line]:
    """Only the shape and dtype of the tensor matter, so it may be partial."""
    for kind in KINDS:
        if agreed(kind, query.tensors[0].dtype):
            yield query.line({0: Partial(kind)}, [Replicate()])


def rows(query: Ask) -> Iterator[Line]:
    """`multinomial` draws for each row of probabilities independently."""
    if query.tensors[0].ndim == 2:
        yield query.line({0: Shard(0)}, [Shard(0)])


def filled(query: Ask) -> Iterator[Line]:
    """As elementwise, for shards that are not empty."""
    yield from (replace(line, cut="filled") for line in shards(query))


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
