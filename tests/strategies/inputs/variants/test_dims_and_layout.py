import pytest
import torch

from strategies.inputs.variants.dims_and_layout import (
    other_dims,
    with_keepdim_negated,
    with_negative_indices,
    with_no_dims,
)
from tests.strategies.cases import numbers, sample

X = numbers(2, 3, 4)


@pytest.mark.parametrize(("one", "want"), [
    (sample("cumsum.default", X, 1), [(2,), (0,)]),
    (sample("cumsum.default", X, -1), [(0,), (1,)]),
    (sample("sum.dim_IntList", X, [0, 1], True), [([1, 2], True), ([2, 0], True)]),
    (sample("transpose.int", X, 0, 1), [(1, 2), (2, 0)]),
    (sample("relu.default", X), []),
    (sample("_softmax.default", X, 1, False), []),
    (sample("sum.dim_IntList", X, None), []),
], ids=lambda given: getattr(given, "op", None))  # fmt: skip
def test_every_other_dim_has_its_turn(one, want):
    assert [other.call.args[1:] for other in other_dims(one)] == want


def test_no_dims_are_none_an_empty_list_and_all():
    assert [other.call.args[1:] for other in with_no_dims(sample("sum.dim_IntList", X, [0], True))] == [
        (None, True), ([], True), ([0, 1, 2], True),
    ]  # fmt: skip
    assert [other.call.args[1:] for other in with_no_dims(sample("amax.default", X, [0]))] == [(), ([0, 1, 2],)]
    assert [other.call.args[1:] for other in with_no_dims(sample("argmax.default", X, 0))] == [()]
    assert list(with_no_dims(sample("cumsum.default", X, 0))) == []


def test_dims_are_kept_and_dropped():
    (kept,) = with_keepdim_negated(sample("sum.dim_IntList", X, [0]))
    assert kept.call.args[1:] == ([0], True)
    (dropped,) = with_keepdim_negated(kept)
    assert dropped.call.args[1:] == ([0],)
    assert list(with_keepdim_negated(sample("cumsum.default", X, 0))) == []


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
