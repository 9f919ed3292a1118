"""A mode with a trace: memory per rank as rank threads measure it, calls, spans, and a file that keeps the format's rules."""

import json
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import localtensor as lt
from localtensor.collectives.trace.events import CALL, OP, REDISTRIBUTIONS
from localtensor.collectives.trace.memory import ACTIVATIONS, PARAMETERS, MemoryOfRanks
from tests.localtensor.collectives.trace.test_chrome import breaches


class Block(nn.Module):
    """A layer of a transformer with one head."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + torch.softmax(q @ k.transpose(-1, -2), -1) @ v
        return x + self.down(torch.relu(self.up(x)))


def train(ranks, how="tp", width=32, layers=2, steps=2):
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(width) for _ in range(layers)])
    for block in model:
        if how == "tp":
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        else:
            fully_shard(block, mesh=mesh)
    if how == "fsdp":
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model(torch.randn(2, 8, width)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize(("ranks", "how", "width"), [
    (2, "tp", 32), (4, "fsdp", 32), (3, "fsdp", 10), (16, "tp", 32),
])  # fmt: skip
def test_memory_of_each_rank_is_what_rank_threads_measure(ranks, how, width):
    threads = lt.run(train, ranks, how, width, ranks=ranks, trace=True).recording
    with lt.LocalTensorMode(ranks, trace=True) as mode:
        train(ranks, how, width)
    assert len(mode.recording.peaks) == ranks
    for measured, counted in zip(threads.peaks, mode.recording.peaks, strict=True):
        assert counted.bytes == pytest.approx(measured.bytes, rel=0.01) and counted.module == measured.module
        for kind, size in measured.by_kind.items():
            assert counted.by_kind.get(kind, 0) == pytest.approx(size, abs=0.01 * measured.bytes), kind
    if width % ranks:
        assert len({peak.bytes for peak in threads.peaks}) > 1  # uneven shards


@pytest.mark.slow
def test_a_thousand_ranks_of_a_transformer_in_under_a_minute():
    start = time.process_time()
    with lt.LocalTensorMode(1024, trace=True) as mode:
        train(1024, width=256, layers=4, steps=1)
    assert time.process_time() - start < 60
    parameters = 4 * (2 * 256 + 3 * 256 * 256 + (256 * 1024 + 1024) // 1024 + 1024 * 256 // 1024 + 256) * 4
    assert mode.recording.peaks[1023].by_kind[PARAMETERS] == parameters


def test_calls_have_bytes_and_modules():
    with lt.LocalTensorMode(8, trace=True) as mode:
        train(8, steps=1)
    calls = [call for call in mode.recording.of("call") if call.name == "all_reduce"]
    assert [(call.module, call.bytes) for call in calls if call.module] == [
        (name, 2 * 8 * 32 * 4) for name in ("0", "1", "1.up", "0.up")
    ]
    assert [event.name for event in mode.recording.of("forward")][:4] == ["Sequential", "0", "0.norm", "0.qkv"]


def placed():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dist.all_reduce(torch.ones(8), group=mesh.get_group("dp"))
    rows = distribute_tensor(torch.ones(8, 8), mesh["tp"], [Shard(1)])
    return (rows @ rows).redistribute(placements=[Replicate()])


def seen(recording):
    """Of rank 0, or of all at once: the calls, the redistributions with their reasons, and the ops with placements."""
    mine = [event for event in recording.events if event.rank == 0]
    calls = [(e.name, e.axis, e.bytes, e.part.implicit) for e in mine if e.kind == CALL]
    moved = [(e.kind, e.facts["spec"], e.facts["reason"]) for e in mine if e.kind in REDISTRIBUTIONS]
    return calls, moved, [(e.name, e.takes, e.gives) for e in mine if e.kind == OP]


def test_calls_and_ops_of_dtensor_are_those_that_rank_threads_record():
    threads = lt.run(placed, ranks=4, trace=True).recording
    with lt.LocalTensorMode(4, trace=True) as mode:
        placed()
    (calls, moved, ops), expected = seen(mode.recording), seen(threads)
    assert (calls, moved) == expected[:2]
    assert [(kind, axis, size) for kind, axis, size, _ in calls] == [
        ("all_reduce", "dp", 32), ("scatter", "tp", 128), ("all_gather_into_tensor", "tp", 128), ("all_gather_into_tensor", "tp", 128),
    ]  # fmt: skip
    assert "aten.mm.default takes R" in {reason for _, _, reason in moved}
    assert [name for name, _, _ in ops] == [name for name, _, _ in expected[2]] and "aten.mm.default" in str(ops)
    texts = [[[str(spec) for spec in (*takes, *gives)] for _, takes, gives in found] for found in (ops, expected[2])]
    assert texts[0] == texts[1]


def test_collectives_of_this_package_are_calls():
    with lt.LocalTensorMode(4, trace=True) as mode:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        x = lt.rank_map(lambda rank: torch.full((6,), float(rank)))
        lt.all_reduce(x, "sum")
        lt.all_reduce(x, "product", (mesh, "tp"))
        lt.reduce(x, 0)
        lt.scatter([x, x], 0, (mesh, "dp"))
        lt.all_gather(x, (mesh, "dp"))
    calls = mode.recording.of(CALL)
    assert [(call.name, call.axis, call.bytes) for call in calls] == [
        ("all_reduce", "ranks 0,1,2,3", 24), ("all_reduce", "tp", 24), ("reduce", "ranks 0,1,2,3", 24),
        ("scatter", "dp", 24), ("all_gather", "dp", 24),
    ]  # fmt: skip
    assert {call.place.function for call in calls} == {"test_collectives_of_this_package_are_calls"}


@pytest.mark.parametrize(("trace", "kind", "problem"), [
    (3, TypeError, "3: it is no path. Pass the path of a file, as 'trace.json', or True."),
    ("", lt.LocalTensorError, "trace=.: it cannot be written"),
])  # fmt: skip
def test_other_values_of_trace_are_refused(trace, kind, problem):
    with pytest.raises(kind) as caught:
        lt.LocalTensorMode(2, trace=trace)
    assert str(caught.value).startswith(f"LocalTensorMode: trace: {problem}")


def test_the_file_keeps_the_rules_of_the_format(tmp_path):
    file = tmp_path / "trace.json"
    with lt.LocalTensorMode(4, trace=file):
        train(4, steps=1)
    trace = json.loads(file.read_text())
    assert breaches(trace) == [] and trace["otherData"] == {"made by": "localtensor", "ranks": 4}
    assert next(e for e in trace["traceEvents"] if e["name"] == "thread_name")["args"]["name"] == "ranks 0-3"


def test_an_error_is_in_the_file(tmp_path):
    file = tmp_path / "trace.json"

    def fails():
        dist.all_reduce(torch.ones(2))
        raise ZeroDivisionError("by nothing")

    with pytest.raises(ZeroDivisionError), lt.LocalTensorMode(2, trace=str(file)):
        fails()
    trace = json.loads(file.read_text())
    assert trace["otherData"]["error"] == "ZeroDivisionError: by nothing" and breaches(trace) == []


def test_a_file_that_cannot_be_written_is_refused_before_the_mode_begins(tmp_path):
    with pytest.raises(lt.LocalTensorError, match=r"^LocalTensorMode: trace: trace=.*: it cannot be written \("):
        lt.LocalTensorMode(2, trace=tmp_path / "no" / "trace.json")


def test_without_a_trace_there_is_no_recording():
    with lt.LocalTensorMode(2) as mode:
        assert mode.recorder is None and mode.recording is None


def test_views_keep_the_memory_of_their_base():
    with lt.LocalTensorMode(2, trace=True) as mode:
        x = lt.rank_map(lambda rank: torch.full((100,), float(rank)))
        y = x * 2
        view = y[:10]
        del y
        held = mode.recorder._memory.now
        z = view + 1
        del view
        after = mode.recorder._memory.now
    assert (held, after) == (400 + 400, 400 + 40) and z.shape == (10,)


def test_relabelled_memory_counts_at_the_peak():
    memory = MemoryOfRanks(2)
    memory.hold(1, 8, ACTIVATIONS, "a")
    memory.relabel(1, PARAMETERS)
    assert memory.peak_of(0).by_kind == {PARAMETERS: 8}
