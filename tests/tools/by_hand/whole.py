"""Convolutions, pooling and other ops of the whole tensor; shards without elements."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (as torch's own pages call it)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

from tests.tools.by_hand.words import MAX, S0, S1, S2, S3, SUM, Given, check, count

aten = torch.ops.aten


@check("aten.convolution.default on (2,): R, S(2), R")
def convolution_with_weights_sharded_along_their_length(d: Given) -> Any:
    return F.conv1d(d(count(1, 1, 6)), d(count(1, 1, 2), S2))


@check("aten.convolution.default on (2,): S(2), R, R")
def convolution_of_a_sharded_length(d: Given) -> Any:
    return F.conv1d(d(count(1, 1, 4), S2), d(count(1, 1, 3)), padding=1)


@check("aten.convolution.default on (2,): S(3), R, R")
def convolution_of_sharded_columns(d: Given) -> Any:
    return F.conv2d(d(count(1, 1, 2, 4), S3), d(count(1, 1, 1, 1)), padding=1)


@check("aten.convolution.default on (2,): S(0), R")
def convolution_of_a_batch_with_an_empty_shard(d: Given) -> Any:
    return F.conv1d(d(count(1, 1, 4), S0), d(count(1, 1, 2)))


@check("aten.convolution.default on (2,): R, S(0), R")
def convolution_with_one_sharded_weight(d: Given) -> Any:
    return F.conv1d(d(count(1, 1, 4)), d(count(1, 1, 2), S0))


@check("aten.convolution.default on (2,): R, R, S(0)")
def transposed_convolution_with_a_sharded_bias(d: Given) -> Any:
    return F.conv_transpose1d(d(count(1, 1, 4)), d(count(1, 2, 2)), d([1.0, 2.0], S0))


@check("aten.convolution.default on (2,): S(1), R")
def transposed_convolution_of_sharded_channels(d: Given) -> Any:
    return F.conv_transpose1d(d(count(1, 2, 4), S1), d(count(2, 1, 2)))


@check("aten.convolution_backward.default on (2,): R, R, S(0)")
def convolution_gradient_with_one_sharded_weight(d: Given) -> Any:
    x, w = d(count(1, 1, 4), grad=True), d(count(1, 1, 2), S0, grad=True)
    return aten.convolution_backward.default(
        d(count(1, 1, 3)), x.detach(), w.detach(), [0], [1], [0], [1], False, [0], 1, [True, True, False]
    )[:2]


@check("aten.convolution.default on (2,): R, R, R, then grad of input 2 alone")
def transposed_convolution_gradient_with_groups(d: Given) -> Any:
    b = d(count(4), grad=True)
    F.conv_transpose1d(d(count(1, 2, 1)), d(count(2, 2, 1)), b, groups=2).backward(d(count(1, 4, 1)))
    return b.grad


@check("aten._adaptive_avg_pool2d_backward.default: S(1), S(1) -> S(1)")
def adaptive_pooling_gradient_of_sharded_rows(d: Given) -> Any:
    return aten._adaptive_avg_pool2d_backward.default(d(count(1, 3, 2), S1), d(count(1, 4, 2), S1))


@check("aten.slice.Tensor on (2,): R, then grad S(0)")
def slice_gradient_in_shards(d: Given) -> Any:
    x = d(count(4), grad=True)
    (gradient,) = torch.autograd.grad(x.narrow(-1, 2, 2), x, d([1.0, 2.0], S0))
    return gradient


@check("aten.slice_backward.default: S(2) -> S(2)")
def slice_gradient_along_the_sharded_dim(d: Given) -> Any:
    return aten.slice_backward.default(d(count(1, 2, 6), S2), [1, 2, 10], -1, 0, 6, 1)


@check("aten.select_backward.default: S(0) -> S(1)")
def select_gradient_of_the_last_column(d: Given) -> Any:
    return aten.select_backward.default(d(count(4), S0), [4, 4], -1, 2)


@check("aten.scatter_.src on (2,): R, R, R, then grad S(0)")
def scatter_gradient_in_shards(d: Given) -> Any:
    x, source = d(torch.zeros(4, 2), grad=True), d(count(2, 2), grad=True)
    scattered = x.clone().scatter_(1, d([[0, 1], [1, 0]]), source)
    return torch.autograd.grad(scattered, [x, source], d(count(4, 2), S0))


@check("aten.linalg_qr.default on (2,): R, then grad S(0)")
def qr_gradient_in_shards(d: Given) -> Any:
    x = d(torch.stack([torch.eye(2), 2 * torch.eye(2)]), grad=True)
    q, r = torch.linalg.qr(x)
    return torch.autograd.grad([q, r], x, [d(count(2, 2, 2), S0), d(count(2, 2, 2), S0)])


BATCHED = "random samples of a batch of two for an input without a batch, which torch does not check"


@check("aten.fractional_max_pool2d.default: S(0), S(0) -> S(0), S(0)", judged=BATCHED)
def fractional_pooling_of_sharded_channels(d: Given) -> Any:
    return aten.fractional_max_pool2d.default(d(count(2, 4, 4), S0), [2, 2], [2, 2], d(torch.full((2, 2, 2), 0.5), S0))


@check("aten.pixel_unshuffle.default: S(2) -> S(2)")
def pixel_unshuffle_of_sharded_rows(d: Given) -> Any:
    return F.pixel_unshuffle(d(count(1, 1, 6, 2), S2), 2)


@check("aten.pixel_unshuffle.default: S(3) -> S(3)")
def pixel_unshuffle_of_sharded_columns(d: Given) -> Any:
    return F.pixel_unshuffle(d(count(1, 1, 2, 6), S3), 2)


@check("aten.unsafe_split.Tensor, call")
def unsafe_split_of_shards(d: Given) -> Any:
    return torch.unsafe_split(d(count(4), S0), 4)


@check("aten.view_copy.default: S(0) -> S(0)")
def view_copy_of_uneven_shards(d: Given) -> Any:
    return torch.view_copy(d(count(6, 2), S0), [3, -1])


@check("aten.reshape.default: S(0) -> S(0)", judged="DTensor says by name that it does not unflatten uneven shards")
def reshape_of_uneven_shards(d: Given) -> Any:
    return d(count(2, 3), S0).reshape(3, 2)


@check("aten.transpose.int on (2,): R")
def transpose_of_one_number(d: Given) -> Any:
    return d(3.0).transpose(0, -1)


@check("aten.expand_copy.default on (2,): R")
def implicit_expand(d: Given) -> Any:
    return torch.expand_copy(d(count(1, 2)), [2, 2], implicit=True)


@check("aten.view.default on (2,): R")
def view_of_no_elements(d: Given) -> Any:
    return d(torch.zeros(1, 0, 1)).view(1, 2, 0)


@check("aten.view_copy.default, call")
def view_copy_of_no_elements(d: Given) -> Any:
    return torch.view_copy(d(torch.zeros(0, 2)), [4, 0])


@check("aten.view_copy.default on (2,): R, no return from view_groups", hangs=True)
def view_copy_that_never_returns(d: Given) -> Any:
    return torch.view_copy(d(torch.zeros(16, 0)), [0, 0, 0])


@check("aten.view_as_real.default, call")
def view_as_real_of_one_number(d: Given) -> Any:
    return torch.view_as_real(d(1 + 2j))


@check("aten._unsafe_view.default on (2, 2): (SS(1,2), S(1))", (2, 2))
def unsafe_view_of_shards_on_two_axes(d: Given) -> Any:
    x = count(2, 2)
    if d.mesh is not None:  # the column of axis 1, all of it on the first rank of axis 0
        local = x[:, d.mesh.get_local_rank(1)].reshape(2, 1)[:, d.mesh.get_local_rank(0) :]
        strided = [_StridedShard(1, split_factor=2), S1]
        x = DTensor.from_local(local, d.mesh, strided, run_check=False, shape=x.shape, stride=x.stride())
    return x.clone(), aten._unsafe_view.default(x, [4])


@check("aten.clone.default on (2, 2): S(1), a flattened submesh present", (2, 2))
def gather_from_two_axes_after_one_was_flattened(d: Given) -> Any:
    if d.mesh is not None:
        d.mesh._flatten("both")
    return d(count(2, 5), S1, S1).clone()


@check("aten.upsample_nearest1d.default: S(1) -> S(1)", (3,))
def upsampling_of_channels_with_an_empty_shard(d: Given) -> Any:
    return F.interpolate(d(count(1, 4, 2), S1), scale_factor=2)


@check("aten.upsample_bilinear2d.default: S(1) -> S(1)", (3,))
def bilinear_upsampling_of_channels_with_an_empty_shard(d: Given) -> Any:
    return F.interpolate(d(count(1, 4, 2, 2), S1), scale_factor=2, mode="bilinear")


@check("aten.upsample_bilinear2d.out: S(1), S(1) -> S(1)", (3,))
def upsampling_of_an_empty_shard_into_a_tensor(d: Given) -> Any:
    out = d(torch.zeros(1, 4, 4, 4), S1)
    return aten.upsample_bilinear2d.out(d(count(1, 4, 2, 2), S1), [4, 4], False, out=out)


@check("aten.adaptive_max_pool1d.default: S(1) -> S(1), S(1)", (3,))
def adaptive_max_pooling_of_an_empty_shard(d: Given) -> Any:
    return F.adaptive_max_pool1d(d(count(1, 4, 2), S1), 1)


@check("aten.max_pool1d_with_indices.default: S(1) -> S(1), S(1)", (3,))
def max_pooling_of_an_empty_shard(d: Given) -> Any:
    return F.max_pool1d(d(count(1, 4, 2), S1), 2, return_indices=True)


@check("aten.adaptive_max_pool3d.default on (3,): P(sum)", (3,))
def adaptive_max_pooling_of_partial_sums(d: Given) -> Any:
    return F.adaptive_max_pool3d(d(count(1, 4, 1, 1, 1), SUM), 1)


@check("aten.avg_pool2d.default: S(1) -> S(1)", (3,))
def avg_pooling_of_an_empty_shard(d: Given) -> Any:
    return F.avg_pool2d(d(count(1, 4, 2, 2), S1), 2)


@check("aten.avg_pool1d.default on (3,): P(max)", (3,))
def avg_pooling_of_partial_maxima(d: Given) -> Any:
    return F.avg_pool1d(d(count(4, 2), MAX), 2)


@check("aten._fft_c2c.default: S(1) -> S(1)", (3,))
def fft_of_an_empty_shard(d: Given) -> Any:
    return torch.fft.fft(d(count(1, 4, 2), S1, dtype=torch.complex64))


@check("aten._fft_r2c.default: S(0) -> S(0)", (3,))
def rfft_of_an_empty_shard(d: Given) -> Any:
    return torch.fft.rfft(d(count(4, 2), S0))


@check("aten._fft_c2r.out: S(0), S(0) -> S(0)", (3,))
def irfft_of_an_empty_shard(d: Given) -> Any:
    out = d(torch.zeros(4, 4), S0)
    return torch.fft.irfft(d(count(4, 3), S0, dtype=torch.complex64), out=out)


@check("aten.native_batch_norm.default: S(1), S(0), S(0), S(0), S(0) -> S(1), S(0), S(0)", (3,))
def batch_norm_of_an_empty_shard(d: Given) -> Any:
    mean, var = d(torch.zeros(4), S0), d(torch.ones(4), S0)
    return F.batch_norm(d(count(4, 4, 2), S1), mean, var, training=True)


@check("aten.fractional_max_pool2d.default: S(1), S(1) -> S(1), S(1)", (3,))
def fractional_pooling_of_an_empty_shard(d: Given) -> Any:
    samples = d(torch.full((1, 4, 2), 0.5), S1)
    return aten.fractional_max_pool2d.default(d(count(1, 4, 4, 4), S1), [2, 2], [2, 2], samples)


@check("aten.native_group_norm_backward.default: R, R, R, R, S(0) -> R, R, R")
def group_norm_gradient_with_sharded_weights(d: Given) -> Any:
    w = d(torch.ones(4), S0, grad=True)
    F.group_norm(d(count(2, 4, 3)), 2, w).pow(2).sum().backward()
    return w.grad


@check("aten.native_group_norm_backward.default: S(0), S(0), S(0), S(0), R -> P(sum), P(sum), P(sum)")
def group_norm_gradient_of_a_sharded_batch(d: Given) -> Any:
    w, b = d(torch.ones(4)), d(torch.zeros(4), grad=True)
    F.group_norm(d(count(4, 4, 4), S0), 1, w, b).pow(2).sum().backward()
    return b.grad


@check("aten.native_group_norm_backward.default: S(1), S(1), R, S(0), S(0) -> S(0), S(0), S(0)")
def group_norm_gradient_of_sharded_channels(d: Given) -> Any:
    x, moments, w = d(count(4, 4, 4), S1), d(count(4, 1), S0), d(torch.ones(4), S0)
    mask = [False, False, True]
    return aten.native_group_norm_backward.default(x, x, d(count(4, 1)), moments, w, 4, 4, 4, 1, mask)[2]


@check("aten.native_batch_norm.out: S(1), S(0), S(0), S(0), S(0), S(1), S(0), S(0) -> S(1), S(0), S(0)", (3,))
def batch_norm_of_an_empty_shard_into_tensors(d: Given) -> Any:
    x, (w, b, mean, var) = d(count(4, 4, 2), S1), (d(torch.ones(4), S0) for _ in range(4))
    outs = {
        "out": d(torch.zeros(4, 4, 2), S1),
        "save_mean": d(torch.zeros(4), S0),
        "save_invstd": d(torch.zeros(4), S0),
    }
    return aten.native_batch_norm.out(x, w, b, mean, var, True, 0.5, 1e-5, **outs)


@check(
    "aten._batch_norm_with_update_functional.default: S(1), S(0), S(0), S(0), S(0) -> S(1), S(0), S(0), R, S(0), S(0)",
    (3,),
)
def functional_batch_norm_with_update_of_an_empty_shard(d: Given) -> Any:
    x, (w, b, mean, var) = d(count(4, 4, 2), S1), (d(torch.ones(4), S0) for _ in range(4))
    return aten._batch_norm_with_update_functional.default(x, w, b, mean, var, 0.5, 1e-5)[0]


@check(
    "aten._native_batch_norm_legit_functional.default: S(1), S(0), S(0), S(0), S(0) -> S(1), S(0), S(0), S(0), S(0)",
    (3,),
)
def functional_batch_norm_of_an_empty_shard(d: Given) -> Any:
    x, (w, b, mean, var) = d(count(4, 4, 2), S1), (d(torch.ones(4), S0) for _ in range(4))
    return aten._native_batch_norm_legit_functional.default(x, w, b, mean, var, True, 0.5, 1e-5)[0]


@check("aten.convolution_backward.default on (2,): R, R, R, then grad S(0)")
def second_gradient_of_a_convolution_with_groups(d: Given) -> Any:
    x, w, coming = d(count(1, 6, 2), grad=True), d(count(3, 2, 1), grad=True), d(count(1, 3, 2), grad=True)
    first = aten.convolution_backward.default(coming, x, w, [3], [1], [0], [1], False, [0], 3, [True, True, True])
    gradients = [d(count(1, 6, 2), S0), d(count(3, 2, 1), S0), d(count(3), S0)]
    return torch.autograd.grad(first, [coming, x, w], gradients)


@check("aten.linalg_ldl_solve.default: S(0), S(0), S(0) -> S(0)")
def ldl_solve_of_sharded_batches_for_one_matrix(d: Given) -> Any:
    factors, pivots = torch.stack([torch.eye(2), 2 * torch.eye(2)]), torch.ones(2, 2, dtype=torch.int32)
    pivots[:, 1] = 2
    return torch.linalg.ldl_solve(d(factors, S0), d(pivots, S0), d(count(2, 2), S0))


@check("aten._scaled_dot_product_flash_attention_for_cpu.default: R, R, S(3) -> S(3), R", hangs=True)
def attention_of_sharded_features(d: Given) -> Any:
    q = d(count(1, 1, 2, 2))
    return F.scaled_dot_product_attention(q, q, d(count(1, 1, 2, 2), S3))
