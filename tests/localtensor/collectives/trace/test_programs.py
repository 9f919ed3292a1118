"""The four programs of docs/trace.md: calls and bytes equal a hand count, and their pictures show what the page says."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._pytree import tree_leaves

import localtensor as lt
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


KINDS = {
    "_allgather_base_": "all_gather_into_tensor", "_reduce_scatter_base_": "reduce_scatter_tensor",
    "allreduce_": "all_reduce", "alltoall_base_": "all_to_all_single", "broadcast_": "broadcast", "scatter_": "scatter",
}  # fmt: skip


class SeenByTorch(CommDebugMode):
    """CommDebugMode, with the bytes that the rank passes to what it counts, by kind."""

    def __init__(self):
        super().__init__()
        self.found = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = self.get_total_counts()
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if out is not NotImplemented and self.get_total_counts() > before:
            passed = args["base" in func._opname]  # c10d's ops on whole tensors have their outputs first
            calls, size = self.found.get(kind := KINDS.get(func._opname, func._opname), (0, 0))
            nbytes = sum(x.nbytes for x in tree_leaves(passed) if isinstance(x, torch.Tensor))
            self.found[kind] = (calls + 1, size + nbytes)
        return out


def by_hand():
    """Data parallelism without a wrapper: parameters from rank 0, gradients added up."""
    model = torch.nn.Linear(5, 3)
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    model(torch.ones(2, 5)).sum().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def moves():
    """A tensor from each placement to another one."""
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    x = distribute_tensor(torch.ones(8, 16), mesh, [Replicate(), Shard(0)])
    x = x.redistribute(placements=[Replicate(), Shard(1)])
    x = DTensor.from_local(x.to_local(), mesh, [Partial(), Shard(1)]).redistribute(placements=[Shard(0), Shard(1)])
    x.redistribute(placements=[Replicate(), Replicate()])


GATHERED = (
    32 + 16 + 64
)  # elements: gloo has no all-to-all of DTensor's kind, which gathers instead; then over tp, then over dp
HAND = {
    by_hand: {"broadcast": (2, 18 * F32), "all_reduce": (2, 18 * F32)},
    moves: {
        "broadcast": (1, 128 * F32), "scatter": (1, 32 * F32), "reduce_scatter_tensor": (1, 32 * F32),
        "all_gather_into_tensor": (3, GATHERED * F32),
    },
}  # fmt: skip


@pytest.mark.few(2)
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module", "ignore:Full backward hook is firing")
@pytest.mark.parametrize("program", [fsdp_and_tp, mixture_of_experts, by_hand, moves])
def test_kinds_and_bytes_are_those_that_torchs_comm_debug_mode_sees(program):
    def watched():
        with SeenByTorch() as seen:
            program()
        return seen.found

    ran = lt.run(watched, ranks=RANKS, trace=True)
    for rank in range(RANKS):
        ours = {}
        for event in ran.recording.of(CALL):
            if event.rank == rank:
                calls, size = ours.get(event.name, (0, 0))
                ours[event.name] = (calls + 1, size + event.bytes)
        assert ours == ran[rank] and sum(size for _, size in ours.values()) > 0
        assert ours == HAND.get(program, ours)
