import torch

from strategies.inputs.variants.dims_and_layout import with_expanded_tensors, with_gaps, with_transposed_memory
from tests.strategies.cases import numbers, sample

X = numbers(4, 6)
ONE = sample("add.Tensor", X, numbers(6))


def test_a_transposed_tensor_has_the_same_numbers_and_its_last_dim_first_in_memory():
    (other,) = with_transposed_memory(ONE)
    assert torch.equal(other.tensors[0], X) and other.tensors[0].stride() == (1, 4)
    assert other.tensors[1] is ONE.tensors[1]
    assert list(with_transposed_memory(sample("relu.default", numbers(6)))) == []


def test_gaps_leave_the_numbers_as_they_are():
    (other,) = with_gaps(ONE)
    assert all(torch.equal(a, b) for a, b in zip(other.tensors, ONE.tensors, strict=True))
    assert [x.stride() for x in other.tensors] == [(12, 2), (2,)]


def test_each_operand_in_turn_is_one_row_or_column_shown_many_times():
    made = list(with_expanded_tensors(ONE))
    assert [[x.stride() for x in other.tensors] for other in made] == [[(0, 1), (1,)], [(6, 0), (1,)], [(6, 1), (0,)]]
    assert torch.equal(made[0].tensors[0], X[:1].expand(4, 6))
    assert all([x.shape for x in other.tensors] == [X.shape, (6,)] for other in made)
