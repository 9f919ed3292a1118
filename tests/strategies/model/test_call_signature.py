from math import inf, nan

import pytest
import torch

from strategies.model.call_signature import ArgumentCondition as Said
from strategies.model.call_signature import (
    call_features,
    call_kind,
    diverse_subset,
    dtype_letter,
    holds_tensor,
    non_tensor_arguments,
    python_text,
)
from strategies.model.rule import Leaf
from tests.strategies.cases import numbers, sample

X = numbers(4, 6)


def said_of(one):
    return {str(fact) for fact in call_kind(one).facts}


def test_a_number_that_the_op_computes_with_counts_by_its_sign_and_a_dim_as_it_is():
    assert said_of(sample("add.Tensor", X, X, alpha=-3)) == {"alpha < 0"}
    assert said_of(sample("softplus.default", X, 0.0, 2.5)) == {"beta == 0", "threshold > 0"}
    assert said_of(sample("cumsum.default", X, -1)) == {"dim == -1", "dtype is None"}


def test_a_default_is_an_argument_like_any_other():
    assert call_kind(sample("add.Tensor", X, X)) == call_kind(sample("add.Tensor", X, X, alpha=2))
    assert call_kind(sample("add.Tensor", X, X)) != call_kind(sample("add.Tensor", X, X, alpha=-2))


def test_dims_and_kinds_of_numbers_make_a_kind_and_sizes_do_not():
    whole = numbers(4, 6, dtype=torch.int64)
    assert call_kind(sample("neg.default", X)) == call_kind(sample("neg.default", numbers(2, 3, dtype=torch.complex64)))
    assert call_kind(sample("neg.default", X)) != call_kind(sample("neg.default", X[0]))
    assert call_kind(sample("neg.default", X)) != call_kind(sample("neg.default", whole))
    assert call_kind(sample("where.self", X > 0, X, whole)).numbers == "bfi"


def test_of_a_tensor_that_may_be_left_out_it_counts_that_it_is_there():
    bare, weighed = (
        sample("nll_loss_forward.default", X, X[:, 0].long() * 0, None, 1, -100),
        sample("nll_loss_forward.default", X, X[:, 0].long() * 0, X[0].abs(), 1, -100),
    )
    assert "weight is None" in said_of(bare)
    assert "weight is not None" in said_of(weighed)


def test_scalars_are_named_with_their_values():
    given = sample("add.Tensor", X, X, alpha=2)
    assert list(non_tensor_arguments(given)) == [("alpha", 2, True)]
    assert list(non_tensor_arguments(sample("sum.dim_IntList", X, [0]))) == [
        ("dim", [0], False), ("keepdim", False, False), ("dtype", None, False),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "value", [[0, -1], (1,), None, True, 1.5, float("inf"), "sum", torch.float64, torch.device("cpu"), torch.strided]
)
def test_a_value_is_written_as_python_reads_it(value):
    assert eval(python_text(value), {"torch": torch}) == value


def test_not_a_number_is_written_too_and_has_no_sign():
    assert eval(python_text(float("nan"))) != 0
    assert said_of(sample("softplus.default", X, float("nan"), 2)) == {"beta == float('nan')", "threshold > 0"}


def test_letters_and_lists():
    assert [dtype_letter(d) for d in (torch.float16, torch.complex64, torch.int8, torch.bool)] == ["f", "f", "i", "b"]
    assert holds_tensor([[Leaf(0)]])
    assert not holds_tensor([0, "x"])
    assert str(Said("dim", "== 1")) == "dim == 1"


def test_what_holds_tensor():
    assert holds_tensor(Leaf(0)) and holds_tensor([None, Leaf(1)])
    assert not holds_tensor([1, 2]) and not holds_tensor(None)


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
