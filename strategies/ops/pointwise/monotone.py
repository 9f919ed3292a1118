"""Ops that keep or turn the order of numbers: the greatest or the least of parts goes through.

`f` that never falls has `f(max(a, b)) = max(f(a), f(b))`, and the same of the least; one that never rises swaps the two.
That must hold for every value a part can have, which is more than those of the whole: of a P(max) the other parts lie
anywhere below, of a P(min) anywhere above, -inf and inf among them, and one of them is NaN where the whole is NaN.  So

* `log` and `sqrt`, which are defined from some number on, let only the least through;
* `asin`, which is defined between two numbers, lets neither;
* `sign` and `nan_to_num`, which make a number of NaN, do so only for integers;
* `fmax`, by which a whole that is NaN is dropped and a part that is none is not, only for integers;
* `rsqrt` jumps from -inf to inf between the two zeros, the Bessel function i1 is NaN at -inf in torch: no lines;
* `neg` turns the order of floats, and not of integers: the least one is its own negative.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import Partial
from torch.distributed.tensor.placement_types import Placement

from strategies.ops.lib.elementwise import RANGES, Maker, carries, elementwise, operands, partial, real
from strategies.ops.lib.overload_variants import named, with_variants
from strategies.ops.semantics.rulebook import Ask, Entry, Line, rules

If = Callable[[Ask], bool]
EXTREMES = {"max": "min", "min": "max"}


def always(ask: Ask) -> bool:
    return True


def floats(ask: Ask) -> bool:
    """Numbers that do not wrap."""
    return all(meta.dtype.is_floating_point and real(meta.dtype) for meta in (*ask.tensors, *filter(None, ask.outputs)))


def whole(ask: Ask) -> bool:
    """Numbers among which there is no NaN."""
    return all(meta.dtype in RANGES or meta.dtype == torch.bool for meta in ask.tensors)


def rising(only: If = always, *, kinds: tuple[str, ...] = ("max", "min")) -> Maker:
    """Never falls, and NaN stays NaN, for calls of which `only` is true."""

    def lines(ask: Ask) -> Iterator[Line]:
        yield from _moved(ask, {kind: kind for kind in kinds} if only(ask) else {})

    return lines


def falling(only: If = always, *, kinds: tuple[str, ...] = ("max", "min")) -> Maker:
    """Never rises, and NaN stays NaN."""

    def lines(ask: Ask) -> Iterator[Line]:
        yield from _moved(ask, {kind: EXTREMES[kind] for kind in kinds} if only(ask) else {})

    return lines


def _moved(ask: Ask, kinds: dict[str, str]) -> Iterator[Line]:
    result = ask.outputs[0]
    for kind, gives in kinds.items():
        if result is not None and carries(kind, ask.tensors[0].dtype, result.dtype):
            yield partial(ask, [0], kind, gives)


def shifted(first: str, second: str) -> Maker:
    """`first + alpha * second` or their difference: a part of either, moved by as much on every rank.

    Of floats: the sum of integers may wrap.
    """

    def lines(ask: Ask) -> Iterator[Line]:
        alpha = ask.get("alpha")
        sign = _sign(1 if alpha is None else alpha)
        minus = ask.op.split(".")[1] != "add"
        turned = ask.op.split(".")[1] == "rsub"
        signs = {first: -sign if turned else 1, second: 1 if turned else -sign if minus else sign}
        if floats(ask) and sign and _finite(ask.get(second)):
            for name in (first, second):
                yield from _ordered(ask, name, signs[name])

    return lines


def scaled(ask: Ask) -> Iterator[Line]:
    """Times or by a number that is not zero.  By a tensor it may have either sign, so then there is no line."""
    number = ask.get("other")
    if ask.leaf("other") is None and floats(ask) and _finite(number):
        yield from _ordered(ask, "self", _sign(number))


def _ordered(ask: Ask, name: str, sign: int) -> Iterator[Line]:
    leaf = ask.leaf(name)
    for kind, other in EXTREMES.items() if leaf is not None and sign else ():
        yield partial(ask, [leaf] if leaf is not None else [], kind, kind if sign > 0 else other)


def _sign(number: Any) -> int:
    return 0 if not isinstance(number, (int, float)) or math.isnan(number) else (number > 0) - (number < 0)


def _finite(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def lattice(greater: bool | None, *, only: If = always) -> Maker:
    """`maximum` (greater), `minimum` (not), and others that rise in each of the first two operands (None).

    The greatest goes into the smaller of two, and the least into the greater, one operand at a time: these distribute.
    """

    def lines(ask: Ask) -> Iterator[Line]:
        (leaves, _), result = operands(ask, list(ask.arguments)[:2]), ask.outputs[0]
        if result is None or not only(ask):
            return
        for kind in EXTREMES:
            able = [leaf for leaf in leaves if carries(kind, ask.tensors[leaf].dtype, result.dtype)]
            yield from (partial(ask, [leaf], kind) for leaf in able)
            if len(able) == 2 and greater is not None and greater == (kind == "max"):
                yield partial(ask, able, kind)

    return lines


def bounded(ask: Ask) -> Iterator[Line]:
    """`clamp` by tensors: rises in each operand."""
    leaves, result = operands(ask, ("self", "min", "max"))[0], ask.outputs[0]
    for leaf in leaves:
        for kind in EXTREMES:
            if result is not None and carries(kind, ask.tensors[leaf].dtype, result.dtype):
                yield partial(ask, [leaf], kind)


BOOLEANS = {"sum": "product", "product": "sum", "max": "min", "min": "max"}
"""Reductions of booleans: "or" or "and".  What is not in one is in the other."""


def inverted(ask: Ask) -> Iterator[Line]:
    """Not this or that is neither."""
    if ask.tensors and ask.tensors[0].dtype == torch.bool:
        for kind, gives in BOOLEANS.items():
            inputs: dict[int, Placement] = {0: Partial(kind)}
            yield ask.line(inputs, [Partial(gives)])


def above(name: str, least: float) -> If:
    """Whether that argument is a finite number above this one."""

    def lines(ask: Ask) -> bool:
        value = ask.get(name)
        return isinstance(value, (int, float)) and math.isfinite(value) and value > least

    return lines


def both(*conditions: If) -> If:
    return lambda ask: all(condition(ask) for condition in conditions)


def bent(ask: Ask) -> bool:
    """Whether `softplus` falls by less than rounds off where it turns into the straight line."""
    result, beta, threshold = ask.outputs[0], ask["beta"], ask["threshold"]
    if result is None or not (floats(ask) and beta > 0 and threshold > 0):
        return False
    return math.exp(-min(threshold, 700.0)) <= torch.finfo(result.dtype).eps


def in_range(ask: Ask) -> bool:
    """Whether `round` multiplies and divides by a number, and not by infinity, which makes NaN of 0."""
    return floats(ask) and abs(ask["decimals"]) <= math.log10(torch.finfo(ask.tensors[0].dtype).max)


def ordered_bounds(ask: Ask) -> bool:
    return bool(ask["min_val"] <= ask["max_val"])


def lowered(ask: Ask) -> bool:
    """Whether what `threshold` puts in the place of small values is no greater than the least that it keeps."""
    return bool(ask["value"] <= ask["threshold"])


RISING = named("""asinh atan ceil deg2rad erf exp exp2 expm1 floor rad2deg relu round sigmoid sinh special_log_ndtr tanh trunc
    selu relu6 hardsigmoid""")
FROM_A_NUMBER_ON = named("sqrt log log2 log10 log1p acosh")
BESSEL = named("""special_modified_bessel_k0 special_modified_bessel_k1 special_scaled_modified_bessel_k0
    special_scaled_modified_bessel_k1""")

RULES: tuple[Entry, ...] = with_variants(
    rules("order", "never falls", [*RISING, "prims.exp2.default", "prims.trunc.default"], elementwise(rising())),
    rules("order", "never falls, but makes 0 of NaN", ["aten.sign.default", "aten.sgn.default", "aten.nan_to_num.default",
          "prims.sign.default"], elementwise(rising(whole))),
    rules("order", "never rises", ["aten.erfc.default", "aten.special_erfcx.default", "prims.erfcx.default"],
          elementwise(falling())),
    rules("order", "never falls where it is defined, and what is above the least of parts is, too",
          [*FROM_A_NUMBER_ON, "prims.log2.default"], elementwise(rising(kinds=("min",)))),
    rules("order", "never rises where it is defined, on positive numbers", BESSEL,
          elementwise(falling(kinds=("min",)))),
    rules("order", "never falls, whatever the bounds", ["aten.clamp.default", "aten.clip.default",
          "aten.clamp_min.default", "aten.clamp_max.default"], elementwise(rising())),
    rules("order", "never falls if the lower bound is the lower one", ["aten.hardtanh.default"],
          elementwise(rising(ordered_bounds))),
    rules("order", "never falls if what is small becomes no more than what is not", ["aten.threshold.default"],
          elementwise(rising(lowered))),
    rules("order", "never falls if the slope of negative numbers is above zero", ["aten.leaky_relu.default"],
          elementwise(rising(above("negative_slope", 0)))),
    rules("order", "never falls if all factors are above zero", ["aten.elu.default"],
          elementwise(rising(both(above("alpha", 0), above("scale", 0), above("input_scale", 0))))),
    rules("order", "never falls if alpha is above zero", ["aten.celu.default"], elementwise(rising(above("alpha", 0)))),
    rules("order", "never falls if it turns into a line late enough", ["aten.softplus.default"], elementwise(rising(bent))),
    rules("order", "what is not between two bounds stays in order", ["aten.hardshrink.default",
          "aten.softshrink.default"], elementwise(rising())),
    rules("order", "never falls if the power of ten by which it rounds is a number of its dtype",
          ["aten.round.decimals"], elementwise(rising(in_range))),
    rules("order", "max(a, b), by which the least of parts goes into one operand, too", ["aten.maximum.default",
          "aten.max.other", "aten.clamp_min.Tensor", "prims.maximum.default"], elementwise(lattice(True))),
    rules("order", "min(a, b), by which the greatest of parts goes into one operand, too", ["aten.minimum.default",
          "aten.min.other", "aten.clamp_max.Tensor", "prims.minimum.default"], elementwise(lattice(False))),
    rules("order", "max(a, b) that drops NaN", ["aten.fmax.default", "prims.fmax.default"],
          elementwise(lattice(True, only=whole))),
    rules("order", "min(a, b) that drops NaN", ["aten.fmin.default", "prims.fmin.default"],
          elementwise(lattice(False, only=whole))),
    rules("order", "rises in each operand", ["aten.logaddexp.default", "aten.logaddexp2.default"],
          elementwise(lattice(None))),
    rules("order", "min(max(self, min), max) rises in each operand", ["aten.clamp.Tensor", "aten.clip.Tensor"],
          elementwise(bounded)),
    rules("order", "~x is -x - 1; of booleans, not", ["aten.bitwise_not.default", "prims.bitwise_not.default"],
          elementwise(falling(lambda ask: ask.tensors[0].dtype in RANGES), inverted)),
    rules("order", "of booleans, not; other numbers are on either side of zero", ["aten.logical_not.default"],
          elementwise(inverted)),
)  # fmt: skip
