"""Rules of elementwise ops that are neither linear nor monotone, and of fused optimizer steps.

An optimizer steps every parameter elementwise, together with its gradient and its state.  The number of steps, the
learning rate, the gradient scale and its overflow flag are one number each, replicated.  A partial sum of a gradient is
not a gradient: its square is not a sum of squares.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from strategies.model.rule import overload
from strategies.ops.lib.elementwise import elementwise
from strategies.ops.lib.overload_variants import LONGEST_LIST_ONE_BY_ONE, overloads_of, with_variants
from strategies.ops.semantics.rule_registry import OpRule, PlacementRule, RuleQuery, rules

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


RULES: tuple[OpRule, ...] = with_variants(
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
