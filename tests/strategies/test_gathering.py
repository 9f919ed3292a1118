from collections import Counter

import pytest
import torch

from strategies import derived, selection
from strategies.gathering import capture
from strategies.progress import Silent
from strategies.selection import Pick
from strategies.settings import Settings
from strategies.verdicts import Crash
from tests.strategies.cases import numbers, sample

X = numbers(4, 6)
ADD, MUL, NEG = "aten.add.Tensor", "aten.mul.Tensor", "aten.neg.default"
CRASH = Crash("add[int64,even]", "its samples", "E")


@pytest.fixture
def world(monkeypatch):
    """`world(first, second)`: what the likely OpInfos give, and all the others; it notes what was gathered."""
    asked = []

    def gives(first, second=(), *, wanted=(ADD, MUL), made=(), reasons=()):
        monkeypatch.setattr(derived, "lacking", lambda *_: [None] * 3)
        monkeypatch.setattr(derived, "gather", lambda *_: (dict(made), dict(reasons)))
        left = [first, second]
        picked = Pick((1, 2), frozenset(wanted))
        lacking = Pick((3,), frozenset(wanted) - set(first))
        monkeypatch.setattr(selection, "pick", lambda settings, rules: picked)
        monkeypatch.setattr(selection, "wider", lambda pick, met: lacking if lacking.overloads else Pick(()))

        def gather(hands, pick, settings, rules, tick, units):
            asked.append((pick, rules))
            units(5)
            tick(5)
            return dict(left.pop(0)), [CRASH], Counter({"refused": len(asked)})

        monkeypatch.setattr(selection, "gather", gather)
        return asked

    return gives


class Told(Silent):
    def __init__(self):
        self.phases = []

    def phase(self, name, total):
        self.phases.append((name, total))


def captured(rules=None, progress=None):
    return capture(None, Settings(("x",)), rules, progress or Silent())


def test_samples_come_by_overload_in_the_order_of_names(world):
    world({MUL: [sample("mul.Tensor", X, 2)], ADD: [sample("add.Tensor", X, 2)]})
    found = captured()
    assert list(found.shelf) == [ADD, MUL]
    assert [(len(samples), why) for samples, why in found.shelf.values()] == [(1, ""), (1, "")]
    assert (found.crashed, found.refused) == ((CRASH,), {"refused": 1})


def test_where_the_likely_opinfos_reach_all_the_others_are_not_run(world):
    asked = world({ADD: [sample("add.Tensor", X, 2)], MUL: [sample("mul.Tensor", X, 2)]})
    captured("rules")
    assert [(pick.infos, rules) for pick, rules in asked] == [((1, 2), "rules")]


def test_an_overload_that_they_do_not_reach_is_looked_for_in_the_others(world):
    asked = world({ADD: [sample("add.Tensor", X, 2)]}, {MUL: [sample("mul.Tensor", X, 2)]})
    found = captured("rules")
    assert [(pick.infos, rules) for pick, rules in asked] == [((1, 2), "rules"), ((3,), None)]
    assert list(found.shelf) == [ADD, MUL]
    assert (found.crashed, found.refused) == ((CRASH, CRASH), {"refused": 3})


def test_what_no_journal_can_hold_is_not_on_the_shelf(world):
    bad = sample("bernoulli.p", X, 0.5, generator=torch.Generator())
    world({NEG: [sample("neg.default", torch.eye(3).to_sparse()), sample("neg.default", X)], "aten.bernoulli.p": [bad]},
          wanted=())  # fmt: skip
    found = captured()
    assert {op: (len(samples), why) for op, (samples, why) in found.shelf.items()} == {
        NEG: (1, ""), "aten.bernoulli.p": (0, "its calls hold values that have no form in a journal"),
    }  # fmt: skip
    assert found.refused == {"refused": 1, f"{NEG}: a call holds a value that has no form in a journal": 1}


def test_a_derived_call_that_no_journal_can_hold_is_counted_too(world):
    bad = sample("bernoulli.p", X, 0.5, generator=torch.Generator())
    world({}, wanted=(), made={"aten.bernoulli.p": [bad, sample("bernoulli.p", X, 0.25)]})
    found = captured()
    assert [len(samples) for samples, _ in found.shelf.values()] == [1]
    assert found.refused["aten.bernoulli.p: a call holds a value that has no form in a journal"] == 1


def test_each_pass_is_a_phase(world):
    told = Told()
    world({ADD: [sample("add.Tensor", X, 2)]}, {})
    captured(progress=told)
    assert told.phases == [("capturing samples", 5), ("capturing samples", 5), ("deriving samples", 3)]


def test_what_no_capture_reaches_is_derived_or_has_its_reason(world):
    world({MUL: [sample("mul.Tensor", X, 2)]}, made={ADD: [sample("add.Tensor", X, X)]}, reasons={NEG: "it needs CUDA"})
    shelf = captured().shelf
    assert {op: (len(samples), why) for op, (samples, why) in shelf.items()} == {
        ADD: (1, ""), MUL: (1, ""), NEG: (0, "it needs CUDA"),
    }  # fmt: skip
    assert list(shelf) == sorted(shelf)
