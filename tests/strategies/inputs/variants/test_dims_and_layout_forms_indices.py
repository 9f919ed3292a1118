import torch

from strategies.inputs.variants.dims_and_layout import with_negative_indices
from tests.strategies.cases import numbers, sample

PLACES = torch.tensor([2, 1, 0])


def test_every_second_index_is_counted_from_the_end_of_each_size_in_turn():
    made = list(with_negative_indices(sample("index.Tensor", numbers(4, 6), [None, PLACES])))
    assert [other.tensors[1].tolist() for other in made] == [[-2, 1, -4], [-4, 1, -6], [-22, 1, -24]]
    assert torch.equal(made[1].call(made[1].tensors), numbers(4, 6)[:, PLACES])


def test_masks_and_ops_that_do_not_check_their_indices_stay():
    assert list(with_negative_indices(sample("index.Tensor", numbers(3), [PLACES > 0]))) == []
    assert (
        list(with_negative_indices(sample("embedding_dense_backward.default", numbers(3, 2), PLACES, 4, -1, False)))
        == []
    )
