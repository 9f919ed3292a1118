"""Ops that are linear in some operands, and ops that choose among their operands' elements."""

import pytest
import torch

from localtensor.layout.spec import PARTIAL_KINDS
from strategies.ops.lib.elementwise import cast_commutes
from strategies.ops.pointwise.linear import RULES
from tests.strategies.cases import numbers, sample
from tests.strategies.ops import held

X, Y = numbers(4), numbers(4).flip(0)
WHOLE = numbers(4, dtype=torch.int64)
FLAGS, NEVER = X > 0, numbers(40) > 9
CUT, CUT2, CUT3 = "S(0) -> S(0)", "S(0), S(0) -> S(0)", "S(0), S(0), S(0) -> S(0)"
AVERAGES = ["P(avg), P(avg) -> P(avg)", "P(avg), R -> P(avg)", "R, P(avg) -> P(avg)"]

LINES = [
    (sample("add.Tensor", X, Y), [CUT2, "P(sum), P(sum) -> P(sum)", *AVERAGES,
     *(f"{p} -> P({k})" for k in ("max", "min") for p in (f"P({k}), R", f"R, P({k})"))]),
    (sample("where.ScalarSelf", FLAGS, 2, WHOLE), [CUT2, "R, P(max) -> P(max)", "R, P(min) -> P(min)"]),
    (sample("sub.Tensor", X, Y, alpha=2), [CUT2, "P(sum), P(sum) -> P(sum)", *AVERAGES, "P(max), R -> P(max)",
     "P(min), R -> P(min)", "R, P(max) -> P(min)", "R, P(min) -> P(max)"]),
    (sample("rsub.Tensor", X, Y, alpha=2), [CUT2, "P(sum), P(sum) -> P(sum)", *AVERAGES, "P(max), R -> P(min)",
     "P(min), R -> P(max)", "R, P(max) -> P(max)", "R, P(min) -> P(min)"]),
    (sample("add.Tensor", WHOLE, WHOLE), [CUT2, "P(sum), P(sum) -> P(sum)"]),
    (sample("add_.Tensor", X, Y, alpha=0), [CUT2, "P(sum), P(sum) -> P(sum)", *AVERAGES[:2]]),
    (sample("add.Scalar", X, 2.0), [CUT, "P(avg) -> P(avg)", "P(max) -> P(max)", "P(min) -> P(min)"]),
    (sample("mul.Tensor", X, Y), [CUT2, "P(product), P(product) -> P(product)",
     *(f"{p} -> P({k})" for k in ("sum", "avg") for p in (f"P({k}), R", f"R, P({k})"))]),
    (sample("mul.Scalar", X, -2.0), [CUT, "P(+) -> P(+)", "P(max) -> P(min)", "P(min) -> P(max)"]),
    (sample("div.Tensor", X, Y + 3), [CUT2, "P(sum), R -> P(sum)", "P(avg), R -> P(avg)"]),
    (sample("div.Tensor", FLAGS, Y + 3), [CUT2]),
    (sample("neg.default", WHOLE), [CUT, "P(sum) -> P(sum)"]),
    (sample("lerp.Tensor", X, Y, X), [CUT3, "P(sum), P(sum), R -> P(sum)", "P(avg), P(avg), R -> P(avg)",
     "P(avg), R, R -> P(avg)", "R, P(avg), R -> P(avg)"]),
    (sample("threshold_backward.default", X, Y, 0.0), [CUT2, "P(sum), R -> P(sum)", "P(avg), R -> P(avg)"]),
    (sample("add.Tensor", FLAGS, ~FLAGS), [CUT2, "P(sum), P(sum) -> P(sum)", "P(max), P(max) -> P(max)",
     *(f"{p} -> P({k})" for k in ("sum", "product", "max", "min") for p in (f"P({k}), R", f"R, P({k})"))]),
    (sample("_prelu_kernel_backward.default", X, Y, X), ["S(0), S(0), S(0) -> S(0), S(0)",
     "P(sum), R, R -> P(sum), P(sum)", "P(avg), R, R -> P(avg), P(avg)"]),
    (sample("clone.default", X), [CUT, "P(*) -> P(*)"]),
    (sample("clone.default", WHOLE), [CUT, *(f"P({k}) -> P({k})" for k in ("sum", "product", "max", "min"))]),
    (sample("_to_copy.default", X.bfloat16(), dtype=torch.float32), [CUT, "P(*) -> P(*)"]),
    (sample("_to_copy.default", X.float(), dtype=torch.float64), [CUT, "P(*) -> P(*)"]),
    (sample("_to_copy.default", X, dtype=torch.int64), [CUT]),
    (sample("_to_copy.default", WHOLE, dtype=torch.uint8), [CUT, "P(sum) -> P(sum)", "P(product) -> P(product)"]),
    (sample("where.self", FLAGS, X, Y), [CUT3, "R, P(sum), P(sum) -> P(sum)", "R, P(product), P(product) -> P(product)",
     *(f"R, {p} -> P({k})" for k in ("avg", "max", "min") for p in (f"P({k}), P({k})", f"P({k}), R", f"R, P({k})"))]),
    (sample("masked_fill.Scalar", X, FLAGS, 0), [CUT2, *(f"P({k}), R -> P({k})" for k in ("sum", "avg", "max", "min"))]),
    (sample("masked_fill.Scalar", X, FLAGS, 2.5), [CUT2, *(f"P({k}), R -> P({k})" for k in ("avg", "max", "min"))]),
]  # fmt: skip


@held.for_each_line_case(LINES)
def test_a_linear_or_choosing_op_has_just_these_lines_and_they_hold(one, texts):
    held.assert_lines(RULES, one, *texts)


TEMPTING = [
    ("what is replicated is added once for each rank", sample("add.Tensor", X, Y), "P(sum), R -> P(sum)", "the parts make"),
    ("what is taken away turns the order", sample("rsub.Tensor", X, Y), "P(max), R -> P(max)", "the parts make"),
    ("both of two ands are not in or", sample("add.Tensor", NEVER, NEVER), "P(min), P(min) -> P(min)", "the parts make"),
    ("a product of sums has more terms", sample("mul.Tensor", X, Y), "P(sum), P(sum) -> P(sum)", "the parts make"),
    ("a sum cannot be divided by its parts", sample("div.Tensor", X, Y + 3), "R, P(sum) -> P(sum)", "the parts make"),
    ("parts are cut off", sample("_to_copy.default", X * 9, dtype=torch.int64), "P(sum) -> P(sum)", "the parts make"),
    ("a scale below zero turns the order", sample("mul.Scalar", X, -2.0), "P(max) -> P(max)", "the parts make"),
    ("the fill is added once for each rank", sample("masked_fill.Scalar", X, FLAGS, 2.5), "P(sum), R -> P(sum)", "make"),
]  # fmt: skip


@pytest.mark.parametrize(("why", "one", "text", "because"), TEMPTING, ids=[case[0] for case in TEMPTING])
def test_a_tempting_line_of_a_linear_op_is_wrong(why, one, text, because):
    held.assert_tempting(RULES, one, text, because)


def test_the_least_integer_is_its_own_negative_so_the_order_does_not_turn():
    least = torch.tensor([torch.iinfo(torch.int64).min])
    assert torch.equal(-least, least)
    assert not cast_commutes("max", torch.int64, torch.int32) and cast_commutes("max", torch.int32, torch.int64)


def test_booleans_become_numbers_only_where_no_two_of_them_add_up():
    assert {kind for kind in PARTIAL_KINDS if cast_commutes(kind, torch.bool, torch.float32)} == {
        "min",
        "max",
        "product",
    }
    assert not any(cast_commutes(kind, torch.float32, torch.bool) for kind in PARTIAL_KINDS)


@pytest.mark.parametrize("kind", PARTIAL_KINDS)
def test_a_cast_to_the_same_dtype_goes_with_all_that_reduces_it(kind):
    for dtype in (torch.float32, torch.int64, torch.complex64, torch.bool):
        unordered = dtype.is_complex and kind in ("min", "max")
        averaged = dtype in (torch.bool, torch.int64) and kind == "avg"
        assert cast_commutes(kind, dtype, dtype) == (not unordered and not averaged)
