"""A search is heard as part of a trial, which is how it is asked."""

import pytest
import torch

from strategies import sources
from strategies.trial import Docket, hear
from strategies.verdicts import Verdict
from tests.strategies.cases import numbers, sample
from tests.strategies.planted_ops import planted

X = numbers(4, 6)


def searched(*samples, ranks=(2, 3), asked=True):
    return hear(Docket(samples[0].op, samples, ranks, 0, search=asked), lambda number: None)


def lines(rules):
    return sorted(str(rule).partition(": ")[2] for rule in rules)


def test_a_search_finds_the_rules_that_nobody_claims():
    hearing = searched(planted("forgotten", X))
    assert lines(i.rule for i in hearing.missing) == [
        "P(avg) -> P(avg)", "P(max) -> P(max)", "P(min) -> P(min)", "P(sum) -> P(sum)", "S(0) -> S(0)", "S(1) -> S(1)",
    ]  # fmt: skip
    first = hearing.missing[0]
    assert (first.verdict, first.ranks, first.sample.op) == (Verdict.MISSING, 2, "planted.forgotten.default")
    assert first.evidence.reason == "holds on all 2 trials of such arguments, and nobody claims it"
    assert hearing.combinations > 0


@pytest.mark.parametrize("one", [
    planted("remembered", X), sample("neg.default", X), sample("relu.default", X), sample("exp.default", X),
], ids=lambda one: one.op)  # fmt: skip
def test_a_search_invents_nothing_where_everything_is_claimed(one):
    hearing = searched(one)
    assert lines(i.rule for i in hearing.missing) == []
    assert hearing.combinations > 0


def test_without_a_search_nothing_is_missing():
    hearing = searched(planted("forgotten", X), asked=False)
    assert (hearing.missing, hearing.combinations) == ([], 0)


def test_a_rule_that_holds_on_some_sizes_only_is_not_missing():
    even, uneven = planted("averaged", numbers(4, 6)), planted("averaged", numbers(5, 6))
    assert "S(0) -> P(avg)" in lines(i.rule for i in searched(even, even, ranks=(2,)).missing)
    both = lines(i.rule for i in searched(even, uneven, ranks=(2,)).missing)
    assert "S(0) -> P(avg)" not in both
    assert "S(1) -> S(0)" in both


def test_one_trial_is_too_few_to_call_a_rule_missing():
    assert searched(planted("forgotten", X), ranks=(2,)).missing == []


def test_arguments_of_another_kind_do_not_speak_against_a_missing_rule():
    calls = [sample("planted.totalled.default", numbers(6, 6), dim=dim) for dim in (0, 1)]
    assert lines(i.rule for i in searched(*calls).missing if short_sum(i)) == [
        "S(0) -> P(sum)", "S(0) -> S(0)", "S(1) -> P(sum)", "S(1) -> S(0)",
    ]  # fmt: skip


def short_sum(instance):
    return str(instance.rule).partition(": ")[2].startswith("S(")


@pytest.mark.parametrize("one", [
    sample("rand_like.default", X), sample("view.default", X, [24]), sample("is_nonzero.default", torch.tensor(2.0)),
    sample("sum.default", X), planted("forgotten", torch.zeros(4, 6)),
    sample("logical_not.default", numbers(4, 6, dtype=torch.bool)),
], ids=lambda one: one.op)  # fmt: skip
def test_a_search_asks_nothing_of_results_that_cannot_tell(one):
    """Random ones, rewritten calls, no tensors, one element, all elements alike, booleans."""
    assert searched(one).combinations == 0


def test_what_an_op_writes_to_keeps_its_placement_in_a_search_too():
    missing = lines(i.rule for i in searched(sample("add_.Tensor", X, X)).missing)
    assert all(line.split(", ")[0] == line.split(" -> ")[1] for line in missing)


def test_a_search_that_leaves_tuples_out_says_how_many(monkeypatch):
    monkeypatch.setattr(sources, "MOST_TUPLES", 5)
    hearing = searched(sample("add.Tensor", X, X))
    assert hearing.skipped == {"a search tries 5 of the 49 tuples of input placements": 2}


def test_an_op_that_writes_to_what_it_does_not_return_is_not_searched():
    assert searched(planted("noted", X, X[0] * 0)).combinations == 0
