from dataclasses import replace

from strategies.probe import Probe
from strategies.smallest import FALLBACKS, smallest
from strategies.truth import tell
from strategies.verdicts import Evidence, Verdict
from tests.strategies.cases import judged, numbers
from tests.strategies.planted_ops import planted


def given(op, x):
    """A rule that DTensor has been given by hand, wrong where a NaN is among the values."""
    one = planted(op, x)
    instance = judged(one, "S(0) -> S(0)", ranks=3)
    return instance, Probe(one, tell(one), 3, seed=0).case(instance.rule, 0)


def test_the_smallest_case_comes_first_and_the_given_one_last():
    x = numbers(9, 4)
    x[4, 2] = float("nan")
    instance, case = given("patched", x)
    found = smallest(instance, case)
    sizes = [sum(t.numel() for t in c.truth.inputs) for _, c in found]
    assert sizes == sorted(sizes) and sizes[0] <= 4 and 2 < len(found) <= FALLBACKS + 1
    assert (found[0][1].ranks, found[-1]) == (2, (instance, case))
    assert {i.verdict for i, _ in found} == {Verdict.UNSOUND} and {str(i.rule) for i, _ in found} == {
        str(instance.rule)
    }
    assert all(c.ranks == i.ranks and c.sample is i.sample for i, c in found)


def test_what_only_a_real_run_can_judge_comes_back_alone():
    instance, case = given("remembered", numbers(9, 4))
    suspect = replace(instance, verdict=Verdict.SUSPECT, evidence=Evidence("a handler of its own"))
    assert smallest(suspect, case) == [(suspect, case)]
    assert smallest(suspect, case, budget=1) == [(suspect, case)]


def test_without_a_budget_nothing_is_shrunk():
    x = numbers(9, 4)
    x[4, 2] = float("nan")
    instance, case = given("patched", x)
    assert smallest(instance, case, budget=1) == [(instance, case)]
