"""Rules of ops that create a tensor like another or overwrite it, and of random ops.

Only the shape and dtype of the given tensor matter.  The result is a constant: equal copies reduce to it in an average,
a minimum and a maximum, in a sum if it is zero, and in a product if it is zero or one.  The shape argument of the
`new_` ops is local for a sharded result.

Each rank may draw the numbers of its shard if no two ranks use the same part of a random stream: the whole is
distributed as required, although it is not the tensor that one rank would draw.  The all-replicated placement rule
requires all ranks to use the same stream.  Independent draws are not partial values of any tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from localtensor.layout import PARTIAL_KINDS, is_unambiguous
from strategies.ops.lib.elementwise import cast_commutes, elementwise, is_float_or_complex, shard_rules
from strategies.ops.lib.overload_variants import overloads_of, with_variants
from strategies.ops.semantics.rule_registry import OpRule, PlacementRule, RuleQuery, rules

Value = Callable[[RuleQuery], Any]


def from_argument(name: str) -> Value:
    """The constant is that argument; None if it is a tensor, whose value is unknown."""
    return lambda query: None if query.leaf(name) is not None else query.get(name)


def constant_rules(value: Value) -> Callable[[RuleQuery], Iterator[PlacementRule]]:
    """For a partial first tensor, the result is replicated, and partial, too, if equal copies reduce to the constant."""

    def lines(query: RuleQuery) -> Iterator[PlacementRule]:
        for kind in PARTIAL_KINDS:
            if is_unambiguous(kind, query.tensors[0].dtype):
                yield query.line({0: Partial(kind)}, [Replicate()])
                if keeps_constant(kind, value(query), query):
                    yield query.line({0: Partial(kind)}, [Partial(kind)])

    return lines


def keeps_constant(kind: str, value: object, query: RuleQuery) -> bool:
    """Whether equal copies of the constant reduce to the constant."""
    result = query.outputs[0]
    if (
        result is None
        or not is_unambiguous(kind, result.dtype)
        or (result.dtype.is_floating_point and not is_float_or_complex(result.dtype))
    ):
        return False
    if kind in ("sum", "product") and result.dtype != torch.bool:
        return isinstance(value, (int, float)) and value in ((0,) if kind == "sum" else (0, 1))
    return True


def new_shape_rules(query: RuleQuery) -> Iterator[PlacementRule]:
    """Only the dtype of the first tensor matters, and the shape is an argument: any dim of the result may be sharded."""
    (given,), result = query.tensors[:1], query.outputs[0]
    for dim in range(given.ndim):
        yield query.line({0: Shard(dim)}, [Replicate()])
    for dim in range(result.ndim if result is not None else 0):
        yield query.line({}, [Shard(dim)])
        if result is not None and result.shape == given.shape:
            yield query.line({0: Shard(dim)}, [Shard(dim)])


def new_tensor(value: Value) -> Callable[[RuleQuery], Iterator[PlacementRule]]:
    """The rule of a new tensor of this constant."""

    def lines(query: RuleQuery) -> Iterator[PlacementRule]:
        yield from new_shape_rules(query)
        yield from constant_rules(value)(query)

    return lines


def copied(query: RuleQuery) -> Iterator[PlacementRule]:
    """`copy`: the result is `src`, cast; the previous values of `self` do not matter."""
    mine, theirs = query.leaf("self"), query.leaf("src")
    if mine is None or theirs is None:
        return
    target, source = query.tensors[mine].dtype, query.tensors[theirs].dtype
    for kind in PARTIAL_KINDS:
        if cast_commutes(kind, source, target):
            yield query.line({mine: Partial(kind), theirs: Partial(kind)}, [Partial(kind)])
        if kind not in ("sum", "product") and is_unambiguous(kind, target):
            yield query.line({mine: Partial(kind)}, [Partial(kind)])


def copied_to(query: RuleQuery) -> Iterator[PlacementRule]:
    """`prims.copy_to`: the first tensor becomes the second, cast."""
    for kind in PARTIAL_KINDS:
        if cast_commutes(kind, query.meta("b").dtype, query.meta("a").dtype):
            yield query.line({0: Partial(kind), 1: Partial(kind)}, [Partial(kind)])


def shape_only(query: RuleQuery) -> Iterator[PlacementRule]:
    """Only the shape and dtype of the tensor matter, so it may be partial."""
    for kind in PARTIAL_KINDS:
        if is_unambiguous(kind, query.tensors[0].dtype):
            yield query.line({0: Partial(kind)}, [Replicate()])


def rows(query: RuleQuery) -> Iterator[PlacementRule]:
    """`multinomial` draws for each row of probabilities independently."""
    if query.tensors[0].ndim == 2:
        yield query.line({0: Shard(0)}, [Shard(0)])


def filled(query: RuleQuery) -> Iterator[PlacementRule]:
    """As elementwise, for shards that are not empty."""
    yield from (replace(line, cut="filled") for line in shard_rules(query))


LIKE = overloads_of("rand_like randn_like randint_like randint_like.low_dtype")
OVERWRITING = overloads_of("""uniform.default normal_functional.default exponential.default geometric.default log_normal.default
    cauchy.default random.default random.from random.to""")
OF_THEIR_OWN = overloads_of("""bernoulli.default bernoulli.p poisson.default binomial.default normal.Tensor_float
    normal.float_Tensor normal.Tensor_Tensor rrelu_with_noise_functional.default
    rrelu_with_noise.default""")

RULES: tuple[OpRule, ...] = with_variants(
    rules("factory", "zeros of the same shape", ["aten.zeros_like.default", "aten.zero.default"],
          elementwise(constant_rules(lambda query: 0))),
    rules("factory", "nothing is said of what an empty tensor holds", ["aten.empty_like.default"],
          elementwise(constant_rules(lambda query: 0))),
    rules("factory", "ones of the same shape", ["aten.ones_like.default"],
          elementwise(constant_rules(lambda query: 1))),
    rules("factory", "a constant of the same shape", ["aten.full_like.default"],
          elementwise(constant_rules(from_argument("fill_value")))),
    rules("factory", "what was there is written over", ["aten.fill.Scalar", "aten.fill.Tensor"],
          elementwise(constant_rules(from_argument("value")))),
    rules("factory", "what was there is written over", ["aten.copy.default"], elementwise(copied)),
    rules("factory", "what was there is written over", ["prims.copy_to.default"], elementwise(copied_to)),
    rules("factory", "its diagonal is of the whole", ["aten.eye.m_out"], lambda query: ()),
    rules("factory", "each rank makes its piece",
          ["aten.new_zeros.default", "aten.new_empty.default", "aten.new_empty_strided.default"],
          new_tensor(lambda query: 0), shapes=("size",)),
    rules("factory", "each rank makes its piece", ["aten.new_ones.default"], new_tensor(lambda query: 1),
          shapes=("size",)),
    rules("factory", "each rank makes its piece", ["aten.new_full.default"], new_tensor(from_argument("fill_value")),
          shapes=("size",)),
    rules("random", "each element is drawn by itself", LIKE, elementwise(shape_only)),
    rules("random", "each element is drawn by itself, whatever was there", OVERWRITING,
          elementwise(shape_only)),
    rules("random", "each element is drawn by itself, with chances of its own", OF_THEIR_OWN,
          elementwise()),
    rules("random", "each element is dropped by itself; of none, torch gives a mask of the input's dtype",
          ["aten.native_dropout.default"], filled),
    rules("random", "as normal_functional, in place", ["aten.normal_.default", "aten.normal.out"], elementwise()),
    rules("random", "each row is drawn by itself", ["aten.multinomial.default"], rows),
)  # fmt: skip
