import math
from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from strategies.model.rule import Program
from strategies.programs.shrink.sizes import fewer_dims, on_fewer_ranks, resized, smaller_sizes, unevenness
from tests.strategies.cases import numbers, placements, sample


def program(one, inputs, *mesh):
    return Program(one, mesh or (2,), tuple((p,) * len(mesh or (2,)) for p in placements(inputs)))


def shown(programs):
    """`(4, 3)(4,) 1` for each: the shapes, and the arguments that are no tensors."""
    return [
        "".join(str(tuple(x.shape)) for x in p.sample.tensors)
        + "".join(f" {a}" for a in p.sample.arguments() if "[" not in a or a.startswith("["))
        for p in programs
    ]


# Dims.


@pytest.mark.parametrize(("inputs", "want"), [
    ("R", ["(4, 3) 1", "(4, 2) 1", "(3, 2) 0"]),
    ("P(sum)", ["(4, 3) 1", "(4, 2) 1", "(3, 2) 0"]),
    ("S(0)", ["(4, 3) 1", "(4, 2) 1"]),
    ("S(1)", ["(4, 3) 1"]),
    ("S(2)", []),
])  # fmt: skip
def test_dims_go_the_last_first_but_for_those_that_name_a_shard(inputs, want):
    found = shown(fewer_dims(program(sample("cumsum.default", numbers(4, 3, 2), 1), inputs)))
    assert [text for i, text in enumerate(found) if text not in found[:i]] == want


@pytest.mark.parametrize(("dims", "want"), [
    ([0, 2], [[0], [0, 1], [1]]), ([-1], [[], [-1], [-1]]), ([-3, -1], [[-2], [-2, -1], [-1]]), ([1], [[1], [], [0]]),
], ids=str)  # fmt: skip
def test_lists_of_dims_follow(dims, want):
    one = sample("sum.dim_IntList", numbers(4, 3, 2), dims)
    assert [p.sample.call.args[1] for p in fewer_dims(program(one, "R"))] == want


def test_operands_of_fewer_dims_lose_the_one_below_or_keep_theirs():
    found = shown(fewer_dims(program(sample("add.Tensor", numbers(4, 3), numbers(3)), "R, R")))
    assert found == ["(4,)()", "(4,)(3,)", "(3,)(3,)", "(3,)()", "(4, 3)()"]


def test_lists_of_sizes_lose_theirs_too():
    found = shown(fewer_dims(program(sample("expand.default", numbers(1, 3), [2, 4, 3]), "R")))
    assert found == ["(1,) [2, 3]", "(1,) [2, 4]", "(1,) [2, 4, 3]", "(3,) [4, 3]", "(3,) [2, 3]", "(3,) [2, 4, 3]"]


def test_a_list_without_the_dim_that_goes_keeps_what_it_has():
    found = shown(fewer_dims(program(sample("avg_pool2d.default", numbers(2, 3, 4), [3, 2]), "R")))
    assert [text for text in found if text.startswith("(3, 4)")] == ["(3, 4) [2]", "(3, 4) [3, 2]"]


def test_on_a_mesh_the_placements_of_all_axes_count():
    one = Program(sample("relu.default", numbers(4, 3, 2)), (2, 2), ((Shard(1), Partial("sum")),))
    assert shown(fewer_dims(one)) == ["(4, 3)"]


# Sizes.


def test_sizes_that_are_nowhere_sharded_go_first_and_all_at_once():
    found = shown(smaller_sizes(program(sample("mm.default", numbers(6, 5), numbers(5, 7)), "S(0), R")))
    assert found[:2] == ["(6, 1)(1, 1)", "(6, 2)(2, 2)"]
    assert found[2:4] == ["(6, 5)(5, 1)", "(6, 5)(5, 2)"]
    assert "(6, 1)(1, 7)" in found and "(3, 5)(5, 7)" in found


def test_dims_of_one_size_go_together_then_by_themselves_then_two_by_two():
    found = shown(smaller_sizes(program(sample("mm.default", numbers(2, 2), numbers(2, 2)), "S(0), R")))
    assert found == [
        "(1, 1)(1, 1)", "(1, 2)(1, 2)", "(2, 1)(2, 1)", "(1, 2)(2, 2)", "(2, 1)(2, 2)", "(2, 2)(1, 2)", "(2, 2)(2, 1)",
        "(1, 2)(2, 1)", "(2, 1)(1, 2)",
    ]  # fmt: skip


@pytest.mark.parametrize(("size", "ranks", "want"), [
    (20, 2, [2, 4, 1, 3, 10, 18, 19]), (20, 4, [4, 8, 1, 2, 5, 10, 16, 19]), (5, 3, [3, 1, 2, 4]), (2, 4, [1]), (1, 2, []),
], ids=str)  # fmt: skip
def test_each_size_goes_to_few_others_those_with_even_shards_first(size, ranks, want):
    one = program(sample("relu.default", numbers(size)), "S(0)", ranks)
    assert [p.sample.tensors[0].shape[0] for p in smaller_sizes(one)] == want


def test_the_numbers_among_the_arguments_are_tried_as_sizes():
    one = program(sample("view.default", numbers(50), [5, -1]), "S(0)")
    assert {p.sample.tensors[0].shape[0] for p in smaller_sizes(one)} >= {5, 10}


def test_sizes_among_the_arguments_follow_if_that_helps():
    found = shown(resized(program(sample("view.default", numbers(4, 3), [12]), "R"), {4: 2}, None))
    assert found == ["(2, 3) [12]", "(2, 3) [6]"]
    equal = shown(resized(program(sample("expand.default", numbers(1, 4), [3, 4]), "R"), {4: 2}, None))
    assert equal[0] == "(1, 2) [3, 2]" and "(1, 2) [3, 4]" in equal


def test_dims_among_the_arguments_are_no_sizes():
    found = shown(resized(program(sample("cumsum.default", numbers(4, 2, 2), 2), "R"), {2: 1}, None))
    assert set(found) == {"(4, 1, 1) 2"}


def test_what_is_kept_of_a_size_comes_from_all_ranks():
    one = program(sample("relu.default", torch.arange(6.0)), "S(0)")
    found = [p.sample.tensors[0].tolist() for p in smaller_sizes(one)]
    assert found[:4] == [[0.0, 3.0], [0.0, 1.0, 3.0, 4.0], [0.0], [0.0, 2.0, 4.0]]


def test_a_row_with_nan_stays_among_those_that_are_kept():
    x = torch.arange(8.0)
    x[5] = torch.nan
    found = [p.sample.tensors[0].tolist() for p in smaller_sizes(program(sample("relu.default", x), "S(0)"))]
    assert all(sum(map(math.isnan, values)) == 1 for values in found)
    assert [repr(v) for v in found[:2]] == ["[0.0, nan]", "[0.0, 2.0, nan, 6.0]"]


@pytest.mark.parametrize(("shapes", "text", "ranks", "want"), [
    (((4, 3),), "S(0)", 2, 0), (((4, 3),), "S(1)", 2, 1), (((4, 3),), "R", 2, 0), (((3,),), "P(sum)", 2, 0),
    (((1, 3),), "S(0)", 2, 2), (((6,),), "S(0)", 4, 2), (((0, 4),), "R", 2, 2), (((4,), (3,)), "S(0), S(0)", 2, 1),
], ids=str)  # fmt: skip
def test_shards_are_even_uneven_or_empty(shapes, text, ranks, want):
    ops = {1: "relu.default", 2: "outer.default"}
    assert unevenness(program(sample(ops[len(shapes)], *(numbers(*s) for s in shapes)), text, ranks)) == want


def test_the_two_axes_of_a_mesh_cut_one_dim_together():
    one = Program(sample("relu.default", numbers(4)), (2, 2), ((Shard(0), Shard(0)),))
    assert (unevenness(one), unevenness(replace(one, mesh=(2, 3)))) == (0, 2)


def test_indices_out_of_range_are_folded_back():
    index = torch.tensor([0, 4, 5, -5])
    one = program(sample("index_select.default", numbers(6), 0, index), "R, R")
    found = [p.sample.tensors[1].tolist() for p in resized(one, {6: 3}, None)]
    assert [0, 4, 5, -5] in found and [0, 1, 2, 1] in found


# Ops that trust their caller.


def test_an_op_that_trusts_its_caller_keeps_what_may_hang_together():
    one = program(sample("_fft_c2r.default", numbers(4, 6).to(torch.complex128), [0], 2, 6), "R")
    assert list(fewer_dims(one)) == [] and list(smaller_sizes(one)) == []
    assert shown(on_fewer_ranks(program(one.sample, "S(1)", 4), 0, 2)) == ["(4, 6) [0] 2 6", "(4, 6) [0] 2 6"]


def test_such_an_op_keeps_the_sizes_that_its_scales_speak_of():
    """torch 2.13 reads past the end of the input where they do not agree."""
    x = numbers(1, 1, 4, 4)
    scaled = sample("_upsample_bilinear2d_aa.default", x, [2, 2], False, 0.5, 0.5)
    assert list(smaller_sizes(program(scaled, "R"))) == []
    assert list(smaller_sizes(program(sample("_upsample_bilinear2d_aa.default", x, [2, 2], False), "R"))) != []


def test_of_such_an_op_all_dims_of_one_size_go_together_with_the_indices():
    one = sample("embedding_dense_backward.default", numbers(4, 4), torch.tensor([0, 3, 1, 2]), 2, -1, False)
    found = list(smaller_sizes(program(one, "R, R")))
    assert set(shown(found)) == {"(1, 1)(1,) 2 -1 False", "(2, 2)(2,) 2 -1 False", "(3, 3)(3,) 2 -1 False"}
    assert all(p.sample.tensors[1].max() < len(p.sample.tensors[1]) for p in found)


def test_of_such_an_op_the_same_dim_of_like_tensors_goes_too():
    one = sample("mse_loss_backward.default", numbers(), numbers(4, 4), numbers(4, 4), 1)
    found = shown(smaller_sizes(program(one, "R, S(1), S(1)")))
    assert "()(1, 4)(1, 4) 1" in found and "()(4, 1)(4, 4) 1" not in found


# Fewer ranks.


def test_fewer_ranks_come_with_sizes_that_split_as_they_may_have_to():
    found = shown(on_fewer_ranks(program(sample("relu.default", numbers(8, 5)), "S(0)", 4), 0, 2))
    assert [s for i, s in enumerate(found) if s not in found[:i]] == ["(8, 5)", "(3, 5)", "(2, 5)"]


def test_numbers_that_are_as_many_as_the_ranks_go_with_them():
    one = program(sample("pixel_unshuffle.default", numbers(1, 1, 6, 6), 3), "S(2)", 3)
    assert {"(1, 1, 6, 6) 3", "(1, 1, 6, 6) 2", "(1, 1, 2, 2) 2"} <= set(shown(on_fewer_ranks(one, 0, 2)))


def test_only_the_axis_asked_for_is_cut():
    one = Program(sample("relu.default", numbers(9, 9)), (3, 4), ((Shard(0), Replicate()),))
    found = list(on_fewer_ranks(one, 1, 2))
    assert {p.mesh for p in found} == {(3, 2)} and set(shown(found)) == {"(9, 9)"}
