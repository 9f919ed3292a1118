"""Context parallel on rank threads, on gloo, and on one device.

Why not just `context_parallel` with a causal flag: CUDA's flash, efficient and cuDNN kernels are the ones that it
sends round the ring, and DTensor has no rule for the one that the CPU has.  The first two tests hold it to that.
"""

import pytest
import torch
from torch.distributed.tensor.experimental._context_parallel import _attention as ring

from tests.device import ON_CPU
from tests.end_to_end.programs.context_parallel import (
    flash_ring,
    inputs,
    on_one_device,
    own_ring,
    positions,
    sharded_buffers,
    what_cuda_alone_can,
)
from tests.end_to_end.programs.three_ways import on_both

pytestmark = ON_CPU  # the kernels of CUDA: test_on_cuda
CLOSE = {"rtol": 1e-9, "atol": 1e-11}  # float64; a ring sums the softmax in another order


def test_the_kernels_of_the_ring_do_not_run_here_and_the_kernel_that_does_is_not_of_the_ring():
    x = torch.ones(1, 1, 2, 8)
    with pytest.raises(NotImplementedError, match="_scaled_dot_product_flash_attention' with arguments from the 'CPU'"):
        torch.ops.aten._scaled_dot_product_flash_attention(x, x, x)
    with pytest.raises(NotImplementedError, match="_efficient_attention' with arguments from the 'CPU'"):
        torch.ops.aten._scaled_dot_product_efficient_attention(x, x, x, None, True)
    assert torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default not in ring.custom_ops


@pytest.mark.slow  # before it refuses, DTensor tries to take the kernel apart, in each process anew
def test_hence_the_public_way_refuses_the_kernel_of_the_cpu():
    operator = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    refusal = f"Operator {operator} does not have a sharding strategy registered."
    assert on_both(what_cuda_alone_can, ranks=2) == [refusal] * 2


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_sharded_buffers_that_come_from_expand(masked, ranks):
    for result in on_both(sharded_buffers, 16, "MATH", masked, True, ranks=ranks, exact=ranks == 2):
        torch.testing.assert_close(result["whole"], on_one_device(16, masked), **CLOSE)
        assert result["shapes"] == [(2, 2, 16 // ranks, 4)] * 3 + [(2, 2, 16 // ranks, 16)]
        assert result["restored"]


def test_sharded_buffers_that_cannot_be_balanced():
    for result in on_both(sharded_buffers, 6, "MATH", True, True, ranks=2):
        torch.testing.assert_close(result["whole"], on_one_device(6, True), **CLOSE)


@pytest.mark.slow  # for the same reason
def test_without_a_mask_or_a_gradient_the_flash_kernel_is_taken_apart():
    for result in on_both(sharded_buffers, 16, None, False, False, ranks=2):
        torch.testing.assert_close(result["whole"], on_one_device(16, False)[:1], **CLOSE)


@pytest.mark.parametrize("rotate", ["allgather", "alltoall"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_ring_around_the_flash_kernel_of_the_cpu(rotate, is_causal, ranks):
    queries, expected = inputs(16)[0], on_one_device(16, is_causal)
    for rank, result in enumerate(on_both(flash_ring, 16, is_causal, rotate, ranks=ranks)):
        torch.testing.assert_close(result["whole"], expected, **CLOSE)
        mine = positions(16, rank, ranks) if is_causal else torch.arange(16).chunk(ranks)[rank]
        assert torch.equal(result["queries"], queries[:, :, mine])


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_ring_of_isend_and_irecv(is_causal, ranks):
    expected = on_one_device(12, is_causal)
    for result in on_both(own_ring, 12, is_causal, ranks=ranks):
        mine = [whole[:, :, result["positions"]] for whole in expected]
        torch.testing.assert_close(result["parts"], mine, **CLOSE)
