from math import inf, nan

import pytest
import torch

from strategies.model.call_signature import call_features, diverse_subset
from strategies.model.rule import Leaf
from tests.strategies.cases import numbers, sample


def sums(*calls):
    return [sample("sum.dim_IntList", numbers(*shape), *args) for shape, *args in calls]


def test_variety_comes_before_more_of_the_same():
    found = sums(((4, 4), [0]), ((6, 6), [0]), ((8, 4), [0]), ((4, 4), [1]), ((4, 4), [0], True))
    chosen = diverse_subset(found, 3)
    assert {str(one.call.args[1:]) for one in chosen} == {"([0],)", "([1],)", "([0], True)"}


def test_what_is_chosen_already_counts_no_more():
    found = sums(((4, 4), [0]), ((4, 5), [0]), ((5, 7), [1]))
    assert [one.arguments() for one in diverse_subset(found, 2)] == [["f64[4,4]", "[0]"], ["f64[5,7]", "[1]"]]


def test_of_equals_the_smaller_is_taken():
    found = sums(((8, 8), [0]), ((4, 4), [0]), ((6, 6), [0]))
    assert [one.arguments() for one in diverse_subset(found, 9)] == [["f64[4,4]", "[0]"]]


def test_one_that_can_be_split_comes_before_a_smaller_one_that_cannot():
    found = sums(((2,), [0]), ((8,), [0]))
    assert diverse_subset(found, 1)[0].arguments() == ["f64[8]", "[0]"]


def test_no_more_are_taken_than_asked_for():
    found = sums(*(((n % 3 + 2, n // 3 + 2), [n % 2]) for n in range(12)))
    assert len(diverse_subset(found, 3)) == 3
    assert diverse_subset([], 3) == []
    assert len({id(one) for one in diverse_subset(found, 99)}) == len(diverse_subset(found, 99))


@pytest.mark.parametrize(("a", "b"), [
    (sample("neg.default", numbers(4, 3)), sample("neg.default", numbers(4, 4))),
    (sample("neg.default", numbers(4, 3)), sample("neg.default", numbers(4, 1))),
    (sample("neg.default", numbers(4, 3)), sample("neg.default", numbers(3, 4).t())),
    (sample("neg.default", numbers(4, 3)), sample("neg.default", numbers(4, 3).float())),
    (sample("neg.default", numbers(4, 3)), sample("neg.default", numbers(4))),
    (sample("mul.Scalar", numbers(4), 2), sample("mul.Scalar", numbers(4), 3)),
    (sample("mul.Scalar", numbers(4), 2.0), sample("mul.Scalar", numbers(4), 2.5)),
    (sample("sum.default", numbers(4)), sample("sum.default", numbers(4), dtype=torch.float32)),
    (sample("add.Tensor", numbers(4, 4), numbers(4, 4)), sample("add.Tensor", numbers(4, 4), numbers(2, 2))),
    (sample("mul.Tensor", numbers(4, 4), numbers(4, 6)), sample("mul.Tensor", numbers(4, 4), numbers(6, 4))),
    (sample("mul.Tensor", numbers(4, 4), numbers(2, 4)), sample("mul.Tensor", numbers(4, 4), numbers(6, 4))),
], ids=lambda one: f"{one.op}{one.arguments()}")  # fmt: skip
def test_what_a_rule_may_look_at_makes_a_difference(a, b):
    assert call_features(a) != call_features(b)


def test_sizes_alone_and_values_of_floats_make_none():
    a, b = sample("mul.Scalar", numbers(4, 3), 1.5), sample("mul.Scalar", numbers(6, 5), 2.25)
    assert call_features(a) == call_features(b)


def test_a_leaf_in_a_list_is_seen_with_its_shape():
    one = sample("cat.default", [numbers(4, 3), numbers(1, 3)], 0)
    assert one.call.args[0] == [Leaf(0), Leaf(1)]
    assert call_features(one)[0] == (0, "list(torch.float64eo, torch.float641o)")


@pytest.mark.parametrize(("value", "other"), [
    (1.0, 2.0), (0.0, 1.0), (-1.0, 1.0), (inf, -inf), (inf, 7.5), (nan, 0.5), (0.5, -0.5), (8.0, 7.5), (4.0, 5.0),
])  # fmt: skip
def test_small_whole_numbers_infinities_and_signs_mean_something(value, other):
    a, b = (sample("pow.Tensor_Scalar", numbers(4, 3), x) for x in (value, other))
    assert call_features(a) != call_features(b)


@pytest.mark.parametrize(("value", "other"), [(0.5, 0.25), (-0.5, -1.75), (8.0, 100.0), (-8.0, -5.0), (nan, nan)])
def test_of_other_numbers_only_the_kind_counts(value, other):
    a, b = (sample("pow.Tensor_Scalar", numbers(4, 3), x) for x in (value, other))
    assert call_features(a) == call_features(b)
