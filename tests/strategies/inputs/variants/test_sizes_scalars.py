import pytest
import torch

from strategies.inputs.variants import sizes
from tests.strategies.cases import numbers, sample

X = numbers(4, 3)
TARGET = torch.tensor([1, 0, 2, 2])


def said(made):
    return [other.origin.removeprefix("test, ") for other in made]


@pytest.mark.parametrize(("one", "want"), [
    (sample("mul.Scalar", X, 3.0), ["other=0", "other=1", "other=-1", "other=2", "other=2.5"]),
    (sample("clamp.default", X, 1), ["min=0", "min=-1", "min=2", "min=2.5", "min=None",
                                     "max=0", "max=1", "max=-1", "max=2", "max=2.5"]),
    (sample("leaky_relu.default", X, 1.0), ["negative_slope=0", "negative_slope=-1", "negative_slope=2", "negative_slope=2.5"]),
    (sample("diagonal.default", X), ["offset=1", "offset=-1", "offset=2"]),
    (sample("sum.dim_IntList", X, [0], dtype=torch.float32), []),
    (sample("new_empty.default", X, [2]), []),
    (sample("native_group_norm.default", numbers(2, 4, 2), None, None, 2, 4, 2, 2, 1e-5),
     ["eps=0.0", "eps=1.0", "eps=-1.0", "eps=2.0", "eps=2.5"]),
], ids=lambda given: getattr(given, "op", None))  # fmt: skip
def test_every_number_has_other_values(one, want):
    assert said(sizes.other_scalars(one)) == want


def test_scales_that_must_agree_with_sizes_stay_where_no_one_checks_them():
    """torch 2.13 reads past the end of the input where they do not, and gives left-over memory."""
    x = numbers(1, 1, 4, 4)
    assert said(sizes.other_scalars(sample("_upsample_bilinear2d_aa.default", x, [2, 2], False, 0.5, 0.5))) == []
    checked = said(sizes.other_scalars(sample("upsample_bilinear2d.default", x, [2, 2], False, 0.5, 0.5)))
    assert checked[:2] == ["scales_h=0.0", "scales_h=1.0"]


def test_a_mode_is_never_one_that_there_is_not():
    """torch 2.13 writes nothing for a mode below zero."""
    one = sample("grid_sampler_3d.default", numbers(1, 1, 3, 3, 3), numbers(1, 2, 2, 2, 3), 0, 0, False)
    assert said(sizes.other_scalars(one)) == [
        "interpolation_mode=1", "interpolation_mode=2", "padding_mode=1", "padding_mode=2",
    ]  # fmt: skip


@pytest.mark.parametrize(("one", "want"), [
    (sample("histc.default", X, 9, 2, 6), ["max=2", "max=9", "min=9"]),
    (sample("addmm.default", X, X, X, beta=2.0, alpha=3.0), ["alpha=2.0"]),
    (sample("addmm.default", X, X, X, beta=2.0, alpha=2.0), []),
    (sample("diagonal.default", X), []),
    (sample("_fft_c2c.default", X, [0], 1, True), []),
    (sample("clamp.default", X, 1, 2.5), []),
], ids=["range", "factors", "equal", "dims", "inner", "types"])  # fmt: skip
def test_numbers_of_one_type_are_made_equal(one, want):
    assert said(sizes.equal_numbers(one)) == want


def test_flags_are_turned_and_dims_are_not_kept_here():
    assert said(sizes.other_flags(sample("sort.default", X, 0, True))) == ["descending=False"]
    assert said(sizes.other_flags(sample("sum.dim_IntList", X, [0], True))) == []
    assert said(sizes.other_flags(sample("_softmax.default", X, 1, False))) == []


def test_results_in_other_dtypes_and_in_none_that_is_named():
    made = list(sizes.other_dtypes(sample("sum.dim_IntList", X, [0], dtype=torch.float32)))
    assert said(made) == ["dtype=torch.float64", "dtype=torch.int64", "dtype=None"]
    assert [dict(other.call.kwargs).get("dtype") for other in made] == [torch.float64, torch.int64, None]
    assert said(sizes.other_dtypes(sample("relu.default", X))) == []
    whole = sample("_to_copy.default", torch.arange(4), dtype=torch.int32)
    narrow = next(iter(sizes.other_dtypes(whole)))
    assert narrow.origin.endswith("dtype=torch.int8, times 97") and dict(narrow.call.kwargs)["dtype"] is torch.int8
    assert narrow.tensors[0].to(torch.int8).sort().values.tolist() != narrow.tensors[0].to(torch.int8).tolist()


def test_a_result_is_as_large_as_a_tensor():
    assert said(sizes.with_sizes_of_a_tensor(sample("new_ones.default", X, [2]))) == [f"size={list(X.shape)}"]
    assert said(sizes.with_sizes_of_a_tensor(sample("new_ones.default", X, list(X.shape)))) == []
    assert said(sizes.with_sizes_of_a_tensor(sample("relu.default", X))) == []


def test_a_loss_has_the_two_other_reductions():
    assert said(sizes.other_reductions(sample("mse_loss.default", X, X, 1))) == ["reduction=2", "reduction=0"]
    assert said(sizes.other_reductions(sample("mse_loss_backward.default", X, X, X, 1))) == []


def test_the_class_of_the_first_and_of_the_last_target_is_ignored():
    one = sample("nll_loss_forward.default", X, TARGET, None, 1, -100)
    assert said(sizes.with_ignored_class(one)) == ["ignore_index=1", "ignore_index=2"]
    assert said(sizes.with_ignored_class(sample("relu.default", X))) == []


def test_weights_differ_and_come_in_every_shape_that_might_be_meant():
    one = sample("nll_loss_forward.default", X, TARGET, None, 1, -100)
    made = list(sizes.with_weights(one))
    assert said(made) == ["weights of shape (3,)", "weights of shape (4, 3)"]
    assert made[0].tensors[2].tolist() == [0.25, 0.5, 0.75]
    assert said(sizes.with_weights(sample("nll_loss_forward.default", X, TARGET, X[0], 1, -100))) == []
    assert said(sizes.with_weights(sample("relu.default", X))) == []


def test_tensors_that_may_be_left_out_are():
    made = list(sizes.without_optional_tensors(sample("clamp.Tensor", X, X, X + 1)))
    assert said(made) == ["min=None", "max=None"]
    assert [len(other.tensors) for other in made] == [2, 2]
    assert said(sizes.without_optional_tensors(sample("native_layer_norm.default", X, [3], X[0], X[1], 1e-5))) == []


def test_each_result_is_asked_for_alone():
    args = (X, X, [3], X[:, :1], X[:, :1], X[0], X[0])
    one = sample("native_layer_norm_backward.default", *args, [True, True, True])
    assert said(sizes.with_one_result(one)) == [f"only result {i} asked for" for i in range(3)]
    alone = sample("native_layer_norm_backward.default", *args, [False, True, False])
    assert said(sizes.with_one_result(alone)) == ["only result 0 asked for", "only result 2 asked for"]
