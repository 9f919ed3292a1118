"""Ops whose result does not hang on what was there: constants, copies, random numbers, and fused optimizer steps."""

import pytest
import torch

from strategies.ops.pointwise import creation, linear
from tests.strategies.cases import numbers, sample
from tests.strategies.ops import held

X, Y, Z = numbers(5, 4), numbers(4), numbers(4).flip(0)
CUTS = ["S(0) -> S(0)", "S(1) -> S(1)"]
WHOLE = ["P(*) -> R"]

LINES = [
    (sample("zeros_like.default", X), [*CUTS, *WHOLE, "P(*) -> P(*)"]),
    (sample("ones_like.default", X), [*CUTS, *WHOLE, *(f"P({k}) -> P({k})" for k in ("avg", "min", "max", "product"))]),
    (sample("full_like.default", X, 2.5), [*CUTS, *WHOLE, *(f"P({k}) -> P({k})" for k in ("avg", "min", "max"))]),
    (sample("zero_.default", Y), ["S(0) -> S(0)", "P(*) -> P(*)"]),
    (sample("fill_.Scalar", Y, 2.0), ["S(0) -> S(0)", *(f"P({k}) -> P({k})" for k in ("avg", "min", "max"))]),
    (sample("copy_.default", Y.float(), Z), ["S(0), S(0) -> S(0)", "P(avg), R -> P(avg)", "P(min), R -> P(min)",
     "P(max), R -> P(max)", "P(*), P(*) -> P(*)"]),
    (sample("new_zeros.default", Y, [6]), ["S(0) -> R", "R -> S(0)", *WHOLE, "P(*) -> P(*)"]),
    (sample("new_zeros.default", Y, [4]), ["S(0) -> R", "R -> S(0)", "S(0) -> S(0)", *WHOLE, "P(*) -> P(*)"]),
]  # fmt: skip


@held.for_each_line_case(LINES)
def test_what_is_made_anew_has_just_these_lines_and_they_hold(one, texts):
    held.assert_lines(creation.RULES, one, *texts)


TEMPTING = [
    ("the constant is added once for each rank", sample("fill_.Scalar", Y, 2.0), "P(sum) -> P(sum)", "the parts make"),
    ("the constant is multiplied with itself",
        sample("fill_.Scalar", Y, 2.0),
        "P(product) -> P(product)",
        "the parts make"),
    ("ones are counted", sample("ones_like.default", Y), "P(sum) -> P(sum)", "the parts make"),
    ("what is copied is added once for each rank",
        sample("copy_.default", Y, Z),
        "P(sum), R -> P(sum)",
        "the parts make"),
]  # fmt: skip


@pytest.mark.parametrize(("why", "one", "text", "because"), TEMPTING, ids=[case[0] for case in TEMPTING])
def test_a_tempting_line_of_a_constant_is_wrong(why, one, text, because):
    held.assert_tempting(creation.RULES, one, text, because)


def test_random_numbers_are_cut_and_never_parts():
    for one in (sample("bernoulli.p", X, 0.5), sample("uniform_.default", X)):
        held.assert_lines(creation.RULES, one, *CUTS)
    held.assert_lines(creation.RULES, sample("rand_like.default", X), *CUTS, *WHOLE)
    held.assert_lines(creation.RULES, sample("multinomial.default", X.abs(), 2), "S(0) -> S(0)")


def test_dropout_of_nothing_has_no_mask_so_each_rank_has_some_elements():
    rule = creation.RULES
    assert {str(line) for line in held.lines_of(rule, sample("native_dropout.default", Y, 0.5, True))} == {
        "S(0) -> S(0), S(0), filled"
    }
    assert torch.ops.aten.native_dropout(torch.empty(0), 0.5, True)[1].dtype != torch.bool


STEP = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8, "amsgrad": False, "maximize": False}


def _step(op, shapes):
    lists = [[numbers(*shape, seed=seed).abs() for shape in shapes] for seed in range(4)]
    counts = [torch.tensor(1.0, dtype=torch.float64) for _ in shapes]
    return sample(op, *lists, [], counts, **STEP)


def test_a_fused_step_cuts_a_parameter_with_all_its_state():
    one = _step("_fused_adam_.default", [(5, 4), (3,)])
    state = ["S(0), S(0)", "S(1), R", "S(0), R", "R, S(0)"]
    held.assert_lines(linear.RULES, one, *(f"{', '.join([s] * 4)}, R, R -> " for s in state))


def test_a_fused_step_that_writes_nothing_gives_its_state_as_it_came():
    one = _step("_fused_adam.default", [(5, 4)])
    held.assert_lines(
        linear.RULES, one, *(f"{', '.join([s] * 4)}, R -> {', '.join([s] * 4)}" for s in ("S(0)", "S(1)"))
    )


def test_a_gradient_in_parts_cannot_be_stepped_with():
    parts = "R, P(sum), R, R, R -> R, P(sum), R, R"
    held.assert_tempting(linear.RULES, _step("_fused_adam.default", [(5, 4)]), parts, "rank")
