"""Data-parallel training on rank threads, on gloo, and on one device.

float32 takes other ways through FSDP2 than float64 (an average instead of a sum and two divisions), and has a bar
of its own.  AdamW divides a gradient by its own size: where that is small, rounding is not.
"""

from collections import Counter

import pytest
import torch

import localtensor as lt
from tests.programs import data_parallel_programs as programs
from tests.programs.one_device import assert_three_ways

HOW = ["sharded", "replicated"]


@pytest.mark.parametrize("ranks", [2, 4])
def test_fully_sharded(ranks):
    run = assert_three_ways(programs.fully_sharded, (ranks,), True, torch.float64)
    assert run[0]["losses"].diff().lt(0).all()
    assert run[0]["lengths"].gt(programs.LONGEST).all(), "nothing was clipped"


def test_fully_sharded_in_float32():
    assert_three_ways(programs.fully_sharded, (4,), True, torch.float32, rtol=1e-3, atol=1e-4)


def test_rows_are_dealt_out_as_torch_chunk_does():
    on_each = lt.run(programs.rows_held, (3,), ranks=3)
    held = {name: [on_each[rank][name] for rank in range(3)] for name in on_each[0]}
    assert held["embedding.weight"] == [5, 5, 4]
    assert held["norm.bias"] == [3, 3, 2]
    assert held["blocks.0.feedforward.up.weight"] == [4, 4, 4]


@pytest.mark.parametrize(("reshard_after_forward", "again"), [(None, 2), (True, 3), (False, 0)])
def test_each_group_is_gathered_forward_and_again_backward_unless_it_was_kept(reshard_after_forward, again):
    """Three groups: two blocks and the rest, which FSDP2 keeps unless told otherwise, for the backward needs it first."""
    run = lt.run(programs.fully_sharded, (2,), reshard_after_forward, torch.float64, ranks=2)
    steps = 3
    calls = Counter((call.place.function, call.kind) for call in run.calls if call.rank == 0)
    assert calls["loss_of", "all_gather_into_tensor"] == 3 * steps
    assert calls["learn", "all_gather_into_tensor"] == again * steps
    assert calls["learn", "reduce_scatter_tensor"] == 3 * steps


def test_hybrid_sharded():
    assert_three_ways(programs.hybrid_sharded, (2, 2))


def test_sharded_in_two_ways():
    assert_three_ways(programs.sharded_in_two_ways, (2, 2))


@pytest.mark.parametrize("ranks", [2, 4])
def test_replicated(ranks):
    assert_three_ways(programs.replicated, (ranks,))


@pytest.mark.parametrize("how", HOW)
def test_two_batches_make_one_gradient(how):
    run = assert_three_ways(programs.accumulated, (2,), how)
    assert run[0]["head.weight"].any()


@pytest.mark.parametrize("how", [*HOW, "by hand"])
def test_a_weight_that_served_nobody_has_no_gradient(how):
    run = assert_three_ways(programs.unused, (4,), how, 4)
    with_gradient = {name.split(".")[0] for name in run[0] if name.startswith("gradient of ")}
    expected = {"left"} if how == "sharded" else {"left", "right"}
    assert with_gradient == {f"gradient of {name}" for name in expected}
