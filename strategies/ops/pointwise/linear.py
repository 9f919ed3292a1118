"""Rules of elementwise ops that are linear in some operands, choose elements of some, or are neither linear nor monotone.

`f(a + b) = f(a) + f(b)` gives P(sum) -> P(sum), and P(avg) -> P(avg) for floats and complex numbers; averages of
integers are rounded.  A replicated tensor is an average of copies of itself, and not a sum: so where operands are
added, P(avg) combines with R, and P(sum) does not.  Booleans add as "or", which is linear only among themselves.

An optimizer steps every parameter elementwise, together with its gradient and its state.  The number of steps, the
learning rate, the gradient scale and its overflow flag are one number each, replicated.  A partial sum of a gradient is
not a gradient: its square is not a sum of squares.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from localtensor.layout import PARTIAL_KINDS
from strategies.model.rule import overload
from strategies.ops.lib.elementwise import (
    RuleMaker,
    cast_commutes,
    elementwise,
    is_float_or_complex,
    partial_rule,
    tensor_operands,
)
from strategies.ops.lib.overload_variants import LONGEST_LIST_ONE_BY_ONE, overloads_of, with_variants
from strategies.ops.pointwise.monotone import affine, are_floats, falling, scaled_by_number
from strategies.ops.semantics.rule_registry import OpRule, PlacementRule, RuleQuery, rules


def linear(*names: str) -> RuleMaker:
    """Linear in these operands together, the others replicated: `add` in self and other, `div` in self."""

    def lines(query: RuleQuery) -> Iterator[PlacementRule]:
        leaves, number = tensor_operands(query, names)
        if leaves and not number and casts_commute(query, leaves, "sum"):
            yield partial_rule(query, leaves, "sum")
        yield from subsets_partial(query, leaves, "avg")

    return lines


def casts_commute(query: RuleQuery, leaves: list[int], kind: str) -> bool:
    """Whether the cast of these tensors to the dtype of the result commutes with the reduction."""
    result = query.outputs[0]
    return result is not None and all(cast_commutes(kind, query.tensors[leaf].dtype, result.dtype) for leaf in leaves)


def subsets_partial(query: RuleQuery, leaves: list[int], kind: str) -> Iterator[PlacementRule]:
    """A placement rule for each subset of these operands to be partial, the others replicated."""
    for many in range(len(leaves), 0, -1):
        for chosen in itertools.combinations(leaves, many):
            if casts_commute(query, list(chosen), kind):
                yield partial_rule(query, chosen, kind)


def elementwise_choice(*names: str) -> RuleMaker:
    """Each element of the result is the element of one of these operands, which commutes with any reduction.

    For a sum or a product all of them must be partial; for the other kinds some may be replicated.
    """

    def lines(query: RuleQuery) -> Iterator[PlacementRule]:
        leaves, number = tensor_operands(query, names)
        for kind in PARTIAL_KINDS:
            if kind in ("avg", "min", "max"):
                yield from subsets_partial(query, leaves, kind)
            elif leaves and not number and casts_commute(query, leaves, kind):
                yield partial_rule(query, leaves, kind)

    return lines


def fill_with_neutral(query: RuleQuery) -> Iterator[PlacementRule]:
    """`masked_fill` with a neutral element: zero for a sum, one for a product."""
    value = query["value"]
    kind = ("sum" if value == 0 else "product" if value == 1 else None) if isinstance(value, (int, float)) else None
    leaf = query.leaf("self")
    if kind is not None and leaf is not None and casts_commute(query, [leaf], kind):
        yield partial_rule(query, [leaf], kind)


def multiplicative(*names: str) -> RuleMaker:
    """`f(a * b) = f(a) * f(b)`, for floats and complex numbers, since products of integers may wrap."""

    def lines(query: RuleQuery) -> Iterator[PlacementRule]:
        leaves, number = tensor_operands(query, names)
        result = query.outputs[0]
        whole = result is not None and (is_float_or_complex(result.dtype) or len(names) > 1)
        if leaves and not number and whole and casts_commute(query, leaves, "product"):
            yield partial_rule(query, leaves, "product")

    return lines


def boolean_add(query: RuleQuery) -> Iterator[PlacementRule]:
    """`add` of booleans is "or": it commutes with "or" and "and" (a product) of one operand, and with "or" of both."""
    leaves, number = tensor_operands(query, ("self", "other"))
    dtypes = {meta.dtype for meta in (*query.tensors, *filter(None, query.outputs))}
    added = query.op.split(".")[1] == "add" and dtypes <= {torch.bool}
    if added and len(leaves) == 2 and not number and query.get("alpha") in (0, 1, None):
        for kind in ("max", "min", "product", "sum"):
            yield from (partial_rule(query, [leaf], kind) for leaf in leaves)
        yield partial_rule(query, leaves, "max")


GRADIENTS = overloads_of("""gelu_backward sigmoid_backward silu_backward tanh_backward threshold_backward mish_backward
    hardsigmoid_backward hardswish_backward hardtanh_backward hardshrink_backward softshrink_backward softplus_backward
    elu_backward rrelu_with_noise_backward leaky_relu_backward logit_backward log_sigmoid_backward native_dropout_backward
    _prelu_kernel_backward""")
"""Ops that multiply the gradient, `grad_output` or `grad_out`, by a function of the other operands."""

_LINEAR_RULES = with_variants(
    rules("linear", "the sum and the difference of sums is one of parts; of booleans the sum is or",
          ["aten.add.Tensor", "aten.sub.Tensor", "aten.rsub.Tensor"],
          elementwise(linear("self", "other"), affine, boolean_add)),
    rules("linear", "a constant is added to an average, and to each of its parts, but to a sum only once",
          ["aten.add.Scalar", "aten.sub.Scalar", "aten.rsub.Scalar"],
          elementwise(linear("self", "other"), affine)),
    rules("linear", "a product is linear in each factor", ["aten.mul.Tensor", "aten.mul.Scalar"],
          elementwise(linear("self"), linear("other"), multiplicative("self", "other"), scaled_by_number)),
    rules("linear", "a quotient is linear in what is divided",
          ["aten.div.Tensor", "aten.div.Scalar", "aten.true_divide.Tensor"],
          elementwise(linear("self"), scaled_by_number)),
    rules("linear", "a sum of negatives; of floats it turns the order", ["aten.neg.default"],
          elementwise(linear("self"), falling(are_floats))),
    rules("linear", "real + i * imag", ["aten.complex.default"], elementwise(linear("real", "imag"))),
    rules("linear", "self * 2 ** other", ["aten.ldexp.Tensor"], elementwise(linear("self"))),
    rules("linear", "self + weight * (end - self)", ["aten.lerp.Tensor", "aten.lerp.Scalar"],
          elementwise(linear("self", "end"))),
    rules("linear", "self + value * tensor1 * tensor2", ["aten.addcmul.default"],
          elementwise(linear("self", "tensor1"), linear("self", "tensor2"))),
    rules("linear", "self + value * tensor1 / tensor2",
          ["aten.addcdiv.default"], elementwise(linear("self", "tensor1"))),
    rules("linear", "conjugation goes into sums and products",
          ["aten._conj.default", "aten.conj_physical.default", "aten._conj_physical.default",
           "prims.conj_physical.default"], elementwise(linear("self"), multiplicative("self"))),
    rules("linear", "a gradient times what the op's slope is there", GRADIENTS,
          elementwise(linear("grad_output"), linear("grad_out"))),
    rules("choosing", "the elements stay what they are",
          ["aten.clone.default", "aten.positive.default", "aten.contiguous.default"],
          elementwise(elementwise_choice("self"))),
    rules("choosing", "the parts may be cast where the cast goes with the reduction",
          ["aten._to_copy.default", "aten.to.dtype", "prims.convert_element_type.default"],
          elementwise(elementwise_choice("self"), elementwise_choice("a"))),
    rules("choosing", "each element comes from one of the two",
          ["aten.where.self", "aten.where.ScalarOther", "aten.where.ScalarSelf"],
          elementwise(elementwise_choice("self", "other"))),
    rules("choosing", "each element stays, or is the value", ["aten.masked_fill.Scalar", "aten.masked_fill.Tensor"],
          elementwise(elementwise_choice("self", "value"), fill_with_neutral)),
)  # fmt: skip


UNARY = overloads_of("""abs acos angle asin atanh cos cosh digamma erfinv frac gelu i0 isfinite isinf isnan isneginf isposinf
    lgamma log_sigmoid_forward logit mish mvlgamma polygamma reciprocal rsqrt signbit silu sin sinc square
    tan frexp.Tensor hardswish special_entr special_i0e special_i1 special_i1e special_ndtri special_airy_ai
    special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1 special_modified_bessel_i0
    special_modified_bessel_i1 special_spherical_bessel_j0""")
BINARY = overloads_of("""atan2 copysign.Tensor copysign.Scalar div.Tensor_mode div.Scalar_mode fmod.Tensor fmod.Scalar gcd heaviside hypot
    igamma igammac lcm nextafter remainder.Tensor remainder.Scalar remainder.Scalar_Tensor floor_divide floor_divide.Scalar
    pow.Tensor_Tensor pow.Tensor_Scalar pow.Scalar float_power.Tensor_Tensor float_power.Tensor_Scalar float_power.Scalar
    polar _prelu_kernel xlogy.Tensor xlogy.Scalar_Self xlogy.Scalar_Other special_xlog1py special_xlog1py.self_scalar
    special_xlog1py.other_scalar special_zeta special_zeta.self_scalar special_zeta.other_scalar""")
COMPARED = [f"aten.{op}.{kind}" for op in ("eq", "ne", "lt", "le", "gt", "ge") for kind in ("Tensor", "Scalar")]
BITS = overloads_of("""bitwise_left_shift.Tensor bitwise_left_shift.Tensor_Scalar bitwise_left_shift.Scalar_Tensor
    bitwise_right_shift.Tensor bitwise_right_shift.Tensor_Scalar bitwise_right_shift.Scalar_Tensor __lshift__.Tensor
    __lshift__.Scalar __rshift__.Tensor __rshift__.Scalar bitwise_and.Tensor bitwise_and.Scalar bitwise_and.Scalar_Tensor
    bitwise_or.Tensor bitwise_or.Scalar bitwise_or.Scalar_Tensor bitwise_xor.Tensor bitwise_xor.Scalar
    bitwise_xor.Scalar_Tensor __and__.Tensor __and__.Scalar __or__.Tensor __or__.Scalar __xor__.Tensor __xor__.Scalar
    logical_and logical_or logical_xor""")
POLYNOMIALS = [
    f"aten.special_{name}_polynomial_{letter}.{kind}"
    for name, letters in {
        "chebyshev": "tuvw", "shifted_chebyshev": "tuvw", "hermite": ("h", "he"), "laguerre": "l", "legendre": "p",
    }.items()
    for letter in letters
    for kind in ("default", "x_scalar", "n_scalar")
]  # fmt: skip
PRIMS = overloads_of(
    """abs bessel_i0e bessel_i1 bessel_i1e bessel_j0 bessel_j1 digamma div hypot igamma igammac ndtri ne nextafter
    reciprocal rsqrt signbit spherical_bessel_j0 zeta gcd frexp fma""",
    "prims",
)


STEP_COUNTS = "state_steps"
STEPS = ("adam", "adamw", "sgd", "adagrad")


def optimizer_step(query: RuleQuery) -> Iterator[PlacementRule]:
    """All parameters that have a dim sharded along it; and in a short list each parameter alone."""
    parameters = query.leaves("self")
    schema = overload(query.op)._schema.arguments
    names = [a.name for a in schema if str(a.type) == "List[Tensor]" and a.name != STEP_COUNTS]
    lists = {name: query.leaves(name) for name in names}
    ndims = [query.tensors[leaf].ndim for leaf in parameters]
    for dim in range(max(ndims, default=0)):
        yield _line(query, lists, [Shard(dim) if dim < ndim else Replicate() for ndim in ndims])
    for i, ndim in enumerate(ndims if 1 < len(ndims) <= LONGEST_LIST_ONE_BY_ONE else ()):
        for dim in range(ndim):
            yield _line(query, lists, [Shard(dim) if j == i else Replicate() for j in range(len(ndims))])


def _line(query: RuleQuery, lists: dict[str, tuple[int, ...]], chosen: Sequence[Placement]) -> PlacementRule:
    """The placement rule in which all lists of tensors, and the results, are placed like the parameters."""
    inputs = {leaf: p for leaves in lists.values() for leaf, p in zip(leaves, chosen, strict=False)}
    outputs: list[Placement] = []
    for returned in overload(query.op)._schema.returns:
        name = (returned.name or "").removesuffix("_out")
        outputs += [inputs.get(leaf, Replicate()) for leaf in query.leaves(name)]
    return query.line(inputs, outputs)


_OTHER_RULES = with_variants(
    rules("pointwise", "of a function of one number that neither adds up nor keeps the order", UNARY, elementwise()),
    rules("pointwise", "of two numbers; an integer quotient, a remainder and a power are not linear", BINARY,
          elementwise()),
    rules("pointwise", "a comparison of parts says nothing of the whole", COMPARED, elementwise()),
    rules("pointwise", "bits of a sum are no sum of bits", BITS, elementwise()),
    rules("pointwise", "a polynomial of one number, and its degree", POLYNOMIALS, elementwise()),
    rules("pointwise", "as aten's of that name", PRIMS, elementwise()),
    rules("fused", "a step of each element by itself",
          [f"aten._fused_{optimizer}.{which}" for optimizer in STEPS for which in ("default", "tensor_lr")],
          optimizer_step),
    but=[f"aten._fused_{optimizer}.{which}" for optimizer in STEPS for which in ("out", "tensor_lr_out")],
)  # fmt: skip
RULES: tuple[OpRule, ...] = (*_LINEAR_RULES, *_OTHER_RULES)
