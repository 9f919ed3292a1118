"""Reductions: which pieces' results are parts of the whole one."""

import math

import torch

from strategies.ops.linalg.reductions import RULES
from tests.strategies.cases import assert_wrong, numbers, sample
from tests.strategies.ops import held

X, N = numbers(4, 6), numbers(4, 6, dtype=torch.int64)
FLAGS, BYTES = X > 0, (X > 0).to(torch.uint8)
CHOSEN = ["median.dim", "mode.default", "max.dim"]
LINES = [
    (sample("_is_all_true.default", numbers(4) > 0), ["S(0) -> P(min)", "S(0) -> P(product)", "P(min) -> P(min)",
     "P(product) -> P(product)"]),
    (sample("sum.dim_IntList", X, [-1]), ["S(0) -> S(0)", "S(1) -> P(sum)", "P(+) -> P(+)"]),
    (sample("sum.dim_IntList", X, [0]), ["S(1) -> S(0)", "S(0) -> P(sum)", "P(+) -> P(+)"]),
    (sample("sum.dim_IntList", X, [0], True), ["S(1) -> S(1)", "S(0) -> P(sum)", "P(+) -> P(+)"]),
    (sample("sum.dim_IntList", X, []), ["S(0) -> P(sum)", "S(1) -> P(sum)", "P(+) -> P(+)"]),
    (sample("sum.dim_IntList", X, None), ["S(0) -> P(sum)", "S(1) -> P(sum)", "P(+) -> P(+)"]),
    (sample("sum.default", numbers()), ["P(+) -> P(+)"]),
    (sample("sum.default", N), ["S(0) -> P(sum)", "S(1) -> P(sum)", "P(sum) -> P(sum)"]),
    (sample("sum.default", FLAGS), ["S(0) -> P(sum)", "S(1) -> P(sum)"]),
    (sample("sum.default", FLAGS, dtype=torch.bool), ["S(0) -> P(sum)", "S(1) -> P(sum)"]),
    (sample("sum.default", N.int()), ["S(0) -> P(sum)", "S(1) -> P(sum)"]),
    (sample("sum.default", X, dtype=torch.int64), ["S(0) -> P(sum)", "S(1) -> P(sum)"]),
    (sample("mean.dim", X, [1]), ["S(0) -> S(0)", "S(1) -> P(avg), even", "P(+) -> P(+)"]),
    (sample("prod.dim_int", X, 0), ["S(1) -> S(0)", "S(0) -> P(product)", "P(product) -> P(product)"]),
    (sample("prod.default", FLAGS), ["S(0) -> P(product)", "S(1) -> P(product)", "P(product) -> P(product)"]),
    (sample("prod.dim_int", X.to(torch.complex64), 0), ["S(1) -> S(0)"]),
    (sample("prims.prod.default", X, []), ["S(0) -> S(0)", "S(1) -> S(1)", "P(product) -> P(product)"]),
    (sample("amax.default", X, [0]), ["S(1) -> S(0)", "S(0) -> P(max), filled", "P(max) -> P(max)"]),
    (sample("min.default", N), ["S(0) -> P(min), filled", "S(1) -> P(min), filled", "P(min) -> P(min)"]),
    (sample("aminmax.default", X, dim=0), ["S(1) -> S(0), S(0)", "S(0) -> P(min), P(max), filled"]),
    (sample("any.dim", FLAGS, 0), ["S(1) -> S(0)", "S(0) -> P(max)", "S(0) -> P(sum)", "P(max) -> P(max)", "P(sum) -> P(sum)"]),
    (sample("all.default", X), [f"S({d}) -> P({p})" for d in (0, 1) for p in ("min", "product")]),
    (sample("any.dims", FLAGS, []), ["S(0) -> S(0)", "S(1) -> S(1)", "P(max) -> P(max)", "P(sum) -> P(sum)"]),
    (sample("any.default", BYTES), ["S(0) -> P(max)", "S(1) -> P(max)"]),
    (sample("nansum.default", X, [0]), ["S(1) -> S(0)", "S(0) -> P(sum)"]),
    (sample("nansum.default", N, [0]), ["S(1) -> S(0)", "S(0) -> P(sum)", "P(sum) -> P(sum)"]),
    (sample("count_nonzero.default", X, 1), ["S(0) -> S(0)", "S(1) -> P(sum)"]),
    *((sample(op, X, 1), ["S(0) -> S(0), S(0)"]) for op in CHOSEN),
    (sample("argmax.default", X, 0, True), ["S(1) -> S(1)"]),
    (sample("argmax.default", X), []),
    (sample("var.correction", X, [1]), ["S(0) -> S(0)"]),
    (sample("logsumexp.default", X, [0], True), ["S(1) -> S(1)"]),
    (sample("trace.default", X), ["P(+) -> P(+)"]),
    (sample("linalg_vector_norm.default", X, 1, [0]), ["S(1) -> S(0)", "S(0) -> P(sum)"]),
    (sample("linalg_vector_norm.default", X, 2, [0]), ["S(1) -> S(0)"]),
    (sample("linalg_vector_norm.default", X, math.inf, [0]), ["S(1) -> S(0)", "S(0) -> P(max), filled"]),
    (sample("linalg_vector_norm.default", X, -math.inf), ["S(0) -> P(min), filled", "S(1) -> P(min), filled"]),
    (sample("dist.default", X, X + 1, 1), ["S(0), S(0) -> P(sum)", "S(1), S(1) -> P(sum)"]),
    (sample("dist.default", X, X[0] + 1, math.inf), ["S(0), R -> P(max), filled", "S(1), S(0) -> P(max), filled"]),
    (sample("dist.default", X, X + 1, 2), []),
    (sample("norm.ScalarOpt_dim", X, 0, [1]), ["S(0) -> S(0)", "S(1) -> P(sum)"]),
    (sample("norm.ScalarOpt_dim", X, None, [1]), ["S(0) -> S(0)"]),
    (sample("linalg__powsum.default", X, 3.0, [0]), ["S(1) -> S(0)", "S(0) -> P(sum)"]),
    (sample("linalg__powsum.default", X, math.inf, [0]), ["S(1) -> S(0)"]),
    (sample("linalg__powsum.default", X.to(torch.complex128), 3.0, [0], dtype=torch.float64), ["S(1) -> S(0)"]),
]  # fmt: skip
TEMPTING = [
    ("cut off before they are added", sample("sum.default", X, dtype=torch.int64), "P(sum) -> P(sum)", "the parts make", 2),
    ("means of fewer weigh as much", sample("mean.default", X), "S(0) -> P(avg)", "the parts make", 3),
    ("a mean of a piece is no part of a sum", sample("mean.default", X), "S(0) -> P(sum)", "the parts make", 2),
    ("the greatest of least parts", sample("amax.default", X), "P(min) -> P(min)", "the parts make", 2),
    ("places are counted in the piece", sample("argmax.default", X.flip(0).cumsum(0).abs(), 0), "S(0) -> P(max)", "make", 2),
    ("the spread between ranks is lost", sample("var.correction", X, [0]), "S(0) -> P(avg)", "the parts make", 2),
    ("a root of a sum", sample("linalg_vector_norm.default", X, 2, [0]), "S(0) -> P(sum)", "the parts make", 2),
    ("a root of a sum of differences", sample("dist.default", X, X + 1, 2), "S(0), S(0) -> P(sum)", "the parts make", 2),
    ("distances of parts", sample("dist.default", X, X * -1, 1), "P(sum), P(sum) -> P(sum)", "the parts make", 2),
    ("sizes of parts are no parts", sample("linalg_vector_norm.default", X, 1, [0]), "P(sum) -> P(sum)", "the parts make", 2),
    ("sizes of the greatest", sample("linalg_vector_norm.default", X, math.inf), "P(max) -> P(max)", "the parts make", 2),
    ("a part that is NaN is dropped", sample("nansum.default", X * torch.tensor([1, torch.nan, 1, 1, 1, 1])), "P(sum) -> P(sum)",
     "the parts make", 2),
    ("one and one in bytes", sample("any.default", BYTES), "S(0) -> P(sum)", "the parts make", 2),
    ("parts are not zero where the sum is", sample("any.default", X * 0), "P(sum) -> P(sum)", "the parts make", 2),
]  # fmt: skip


@held.for_each_line_case(LINES)
def test_a_reduction_has_just_these_lines_and_they_hold(one, texts):
    held.assert_lines(RULES, one, *texts)


@held.for_each_tempting_case(TEMPTING)
def test_a_tempting_line_of_a_reduction_is_wrong_and_not_there(one, text, because, ranks):
    held.assert_tempting(RULES, one, text, because, ranks)


def test_a_rank_with_nothing_has_no_extreme_so_the_line_asks_that_all_are_filled():
    one = sample("amax.default", X[:2], [0])
    assert_wrong(one, "S(0) -> P(max)", "raises", ranks=3)
    assert {line.cut for line in held.lines_of(RULES, one) if "S(0)" in str(line).partition(" -> ")[0]} == {"filled"}
