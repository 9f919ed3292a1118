"""A search is validated as a whole: what is tried, what holds, what is claimed, and what of that is missing."""

import pytest
import torch

from strategies.model.oracle import run_oracle
from strategies.model.verdict import Verdict
from strategies.torch_api import dtensor
from strategies.validation.discover import discover
from strategies.validation.missing_rules import (
    missing_instances,
    missing_reason,
    search_placements,
    survey_kinds,
    with_replicated_extremes,
)
from strategies.validation.sources import dtensor as claim_sources
from strategies.validation.sources.dtensor import claims
from tests.strategies.cases import numbers, rule, sample
from tests.strategies.missing_list import rows
from tests.strategies.planted_ops import planted

X = numbers(4, 6)


def searched(*samples, ranks=(2, 3)):
    """What a trial hands to `missing_instances`: each sample with what was seen on each mesh size."""
    found = []
    for one in samples:
        oracle = run_oracle(one)
        alone = dtensor.PropagatorQuery(one, 1, oracle.raw)
        found.append((one, {n: search_placements(one, oracle, n, claims(one, n, oracle.raw, alone), 0) for n in ranks}))
    return found


def lacking(*samples, ranks=(2, 3)):
    return sorted(str(i.rule).partition(": ")[2] for i in missing_instances(searched(*samples, ranks=ranks)))


def tried(one):
    return sum(seen.combinations for _, by_ranks in searched(one) for seen in by_ranks.values())


def test_a_search_finds_the_rules_that_no_registration_claims():
    assert lacking(planted("forgotten", X)) == [
        "P(avg) -> P(avg)", "P(max) -> P(max)", "P(min) -> P(min)", "P(sum) -> P(sum)", "S(0) -> S(0)", "S(1) -> S(1)",
    ]  # fmt: skip
    first = missing_instances(searched(planted("forgotten", X)))[0]
    assert (first.verdict, first.ranks, first.sample.op) == (Verdict.MISSING, 2, "planted.forgotten.default")
    assert first.evidence.reason == "holds on 6 independent samples of 2 shapes on 2 and 3 ranks, and is not registered"


@pytest.mark.parametrize("one", [
    planted("remembered", X), sample("neg.default", X), sample("relu.default", X), sample("exp.default", X),
], ids=lambda one: one.op)  # fmt: skip
def test_a_search_invents_nothing_where_everything_is_claimed(one):
    assert lacking(one) == []
    assert tried(one) > 0


def test_a_rule_that_holds_on_some_sizes_only_is_not_missing():
    found = lacking(planted("averaged", X), ranks=(2,))
    assert "S(0) -> P(avg)" not in found
    assert "S(1) -> S(0)" in found


def test_a_condition_is_part_of_what_is_said():
    plus, minus = sample("add.Tensor", X, X, alpha=2.0), sample("add.Tensor", X, X, alpha=-2.0)
    assert lacking(plus) == ["R, P(max) -> P(max)", "R, P(min) -> P(min)"]
    assert lacking(minus) == ["R, P(max) -> P(min)", "R, P(min) -> P(max)"]
    (first, *_) = missing_instances(searched(plus))
    assert "where alpha > 0" in first.evidence.reason


def test_arguments_of_another_kind_do_not_speak_against_a_missing_rule():
    calls = [sample("planted.totalled.default", numbers(6, 6), dim=dim) for dim in (0, 1)]
    assert [line for line in lacking(*calls) if line.startswith("S(")] == [
        "S(0) -> P(sum)", "S(0) -> S(0)", "S(1) -> P(sum)", "S(1) -> S(0)",
    ]  # fmt: skip


def test_a_survey_says_what_holds_what_does_not_and_what_it_cannot_tell():
    (one,) = survey_kinds(searched(sample("add.Tensor", X, X)))
    said = {text: one.says(rule(one.samples[0], text)) for text in (
        "R, P(max) -> P(max)", "P(sum), P(sum) -> P(sum)", "R, P(sum) -> P(sum)", "P(product), R -> R",
    )}  # fmt: skip
    assert list(said.values()) == [True, True, False, None]


def test_nothing_more_is_asked_of_inputs_that_a_claim_serves():
    one = sample("neg.default", X)
    found, another = searched(one), rule(one, "S(0) -> P(sum)")
    for seen in found[0][1].values():
        seen.holds[str(another)] = another
    (made,) = survey_kinds(found)
    assert made.backing == {} and made.says(another)


def test_what_every_rank_holds_is_any_average_or_extreme_of_it():
    one = sample("where.self", X > 0, X, X)
    assert str(with_replicated_extremes(rule(one, "R, R, P(avg) -> P(avg)"))).endswith("R, R, P(avg) -> R")
    assert str(with_replicated_extremes(rule(one, "R, R, P(sum) -> P(sum)"))).endswith("-> P(sum)")


@pytest.mark.parametrize("one", [
    sample("rand_like.default", X), sample("view.default", X, [24]), sample("is_nonzero.default", torch.tensor(2.0)),
    sample("argmax.default", X), planted("forgotten", torch.zeros(4, 6)),
    sample("logical_not.default", numbers(4, 6, dtype=torch.bool)),
], ids=lambda one: one.op)  # fmt: skip
def test_a_search_asks_nothing_of_results_that_cannot_tell(one):
    """Random ones, rewritten calls, no tensors, one integer, all elements alike, booleans."""
    assert tried(one) == 0


def test_what_an_op_writes_to_keeps_its_placement_in_a_search_too():
    held = {str(r) for _, by in searched(sample("add_.Tensor", X, X)) for s in by.values() for r in s.holds.values()}
    assert held
    assert all(line.partition(": ")[2].split(", ")[0] == line.split(" -> ")[1] for line in held)


def test_a_search_that_leaves_tuples_out_says_how_many(monkeypatch):
    monkeypatch.setattr(claim_sources, "MOST_TUPLES", 5)
    (_, seen), *_ = searched(sample("add.Tensor", X, X))
    assert {one.untried for one in seen.values()} == {"a search tries 5 of the 49 tuples of input placements"}


def test_an_op_that_writes_to_what_it_does_not_return_is_not_searched():
    assert tried(planted("noted", X, X[0] * 0)) == 0


def test_a_reason_counts_and_names_the_condition():
    (one,) = survey_kinds(searched(sample("add.Tensor", X, X)))
    backing = next(b for b in one.backing.values() if b.enough)
    assert missing_reason(backing, one.kind).endswith("on 2 and 3 ranks, where alpha > 0, and is not registered")


LISTED = [row for row in rows() if not row.where]
CALLS = {
    "neg.default": [(X,)], "relu.default": [(X,)], "abs.default": [(X,)], "clone.default": [(X,)],
    "sub.Tensor": [(X, X + 1)], "mul.Tensor": [(X, X + 1)], "maximum.default": [(X, X.flip(0))],
    "mm.default": [(X, numbers(6, 5, seed=1))], "where.self": [(X > 0, X, X + 1)],
    "tanh_backward.default": [(X, X / 9)], "flip.default": [(X, [0])], "exp.default": [(X,)],
}  # fmt: skip


@pytest.mark.parametrize("op", CALLS)
def test_nothing_that_the_list_calls_wrong_is_called_missing(op):
    """A few ops of the list that was checked by hand; all of them by `python -m tests.tools.bench.missing`."""
    given = [sample(op, *call) for call in CALLS[op]]
    found = discover(f"aten.{op}", given=given)
    wrong = {str(rule(given[0], row.rule)) for row in LISTED if row.op == op and not row.holds}
    right = {str(rule(given[0], row.rule)) for row in LISTED if row.op == op and row.holds}
    known = set().union(*(one.claimed for one in found.surveys))
    assert wrong and not wrong & set(map(str, found.missing))
    assert right <= known | set(map(str, found.missing))


def test_the_list_has_two_hundred_rules_of_both_verdicts_each_with_a_reason():
    listed = rows()
    assert len(listed) >= 200 and len(set(map(str, listed))) == len(listed)
    assert sum(row.holds for row in listed) > 80 and sum(not row.holds for row in listed) > 80
    assert all(row.why for row in listed)
