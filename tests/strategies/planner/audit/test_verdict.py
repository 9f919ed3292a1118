"""Verdicts: what DTensor does, what our planner would do, and what theirs costs more.  Pairs on real processes: the
same verdicts, and nobody hangs.  DTensor's own redistribution on simulated ranks: what is right, wrong, refused,
and what leaves a rank alone."""

import collections
import math

import pytest
import torch

from localtensor._util.events import Died, Raised, Returned, Waiting
from localtensor.errors import LocalTensorError
from localtensor.processes.pool import Pool
from strategies.base.signals import quiet
from strategies.planner.audit import verdict
from strategies.planner.audit import verdict as dtensor_judged
from strategies.planner.audit.compare import CORRECT, Outcome
from strategies.planner.audit.pairs import MODES, NoDTensorPlan, draw_pairs
from strategies.planner.audit.rank_run import RedistributionResult, dtensor_planner
from strategies.planner.audit.report import Cause
from strategies.planner.audit.report import total_waste as summed
from strategies.planner.audit.script import script
from strategies.planner.audit.verdict import (
    KINDS,
    PairRun,
    PairVerdict,
    RealRedistributions,
    Waste,
    _checked_outcome,
    _ratio,
    cheapest_plan,
    enlarged,
    fault_of_our_plan,
    outcome_of,
    pair_verdicts,
    rank_work,
    simulate_pairs,
    verdict_of,
    waste_of_plan,
)
from strategies.torch_api.mesh_and_caches import averages_as_sums
from strategies.torch_api.rank_runs import first_rank_failure, run_on_threads
from tests.strategies.script_runner import run_script
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


PAIRS = (
    pair("S(0)", "R", (2,), (3,)), pair("P(avg)", "S(1)", (2,), (5, 3)), pair("S(0)", "S(1)", (2,), (5, 3)),
    pair("R", "P(product)", (2,), (3,)), pair("R", "P(sum)", (2,), (3,), torch.int64), pair("SS(0,2)", "R", (2,), (7,)),
    pair("P(sum)", "R", (2,), (4,), torch.bool),
)  # fmt: skip


@pytest.fixture(scope="module")
def bench():
    with RealRedistributions(seconds=60) as made:
        yield made


def test_real_processes_come_to_the_same(bench):
    jobs = [PairRun.of(one) for one in PAIRS]
    for mode in ("greedy", "graph"):
        real = bench.confirm(jobs, mode)
        assert [one.kind for one in real] == [one.kind for one in simulate_pairs(jobs, mode)]
        assert [one.kind for one in real].count("right") >= 5


@pytest.fixture
def pool():
    """Not the bench's: a script leaves its processes otherwise than a pair wants them."""
    with Pool(2, timeout=60) as made:
        yield made


def test_a_script_of_plain_torch_shows_what_is_wrong_and_what_is_right(pool):
    for one, code in ((PAIRS[1], 0), (PAIRS[5], 0), (PAIRS[3], 1), (PAIRS[4], 1)):
        outcome = simulate_pairs([PairRun.of(one)], "greedy")[0]
        text = script(Cause("", one, ("greedy",), outcome, 1, one), "x.py")
        assert "localtensor" not in text
        assert "strategies" not in text
        outcomes = pool.call(run_script, [(text,)] * 2)
        assert [outcome.value[0] for outcome in outcomes] == [code] * 2, outcomes[0].value[1]


def test_where_torch_deals_otherwise_no_one_is_called_wrong():
    job = PairRun.of(PAIRS[2])
    pieces = [torch.zeros(5, 2), torch.zeros(5, 1)]
    wrong = [RedistributionResult("", piece.double()) for piece in pieces]
    assert _checked_outcome(job, wrong).kind == "wrong"
    assert _checked_outcome(job, [RedistributionResult("", one.piece, one.piece) for one in wrong]).kind == "disputed"
    parts = job.whole.split([2, 1], 1)
    assert (
        _checked_outcome(
            job, [RedistributionResult("", one.piece, part) for one, part in zip(wrong, parts, strict=True)]
        ).kind
        == "wrong"
    )
    assert _checked_outcome(job, [RedistributionResult("", part) for part in parts]).kind == "right"
    assert (
        _checked_outcome(
            job, [RedistributionResult("", part, one.piece) for one, part in zip(wrong, parts, strict=True)]
        ).kind
        == "disputed"
    )


def test_where_torch_deals_the_source_otherwise_no_one_is_called_wrong():
    job = PairRun.of(PAIRS[2])  # S(0) -> S(1)
    rows, columns = job.whole.split([3, 2]), job.whole.split([2, 1], 1)
    wrong = [piece + 1 for piece in columns]
    for given, kind in ((rows, "wrong"), (rows[::-1], "disputed")):
        told = [RedistributionResult("", *three) for three in zip(wrong, columns, given, strict=True)]
        assert _checked_outcome(job, told).kind == kind


def test_what_became_of_ranks_that_do_not_come_back_is_reported():
    died = [Waiting(0, "a.py:1 in f: x"), Died(1, 3)]
    assert first_rank_failure(died).text == "the process of rank 1 dies (exit code 3)"
    raised = [Waiting(0, "a.py:1 in f: x"), Raised(1, "ValueError", "no", "trace")]
    assert first_rank_failure(raised).text == "rank 1 raises ValueError: no"
    assert first_rank_failure([Waiting(0, "a"), Waiting(1, "b")]).text == "hangs: rank 0 waits at a; rank 1 waits at b"
    assert first_rank_failure([Returned(0, b""), Waiting(1, "b")]).ranks == (1,)
    assert first_rank_failure([Returned(0, b""), Returned(1, b"")]) is None


def test_nothing_to_confirm_starts_nothing():
    made = RealRedistributions()
    assert made.confirm([], "greedy") == []
    assert made._pool is None
    made.close()


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


@pytest.mark.slow
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
    def validated(part, mesh):
        if mesh.get_rank() == 1:
            return RedistributionResult("ValueError: only I")
        torch.distributed.barrier()
        return RedistributionResult("", part.piece)

    monkeypatch.setattr(verdict.rank_run, "result_of_rank", validated)
    found = run_on_threads([rank_work(PairRun.of(PAIR), "greedy")])[0]
    assert (found.kind, found.ranks) == ("stops", (1,))
    assert "ValueError: only I" in found.text


def test_ranks_that_wait_for_each_other_stop_the_run(monkeypatch):
    def validated(part, mesh):
        if mesh.get_rank() == 1:
            torch.distributed.barrier()
        return RedistributionResult("", part.piece)

    monkeypatch.setattr(verdict.rank_run, "result_of_rank", validated)
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
