"""Softmax: rows go by themselves, and gradients are linear in gradients."""

import torch

from strategies.ops.linalg.reductions import RULES
from tests.strategies.cases import numbers, sample
from tests.strategies.ops import held

X, Y = numbers(5, 4), numbers(5, 4, seed=1).softmax(1)
LINES = [
    (sample("_softmax.default", X, -1, False), ["S(0) -> S(0)"]),
    (sample("_log_softmax.default", numbers(2, 3, 4), 1, False), ["S(0) -> S(0)", "S(2) -> S(2)"]),
    (sample("_softmax.default", numbers(), 0, False), []),
    (sample("softmax.int", X, 0, torch.float32), ["S(1) -> S(1)"]),
    (sample("_safe_softmax.default", X - torch.inf, 0), ["S(1) -> S(1)"]),
    (sample("_softmax_backward_data.default", X, Y, 1, torch.float64),
     ["S(0), S(0) -> S(0)", "P(+), R -> P(+)"]),
    (sample("_log_softmax_backward_data.default", X, Y.log(), 0, torch.float64),
     ["S(1), S(1) -> S(1)", "P(+), R -> P(+)"]),
]  # fmt: skip
TEMPTING = [
    ("each piece adds up to 1", sample("_softmax.default", X, 0, False), "S(0) -> S(0)", "the shards make"),
    ("a shift of all is no shift of parts", sample("_log_softmax.default", X, 0, False), "P(sum) -> P(sum)", "the parts make"),
    ("the greatest is not exponential", sample("_softmax.default", X, 0, False), "P(max) -> P(max)", "the parts make"),
    ("the result is not linear", sample("_softmax_backward_data.default", X, Y, 1, torch.float64),
     "R, P(sum) -> P(sum)", "the parts make"),
    ("rows of the gradient are summed", sample("_softmax_backward_data.default", X, Y, 1, torch.float64),
     "S(1), S(1) -> S(1)", "the shards make"),
]  # fmt: skip


@held.for_each_line_case(LINES)
def test_a_softmax_has_just_these_lines_and_they_hold(one, texts):
    held.assert_lines(RULES, one, *texts)


@held.for_each_tempting_case(TEMPTING)
def test_a_tempting_line_of_a_softmax_is_wrong_and_not_there(one, text, because):
    held.assert_tempting(RULES, one, text, because)
