"""Rows of a table by number, and their gradients."""

from dataclasses import replace

import pytest
import torch

from strategies.model.oracle import run_oracle
from strategies.ops.index.indexing import MAX_MODE
from strategies.ops.index.indexing import RULES as BAGS
from strategies.ops.index.indexing import RULES as ROWS
from strategies.ops.validation.claims import query_of_sample
from tests.strategies.cases import numbers, sample
from tests.strategies.ops import held

RULES = (*ROWS, *BAGS)
TABLE, WORDS = numbers(7, 4), torch.tensor([[3, 0, 6], [2, 2, 5]])
TWICE = torch.tensor([[3, 0, 6], [3, 0, 6]])
GRAD = numbers(2, 3, 4)
FLAT, STARTS = WORDS.flatten(), torch.tensor([0, 2, 2])


def bag_backward(mode):
    """The call for the gradient of the table that follows a forward of that mode."""
    _, which, sizes, largest = torch.ops.aten._embedding_bag(TABLE, FLAT, STARTS, False, mode)
    back = (numbers(3, 4), FLAT, which, sizes, largest, 7, False, mode, None)
    return sample("_embedding_bag_dense_backward.default", *back)


LINES = [
    (sample("embedding.default", TABLE, WORDS), ["P(*), R -> P(*)", "S(1), R -> S(2)", "R, S(0) -> S(0)", "R, S(1) -> S(1)"]),
    (sample("embedding.default", TABLE, WORDS[0, 0], 3), ["P(*), R -> P(*)", "S(1), R -> S(0)"]),
    (sample("_embedding_bag.default", TABLE, FLAT, STARTS), [
        "P(+), R, R -> P(+), R, R, R", "S(1), R, R -> S(1), R, R, R"]),
    (sample("_embedding_bag.default", TABLE, FLAT, STARTS, False, MAX_MODE), ["S(1), R, R -> S(1), R, R, S(1)"]),
    (bag_backward(0), ["P(+), R, R, R, R -> P(+)", "S(1), R, R, R, R -> S(1)"]),
    (bag_backward(MAX_MODE), ["P(+), R, R, R, R -> P(+)", "S(1), R, R, R, S(1) -> S(1)"]),
    (sample("embedding_dense_backward.default", GRAD, WORDS, 7, 2, False), [
        "P(+), R -> P(+)", "S(2), R -> S(1)", "S(0), S(0) -> P(sum)", "S(1), S(1) -> P(sum)"]),
    (sample("embedding_dense_backward.default", GRAD, WORDS, 7, -1, True), ["P(+), R -> P(+)", "S(2), R -> S(1)"]),
]  # fmt: skip


@held.for_each_line_case(LINES)
def test_a_lookup_has_just_these_lines_and_they_hold(one, texts):
    held.assert_lines(RULES, one, *texts)


TEMPTING = [
    ("no rank has all rows", sample("embedding.default", TABLE, WORDS), "S(0), R -> P(sum)", "raises"),
    ("words are counted on all ranks", sample("embedding_dense_backward.default", GRAD, TWICE, 7, -1, True), "S(0), S(0) -> P(sum)", "make"),
    ("no maximum of sums", sample("embedding_dense_backward.default", GRAD, WORDS, 7, -1, False), "P(max), R -> P(max)", "make"),
]  # fmt: skip


@held.for_each_tempting_case(TEMPTING)
def test_a_tempting_line_of_a_lookup_is_wrong_and_not_there(one, text, because):
    held.assert_tempting(RULES, one, text, because)


@pytest.mark.parametrize("sparse", [False, True])
def test_a_sparse_gradient_of_a_table_has_no_lines(sparse):
    one = bag_backward(0)
    (entry,) = [entry for entry in BAGS if entry.op == one.op]
    asked = query_of_sample(one, run_oracle(one).raw)
    assert bool([*entry.lines(replace(asked, arguments={**asked.arguments, "sparse": sparse}))]) is not sparse


@pytest.mark.parametrize("mode", [0, 1, MAX_MODE])
def test_columns_of_a_table_make_columns_of_the_bags(mode):
    bag, _, sizes, largest = torch.ops.aten._embedding_bag(TABLE, FLAT, STARTS, False, mode)
    pieces = [torch.ops.aten._embedding_bag(x, FLAT, STARTS, False, mode) for x in TABLE.split(3, 1)]
    torch.testing.assert_close(torch.cat([piece[0] for piece in pieces], 1), bag)
    assert all(torch.equal(piece[2], sizes) for piece in pieces)
    joined = torch.cat([piece[3] for piece in pieces], 1) if mode == MAX_MODE else pieces[0][3]
    assert torch.equal(joined, largest)


@pytest.mark.parametrize(("mode", "linear"), [(0, True), (1, True), (MAX_MODE, False)])
def test_bags_of_parts_add_up_where_rows_are_added_and_not_where_one_is_chosen(mode, linear):
    parts = [TABLE * 3 - 1, 1 - TABLE * 2]
    bags = [torch.ops.aten._embedding_bag(x, FLAT, STARTS, False, mode)[0] for x in (*parts, TABLE)]
    assert torch.allclose(bags[0] + bags[1], bags[2]) == linear
    one = sample("_embedding_bag.default", TABLE, FLAT, STARTS, False, mode)
    assert ("P(sum), R, R -> P(sum), R, R, R" in {str(line) for line in held.lines_of(BAGS, one)}) == linear
