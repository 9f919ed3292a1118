import pytest
import torch

from strategies.inputs.variants import sizes
from strategies.model.arguments import with_tensors
from tests.strategies.cases import numbers, sample

X = numbers(4, 6)
INDEX = torch.tensor([[3, 3], [0, 2]])


def shapes(made):
    return [[tuple(x.shape) for x in other.tensors] for other in made]


def test_all_sizes_change_at_once_then_each_alone_in_all_tensors():
    one = sample("mm.default", X, numbers(6, 4))
    assert shapes(sizes.with_even_sizes(one)) == [[(12, 12), (12, 12)], [(12, 6), (6, 12)], [(4, 12), (12, 4)]]
    assert shapes(sizes.with_uneven_sizes(one))[0] == [(5, 7), (7, 5)]
    assert shapes(sizes.with_few_rows(one))[0] == [(3, 3), (3, 3)]
    assert shapes(sizes.with_one_row_less(one))[0] == [(11, 11), (11, 11)]
    assert shapes(sizes.with_no_rows(one))[0] == [(0, 0), (0, 0)]


def test_a_list_of_sizes_changes_with_them_and_dims_do_not():
    first, second, *_ = sizes.with_even_sizes(sample("expand.default", numbers(4, 1), [4, 6]))
    assert (first.call.args[1], shapes([first])) == ([12, 6], [[(12, 1)]])
    assert (second.call.args[1], shapes([second])) == ([4, 6], [[(12, 1)]])
    assert next(iter(sizes.with_few_rows(sample("sum.dim_IntList", numbers(2, 2, 2), [2])))).call.args[1] == [2]


def test_sizes_of_one_and_tensors_that_would_be_huge_stay():
    assert shapes(sizes.with_even_sizes(sample("relu.default", numbers(1, 4)))) == [[(1, 12)]]
    assert shapes(sizes.with_even_sizes(sample("relu.default", numbers(2, 2, 2, 2, 2)))) == []


def test_rows_are_the_first_ones_then_some_again_and_larger():
    x = torch.arange(4.0).view(4, 1)
    assert torch.equal(sizes.resize(x, [2, 1]), x[:2])
    longer = sizes.resize(x, [6, 1])
    assert torch.equal(longer[:4], x) and torch.allclose(longer[4:], x[:2] * 1.17)
    assert torch.equal(sizes.resize(INDEX, [3, 2])[2], INDEX[0])


def test_indices_stay_in_range_and_what_is_sorted_stays_sorted():
    for other in sizes.with_few_rows(sample("gather.default", numbers(4, 2), 0, INDEX)):
        assert int(other.tensors[1].max()) < min(other.tensors[0].shape)
    for other in sizes.with_one_row_less(sample("bucketize.Tensor", X, torch.arange(4.0))):
        assert torch.equal(other.tensors[1], other.tensors[1].sort().values)


def test_a_square_becomes_oblong_on_either_side():
    assert shapes(sizes.with_oblong_sizes(sample("relu.default", numbers(4, 4)))) == [[(4, 6)], [(6, 4)]]
    assert shapes(sizes.with_oblong_sizes(sample("relu.default", X))) == []
    assert shapes(sizes.with_oblong_sizes(sample("addmm.default", numbers(4), numbers(4, 4), numbers(4, 4))))[0] == [
        (4,),
        (4, 6),
        (4, 6),
    ]


def test_a_longer_row_of_boundaries_is_in_order_too():
    rows = numbers(4, 4).sort(-1).values
    (longer, _) = sizes.with_oblong_sizes(sample("searchsorted.Tensor", rows, numbers(4, 4)))
    assert longer.tensors[0].shape == (4, 6) and torch.equal(longer.tensors[0], longer.tensors[0].sort(-1).values)
    assert not torch.equal(longer.tensors[1], longer.tensors[1].sort(-1).values)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float16, torch.complex64, torch.uint8])
def test_boundaries_of_any_dtype_can_be_changed(dtype):
    given = sample("bucketize.Tensor", numbers(4), torch.arange(3.0))
    changed = with_tensors(given, {1: torch.tensor([3.0, 1.0, 2.0]).to(dtype)}, "other").tensors[1]
    assert changed.dtype == dtype
    assert changed.to(torch.complex64).tolist() == ([3, 1, 2] if dtype.is_complex else [1, 2, 3])


def test_boundaries_of_another_length_are_in_order_too():
    made = sizes.with_operand_of_another_length(sample("bucketize.Tensor", numbers(4), torch.arange(4.0)))
    assert [other.tensors[1].tolist() for other in made] == [[0, 1, 2], [0, 0, 1, 1, 2, 2, 3]]


def test_each_operand_in_turn_is_broadcast():
    made = shapes(sizes.with_broadcast_operands(sample("add.Tensor", X, X)))
    assert made == [
        [(1, 6), (4, 6)],
        [(4, 1), (4, 6)],
        [(6,), (4, 6)],
        [(4, 6), (1, 6)],
        [(4, 6), (4, 1)],
        [(4, 6), (6,)],
    ]
    assert shapes(sizes.with_broadcast_operands(sample("relu.default", X))) == []
    assert shapes(sizes.with_broadcast_operands(sample("binary_cross_entropy.default", X, X))) == []


def test_all_tensors_then_each_alone_have_no_dims():
    assert shapes(sizes.without_dims(sample("add.Tensor", X, X))) == [[(), ()], [(), (4, 6)], [(4, 6), ()]]
    assert shapes(sizes.without_dims(sample("relu.default", X))) == [[()]]
    assert shapes(sizes.without_dims(sample("relu.default", numbers(0, 3)))) == []


@pytest.mark.parametrize("form", sizes.SIZES, ids=lambda form: form.name)
@pytest.mark.parametrize("one", [
    sample("native_layer_norm.default", X, [6], X[0], X[1], 1e-5),
    sample("_softmax.default", X, 1, False),
    sample("tanh_backward.default", X, X),
    sample("segment_reduce.default", numbers(5), "sum", lengths=torch.tensor([2, 3])),
], ids=lambda one: one.op)  # fmt: skip
def test_ops_that_would_read_past_the_end_keep_their_sizes(form, one):
    assert list(form.make(one)) == []


@pytest.mark.parametrize("form", sizes.SIZES, ids=lambda form: form.name)
def test_the_samples_own_tensors_stay_as_they_are(form):
    one = sample("gather.default", numbers(4, 4), 0, torch.zeros(4, 4, dtype=torch.int64))
    before = [x.clone() for x in one.tensors]
    for other in form.make(one):
        for x in other.tensors:
            assert x.dtype in (torch.float64, torch.int64)
    assert all(torch.equal(a, b) for a, b in zip(one.tensors, before, strict=True))


def test_a_size_that_is_as_it_should_be_is_left_out_alone():
    shapes = [tuple(other.tensors[0].shape) for other in sizes.with_even_sizes(sample("relu.default", numbers(12, 5)))]
    assert shapes == [(12, 12), (12, 12)]


def test_a_size_that_would_make_a_tensor_too_large_is_left_out_alone():
    shapes = [
        tuple(other.tensors[0].shape) for other in sizes.with_even_sizes(sample("relu.default", numbers(3, 1000)))
    ]
    assert shapes == [(12, 12), (3, 12)]
