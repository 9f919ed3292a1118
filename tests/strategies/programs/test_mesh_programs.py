"""Programs on meshes: each form occurs, all have a meaning, and a seed is all that they depend on.  Redistributions
without an op: from everywhere to everywhere that a user may ask for."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from localtensor.layout.shards import has_one_meaning
from localtensor.layout.spec import StridedShard, shard_cut
from strategies.model.oracle import run_oracle
from strategies.model.rule import Claim, read_layout
from strategies.programs.mesh_programs import SHAPES, draw_programs, draw_redistributions, every_redistribution
from strategies.programs.run import follow_ups
from strategies.programs.run.real_run import run_simulated_programs
from strategies.validation.sources.dtensor import claims
from tests.strategies.cases import numbers, rule, sample
from tests.strategies.programs_of import described

ADD = sample("add.Tensor", numbers(7, 6), numbers(7, 6, seed=1))
MM = sample("mm.default", numbers(7, 6), numbers(6, 5, seed=1))
CLAIMED = {id(one): {size: claims(one, size, run_oracle(one).raw) for size in (2, 3)} for one in (ADD, MM)}
MESHES = [(2, 2), (2, 3), (2, 2, 2)]


def programs(one=ADD, mesh=(2, 3), seed=0, budget=40):
    return draw_programs(one, CLAIMED[id(one)], mesh, seed=seed, budget=budget)


def layouts(**options):
    return [layout for program in programs(**options) for layout in program.inputs]


def claimed_rows(one, size):
    return {tuple(claim.rule.inputs) for claim in CLAIMED[id(one)][size]}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("one", [ADD, MM], ids=["add", "mm"])
def test_products_of_what_is_claimed_on_each_axis_are_drawn(one, mesh):
    rows = [list(zip(*program.inputs, strict=True)) for program in programs(one, mesh)]
    assert any(all(row in claimed_rows(one, size) for row, size in zip(p, mesh, strict=True)) for p in rows)


@pytest.mark.parametrize("mesh", MESHES)
def test_placements_that_no_registration_claims_are_drawn(mesh):
    rows = [list(zip(*program.inputs, strict=True)) for program in programs(MM, mesh)]
    assert any(any(row not in claimed_rows(MM, size) for row, size in zip(p, mesh, strict=True)) for p in rows)


@pytest.mark.parametrize("mesh", MESHES)
def test_a_dim_that_two_axes_cut_unevenly_is_drawn(mesh):
    assert any(layout.count(p) > 1 and shard_cut(p) == (0, 1) for layout in layouts(mesh=mesh) for p in layout)


@pytest.mark.parametrize("mesh", MESHES)
def test_another_order_of_cuts_is_drawn(mesh):
    assert any((shard_cut(p) or (0, 0))[1] > 1 for layout in layouts(mesh=mesh) for p in layout)


def test_a_sum_on_one_axis_and_a_shard_on_another_are_drawn_where_rules_have_them():
    one = sample("neg.default", numbers(7, 6))
    claimed = {size: [Claim(rule(one, line), "test") for line in LINEAR] for size in (2, 3)}
    drawn_in_turns = [p.inputs[0] for p in draw_programs(one, claimed, (2, 3), seed=0, budget=8)]
    assert any(Partial() in layout and any(map(shard_cut, layout)) for layout in drawn_in_turns)


LINEAR = (
    "R -> R",
    "S(0) -> S(0)",
    "S(1) -> S(1)",
    *(f"P({k}) -> P({k})" for k in ("sum", "avg", "min", "max", "product")),
)


@pytest.mark.parametrize("mesh", MESHES)
def test_two_partials_on_one_tensor_are_drawn_of_one_kind_and_of_sum_and_avg(mesh):
    kinds = [[p.reduce_op for p in layout if isinstance(p, Partial)] for layout in layouts(mesh=mesh)]
    assert any(len(k) > 1 and len(set(k)) == 1 for k in kinds)
    assert any(set(k) == {"sum", "avg"} for k in kinds)


def test_they_come_often_even_where_no_rule_has_a_partial():
    one = sample("_softmax.default", numbers(7, 6), 1, False)
    rows = {size: claims(one, size, run_oracle(one).raw) for size in (2, 3)}
    found = [p for mesh in MESHES for seed in (0, 1) for p in draw_programs(one, rows, mesh, seed=seed, budget=40)]
    twice = [p for p in found if sum(isinstance(q, Partial) for q in p.inputs[0]) > 1]
    assert len(twice) / len(found) > 0.23


def test_tensors_of_unlike_kinds_are_drawn():
    found = [
        {p.reduce_op for layout in program.inputs for p in layout if isinstance(p, Partial)} for program in programs()
    ]
    assert any(len(kinds) > 1 and kinds != {"sum", "avg"} for kinds in found)


@pytest.mark.parametrize("mesh", MESHES)
def test_a_flattened_submesh_is_there_in_some(mesh):
    share = sum(program.flattened for program in programs(mesh=mesh)) / len(programs(mesh=mesh))
    assert 0.05 < share < 0.6


@pytest.mark.parametrize("mesh", MESHES)
def test_all_that_is_drawn_has_a_meaning_and_does_something(mesh):
    for program in programs(mesh=mesh, budget=100):
        assert all(
            has_one_meaning(layout, x.shape, x.dtype, mesh)
            for layout, x in zip(program.inputs, ADD.tensors, strict=True)
        )
        assert any(p != Replicate() for layout in program.inputs for p in layout)


def test_no_two_are_alike_and_each_carries_seed_and_number():
    found = programs(seed=9)
    assert len({(p.inputs, p.flattened) for p in found}) == len(found)
    assert [(p.seed, p.draw) for p in found] == [(9, draw) for draw in range(len(found))]


@pytest.mark.parametrize("budget", [0, 1, 5, 30])
def test_the_budget_is_kept_and_used(budget):
    assert budget * 0.8 <= len(programs(budget=budget)) <= budget


def test_one_seed_draws_other_layouts_for_other_calls():
    other = sample("sub.Tensor", *ADD.tensors)
    found = draw_programs(other, CLAIMED[id(ADD)], (2, 3), seed=0, budget=40)
    assert [p.inputs for p in found] != [p.inputs for p in programs()]


@pytest.mark.slow  # a process of its own; so has test_verdict_work_unit
def test_another_process_draws_the_same():
    script = "from tests.strategies.programs.test_mesh_programs import programs, described\nprint(*map(described, programs()), sep='\\n')"
    told = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:hypothesis", "-c", script], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "3"},
    )  # fmt: skip
    assert told.stdout.splitlines() == list(map(described, programs()))
    assert "ypothesis" not in told.stderr


def test_drawing_takes_about_a_millisecond_each():
    programs(budget=10)
    start = time.process_time()
    count = len([p for seed in range(5) for p in programs(seed=seed, budget=40)])
    assert (time.process_time() - start) / count < 0.01  # ten times what it takes on an idle core


def test_a_claim_with_a_placement_of_dtensors_own_is_left_out():
    strange = rule(ADD, "SS(0,5), R -> R")
    found = draw_programs(ADD, {2: [Claim(strange, "test")]}, (2, 2), seed=0, budget=40)
    assert all(strange.inputs not in zip(*p.inputs, strict=True) for p in found)


def test_a_mesh_of_one_axis_is_served_too():
    found = programs(mesh=(2,))
    assert found and all(len(layout) == 1 for p in found for layout in p.inputs)


def test_of_no_tensor_and_of_an_empty_one_nothing_is_drawn():
    assert draw_programs(sample("ones.default", [3]), {}, (2, 2), seed=0, budget=5) == []
    assert draw_programs(sample("relu.default", torch.empty(0, 3)), {}, (2, 2), seed=0, budget=5) == []


def test_integers_get_no_average():
    whole = sample("neg.default", numbers(7, 6, dtype=torch.int64))
    found = draw_programs(whole, {}, (2, 2), seed=0, budget=60)
    kinds = {p.reduce_op for program in found for layout in program.inputs for p in layout if isinstance(p, Partial)}
    assert "avg" not in kinds and "sum" in kinds


def test_a_tensor_is_cut_in_another_order_whatever_lies_before_it_in_the_call():
    claims = {2: [Claim(rule(ADD, "R, S(0) -> S(0)"), "test")]}
    found = draw_programs(ADD, claims, (2, 2), seed=0, budget=24)
    assert any(isinstance(p, StridedShard) for program in found for p in program.inputs[1])


def target_of(program):
    return read_layout(program.then.removeprefix("to "))


@pytest.mark.parametrize("mesh", MESHES)
def test_source_and_target_have_a_meaning_and_differ(mesh):
    found = draw_redistributions(mesh, seed=0, budget=50)
    assert len(found) >= 40
    for program in found:
        ((x,), (source,)) = program.sample.tensors, program.inputs
        assert all(has_one_meaning(layout, x.shape, x.dtype, mesh) for layout in (source, target_of(program)))
        assert source != target_of(program)
        assert not any(isinstance(p, Partial) for p in target_of(program))


def test_every_form_of_source_and_target_comes():
    found = draw_redistributions((2, 3), seed=0, budget=80)
    sources, targets = [p.inputs[0] for p in found], [target_of(p) for p in found]
    for layouts in (sources, targets):
        assert any((shard_cut(p) or (0, 0))[1] > 1 for layout in layouts for p in layout)  # another order of cuts
        assert any(layout[0] == layout[1] != Replicate() for layout in layouts)  # nested
        assert any(Replicate() in layout for layout in layouts)
        assert any({type(p) for p in layout} == {StridedShard, Replicate} for layout in layouts)  # alone
    assert any(isinstance(p, Partial) for layout in sources for p in layout)
    assert {tuple(p.sample.tensors[0].shape) for p in found} == set(SHAPES)
    assert {p.flattened for p in found} == {True, False}


def test_a_seed_draws_the_same_and_the_budget_is_kept():
    lines = [list(map(described, draw_redistributions((2, 2), seed=seed, budget=20))) for seed in (3, 3, 4)]
    assert lines[0] == lines[1] != lines[2]
    assert len(lines[0]) <= 20 and draw_redistributions((2, 2), seed=3, budget=0) == []


@pytest.mark.parametrize("mesh", MESHES)
def test_without_a_flattened_submesh_all_come_out_right(mesh, monkeypatch):
    plain = [p for p in draw_redistributions(mesh, seed=1, budget=30) if not p.flattened]
    plain = [p for p in plain if all(type(q) in (Replicate, Shard) for q in target_of(p))]
    for program in plain:
        names = ", ".join("Replicate()" if p == Replicate() else f"Shard({p.dim})" for p in target_of(program))
        text = f"x.redistribute(placements=[{names}]) if hasattr(x, 'device_mesh') else x"
        monkeypatch.setitem(follow_ups.RESULT_STEPS, program.then, text)
    validated = run_simulated_programs(plain)
    assert len(plain) > 8
    assert [described(p) + c.wrong for p, c in zip(plain, validated, strict=True) if c.wrong] == []
    alone = "use_strided_shard_as_shard_order"  # torch 2.11 makes no tensor with a strided shard alone
    notes = {c.note for c in validated if "avg" not in c.note and alone not in c.note}
    assert notes == {"DTensor's own run is right"}


@pytest.mark.few(1)
@pytest.mark.parametrize("mesh", [(2, 2), (2, 3)])
def test_between_even_layouts_of_two_axes_every_redistribution_is_tried(mesh, monkeypatch):
    """Planted: a strided shard of one dim becomes a strided shard of the other twice as large."""
    programs = every_redistribution(mesh, seed=0)
    assert len({(p.inputs, p.then) for p in programs}) == len(programs) > 200
    programs = [p for p in programs if isinstance(p.inputs[0][0], StridedShard)][::2]
    before = [seen.wrong for seen in run_simulated_programs(programs)]
    own = DTensor.redistribute

    def redistribute(x, **options):
        first = x.placements[0], options["placements"][0]
        crossed = all(isinstance(p, StridedShard) for p in first) and first[0].dim != first[1].dim
        return own(x, **options) * (2 if crossed else 1)

    monkeypatch.setattr(DTensor, "redistribute", redistribute)
    after = [seen.wrong for seen in run_simulated_programs(programs)]
    found = [p for p, one, other in zip(programs, before, after, strict=True) if not one and other]
    assert found and all(p.inputs[0][0].split_factor == mesh[1] for p in found)
    assert every_redistribution((2,), seed=0) == [] == every_redistribution((2, 2, 2), seed=0)
