"""What a sweep of torch 2.13 found wrong, played before and under our rules: wrong without them, right with them."""

import pytest
import torch

from strategies.model.rule import overload
from strategies.ops.all_rules import OUR_RULES
from strategies.propagation.overlay.context import overlay_dtensor
from strategies.torch_api import dtensor
from tests.strategies.findings_played import FILE, Found, findings, play, wrong

ON_2_13 = pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="the findings are those of torch 2.13")

REDISTRIBUTES = (
    "DTensor's own redistribution is wrong, in full_tensor or redistribute, which no rule of an op speaks of"
)
PARTS = "the parts themselves do not add up to the value: one is not a number, or they are rounded coarsely"
REFUSED = "the op itself refuses tensors of these shapes, but for plain ones in eager mode"
NO_RULE = [
    "aten._amp_foreach_non_finite_check_and_unscale_.default",
    "aten.eye.m_out",
]
"""Ops with findings for which we have no rule yet."""
LEFT = {one.rule: "we have no rule for the op" for one in findings() if one.op in NO_RULE} | {
    "aten.alias.default on (2,): P(product), then S(0)": REDISTRIBUTES,
    "aten.alias.default on (2,): P(product), then S(1)": REDISTRIBUTES,
    "aten.clone.default on (2, 2): S(0), a flattened submesh present": REDISTRIBUTES,
    "aten.clone.default on (2, 2): S(1), a flattened submesh present": REDISTRIBUTES,
    "aten.clone.default on (2, 2): S(2), a flattened submesh present": REDISTRIBUTES,
    "aten.clone.default on (2, 2): S(3), a flattened submesh present": REDISTRIBUTES,
    "aten.bernoulli.out on (2,): P(sum), S(0)": PARTS,
    "aten.exp.default: P(max) -> P(max)": PARTS,
    "aten.exp.default: P(min) -> P(min)": PARTS,
    "aten.mean.default: P(avg) -> P(avg)": PARTS,
    "prims.fmin.default: P(min), P(min) -> P(min)": REFUSED,
    "prims.fmin.default: P(min), R -> P(min)": REFUSED,
}
"""The findings that are wrong under our rules too, and why.  `python -m tests.strategies.findings_played` lists them."""


def first_of_each_op() -> list[Found]:
    """For each op the finding of the fewest ranks and elements."""
    smallest: dict[str, Found] = {}
    for one in sorted(findings(), key=lambda f: (f.program.ranks, f.program.sample.size)):
        smallest.setdefault(one.op, one)
    return list(smallest.values())


def assert_wrong_before(found: list[Found]) -> None:
    heard = play(found)
    assert [one.rule for one in found if not wrong(heard[one.rule])] == []


@ON_2_13
def test_the_smallest_finding_of_every_third_op_is_wrong_without_our_rules():
    small = [one for one in first_of_each_op() if one.program.mesh == (2,)]
    assert len(small) > 100
    assert_wrong_before(small[::3])  # all of them: the slow test


@ON_2_13
@pytest.mark.slow
def test_every_finding_is_wrong_without_our_rules():
    assert_wrong_before(list(findings()))


@ON_2_13
def test_every_finding_is_right_under_our_rules_but_for_those_that_are_listed():
    with overlay_dtensor():
        heard = play(findings())
    left = {rule: wrong(verdict) for rule, verdict in heard.items() if wrong(verdict)}
    assert sorted(set(left) - set(LEFT)) == [], left
    assert sorted(set(LEFT) - set(left)) == [], "they are right now: take them out of the list"


def test_in_lockstep_they_are_right_too():
    found = [one for one in first_of_each_op() if one.rule not in LEFT][::2]
    with overlay_dtensor():
        heard = play(found, lockstep=True)
    assert {rule: wrong(verdict) for rule, verdict in heard.items() if wrong(verdict)} == {}


def test_how_many_are_mended():
    assert len(findings()) == 510
    assert set(LEFT) <= {one.rule for one in findings()}
    assert 510 - len(LEFT) >= 491


@ON_2_13
def test_the_findings_are_of_ops_that_have_a_rule_of_ours_or_that_dtensor_takes_apart():
    lacking = sorted({one.op for one in findings() if one.op not in OUR_RULES})
    assert lacking == NO_RULE
    assert all(dtensor.registry_of(overload(op)) for op in lacking)


def test_the_file_is_small_enough_to_be_kept():
    assert FILE.stat().st_size < 300_000
    assert len({one.rule for one in findings()}) == 510
