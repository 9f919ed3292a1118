"""Verdicts: what DTensor does, what our planner would do, and what theirs costs more."""

import math

import pytest
import torch

from strategies.planner.audit import verdict as dtensor_judged
from strategies.planner.audit.compare import CORRECT, Outcome
from strategies.planner.audit.pairs import MODES, NoDTensorPlan, draw_pairs
from strategies.planner.audit.report import total_waste as summed
from strategies.planner.audit.verdict import (
    KINDS,
    PairRun,
    PairVerdict,
    Waste,
    _ratio,
    cheapest_plan,
    enlarged,
    fault_of_our_plan,
    pair_verdicts,
    verdict_of,
    waste_of_plan,
)
from tests.tools.plans.plan_pairs import pair


def one(of, mode="greedy"):
    return next(pair_verdicts([of], mode))


def test_a_right_one_has_both_plans_and_its_waste():
    found = one(pair("S(0) S(0)", "S(1) S(1)"))
    assert (found.outcome.kind, found.found) == ("right", False)
    assert found.theirs.steps
    assert found.ours.steps
    assert found.waste.time >= 1.0
    assert found.waste == waste_of_plan(enlarged(found.pair), "greedy") != waste_of_plan(found.pair, "greedy")


def test_a_refusal_of_what_is_legal_is_found_and_our_plan_is_carried_out():
    found = one(pair("S(0)", "P(max)", (2,), (3,)))
    assert (found.outcome.kind, found.found, found.waste) == ("refused", True, None)
    assert isinstance(found.theirs, NoDTensorPlan)
    assert [step.kind for step in found.ours.steps] == ["local"]


def test_where_there_is_no_plan_a_refusal_is_no_finding():
    found = one(pair("P(sum)", "P(max)", (2,), (3,)))
    assert (found.outcome.kind, found.found, found.ours) == ("alike", False, None)


@pytest.mark.parametrize("kind", ["wrong", "stops"])
def test_where_there_is_no_plan_what_goes_wrong_is_a_finding_all_the_same(kind):
    found = verdict_of(PairRun.of(pair("P(sum)", "P(max)", (2,), (3,))), "greedy", Outcome(kind, "rank 1 holds 3"))
    assert (found.outcome, found.found, found.ours) == (Outcome(kind, "rank 1 holds 3"), True, None)


def test_a_refusal_of_torch_distributed_itself_is_no_finding():
    found = one(pair("P(product)", "R", (2,), (3,), torch.complex64))
    assert (found.outcome.kind, found.found) == ("alike", False)
    assert "complex" in found.outcome.text


def test_a_refusal_is_undecided_where_our_plan_does_not_arrive(monkeypatch):
    monkeypatch.setattr(dtensor_judged, "redistribute", lambda held, plan: held)
    found = one(pair("S(0)", "P(max)", (2,), (3,)))
    assert (found.outcome.kind, found.found) == ("undecided", False)
    assert "our plan: rank 0 holds shape" in found.outcome.text


def test_our_plan_arrives_wherever_there_is_one():
    for each in draw_pairs((2, 2), seed=21, budget=40):
        assert fault_of_our_plan(PairRun.of(each), cheapest_plan(each)) == "", f"{each}"


def test_waste_is_the_price_of_theirs_by_that_of_the_cheapest():
    nothing = waste_of_plan(pair("S(0) R", "S(1) R", shape=(512, 512)), "greedy")
    assert (nothing.time, nothing.torch, nothing.sent[0], nothing.collectives) == (1.0, 1.0, nothing.sent[1], (1, 1))
    there = pair("P(sum) R", "S(0) S(1)", shape=(512, 512))
    less = waste_of_plan(there, "greedy")
    assert less.time > 1.0
    assert less.sent[0] > less.sent[1]
    assert waste_of_plan(pair("R", "P(product)", (2,)), "greedy") is None
    assert waste_of_plan(pair("S(0)", "R", (2,), (4, 0)), "greedy") is None


@pytest.mark.parametrize("mode", MODES)
def test_no_plan_of_theirs_is_cheaper_than_the_cheapest(mode):
    verdicts = list(pair_verdicts(list(draw_pairs((2, 2), seed=4, budget=30)), mode))
    known = [verdict.waste for verdict in verdicts if verdict.waste]
    assert len(known) > 15
    assert all(waste.time >= 1.0 and waste.torch >= 1.0 for waste in known)
    assert {verdict.outcome.kind for verdict in verdicts} <= set(KINDS)


def test_waste_is_weighed_on_a_large_tensor():
    large = enlarged(pair("S(0)", "R", (2,), (3, 0)))
    assert large.src.shape == large.dst.shape == (768, 0)


def test_an_axis_of_one_rank_costs_nothing():
    found = waste_of_plan(pair("R S(0)", "S(1) R", (1, 2), shape=(512, 512)), "greedy")
    assert (found.time, found.torch, found.collectives) == (1.0, 1.0, (1, 1))
    assert waste_of_plan(pair("R", "S(1)", (1,), shape=(512, 512)), "greedy").time == 1.0


def test_what_moves_data_for_nothing_is_counted_and_is_no_ratio():
    assert (_ratio(5, 0), _ratio(0, 0), _ratio(6, 3)) == (math.inf, 1.0, 2.0)
    wastes = Waste(math.inf, 1.0, (8, 0), (1, 0)), Waste(2.0, 1.0, (4, 2), (1, 1))
    ((mode, told),) = summed(
        [PairVerdict(pair("S(0)", "R", (2,)), "greedy", CORRECT, None, None, each) for each in wastes]
    )
    assert (mode, told.dearer, told.for_nothing, told.most, told.worst_torch) == ("greedy", 2, 1, 2.0, None)
