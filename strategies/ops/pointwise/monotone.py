"""Rules of monotone elementwise ops, which commute with maxima and minima of partial values.

An increasing `f` has `f(max(a, b)) = max(f(a), f(b))`, and the same for min; a decreasing one swaps the two.  That must
hold for every value that a part may have.  The other parts of a P(max) may be any smaller numbers, those of a P(min)
any larger ones, infinities included, and one of them is NaN where the whole is NaN.  So

* `log` and `sqrt`, which are defined from some number on, commute with min only;
* `asin`, which is defined on an interval, commutes with neither;
* `sign` and `nan_to_num`, which turn NaN into a number, do so only for integers;
* `fmax`, which ignores NaN, only for integers;
* `rsqrt` jumps from -inf to inf between the two zeros, and the Bessel function i1 is NaN at -inf in torch: no rules;
* `neg` reverses the order of floats, and not of integers, whose minimum is its own negative.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

from strategies.ops.lib.elementwise import (
    RANGES,
    RuleMaker,
    cast_commutes,
    elementwise,
    is_float_or_complex,
    partial_rule,
    tensor_operands,
)
from strategies.ops.lib.overload_variants import overloads_of, with_variants
from strategies.ops.semantics.rule_registry import OpRule, PlacementRule, RuleQuery, rules

Condition = Callable[[RuleQuery], bool]
EXTREMES = {"max": "min", "min": "max"}


def always(query: RuleQuery) -> bool:
    return True


def are_floats(query: RuleQuery) -> bool:
    """Whether all tensors are floats, which do not wrap."""
    dtypes = [meta.dtype for meta in (*query.tensors, *filter(None, query.outputs))]
    return all(dtype.is_floating_point and is_float_or_complex(dtype) for dtype in dtypes)


def are_integers(query: RuleQuery) -> bool:
    """Whether all tensors are integers or booleans, which have no NaN."""
    return all(meta.dtype in RANGES or meta.dtype == torch.bool for meta in query.tensors)


def rising(only: Condition = always, *, kinds: tuple[str, ...] = ("max", "min")) -> RuleMaker:
    """An increasing op that keeps NaN, for calls for which `only` is true."""

    def lines(query: RuleQuery) -> Iterator[PlacementRule]:
        yield from _moved(query, {kind: kind for kind in kinds} if only(query) else {})

    return lines


def falling(only: Condition = always, *, kinds: tuple[str, ...] = ("max", "min")) -> RuleMaker:
    """A decreasing op that keeps NaN, for calls for which `only` is true."""

    def lines(query: RuleQuery) -> Iterator[PlacementRule]:
        yield from _moved(query, {kind: EXTREMES[kind] for kind in kinds} if only(query) else {})

    return lines


def _moved(query: RuleQuery, kinds: dict[str, str]) -> Iterator[PlacementRule]:
    result = query.outputs[0]
    for kind, gives in kinds.items():
        if result is not None and cast_commutes(kind, query.tensors[0].dtype, result.dtype):
            yield partial_rule(query, [0], kind, gives)


def affine(query: RuleQuery) -> Iterator[PlacementRule]:
    """`self + alpha * other`, or their difference, with one of them partial; for floats, since integers may wrap."""
    alpha = query.get("alpha")
    sign = _sign(1 if alpha is None else alpha)
    minus = query.op.split(".")[1] != "add"
    turned = query.op.split(".")[1] == "rsub"
    signs = {"self": -sign if turned else 1, "other": 1 if turned else -sign if minus else sign}
    if are_floats(query) and sign and _finite(query.get("other")):
        for name in ("self", "other"):
            yield from _ordered(query, name, signs[name])


def scaled_by_number(query: RuleQuery) -> Iterator[PlacementRule]:
    """A product or quotient with a number other than zero.  The sign of a tensor is unknown: no rule then."""
    number = query.get("other")
    if query.leaf("other") is None and are_floats(query) and _finite(number):
        yield from _ordered(query, "self", _sign(number))


def _ordered(query: RuleQuery, name: str, sign: int) -> Iterator[PlacementRule]:
    leaf = query.leaf(name)
    for kind, other in EXTREMES.items() if leaf is not None and sign else ():
        yield partial_rule(query, [leaf] if leaf is not None else [], kind, kind if sign > 0 else other)


def _sign(number: object) -> int:
    return 0 if not isinstance(number, (int, float)) or math.isnan(number) else (number > 0) - (number < 0)


def _finite(value: object) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def min_or_max(greater: bool | None, *, only: Condition = always) -> RuleMaker:
    """`maximum` (`greater`), `minimum` (not), and other ops that increase in each of the first two operands (None).

    Max distributes over `minimum`, and min over `maximum`, one operand at a time.
    """

    def lines(query: RuleQuery) -> Iterator[PlacementRule]:
        (leaves, _), result = tensor_operands(query, list(query.arguments)[:2]), query.outputs[0]
        if result is None or not only(query):
            return
        for kind in EXTREMES:
            able = [leaf for leaf in leaves if cast_commutes(kind, query.tensors[leaf].dtype, result.dtype)]
            yield from (partial_rule(query, [leaf], kind) for leaf in able)
            if len(able) == 2 and greater is not None and greater == (kind == "max"):
                yield partial_rule(query, able, kind)

    return lines


def clamp_by_tensors(query: RuleQuery) -> Iterator[PlacementRule]:
    """`clamp` by tensors, which increases in each operand."""
    leaves, result = tensor_operands(query, ("self", "min", "max"))[0], query.outputs[0]
    for leaf in leaves:
        for kind in EXTREMES:
            if result is not None and cast_commutes(kind, query.tensors[leaf].dtype, result.dtype):
                yield partial_rule(query, [leaf], kind)


NEGATED_REDUCTION = {"sum": "product", "product": "sum", "max": "min", "min": "max"}
"""Reductions of booleans, "or" and "and", each with the one for negated values."""


def negated_booleans(query: RuleQuery) -> Iterator[PlacementRule]:
    """Negation of booleans, which swaps "or" and "and"."""
    if query.tensors and query.tensors[0].dtype == torch.bool:
        for kind, gives in NEGATED_REDUCTION.items():
            yield partial_rule(query, [0], kind, gives)


def is_positive(name: str) -> Condition:
    """The condition that an argument is a finite number above 0."""

    def condition(query: RuleQuery) -> bool:
        value = query.get(name)
        return isinstance(value, (int, float)) and math.isfinite(value) and value > 0

    return condition


def all_of(*conditions: Condition) -> Condition:
    return lambda query: all(condition(query) for condition in conditions)


def softplus_is_monotone(query: RuleQuery) -> bool:
    """Whether the drop of `softplus` at its threshold, where it becomes linear, is below the rounding error."""
    result, beta, threshold = query.outputs[0], query["beta"], query["threshold"]
    if result is None or not (are_floats(query) and beta > 0 and threshold > 0):
        return False
    return math.exp(-min(threshold, 700.0)) <= torch.finfo(result.dtype).eps


def round_is_finite(query: RuleQuery) -> bool:
    """Whether the power of ten by which `round` multiplies is finite; otherwise it turns 0 into NaN."""
    return are_floats(query) and abs(query["decimals"]) <= math.log10(torch.finfo(query.tensors[0].dtype).max)


def ordered_bounds(query: RuleQuery) -> bool:
    return bool(query["min_val"] <= query["max_val"])


def threshold_is_monotone(query: RuleQuery) -> bool:
    """Whether the replacement of `threshold` for small values is at most the threshold."""
    return bool(query["value"] <= query["threshold"])


RISING = overloads_of("""asinh atan ceil deg2rad erf exp exp2 expm1 floor rad2deg relu round sigmoid sinh special_log_ndtr tanh trunc
    selu relu6 hardsigmoid""")
FROM_A_NUMBER_ON = overloads_of("sqrt log log2 log10 log1p acosh")
BESSEL = overloads_of("""special_modified_bessel_k0 special_modified_bessel_k1 special_scaled_modified_bessel_k0
    special_scaled_modified_bessel_k1""")

RULES: tuple[OpRule, ...] = with_variants(
    rules("order", "never falls", [*RISING, "prims.exp2.default", "prims.trunc.default"], elementwise(rising())),
    rules("order", "never falls, but makes 0 of NaN",
          ["aten.sign.default", "aten.sgn.default", "aten.nan_to_num.default", "prims.sign.default"],
          elementwise(rising(are_integers))),
    rules("order", "never rises", ["aten.erfc.default", "aten.special_erfcx.default", "prims.erfcx.default"],
          elementwise(falling())),
    rules("order", "never falls where it is defined, and what is above the least of parts is, too",
          [*FROM_A_NUMBER_ON, "prims.log2.default"], elementwise(rising(kinds=("min",)))),
    rules("order", "never rises where it is defined, on positive numbers", BESSEL,
          elementwise(falling(kinds=("min",)))),
    rules("order", "never falls, whatever the bounds",
          ["aten.clamp.default", "aten.clip.default", "aten.clamp_min.default", "aten.clamp_max.default"],
          elementwise(rising())),
    rules("order", "never falls if the lower bound is the lower one", ["aten.hardtanh.default"],
          elementwise(rising(ordered_bounds))),
    rules("order", "never falls if what is small becomes no more than what is not", ["aten.threshold.default"],
          elementwise(rising(threshold_is_monotone))),
    rules("order", "never falls if the slope of negative numbers is above zero", ["aten.leaky_relu.default"],
          elementwise(rising(is_positive("negative_slope")))),
    rules("order", "never falls if all factors are above zero", ["aten.elu.default"],
          elementwise(rising(all_of(is_positive("alpha"), is_positive("scale"), is_positive("input_scale"))))),
    rules("order", "never falls if alpha is above zero",
          ["aten.celu.default"], elementwise(rising(is_positive("alpha")))),
    rules("order", "never falls if it turns into a line late enough",
          ["aten.softplus.default"], elementwise(rising(softplus_is_monotone))),
    rules("order", "what is not between two bounds stays in order",
          ["aten.hardshrink.default", "aten.softshrink.default"], elementwise(rising())),
    rules("order", "never falls if the power of ten by which it rounds is a number of its dtype",
          ["aten.round.decimals"], elementwise(rising(round_is_finite))),
    rules("order", "max(a, b), by which the least of parts goes into one operand, too",
          ["aten.maximum.default", "aten.max.other", "aten.clamp_min.Tensor", "prims.maximum.default"],
          elementwise(min_or_max(True))),
    rules("order", "min(a, b), by which the greatest of parts goes into one operand, too",
          ["aten.minimum.default", "aten.min.other", "aten.clamp_max.Tensor", "prims.minimum.default"],
          elementwise(min_or_max(False))),
    rules("order", "max(a, b) that drops NaN", ["aten.fmax.default", "prims.fmax.default"],
          elementwise(min_or_max(True, only=are_integers))),
    rules("order", "min(a, b) that drops NaN", ["aten.fmin.default", "prims.fmin.default"],
          elementwise(min_or_max(False, only=are_integers))),
    rules("order", "rises in each operand", ["aten.logaddexp.default", "aten.logaddexp2.default"],
          elementwise(min_or_max(None))),
    rules("order", "min(max(self, min), max) rises in each operand", ["aten.clamp.Tensor", "aten.clip.Tensor"],
          elementwise(clamp_by_tensors)),
    rules("order", "~x is -x - 1; of booleans, not", ["aten.bitwise_not.default", "prims.bitwise_not.default"],
          elementwise(falling(lambda query: query.tensors[0].dtype in RANGES), negated_booleans)),
    rules("order", "of booleans, not; other numbers are on either side of zero", ["aten.logical_not.default"],
          elementwise(negated_booleans)),
)  # fmt: skip
