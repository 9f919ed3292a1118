"""Data-parallel training on rank threads, on gloo, and on one device.

float32 takes other ways through FSDP2 than float64 (an average instead of a sum and two divisions), and has a bar
of its own.  AdamW divides a gradient by its own size: where that is small, rounding is not.
"""

import pytest
import torch

import localtensor as lt
from localtensor.errors import ShapeMismatch
from tests.device import DEVICE
from tests.end_to_end.programs import data_parallel_programs
from tests.end_to_end.programs.one_device import assert_three_ways

HOW = ["sharded", "replicated"]
FLOAT = 8  # bytes of a float64
BLOCK, REST = 508, 240  # numbers in the weights of a block, of which there are two, and in those outside
STEPS = 3


# Four ranks of gloo shard in test_hybrid_sharded; of threads, in test_lockstep.
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_fully_sharded(ranks):
    run = assert_three_ways(data_parallel_programs.fully_sharded, (ranks,), True, torch.float64)
    assert run[0]["losses"].diff().lt(0).all()
    assert run[0]["lengths"].gt(data_parallel_programs.LONGEST).all(), "nothing was clipped"


@pytest.mark.slow
def test_fully_sharded_in_float32():
    assert_three_ways(data_parallel_programs.fully_sharded, (4,), True, torch.float32, rtol=1e-3, atol=1e-4)


@pytest.mark.ranks(3)
def test_rows_are_dealt_out_as_torch_chunk_does(rank):
    held = data_parallel_programs.rows_held((3,))
    assert held["embedding.weight"] == (5, 5, 4)[rank]
    assert held["norm.bias"] == (3, 3, 2)[rank]
    assert held["blocks.0.feedforward.up.weight"] == 4


def said(calls, kind, *functions):
    """How many numbers a rank brought to each collective of this kind, from within these functions of the program."""
    return [call.bytes // FLOAT for call in calls if call.kind == kind and call.place.function in functions]


def of_first(run):
    return [call for call in run.calls if call.rank == 0]


@pytest.mark.few(1)
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("reshard_after_forward", "again"), [(None, [BLOCK, BLOCK]), (True, [REST, BLOCK, BLOCK]), (False, [])]
)
def test_each_group_is_gathered_forward_and_again_backward_unless_it_was_kept(reshard_after_forward, again, comms):
    """FSDP2 keeps the rest of the weights unless told otherwise, since the backward begins with them."""
    data_parallel_programs.fully_sharded((2,), reshard_after_forward, torch.float64)
    assert said(comms, "all_gather_into_tensor", "loss_of", "forward") == [REST // 2, BLOCK // 2, BLOCK // 2] * STEPS
    assert said(comms, "all_gather_into_tensor", "learn") == [size // 2 for size in again] * STEPS
    assert said(comms, "reduce_scatter_tensor", "learn") == [BLOCK, BLOCK, REST] * STEPS


@pytest.mark.slow  # two axes, too: test_sharded_in_two_ways
def test_hybrid_sharded():
    run = assert_three_ways(data_parallel_programs.hybrid_sharded, (2, 2))
    assert said(of_first(run), "reduce_scatter_tensor", "learn") == [BLOCK, BLOCK, REST] * STEPS
    down = [call for call in run.calls if call.rank == 3 and call.group == (1, 3)]
    assert [(call.kind, call.bytes // FLOAT) for call in down] == [
        ("all_reduce", size // 2) for size in (BLOCK, BLOCK, REST)
    ] * STEPS


@pytest.mark.slow  # test_lockstep holds lockstep and rank threads against each other on this program
def test_sharded_in_two_ways():
    assert_three_ways(data_parallel_programs.sharded_in_two_ways, (2, 2))


def test_recomputed():
    run = assert_three_ways(data_parallel_programs.recomputed, (2,))
    assert run[0]["losses"].diff().lt(0).all()


@pytest.mark.parametrize("ranks", [2, 4])
def test_replicated(ranks):
    run = assert_three_ways(data_parallel_programs.replicated, (ranks,))
    assert sum(said(of_first(run), "all_reduce", "learn")) == (2 * BLOCK + REST) * STEPS


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_run_out_of_batches(ranks):
    assert_three_ways(data_parallel_programs.joined, (ranks,), ranks)


@pytest.mark.parametrize("how", HOW)
def test_two_batches_make_one_gradient(how):
    run = assert_three_ways(data_parallel_programs.accumulated, (2,), how)
    whole, kind = 2 * BLOCK + REST, "reduce_scatter_tensor" if how == "sharded" else "all_reduce"
    assert sum(said(of_first(run), kind, "accumulated")) == whole, "once, not twice"


@pytest.mark.parametrize("how", [*HOW, "by hand"])
def test_a_weight_that_served_no_one_has_no_gradient(how):
    run = assert_three_ways(data_parallel_programs.unused, (4,), how, 4)
    with_gradient = {name.split(".")[0] for name in run[0] if name.startswith("gradient of ")}
    expected = {"left"} if how == "sharded" else {"left", "right"}
    assert with_gradient == {f"gradient of {name}" for name in expected}


def test_weights_that_served_some_ranks_only_are_too_much_for_fully_shard():
    """Rank 0 brings the gradients of two ways: 136 numbers with padding.  On gloo, this ends a process."""
    with pytest.raises(ShapeMismatch, match=r"\[136\] on rank 0, \[68\] on rank 1"):
        lt.run(data_parallel_programs.different_ways, (2,), ranks=2, device=DEVICE)


@pytest.mark.few(1)
@pytest.mark.parametrize("program", [data_parallel_programs.replicated, data_parallel_programs.recomputed])
def test_the_order_in_which_ranks_run_is_of_no_importance(program):
    in_order = lt.run(program, (2,), ranks=2, device=DEVICE)
    shuffled = lt.run(program, (2,), ranks=2, schedule=lt.shuffled(5), device=DEVICE)
    torch.testing.assert_close(list(shuffled), list(in_order), rtol=0, atol=0)
