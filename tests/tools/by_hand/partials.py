"""Partial values that DTensor hands on where it must reduce them first."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (as torch's own pages call it)

from tests.tools.by_hand.words import AVG, FALSE, MAX, MIN, PRODUCT, S0, S1, S2, SUM, Given, R, check, count

aten = torch.ops.aten


@check("aten.threshold.default: P(min) -> P(min)")
def threshold_of_partial_minima(d: Given) -> Any:
    return F.threshold(d.pieces(MIN, [1.0, 5.0], [6.0, 2.0]), 3.0, 10.0)


@check("aten.threshold_.default: P(max) -> P(max)")
def threshold_in_place_of_partial_maxima(d: Given) -> Any:
    return F.threshold_(d.pieces(MAX, [1.0, 5.0], [6.0, 2.0]), 3.0, 10.0)


@check("aten.threshold_.default on (2, 3): P(min)", (2, 3))
def threshold_in_place_on_two_axes(d: Given) -> Any:
    x = d(count(4), MIN, MIN)
    return F.threshold_(x, 2.5, 10.0)


@check("aten.threshold.out: P(max), P(max) -> P(max)")
def threshold_into_a_tensor(d: Given) -> Any:
    out = d([0.0, 0.0], MAX)
    torch.threshold(d.pieces(MAX, [1.0, 5.0], [6.0, 2.0]), 3.0, 10.0, out=out)
    return out


@check("aten.fill_.Scalar: P(sum) -> P(sum)")
def fill_of_partial_sums(d: Given) -> Any:
    return d(count(4), SUM).fill_(3.0)


@check("aten.fill_.Scalar: P(product) -> P(product)")
def fill_of_partial_products(d: Given) -> Any:
    return d(count(4), PRODUCT).fill_(3.0)


@check("aten.view.dtype: P(product) -> P(product)")
def bits_of_partial_products(d: Given) -> Any:
    return d.pieces(PRODUCT, [2.0, 3.0], [3.0, 5.0]).view(torch.int32)


@check("aten.view.dtype: P(min) -> P(min)")
def bits_of_partial_minima(d: Given) -> Any:
    return d.pieces(MIN, [-1.0, 2.0], [-4.0, 3.0]).view(torch.int32)


@check("aten.view.dtype: S(0) -> S(0)")
def bits_of_uneven_shards(d: Given) -> Any:
    return d(count(3), S0, dtype=torch.float64).view(torch.float32)


@check("aten.view.dtype: S(1) -> S(1)")
def bits_of_shards_that_are_too_small(d: Given) -> Any:
    return d([[1, 2, 3, 4]], S1, dtype=torch.int16).view(torch.int64)


@check("aten.to.dtype: P(sum) -> P(sum)")
def complex_sums_as_integers(d: Given) -> Any:
    return d.pieces(SUM, [0.5 + 0j, 1.0 + 1j], [0.5 + 0j, 2.0 + 0j]).to(torch.int64)


@check("aten.to.dtype: P(max) -> P(max)")
def maxima_as_bytes(d: Given) -> Any:
    return d.pieces(MAX, [-1, 5], [3, -2]).to(torch.uint8)


@check("aten._to_copy.default: P(product) -> P(product)")
def complex_products_as_real_ones(d: Given) -> Any:
    return d.pieces(PRODUCT, [2j], [3j]).to(torch.float64)


@check("aten._to_copy.default on (2,): P(sum), then sum")
def sums_as_bytes_then_summed(d: Given) -> Any:
    return d.pieces(SUM, [-1, 200], [1, 0]).to(torch.uint8).sum()


@check("aten._to_copy.default: P(avg) -> P(avg)")
def averages_as_bytes(d: Given) -> Any:
    return d.pieces(AVG, [2, 4], [4, 8]).to(torch.uint8)


@check("aten._to_copy.default: P(max) -> P(max)")
def maxima_as_complex_numbers(d: Given) -> Any:
    return d(count(4), MAX).to(torch.complex64)


@check("aten.add.Tensor: P(max), R -> P(max)")
def maxima_and_a_complex_number(d: Given) -> Any:
    return d(count(4), MAX) + d(1j)


@check("aten.complex.default: P(min), P(min) -> P(min)")
def complex_of_partial_minima(d: Given) -> Any:
    return torch.complex(d(count(4), MIN), d(count(4), MIN))


@check("aten.complex.default on (2,): P(sum), R, then cast int64")
def complex_of_partial_sums_as_integers(d: Given) -> Any:
    return torch.complex(d.pieces(SUM, [0.5], [0.5]), d([2.0])).to(torch.int64)


@check("aten.view_as_real.default: P(product) -> P(product)")
def parts_of_partial_products(d: Given) -> Any:
    return torch.view_as_real(d.pieces(PRODUCT, [2j], [3j]))


@check("aten.index_fill.int_Tensor on (2,): P(sum), R, R")
def index_fill_of_partial_sums(d: Given) -> Any:
    return torch.index_fill(d([1, 2, 3, 4], SUM), 0, d([1]), d(7))


@check("aten.take.default on (2,): R, P(sum)")
def take_at_partial_positions(d: Given) -> Any:
    return torch.take(d([5, 6, 7]), d.pieces(SUM, [1, 0], [1, 0]))


@check("aten.addr.default on (2,): R, P(sum), R")
def addr_of_integer_sums(d: Given) -> Any:
    return torch.addr(d([[1, 1], [1, 1]]), d([1, 2], SUM), d([3, 4]))


@check("aten.avg_pool2d.default: P(sum) -> P(sum)")
def avg_pool2d_of_integer_sums(d: Given) -> Any:
    return F.avg_pool2d(d.pieces(SUM, [[[1, 0], [1, 0]]], [[[1, 0], [0, 1]]]), 2)


@check("aten.avg_pool1d.default: P(sum) -> P(sum)")
def avg_pool1d_of_integer_sums(d: Given) -> Any:
    return F.avg_pool1d(d.pieces(SUM, [[1, 0]], [[0, 1]]), 2)


@check("aten.avg_pool3d.default: P(sum) -> P(sum)")
def avg_pool3d_of_integer_sums(d: Given) -> Any:
    return F.avg_pool3d(d.pieces(SUM, [[[[1, 0]]]], [[[[0, 1]]]]), (1, 1, 2))


@check("aten.avg_pool3d.default: P(avg) -> P(avg)")
def avg_pool3d_of_integer_averages(d: Given) -> Any:
    return F.avg_pool3d(d.pieces(AVG, [[[[2, 4]]]], [[[[4, 6]]]]), (1, 1, 2))


@check("aten._fft_r2c.default: P(max) -> P(max)")
def rfft_of_partial_maxima(d: Given) -> Any:
    return torch.fft.rfft(d(count(2, 4), MAX))


@check("aten._fft_r2c.default on (2,): P(max), then cast float64")
def rfft_of_partial_maxima_as_real_numbers(d: Given) -> Any:
    return torch.fft.rfft(d(count(2, 4), MAX)).to(torch.float32)


@check("aten._amp_foreach_non_finite_check_and_unscale_.default on (2,): R, R, P(product), R, R")
def unscaling_of_partial_products(d: Given) -> Any:
    grads = [d(count(2)), d(count(2), PRODUCT)]
    torch._amp_foreach_non_finite_check_and_unscale_(grads, d([0.0]), d([0.5]))
    return grads


@check("aten._foreach_add_.Tensor on (2,): P(sum), R, R")
def foreach_add_of_a_number_in_place(d: Given) -> Any:
    pair = [d(count(2), SUM), d(count(2))]
    torch._foreach_add_(pair, d(1.0), alpha=1.0)
    return pair


@check("aten._foreach_add.Tensor on (2,): P(sum), R, R")
def foreach_add_of_a_number(d: Given) -> Any:
    return torch._foreach_add([d(count(2), SUM), d(count(2))], d(1.0), alpha=1.0)


@check("aten.linalg_pinv.atol_rtol_tensor_out on (3,): R, R, P(avg), R", (3,))
def pinv_with_a_tolerance_that_is_an_average(d: Given) -> Any:
    x, out = d([[1.0, 0.0], [0.0, 0.1]]), d(torch.zeros(2, 2))
    return torch.linalg.pinv(x, rtol=d.pieces(AVG, 0.01, 0.58, 0.01), out=out)


@check("aten.linalg_pinv.atol_rtol_tensor on (2,): R, P(min), R")
def pinv_with_a_tolerance_that_is_a_minimum(d: Given) -> Any:
    return torch.linalg.pinv(d([[1.0, 0.0], [0.0, 0.1]]), atol=d.pieces(MIN, 0.5, 0.01))


@check("aten.convolution.default on (2,): P(max), R, R")
def convolution_of_partial_maxima(d: Given) -> Any:
    return F.conv1d(d(count(1, 1, 4), MAX), d(count(1, 1, 2)))


@check("aten.convolution.default on (2,): P(sum), R, R")
def convolution_of_partial_sums_with_a_bias(d: Given) -> Any:
    return F.conv1d(d(count(1, 1, 4), SUM), d(count(1, 1, 2)), d([1.0]))


@check("aten.convolution.default on (2,): R, R, P(min)")
def convolution_with_a_bias_that_is_a_minimum(d: Given) -> Any:
    return F.conv1d(d(count(1, 1, 4)), d(count(1, 1, 2)), d([1.0], MIN))


@check("aten.convolution_backward.default on (2,): R, R, P(min)")
def convolution_gradient_with_weights_that_are_minima(d: Given) -> Any:
    x, w = d(count(1, 1, 4), R, grad=True), d(count(1, 1, 2), MIN, grad=True)
    F.conv1d(x, w).sum().backward()
    return x.grad


@check("aten.native_batch_norm.default on (2,): R, R, P(min)")
def batch_norm_with_a_running_variance_that_is_a_minimum(d: Given) -> Any:
    mean, var = d([0.0, 0.0]), d([1.0, 1.0], MIN)
    F.batch_norm(d(count(3, 2)), mean, var, training=True)
    return var


@check("aten._native_batch_norm_legit.default on (2,): R, P(max), R")
def batch_norm_with_a_running_mean_that_is_a_maximum(d: Given) -> Any:
    mean, var = d([0.0, 0.0], MAX), d([1.0, 1.0])
    F.batch_norm(d(count(3, 2)), mean, var, training=True)
    return mean


@check("aten._batch_norm_with_update.default on (2,): R, R, R, R, S(0)")
def batch_norm_with_update_of_a_sharded_variance(d: Given) -> Any:
    mean, var = d([0.0, 0.0]), d([1.0, 1.0], S0)
    aten._batch_norm_with_update.default(d(count(3, 2, 4)), d([1.0, 1.0]), d([0.0, 0.0]), mean, var, 0.5, 1e-5)
    return mean, var


@check("aten.bernoulli.out on (2,): P(sum), S(0)", judged=FALSE)
def bernoulli_of_partial_probabilities(d: Given) -> Any:
    """The finding's parts of 1.0 added up to 1.0000000000000002."""
    return torch.bernoulli(d.pieces(SUM, [2.0, -1.0, 2.0], [-1.0, 2.0, -1.0]), out=d([0.0], S0))


@check("aten.baddbmm.default: P(sum), S(2), S(1) -> P(sum)", (3,))
def baddbmm_of_integer_sums_with_a_float_factor(d: Given) -> Any:
    x, y = d(torch.ones(2, 2, 4, dtype=torch.int64), S2), d(torch.ones(2, 4, 2, dtype=torch.int64), S1)
    return torch.baddbmm(d(torch.ones(2, 2, 2, dtype=torch.int64), SUM), x, y, beta=2.0)


@check("aten.alias.default on (2,): P(avg), then cast int64")
def complex_averages_as_integers(d: Given) -> Any:
    return d.pieces(AVG, [2 + 0j], [4 + 0j])[...].to(torch.int64)


@check("aten.avg_pool1d.default: P(avg) -> P(avg)")
def avg_pool1d_of_integer_averages(d: Given) -> Any:
    return F.avg_pool1d(d.pieces(AVG, [[2, 4]], [[4, 6]]), 2)
