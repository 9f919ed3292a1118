"""Simulated runs of programs: what they cost each other, and that both ways of simulating agree."""

import logging

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from strategies.programs.run import follow_ups
from strategies.programs.run import real_run as simulated_run
from strategies.programs.run.program_oracle import oracle_of_program
from strategies.programs.run.real_run import mesh_task_of, program_tasks, run_simulated_programs
from strategies.programs.run.step_functions import laid
from strategies.torch_api.rank_runs import run_in_lockstep, run_on_threads
from tests.strategies import planted_ops
from tests.strategies.cases import numbers, sample
from tests.strategies.planted_ops import planted
from tests.strategies.programs_of import assert_right, on
from tests.strategies.wrong_here import if_cumprod_is_wrong

X, Y = numbers(5, 6), numbers(6, 3)
MM, CAT, SUM = sample("mm.default", X, Y), sample("cat.default", [X, X], 0), sample("sum.dim_IntList", X, [0])
WRONG = sample("cumprod.default", torch.tensor([[1.0, 2.0, 3.0, 4.0]]), -1)
VARIED = [
    on(MM, "S(0), R", then="sum 0"), on(MM, "S(1), S(0)", then="grad"), on(MM, "S(0)/R, R/S(1)", (2, 2)),
    on(MM, "P(sum)/P(avg), R", (2, 2), "absolute"), on(SUM, "S(0)", (3,), "times -1"),
    on(SUM, "S(0)/S(0)/S(1)", (2, 2, 2), "full twice"), on(CAT, "S(1), S(1)", (3,), "view"), on(WRONG, "S(1)"),
    on(sample("amax.default", numbers(4, 3), [0]), "S(0)", (3,)), on(sample("unbind.int", X, 0), "S(0)"),
    on(sample("mean.dim", X, [0]), "S(0)/S(0)", (2, 3), "R"), on(SUM, "SS(0,3)/S(0)", (2, 3)),
    on(sample("mul_.Scalar", X, 3.0), "S(0)/R", (2, 2), "base"), on(MM, "R/S(0), R", (2, 2), "R", flattened=True),
    on(sample("is_same_size.default", X, X), "R, R"), on(sample("rand_like.default", X), "S(0)"),
]  # fmt: skip


def test_a_shape_that_the_pieces_do_not_have_is_wrong_though_they_make_the_right_tensor():
    [found] = run_simulated_programs([on(planted("shorter", X), "S(0)")])
    assert found.refused.startswith("WrongPieceShape: its piece has shape (3, 2), S(0) of (5, 6) is (3, 6)")
    assert not found.rank_results[0].whole


def work(program):
    return mesh_task_of(program, oracle_of_program(program), program_tasks(program, "cpu"))


@pytest.mark.few(8)
@pytest.mark.parametrize("program", VARIED, ids=str)
def test_lockstep_and_rank_threads_say_the_same(program):
    with simulated_run.quiet():
        [one], [threads] = run_in_lockstep([work(program)]), run_on_threads([work(program)])
    if one:  # else it is left to the threads
        assert (one.wrong, one.note) == (threads.wrong, threads.note)
        assert [h.placements for h in one.rank_results] == [h.placements for h in threads.rank_results]
        assert [h.shapes for h in one.rank_results] == [h.shapes for h in threads.rank_results]
    else:
        assert threads.refused or threads.wrong


@pytest.mark.parametrize(
    "refused",
    [on(sample("unbind.int", X, 0), "S(0)"), on(sample("unbind.int", numbers(3, 2), 0), "R", then="grad of 0")],
    ids=["by a rule", "a plain tensor beside DTensors"],
)
def test_a_refusal_of_the_rules_is_that_of_every_rank_without_a_run_on_threads(refused):
    with simulated_run.quiet():
        [one], [threads] = run_in_lockstep([work(refused)]), run_on_threads([work(refused)])
    assert one is not None and one.refused
    assert (one.refused, one.note, one.wrong) == (threads.refused, threads.note, threads.wrong)


@if_cumprod_is_wrong
def test_programs_come_back_in_their_order_whatever_becomes_of_their_neighbours():
    found = run_simulated_programs(VARIED)
    assert [bool(one.wrong) for one in found] == [p.sample in (WRONG, VARIED[8].sample) for p in VARIED]
    assert [bool(one.refused) for one in found] == [p.sample.op == "aten.unbind.int" for p in VARIED]
    assert "rank 2 raises IndexError" in found[8].wrong
    assert ", expected 6" in found[7].wrong


@pytest.mark.slow
def test_the_same_programs_in_another_order_are_judged_alike():
    backwards = run_simulated_programs(VARIED[::-1])[::-1]
    assert [(one.wrong, one.note) for one in run_simulated_programs(VARIED)] == [
        (one.wrong, one.note) for one in backwards
    ]


@pytest.mark.parametrize("name", ["one_raises", "one_grows"])
def test_one_rank_that_goes_its_own_way_costs_its_program_only(name):
    bad = on(planted(name, numbers(4, 6)), "S(0)", then="sum")
    first, second, third = run_simulated_programs([VARIED[0], bad, VARIED[3]])
    assert (first.wrong, third.wrong) == ("", "")
    assert second.wrong or second.refused, second


def test_ranks_that_wait_for_each_other_end_and_cost_their_program_only(monkeypatch):
    """One rank raises in the middle of a redistribution: the others are in a collective by then."""

    def crooked(x):
        y = laid(x, Replicate())
        return y if torch.distributed.get_rank() else laid(y * 2, Shard(0)).full_tensor()

    monkeypatch.setattr("strategies.programs.run.follow_ups.whole", crooked)
    monkeypatch.setitem(follow_ups.RESULT_STEPS, "crooked", "whole(x) if hasattr(x, 'placements') else x")
    bad = on(MM, "S(0), R", then="crooked")
    first, second, third = run_simulated_programs([VARIED[0], bad, VARIED[1]])
    assert (first.wrong, third.wrong) == ("", "")
    assert second.wrong.startswith("stops: "), second


@pytest.mark.parametrize(("program", "said"), [
    (on(sample("logical_not.default", numbers(4, dtype=torch.bool)), "P(avg)"), "NotReducible"),
    (on(SUM, "P(sum)/P(max)", (2, 2)), "BadPlacement"),
    (on(sample("argmax.default", X), "S(0)", then="grad"), "RuntimeError"),
])  # fmt: skip
def test_what_is_no_program_says_so(program, said):
    first, second = run_simulated_programs([program, VARIED[0]])
    assert first.note.startswith("no such program: ") and said in first.note and not first.wrong
    assert second.note == "DTensor's own run is right"


def test_nothing_of_the_caller_is_changed():
    x = X.clone()
    torch.manual_seed(3)
    state, level = torch.get_rng_state(), logging.root.manager.disable
    run_simulated_programs([on(sample("mul_.Scalar", x, 3.0), "S(0)"), on(sample("rand_like.default", x), "S(0)")])
    assert torch.equal(x, X) and torch.equal(torch.get_rng_state(), state)
    assert logging.root.manager.disable == level and torch.is_grad_enabled()


def test_more_programs_than_a_batch_are_all_played(monkeypatch):
    monkeypatch.setattr(simulated_run, "BATCH", 2)
    assert_right(*[on(SUM, "S(0)", (2,), then) for then in ("sum", "slice", "view", "R", "times 2")])


def test_averages_of_integers_are_whole_again():
    x = numbers(4, 2, dtype=torch.int64)
    assert_right(on(sample("squeeze.dim", x, 0), "P(avg)"), on(sample("alias.default", x), "P(avg)", then="S(0)"))


def test_no_programs_are_none():
    assert run_simulated_programs([]) == [] and planted_ops.LIB is not None
