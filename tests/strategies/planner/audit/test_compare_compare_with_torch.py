import pytest
from torch.distributed.tensor import _redistribute

from strategies.planner.audit import compare
from strategies.planner.audit.compare import dtensor_plans, layout_count, why_skipped
from strategies.planner.audit.pairs import dtensor_plan
from strategies.planner.search.api import plan
from strategies.planner.steps.prices import Sent, Time
from strategies.planner.text.parser import read
from tests.torch_here import before_2_14


def test_both_planners_are_asked_and_priced_as_ours_are():
    src, dst = read("f32[64,64] @ dp=2,tp=2: P(sum),R -> R,S(0)")
    for price in (Time(), Sent()):
        found = dtensor_plans(src, dst, price)
        assert [one.mode for one in found] == ["greedy", "graph"]
        assert all(one.plan.price == sum(price(step.move) for step in one.plan.steps) > 0 for one in found)
        assert all(one.wrong == one.refused == one.skipped == "" for one in found)


@before_2_14
def test_a_refusal_of_dtensor_is_reported():
    [greedy, _] = dtensor_plans(*read("f32[8] @ dp=2: S(0) -> P(sum)"), Time())
    assert greedy.plan is None and greedy.refused and not greedy.skipped


def test_a_step_along_an_axis_of_one_rank_costs_dtensor_nothing():
    src, dst = read("f32[64,64] @ dp=1,tp=2: S(1),S(0) -> R,R")
    ours = plan(src, dst)
    for one in dtensor_plans(src, dst, Time()):
        assert [step.seconds for step in one.plan.steps if step.axes == (0,)] == [0.0]
        assert one.plan.price == ours.price and one.plan.seconds == ours.seconds
    [greedy, _] = dtensor_plans(*read("f32[64,64] @ dp=1,tp=2: S(0),S(0) -> R,S(1)"), Time())
    assert [step.axes for step in greedy.gathered.steps].count((0,)) == 1
    assert greedy.gathered.price == sum(Time()(step.move) for step in greedy.gathered.steps if step.axes == (1,))


def test_a_torch_that_cannot_be_asked_is_named_and_our_own_plan_stands(monkeypatch):
    monkeypatch.setattr(_redistribute, "_gen_transform_infos_non_cached", lambda src, dst: ())
    found = dtensor_plans(*read("f32[8] @ dp=2: S(0) -> R"), Time())
    assert [(one.mode, one.plan, one.refused) for one in found] == [("greedy", None, ""), ("graph", None, "")]
    assert all(one.skipped.startswith("not asked: ") and "Use torch 2.13" in one.skipped for one in found)


def test_what_would_take_seconds_is_not_asked(monkeypatch):
    src, dst = read("f32[8,8] @ 2,2,2,2,2: S(0),R,R,R,R -> R,R,R,R,S(1)")
    assert why_skipped(src, dst, "greedy") == "" and "up to 3,552 layouts" in why_skipped(src, dst, "graph")
    ordered, _ = read("f32[8,8] @ 2,2,2,2,2: S(0)[1],S(0)[0],R,R,R -> R,R,R,R,R")
    strided, _ = read("f32[8,8] @ 2,2,2,2,2: SS(0,2),R,R,R,R -> R,R,R,R,R")
    assert all("layouts" in why_skipped(spec, dst, "greedy") for spec in (ordered, strided))
    many, less = read("f32[8] @ dp=100000: S(0) -> R")
    assert "100,000 ranks" in why_skipped(many, less, "greedy")
    monkeypatch.setattr(compare, "dtensor_plan", lambda *_, **__: pytest.fail("DTensor was asked"))
    assert [one.skipped[:10] for one in dtensor_plans(many, less, Time())] == ["not asked:"] * 2


def test_on_cpu_it_gathers_in_the_place_of_each_all_to_all():
    for text in ("f32[7,5] @ dp=3: S(0) -> S(1)", "f32[64,64] @ dp=2,tp=4: S(0),P(sum) -> S(1),R"):
        src, dst = read(text)
        for price in (Time(), Sent()):
            [greedy, _] = dtensor_plans(src, dst, price)
            real = dtensor_plan(src, dst, price=price, all_to_all=False)
            assert greedy.gathered.steps == real.steps and greedy.gathered.price == real.price
            assert any(step.kind == "all_to_all" for step in greedy.plan.steps)
    [none, _] = dtensor_plans(*read("f32[8] @ dp=2: S(0) -> R"), Time())
    assert none.gathered is None


@pytest.mark.parametrize(
    ("axes", "dims", "count"), [(1, 0, 2), (1, 1, 3), (2, 1, 4 + 4 + 2), (2, 2, 4 + 8 + 6), (4, 3, 1240)]
)
def test_layouts_are_counted(axes, dims, count):
    assert layout_count(axes, dims) == count
