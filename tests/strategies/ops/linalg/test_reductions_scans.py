"""Running sums, products and extremes."""

import torch

from strategies.ops.linalg.reductions import RULES
from tests.strategies.cases import numbers, sample
from tests.strategies.ops import held

Y = numbers(5, 4)
FLAGS = Y > 0

LINES = [
    (sample("cumsum.default", Y, 1), ["P(+) -> P(+)", "S(0) -> S(0)"]),
    (sample("cumsum.default", Y, -2, dtype=torch.float32), ["S(1) -> S(1)"]),
    (sample("cumsum.default", numbers(5, dtype=torch.int32), 0), []),
    (sample("cumsum.default", numbers(5, dtype=torch.int64), 0), ["P(sum) -> P(sum)"]),
    (sample("cumsum.default", FLAGS, 0), ["S(1) -> S(1)"]),
    (sample("cumsum.default", numbers(), 0), ["P(+) -> P(+)"]),
    (sample("cumsum.default", numbers(5), -1), ["P(+) -> P(+)"]),
    (sample("cumprod.default", Y, 0), ["P(product) -> P(product)", "S(1) -> S(1)"]),
    (sample("cumprod_.default", Y, 0), ["P(product) -> P(product)", "S(1) -> S(1)"]),
    (sample("cummax.default", Y, 1), ["S(0) -> S(0), S(0)"]),
    (sample("cummin.default", Y, 0), ["S(1) -> S(1), S(1)"]),
    (sample("logcumsumexp.default", Y, 1), ["S(0) -> S(0)"]),
]


@held.for_each_line_case(LINES)
def test_a_scan_has_just_these_lines_and_they_hold(one, texts):
    held.assert_lines(RULES, one, *texts)


TEMPTING = [
    ("each begins at nothing", sample("cumsum.default", Y, 0), "S(0) -> S(0)", "the shards make"),
    ("each begins at one", sample("cumprod.default", Y, 0), "S(0) -> S(0)", "the shards make"),
    ("products are not added", sample("cumprod.default", Y, 0), "P(sum) -> P(sum)", "the parts make"),
    ("sums are not compared", sample("cumsum.default", Y, 0), "P(max) -> P(max)", "the parts make"),
    ("places of the greatest part", sample("cummax.default", Y, 0), "P(max) -> P(max), P(max)", "make"),
]  # fmt: skip


@held.for_each_tempting_case(TEMPTING)
def test_a_tempting_line_of_a_scan_is_wrong_and_not_there(one, text, because):
    held.assert_tempting(RULES, one, text, because)
