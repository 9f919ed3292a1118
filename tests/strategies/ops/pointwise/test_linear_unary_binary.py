"""Elementwise ops: where they may be cut, and which of them keep the order of parts."""

import pytest
import torch

from strategies.ops.pointwise import linear, monotone
from tests.strategies.cases import numbers, sample
from tests.strategies.ops import held

RULES = (*linear.RULES, *monotone.RULES)
X, Y = numbers(5, 4), numbers(4)
WHOLE = numbers(5, dtype=torch.int64)
FLAGS = numbers(5) > 0
BOTH_EXTREMES = ["P(max) -> P(max)", "P(min) -> P(min)"]

LINES = [
    (sample("sin.default", X), ["S(0) -> S(0)", "S(1) -> S(1)"]),
    (sample("sin.default", numbers()), []),
    (sample("sin_.default", Y), ["S(0) -> S(0)"]),
    (sample("sin.out", Y, out=numbers(4)), ["S(0), S(0) -> S(0)"]),
    (sample("frexp.Tensor", Y), ["S(0) -> S(0), S(0)"]),
    (sample("atan2.default", X, Y), ["S(0), R -> S(0)", "S(1), S(0) -> S(1)"]),
    (sample("atan2.default", numbers(5, 1), numbers(1, 4)), ["S(0), R -> S(0)", "R, S(1) -> S(1)"]),
    (sample("atan2.default", numbers(1), numbers(1, 1)), ["S(0), S(1) -> S(1)", "R, S(0) -> S(0)"]),
    (sample("exp.default", Y), ["S(0) -> S(0)", *BOTH_EXTREMES]),
    (sample("log.default", Y.abs()), ["S(0) -> S(0)", "P(min) -> P(min)"]),
    (sample("erfc.default", Y), ["S(0) -> S(0)", "P(max) -> P(min)", "P(min) -> P(max)"]),
    (sample("sign.default", Y), ["S(0) -> S(0)"]),
    (sample("sign.default", WHOLE), ["S(0) -> S(0)", *BOTH_EXTREMES]),
    (sample("threshold.default", Y, 0.5, 0.5), ["S(0) -> S(0)", *BOTH_EXTREMES]),
    (sample("threshold.default", Y, 0.5, 0.75), ["S(0) -> S(0)"]),
    (sample("softplus.default", Y), ["S(0) -> S(0)"]),
    (sample("softplus.default", Y.float()), ["S(0) -> S(0)", *BOTH_EXTREMES]),
    (sample("leaky_relu.default", Y, -0.5), ["S(0) -> S(0)"]),
    (sample("clamp.default", Y, -0.5, 0.5), ["S(0) -> S(0)", *BOTH_EXTREMES]),
    (sample("bitwise_not.default", WHOLE), ["S(0) -> S(0)", "P(max) -> P(min)", "P(min) -> P(max)"]),
    (sample("logical_not.default", WHOLE), ["S(0) -> S(0)"]),
    (sample("maximum.default", Y, Y.flip(0)), ["S(0), S(0) -> S(0)", "P(max), P(max) -> P(max)",
     *(f"{p} -> P({k})" for k in ("max", "min") for p in (f"P({k}), R", f"R, P({k})"))]),
    (sample("fmax.default", Y, Y.flip(0)), ["S(0), S(0) -> S(0)"]),
    (sample("maximum.out", WHOLE, WHOLE, out=Y[:1].expand(5).clone()), ["S(0), S(0), S(0) -> S(0)"]),
]  # fmt: skip


@held.for_each_line_case(LINES)
def test_an_elementwise_op_has_just_these_lines_and_they_hold(one, texts):
    held.assert_lines(RULES, one, *texts)


TEMPTING = [
    ("what lies below may be larger in size", sample("abs.default", Y), "P(max) -> P(max)", "the parts make"),
    ("what lies below may have no logarithm", sample("log.default", Y.abs() + 0.1), "P(max) -> P(max)", "the parts make"),
    ("small values become large", sample("threshold.default", Y, 0.0, 2.0), "P(max) -> P(max)", "the parts make"),
    ("the greatest of two is not their sum", sample("maximum.default", Y, Y), "P(sum), P(sum) -> P(sum)", "the parts make"),
    ("a size of one is repeated, not cut", sample("atan2.default", X, numbers(1, 4)), "S(0), S(0) -> S(0)", "rank"),
]  # fmt: skip


@pytest.mark.parametrize(("why", "one", "text", "because"), TEMPTING, ids=[case[0] for case in TEMPTING])
def test_a_tempting_line_of_an_elementwise_op_is_wrong(why, one, text, because):
    held.assert_tempting(RULES, one, text, because)


def test_nan_becomes_a_number_by_sign_so_parts_on_both_sides_of_it_are_lost():
    nan, above = torch.tensor([torch.nan]), torch.tensor([5.0])
    assert torch.maximum(nan, above).isnan() and torch.maximum(nan.sign(), above.sign()) != nan.sign()
    assert all("P" not in str(line) for line in held.lines_of(RULES, sample("sign.default", Y)))


def test_every_dim_of_a_result_is_cut_in_exactly_one_way():
    one = sample("hypot.default", numbers(5, 1, 4), numbers(3, 1))
    assert {str(line) for line in held.lines_of(RULES, one)} == {
        "S(0), R -> S(0)",
        "R, S(0) -> S(1)",
        "S(2), R -> S(2)",
    }
