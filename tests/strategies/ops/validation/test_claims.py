"""What an entry of a book claims about one call, and what its trial makes of it."""

import pytest
import torch
from torch.distributed.tensor import Partial, Shard

from strategies.model.oracle import run_oracle
from strategies.model.verdict import Verdict
from strategies.ops.semantics.rule_registry import OpRule, rules
from strategies.ops.validation import claims
from strategies.ops.validation.claims import own_claims, query_of_sample, validate_rule
from tests.strategies.cases import numbers, sample
from tests.strategies.small_book import VIEWS

NEG = sample("neg.default", numbers(4, 2))


def entry(lines, op="aten.neg.default"):
    return OpRule(op, lines, "planted", "to be tried")


def rows(query):
    yield query.line({0: Shard(0)}, [Shard(0)])


def rows_twice(query):
    yield from (*rows(query), *rows(query))


def wrong(query):
    """Besides what is right: parts of a sum are no parts of a maximum."""
    yield from rows(query)
    yield query.line({0: Partial("sum")}, [Partial("max")])


(EVEN,) = rules(
    "even", "even rows alone", ["aten.neg.default"], lambda query: [query.line({0: Shard(0)}, [Shard(0)], cut="even")]
)


def said(one, case, ranks=2):
    return [
        (str(claim.rule).partition(": ")[2], claim.local)
        for claim in own_claims(one, case, ranks, run_oracle(case).raw)
    ]


def test_a_question_names_shapes_and_dtypes_of_arguments_and_results():
    one = sample("max.dim", numbers(4, 2), 0)
    query = query_of_sample(one, run_oracle(one).raw)
    assert [(m.shape, m.dtype) for m in query.tensors] == [((4, 2), torch.float64)]
    assert [(m.shape, m.dtype) for m in query.outputs] == [((2,), torch.float64), ((2,), torch.int64)]
    assert query.get("dim") == 0


def test_a_line_that_is_given_twice_is_one_claim_and_leaves_the_call_as_it_is():
    assert said(entry(rows_twice), NEG) == [("S(0) -> S(0)", None)]


def test_a_line_that_cannot_be_had_on_that_many_ranks_is_no_claim():
    assert [len(said(EVEN, NEG, ranks)) for ranks in (2, 3, 4)] == [1, 0, 1]


def test_each_rank_is_given_its_own_sizes():
    one = sample("new_zeros.default", numbers(5, 2), [5, 2])
    ((_, calls), _) = said(VIEWS[0], one)
    assert [call.args[1] for call in calls] == [(3, 2), (2, 2)]


def test_calls_differ_where_only_some_rank_has_another_size():
    one = sample("new_zeros.default", numbers(5, 2), [1, 2])
    ((_, calls), _) = said(VIEWS[0], one)
    assert [tuple(call.args[1]) for call in calls] == [(1, 2), (0, 2)]


def test_wrong_lines_are_reported_and_sound_ones_counted_by_rule():
    found = validate_rule(entry(wrong), given=[NEG], ranks=(2, 3))
    assert {(str(i.rule), i.verdict) for i in found.wrong} == {("aten.neg.default: P(sum) -> P(max)", Verdict.UNSOUND)}
    assert set(found.sound) == {"aten.neg.default: S(0) -> S(0)"}
    assert found.sound["aten.neg.default: S(0) -> S(0)"] == found.samples * 2  # on two mesh sizes each
    assert found.samples > 1  # other forms of the call are tried as well


def test_each_mesh_size_is_asked_about_what_is_claimed_on_it(monkeypatch):
    asked = []
    monkeypatch.setattr(claims, "own_claims", lambda entry, case, size, raw: asked.append(size) or [])
    validate_rule(EVEN, given=[NEG], ranks=(3, 2))
    assert asked[:2] == [3, 2] and set(asked) == {3, 2}


def test_without_calls_given_the_overloads_own_are_taken(monkeypatch):
    asked = []
    monkeypatch.setattr(claims, "samples_of", lambda op, seed: asked.append((op, seed)) or [NEG, NEG])
    both, one = validate_rule(entry(rows), seed=3), validate_rule(entry(rows), seed=3, given=[NEG])
    assert asked == [("aten.neg.default", 3)]
    assert both.samples > one.samples >= 1


@pytest.mark.parametrize("one", [
    sample("neg.default", torch.tensor([True, False])),
    sample("floor.default", torch.arange(1.0, 5.0)),
], ids=["torch refuses it", "it jumps under noise"])  # fmt: skip
def test_a_call_that_says_nothing_is_not_counted(one):
    found = validate_rule(entry(rows, one.op), given=[one])
    assert (found.samples, found.sound, found.wrong) == (0, {}, ())


def test_of_other_forms_there_is_one_adversary_and_of_the_call_itself_as_many_as_the_budget_says(monkeypatch):
    budgets = []
    monkeypatch.setattr(claims, "adverse", lambda *_, budget, **__: budgets.append(budget) or {})
    validate_rule(entry(rows), given=[NEG], budget=5)
    assert budgets[0] == 5 and set(budgets[1:]) == {1}
