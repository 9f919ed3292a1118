"""DTensor's plans as ours: the same collectives that it then makes, all of them legal, and faults that are found."""

import itertools
import logging
import random
from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import Shard, _redistribute

import localtensor as lt
from localtensor.layout import Network
from localtensor.layout.spec import Spec, parse
from strategies.base.signals import quiet
from strategies.planner.audit.pairs import MODES, NoDTensorPlan, as_dtensor_reads, draw_pairs, dtensor_plan, first_fault
from strategies.planner.audit.rank_run import dtensor_planner, redistribute_piece
from strategies.planner.audit.verdict import PairRun
from strategies.planner.search.api import plan
from strategies.planner.steps.legal_steps import with_placement
from strategies.planner.steps.plan import Plan
from strategies.planner.steps.prices import Sent, Time, Topology, priced_step
from strategies.torch_api.mesh_and_caches import world_mesh_with_submeshes
from strategies.torch_api.redistribute_plans import can_flatten
from tests.tools.plans.plan_pairs import pair, spec

TURNED = ((0, (1, 0)),)


def every(offered, sizes=(2, 2), shape=(8, 8)):
    """Every spec of these placements, in every shard order."""
    found = []
    for texts in itertools.product(offered, repeat=len(sizes)):
        plain = spec(" ".join(texts), sizes, shape)
        dims = [dim for dim in range(len(shape)) if len(plain.cut_by(dim)) > 1]
        chosen = itertools.product(*(itertools.permutations(plain.cut_by(dim)) for dim in dims))
        found += [replace(plain, shard_order=tuple(zip(dims, orders, strict=True))) for orders in chosen]
    return found


@pytest.mark.parametrize("mode", MODES)
def test_each_plan_of_dtensor_on_two_axes_is_made_of_legal_steps_and_arrives(mode):
    specs = every(("R", "S(0)", "S(1)", "P(sum)"))
    pairs = [(src, dst) for src in specs for dst in specs if src != dst]
    found = [dtensor_plan(src, dst, mode) for src, dst in random.Random(1).sample(pairs, 150)]
    made = [one for one in found if isinstance(one, Plan)]
    assert [first_fault(one) for one in made] == [""] * len(made)
    assert len(made) > 100
    assert all("not supported" in one.text for one in found if isinstance(one, NoDTensorPlan))


def kinds_called(one, mode):
    """The collectives that DTensor makes on rank threads, as rank 0 calls them."""
    job = PairRun.of(one)

    def body():
        mesh = world_mesh_with_submeshes(one.mesh, one.flattened)
        redistribute_piece(job.part(mode, job.pieces[mesh.get_rank()].clone()), mesh)

    with quiet(), dtensor_planner(mode):
        calls = lt.run(body, ranks=one.mesh.ranks, leftovers="ignore").calls
    return [call.kind for call in calls if call.rank == 0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("one", [
    pair("S(0) S(0)", "R S(0)"), pair("P(sum) S(0)", "S(0) S(1)"), pair("S(0) S(1)", "S(1) S(0)"),
    pair("P(max) P(max)", "S(0) R"), pair("SS(0,2) S(0)", "S(0) S(0)"), pair("P(sum) R", "SS(0,2) S(0)"),
    pair("S(0) S(0)", "R R", flattened=[("a", "b")]), pair("P(sum) P(sum)", "R R", flattened=[("a", "b")]),
    pair("S(0) S(0)", "S(0) S(0)", src_order=TURNED), pair("S(0) R", "S(1) R", sizes=(1, 2)),
], ids=str)  # fmt: skip
def test_the_plan_names_the_collectives_that_dtensor_then_makes(one, mode):
    found = dtensor_plan(one.src, one.dst, mode, flattened=one.flattened, all_to_all=False)
    assert isinstance(found, Plan)
    assert first_fault(found) == ""
    called = kinds_called(one, mode)
    planned = [step.kind for step in found.steps if step.kind != "local"]
    assert len(called) == len(planned), f"{called} for {planned}"
    assert all(real.startswith(kind) for real, kind in zip(called, planned, strict=True)), f"{called} for {planned}"


@pytest.mark.skipif(not can_flatten(), reason="this torch merges no steps")
def test_merged_steps_are_one_step_along_several_axes():
    found = dtensor_plan(spec("S(0) S(0)"), spec("R R"), flattened=[("a", "b")])
    assert [(step.kind, step.axes) for step in found.steps] == [("all_gather", (0, 1))]
    turned = dtensor_plan(spec("S(0) S(0)", order=TURNED), spec("R R"), flattened=[("a", "b")])
    assert [step.axes for step in turned.steps] == [(0,), (1,)]


def test_what_takes_two_collectives_in_fact_is_two_steps():
    strided = dtensor_plan(spec("S(0)", (2,)), spec("SS(0,2)", (2,)))
    assert [step.kind for step in strided.steps] == ["all_gather", "local"]
    assert [step.kind for step in dtensor_plan(spec("S(0)", (2,)), spec("S(1)", (2,))).steps] == ["all_to_all"]
    gathered = dtensor_plan(spec("S(0)", (2,)), spec("S(1)", (2,)), all_to_all=False)
    assert [step.kind for step in gathered.steps] == ["all_gather", "local"]
    assert [str(step.now.placements[0]) for step in gathered.steps] == ["R", "S(1)"]


def test_an_axis_of_one_rank_talks_to_no_one():
    found = dtensor_plan(spec("S(0) R", (1, 2)), spec("S(1) R", (1, 2)))
    assert [step.kind for step in found.steps] == ["local"]


def test_plans_cost_what_ours_would_cost_and_never_less_than_the_cheapest():
    src, dst = spec("S(0) S(0)", shape=(64, 64)), spec("S(1) R", shape=(64, 64))
    slow = Topology((Network(1e-3, 1e-6), Network(1e-6, 1e-9)))
    for price in (Time(), Sent(), Time(slow)):
        topology = price.topology if isinstance(price, Time) else Topology()
        theirs = dtensor_plan(src, dst, price=price, topology=topology)
        ours = plan(src, dst, price, topology=topology)
        assert theirs.price == sum(price(step.move) for step in theirs.steps)
        assert (theirs.by, theirs.price >= ours.price) == (price.name, True)


def test_loggers_are_quiet_meanwhile_and_as_they_were_also_after_a_refusal(monkeypatch):
    before, meanwhile = logging.root.manager.disable, []
    asked = _redistribute._gen_transform_infos_non_cached
    validated = lambda *each: (meanwhile.append(logging.root.manager.disable), asked(*each))[1]  # noqa: E731
    monkeypatch.setattr(_redistribute, "_gen_transform_infos_non_cached", validated)
    dtensor_plan(spec("R R"), spec("P(product) R"))
    assert meanwhile == [logging.CRITICAL] and logging.root.manager.disable == before


def test_a_refusal_is_a_value():
    found = dtensor_plan(spec("R R"), spec("P(product) R"))
    assert isinstance(found, NoDTensorPlan)
    assert str(found).startswith("ValueError")
    assert dtensor_plan(spec("P(sum) P(max)"), spec("R R")) == dtensor_plan(spec("P(sum) P(max)"), spec("R S(0)"))


def test_nothing_to_do_is_a_plan_without_steps():
    found = dtensor_plan(spec("S(0) R"), spec("S(0) R"))
    assert (found.steps, found.price, first_fault(found), str(found)) == ((), 0, "", "nothing to do")


def test_there_are_two_planners():
    with pytest.raises(ValueError, match="greedy, graph"):
        dtensor_plan(spec("R R"), spec("R R"), "best")


def stepped(src, *moves):
    """A plan of these moves, each (kind, axes, placement), whether legal or not."""
    steps, now = [], src
    for kind, axes, placement in moves:
        after = with_placement(now, axes, parse(placement))
        steps.append(priced_step(kind, axes, now, after))
        now = after
    return Plan(src, now, tuple(steps), 0, "", "", 0)


def test_a_step_that_undoes_what_is_not_innermost_is_a_fault():
    wrong = stepped(spec("S(0) S(0)"), ("all_gather", (0,), "R"), ("all_gather", (1,), "R"))
    assert (
        first_fault(wrong)
        == "step 1, S(0) -> R on a: b cuts what a has left of dim 0: what is cut last is undone first"
    )
    assert first_fault(stepped(spec("S(0) S(0)"), ("all_gather", (1,), "R"), ("all_gather", (0,), "R"))) == ""


def test_a_plan_that_ends_elsewhere_is_a_fault():
    gathered = stepped(spec("S(0) R"), ("all_gather", (0,), "R"))
    assert first_fault(replace(gathered, dst=spec("S(1) R"))) == "it ends at f64[8,8] @ a:R, b:R"
    assert first_fault(Plan(spec("S(0) R"), spec("R R"), (), 0, "", "", 0)) == "it ends at f64[8,8] @ a:S(0), b:R"


def test_axes_that_do_not_cut_the_same_dim_cannot_be_gathered_at_once():
    wrong = stepped(spec("S(0) S(1)"), ("all_gather", (0, 1), "R"))
    assert first_fault(wrong).endswith("this cannot be done along these axes at once")
    assert first_fault(stepped(spec("S(0) S(0)"), ("all_gather", (0, 1), "R"))) == ""


def test_strided_shards_that_encode_an_order_are_read_as_one():
    assert as_dtensor_reads(spec("SS(0,2) S(0)")) == spec("S(0) S(0)", order=TURNED)
    lone = spec("R SS(0,2)")
    assert as_dtensor_reads(lone) is lone
    assert first_fault(dtensor_plan(spec("SS(0,2) S(0)"), spec("S(0) S(0)"))) == ""


@pytest.mark.parametrize("mode", MODES)
def test_what_is_drawn_has_a_plan_or_a_refusal(mode):
    found = [
        dtensor_plan(one.src, one.dst, mode, flattened=one.flattened) for one in draw_pairs((2, 3), seed=2, budget=60)
    ]
    assert {type(one) for one in found} == {Plan, NoDTensorPlan}
    assert all(isinstance(one, NoDTensorPlan) or one.steps for one in found)


def test_a_spec_of_integers_is_planned_as_one_of_floats():
    found = [
        dtensor_plan(spec("P(sum) R", dtype=dtype), spec("S(0) R", dtype=dtype))
        for dtype in (torch.int64, torch.float64)
    ]
    assert [step.kind for step in found[0].steps] == [step.kind for step in found[1].steps] == ["reduce_scatter"]
    assert isinstance(found[0].steps[0].now, Spec)
    assert found[0].steps[0].now.placements[0] == Shard(0)


def test_the_two_planners_are_two():
    pairs = list(draw_pairs((2, 2), seed=6, budget=40))
    plans = {mode: [str(dtensor_plan(one.src, one.dst, mode)) for one in pairs] for mode in MODES}
    assert plans["greedy"] != plans["graph"]
