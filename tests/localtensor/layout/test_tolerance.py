"""How far from the oracle a right answer may be, by measuring."""

import pytest
import torch

from localtensor.layout.tolerance import (
    JUMP_SHARE,
    NOISE_FACTOR,
    all_finite,
    all_within_slack,
    is_inexact,
    max_abs,
    measured_slack,
    widen_slack,
    within_slack,
)

NAN, INF = float("nan"), float("inf")


def double(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.float64, True), (torch.bfloat16, True), (torch.complex64, True), (torch.int64, False), (torch.bool, False),
     (torch.float8_e4m3fn, False)],
)  # fmt: skip
def test_floats_and_complex_numbers_round_but_not_floats_of_one_byte(dtype, expected):
    assert is_inexact(torch.zeros(1, dtype=dtype)) is expected


def test_the_scale_is_that_of_the_largest_finite_element_and_never_zero():
    assert max_abs(double(1, -3, INF, NAN)) == 3
    assert max_abs(torch.zeros(2)) > 0 and max_abs(torch.zeros(0)) > 0
    assert max_abs(torch.tensor([3 + 4j])) == 5


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.complex64])
def test_nan_is_not_finite_in_any_dtype(dtype):
    assert all_finite(double(1, -3).to(dtype)) and not all_finite(double(1, NAN).to(dtype))
    assert all_finite(torch.tensor([1, 2])) and all_finite(torch.tensor([True]))


def test_a_result_that_no_one_moved_may_be_off_by_its_own_digits():
    eps = torch.finfo(torch.float64).eps
    assert measured_slack(double(1, -4), []) == NOISE_FACTOR * eps * 4
    assert measured_slack(torch.zeros(0), [torch.zeros(0)]).ndim == 0


def test_a_result_may_be_off_by_a_thousand_times_what_noise_moved_it():
    value = double(1, 2)
    slack = measured_slack(value, [value + double(0, 1e-9), value - double(3e-9, 0)])
    assert slack.ndim == 0 and 3e-6 < float(slack) < 3.01e-6


def test_an_element_that_jumps_says_nothing_and_the_others_keep_their_room():
    value = double(1, 2, 3)
    slack = measured_slack(value, [value + double(0, 1e-9, 5)])
    assert slack.isinf().tolist() == [False, False, True] and float(slack[0]) < 1.01e-6


@pytest.mark.parametrize(("apart", "jumps"), [(0.9 * JUMP_SHARE, False), (1.1 * JUMP_SHARE, True)])
def test_a_jump_is_more_than_a_thousandth_of_the_scale(apart, jumps):
    value = double(1, 10)
    assert bool(measured_slack(value, [value + double(10 * apart, 0)]).isinf().any()) is jumps


def test_one_unit_of_bfloat16_is_no_jump():
    value = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    assert not measured_slack(value, [value * (1 + 2**-7)]).isinf().any()


def test_nan_and_infinities_that_stay_have_not_moved():
    value = double(NAN, INF, 1)
    assert float(measured_slack(value, [value.clone()])) == float(measured_slack(double(1), []))
    assert measured_slack(value, [double(NAN, 1, 1)]).isinf().tolist() == [False, True, False]


def test_integers_are_exact_but_where_noise_moved_them():
    value = torch.tensor([1, 2])
    assert measured_slack(value, [value.clone()]) == 0
    assert measured_slack(value, [value.clone(), torch.tensor([1, 3])]).tolist() == [0, INF]
    assert measured_slack(1.5, []) is None


def test_a_text_is_exact_but_where_noise_or_double_precision_changed_it():
    assert measured_slack("0.1", ["0.1"]) == 0 == widen_slack(torch.zeros(()), "0.1", "0.1")
    assert (
        measured_slack("0.1", ["0.1", "0.2"]) is None and widen_slack(torch.zeros(()), "0.1", "0.10000000149") is None
    )


def test_results_of_another_shape_or_dtype_tell_nothing():
    value = double(1, 2)
    assert measured_slack(value, [double(5), torch.tensor([7.0, 7.0]), "gone"]) == measured_slack(value, [])


def test_single_precision_has_room_for_its_distance_from_double():
    value, slack = torch.tensor([1.0, 2.0]), torch.tensor(0.0)
    assert float(widen_slack(slack, value, double(1, 2 + 1e-6))) == pytest.approx(4e-6)
    assert float(widen_slack(slack, value, double(1, 20))) == 0  # that is no rounding
    assert widen_slack(torch.zeros(2), torch.tensor([1, 2]), torch.tensor([1, 3])).tolist() == [0, INF]
    assert widen_slack(slack, value, None) is slack and widen_slack(None, "no tensor", value) is None
    assert widen_slack(slack, value, double(1)) is slack


def test_elements_are_close_if_equal_both_nan_or_within_the_slack():
    want = double(1, NAN, INF, 1, 1)
    got = double(1 + 1e-9, NAN, INF, 2, NAN)
    assert within_slack(got, want, torch.tensor(1e-8)).tolist() == [True, True, True, False, False]
    assert within_slack(got, want, double(0, 0, 0, INF, INF)).tolist() == [False, True, True, True, True]
    assert within_slack(torch.tensor([1, 2]), torch.tensor([1, 3]), torch.tensor(9.0)).tolist() == [True, False]
    tiny = torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn)
    assert within_slack(tiny, tiny.clone(), torch.zeros(())).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("both", [NAN, INF])
def test_an_element_that_is_not_finite_in_all_runs_changes_no_tolerance(dtype, both):
    value = torch.linspace(-1, 1, 40).to(dtype)
    noisy = [value + value * seed * torch.finfo(dtype).eps for seed in (1, 2)]
    exact = value.to(torch.complex128 if dtype.is_complex else torch.float64) * (1 + 1e-6)
    more = [torch.cat([x, torch.full((1,), both, dtype=x.dtype)]) for x in (value, *noisy, exact)]
    slack = measured_slack(value, noisy)
    assert torch.equal(slack, measured_slack(more[0], more[1:3])) and slack > 0
    assert torch.equal(widen_slack(slack, value, exact), widen_slack(slack, more[0], more[3]))
    assert max_abs(value) == max_abs(more[0])


@pytest.mark.parametrize("slack", [0.0, 0.5, INF, double(INF, 0.5, 0)])
@pytest.mark.parametrize("got", [(1, 2, 3), (1, 2.4, 3), (1, 2.6, 3), (9, 2, 3), (NAN, 2, 3), (1, 2, NAN), (INF, 2, 3)])
@pytest.mark.parametrize("want", [(1, 2, 3), (NAN, 2, 3), (INF, 2, 3)])
def test_all_elements_are_within_the_slack_where_each_is(got, want, slack):
    got, want, slack = double(*got), double(*want), torch.as_tensor(slack, dtype=torch.float64)
    assert all_within_slack(got, want, slack) == bool(within_slack(got, want, slack).all())
    assert all_within_slack(want, got, slack) == bool(within_slack(want, got, slack).all())
