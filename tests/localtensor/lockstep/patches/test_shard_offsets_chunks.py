"""Each rank's chunk, against torch.chunk on each rank's own tensor."""

import numpy as np
import pytest
import torch

from localtensor.lockstep.comms.collectives import value_of_ranks
from localtensor.lockstep.patches.shard_offsets import take_chunk

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
