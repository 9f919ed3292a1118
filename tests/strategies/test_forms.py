import pytest
import torch

from strategies.forms import respelled, shortened
from strategies.truth import same_results, tell
from tests.strategies.cases import numbers, sample

# Dims spelled the other way.


@pytest.mark.parametrize(("one", "want"), [
    (sample("cumsum.default", numbers(2, 3), 1), [(-1,), (-2,)]),
    (sample("cumsum.default", numbers(2, 3), -2), [(0,), (1,)]),
    (sample("sum.dim_IntList", numbers(2, 3, 4), [0, -1], True), [([-3, 2], True), ([-4, 3], True)]),
    (sample("transpose.int", numbers(2, 3), 0, 1), [(-2, -1), (-3, -2)]),
], ids=lambda given: given.op if hasattr(given, "op") else None)  # fmt: skip
def test_dims_are_respelled_in_both_countings(one, want):
    assert [other.call.args[1:] for other in respelled(one)] == want
    assert {other.origin for other in respelled(one)} == {"test, dims respelled"}


def test_dims_among_the_keywords_are_respelled():
    assert respelled(sample("aminmax.default", numbers(2, 3), dim=1))[0].call.kwargs == (("dim", -1),)


@pytest.mark.parametrize("one", [
    sample("relu.default", numbers(2, 3)),
    sample("mul.Scalar", numbers(2, 3), 1),
    sample("_softmax.default", numbers(2, 3), 1, False),
    sample("roll.default", numbers(2, 3), [1], []),
    sample("zeros.default", [2, 3]),
], ids=lambda one: one.op)  # fmt: skip
def test_calls_without_dims_and_ops_that_trust_their_caller_stay_as_they_are(one):
    assert respelled(one) == []


@pytest.mark.parametrize(("one", "which"), [
    (sample("cumsum.default", numbers(3, 3), 1), 0),
    (sample("unsqueeze.default", numbers(3, 3), 2), 1),
    (sample("stack.default", [numbers(3, 3), numbers(3, 3)], 0), 1),
], ids=lambda given: getattr(given, "op", None))  # fmt: skip
def test_one_of_the_two_is_the_same_call(one, which):
    def gives_the_same(other):
        try:
            return same_results(tell(one), tell(other))
        except (IndexError, RuntimeError):
            return False

    assert [gives_the_same(other) for other in respelled(one)] == [i == which for i in range(2)]


# Operands shortened.


def test_each_operand_after_the_first_is_shortened_along_each_dim():
    one = sample("gather.default", numbers(4, 6), 0, torch.zeros(4, 6, dtype=torch.int64))
    found = shortened(one)
    assert [other.arguments() for other in found] == [["f64[4,6]", "0", "i64[3,6]"], ["f64[4,6]", "0", "i64[4,4]"]]
    assert {other.origin for other in found} == {"test, operand 1 shortened"}
    assert all(other.tensors[0] is one.tensors[0] for other in found)
    assert torch.equal(found[0].call(found[0].tensors), one.call(one.tensors)[:3])


@pytest.mark.parametrize("one", [
    sample("relu.default", numbers(4, 6)),
    sample("zeros.default", [4]),
    sample("mul.Tensor", numbers(4, 6), numbers(6)),
    sample("mul.Tensor", numbers(3, 2), numbers(3, 2)),
    sample("mul.Tensor", numbers(4, 6), numbers(8, 9)),
    sample("tanh_backward.default", numbers(4), numbers(4)),
    sample("native_layer_norm.default", numbers(4, 6), [6], numbers(6), numbers(6), 1e-5),
    sample("_softmax_backward_data.default", numbers(4, 6), numbers(4, 6), 1, torch.float64),
], ids=lambda one: f"{one.op}{one.arguments()}")  # fmt: skip
def test_short_or_unequal_operands_and_ops_that_trust_their_caller_stay_as_they_are(one):
    assert shortened(one) == []
