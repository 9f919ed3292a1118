"""Ops in place, their views, and tensors given as out=."""

from __future__ import annotations

from typing import Any

import torch

from tests.tools.by_hand.words import AVG, MAX, MIN, PRODUCT, S0, S1, S2, S3, SUM, Given, R, check, count

aten = torch.ops.aten


@check("aten.index_copy_.default on (2,): R, R, S(0)")
def index_copy_of_a_sharded_source(d: Given) -> Any:
    return d(torch.zeros(4, 4)).index_copy_(-1, d([0, 1, 2, 3]), d(count(4, 4), S0))


@check("aten.index_copy_.default on (2,): S(0), R, R")
def index_copy_into_sharded_rows(d: Given) -> Any:
    return d(torch.zeros(4, 4), S0).index_copy_(0, d([0, 1, 2, 3]), d(count(4, 4)))


@check("aten.index_copy_.default on (2,): P(max), R, R")
def index_copy_into_a_maximum(d: Given) -> Any:
    return d(count(4), MAX).index_copy_(0, d([1]), d([7.0]))


@check("aten.index_copy_.default on (2,): R, R, P(sum)")
def index_copy_of_partial_sums(d: Given) -> Any:
    return d(count(4)).index_copy_(0, d([1]), d([7.0], SUM))


@check("aten.index_add_.default on (2,): R, R, P(sum)")
def index_add_of_partial_sums(d: Given) -> Any:
    return d(count(4)).index_add_(0, d([1]), d([7.0], SUM))


@check("aten.index_add_.default on (2,): R, R, S(0)")
def index_add_of_a_sharded_source(d: Given) -> Any:
    return d(torch.zeros(4, 4)).index_add_(-1, d([0, 1, 2, 3]), d(count(4, 4), S0))


@check("aten.index_add_.default on (2,): P(max), R, R")
def index_add_into_a_maximum(d: Given) -> Any:
    return d(count(4), MAX).index_add_(0, d([1]), d([7.0]))


@check("aten.scatter_add_.default on (2,): P(product), R, R")
def scatter_add_into_partial_products(d: Given) -> Any:
    return d(count(4), PRODUCT).scatter_add_(0, d([1]), d([7.0]))


@check("aten.scatter_add_.default on (2,): R, R, S(1)")
def scatter_add_of_a_sharded_source(d: Given) -> Any:
    return d(torch.zeros(2, 4)).scatter_add_(0, d([[0, 1, 0, 1], [1, 0, 1, 0]]), d(count(2, 4), S1))


@check("aten.scatter_add_.default on (2, 2): (S(0), R), R, R", (2, 2))
def scatter_add_into_shards_on_two_axes(d: Given) -> Any:
    return d([1, 2, 3, 4], S0, R).scatter_add_(0, d([0]), d([7]))


@check("aten.masked_fill_.Tensor on (2,): P(avg), R, R")
def masked_fill_of_an_average(d: Given) -> Any:
    return d(count(4), AVG).masked_fill_(d([True, False, False, False]), d(7.0))


@check("aten.masked_fill_.Tensor on (2,): R, S(0), R")
def masked_fill_with_a_sharded_mask(d: Given) -> Any:
    return d(count(4)).masked_fill_(d([True, False, False, False], S0), d(7.0))


@check("aten.masked_fill_.Tensor on (2,): S(1), R, R", (6,))
def masked_fill_of_shards_by_one_number(d: Given) -> Any:
    return d(count(1, 4), S1).masked_fill_(d(True), d(7.0))


@check("aten.floor_divide_.Tensor on (2,): P(product), R")
def floor_divide_of_partial_products(d: Given) -> Any:
    return d([4, 9], PRODUCT).floor_divide_(d(2))


@check("aten.floor_divide_.Tensor on (2,): S(0), R")
def floor_divide_of_shards_with_an_empty_one(d: Given) -> Any:
    return d([9], S0).floor_divide_(d(2))


@check("aten.addmv_.default on (2,): R, S(0), R")
def addmv_in_place_with_a_sharded_matrix(d: Given) -> Any:
    return d(count(4)).addmv_(d(count(4, 2), S0), d(count(2)))


@check("aten.addmv_.default on (2,): P(min), R, R")
def addmv_in_place_of_partial_minima(d: Given) -> Any:
    return d(count(2), MIN).addmv_(d(count(2, 2)), d(count(2)))


@check("aten.addmv.default: R, S(0), R -> S(0)", (3,))
def addmv_of_one_number_and_a_sharded_matrix(d: Given) -> Any:
    return torch.addmv(d(1.0), d(count(4, 2), S0), d(count(2)))


@check("aten.cauchy_.default on (2, 2): (S(0), P(max))", (2, 2))
def cauchy_of_a_partial_maximum(d: Given) -> Any:
    made = d([1.0], S0, MAX).cauchy_()
    return list(made.shape if d.mesh is None else made.full_tensor().shape)


@check("aten.clone.default on (2,): S(0), then v = x[1:], v is written")
def write_to_a_slice_of_shards(d: Given) -> Any:
    x = d(count(4), S0).clone()
    x[1:].mul_(-2)
    return x


@check("aten.clone.default on (2,): S(1), then v = x.narrow(-1, 0, 1), v is written")
def write_to_the_columns_of_shards(d: Given) -> Any:
    x = d(count(2, 4), S1).clone()
    x.narrow(1, 0, 3).zero_()
    return x


@check("aten.linalg_solve_triangular.default: R, S(0) -> S(0)")
def solve_triangular_of_a_sharded_batch(d: Given) -> Any:
    lower = torch.eye(2).expand(2, 2, 2).contiguous() * 2
    return torch.linalg.solve_triangular(d(lower), d(count(2, 2, 1), S0), upper=False)


@check("aten.linalg_solve_triangular.out: R, S(0), S(0) -> S(0)")
def solve_triangular_into_a_sharded_batch(d: Given) -> Any:
    lower, out = torch.eye(2).expand(2, 2, 2).contiguous() * 2, d(torch.zeros(2, 2, 1), S0)
    torch.linalg.solve_triangular(d(lower), d(count(2, 2, 1), S0), upper=False, out=out)
    return out


@check("aten.squeeze_copy.default: S(2) -> S(1)")
def squeeze_copy_before_the_sharded_dim(d: Given) -> Any:
    from torch.distributed.tensor import Shard

    return torch.squeeze_copy(d(count(2, 1, 2), Shard(2)))


@check("aten.squeeze_copy.dim: S(2) -> S(2)")
def squeeze_copy_of_a_dim_that_is_not_one(d: Given) -> Any:
    from torch.distributed.tensor import Shard

    return torch.squeeze_copy(d(count(1, 1, 2), Shard(2)), 2)


@check("aten.squeeze_copy.default on (2, 2): (R, S(3))", (2, 2))
def squeeze_copy_on_two_axes(d: Given) -> Any:
    return torch.squeeze_copy(d(count(4, 1, 4, 1), R, S3))


@check("aten.gather.default: S(1), S(1) -> S(1)")
def gather_from_uneven_shards_by_fewer_positions(d: Given) -> Any:
    return torch.gather(d(count(1, 3), S1), 0, d([[0, 0]], S1))


@check("aten.gather.default on (2,): R, R")
def gather_of_one_number(d: Given) -> Any:
    return torch.gather(d(3.0), -1, d(0))


@check("aten.eye.m_out: S(1) -> S(1)")
def eye_into_shards(d: Given) -> Any:
    return torch.eye(4, 4, out=d(torch.zeros(4, 4), S1))


@check("aten.eye.m_out: P(sum) -> P(sum)")
def eye_into_partial_sums(d: Given) -> Any:
    return torch.eye(4, 4, out=d(torch.zeros(4, 4), SUM))


@check("aten.amax.out on (3,): S(1), R", (3,))
def amax_of_an_empty_shard_into_a_replica(d: Given) -> Any:
    out = d(torch.zeros(2))
    torch.amax(d(count(2, 1), S1), 1, out=out)
    return out


RESIZED = "only with an out= of another shape, which torch resizes with a warning"


@check("aten.amin.out: S(0), S(0) -> S(0)", judged=RESIZED)
def amin_over_no_dims_into_shards(d: Given) -> Any:
    out = d(torch.zeros(1), S0)
    torch.amin(d(count(4), S0), [], out=out)
    return str(tuple(out.shape))


@check("aten.std.correction_out: S(0), S(0) -> S(0)")
def std_over_no_dims_into_a_tensor(d: Given) -> Any:
    return torch.std(d(count(4), S0), [], out=d(torch.zeros(())))


@check("aten.index.Tensor_out: R, S(0), S(0) -> S(0)")
def index_by_a_sharded_mask_into_shards(d: Given) -> Any:
    return aten.index.Tensor_out(d(count(4)), [d([True, True, True, True], S0)], out=d(torch.zeros(4), S0))


@check("aten.embedding_dense_backward.out, call")
def embedding_gradient_into_a_tensor(d: Given) -> Any:
    return aten.embedding_dense_backward.out(d(count(1, 4)), d([2]), 8, -1, False, out=d(torch.zeros(8, 4)))


@check("aten.grid_sampler_3d_backward.out, call")
def grid_sampler_gradient_into_tensors(d: Given) -> Any:
    x, grid = torch.ones(1, 1, 1, 1, 1), torch.zeros(1, 1, 1, 1, 3)
    outs = {"out0": d(torch.zeros_like(x)), "out1": d(torch.zeros_like(grid))}
    return aten.grid_sampler_3d_backward.out(d(x), d(x), d(grid), 0, 0, False, [True, True], **outs)


@check("aten.randint_like.low_dtype_out, call")
def randint_like_into_a_tensor(d: Given) -> Any:
    return aten.randint_like.low_dtype_out(d(count(4), SUM), 3, 4, out=d(torch.zeros(4)))


@check("aten.normal.out on (2,): S(0), S(0)")
def normal_into_a_tensor(d: Given) -> Any:
    return aten.normal.out(d(count(4), S0), 3.0, 0.0, out=d(torch.zeros(4), S0))


@check("aten.native_group_norm.out, call")
def group_norm_into_tensors(d: Given) -> Any:
    outs = {"out0": d(torch.zeros(2, 6, 3), S0), "out1": d(torch.zeros(2, 2), S0), "out2": d(torch.zeros(2, 2), S0)}
    return aten.native_group_norm.out(
        d(count(2, 6, 3), S0), d(torch.ones(6)), d(torch.zeros(6)), 2, 6, 3, 2, 1e-5, **outs
    )


@check("aten.upsample_nearest1d_backward.grad_input: S(1), S(1) -> S(1)")
def upsampling_gradient_into_shards(d: Given) -> Any:
    out = d(torch.zeros(2, 4, 2), S1)
    return aten.upsample_nearest1d_backward.grad_input(d(count(2, 4, 4), S1), [4], [2, 4, 2], grad_input=out)


@check("aten._native_batch_norm_legit.out on (2,): R, R, R, P(sum), R, R, R, R")
def batch_norm_into_tensors(d: Given) -> Any:
    mean, outs = (
        d([0.0, 0.0], SUM),
        {"out": d(torch.zeros(3, 2)), "save_mean": d(torch.zeros(2)), "save_invstd": d(torch.zeros(2))},
    )
    aten._native_batch_norm_legit.out(d(count(3, 2)), None, None, mean, d([1.0, 1.0]), True, 0.5, 1e-5, **outs)
    return mean


@check("aten.native_dropout.out: S(2), S(2), S(2) -> S(2), S(2)")
def dropout_into_shards_with_an_empty_one(d: Given) -> Any:
    outs = {"out0": d(torch.zeros(1, 1, 1), S2), "out1": d([[[False]]], S2)}
    return aten.native_dropout.out(d(torch.ones(1, 1, 1), S2), 0.0, True, **outs)


@check("aten.native_dropout.default: S(0) -> S(0), S(0)")
def dropout_of_shards_with_an_empty_one(d: Given) -> Any:
    return torch.native_dropout(d(torch.ones(1, 1), S0), 1.0, True)


@check("aten.clone.default on (2,): S(0), then v = x[1:], x.mul_(-2)")
def a_slice_after_a_write_to_it(d: Given) -> Any:
    x = d(count(4), S0).clone()
    x[1:].mul_(-2)
    return x[1:]
