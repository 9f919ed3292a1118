"""Reductions and scans, views of them among it."""

from __future__ import annotations

from typing import Any

import torch

from tests.tools.by_hand.words import MAX, MIN, PRODUCT, S0, S1, S2, S3, SUM, Given, check, count


@check("aten.any.default on (2,): S(0), then cast float64")
def any_counted_as_floats(d: Given) -> Any:
    return torch.any(d([1.0, 2.0], S0)).to(torch.float32)


@check("aten.any.dim on (2,): S(3), then sum")
def any_along_a_dim_then_summed(d: Given) -> Any:
    return torch.any(d(count(2, 4), S1), 1).sum()


@check("aten.any.dims on (2,): S(0), then sum 0")
def any_along_dims_then_summed(d: Given) -> Any:
    return torch.any(d(count(4, 2), S0), (0,)).sum(0)


@check("aten.any.default on (2,): S(0), then times 2")
def any_times_a_number(d: Given) -> Any:
    return torch.any(d(count(4), S0)) * 2


@check("aten.any.dims: S(1) -> P(sum)")
def any_of_bytes(d: Given) -> Any:
    return torch.any(d([[1, 1, 0, 1]], S1, dtype=torch.uint8), (0, 1))


@check("aten.any.dim: P(sum) -> P(sum)")
def any_of_partial_sums(d: Given) -> Any:
    return torch.any(d.pieces(SUM, [1.0, 0.0], [-1.0, 0.0]), 0)


@check("aten.isin.Tensor_Tensor on (2,): R, S(0), then sum")
def isin_of_sharded_elements_then_summed(d: Given) -> Any:
    return torch.isin(d([1, 2, 5]), d([1, 2, 1, 2], S0)).sum()


@check("aten.cumprod.default: S(1) -> S(1)")
def cumprod_along_the_sharded_dim(d: Given) -> Any:
    return torch.cumprod(d(count(2, 4), S1), -1)


@check("aten.cumsum.default: S(2) -> S(2)")
def cumsum_along_the_sharded_dim(d: Given) -> Any:
    return torch.cumsum(d(count(2, 1, 4), S2), -1)


@check("aten.logcumsumexp.default: S(1) -> S(1)")
def logcumsumexp_along_the_sharded_dim(d: Given) -> Any:
    return torch.logcumsumexp(d(count(2, 4), S1), -1)


@check("aten.alias.default on (2,): S(0), then cumsum")
def cumsum_of_a_view(d: Given) -> Any:
    return d(count(4), S0)[...].cumsum(-1)


@check("aten._foreach_pow.ScalarList on (2,): R, S(0), then cumsum")
def cumsum_of_powers(d: Given) -> Any:
    return torch.pow(d(count(4), S0), 2).cumsum(-1)


@check("aten.std.correction: S(1) -> S(1)")
def std_over_no_dims(d: Given) -> Any:
    return torch.std(d(count(2, 4), S1), [])


@check("aten.std_mean.correction: S(1) -> S(1), S(1)")
def std_mean_over_no_dims_that_keeps_them(d: Given) -> Any:
    return torch.std_mean(d(count(2, 4), S1), [], keepdim=True)


@check("aten.var.correction: S(1) -> S(1)")
def var_over_no_dims(d: Given) -> Any:
    return torch.var(d(count(2, 4), S1), [])


@check("aten.var_mean.correction: S(2) -> S(2), S(2)")
def var_mean_over_no_dims(d: Given) -> Any:
    return torch.var_mean(d(count(2, 1, 4), S2), [])


@check("aten.amax.default: S(1) -> S(1)")
def amax_over_no_dims(d: Given) -> Any:
    return torch.amax(d(count(2, 4), S1), [], True)


@check("aten.amin.default: S(1) -> S(1)")
def amin_over_no_dims(d: Given) -> Any:
    return torch.amin(d(count(2, 4), S1), [], True)


@check("aten.sum.dim_IntList: S(0) -> S(0)")
def sum_over_no_dims(d: Given) -> Any:
    return torch.sum(d(count(4), S0), [])


@check("aten.aminmax.default: S(1) -> S(1), S(1)")
def aminmax_that_keeps_the_dims(d: Given) -> Any:
    return tuple(torch.aminmax(d(count(2, 4), S1), keepdim=True))


@check("aten.logsumexp.default: S(3) -> S(3)")
def logsumexp_over_no_dims(d: Given) -> Any:
    return torch.logsumexp(d(count(2, 1, 1, 4), S3), [], True)


@check("aten.logsumexp.default: S(1) -> S(0)")
def logsumexp_that_keeps_the_dim(d: Given) -> Any:
    return torch.logsumexp(d(count(2, 4), S1), [0], True)


@check("aten.logsumexp.default on (2,): R")
def logsumexp_of_a_scalar(d: Given) -> Any:
    return torch.logsumexp(d(2.0), [0])


@check("aten.linalg_vector_norm.default: S(0) -> S(0)")
def vector_norm_over_no_dims(d: Given) -> Any:
    return torch.linalg.vector_norm(d(count(4), S0), 1, [])


@check("aten.linalg_vector_norm.default: P(max) -> P(max)")
def largest_magnitude_of_partial_maxima(d: Given) -> Any:
    return torch.linalg.vector_norm(d.pieces(MAX, [1.0, -9.0], [-9.0, 2.0]), float("inf"))


@check("aten.linalg_vector_norm.default: P(min) -> P(min)")
def smallest_magnitude_of_partial_minima(d: Given) -> Any:
    return torch.linalg.vector_norm(d.pieces(MIN, [-5.0, 1.0], [1.0, -7.0]), float("-inf"))


@check("aten.linalg__powsum.default: P(sum) -> P(sum)")
def powsum_of_partial_sums(d: Given) -> Any:
    return torch.linalg._powsum(d.pieces(SUM, [3.0, 1.0], [1.0, 2.0]))


@check("aten.linalg__powsum.default: S(0) -> P(sum)")
def powsum_of_complex_numbers_as_real_ones(d: Given) -> Any:
    return torch.linalg._powsum(d([1 + 2j, 3 + 4j], S0), 2, dtype=torch.float64)


@check("aten._foreach_powsum.Scalar: P(sum), R -> P(sum), R")
def foreach_powsum_of_partial_sums(d: Given) -> Any:
    return torch.ops.aten._foreach_powsum.Scalar([d.pieces(SUM, [3.0], [1.0]), d([2.0])], 2)


@check("aten.nansum.default: P(sum) -> P(sum)")
def nansum_of_partial_sums(d: Given) -> Any:
    nan = float("nan")
    return torch.nansum(d.pieces(SUM, [1.0, nan, 2.0], [1.0, 5.0, 2.0]))


@check("aten.prod.default: P(product) -> P(product)")
def product_of_complex_numbers_as_real_ones(d: Given) -> Any:
    return torch.prod(d.pieces(PRODUCT, [2j], [3j]), dtype=torch.float64)


@check("aten.prod.default on (2,): S(0)")
def product_of_complex_shards(d: Given) -> Any:
    return torch.prod(d([1 + 1j, 2 + 0j], S0))


@check("aten.sum.default on (2,): S(0), then cast int64")
def sum_cast_to_integers(d: Given) -> Any:
    return torch.sum(d([0.5 + 1j, 0.25 + 0j, 1.0 + 2j, 0.5 + 0j], S0)).to(torch.int64)


@check("aten.norm.ScalarOpt_dim on (2,): S(1), then sum")
def norm_then_summed(d: Given) -> Any:
    return torch.norm(d(count(2, 2), S1), 2.0, [1]).sum()


@check(
    "prims.sum.default: S(3) -> S(3)", judged="prims are no public API; the same of torch.sum is a finding of its own"
)
def sum_of_prims_over_no_dims(d: Given) -> Any:
    return torch.ops.prims.sum.default(d(count(2, 1, 1, 4), S3), [])


@check(
    "prims.var.default: S(0) -> S(0)", judged="prims are no public API; the same of torch.var is a finding of its own"
)
def var_of_prims_over_no_dims(d: Given) -> Any:
    return torch.ops.prims.var.default(d(count(4), S0), [], 0.0)


@check("prims.prod.default, call")
def product_of_prims_of_complex_shards(d: Given) -> Any:
    return torch.ops.prims.prod.default(d([1 + 1j, 2 + 0j], S0), [0])


@check("aten.argmin.default on (2,): S(2)")
def argmin_of_fewer_elements_than_ranks(d: Given) -> Any:
    return torch.argmin(d([[[3.0]]], S2))


@check("aten.amax.default: S(0) -> P(max)", (3,))
def amax_of_an_empty_shard(d: Given) -> Any:
    return torch.amax(d(count(4), S0))


@check("aten.amin.default: S(2) -> P(min)", (3,))
def amin_of_an_empty_shard(d: Given) -> Any:
    return torch.amin(d(count(2, 1, 4), S2), 2)


@check("aten.max.default: S(0) -> P(max)", (3,))
def max_of_an_empty_shard(d: Given) -> Any:
    return torch.max(d(count(4), S0))


@check("aten.aminmax.default: S(0) -> P(min), P(max)", (3,))
def aminmax_of_an_empty_shard(d: Given) -> Any:
    return tuple(torch.aminmax(d(count(4), S0)))


@check("aten._foreach_max.default: R, S(1) -> R, P(max)", (3,))
def foreach_max_of_an_empty_shard(d: Given) -> Any:
    return torch._foreach_max([d(count(2)), d(count(1, 4), S1)])


@check("aten.linalg_vector_norm.default: S(0) -> P(min)", (3,))
def vector_norm_of_an_empty_shard(d: Given) -> Any:
    return torch.linalg.vector_norm(d(count(4), S0), float("-inf"))


@check("aten._local_scalar_dense.default on (2,): S(0)")
def item_of_a_sharded_number(d: Given) -> Any:
    return d([3.0], S0).item()


@check("aten._local_scalar_dense.default on (2,): P(sum)")
def item_of_a_partial_sum(d: Given) -> Any:
    return d.pieces(SUM, 3.0, 4.0).item()


@check("aten._local_scalar_dense.default: P(max) -> -")
def item_of_a_partial_maximum(d: Given) -> Any:
    return int(d.pieces(MAX, 3, 4))


@check("aten.linalg_vector_norm.default: S(1) -> S(1)")
def vector_norm_of_sharded_columns_over_no_dims(d: Given) -> Any:
    return torch.linalg.vector_norm(d(count(2, 4), S1), 1, [])
