"""Gradients that DTensor refuses: a plain tensor of zeros meets a DTensor, or the placements do not fit."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (as torch's own pages call it)
from torch.distributed.tensor import DTensor

from tests.tools.by_hand.words import AVG, PRODUCT, S0, SUM, Given, R, check, count


def mixed(op: str, what: str) -> str:
    """The rule of a finding of this op whose gradient fails by a mixed call of another one."""
    return f"{op}, gradient: {what} gets a plain tensor beside DTensors"


@check(mixed("aten.split.Tensor", "aten.cat.default"))
def gradient_of_the_first_part_of_a_split(d: Given) -> Any:
    x = d(count(4, 2), S0, grad=True)
    x.split(2)[0].sum().backward()
    return x.grad


@check(mixed("aten.split_with_sizes.default", "aten.cat.default"))
def gradient_of_one_part_of_a_split_by_sizes(d: Given) -> Any:
    x = d(count(5), grad=True)
    x.split([2, 1, 2])[1].sum().backward()
    return x.grad


@check(mixed("aten.split_with_sizes_copy.default", "aten.cat.default"))
def gradient_of_one_copied_part(d: Given) -> Any:
    x = d(count(4), grad=True)
    torch.split_with_sizes_copy(x, [1, 2, 1])[0].sum().backward()
    return x.grad


@check(mixed("aten.unsafe_split.Tensor", "aten.cat.default"))
def gradient_of_the_first_part_of_an_unsafe_split(d: Given) -> Any:
    x = d(count(2, 2), grad=True)
    torch.unsafe_split(x, 1)[0].sum().backward()
    return x.grad


@check(mixed("aten.unbind.int", "aten.stack.default"))
def gradient_of_one_row(d: Given) -> Any:
    x = d(count(2, 2), grad=True)
    x.unbind(0)[0].sum().backward()
    return x.grad


@check(mixed("aten.unbind_copy.int", "aten.stack.default"))
def gradient_of_one_copied_row(d: Given) -> Any:
    x = d(count(2, 2), grad=True)
    torch.unbind_copy(x)[0].sum().backward()
    return x.grad


@check(mixed("aten.alias.default", "aten.cat.default"))
def gradient_of_the_first_chunk(d: Given) -> Any:
    x = d(count(4), grad=True)
    x.chunk(2)[0].sum().backward()
    return x.grad


@check(mixed("aten.cumprod.default", "aten.where.self"))
def gradient_of_cumprod_with_a_zero(d: Given) -> Any:
    x = d([1.0, 0.0, 2.0], grad=True)
    torch.cumprod(x, 0).sum().backward()
    return x.grad


@check(mixed("aten.cumprod.default", "aten.cat.default"))
def second_gradient_of_cumprod(d: Given) -> Any:
    x = d(count(2, 2), grad=True)
    (first,) = torch.autograd.grad(torch.cumprod(x, -1).sum(), x, create_graph=True)
    first.pow(2).sum().backward()
    return x.grad


@check(mixed("aten.cummax.default", "aten.scatter_add.default"))
def gradient_of_cummax(d: Given) -> Any:
    x = d([1.0, 3.0, 2.0], grad=True)
    torch.cummax(x, 0).values.sum().backward()
    return x.grad


@check(mixed("aten.mvlgamma.default", "aten.add.Tensor"))
def gradient_of_mvlgamma(d: Given) -> Any:
    x = d(count(3) + 3, grad=True)
    torch.mvlgamma(x, 2).sum().backward()
    return x.grad


@check(mixed("aten.index_put.default", "aten.index_put.default"))
def gradient_of_index_put(d: Given) -> Any:
    x, values = d(count(3, 2), grad=True), d([7.0, 8.0], grad=True)
    torch.index_put(x, (d(1),), values).sum().backward()
    return x.grad, values.grad


@check("aten.index_put_.default on (2,): R, R, R, then grad")
def gradient_of_index_put_in_place(d: Given) -> Any:
    x, values = d(count(2, 2), grad=True), d([7.0, 8.0], grad=True)
    x.clone().index_put_((d([True, False]),), values).sum().backward()
    return x.grad, values.grad


@check(mixed("aten._index_put_impl_.default", "aten.index_put.default"))
def gradient_of_an_assigned_row(d: Given) -> Any:
    x = d(count(2, 2), grad=True)
    y = x.clone()
    y[d([1])] = d([[7.0, 8.0]])
    y.sum().backward()
    return x.grad


@check(mixed("aten.slice_scatter.default", "aten.slice_scatter.default"))
def gradient_of_slice_scatter(d: Given) -> Any:
    x, y = d(count(4), grad=True), d(count(2), grad=True)
    torch.slice_scatter(x, y, 0, 0, 2).sum().backward()
    return x.grad, y.grad


@check(mixed("aten.select_scatter.default", "aten.select_scatter.default"))
def gradient_of_select_scatter(d: Given) -> Any:
    x, y = d(count(2, 2), grad=True), d(count(2), grad=True)
    torch.select_scatter(x, y, 0, 1).sum().backward()
    return x.grad, y.grad


@check(mixed("aten.diagonal_scatter.default", "aten.diagonal_scatter.default"))
def gradient_of_diagonal_scatter(d: Given) -> Any:
    x, y = d(count(2, 2), grad=True), d(count(2), grad=True)
    torch.diagonal_scatter(x, y).sum().backward()
    return x.grad, y.grad


@check(mixed("aten.grid_sampler_2d.default", "aten.scatter_add.default"))
def gradient_of_grid_sample_twice(d: Given) -> Any:
    x, grid = d(count(1, 1, 2, 2), grad=True), d(torch.zeros(1, 1, 1, 2), grad=True)
    (first,) = torch.autograd.grad(F.grid_sample(x, grid, align_corners=False).sum(), grid, create_graph=True)
    first.sum().backward()
    return x.grad


@check(mixed("aten.glu_backward.default", "aten.glu_backward.default"))
def second_gradient_of_glu(d: Given) -> Any:
    x, coming = d(count(4, 2), grad=True), d(count(2, 2), grad=True)
    torch.ops.aten.glu_backward.default(coming, x, 0).sum().backward()
    return x.grad, coming.grad


@check(mixed("aten.trace.default", "aten.index_fill.int_Tensor"))
def gradient_of_trace(d: Given) -> Any:
    x = d(count(2, 2), grad=True)
    torch.trace(x).backward()
    return x.grad


@check(mixed("aten.triangular_solve.default", "aten.add.Tensor"))
def gradient_of_triangular_solve(d: Given) -> Any:
    b, a = d(count(2, 1), grad=True), d([[1.0, 2.0], [0.0, 3.0]], grad=True)
    torch.triangular_solve(b, a)[1].sum().backward()
    return b.grad, a.grad


@check("aten.ormqr.default on (2,): R, R, R, then grad")
def gradient_of_ormqr(d: Given) -> Any:
    a, tau, c = d(count(1, 3) / 8, grad=True), d([0.5], grad=True), d(count(1, 1), grad=True)
    torch.ormqr(a, tau, c).sum().backward()
    return a.grad, tau.grad, c.grad


@check("aten.linalg_householder_product.default on (2,): R, R, then grad")
def gradient_of_householder_product(d: Given) -> Any:
    a, tau = d(count(3, 2) / 8, grad=True), d([0.5], grad=True)
    torch.linalg.householder_product(a, tau).sum().backward()
    return a.grad, tau.grad


@check(mixed("aten.lu_unpack.default", "aten.cat.default"))
def gradient_of_lu_unpack(d: Given) -> Any:
    data = d(count(2, 3), grad=True)
    torch.lu_unpack(data, d([1, 2], dtype=torch.int32))[1].sum().backward()
    return data.grad


@check(mixed("aten.linalg_eig.default", "aten.cat.default"))
def gradient_of_the_first_eigenvector(d: Given) -> Any:
    x = d([[2.0, 1.0], [1.0, 3.0]], grad=True)
    torch.linalg.eig(x)[1].split(1, -1)[0].abs().sum().backward()
    return x.grad


@check(mixed("aten._linalg_det.default", "aten.where.self"))
def second_gradient_of_a_complex_determinant(d: Given) -> Any:
    x = d([[1.0, 2.0], [3.0, 4.0]], dtype=torch.complex64, grad=True)
    (first,) = torch.autograd.grad(torch.linalg.det(x).abs(), x, create_graph=True)
    first.abs().sum().backward()
    return x.grad


@check("aten._linalg_det.default on (2,): R, then grad twice")
def second_gradient_of_determinants(d: Given) -> Any:
    x = d(torch.stack([torch.eye(3), 2 * torch.eye(3)]), grad=True)
    (first,) = torch.autograd.grad(torch.linalg.det(x).sum(), x, create_graph=True)
    first.pow(2).sum().backward()
    return x.grad


@check(mixed("aten._linalg_eigh.default", "aten.diagonal_scatter.default"))
def second_gradient_of_eigh(d: Given) -> Any:
    x = d([[2.0, 1.0], [1.0, 3.0]], grad=True)
    values, vectors = torch.linalg.eigh(x)
    (first,) = torch.autograd.grad(values.pow(2).sum() + vectors.abs().sum(), x, create_graph=True)
    first.pow(2).sum().backward()
    return x.grad


@check("aten._linalg_slogdet.default on (2,): R, then grad")
def gradient_of_slogdet_of_a_complex_matrix(d: Given) -> Any:
    x = d([[2.0, 1.0], [1.0, 3.0]], dtype=torch.complex64, grad=True)
    sign, logarithm = torch.linalg.slogdet(x)
    (sign.real + logarithm).backward()
    return x.grad


@check("aten.linalg_solve_triangular.default, gradient")
def gradient_of_solve_triangular_of_a_sharded_batch(d: Given) -> Any:
    a = d(torch.stack([torch.eye(2), 2 * torch.eye(2)]), grad=True)
    b = d(count(2, 2, 1), S0, grad=True)
    torch.linalg.solve_triangular(a, b, upper=False).sum().backward()
    return a.grad, b.grad


@check("aten.prod.default, gradient")
def gradient_of_the_product_of_uneven_shards_with_a_zero(d: Given) -> Any:
    x = d([[1.0, 2.0], [0.0, 3.0], [4.0, 5.0]], S0, grad=True)
    torch.prod(x).backward()
    return x.grad


@check("aten.prod.default on (2,): P(product), then grad")
def gradient_of_the_product_of_partial_products(d: Given) -> Any:
    x = d([0.0, 2.0], PRODUCT, grad=True)
    torch.prod(x).backward()
    return x.grad


@check(mixed("aten.prod.dim_int", "aten.cat.default"))
def second_gradient_of_prod_with_a_zero(d: Given) -> Any:
    x = d([[0.0, 2.0], [3.0, 0.0]], grad=True)
    (first,) = torch.autograd.grad(torch.prod(x, 0).sum(), x, create_graph=True)
    first.pow(2).sum().backward()
    return x.grad


@check("aten.squeeze_.dim on (2,): R, then grad")
def gradient_of_squeeze_in_place(d: Given) -> Any:
    x = d(count(2, 1), grad=True)
    x.clone().squeeze_(-1).sum().backward()
    return x.grad


@check("aten.special_i1e.default on (2,): R, then grad twice")
def second_gradient_of_i1e(d: Given) -> Any:
    x = d(count(2), grad=True)
    (first,) = torch.autograd.grad(torch.special.i1e(x).sum(), x, create_graph=True)
    first.sum().backward()
    return x.grad


@check("aten.alias.default on (2,): R, then root | grad twice")
def second_gradient_of_the_root_of_a_magnitude(d: Given) -> Any:
    x = d(count(2), grad=True)
    (first,) = torch.autograd.grad(x.abs().sqrt().sum(), x, create_graph=True)
    first.sum().backward()
    return x.grad


@check("aten.alias.default, gradient")
def second_gradient_after_a_redistribution(d: Given) -> Any:
    x = d(count(2), grad=True)
    y = x.redistribute(placements=[R]) if isinstance(x, DTensor) else x
    (first,) = torch.autograd.grad(y.abs().sum(), x, create_graph=True)
    first.sum().backward()
    return x.grad


@check("aten.alias.default, gradient")
def gradient_of_the_norm_of_an_average(d: Given) -> Any:
    x = d(3.0, AVG, grad=True)
    torch.linalg.vector_norm(x).backward()
    return x.grad


@check("aten.alias.default on (2,): P(sum), then norm | grad")
def gradient_of_the_norm_of_a_partial_sum(d: Given) -> Any:
    x = d(3.0, SUM, grad=True)
    torch.linalg.vector_norm(x).backward()
    return x.grad


@check("aten.lt_.Scalar, gradient")
def gradient_of_a_comparison_in_place(d: Given) -> Any:
    x = d(count(2), S0, grad=True)
    x.clone().lt_(1.5).sum().backward()
    kind = "DTensor" if isinstance(x, DTensor) and isinstance(x.grad, DTensor) else type(x.grad).__name__
    return kind if d.mesh is not None else "DTensor", x.grad


def _two_steps(d: Given, call: Any, coming: Any, *parameters: Any) -> Any:
    optimizer = torch.optim.SGD(parameters, lr=0.5, momentum=0.5, foreach=True)
    for _ in range(2):
        optimizer.zero_grad()
        call(*parameters).backward(coming)
        optimizer.step()
    return parameters


@check("aten.nextafter_.default, gradient")
def two_steps_of_sgd_through_nextafter(d: Given) -> Any:
    x, y = d(count(2), grad=True), d([3.0, 3.0], grad=True)
    return _two_steps(d, lambda x, y: x.clone().nextafter_(y), d([1.0, 1.0]), x, y)


@check("aten.alias.default on (2,): S(0), then sgd")
def two_steps_of_sgd_whose_gradient_is_elsewhere(d: Given) -> Any:
    return _two_steps(d, lambda w: w[...], d([1.0]), d([3.0], S0, grad=True))
