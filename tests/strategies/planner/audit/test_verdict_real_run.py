"""Pairs on real processes: the same verdicts, and nobody hangs."""

import pytest
import torch

from localtensor._util.events import Died, Raised, Returned, Waiting
from localtensor.processes.pool import Pool
from strategies.planner.audit.rank_run import RedistributionResult
from strategies.planner.audit.report import Cause
from strategies.planner.audit.script import script
from strategies.planner.audit.verdict import PairRun, RealRedistributions, _checked_outcome, simulate_pairs
from strategies.torch_api.rank_runs import first_rank_failure
from tests.strategies.script_runner import run_script
from tests.tools.plans.plan_pairs import pair

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


def test_where_torch_deals_otherwise_nobody_is_called_wrong():
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


def test_where_torch_deals_the_source_otherwise_nobody_is_called_wrong():
    job = PairRun.of(PAIRS[2])  # S(0) -> S(1)
    rows, columns = job.whole.split([3, 2]), job.whole.split([2, 1], 1)
    wrong = [piece + 1 for piece in columns]
    for given, kind in ((rows, "wrong"), (rows[::-1], "disputed")):
        told = [RedistributionResult("", *three) for three in zip(wrong, columns, given, strict=True)]
        assert _checked_outcome(job, told).kind == kind


def test_what_became_of_ranks_that_do_not_come_back_is_told():
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
