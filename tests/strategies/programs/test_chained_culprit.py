"""What is to blame: one axis before two, two before three, and as few placements as show it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch.distributed.tensor import Partial, Shard

from localtensor.layout.shards import has_one_meaning
from strategies.model.rule import Program, read_layout
from strategies.programs.mesh_programs import MAX_RUNS, on_some_axes, smaller_programs, smallest_wrong_program
from tests.strategies.cases import numbers, sample
from tests.strategies.programs_of import described

ADD = sample("add.Tensor", numbers(7, 6), numbers(7, 6, seed=1))


@dataclass(frozen=True)
class Answer:
    wrong: str


def program(first, second="(R, R, R)", mesh=(2, 3, 2), **more):
    return Program(ADD, mesh, (read_layout(first), read_layout(second)), **more)


def blamed(start, is_wrong):
    """The text of the smallest, and how many were asked."""
    asked = []

    def confirm(one):
        asked.append(one)
        return Answer("wrong" if is_wrong(one) else "")

    found = smallest_wrong_program(start, confirm)
    assert len(asked) <= MAX_RUNS
    return described(found).partition(": ")[2], found, len(asked)


def test_a_fault_of_one_axis_is_that_axis_alone_on_two_ranks():
    start = program("(S(0), P(sum), S(1))", "(S(0), R, S(1))", flattened=True, then="sum")
    text, found, _ = blamed(start, lambda p: any(Shard(1) in layout for layout in p.inputs))
    assert (found.mesh, text) in [((2,), "(S(1)), (R)"), ((2,), "(R), (S(1))")]
    assert not found.flattened and not found.then


def test_a_fault_of_two_axes_together_keeps_both_and_drops_the_third():
    start = program("(S(0), P(sum), S(0))", flattened=True, then="sum")
    text, found, _ = blamed(start, lambda p: p.inputs[0].count(Shard(0)) == 2)
    assert (found.mesh, text) == ((2, 2), "(S(0), S(0)), (R, R)")
    assert not found.flattened


def test_axes_keep_their_length_where_two_ranks_do_not_show_it():
    text, found, _ = blamed(program("(S(0), S(0), R)"), lambda p: p.mesh == (2, 3) or len(p.mesh) == 3)
    assert found.mesh == (2, 3) and text.count("R") == 3


def test_one_axis_of_all_ranks_is_tried_where_shards_are_empty():
    start = program("(S(1), S(1), S(1))")
    _, found, _ = blamed(start, lambda p: p.ranks > 6)
    assert found.mesh == (12,)


def test_what_follows_and_what_is_flattened_stays_where_it_is_needed():
    start = program("(S(0), S(0), R)", flattened=True, then="sum")
    _, found, _ = blamed(start, lambda p: p.flattened and p.then == "sum")
    assert found.flattened and found.then == "sum" and len(found.mesh) == 2


def test_a_program_of_which_no_smaller_one_is_wrong_is_to_blame_itself():
    start = program("(S(0), R)", "(R, S(0))", mesh=(2, 2))
    _, found, _ = blamed(start, lambda p: p == start)
    assert found is start


def test_the_same_program_has_the_same_answer():
    start = program("(S(0), P(sum), S(1))", "(S(0), R, S(1))")
    assert blamed(start, lambda p: p.ranks > 2) == blamed(start, lambda p: p.ranks > 2)


def test_where_all_smaller_ones_are_wrong_it_ends():
    _, found, asked = blamed(program("(S(0), P(sum), S(1))", "(S(0), S(0), S(1))"), lambda p: True)
    assert found.mesh == (2,) and asked < 10
    assert sum(p != read_layout("R")[0] for layout in found.inputs for p in layout) == 1


def test_smaller_programs_have_a_meaning_and_something_that_is_not_replicated():
    start = program("(SS(0,2), S(0), S(1))", "(P(sum), P(avg), R)", mesh=(2, 2, 2), flattened=True)
    smaller = list(smaller_programs(start))
    assert smaller
    for one in smaller:
        assert all(
            has_one_meaning(layout, x.shape, x.dtype, one.mesh)
            for layout, x in zip(one.inputs, ADD.tensors, strict=True)
        )
        assert one.seed == start.seed and one.draw == start.draw


def test_strided_shards_follow_the_axes_that_are_left():
    start = replace(program("(SS(0,3), S(0), R)", mesh=(2, 3, 2)), inputs=(read_layout("(SS(0,3), S(0), P(sum))"),) * 2)
    assert on_some_axes(start, (0, 1), (2, 2)).inputs[0] == read_layout("(SS(0,2), S(0))")
    assert on_some_axes(start, (0, 2), (2, 2)).inputs[0] == (Shard(0), Partial())
