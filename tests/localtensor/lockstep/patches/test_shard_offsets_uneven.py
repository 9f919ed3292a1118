"""Uneven shards put together: what each rank gets is the whole, along any dim, and fresh."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from localtensor.layout.shards import chunk_bounds
from localtensor.lockstep.mode import LocalTensorMode, rank_map
from localtensor.lockstep.patches.shard_offsets import gather_uneven


def shard(whole, dim, rank, ranks):
    start, length = chunk_bounds(whole.shape[dim], ranks)[rank]
    return whole.narrow(dim, start, length)


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("size", [1, 2, 5, 7])
def test_short_and_empty_shards_make_the_whole_again(size, dim):
    shape = [2, 3, 2]
    shape[dim] = size
    whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    with LocalTensorMode(4) as mode:
        mesh = init_device_mesh("cpu", (4,))
        local = rank_map(lambda rank: shard(whole, dim, rank, 4))
        found = gather_uneven(mode, local, dim, size, mesh, 0)
    assert found.shape == whole.shape and found._partition.uniform and found.is_contiguous()
    assert torch.equal(found.reconcile(), whole)


def test_each_group_along_an_axis_has_its_own_whole():
    wholes = [torch.arange(3.0), torch.arange(3.0) + 10]
    with LocalTensorMode(4) as mode:
        mesh = init_device_mesh("cpu", (2, 2))
        local = rank_map(lambda rank: shard(wholes[rank // 2], 0, rank % 2, 2))
        found = gather_uneven(mode, local, 0, 3, mesh, 1)
    assert [found.on(rank).tolist() for rank in range(4)] == [wholes[rank // 2].tolist() for rank in range(4)]


def test_a_shard_whose_dims_lie_in_another_order_is_gathered_as_it_reads():
    whole = torch.arange(12.0).reshape(3, 4)
    with LocalTensorMode(2) as mode:
        mesh = init_device_mesh("cpu", (2,))
        local = rank_map(lambda rank: shard(whole, 0, rank, 2).t().contiguous().t())
        assert torch.equal(gather_uneven(mode, local, 0, 3, mesh, 0).reconcile(), whole)
