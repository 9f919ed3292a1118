"""A sibling's call with the same arguments: by name and place, as numbers or tensors, with room for results."""

import pytest
import torch

from strategies.inputs.schema_binding import (
    ABSENT,
    OUT_FILL,
    BoundCall,
    Unbound,
    bind_to_sibling,
    complete_call,
    prefer_finite,
    without_out,
)
from strategies.model.arguments import argument_kind
from strategies.model.rule import overload
from tests.strategies.cases import numbers, sample

X, Y = numbers(4, 6), numbers(4, 6, seed=1)


def bound(one, target):
    return bind_to_sibling(one, target).sample


def test_a_sibling_in_place_has_the_same_arguments():
    made = bound(sample("add.Tensor", X, Y, alpha=2), "aten.add_.Tensor")
    assert (made.op, made.arguments()) == ("aten.add_.Tensor", ["f64[4,6]", "f64[4,6]", "alpha=2"])
    assert torch.equal(made.tensors[0], X)


def test_an_out_has_the_shape_and_dtype_of_the_result():
    made = bound(sample("lt.Tensor", numbers(4, 1), numbers(6)), "aten.lt.Tensor_out")
    assert made.arguments() == ["f64[4,1]", "f64[6]", "out=bool[4,6]"]
    assert bool((bound(sample("neg.default", X), "aten.neg.out").tensors[1] == OUT_FILL).all())


def test_every_out_of_several_is_made():
    made = bound(sample("frexp.Tensor", X), "aten.frexp.Tensor_out")
    assert made.arguments() == ["f64[4,6]", "mantissa=f64[4,6]", "exponent=i32[4,6]"]


def test_an_op_without_a_twin_says_itself_how_large_its_result_is():
    assert without_out("aten.normal.out") is None
    assert bound(sample("normal_functional.default", X), "aten.normal.out").arguments()[-1] == "out=f64[4,6]"


def test_a_twin_may_have_other_arguments_by_default():
    assert str(without_out("aten.eye.m_out")) == "aten.eye.m"


def test_a_tensor_becomes_a_number_where_the_sibling_wants_one():
    made = bound(sample("mul.Tensor", X, Y), "aten.mul.Scalar")
    assert made.call.args[1] == Y.flatten()[12].item()


def test_a_number_becomes_a_tensor_where_the_sibling_wants_one():
    made = bound(sample("mul.Scalar", X, 3), "aten.mul.Tensor")
    assert made.tensors[1].tolist() == torch.full((4, 6), 3.0).tolist()


def test_an_argument_of_another_name_is_found_at_its_place():
    made = bound(sample("sum.dim_IntList", X, [0]), "prims.sum.default")
    assert made.arguments() == ["f64[4,6]", "[0]"]


def test_arguments_that_the_sibling_does_not_know_are_left_out():
    made = bound(sample("add.Tensor", X, Y, alpha=2), "prims.div.default")
    assert made.arguments() == ["f64[4,6]", "f64[4,6]"]


def test_a_tensor_does_not_become_a_list_of_tensors():
    with pytest.raises(Unbound, match="nothing is known that could be its argument 'self'"):
        bind_to_sibling(sample("neg.default", X), "aten._foreach_neg.default")


def test_what_the_op_refuses_is_reported_in_its_words():
    with pytest.raises(Unbound, match="RuntimeError: result type Float can't be cast"):
        bind_to_sibling(sample("add.Tensor", numbers(3, dtype=torch.int64), 0.5), "aten.add_.Tensor")


def test_the_sample_itself_is_not_written_to():
    before = X.clone()
    bind_to_sibling(sample("neg.default", X), "aten.neg_.default")
    assert torch.equal(X, before)


def test_absent_values_in_the_middle_take_their_defaults():
    made = complete_call("aten.softplus.default", [X, ABSENT, 5.0], "test").sample
    assert made.call.args[1:] == (1, 5.0)
    assert complete_call("aten.softplus.default", [X, ABSENT, ABSENT], "test").sample.call.args[1:] == ()


def test_infinite_results_are_marked_and_come_last():
    ones, zeros = torch.ones(3), torch.zeros(3)
    wild, tame = (complete_call("aten.div.Tensor", [ones, other], "test") for other in (zeros, ones))
    assert (wild.finite, tame.finite) == (False, True)
    assert prefer_finite([wild, tame]) == [tame.sample]
    assert prefer_finite([wild]) == [wild.sample]


def test_what_is_written_to_counts_as_a_result():
    assert not complete_call("aten._foreach_log_.default", [[torch.zeros(3)]], "test").finite


def test_random_results_do_not_count():
    made = complete_call("aten.normal_functional.default", [X, float("inf"), ABSENT, ABSENT], "test")
    assert isinstance(made, BoundCall)
    assert made.finite


def test_kinds_of_arguments_see_through_optional():
    kinds = [argument_kind(a) for a in overload("aten.linalg__powsum.default")._schema.arguments]
    assert kinds == ["Tensor", "number", "ints", "bool", "ScalarType"]
    assert argument_kind(overload("aten.index.Tensor")._schema.arguments[1]) == "Tensors"
