"""Why two slices differ: of several statements that changed, the one that is nearest to the rule is told."""

import ast
from itertools import combinations

import pytest

from strategies.gate.changes.dependency_slice import OP, REGISTRATION, RULE, Slice, SliceStatement
from strategies.gate.changes.module_model import Statement
from strategies.gate.changes.select import change_reason

TEXT = """def rule(x): return rows(x)
made = partial(rule)
register(made)
def op(x): return x
def helper(x): return x
def further(x): return x"""
UNITS = {
    name: Statement("a.py", number, node, frozenset([name]))
    for number, (name, node) in enumerate(
        zip(("rule", "made", "register", "op", "helper", "further"), ast.parse(TEXT).body, strict=True)
    )
}
ROOTS = {"rule": RULE, "made": RULE, "register": REGISTRATION, "op": OP}
FUNCTIONS, MAKERS = [UNITS["rule"], UNITS["made"]], [UNITS["made"]]
SAID = {
    "rule": "its rule function `rule` changed",
    "made": "`made` in a.py, which makes its rule function, changed",
    "register": "its registration changed",
    "op": "`op` in a.py, which defines the op, changed",
    "helper": "`helper` in a.py, which its rule calls, changed",
    "further": "`further` in a.py, which its rule calls, changed",
}
"""What is said of each if only that one changed; the nearest to the rule first."""


def sliced(changed=(), order=tuple(SAID), without=()):
    parts = [
        SliceStatement(UNITS[n], ROOTS.get(n, RULE), n in ROOTS, f"def {n}", "new" if n in changed else "old")
        for n in order
        if n not in without
    ]
    return Slice(tuple(parts), "")


def told(changed, order=tuple(SAID), without=()):
    return change_reason(sliced(changed, order), sliced(without=without), FUNCTIONS, MAKERS)


@pytest.mark.parametrize("name", SAID)
def test_what_alone_changed_is_told(name):
    assert told([name]) == SAID[name]


@pytest.mark.parametrize(("near", "far"), list(combinations(SAID, 2)))
def test_of_two_that_changed_the_nearest_to_the_rule_is_told(near, far):
    others = [name for name in SAID if name not in (near, far)]
    order = (near, far, *others) if {near, far} == {"helper", "further"} else (far, near, *others)
    assert told([near, far], order) == SAID[near]


def test_what_changed_comes_before_what_is_new():
    assert told(["helper"], without=["op"]) == SAID["helper"]


def test_what_is_gone_is_told_and_a_registration_in_its_own_words():
    then, now = sliced(), sliced(without=["helper"])
    assert change_reason(now, then, FUNCTIONS, MAKERS) == "`helper` in a.py, on which its rule depended, is gone"
    assert change_reason(sliced(without=["register"]), then, FUNCTIONS, MAKERS) == "its registration changed"


def test_nothing_but_another_order_is_told_as_that():
    turned = sliced(order=tuple(reversed(SAID)))
    assert change_reason(turned, sliced(), FUNCTIONS, MAKERS) == "what it depends on stands in another order"
