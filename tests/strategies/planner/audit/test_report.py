"""One finding for each cause."""

import pytest

from strategies.base.shrink import Shrunk
from strategies.planner.audit import report as dtensor_causes
from strategies.planner.audit.compare import CORRECT, Outcome
from strategies.planner.audit.pairs import NoDTensorPlan
from strategies.planner.audit.report import Cause, confirm_causes, group_by_cause, symptom
from strategies.planner.audit.verdict import PairVerdict, pair_verdicts
from tests.tools.plans.plan_pairs import pair
from tests.torch_here import before_2_14


def verdicts(*pairs, mode="greedy"):
    return list(pair_verdicts(pairs, mode))


SHARDS = (pair("S(0) S(0)", "R P(max)", shape=(5, 3)), pair("S(1)", "P(sum)", (3,)), pair("S(0)", "P(min)", (2,), (4,)))


@before_2_14
def test_pairs_that_come_down_to_the_same_are_one_finding():
    found = group_by_cause(verdicts(*SHARDS))
    assert [(str(one.pair), one.met, one.modes) for one in found] == [
        ("f64[1] @ a:S(0) -> a:P(sum) on (2,)", 3, ("greedy",))
    ]
    assert found[0].example == SHARDS[0]
    assert found[0].pattern == "S(0) -> P(sum)"
    assert not found[0].confirmed


@before_2_14
def test_both_planners_are_named_where_both_do_it():
    product = pair("R", "P(product)", (3,))
    found = group_by_cause([*verdicts(product, mode="graph"), *verdicts(product)])
    assert [(one.modes, one.met) for one in found] == [(("greedy", "graph"), 2)]
    assert [one.modes for one in group_by_cause(verdicts(product, mode="graph"))] == [("graph",)]
    shard = pair("S(0)", "P(sum)", (2,), (1,))
    assert [one.modes for one in group_by_cause([*verdicts(shard), *verdicts(product, mode="graph")])][-1] == (
        "greedy",
    )


def test_every_pair_is_reported():
    counted = []
    group_by_cause(verdicts(*SHARDS), lambda: counted.append(1))
    assert len(counted) == 3


@pytest.mark.parametrize(("kind", "text", "want"), [
    ("wrong", "rank 3 holds torch.float32, not torch.int64", "wrong dtype"),
    ("wrong", "rank 3 holds 1 at [0], not 2; wrong in its rows 0", "wrong values"),
    ("stops", "rank 2 raises ValueError: no; its peers go on", "stops: a rank raises ValueError: no"),
    ("refused", "RuntimeError: redistribute from S(1) to P(max) not supported yet",
     "refused: RuntimeError: redistribute from S(#) to P not supported yet"),
])  # fmt: skip
def test_a_symptom_leaves_numbers_and_kinds_aside(kind, text, want):
    assert symptom(Outcome(kind, text)) == want


class Bench:
    """A bench on which all comes to the same."""

    def __init__(self, outcome):
        self.outcome = outcome

    def confirm(self, jobs, mode):
        return [self.outcome for _ in jobs]


def test_what_real_processes_do_not_show_is_not_confirmed():
    cause = Cause("wrong values", SHARDS[1], ("greedy",), Outcome("wrong", "x"), 1, SHARDS[1])
    assert confirm_causes([cause], Bench(Outcome("wrong", "y")))[0].confirmed
    other = confirm_causes([cause], Bench(CORRECT))[0]
    assert (other.confirmed, other.note) == (False, "right: ")


def test_what_is_wrong_comes_before_what_is_refused(monkeypatch):
    outcomes = {SHARDS[1]: Outcome("refused", "no"), SHARDS[2]: Outcome("wrong", "rank 0 holds 1")}
    monkeypatch.setattr(dtensor_causes, "shrink_pair", lambda pair, mode, shows: Shrunk(pair, 0))
    monkeypatch.setattr(dtensor_causes, "simulate_pairs", lambda jobs, mode: [outcomes[job.pair] for job in jobs])
    found = group_by_cause(
        [PairVerdict(one, "greedy", outcome, NoDTensorPlan("no")) for one, outcome in outcomes.items()]
    )
    assert [one.outcome.kind for one in found] == ["wrong", "refused"]


@pytest.mark.parametrize("turned", [False, True])
def test_of_pairs_with_the_same_placements_the_simplest_is_told_whichever_was_met_first(monkeypatch, turned):
    small, large = (pair("S(0)", "R", (2,), shape) for shape in ((3,), (7, 6)))
    outcomes = {small: Outcome("wrong", "rank 0 holds 1"), large: Outcome("wrong", "rank 1 holds 2")}
    monkeypatch.setattr(dtensor_causes, "shrink_pair", lambda pair, mode, shows: Shrunk(pair, 0))
    monkeypatch.setattr(dtensor_causes, "simulate_pairs", lambda jobs, mode: [outcomes[job.pair] for job in jobs])
    both = (large, small) if turned else (small, large)
    found = group_by_cause([PairVerdict(one, "greedy", outcomes[one], NoDTensorPlan("no")) for one in both])
    assert [(one.pair, one.met) for one in found] == [(small, 2)]
