from collections import Counter

import torch

from strategies.inputs.variants.adversarial import VALUES
from strategies.inputs.variants.all_variants import adverse, oracle_with_values, values_named
from strategies.model.oracle import run_oracle
from tests.strategies.cases import numbers, sample
from tests.strategies.planted_ops import planted

X = numbers(4, 6)
ADD = sample("add.Tensor", X, X + 1)


def test_the_oracle_about_other_values_is_found_again_from_their_name_and_the_seed():
    oracle = run_oracle(ADD)
    one, two, other = (oracle_with_values(ADD, oracle, "ties", seed) for seed in (1, 1, 2))
    assert torch.equal(one.outputs[0], two.outputs[0]) and not torch.equal(one.outputs[0], other.outputs[0])
    assert torch.equal(one.outputs[0], one.inputs[0] + one.inputs[1])


def test_the_samples_own_values_are_the_oracle_itself():
    oracle = run_oracle(ADD)
    assert oracle_with_values(ADD, oracle, "", 0) is oracle
    assert oracle_with_values(ADD, oracle, "cancelling", 0) is oracle
    assert values_named("").name == "" and values_named("zeros").name == "zeros"


def test_values_that_the_op_refuses_or_that_say_nothing_have_no_oracle():
    fussy = planted("fussy", X.clamp(max=1.0))
    assert oracle_with_values(fussy, run_oracle(fussy), "specials", 0) is None
    flags = sample("relu.default", X)
    assert oracle_with_values(flags, run_oracle(flags), "all true", 0) is None
    random = sample("rand_like.default", X)
    assert oracle_with_values(random, run_oracle(random), "zeros", 0) is None


def test_values_that_give_results_of_another_shape_are_another_call():
    one = sample("nonzero.default", X)
    assert oracle_with_values(one, run_oracle(one), "zeros", 0) is None
    assert oracle_with_values(one, run_oracle(one), "positive", 0) is not None


def test_over_the_samples_of_one_overload_all_values_have_their_turn():
    turns = Counter()
    found = [adverse(ADD, run_oracle(ADD), number, seed=0, turns=turns, budget=3) for number in range(24)]
    able = {kind.name for kind in VALUES if oracle_with_values(ADD, run_oracle(ADD), kind.name, 0) is not None}
    assert all(len(told) == 3 for told in found)
    assert set().union(*found) == set(turns) == able
    assert max(turns.values()) - min(turns.values()) <= 1


def test_what_had_a_turn_stands_behind_what_had_none():
    turns = Counter({kind.name: 1 for kind in VALUES if kind.name != "zeros"})
    assert list(adverse(ADD, run_oracle(ADD), 0, seed=0, turns=turns, budget=1)) == ["zeros"]
    assert turns["zeros"] == 1


def test_the_same_number_has_the_same_values_and_another_number_others():
    oracle = run_oracle(ADD)
    first, again, later = (list(adverse(ADD, oracle, number, seed=0)) for number in (0, 0, 7))
    assert first == again != later
