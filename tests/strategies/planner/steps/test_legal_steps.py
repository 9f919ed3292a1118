"""Which steps are legal: the planner's tables say the same, and what is legal is right when it is carried out."""

import pytest
import torch

from localtensor.layout.mesh import Mesh
from localtensor.layout.spec import Spec, parse, short
from strategies.planner.search.state_table import StateTable
from strategies.planner.steps.alpha_beta import REPLICATE
from strategies.planner.steps.legal_steps import (
    collectives_reduce,
    legal_changes,
    usable_placements,
    why_illegal,
    why_not_made,
)
from strategies.planner.steps.plan import Plan
from strategies.planner.steps.prices import Time, priced_step
from tests.strategies.planner.execute.random_specs import Drawn
from tests.tools.plans.trials import Trial, in_lists, in_lockstep


def spec(text, sizes, shape=(6, 5), dtype=torch.float32, order=()):
    return Spec(Mesh.of(*sizes), tuple(map(parse, text.split())), shape, dtype, order)


def right(was, change):
    """Whether a step is right when it is carried out, on lists and in lockstep."""
    step = priced_step(change.kind, change.axes, was, change.now)
    trial = Trial(Drawn(0, 0, was, change.now), Plan(was, change.now, (step,), 0, "", "", 0))
    return in_lists(trial) == "" and in_lockstep(trial) == ""


# -- an axis of one rank


@pytest.mark.parametrize(("sizes", "refused"), [((2, 1), False), ((2, 3), True), ((1, 3), True), ((1, 1), False)])
def test_only_an_axis_of_several_ranks_is_in_the_way_of_what_it_cuts_after(sizes, refused):
    assert bool(why_illegal(spec("S(0) S(0)", sizes), 0, REPLICATE)) == refused
    assert not why_illegal(spec("S(0) S(0)", sizes), 1, REPLICATE)


@pytest.mark.parametrize(("text", "sizes", "order"), [
    ("S(0) S(0)", (2, 1), ()), ("S(0) S(0)", (1, 3), ((0, (1, 0)),)), ("S(0) S(0) S(0)", (3, 1, 2), ((0, (0, 2, 1)),)), ("SS(0,2) S(0)", (2, 1), ()),
])  # fmt: skip
def test_steps_beneath_an_axis_of_one_rank_are_right(text, sizes, order):
    was, offered = spec(text, sizes, order=order), tuple(map(parse, ("R", "S(1)", "P(sum)", "SS(0,2)")))
    beneath = 0
    for change in legal_changes(was, offered):
        beneath += change.axes[0] != was.cut_by(0)[-1]
        assert right(was, change), change
    assert beneath >= 3


def test_flattened_steps_beneath_an_axis_of_one_rank_are_right():
    was = spec("S(0) S(0) S(0)", (2, 3, 1), (12, 6))
    flat = [c for c in legal_changes(was, (REPLICATE, parse("S(0)"), parse("S(1)")), [(0, 1)]) if len(c.axes) > 1]
    assert [change.kind for change in flat].count("all_gather") == 1 and len(flat) == 4
    assert all(right(was, change) for change in flat)
    assert all(change.now != was for change in flat)


# -- what cannot be made partial


def test_no_partial_product_is_made_of_complex_numbers():
    infinite = torch.tensor(complex(float("inf"), 0.0))
    assert not torch.equal(infinite * (1 + 0j), infinite), (
        "there is no complex number that leaves all others as they are"
    )
    for held in ("R", "S(0)"):
        was = spec(held, (2,), dtype=torch.complex64)
        assert "no complex number" in why_illegal(was, 0, parse("P(product)"))
        assert not why_illegal(was, 0, parse("P(sum)"))
    assert not why_illegal(spec("P(product)", (2,), dtype=torch.complex64), 0, REPLICATE)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.complex64, torch.int16, torch.int64, torch.bool, torch.float8_e5m2]
)
def test_the_table_of_a_search_makes_partial_values_just_where_steps_do(dtype):
    offered = tuple(map(parse, ("R", "S(0)", "SS(0,2)", "P(sum)", "P(avg)", "P(max)", "P(product)")))
    for text in ("R", "S(0)", "SS(0,2)"):
        was = spec(text, (2,), dtype=dtype)
        table = StateTable(was, offered, (), Time())
        got = {table.placements[q] for q, _ in table.follows[table.held[0]]}
        assert got == {p for p in offered if not why_illegal(was, 0, p)}


def test_what_is_unmade_has_a_reason_for_each():
    reasons = [
        why_not_made("avg", torch.int64, False), why_not_made("avg", torch.float32, True), why_not_made("product", torch.complex64, False),
    ]  # fmt: skip
    assert all(reasons) and len(set(reasons)) == 3
    assert why_not_made("avg", torch.float32, False) == why_not_made("sum", torch.float32, True) == ""


def test_what_collectives_reduce_is_not_exchanged():
    assert [collectives_reduce("max", dtype) for dtype in (torch.int32, torch.float32, torch.int16)] == [
        True,
        False,
        False,
    ]
    assert [collectives_reduce("product", dtype) for dtype in (torch.float32, torch.complex64)] == [True, False]


def test_an_axis_may_be_on_the_way_what_both_ends_have_that_means_something():
    ends = (spec(text, (2, 2)) for text in ("SS(0,2) P(max)", "SS(0,3) P(max)"))
    assert [short(p) for p in usable_placements(*ends)] == ["R", "S(0)", "S(1)", "SS(0,3)", "P(max)", "P(sum)"]
    ends = (spec(text, (2, 2), dtype=torch.int32) for text in ("P(max) R", "R R"))
    assert [short(p) for p in usable_placements(*ends)] == ["R", "S(0)", "S(1)", "P(max)"]
