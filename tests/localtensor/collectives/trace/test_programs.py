"""The four programs of docs/trace.md: calls and bytes equal a hand count, and their pictures show what the page says."""

from collections import Counter

import pytest
import torch

from localtensor.collectives.trace.events import CALL, IMPLICIT, WAIT
from tests.tools.run_pictures import (
    RANKS,
    ROWS,
    WIDTH,
    fsdp_and_tp,
    mixture_of_experts,
    pipeline,
    recorded,
    ring_attention,
)

F32 = 4
ROWS_BYTES = ROWS * WIDTH * F32


def sent(recording, rank=None):
    """Bytes of float tensors by axis and kind of call, and how many calls."""
    found, calls = Counter(), Counter()
    for event in recording.of(CALL):
        floats = event.part.tensors and event.part.tensors[0][0] == torch.float32
        if floats and rank in (None, event.rank):
            key = event.axis if event.part.peer is None else "", event.name
            found[key] += event.bytes
            calls[key] += 1
    return found, calls


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_fsdp_and_tensor_parallelism():
    recording, _ = recorded(fsdp_and_tp)
    found, calls = sent(recording, 3)
    block = (4 * WIDTH * WIDTH // 4 + WIDTH + 4 * WIDTH * WIDTH // 4 + WIDTH) * F32  # of a rank, before dp cuts it
    assert calls["dp", "reduce_scatter_tensor"] == 4 and found["dp", "reduce_scatter_tensor"] == 4 * block
    gathers = calls["dp", "all_gather_into_tensor"]
    assert 7 <= gathers <= 8 and found["dp", "all_gather_into_tensor"] == gathers * block // 2
    implicit = [event for event in recording.of(IMPLICIT) if event.rank == 3 and event.bytes]
    assert [event.bytes for event in implicit] == [ROWS_BYTES] * 3  # the first block's input needs no gradient
    assert found["tp", "all_reduce"] == (4 + 3) * ROWS_BYTES


@pytest.mark.slow
def test_pipeline():
    recording, clock = recorded(pipeline)
    for rank in range(RANKS):
        found, _ = sent(recording, rank)
        forward, backward = rank < RANKS - 1, rank > 0
        assert found["", "send"] == 2 * 16 * (forward + backward) * ROWS_BYTES == found["", "recv"]
    assert 0.2 < clock.idle_share < 0.8  # of 7 / (16 + 7), and the asking for shapes


def test_ring_attention():
    recording, clock = recorded(ring_attention)
    found, calls = sent(recording)
    piece = 4 * ROWS * WIDTH * F32
    assert calls["", "send"] == 2 * (RANKS - 1) * RANKS and found["", "send"] == calls["", "send"] * piece
    assert sum(wait.ends - wait.begins for wait in recording.of(WAIT)) < 0.01 * clock.seconds  # it overlaps


def test_mixture_of_experts():
    recording, _ = recorded(mixture_of_experts)
    found, _ = sent(recording)
    layer = RANKS * 16 * ROWS_BYTES  # all rows of all ranks, there or back
    assert found["ranks 0,1,2,3,4,5,6,7", "all_to_all_single"] == (4 + 3) * layer
    by_rank = {rank: sent(recording, rank)[0]["ranks 0,1,2,3,4,5,6,7", "all_to_all_single"] for rank in range(RANKS)}
    assert len(set(by_rank.values())) > 1  # the load is uneven
