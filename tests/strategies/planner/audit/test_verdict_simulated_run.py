"""DTensor's own redistribution on simulated ranks: what is right, wrong, refused, and what leaves a rank alone."""

import collections

import pytest
import torch

from localtensor.errors import LocalTensorError
from strategies.base.signals import quiet
from strategies.planner.audit import verdict
from strategies.planner.audit.compare import CORRECT, Outcome
from strategies.planner.audit.pairs import MODES, draw_pairs
from strategies.planner.audit.rank_run import RedistributionResult, dtensor_planner
from strategies.planner.audit.verdict import PairRun, outcome_of, rank_work, simulate_pairs
from strategies.torch_api.mesh_and_caches import averages_as_sums
from strategies.torch_api.rank_runs import run_on_threads
from tests.tools.plans.plan_pairs import pair

PAIR = pair("S(0)", "R", (2,), (3,))


def played(one, mode="greedy"):
    return simulate_pairs([PairRun.of(one)], mode)[0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("one", [
    PAIR, pair("S(0) S(0)", "R S(0)", shape=(5, 3)), pair("P(avg) S(1)", "S(1) R"), pair("P(max)", "S(0)", (3,), (7, 2)),
    pair("S(0) S(0)", "S(1) S(0)", shape=(7, 6), src_order=((0, (1, 0)),)), pair("R R", "P(min) S(0)"),
    pair("P(sum)", "R", (2,), (4,), torch.bool), pair("S(0)", "S(1)", (2,), (6, 0)),
], ids=str)  # fmt: skip
def test_what_is_right_is_called_right(one, mode):
    assert played(one, mode) == CORRECT


def test_a_refusal_of_every_rank_is_a_refusal():
    found = played(pair("R", "P(product)", (2,)))
    assert (found.kind, found.text) == (
        "refused",
        "ValueError: Replicate to Partial(product) conversion is not supported.",
    )


def test_lockstep_and_rank_threads_come_to_the_same():
    jobs = [PairRun.of(one) for one in draw_pairs((2, 2), seed=11, budget=15)]
    for mode in MODES:
        together = simulate_pairs(jobs, mode)
        with quiet(), averages_as_sums("simulated"), dtensor_planner(mode):
            alone = [run_on_threads([rank_work(job, mode)])[0] for job in jobs]
        assert [one.kind for one in together] == [one.kind for one in alone]
        assert collections.Counter(one.kind for one in alone)["right"] > 8


def told(*pieces):
    return [
        one
        if isinstance(one, RedistributionResult)
        else RedistributionResult("", torch.tensor(one, dtype=torch.float64))
        for one in pieces
    ]


def test_a_verdict_names_the_ranks_that_hold_something_else():
    job = PairRun.of(PAIR)
    right = job.whole.tolist()
    assert outcome_of(job, told(right, right)) == CORRECT
    found = outcome_of(job, told(right, [0.0, *right[1:]]))
    assert (found.kind, found.ranks, found.text) == (
        "wrong",
        (1,),
        "rank 1 holds 0 at [0], not -3; wrong in its rows 0",
    )


def test_one_rank_that_raises_is_no_refusal():
    found = outcome_of(PairRun.of(PAIR), told(RedistributionResult("ValueError: no"), PairRun.of(PAIR).whole.tolist()))
    assert (found.kind, found.ranks) == ("stops", (0,))
    assert outcome_of(PairRun.of(PAIR), [RedistributionResult("ValueError: no")] * 2) == Outcome(
        "refused", "ValueError: no"
    )


def test_a_rank_that_raises_alone_on_threads_stops_the_run(monkeypatch):
    def heard(part, mesh):
        if mesh.get_rank() == 1:
            return RedistributionResult("ValueError: only I")
        torch.distributed.barrier()
        return RedistributionResult("", part.piece)

    monkeypatch.setattr(verdict.rank_run, "result_of_rank", heard)
    found = run_on_threads([rank_work(PairRun.of(PAIR), "greedy")])[0]
    assert (found.kind, found.ranks) == ("stops", (1,))
    assert "ValueError: only I" in found.text


def test_ranks_that_wait_for_each_other_stop_the_run(monkeypatch):
    def heard(part, mesh):
        if mesh.get_rank() == 1:
            torch.distributed.barrier()
        return RedistributionResult("", part.piece)

    monkeypatch.setattr(verdict.rank_run, "result_of_rank", heard)
    assert run_on_threads([rank_work(PairRun.of(PAIR), "greedy")])[0].kind == "stops"


def test_what_does_not_get_through_in_lockstep_is_played_on_threads(monkeypatch):
    def mode(ranks):
        raise LocalTensorError("no lockstep today")

    monkeypatch.setattr(verdict.lt, "LocalTensorMode", mode)
    assert simulate_pairs([PairRun.of(PAIR), PairRun.of(pair("R", "P(product)", (2,)))], "greedy")[0] == CORRECT


def test_values_are_the_same_for_a_seed_and_partials_have_others_for_another():
    one = pair("P(sum)", "R", (2,), (4,))
    pieces = [PairRun.of(one, seed).pieces[0].tolist() for seed in (0, 0, 1)]
    assert pieces[0] == pieces[1] != pieces[2]
    assert torch.allclose(PairRun.of(one, 1).whole, PairRun.of(one, 0).whole)
