"""Rows picked and written by number, by many index tensors, by masks; values scattered, added and folded."""

import pytest
import torch

from strategies.ops.index.indexing import RULES as MANY
from strategies.ops.index.indexing import RULES as PICKED
from strategies.ops.index.indexing import RULES as WHOLE
from strategies.ops.index.scatter import RULES as SCATTERED
from tests.strategies.cases import numbers, sample
from tests.strategies.ops import held

RULES = (*PICKED, *MANY, *SCATTERED, *WHOLE)
X, Y = numbers(4, 6, 5), numbers(5, 4)
ALL, ROWS, INTS = "P(*), R -> P(*)", numbers(5, 4, seed=1), torch.tensor([3, 0, 2, 1, 3])
PLACES = torch.tensor([[0, 1, 4, 2], [4, 0, 1, 3], [2, 2, 0, 0], [1, 3, 2, 4], [3, 4, 3, 1]])
MASK = Y > 0
COLUMN = torch.tensor([[2], [0], [1]])

LINES = [
    (sample("index_select.default", X, 1, INTS), [ALL, "S(0), R -> S(0)", "S(2), R -> S(2)", "R, S(0) -> S(1)"]),
    (sample("index_select.default", Y, -1, INTS[0]), [ALL, "S(0), R -> S(0)"]),
    (sample("gather.default", Y, 0, PLACES), [ALL, "S(1), S(1) -> S(1)", "R, S(0) -> S(0)"]),
    (sample("gather.default", Y, 0, PLACES[:2, :3]), [ALL, "R, S(0) -> S(0)"]),
    (sample("take.default", X, PLACES), [ALL, "R, S(0) -> S(0)", "R, S(1) -> S(1)"]),
    (sample("masked_select.default", Y, MASK), [ALL]),
    (sample("masked_scatter_backward.default", Y, MASK, [5, 4]), [ALL]),
    (sample("nonzero.default", MASK), []),
    (sample("as_strided.default", Y, [2, 2], [1, 2]), []),
    (sample("index_fill.int_Scalar", Y, 1, INTS, 0), [ALL, "S(0), R -> S(0)"]),
    (sample("index_fill.int_Scalar", Y, 1, INTS, 5.0), [*(f"P({k}), R -> P({k})" for k in ("avg", "max", "min")), "S(0), R -> S(0)"]),
    (sample("index_fill.int_Tensor", Y, 1, INTS, numbers()), [
        *(f"P({k}), R, R -> P({k})" for k in ("avg", "max", "min")), "P(*), R, P(*) -> P(*)", "S(0), R, R -> S(0)"]),
    (sample("select_scatter.default", X, numbers(4, 5), 1, 2), ["P(*), P(*) -> P(*)", "S(0), S(0) -> S(0)", "S(2), S(1) -> S(2)"]),
    (sample("slice_scatter.default", Y, numbers(2, 4), 0, 1, 3), ["P(*), P(*) -> P(*)", "S(1), S(1) -> S(1)"]),
    (sample("slice_scatter.default", Y, ROWS, 0), ["P(*), P(*) -> P(*)", "S(0), S(0) -> S(0)", "S(1), S(1) -> S(1)"]),
    (sample("diagonal_scatter.default", X, numbers(6, 4), 0, 0, 2), ["P(*), P(*) -> P(*)", "S(1), S(0) -> S(1)"]),
    (sample("index.Tensor", X, [None, INTS]), [ALL, "S(0), R -> S(0)", "S(2), R -> S(2)", "R, S(0) -> S(1)"]),
    (sample("index.Tensor", X, [INTS, None, INTS]), ["P(*), R, R -> P(*)", "S(1), R, R -> S(1)", "R, S(0), S(0) -> S(0)"]),
    (sample("index.Tensor", numbers(2, 4, 3, 4), [None, INTS, None, INTS]), [
        "P(*), R, R -> P(*)", "S(0), R, R -> S(1)", "S(2), R, R -> S(2)", "R, S(0), S(0) -> S(0)"]),
    (sample("index.Tensor", X, [None, COLUMN, INTS]), [
        "P(*), R, R -> P(*)", "S(0), R, R -> S(0)", "R, S(0), R -> S(1)", "R, R, S(0) -> S(2)"]),
    (sample("index.Tensor", numbers(5, 4, 3), [MASK]), [ALL, "S(2), R -> S(1)"]),
    (sample("index_put.default", Y, [None, INTS], numbers(5)), ["P(*), R, P(*) -> P(*)", "S(0), R, R -> S(0)"]),
    (sample("index_put.default", Y, [INTS], numbers(5, 1)), ["P(*), R, P(*) -> P(*)", "S(1), R, R -> S(1)"]),
    (sample("index_put.default", Y, [INTS], numbers(5, 4), True), [
        "P(+), R, P(+) -> P(+)", "S(1), R, S(1) -> S(1)", "P(sum), S(0), S(0) -> P(sum)"]),
    (sample("index_put_.default", Y, [INTS], numbers(), True), [
        "P(+), R, P(+) -> P(+)", "S(1), R, R -> S(1)", "P(sum), S(0), R -> P(sum)"]),
    (sample("_index_put_impl_.default", Y, [INTS], numbers(4), True), [
        "P(+), R, P(+) -> P(+)", "S(1), R, S(0) -> S(1)", "P(sum), S(0), R -> P(sum)"]),
    (sample("_unsafe_index.Tensor", Y, [INTS]), [ALL, "S(1), R -> S(1)", "R, S(0) -> S(0)"]),
    (sample("index_put.default", Y, [MASK], numbers(), True), ["P(+), R, P(+) -> P(+)"]),
    (sample("scatter.src", Y, 0, PLACES, ROWS), ["P(*), R, P(*) -> P(*)", "S(1), S(1), S(1) -> S(1)"]),
    (sample("scatter.src", Y, 0, PLACES[:, :3], ROWS), ["P(*), R, P(*) -> P(*)"]),
    (sample("scatter.value", Y, 0, PLACES, 1), [*(f"P({k}), R -> P({k})" for k in ("avg", "max", "min", "product")), "S(1), S(1) -> S(1)"]),
    (sample("scatter.reduce", Y, 0, PLACES, ROWS, reduce="multiply"), [
        "P(product), R, P(product) -> P(product)", "P(+), R, R -> P(+)", "S(1), S(1), S(1) -> S(1)"]),
    (sample("scatter.value_reduce", Y, 0, PLACES, 3, reduce="add"), ["P(avg), R -> P(avg)", "S(1), S(1) -> S(1)"]),
    (sample("scatter_add.default", Y, 0, PLACES[:2], ROWS[:2]), [
        "P(+), R, P(+) -> P(+)", "S(1), S(1), S(1) -> S(1)", "P(sum), S(0), S(0) -> P(sum)"]),
    (sample("scatter_add_.default", Y, 1, PLACES[:, :2] % 4, ROWS), ["P(+), R, P(+) -> P(+)", "S(0), S(0), S(0) -> S(0)"]),
    (sample("scatter_reduce.two", Y, 0, PLACES, ROWS, "amax"), [
        "P(max), R, P(max) -> P(max)", "S(1), S(1), S(1) -> S(1)", "P(max), S(0), S(0) -> P(max)", "R, S(0), S(0) -> P(max)"]),
    (sample("scatter_reduce.two", Y, 0, PLACES, ROWS, "mean"), ["P(+), R, P(+) -> P(+)", "S(1), S(1), S(1) -> S(1)"]),
    (sample("scatter_reduce.two", Y, 0, PLACES, ROWS, "sum", include_self=False), ["P(+), R, P(+) -> P(+)", "S(1), S(1), S(1) -> S(1)"]),
    (sample("scatter_reduce.two", Y.long(), 0, PLACES, ROWS.long(), "mean"), ["S(1), S(1), S(1) -> S(1)"]),
    (sample("index_add.default", MASK, 1, INTS[:4], MASK), ["S(0), R, S(0) -> S(0)"]),
    (sample("put.default", X, PLACES[:2], ROWS[:2].flatten(), True), ["P(+), R, P(+) -> P(+)"]),
    (sample("index_reduce.default", Y, 1, INTS, numbers(5, 5), "prod"), [
        "P(product), R, P(product) -> P(product)", "S(0), R, S(0) -> S(0)", "P(product), S(0), S(1) -> P(product)"]),
    (sample("index_add.default", Y, 1, INTS, numbers(5, 5), alpha=2), [
        "P(+), R, P(+) -> P(+)", "S(0), R, S(0) -> S(0)", "P(sum), S(0), S(1) -> P(sum)"]),
    (sample("index_copy.default", Y, 1, INTS[:4], ROWS), ["P(*), R, P(*) -> P(*)", "S(0), R, S(0) -> S(0)"]),
    (sample("put.default", X, PLACES[:2], ROWS[:2], True), [
        "P(+), R, P(+) -> P(+)", "P(sum), S(0), S(0) -> P(sum)", "P(sum), S(1), S(1) -> P(sum)"]),
    (sample("masked_scatter.default", Y, MASK, ROWS), ["P(*), R, P(*) -> P(*)"]),
]  # fmt: skip


@pytest.mark.few(20)
@held.for_each_line_case(LINES)
def test_an_index_has_just_these_lines_and_they_hold(one, texts):
    held.assert_lines(RULES, one, *texts)


SHORT = PLACES[:, :3] % 4
TEMPTING = [
    ("a shorter index is cut elsewhere", sample("gather.default", Y, 0, PLACES[:, :2]), "S(1), S(1) -> S(1)", "make"),
    ("longer values are cut elsewhere", sample("scatter.src", numbers(4, 5), 1, SHORT[:2], ROWS), "S(0), S(0), S(0) -> S(0)", "make"),
    ("whole tensor, cut places beside", sample("gather.default", Y, 1, SHORT), "R, S(0) -> S(0)", "the op gives"),
    ("numbers of the whole", sample("index_select.default", Y, 0, INTS), "S(0), R -> S(0)", "raises"),
    ("each writes its own five", sample("index_fill.int_Scalar", Y, 1, INTS, 5.0), "P(sum), R -> P(sum)", "make"),
    ("each adds its own three", sample("scatter.value_reduce", Y, 0, PLACES, 3, reduce="add"), "P(sum), R -> P(sum)", "make"),
    ("the greatest are not added", sample("scatter_add.default", Y, 0, PLACES, ROWS), "P(max), R, P(max) -> P(max)", "make"),
    ("what is there counts once", sample("scatter_add.default", Y, 0, PLACES, ROWS), "R, S(0), S(0) -> P(sum)", "make"),
    ("what no one puts there stays", sample("scatter_reduce.two", Y + 9, 0, PLACES[:2], ROWS[:2], "amax", include_self=False), "P(max), S(0), S(0) -> P(max)", "make"),
    ("masks count what comes before", sample("masked_scatter.default", Y, MASK, ROWS), "S(0), S(0), S(0) -> S(0)", "make"),
    ("the last writer wins", sample("index_put.default", numbers(4), [torch.tensor([1, 1])], numbers(2)), "P(sum), S(0), S(0) -> P(sum)", "make"),
    ("places in front", sample("index.Tensor", numbers(4, 4, 4), [INTS[:4], None, INTS[:4]]), "S(1), R, R -> S(0)", "has shape"),
]  # fmt: skip


@held.for_each_tempting_case(TEMPTING)
def test_a_tempting_line_of_an_index_is_wrong_and_not_there(one, text, because):
    held.assert_tempting(RULES, one, text, because)
