"""Calls on meshes: a rule that is wrong on two axes only is found, a right one never, and each fault is told once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from strategies.model.oracle import run_oracle
from strategies.model.rule import Program, Sample, read_layout
from strategies.programs import mesh_validation
from strategies.programs.mesh_programs import COPY
from strategies.programs.mesh_validation import (
    MESHES,
    cause_of,
    is_costly,
    programs_in_time,
    redistributions,
    smallest_wrong_programs,
    try_meshes,
)  # fmt: skip
from strategies.programs.run.real_run import run_simulated_programs
from strategies.programs.run.verdict import Confirmation
from strategies.validation.sources.dtensor import claims
from tests.strategies.cases import numbers, sample
from tests.strategies.planted_ops import plant, planted
from tests.strategies.programs_of import described

plant("corners(Tensor x) -> Tensor", lambda x: x * (2 if 6 in x.shape else 3), "S")  # wrong where both dims are cut
CORNERS = planted("corners", numbers(6, 6))
plant("column_means(Tensor x) -> Tensor", lambda x: x.mean(0), meta=lambda x: x.new_empty(x.shape[1:]))
MEANS = planted("column_means", numbers(6, 3))


@register_sharding(torch.ops.planted.column_means.default)
def _means(x):
    """The mean of means is the mean where pieces are equally long: of 6 rows on 2 and on 3 ranks, not on (2, 2)."""
    return [([Replicate()], [Replicate()]), ([Partial("avg")], [Shard(0)])]


RIGHT = [
    (sample("add.Tensor", numbers(7, 6), numbers(7, 6, seed=1)), None),
    (sample("mul.Tensor", numbers(7, 6), numbers(6, seed=1)), None),
    (sample("mm.default", numbers(7, 6), numbers(6, 5, seed=1)), None),
    (sample("sum.dim_IntList", numbers(7, 6), [0]), 30),
    (sample("gather.default", numbers(7, 6), 1, torch.arange(42).reshape(7, 6) % 6), 10),
    (sample("_softmax.default", numbers(7, 6), 1, False), 30),
]
"""With the most programs on one mesh; of the first three DTensor weighs many combinations."""


def claimed(one: Sample):
    raw = run_oracle(one).raw
    return {size: claims(one, size, raw) for size in (2, 3)}


def test_the_planted_rule_is_right_on_every_one_axis():
    alone = [Program(CORNERS, (size,), ((Shard(dim),),)) for size in (2, 3, 4) for dim in (0, 1)]
    validated = run_simulated_programs(alone)
    assert [found.wrong for found in validated] == [""] * 6
    assert all(found.rank_results[0].placements[0].startswith("S(") for found in validated)


@pytest.mark.parametrize("mesh", [(2, 2), (2, 3)])
def test_a_rule_that_is_right_on_one_axis_and_wrong_on_two_is_found(mesh):
    found = try_meshes(CORNERS, claimed(CORNERS), [mesh], seed=0)
    told = [p for p, confirmation in smallest_wrong_programs(found) if confirmation.wrong and p.sample.op == CORNERS.op]
    assert {p.mesh for p in told} == {(2, 2)}
    assert {p.inputs[0] for p in told} & {read_layout("(S(0), S(1))"), read_layout("(S(1), S(0))")}


@pytest.mark.slow
def test_on_three_axes_the_same_fault_is_reported_of_two():
    program = Program(CORNERS, (2, 2, 2), (read_layout("(S(0), R, S(1))"),), flattened=True)
    ((found, confirmation),) = smallest_wrong_programs([(program, *run_simulated_programs([program]))])
    assert described(found) == "planted.corners.default on (2,2), seed 0 draw 0: (S(0), S(1))"
    assert confirmation.wrong


def test_a_smaller_program_that_is_wrong_in_lockstep_alone_is_not_the_finding(monkeypatch):
    def simulated(programs, *, quick=False):
        return [Confirmation("wrong" if quick else "") for _ in programs]

    monkeypatch.setattr(mesh_validation, "run_simulated_programs", simulated)
    program, confirmation = Program(MEANS, (2, 2), (read_layout("(S(0), S(0))"),)), Confirmation("wrong on threads")
    assert smallest_wrong_programs([(program, confirmation)]) == [(program, confirmation)]


def test_a_fault_that_one_axis_of_as_many_ranks_shows_is_that_axis():
    program = Program(MEANS, (2, 2), (read_layout("(S(0), S(0))"),))
    ((found, _),) = smallest_wrong_programs([(program, *run_simulated_programs([program]))])
    assert described(found) == "planted.column_means.default on (4,), seed 0 draw 0: (S(0))"


@pytest.mark.few(2)
@pytest.mark.parametrize(("one", "budget"), RIGHT, ids=[one.op for one, _ in RIGHT])
def test_a_right_rule_is_never_called_wrong(one, budget):
    """What is wrong is the redistribution over a flattened submesh (torch 2.13), and told as that."""
    found = try_meshes(one, claimed(one), seed=0, budget=budget)
    assert len(found) >= (3 * budget * 0.7 if budget else 7)
    assert {(p.sample.op, p.flattened) for p, _ in smallest_wrong_programs(found)} <= {(COPY, True)}
    assert sum("right" in confirmation.note for _, confirmation in found) > len(found) * 0.6


def test_two_runs_try_the_same():
    one = RIGHT[3][0]
    twice = [[described(p) for p, _ in try_meshes(one, claimed(one), seed=5)] for _ in range(2)]
    assert twice[0] == twice[1]


def test_the_budget_is_kept_on_each_mesh():
    one = RIGHT[3][0]
    found = try_meshes(one, claimed(one), [(2, 2), (2, 3)], seed=0, budget=5)
    assert [p.mesh for p, _ in found] == [(2, 2)] * 5 + [(2, 3)] * 5


def test_fewer_programs_are_affordable_where_dtensor_weighs_more_combinations():
    rows = claimed(RIGHT[0][0])
    counts = [programs_in_time(rows, mesh) for mesh in MESHES]
    assert counts[0] >= 3 and counts[2] < counts[0]
    assert programs_in_time({}, (2, 2)) > counts[0] and programs_in_time(rows, (2, 2, 2, 2, 2)) == 1


def test_a_decomposition_of_many_tensors_with_many_dims_gets_one_program_on_each_mesh(monkeypatch):
    x, rows = numbers(4, 4, 4, 4), numbers(4, 2)
    shape = (4, 4, 16, 2, [True, True, True])
    costly = sample("native_group_norm_backward.default", x, x, rows, rows, numbers(4), *shape)
    assert is_costly(costly) and not any(is_costly(one) for one, _ in RIGHT)
    assert not is_costly(
        sample("native_layer_norm_backward.default", x, x, [4], rows, rows, *([numbers(4)] * 2), shape[-1])
    )
    monkeypatch.setattr(mesh_validation, "run_simulated_programs", lambda programs: programs)
    assert (
        len(try_meshes(costly, {2: []}, [(2, 2)], seed=0))
        == 1
        < len(try_meshes(RIGHT[0][0], {2: []}, [(2, 2)], seed=0))
    )


def test_what_is_wrong_without_the_op_is_the_redistributions():
    one = sample("relu.default", numbers(7, 6))
    flat = Program(one, (2, 3), (read_layout("(S(0), S(0))"),), flattened=True, seed=3)
    said = Confirmation("wrong", rank_results=())

    def gathers_wrong(program):
        both = program.inputs[0] == read_layout("(S(0), S(0))")
        return Confirmation("wrong" if both and program.flattened and program.mesh == (2, 3) else "")

    found = cause_of(flat, said, gathers_wrong)
    assert (found.sample.op, found.mesh, found.inputs, found.seed) == (COPY, (2, 3), flat.inputs, 3)


def test_results_are_moved_as_they_came_out_before_inputs_as_they_came_in():
    one = sample("sum.dim_IntList", numbers(7, 6), [1])
    program = Program(one, (2, 2), (read_layout("(S(0), S(1))"),))
    (confirmation,) = run_simulated_programs([program])
    moved = list(redistributions(program, confirmation))
    assert [(m.inputs[0], m.sample.tensors[0].shape) for m in moved] == [
        (read_layout("(S(0), P(sum))"), (7,)), (read_layout("(S(0), S(1))"), (7, 6)),
    ]  # fmt: skip
    assert torch.equal(moved[0].sample.tensors[0], one.tensors[0].sum(1))


def test_a_result_with_a_placement_of_dtensors_own_is_not_moved():
    table = sample("embedding.default", numbers(9, 6), torch.arange(10).reshape(2, 5) % 9)
    program = Program(table, (2,), (read_layout("S(0)"), read_layout("R")))
    (confirmation,) = run_simulated_programs([program])
    assert confirmation.rank_results[0].placements == ("P(mask)",)
    assert [m.sample.tensors[0].shape for m in redistributions(program, confirmation)] == [(9, 6), (2, 5)]


def test_one_fault_is_reported_once():
    one = sample("relu.default", numbers(7, 6))
    program = Program(one, (2, 2), (read_layout("(S(0), R)"),))
    assert (
        smallest_wrong_programs([(program, Confirmation("")), (replace(program, draw=1), Confirmation("", "refused"))])
        == []
    )
    wrong = [(replace(program, draw=draw), Confirmation("wrong")) for draw in range(3)]
    assert [(p.draw, c.wrong) for p, c in smallest_wrong_programs(wrong)] == [(0, "wrong")]


def test_a_redistribution_without_an_op_only_gathers_a_tensor():
    layouts = read_layout("(S(0), R)"), read_layout("(S(1), R)")
    program = Program(RIGHT[0][0], (2, 2), layouts, then="sum", seed=4, draw=2)
    _, moved = redistributions(program, Confirmation(""))
    assert described(moved) == "aten.clone.default on (2,2), seed 4 draw 2: (S(1), R)"
    assert torch.equal(run_oracle(moved.sample).raw, RIGHT[0][0].tensors[1])
