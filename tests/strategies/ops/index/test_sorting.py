"""Sorting, picking by rank, and looking up in what is sorted."""

import torch

from strategies.ops.index.sorting import RULES
from tests.strategies.cases import numbers, sample
from tests.strategies.ops import held

X, Y = numbers(4, 6, 5), numbers(5, 4)
BOUNDS = torch.tensor([-1.0, -0.5, 0.0, 0.25, 1.0], dtype=torch.float64)
SORTED = numbers(5, 6).sort(-1).values
INTS = numbers(5, 3, dtype=torch.int64)

LINES = [
    (sample("sort.default", X, 1), ["S(0) -> S(0), S(0)", "S(2) -> S(2), S(2)"]),
    (sample("sort.stable", Y, stable=True, dim=-1), ["S(0) -> S(0), S(0)"]),
    (sample("sort.default", numbers(), 0), []),
    (sample("topk.default", Y, 2, 0), ["S(1) -> S(1), S(1)"]),
    (sample("argsort.stable", Y, stable=True, dim=0), ["S(1) -> S(1)"]),
    (sample("kthvalue.default", X, 2, 1), ["S(0) -> S(0), S(0)", "S(2) -> S(1), S(1)"]),
    (sample("kthvalue.default", X, 2, 1, True), ["S(0) -> S(0), S(0)", "S(2) -> S(2), S(2)"]),
    (sample("bucketize.Tensor", Y, BOUNDS), ["R, S(0) -> P(sum)", "P(max), R -> P(max)", "S(0), R -> S(0)", "S(1), R -> S(1)"]),
    (sample("bucketize.Tensor", INTS, BOUNDS, right=True), [
        "R, S(0) -> P(sum)", "P(max), R -> P(max)", "P(min), R -> P(min)", "S(0), R -> S(0)", "S(1), R -> S(1)"]),
    (sample("bucketize.Scalar", 0.3, BOUNDS), ["S(0) -> P(sum)"]),
    (sample("searchsorted.Tensor", SORTED, Y), [
        "S(1), R -> P(sum)", "R, P(max) -> P(max)", "S(0), S(0) -> S(0)", "R, S(1) -> S(1)"]),
    (sample("searchsorted.Tensor", BOUNDS, X), [
        "S(0), R -> P(sum)", "R, P(max) -> P(max)", "R, S(0) -> S(0)", "R, S(1) -> S(1)", "R, S(2) -> S(2)"]),
    (sample("searchsorted.Tensor", Y, Y, sorter=Y.argsort(-1)), [
        "S(0), S(0), S(0) -> S(0)", "R, S(1), R -> S(1)"]),
    (sample("histc.default", Y, 4, -2, 2), ["S(0) -> P(sum)", "S(1) -> P(sum)"]),
    (sample("histc.default", Y, 4), []),
    (sample("histogram.bins_tensor", Y, BOUNDS), ["S(0), R -> P(sum), R", "S(1), R -> P(sum), R"]),
    (sample("histogram.bin_ct", Y, 4, range=[-2.0, 2.0], weight=Y + 3), [
        "S(0), S(0) -> P(sum), R", "S(1), S(1) -> P(sum), R", "R, P(sum) -> P(sum), R"]),
    (sample("histogram.bin_ct", Y, 4), []),
    (sample("histogram.bins_tensor", Y, BOUNDS, density=True), []),
    (sample("isin.Tensor_Tensor", INTS, INTS[1:3]), ["S(0), R -> S(0)", "S(1), R -> S(1)"]),
    (sample("isin.Tensor_Tensor", INTS[0], INTS[1], invert=True), ["S(0), R -> S(0)", "R, S(0) -> P(min)"]),
    (sample("isin.Tensor_Scalar", INTS, 3), ["S(0) -> S(0)", "S(1) -> S(1)"]),
]  # fmt: skip


@held.for_each_line_case(LINES)
def test_a_sort_has_just_these_lines_and_they_hold(one, texts):
    held.assert_lines(RULES, one, *texts)


TEMPTING = [
    ("each has its own order", sample("sort.default", numbers(4)), "S(0) -> S(0), S(0)", "make"),
    ("the greatest of each", sample("topk.default", numbers(4), 2), "S(0) -> S(0), S(0)", "has shape"),
    ("places of parts", sample("sort.default", Y, 0), "P(max) -> P(max), R", "make"),
    ("the sorter speaks of the whole", sample("searchsorted.Tensor", Y, Y, sorter=Y.argsort(-1)), "S(1), R, S(1) -> P(sum)", "raises"),
    ("shares of each piece", sample("histogram.bins_tensor", Y, BOUNDS, density=True), "S(0), R -> P(sum), R", "make"),
    ("not among some", sample("isin.Tensor_Tensor", INTS, INTS[0], invert=True), "R, S(0) -> P(max)", "make"),
    ("limits of each piece", sample("histc.default", Y, 4), "S(0) -> P(sum)", "make"),
]  # fmt: skip


@held.for_each_tempting_case(TEMPTING)
def test_a_tempting_line_of_a_sort_is_wrong_and_not_there(one, text, because):
    held.assert_tempting(RULES, one, text, because)
