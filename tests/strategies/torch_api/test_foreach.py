"""Foreach and fused ops: one rule for each element, joined; the parts of DTensor that say which."""

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._op_schema import TupleStrategy
from torch.distributed.tensor._ops import single_dim_strategy

from localtensor.layout.spec import shorts
from strategies.model.oracle import run_oracle
from strategies.model.rule import overload
from strategies.model.verdict import Verdict
from strategies.torch_api import foreach
from strategies.torch_api.dtensor import PropagatorQuery, is_foreach
from strategies.validation.probe import check_claims
from strategies.validation.sources.dtensor import claims
from tests.strategies.cases import numbers, sample
from tests.torch_here import before_2_14

TWO = [numbers(4, 6), numbers(5)]
OTHERS = [numbers(4, 6, seed=1), numbers(5, seed=1)]
since_2_12 = pytest.mark.skipif(
    torch.__version__.startswith("2.11."),
    reason="torch 2.11 has no rule for each element of these lists, or no such op",
)


def verdicts(one, ranks=2):
    found = claims(one, ranks, run_oracle(one).raw)
    instances = check_claims(one, run_oracle(one), ranks, found, seed=0)
    return {str(c.rule).partition(": ")[2]: i.verdict for c, i in zip(found, instances, strict=True)}


# The parts.


@since_2_12
def test_the_scalar_op_of_a_foreach_op_is_asked_of_dtensor():
    resolve = single_dim_strategy._resolve_foreach_elementwise_overload
    assert resolve(overload("aten._foreach_add.List")) is overload("aten.add.Tensor")


@before_2_14
def test_an_op_strategy_gives_a_strategy_for_each_element():
    one = sample("_foreach_norm.Scalar", TWO, 2)
    ask = PropagatorQuery(one, 2, run_oracle(one).raw)
    schema = ask.prop._wrap_with_op_strategy(ask.schema([Replicate(), Replicate()]))
    found = ask.prop.op_strategy_funcs[ask.op](schema)
    assert isinstance(found, TupleStrategy)
    assert len(found.children) == 2


@pytest.mark.parametrize(
    ("one", "is_one"),
    [
        (sample("_foreach_neg.default", TWO), True),
        (sample("cat.default", TWO[1:] * 2), False),
        (sample("_fused_rms_norm.default", TWO[0], [6], None, None), False),
        (sample("neg.default", TWO[0]), False),
    ],
)
def test_only_ops_of_those_names_with_a_list_are_taken_apart(one, is_one):
    assert is_foreach(one) is is_one


# The rules.


@since_2_12
def test_each_element_has_a_rule_of_its_own():
    found = verdicts(sample("_foreach_neg.default", TWO))
    assert set(found.values()) == {Verdict.SOUND}
    assert {"R, R -> R, R", "S(0), S(0) -> S(0), S(0)", "S(1), R -> S(1), R", "R, S(0) -> R, S(0)"} <= set(found)
    assert "P(sum), P(sum) -> P(sum), P(sum)" in found


def test_a_list_that_is_written_to_keeps_its_placements():
    found = verdicts(sample("_foreach_add_.List", TWO, OTHERS))
    assert set(found.values()) == {Verdict.SOUND}
    assert "S(0), S(0), S(0), S(0) -> " in found
    assert not any(line.startswith("R, R, P(avg)") for line in found)


def test_what_an_op_writes_to_a_list_is_judged():
    one = sample("_foreach_add_.List", TWO, OTHERS)
    oracle = run_oracle(one)
    assert [o.shape for o in oracle.outputs] == [x.shape for x in TWO]
    assert oracle.outputs[0].equal(TWO[0] + OTHERS[0])


@since_2_12
def test_a_tensor_that_all_elements_share_has_one_placement():
    found = verdicts(sample("_foreach_mul.Tensor", TWO, torch.tensor(3.0, dtype=torch.float64)))
    assert set(found.values()) == {Verdict.SOUND}
    assert "R, R, P(sum) -> P(sum), P(sum)" in found
    assert "P(sum), R, P(sum) -> P(sum), R" not in found


def test_an_op_strategy_on_lists_is_asked_for_each_element():
    found = verdicts(sample("_foreach_max.default", [numbers(4, 6), numbers(6)]))
    assert found["S(0), S(0) -> P(max), P(max)"] is Verdict.SOUND
    assert found["S(1), R -> P(max), R"] is Verdict.SOUND


def test_a_wrong_rule_on_lists_is_found():
    found = verdicts(sample("_foreach_powsum.Scalar", TWO, 2))
    assert found["P(sum), P(sum) -> P(sum), P(sum)"] is Verdict.UNSOUND
    assert found["S(0), S(0) -> P(sum), P(sum)"] is Verdict.SOUND


@since_2_12
def test_results_come_list_by_list():
    many = [[numbers(*shape, seed=i).abs() for shape in ((4, 6), (6,))] for i in range(5)]
    steps = [torch.tensor(1.0), torch.tensor(2.0)]
    knobs = {"lr": 0.1, "beta1": 0.5, "beta2": 0.5, "weight_decay": 0.1, "eps": 0.1, "amsgrad": True, "maximize": False}
    found = verdicts(sample("_fused_adam.default", *many, steps, **knobs))
    assert found["S(1), R, S(1), R, S(1), R, S(1), R, S(1), R, R, R -> S(1), R, S(1), R, S(1), R, S(1), R, S(1), R"]
    assert set(found.values()) == {Verdict.SOUND}


@since_2_12
def test_rows_fit_the_tensors():
    one = sample("_foreach_mm.default", [numbers(4, 6), numbers(5, 3)], [numbers(6, 4), numbers(3, 3)])
    for inputs, outputs in foreach.foreach_rows(PropagatorQuery(one, 2, run_oracle(one).raw), []):
        assert (len(inputs), len(outputs)) == (4, 2), shorts(inputs)
    assert (Shard(1), Shard(1), Shard(0), Shard(0)) in {
        i for i, _ in foreach.foreach_rows(PropagatorQuery(one, 2, run_oracle(one).raw), [])
    }


def test_lists_of_unequal_length_are_refused():
    one = sample("_foreach_neg.default", TWO)
    object.__setattr__(one.call, "args", (*one.call.args, [one.call.args[0][0]]))
    with pytest.raises(ValueError, match="lists of 1 and 2 tensors"):
        foreach.foreach_rows(PropagatorQuery(one, 2, run_oracle(sample("_foreach_neg.default", TWO)).raw), [])


@since_2_12
def test_no_more_than_so_many_rows_are_judged(monkeypatch):
    monkeypatch.setattr(foreach, "MAX_ROWS", 5)
    one = sample("_foreach_add.List", TWO, OTHERS)
    assert len(foreach.foreach_rows(PropagatorQuery(one, 2, run_oracle(one).raw), [])) == 5
