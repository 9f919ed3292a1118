"""The list of what DTensor's own redistribution gets wrong in torch 2.13 is true of torch 2.13; of others it says what went."""

import pytest
import torch

from strategies.planner.audit.pairs import MODES
from strategies.planner.audit.report import Cause, finding_json, symptom
from strategies.planner.audit.verdict import PairRun, cheapest_plan, fault_of_our_plan, simulate_pairs
from tests.tools.plans.dtensor_found import FINDINGS, VERSION, pair_of

HERE = torch.__version__.split("+")[0]
ELSEWHERE = HERE.split(".")[:2] != VERSION.split(".")[:2]
EACH = [(found, mode) for found in FINDINGS for mode in found["planners"]]


@pytest.mark.parametrize(("found", "mode"), EACH, ids=[f"{found['pattern']} {mode}" for found, mode in EACH])
def test_what_was_found_is_still_so(found, mode):
    outcome = simulate_pairs([PairRun.of(pair_of(found))], mode)[0]
    if ELSEWHERE and symptom(outcome) != found["symptom"]:
        pytest.skip(f"torch {HERE} has changed: {found['pattern']} ({mode}) was {found['what']!r}, and is {outcome}")
    assert symptom(outcome) == found["symptom"], f"{found['pattern']}: {outcome}"
    assert list(outcome.ranks) == found["ranks"]


@pytest.mark.parametrize("found", FINDINGS, ids=[found["pattern"] for found in FINDINGS])
def test_for_each_there_is_a_plan_that_arrives(found):
    pair = pair_of(found)
    assert fault_of_our_plan(PairRun.of(pair), cheapest_plan(pair)) == ""


def test_each_was_confirmed_on_real_processes_and_is_there_once():
    assert all(found["confirmed"] for found in FINDINGS)
    assert len({(found["symptom"], found["pattern"]) for found in FINDINGS}) == len(FINDINGS)
    assert {mode for found in FINDINGS for mode in found["planners"]} == set(MODES)
    assert {found["kind"] for found in FINDINGS} == {"wrong", "stops", "refused"}


def test_a_finding_comes_back_from_its_line():
    for found in FINDINGS:
        pair = pair_of(found)
        outcome = simulate_pairs([PairRun.of(pair)], found["planners"][0])[0]
        if ELSEWHERE and symptom(outcome) != found["symptom"]:
            continue  # it went, as is said above
        line = finding_json(Cause(found["symptom"], pair, tuple(found["planners"]), outcome, 1, pair))
        same = ("pattern", "kind", "user", "dtype")
        assert {key: line[key] for key in same} == {key: found[key] for key in same}
