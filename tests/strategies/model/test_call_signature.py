import pytest
import torch

from strategies.model.call_signature import ArgumentCondition as Said
from strategies.model.call_signature import call_kind, dtype_letter, holds_tensor, non_tensor_arguments, python_text
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
