"""How far from the truth a right answer may be, by measuring."""

import pytest
import torch

from localtensor.layout.tolerance import GENEROUS, JUMP, close, rounds, scale_of, slack_of, widened

NAN, INF = float("nan"), float("inf")


def double(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.float64, True), (torch.bfloat16, True), (torch.complex64, True), (torch.int64, False), (torch.bool, False),
     (torch.float8_e4m3fn, False)],
)  # fmt: skip
def test_floats_and_complex_numbers_round_but_not_floats_of_one_byte(dtype, expected):
    assert rounds(torch.zeros(1, dtype=dtype)) is expected


def test_the_scale_is_that_of_the_largest_finite_element_and_never_zero():
    assert scale_of(double(1, -3, INF, NAN)) == 3
    assert scale_of(torch.zeros(2)) > 0 and scale_of(torch.zeros(0)) > 0
    assert scale_of(torch.tensor([3 + 4j])) == 5


def test_a_result_that_nobody_moved_may_be_off_by_its_own_digits():
    eps = torch.finfo(torch.float64).eps
    assert slack_of(double(1, -4), []) == GENEROUS * eps * 4
    assert slack_of(torch.zeros(0), [torch.zeros(0)]).ndim == 0


def test_a_result_may_be_off_by_a_thousand_times_what_noise_moved_it():
    value = double(1, 2)
    slack = slack_of(value, [value + double(0, 1e-9), value - double(3e-9, 0)])
    assert slack.ndim == 0 and 3e-6 < float(slack) < 3.01e-6


def test_an_element_that_jumps_says_nothing_and_the_others_keep_their_room():
    value = double(1, 2, 3)
    slack = slack_of(value, [value + double(0, 1e-9, 5)])
    assert slack.isinf().tolist() == [False, False, True] and float(slack[0]) < 1.01e-6


@pytest.mark.parametrize(("apart", "jumps"), [(0.9 * JUMP, False), (1.1 * JUMP, True)])
def test_a_jump_is_more_than_a_thousandth_of_the_scale(apart, jumps):
    value = double(1, 10)
    assert bool(slack_of(value, [value + double(10 * apart, 0)]).isinf().any()) is jumps


def test_one_unit_of_bfloat16_is_no_jump():
    value = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    assert not slack_of(value, [value * (1 + 2**-7)]).isinf().any()


def test_nan_and_infinities_that_stay_have_not_moved():
    value = double(NAN, INF, 1)
    assert float(slack_of(value, [value.clone()])) == float(slack_of(double(1), []))
    assert slack_of(value, [double(NAN, 1, 1)]).isinf().tolist() == [False, True, False]


def test_integers_are_exact_but_where_noise_moved_them():
    value = torch.tensor([1, 2])
    assert slack_of(value, [value.clone()]) == 0
    assert slack_of(value, [value.clone(), torch.tensor([1, 3])]).tolist() == [0, INF]
    assert slack_of("no tensor", []) is None


def test_results_of_another_shape_or_dtype_tell_nothing():
    value = double(1, 2)
    assert slack_of(value, [double(5), torch.tensor([7.0, 7.0]), "gone"]) == slack_of(value, [])


def test_single_precision_has_room_for_its_distance_from_double():
    value, slack = torch.tensor([1.0, 2.0]), torch.tensor(0.0)
    assert float(widened(slack, value, double(1, 2 + 1e-6))) == pytest.approx(4e-6)
    assert float(widened(slack, value, double(1, 20))) == 0  # that is no rounding
    assert widened(torch.zeros(2), torch.tensor([1, 2]), torch.tensor([1, 3])).tolist() == [0, INF]
    assert widened(slack, value, None) is slack and widened(None, "no tensor", value) is None
    assert widened(slack, value, double(1)) is slack


def test_elements_are_close_if_equal_both_nan_or_within_the_slack():
    want = double(1, NAN, INF, 1, 1)
    got = double(1 + 1e-9, NAN, INF, 2, NAN)
    assert close(got, want, torch.tensor(1e-8)).tolist() == [True, True, True, False, False]
    assert close(got, want, double(0, 0, 0, INF, INF)).tolist() == [False, True, True, True, True]
    assert close(torch.tensor([1, 2]), torch.tensor([1, 3]), torch.tensor(9.0)).tolist() == [True, False]
    tiny = torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn)
    assert close(tiny, tiny.clone(), torch.zeros(())).all()
