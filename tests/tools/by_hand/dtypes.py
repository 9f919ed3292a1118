"""Complex numbers, integers and float8."""

from __future__ import annotations

from typing import Any

import torch

from tests.tools.by_hand.words import AVG, S0, S1, SUM, Given, check, count

aten = torch.ops.aten
UNHASHABLE = "unhashable type: 'complex'"


def bits(*values: int) -> torch.Tensor:
    return torch.tensor(values)


@check("aten.__lshift__.Scalar: S(0) -> S(0)")
def shift_to_the_left_by_a_number(d: Given) -> Any:
    return d([1, 2, 3, 4], S0) << 1


@check("aten.__lshift__.Tensor: S(1), R -> S(1)")
def shift_to_the_left_by_a_tensor(d: Given) -> Any:
    return d([[1, 2], [3, 4]], S1) << d(2)


@check("aten.__lshift__.Tensor on (2,): R, S(0)")
def shift_to_the_left_by_shards(d: Given) -> Any:
    return d([1, 2, 3, 4]) << d([1, 2, 1, 2], S0)


@check("aten.__rshift__.Scalar: R -> R")
def shift_to_the_right_by_a_number(d: Given) -> Any:
    return d([8, 16]) >> 1


@check("aten.__rshift__.Tensor: R, R -> R")
def shift_to_the_right_by_a_tensor(d: Given) -> Any:
    return d([8, 16]) >> d([1, 2])


@check(f"aten.mul.Scalar, call: {UNHASHABLE}")
def product_with_a_complex_number(d: Given) -> Any:
    return aten.mul.Scalar(d(count(2), S0, dtype=torch.complex64), 2j)


@check(f"aten.sub_.Scalar, call: {UNHASHABLE}")
def difference_in_place_of_a_complex_number(d: Given) -> Any:
    return aten.sub_.Scalar(d(count(2), S0, dtype=torch.complex64), 2j)


@check(f"aten.eq_.Scalar, call: {UNHASHABLE}")
def comparison_with_a_complex_number(d: Given) -> Any:
    return d(count(2), S0, dtype=torch.complex64).eq_(2j)


@check(f"aten.ne_.Scalar, call: {UNHASHABLE}")
def unequal_to_a_complex_number(d: Given) -> Any:
    return d(count(2), S0, dtype=torch.complex64).ne_(1 + 0j)


@check("aten.lerp.Scalar_out on (2,): S(0), S(0), S(0)")
def lerp_by_a_complex_number(d: Given) -> Any:
    return torch.lerp(d([1 + 1j, 2j], S0), d([3 + 1j, 4j], S0), 0.5j, out=d([0j, 0j], S0))


@check(f"aten.constant_pad_nd.default, call: {UNHASHABLE}")
def pad_with_a_complex_number(d: Given) -> Any:
    return torch.constant_pad_nd(d(count(2, 2), S0, dtype=torch.complex64), [1, 1], 2j)


@check(f"aten.index_fill.int_Scalar, call: {UNHASHABLE}")
def index_fill_with_a_complex_number(d: Given) -> Any:
    return torch.index_fill(d(count(4), dtype=torch.complex64), 0, d([1]), 2j)


@check(
    "aten.addr.default on (2,): P(avg), P(avg), R, after a call with (x0, x1, x2, beta=(0.4+0.6j), alpha=(0.1+0.3j))"
)
def addr_with_complex_factors(d: Given) -> Any:
    x, y = d(count(2), AVG, dtype=torch.complex64), d(count(2), dtype=torch.complex64)
    z = d(torch.ones(2, 2), AVG, dtype=torch.complex64)
    return [torch.addr(z, x, y, beta=2j, alpha=1j) for _ in range(2)]


@check(f"aten.float_power.Tensor_Scalar, call: {UNHASHABLE}")
def float_power_of_complex_numbers(d: Given) -> Any:
    return torch.float_power(d([1 + 1j], S0), 2)


@check(f"aten.pow.Tensor_Scalar_out, call: {UNHASHABLE}")
def power_into_a_tensor(d: Given) -> Any:
    out = d([0j, 0j], S0)
    torch.pow(d([1 + 1j, 2j], S0), 2j, out=out)
    return out


@check(f"aten.addmm.default, gradient: {UNHASHABLE}")
def gradient_of_addmm_with_a_complex_factor(d: Given) -> Any:
    x = d(torch.ones(2, 2), dtype=torch.complex64, grad=True)
    torch.addmm(d(torch.ones(2, 2), dtype=torch.complex64), x, x, alpha=2j).abs().sum().backward()
    return x.grad


@check(f"aten.angle.default, gradient: {UNHASHABLE}")
def gradient_of_angle(d: Given) -> Any:
    x = d([1 + 2j, 3 + 1j], S0, grad=True)
    torch.angle(x).sum().backward()
    return x.grad


@check(f"aten.polar.default, gradient: {UNHASHABLE}")
def gradient_of_polar(d: Given) -> Any:
    r, angle = d(count(2), S0, grad=True), d(count(2), S0, grad=True)
    torch.polar(r, angle).abs().sum().backward()
    return r.grad, angle.grad


@check(f"aten._foreach_pow.ScalarAndTensor, gradient: {UNHASHABLE}")
def gradient_of_a_power_of_a_number(d: Given) -> Any:
    x = d([1 + 2j], grad=True)
    torch._foreach_pow(2, [x])[0].abs().sum().backward()
    return x.grad


@check("aten.pow.Tensor_Tensor on (2,): R, R, then grad")
def gradient_of_a_complex_power(d: Given) -> Any:
    x, y = d(1 + 2j, grad=True), d(2 + 1j, grad=True)
    torch.pow(x, y).abs().backward()
    return x.grad, y.grad


@check("aten.mm.default: S(1), S(0) -> P(sum)", judged="float8 sums are carried by no backend; DTensor claims them")
def product_of_float8_matrices(d: Given) -> Any:
    x, y = d(torch.ones(2, 4), S1, dtype=torch.float8_e4m3fn), d(torch.ones(4, 2), S0, dtype=torch.float8_e4m3fn)
    return torch.mm(x, y)


@check("aten._scaled_mm.default on (2,): R, R, R, R")
def scaled_product_of_float8_matrices(d: Given) -> Any:
    x, y = d(torch.ones(16, 16), dtype=torch.float8_e4m3fn), d(torch.ones(16, 16), dtype=torch.float8_e4m3fn)
    return torch._scaled_mm(x, y.t(), d(1.0), d(1.0))


@check(
    "aten._scaled_mm.default, call",
    judged="DTensor says by name that it does not take scale_result",
)
def scaled_product_with_a_scaled_result(d: Given) -> Any:
    x, y = d(torch.ones(16, 16), dtype=torch.float8_e4m3fn), d(torch.ones(16, 16), dtype=torch.float8_e4m3fn)
    return torch._scaled_mm(x, y.t(), d(1.0), d(1.0), scale_result=d(1.0), out_dtype=torch.float8_e4m3fn)


@check(
    "aten._scaled_mm.default: S(1), S(0), R, R -> P(sum)",
    judged="float8 sums are carried by no backend; DTensor claims them",
)
def scaled_product_of_sharded_float8_matrices(d: Given) -> Any:
    x, y = d(torch.ones(16, 16), S1, dtype=torch.float8_e4m3fn), d(torch.ones(16, 16), S0, dtype=torch.float8_e4m3fn)
    return torch._scaled_mm(x, y, d([[1.0]]), d([[1.0]]), out_dtype=torch.float8_e4m3fn)


@check("aten._to_copy.default: P(sum) -> P(sum)")
def complex_sums_as_short_integers(d: Given) -> Any:
    return d.pieces(SUM, [0.5 + 0j], [0.5 + 0j]).to(torch.int16)


@check("aten.ldexp_.default on (2,): R, R, then grad twice")
def second_gradient_of_ldexp_in_place(d: Given) -> Any:
    x, y = d(1 + 2j, grad=True), d(2 + 1j, grad=True)
    first = torch.autograd.grad(x.clone().ldexp_(y), [x, y], d(1 + 1j), create_graph=True)
    return torch.autograd.grad(first, [x, y], [d(1 + 0j), d(2 + 0j)])
