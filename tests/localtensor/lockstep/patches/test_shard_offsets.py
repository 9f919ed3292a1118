"""Sizes and offsets of shards for all coordinates at once, against DTensor's own, asked for one coordinate at a
time.  Each rank's chunk, against torch.chunk on each rank's own tensor.  Uneven shards put together: what each
rank gets is the whole, along any dim, and fresh."""

import itertools

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, _utils
from torch.distributed.tensor.placement_types import _StridedShard

from localtensor.layout.shards import chunk_bounds
from localtensor.lockstep.comms.collectives import value_of_ranks
from localtensor.lockstep.mode import LocalTensorMode, rank_map
from localtensor.lockstep.patches.shard_offsets import gather_uneven, shard_sizes_and_starts, take_chunk

# Asked here with plain numbers, outside of any mode.
of_one = _utils._compute_local_shape_and_global_offset

CUTS = {
    "one": (4,),
    "two": (2, 3),
    "three": (2, 2, 2),
    "strided": ((2, 2), 2),
    "strided, three": ((2, 4), 2, 2),
    "strided behind a plain one": (2, (2, 3)),
}


def cuts_of(name):
    return tuple(cut if isinstance(cut, tuple) else (cut, 0) for cut in CUTS[name])


def placements(cuts):
    return [_StridedShard(0, split_factor=stride) if stride else Shard(0) for _, stride in cuts]


@pytest.mark.parametrize("size", [0, 1, 2, 3, 5, 7, 8, 12, 13])
@pytest.mark.parametrize("name", CUTS)
def test_every_coordinate_has_what_torch_says(name, size):
    cuts = cuts_of(name)
    mesh = [chunks for chunks, _ in cuts]
    sizes, starts = shard_sizes_and_starts(size, cuts, size)
    assert sizes.shape == starts.shape == tuple(mesh)
    for place in itertools.product(*map(range, mesh)):
        shape, offset = of_one((size,), mesh, list(place), placements(cuts))
        assert (int(sizes[place]), int(starts[place])) == (shape[0], offset[0]), place


def test_the_sizes_of_all_shards_make_the_whole():
    for name, size in itertools.product(CUTS, range(20)):
        sizes, _ = shard_sizes_and_starts(size, cuts_of(name), size)
        assert int(sizes.sum()) == size


SHAPES = {"even": (8, 3), "uneven": (7, 3), "short": (2, 3), "one dim": (5,), "three dims": (2, 6, 4)}


def value_of(kind, shape):
    """Four ranks: all alike, in pairs, each alone, or of sizes of their own."""
    source = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    if kind == "sizes":
        return {rank: source.narrow(0, 0, max(shape[0] - rank, 1)) + rank for rank in range(4)}
    step = {"alike": 4, "pairs": 2, "alone": 1}[kind]
    rows = {number: source + 100 * number for number in range(4)}
    return {rank: rows[rank // step] for rank in range(4)}


def torchs(x, dim, chunks, index):
    pieces = x.chunk(chunks, dim)
    return pieces[index].clone() if index < len(pieces) else x.narrow(dim, 0, 0).clone()


@pytest.mark.parametrize("chunks", [1, 2, 4, 5])
@pytest.mark.parametrize("kind", ["alike", "pairs", "alone", "sizes"])
@pytest.mark.parametrize("name", SHAPES)
def test_every_rank_takes_what_torch_cuts(name, kind, chunks):
    held = value_of(kind, SHAPES[name])
    index = np.array([rank % chunks for rank in range(4)])
    for dim in range(len(SHAPES[name])):
        taken = take_chunk(value_of_ranks(held, 4), dim, chunks, index)
        for rank in range(4):
            expected = torchs(held[rank], dim, chunks, rank % chunks)
            assert torch.equal(taken.on(rank), expected), (rank, dim)
            assert taken.on(rank).is_contiguous()


def test_the_order_of_dims_in_memory_is_kept_if_asked_for():
    x = torch.arange(24.0).reshape(4, 6).t()
    value, index = value_of_ranks(dict.fromkeys(range(4), x), 4), np.arange(4)
    assert take_chunk(value, 0, 4, index).on(1).stride() == (4, 1)
    kept = take_chunk(value, 0, 4, index, keep_order=True).on(1)
    assert kept.stride() == torchs(x, 0, 4, 1).stride() == (1, 2)
    assert torch.equal(kept, x[2:4])


def test_who_has_no_index_takes_nothing():
    taken = take_chunk(value_of_ranks(dict.fromkeys(range(4), torch.arange(4)), 4), 0, 2, np.array([0, -1, 1, -1]))
    assert taken.held.row_of.tolist() == [0, -1, 1, -1]
    assert taken.on(2).tolist() == [2, 3]


def test_chunks_are_fresh():
    x = torch.arange(4.0)
    taken = take_chunk(value_of_ranks(dict.fromkeys(range(2), x), 2), 0, 1, np.array([0, 0]))
    taken.on(0).zero_()
    assert x.tolist() == [0, 1, 2, 3]


def test_equal_chunks_are_held_once():
    held = value_of_ranks(dict.fromkeys(range(6), torch.arange(4)), 6)
    assert take_chunk(held, 0, 2, np.arange(6) % 2).held.rows == 2


def test_all_who_come_too_late_for_a_row_hold_one_empty_chunk():
    taken = take_chunk(value_of_ranks(dict.fromkeys(range(6), torch.arange(2)), 6), 0, 6, np.arange(6))
    assert taken.held.rows == 3 and [len(taken.on(rank)) for rank in range(6)] == [1, 1, 0, 0, 0, 0]


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
