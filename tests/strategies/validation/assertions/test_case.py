"""What a function gives for whole tensors, and how far it is off itself."""

import torch

from localtensor.layout.tolerance import MAX_JUMP_SHARE, within_slack
from strategies.model.oracle import run_function_oracle
from strategies.validation.difference import folding_error


def test_a_stable_function_has_little_room_and_integers_none():
    oracle = run_function_oracle(lambda x: [x[0] * 2, x[0].argmax()], [torch.tensor([1.0, 2.0], dtype=torch.float64)])
    assert oracle.unstable <= MAX_JUMP_SHARE
    assert 0 < float(oracle.slack[0]) < 1e-10
    assert float(oracle.slack[1]) == 0
    assert not within_slack(oracle.outputs[0] + 1e-6, oracle.outputs[0], oracle.slack[0]).any()
    assert within_slack(oracle.outputs[0] + 1e-14, oracle.outputs[0], oracle.slack[0]).all()


def test_what_jumps_says_nothing():
    oracle = run_function_oracle(lambda x: [x[0].floor()], [torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)])
    assert oracle.unstable > MAX_JUMP_SHARE
    oracle = run_function_oracle(lambda x: [x[0].floor()], [torch.tensor([1.5, 2.5, 3.0], dtype=torch.float64)])
    assert oracle.unstable <= MAX_JUMP_SHARE
    assert oracle.slack[0].isinf().tolist() == [False, False, True]


def test_an_amplifier_has_more_room():
    x = torch.tensor([1e8 + 1, -1e8], dtype=torch.float64)
    plain, amplified = (run_function_oracle(f, [x]).slack[0] for f in (lambda x: [x[0].sum()], lambda x: [x[0] * 1.0]))
    assert float(plain.max()) > 0
    assert float(amplified.max()) > 0


def test_single_precision_is_measured_against_double():
    x = torch.linspace(0.1, 3, 8)
    assert float(run_function_oracle(lambda x: [x[0].exp()], [x]).slack[0]) > float(
        run_function_oracle(lambda x: [x[0].exp()], [x.double()]).slack[0]
    )


def test_the_function_gets_copies():
    x = torch.ones(2)
    run_function_oracle(lambda x: [x[0].add_(1)], [x])
    assert x.tolist() == [1, 1]


def test_far_parts_cost_digits():
    assert folding_error([torch.tensor([1e6]).double()]) > folding_error([torch.tensor([1.0]).double()])
    assert folding_error([torch.tensor([5])]) == 0
