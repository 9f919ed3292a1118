"""The book of all families: one entry for an overload, or an error that names both."""

import pytest
import torch

from strategies.ops.all_rules import FOREACH_RULES, MODULES, OUR_RULES, TwoRules, collected
from strategies.ops.semantics.rule_registry import OpRule, rules
from tests.architecture.test_sizes import ROOT


def nothing(query):
    return []


def test_every_family_is_in_the_book():
    assert len(OUR_RULES) == len(FOREACH_RULES) + sum(len(module.RULES) for module in MODULES) > 1000
    assert all(entry.family and entry.reason and entry.where for entry in OUR_RULES)


def test_two_entries_for_one_overload_are_an_error_that_names_both():
    one = rules("first family", "because", ["aten.relu.default"], nothing)
    two = rules("second family", "because", ["aten.relu.default"], nothing)
    with pytest.raises(TwoRules) as raised:
        collected([*one, *two])
    assert "aten.relu.default" in str(raised.value)
    assert "first family" in str(raised.value) and "second family" in str(raised.value)


def test_a_book_keeps_the_order_of_its_entries():
    ops = ["aten.sin.default", "aten.cos.default"]
    made = [OpRule(op, nothing, "some", "because") for op in ops]
    assert [entry.op for entry in collected(made)] == ops


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the page quotes the overloads of torch 2.13")
def test_the_page_of_our_rules_quotes_their_number():
    assert f"rules of our own for {len(OUR_RULES):,} overloads" in (ROOT / "docs/rules.md").read_text()
