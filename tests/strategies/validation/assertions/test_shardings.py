"""assert_sharding: functions of DTensors, on meshes of one axis and of two."""

import sys

import pytest
import torch
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Replicate, Shard

import localtensor as lt
from localtensor.errors import ModeBusy, NotServed, RankRaised
from localtensor.testing.hypothesis_strategies.values import Drawn
from strategies.validation.assertions.api import assert_sharding
from strategies.validation.assertions.rule import NotARule, NothingTested, WrongRule
from tests.tools import warm


def total(x):
    return x.sum(0)


def both(x):
    return x * 2, x.sum(0)


def wrong_sum(x):
    return DTensor.from_local(x.to_local() * 2, x.device_mesh, x.placements) if isinstance(x, DTensor) else x * 3


@pytest.mark.parametrize(("fn", "ins", "outs"), [
    (torch.mm, ["S(0)", "R"], ["S(0)"]),
    (torch.mm, "S(1), S(0)", "P(sum)"),
    (total, [Shard(0)], ["P(sum)"]),
    (both, "S(0)", "S(0), P(sum)"),
    (torch.mm, [("S(0)", "R"), ("R", "S(1)")], [("S(0)", "S(1)")]),
    (torch.relu, "P(sum)", "R"),
])  # fmt: skip
def test_right_placements_pass(fn, ins, outs):
    assert assert_sharding(fn, ins, outs, max_examples=4) is None


@pytest.mark.parametrize(("fn", "ins", "outs", "says"), [
    (total, "S(0)", "R", "result 0 has placements P(sum), claimed are R"),
    (torch.relu, "P(sum)", "P(sum)", "result 0 has placements R, claimed are P(sum)"),
    (wrong_sum, "S(0)", "S(0)", "the ranks together have 2 at [0], the op gives 3"),
    (torch.mm, [("S(0)", "R"), ("R", "S(1)")], [("S(1)", "S(0)")], "claimed are S(1), S(0)"),
    (lambda x: x.to_local() if isinstance(x, DTensor) else x, "S(0)", "S(0)", "is no DTensor but Tensor"),
])  # fmt: skip
def test_wrong_placements_and_values_are_shown(fn, ins, outs, says):
    with pytest.raises(WrongRule) as told:
        assert_sharding(fn, ins, outs, max_examples=5)
    assert says in str(told.value)
    assert str(told.value).startswith("assert_sharding: out_placements: ")


def test_the_line_repeats_it():
    with pytest.raises(WrongRule) as told:
        assert_sharding(wrong_sum, "S(0)", "S(0)")
    words = {"torch": torch, "Drawn": Drawn, "assert_sharding": assert_sharding, "wrong_sum": wrong_sum}
    with pytest.raises(WrongRule) as again:
        eval(told.value.repeat, words)
    assert again.value.case == told.value.case


@pytest.mark.slow
def test_the_script_is_plain_torch_and_runs_on_real_processes(tmp_path):
    with pytest.raises(WrongRule) as told:
        assert_sharding(wrong_sum, "S(0)", "S(0)")
    file = tmp_path / "wrong_sharding.py"
    file.write_text(told.value.script)
    assert "localtensor" not in told.value.script
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(file)]
    ran = warm.run(launch, cwd=tmp_path)
    assert ran.returncode == 1
    assert "rank 0 WRONG" in ran.stdout, ran.stderr


def test_inputs_are_given_or_drawn():
    three = [(Drawn((3,), torch.float64, "ones", 0),)]
    assert assert_sharding(total, "S(0)", "P(sum)", inputs=three, max_examples=3, meshes=[(2,)]) is None
    some = st.sampled_from(three)
    assert assert_sharding(total, "S(0)", "P(sum)", inputs=some, max_examples=3, meshes=[(2,)]) is None


@pytest.mark.parametrize(("fn", "ins", "outs", "options", "error"), [
    (total, ["S(0)"], ["R"], {"meshes": [(2, 2)]}, NotARule),
    (total, ["S(0)"], [("R", "R")], {}, NotARule),
    (total, ["S(0)"], ["R"], {"meshes": [(0,)]}, NotARule),
    (3, ["S(0)"], ["R"], {}, NotARule),
    (total, ["S(0)"], ["R", "R"], {}, NotARule),
    (total, ["S(0)"], ["R"], {"inputs": [(torch.ones(2), torch.ones(2))]}, NotARule),
    (total, ["S(0)"], ["R"], {"inputs": []}, NothingTested),
    (total, ["S(0)"], ["R"], {"inputs": [(torch.ones(()),)]}, NothingTested),
    (torch.linalg.cholesky, ["S(0)", "R"], ["R"], {}, NothingTested),
])  # fmt: skip
def test_what_cannot_be_tested_is_reported(fn, ins, outs, options, error):
    with pytest.raises(error, match="assert_sharding: "):
        assert_sharding(fn, ins, outs, **options)


def test_a_case_of_replicas_is_no_script_of_ours():
    with pytest.raises(WrongRule) as told:
        assert_sharding(wrong_sum, [Replicate()], [Replicate()])
    assert told.value.case.mesh == (2,)


def test_what_keeps_the_ranks_from_running_at_all_is_no_verdict():
    with lt.LocalTensorMode(2), pytest.raises(ModeBusy):
        assert_sharding(total, ["S(0)"], ["P(sum)"], max_examples=2)


def test_what_rank_threads_do_not_serve_is_no_verdict_either():
    def asks_too_much(x):
        if isinstance(x, DTensor):
            raise NotServed("symmetric memory", "nobody serves it")
        return x

    with pytest.raises(RankRaised, match="symmetric memory") as caught:
        assert_sharding(asks_too_much, ["S(0)"], ["S(0)"], max_examples=2)
    assert not isinstance(caught.value, AssertionError)
