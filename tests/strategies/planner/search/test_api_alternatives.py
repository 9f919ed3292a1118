import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies.planner.search.api import (
    CHEAPEST,
    FASTEST,
    FEWEST_BYTES,
    FEWEST_STEPS,
    LEAST_MEMORY,
    OTHER_FIRST_STEP,
    NoPlan,
    RankedPlan,
    StepCount,
    TieBreak,
    alternatives,
    plan,
    price_of,
    step_texts,
)
from strategies.planner.steps.legal_steps import legal_changes, usable_placements
from strategies.planner.steps.prices import Sent, Time, move_of
from strategies.planner.text.parser import read

MEMBERS = ["R", "S(0)", "S(1)", "P(sum)"]
TEXT = "f32[{},{}] @ dp=2,tp=3: {},{} -> {},{}"
texts = st.tuples(st.integers(1, 64), st.integers(1, 64), *[st.sampled_from(MEMBERS)] * 4).map(
    lambda t: TEXT.format(*t)
)


def by_name(found):
    return {name: way.plan for way in found for name in way.names}


@given(texts)
@settings(max_examples=15, deadline=None)
def test_each_way_is_the_best_in_what_it_is_called_after(text):
    src, dst = read(text)
    best = plan(src, dst)
    found = by_name(alternatives(best))
    if not best.steps:
        assert found == {CHEAPEST: best}
        return
    assert found[CHEAPEST] == best and FASTEST not in found
    assert found[FEWEST_BYTES].sent == plan(src, dst, Sent()).sent
    assert (
        len(found[FEWEST_STEPS].steps)
        == len(plan(src, dst, TieBreak(StepCount(), Time())).steps)
        <= min(len(p.steps) for p in found.values())
    )
    assert found[LEAST_MEMORY].memory == min(p.memory for p in found.values())
    try:
        leaner = plan(src, dst, memory=found[LEAST_MEMORY].memory - 1)
    except NoPlan:
        leaner = None
    assert leaner is None
    for made in found.values():
        assert made.src == src and made.dst == made.steps[-1].now and made.price == price_of(made, Time()) >= best.price
        assert all(one.now == other.was for one, other in zip(made.steps, made.steps[1:], strict=False))


@given(texts)
@settings(max_examples=10, deadline=None)
def test_no_plan_is_told_twice_and_another_beginning_is_one(text):
    best = plan(*read(text))
    found = alternatives(best)
    assert len({step_texts(way.plan) for way in found}) == len(found)
    assert found[0].names[0] == CHEAPEST and [way.ratio(best.price) for way in found[1:]] == sorted(
        way.ratio(best.price) for way in found[1:]
    )
    other = by_name(found).get(OTHER_FIRST_STEP)
    assert other is None or other.steps[0].now != best.steps[0].now


def test_the_price_that_was_asked_for_is_the_one_that_is_compared():
    best = plan(*read("f32[64,64] @ dp=2,tp=2: S(0),P(sum) -> R,S(0)"), Sent())
    found = alternatives(best, Sent())
    assert FEWEST_BYTES not in by_name(found) and FASTEST in by_name(found)
    assert all(way.plan.price == way.plan.sent and way.plan.by == "bytes" for way in found)
    assert by_name(found)[FASTEST].price > best.price


@pytest.mark.parametrize("text", [
    "f32[64,64] @ dp=2,tp=2: S(0),P(sum) -> R,S(0)", "f32[64,64] @ dp=4,tp=2: S(0),S(0) -> S(1),R",
    "f32[64,64] @ dp=4: S(0) -> S(1)", "f32[64,64] @ dp=4: P(sum) -> S(1)",
])  # fmt: skip
def test_none_of_them_needs_more_than_is_allowed(text):
    src, dst = read(text)
    free = alternatives(plan(src, dst))
    for limit in sorted({way.plan.memory for way in free})[:-1]:
        found = alternatives(plan(src, dst, memory=limit), memory=limit)
        assert all(way.plan.memory <= limit for way in found)
    assert len({way.plan.memory for way in free}) > 1


def test_a_dearer_way_is_not_the_best_of_those_that_begin_otherwise():
    best = plan(*read("f32[4096,4096] @ dp=4,tp=8: S(0),R -> R,S(0)"))
    ratios = {name: way.ratio(best.price) for way in alternatives(best) for name in way.names}
    assert 1 < ratios[OTHER_FIRST_STEP] < 1.1 and ratios[FEWEST_STEPS] > 3


@pytest.mark.parametrize("text", [
    "f32[64,64] @ dp=2,tp=2: S(0),P(sum) -> R,S(0)", "f32[7,6] @ dp=2,tp=3: S(0),S(0) -> S(1),R",
    "f32[64,64] @ dp=2,tp=4: R,S(0) -> S(0),R", "f32[64,8] @ dp=2,tp=2: S(1),S(0) -> R,P(sum)",
    "f32[64,64] @ dp=2,tp=3: S(0),P(sum) -> S(0),S(1)",  # to begin otherwise and come back would cost less
])  # fmt: skip
def test_no_plan_that_begins_otherwise_and_does_not_come_back_costs_less(text):
    src, dst = read(text)
    best, least = plan(src, dst), []
    for change in legal_changes(src, usable_placements(src, dst)):
        rest = plan(change.now, dst)
        if change.now != best.steps[0].now and all(step.now != src for step in rest.steps):
            least.append(Time()(move_of(change.kind, change.axes, src, change.now)) + rest.price)
    assert by_name(alternatives(best))[OTHER_FIRST_STEP].price == min(least)


def test_groups_of_several_axes_may_be_an_alternative():
    src, dst = read("f32[64] @ dp=2,tp=2: P(sum),P(sum) -> R,R")
    found = by_name(alternatives(plan(src, dst, flattened=[("dp", "tp")]), flattened=[("dp", "tp")]))
    assert [step.axes for step in found[FEWEST_STEPS].steps] == [(0, 1)]


def test_a_ratio_to_nothing():
    best = plan(*read("f32[64] @ dp=2: R -> R"))
    dear = plan(*read("f32[64] @ dp=2: S(0) -> R"))
    assert RankedPlan((), best).ratio(0) == 1 and RankedPlan((), dear).ratio(0) == float("inf")


def test_none_is_cheaper_than_the_cheapest_where_strided_shards_are_an_order():
    src, dst = read("c64[6,7] @ dp=2,tp=3: SS(0,3),S(0) -> S(0),S(0)")
    best = plan(src, dst)
    other = by_name(alternatives(best))[OTHER_FIRST_STEP]
    assert other.price >= best.price and other.steps[0].was == best.steps[0].was != src
