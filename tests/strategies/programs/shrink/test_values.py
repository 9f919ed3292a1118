import math

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from strategies.model.arguments import with_value_at
from strategies.model.oracle import run_oracle
from strategies.model.rule import Leaf, Program
from strategies.programs.shrink.values import (
    in_float32,
    simpler_scalars,
    simpler_values,
    with_call,
    with_tensors,
    without_tensors,
)
from tests.strategies.cases import numbers, sample

NAN, INF = math.nan, math.inf


def scalars(one):
    """The arguments that are no tensors, of each candidate."""
    program = Program(one, (2,), ((Replicate(),),) * len(one.tensors))
    found = [(p.sample.call.args[len(one.tensors) :], dict(p.sample.call.kwargs)) for p in simpler_scalars(program)]
    return [(*args, kwargs) if kwargs else args for args, kwargs in found]


def values(one):
    program = Program(one, (2,), ((Replicate(),),) * len(one.tensors))
    return [[x.tolist() for x in p.sample.tensors] for p in simpler_values(program)]


# Scalars.


@pytest.mark.parametrize(("one", "want"), [
    (sample("cumsum.default", numbers(3), 0, dtype=torch.float32), [(0,)]),
    (sample("roll.default", numbers(3), [1], [0]), [([1],), ([0], [0])]),
    (sample("sum.dim_IntList", numbers(3, 3), [0, 1], True), [
        ([0, 1],), ([0], True), ([1], True), ([0, 1], False),
    ]),
    (sample("clamp.default", numbers(3), -0.25, 4.125), [
        (None, 4.125), (-0.25,), (0.0, 4.125), (1.0, 4.125), (2.0, 4.125), (0.5, 4.125), (-0.2, 4.125),
        (-0.25, 0.0), (-0.25, 1.0), (-0.25, 2.0), (-0.25, 0.5), (-0.25, 4.1),
    ]),
    (sample("expand.default", numbers(1, 3), [4, 3]), [([1, 1],), ([4],), ([3],), ([0, 3],), ([1, 3],), ([2, 3],),
                                                       ([4, 0],), ([4, 1],), ([4, 2],)]),
    (sample("mul.Scalar", numbers(3), -2), [(0,), (1,), (2,)]),
    (sample("linalg_vector_norm.default", numbers(3), INF), [(), (0.0,), (1.0,), (2.0,), (0.5,)]),
    (sample("add.Scalar", numbers(3), 2 + 1j), [(0,), (1,)]),
    (sample("add.Scalar", numbers(3), 1.0), [(0.0,)]),
    (sample("add.Scalar", numbers(3), 0), []),
], ids=lambda given: given.op if hasattr(given, "op") else "")  # fmt: skip
def test_scalars_become_simpler_the_simplest_first(one, want):
    assert scalars(one) == want


@pytest.mark.parametrize(("one", "want"), [
    (sample("_softmax.default", numbers(3), 0, False), []),
    (sample("native_layer_norm.default", numbers(3), [3], None, None, 1e-05), []),
    (sample("huber_loss_backward.default", numbers(), numbers(3), numbers(3), 1, 0.53), [
        (1, 0.0), (1, 1.0), (1, 2.0), (1, 0.5),
    ]),
    (sample("_to_copy.default", numbers(3), dtype=torch.float32, non_blocking=False), [({"dtype": torch.float32},)]),
], ids=lambda given: given.op if hasattr(given, "op") else "")  # fmt: skip
def test_an_op_that_trusts_its_caller_loses_digits_and_defaults_only(one, want):
    found = scalars(one)
    assert [f for f in found if f not in want] == [f for f in found if isinstance(f[-1], float) and f not in want]
    assert [f for f in found if f in want] == want


def test_scales_that_must_agree_with_sizes_stay_where_no_one_checks_them():
    """torch 2.13 reads past the end of the input where they do not."""
    x = numbers(1, 1, 4, 4)
    assert scalars(sample("_upsample_bilinear2d_aa.default", x, [2, 2], False, 0.25, 0.25)) == []
    assert ([2, 2], False, 0.0, 0.25) in scalars(sample("upsample_bilinear2d.default", x, [2, 2], False, 0.25, 0.25))


# Values.


def test_a_tensor_becomes_counted_ones_zeros_small_whole_numbers_and_one_decimal():
    found = values(sample("relu.default", torch.tensor([0.26, -3.71, 40.04])))
    rounded = [[round(v, 4) for v in x] for (x,) in found]
    assert rounded[:6] == [[1, 2, 3], [2, 3, 4], [1, 1, 1], [0, 0, 0], [0, -4, 9], [0.3, -3.7, 40]]


def test_then_single_elements():
    found = values(sample("relu.default", torch.tensor([1.0, 0.0, 2.5, 0.123])))
    assert [[round(v, 4) for v in x] for (x,) in found[-6:]] == [
        [1, 1, 2.5, 0.123], [1, 0, 1, 0.123], [1, 0, 0, 0.123], [1, 0, 2.5, 1], [1, 0, 2.5, 0], [1, 0, 2.5, 0.1],
    ]  # fmt: skip


@pytest.mark.parametrize(("x", "want"), [
    (torch.tensor([1.0, 2.0, 3.0]), []),
    (torch.tensor([2.0, 3.0, 4.0]), [[1, 2, 3]]),
    (torch.ones(3), [[1, 2, 3], [2, 3, 4]]),
    (torch.zeros(3), [[1, 2, 3], [2, 3, 4], [1, 1, 1]]),
    (torch.tensor([True, False]), [[True, True]]),
    (torch.tensor([False, True]), [[True, True], [True, False], [True, True], [False, False], [True, True]]),
    (torch.tensor([1, 5], dtype=torch.uint8), [[1, 2], [2, 3], [1, 1], [0, 0], [1, 1], [1, 0]]),
    (torch.tensor(2 - 3j), [1, 2, 1, 0, 1, 0]),
    (torch.empty(0), []),
], ids=str)  # fmt: skip
def test_each_candidate_is_simpler_than_what_is_there(x, want):
    found = [v for (v,) in values(sample("clone.default", x))]
    assert sorted(map(repr, found)) == sorted(repr(torch.tensor(w, dtype=x.dtype).tolist()) for w in want)


def test_nan_and_infinities_go_first_all_then_one_by_one():
    found = [v for (v,) in values(sample("relu.default", torch.tensor([NAN, 3.0, INF])))]
    assert all(all(map(math.isfinite, v)) for v in found[:7]) and [0.0, 3.0, 1.0] in found
    assert any(math.isnan(v[0]) and v[1:] == [3.0, 1.0] for v in found)
    assert any(v[:2] == [1.0, 3.0] and v[2] == INF for v in found)


def test_real_tensors_change_together_and_indices_by_themselves():
    found = values(sample("index_select.default", numbers(4), 0, torch.tensor([3, 1])))
    assert found[0] == [[1, 2, 3, 4], [3, 1]] and [found[0][0], [0, 0]] not in found
    both = values(sample("add.Tensor", numbers(2), numbers(2, seed=1)))
    assert both[:3] == [[[1, 2], [1, 2]], [[2, 3], [2, 3]], [[1, 1], [1, 1]]]


def test_strides_are_dropped_as_well():
    one = sample("relu.default", torch.tensor([[1.0, 3.0, 5.0], [2.0, 4.0, 6.0]]).t())
    program = Program(one, (2,), ((Replicate(),),))
    assert [p.sample.tensors[0].is_contiguous() for p in simpler_values(program)] == [True]


def test_many_elements_are_not_tried_one_by_one():
    assert len(values(sample("relu.default", numbers(17)))) < 7 < len(values(sample("relu.default", numbers(16))))


def test_whole_numbers_in_the_hands_of_an_op_that_trusts_them_become_zero_or_stay():
    one = sample("embedding_dense_backward.default", numbers(3, 2), torch.tensor([0, 3, 1]), 4, -1, False)
    assert {str(indices) for _, indices in values(one)} == {"[0, 3, 1]", "[0, 0, 0]"}
    one = sample("segment_reduce.default", numbers(3), "sum", lengths=torch.tensor([1, 2]), unsafe=True)
    assert {str(lengths) for _, lengths in values(one)} == {"[1, 2]"}
    one = sample("segment_reduce.default", numbers(3), "sum", lengths=torch.tensor([2, 1]), unsafe=True)
    assert {str(lengths) for _, lengths in values(one)} == {"[2, 1]", "[0, 0]"}


# Dtypes.


def in_singles(one):
    program = Program(one, (2,), ((Replicate(),),) * len(one.tensors))
    return [[(x.dtype, x.tolist()) for x in p.sample.tensors] for p in in_float32(program)]


F = torch.float32


def test_all_tensors_go_to_float32_counted_first_and_then_with_their_own_values():
    one = sample("add.Tensor", torch.tensor([2 - 1j, 0.5]), torch.tensor([7, 5]))
    assert in_singles(one)[:3] == [
        [(F, [1, 2]), (F, [1, 2])], [(F, [2, 3]), (F, [2, 3])], [(F, [2, 0.5]), (F, [7, 5])],
    ]  # fmt: skip


def test_positions_stay_integers_if_that_is_needed():
    positions = (torch.int64, [3, 1])
    found = in_singles(sample("index_select.default", numbers(4), 0, torch.tensor([3, 1])))
    assert [(F, [1, 2, 3, 4]), positions] in found and found.index([(F, [1, 2, 3, 4]), positions]) == 3


def test_doubles_go_alone_where_other_tensors_must_stay():
    one = sample("where.self", torch.tensor([True, False]), torch.tensor([0.5, 4.0]).double(), torch.zeros(2).double())
    assert in_singles(one)[-1] == [(torch.bool, [True, False]), (F, [0.5, 4.0]), (F, [0, 0])]


def test_what_is_in_float32_has_no_other_dtype_to_try():
    assert in_singles(sample("relu.default", torch.tensor([0.25, 7.0]))) == []


def test_integers_that_an_op_does_not_check_stay_as_they_are():
    one = sample("embedding_dense_backward.default", numbers(3, 2), torch.tensor([0, 3, 1]), 4, -1, False)
    assert {str(indices) for _, indices in in_singles(one)} == {"(torch.int64, [0, 3, 1])"}


CAT = sample("cat.default", [numbers(2), numbers(3), numbers(4)], 0)


def test_tensors_go_and_the_others_are_numbered_anew():
    program = Program(CAT, (2,), ((Shard(0),), (Replicate(),), (Shard(0),)))
    left = without_tensors(program, with_value_at(CAT.call, (0,), [Leaf(0), Leaf(2)]), [1])
    assert left.sample.call.args == ([Leaf(0), Leaf(1)], 0)
    assert [len(x) for x in left.sample.tensors] == [2, 4] and left.inputs == ((Shard(0),), (Shard(0),))
    assert run_oracle(left.sample).outputs[0].shape == (6,)


def test_tensors_and_calls_are_replaced_in_a_copy():
    program = Program(CAT, (2,), ((Replicate(),),) * 3)
    other = with_tensors(program, {1: numbers(7)})
    assert [len(x) for x in other.sample.tensors] == [2, 7, 4] and other.sample.origin == "test"
    assert with_call(program, with_value_at(CAT.call, (1,), -1)).sample.call.args[1] == -1
    assert [len(x) for x in program.sample.tensors] == [2, 3, 4]


def test_boundaries_stay_in_order_whatever_replaces_them():
    one = sample("bucketize.Tensor", numbers(4), torch.tensor([1.5, 1.5, 2.5, 7.0]))
    made = values(one)
    assert len(made) > 4 and all(row == sorted(row) for _, row in made)
    flipped = with_tensors(Program(one, (2,), ((Replicate(),),) * 2), {1: one.tensors[1].flip(0)})
    assert torch.equal(flipped.sample.tensors[1], one.tensors[1])
