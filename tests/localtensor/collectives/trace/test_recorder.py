"""What a recording of rank threads has: spans, calls, waits, ops with placements, redistributions, draws, pauses, memory."""

import gc
import inspect
from collections import Counter
from contextlib import ExitStack
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict_saver as checkpoint_saver
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    _api,
    _dispatch,
    _redistribute,
    distribute_tensor,
)
from torch.distributed.tensor.debug import CommDebugMode, _clear_sharding_prop_cache
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import localtensor as lt
from localtensor.collectives.trace import events, op_watch
from localtensor.collectives.trace.memory import ACTIVATIONS, BUFFERS, GRADIENTS, OTHER, PARAMETERS, STATE, Memory
from localtensor.collectives.trace.op_traits import traits_of_op


def recording_of(program, ranks=2, *args):
    return lt.run(program, *args, ranks=ranks, trace=True).recording


def of_rank(recording, rank, *kinds):
    return [event for event in recording.of(*kinds) if event.rank == rank]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def two_blocks():
    model = nn.Sequential(Block(), Block())
    return model(torch.ones(2, 4)).sum().backward()


def test_modules_have_spans_by_qualified_name_forward_and_backward():
    found = of_rank(recording_of(two_blocks, 1), 0, "forward", "backward")
    forward = [event.name for event in found if event.kind == "forward"]
    assert forward == ["Sequential", "0", "0.up", "0.down", "1", "1.up", "1.down"]
    backward = sorted(
        (event for event in found if event.kind == "backward"), key=lambda event: (event.start, -event.end)
    )
    assert [event.name for event in backward][:3] == ["Sequential", "1", "1.down"]
    assert {event.name for event in backward} == set(forward)
    for event in found:  # each lies within the module around it
        outer = [one for one in found if one.kind == event.kind and one.name == event.name.rpartition(".")[0]]
        assert all(one.start <= event.start and event.end <= one.end for one in outer), event
    assert all(event.end > 0 for event in found)


def checkpointed():
    from torch.utils.checkpoint import checkpoint

    block = Block()
    return checkpoint(block, torch.ones(2, 4, requires_grad=True) * 2, use_reentrant=False).sum().backward()


def overlapping(found):
    """Pairs of spans of one rank of which neither lies in the other, although they overlap: a viewer drops one."""
    spans = sorted(found, key=lambda event: (event.start, -event.end))
    pairs = ((one, two) for number, one in enumerate(spans) for two in spans[number + 1 :])
    return [(one.name, two.name) for one, two in pairs if two.start < one.end < two.end]


def backward_within_backward():
    from torch.utils.checkpoint import checkpoint

    up, block, down = nn.Linear(4, 4), Block(), nn.Linear(4, 4)
    model = nn.ModuleList([up, block, down])
    model.forward = lambda x: down(checkpoint(block, up(x), use_reentrant=True))
    return model(torch.ones(2, 4, requires_grad=True)).sum().backward()


def test_a_backward_pass_within_another_lies_in_it():
    found = of_rank(recording_of(backward_within_backward, 1), 0, "forward", "backward", "backward pass")
    assert [event.kind for event in found].count("backward pass") == 2 and overlapping(found) == []
    assert {"0", "1", "1.up", "1.down", "2"} <= {event.name for event in found if event.kind == "backward"}


def wrapped():
    model = nn.parallel.DistributedDataParallel(Block())
    return model(torch.ones(2, 4)).sum().backward()


def test_a_model_in_a_wrapper_has_the_name_of_its_class():
    found = of_rank(recording_of(wrapped), 0, "forward", "backward")
    names = [event.name for event in sorted(found, key=lambda event: (event.kind, event.start, -event.end))]
    assert names[:4] == ["DistributedDataParallel", "Block", "down", "up"] and overlapping(found) == []
    assert names[4:] == ["DistributedDataParallel", "Block", "up", "down"]


def test_what_checkpointing_computes_again_is_named_so():
    forward = of_rank(recording_of(checkpointed, 1), 0, "forward")
    assert [("again" in event.facts) for event in forward if event.name == "Block"] == [False, True]


def reduces():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = torch.ones(6)
    dist.all_reduce(x, group=mesh.get_group("tp"))
    work = dist.all_reduce(x.double(), group=mesh.get_group("dp"), async_op=True)
    work.wait()
    out = torch.empty(8)
    dist.all_gather_into_tensor(out, torch.ones(2))


def test_calls_have_kind_axis_bytes_dtype_and_line():
    calls = of_rank(recording_of(reduces, 4), 3, "call")
    assert [(call.name, call.axis, call.bytes) for call in calls] == [
        ("all_reduce", "tp", 24), ("all_reduce", "dp", 48), ("all_gather_into_tensor", "ranks 0,1,2,3", 8),
    ]  # fmt: skip
    assert calls[0].part.call().tensors == ("f32[6]",) and calls[1].part.call().tensors == ("f64[6]",)
    first = reduces.__code__.co_firstlineno
    assert [call.place.line - first for call in calls] == [3, 4, 7]
    assert len({call.exchange for call in calls}) == 3


def unbalanced(rank_that_is_late):
    if dist.get_rank() == rank_that_is_late:
        for _ in range(3):
            torch.ones(4).sum()
    dist.barrier()


@pytest.mark.parametrize("late", [0, 2])
def test_a_wait_names_the_rank_that_it_waits_for(late):
    recording = lt.run(unbalanced, late, ranks=3, trace=True, schedule="round_robin").recording
    waits = [wait for wait in recording.of("wait") if "ready" not in wait.facts]
    assert len(waits) == 2 and {wait.late.rank for wait in waits} == {2}  # the last in turn completes it
    assert all(wait.start <= wait.late.start <= wait.end for wait in waits)


def redistributes():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    rows = distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)])
    columns = distribute_tensor(torch.ones(4, 6), mesh, [Shard(1)])
    both = rows + columns
    return both.redistribute(mesh, [Replicate()]).to_local()


def test_written_and_implicit_redistributions_differ_and_give_reasons():
    found = of_rank(recording_of(redistributes), 0, *events.REDISTRIBUTIONS)
    first = redistributes.__code__.co_firstlineno
    assert [(one.kind, one.name, one.bytes, one.place.line - first) for one in found] == [
        (events.IMPLICIT, "S(1) -> S(0)", 48, 4), (events.WRITTEN, "S(0) -> R", 48, 5),
    ]  # fmt: skip
    assert found[0].facts["spec"] == "f32[4,6] @ tp=2: S(1) -> S(0)"
    assert found[0].facts["reason"].startswith("aten.add.Tensor takes S(0)")
    assert found[1].facts["reason"] == "written"


def test_ops_of_dtensor_have_placements_in_and_out():
    (add,) = [event for event in of_rank(recording_of(redistributes), 1, "op") if event.name == "aten.add.Tensor"]
    takes, gives = ([str(events.TracedSpec.of(spec)) for spec in specs] for specs in (add.takes, add.gives))
    assert (takes, gives) == (["f32[4,6] S(0)", "f32[4,6] S(1)"], ["f32[4,6] S(0)"])


def gradient_of_from_local():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    local = torch.ones(2, 2, requires_grad=True)
    x = DTensor.from_local(local, mesh, [Replicate()])
    w = distribute_tensor(torch.ones(2, 4), mesh, [Shard(1)])
    (x @ w).sum().redistribute(placements=[Replicate()]).to_local().backward()


def test_the_gradient_of_from_local_is_implicit():
    found = of_rank(recording_of(gradient_of_from_local), 0, events.IMPLICIT)
    moved = [one for one in found if one.bytes]
    assert [(one.name, one.bytes) for one in moved] == [("P(sum) -> R", 16)]
    assert "from_local" in moved[0].facts["reason"]


def draws_and_saves(folder):
    torch.rand(3)
    torch.nn.functional.dropout(torch.ones(4), 0.5)
    torch.save({"x": torch.ones(2)}, f"{folder}/{dist.get_rank()}.pt")
    gc.collect()


def test_draws_saves_and_garbage_collections(tmp_path):
    found = of_rank(recording_of(draws_and_saves, 2, str(tmp_path)), 1, "random draw", "checkpoint save", events.GC)
    named = [event.name for event in found if event.kind == "random draw"]
    assert named[0] == "aten.rand.default" and len(named) == 2
    assert [event.name for event in found if event.kind == "checkpoint save"] == ["torch.save"]
    assert [
        event for event in found if event.kind == events.GC and event.name == "generation 2" and event.nanoseconds > 0
    ]


def saves_a_distributed_checkpoint(folder):
    checkpoint.save({"x": torch.ones(2)}, checkpoint_id=folder)


def test_a_distributed_checkpoint_is_one_save_on_each_rank(tmp_path):
    recording = recording_of(saves_a_distributed_checkpoint, 2, str(tmp_path / "checkpoint"))
    found = [(event.rank, event.name) for event in recording.of("checkpoint save")]
    assert sorted(found) == [(rank, "torch.distributed.checkpoint.save") for rank in (0, 1)]


def test_bytes_and_kinds_are_those_of_comm_debug_mode():
    def program():
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        torch.manual_seed(0)
        model = parallelize_module(Block(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        with CommDebugMode() as seen:
            model(torch.ones(3, 4, requires_grad=True)).sum().backward()
        return {str(kind).rpartition(".")[2]: count for kind, count in seen.get_comm_counts().items()}

    ran = lt.run(program, ranks=4, trace=True)
    first = next(event for event in ran.recording.of("forward"))
    ours = Counter(event.name for event in of_rank(ran.recording, 0, "call") if event.start > first.start)
    assert ours == Counter(ran[0]) == {"all_reduce": 2}
    assert [event.bytes for event in of_rank(ran.recording, 0, "call") if event.start > first.start] == [3 * 4 * 4] * 2


def test_a_failed_run_is_recorded_up_to_the_error_and_open_spans_are_closed(tmp_path):
    class Fails(nn.Module):
        def forward(self, x):
            if dist.get_rank() == 1:
                raise ValueError("no such luck")
            dist.barrier()

    def program():
        nn.Sequential(Fails())(torch.ones(1))

    from localtensor.collectives.trace.recorder import Recorder
    from localtensor.concurrency.schedule import round_robin
    from localtensor.threads.run import run_in_threads

    recorder = Recorder(2)
    with pytest.raises(lt.errors.RankRaised), recorder.hooked():
        run_in_threads(lambda rank: program(), 2, round_robin(), 0, 60.0, observer=recorder)
    found = recorder.recording
    (error,) = found.of("error")
    assert (error.rank, error.name, error.facts["message"]) == (1, "ValueError", "no such luck")
    assert "no such luck" in found.problem and found.problem.startswith("RankRaised")
    assert all(event.end >= event.start for event in found.events)
    assert [event.name for event in of_rank(found, 0, "forward")] == ["Sequential", "0"]


def trains():
    torch.manual_seed(0)
    model = nn.Linear(256, 256, bias=False)  # 256 KiB
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(64, 256)).sum().backward()
    optimizer.step()


def test_memory_has_a_peak_by_kind_with_its_module():
    weight, batch = 256 * 256 * 4, 64 * 256 * 4
    ran = recording_of(trains, 1)
    (peak,) = ran.peaks
    assert peak.by_kind[PARAMETERS] == weight and peak.by_kind[GRADIENTS] == weight
    assert peak.by_kind[STATE] >= 2 * weight
    assert 4 * weight <= peak.bytes <= 7 * weight
    last = ran.memory[-1].held
    assert last.get(ACTIVATIONS, 0) < batch


def test_memory_keeps_the_size_that_fsdp_gives_a_storage():
    memory, (storage,) = Memory(), storages(100)
    memory.hold(storage, OTHER, "a")
    memory.relabel(storage, BUFFERS)
    storage.resize_(0)
    memory.resized(storage)
    memory.hold(storage, OTHER, "b")  # it is held already
    assert (memory.now, memory.by_kind[BUFFERS]) == (0, 0)
    storage.resize_(60)
    memory.resized(storage)
    assert (memory.now, memory.by_kind[BUFFERS], memory.peak.bytes) == (60, 60, 100)


def storages(*sizes):
    """Storages of so many bytes."""
    return [torch.empty(size, dtype=torch.uint8).untyped_storage() for size in sizes]


def test_an_op_with_a_list_of_sizes_is_known_by_it():
    def program():
        x = distribute_tensor(torch.ones(4, 1), init_device_mesh("cpu", (2,)), [Shard(0)])
        for size in (3, 3, 5, 5, 3):
            x.expand([4, size])

    recording = lt.run(program, ranks=2, trace=True).recording
    assert len(recording.ops) == 2 * 3  # the first of each size is looked at
    gives = [event.gives[0].shape[1] for event in recording.of("op") if event.rank == 1 and "expand" in event.name]
    assert gives == [3, 3, 5, 5, 3]


def test_a_storage_at_the_place_of_a_freed_one_is_held_anew():
    memory, times = Memory(), 50
    for _ in range(times):  # the allocator gives the same identity again
        memory.hold(*storages(10), ACTIVATIONS, "a")
    memory.look(7)
    assert len(memory.log) == 2 * times
    assert (memory.now, memory.peak.bytes, memory.samples(np.empty((0, 2), np.int64)).tolist()) == (0, 10, [])


def test_what_is_freed_after_the_end_is_of_no_account():
    memory, held = Memory(), storages(10)
    memory.hold(held[0], ACTIVATIONS, "a")
    memory.look(7)
    memory.close()
    held.clear()
    assert (memory.now, memory.peak.bytes, len(memory.log)) == (10, 10, 1)
    assert memory.samples(np.empty((0, 2), np.int64)).tolist() == [[7, 0, 0, 0, 10, 0, 0]]


def test_without_a_trace_nothing_is_replaced():
    def program():
        return _dispatch.redistribute_local_tensor is _redistribute.redistribute_local_tensor, gc.callbacks[:]

    before = gc.callbacks[:]
    ran = lt.run(program, ranks=1)
    assert ran[0] == (True, before) and ran.recording is None


@pytest.mark.parametrize(("op", "shapes", "out", "flops"), [
    ("mm", ((3, 4), (4, 5)), (3, 5), 2 * 3 * 4 * 5),
    ("addmm", ((5,), (3, 4), (4, 5)), (3, 5), 2 * 3 * 4 * 5),
    ("bmm", ((2, 3, 4), (2, 4, 5)), (2, 3, 5), 2 * 2 * 3 * 4 * 5),
    ("relu", ((3, 4),), (3, 4), None),
])  # fmt: skip
def test_operations_are_counted_by_torchs_formulas(op, shapes, out, flops):
    formula = traits_of_op(getattr(torch.ops.aten, op).default).flops
    assert (formula is None) == (flops is None)
    assert formula is None or formula(*map(torch.Size, shapes), out_shape=torch.Size(out)) == flops


def test_torch_still_has_the_parts_that_are_replaced():
    for owner in (_dispatch, _redistribute, _api):
        parameters = inspect.signature(owner.redistribute_local_tensor).parameters
        assert list(parameters)[:3] == ["local_tensor", "current_spec", "target_spec"]
    assert torch.ops.aten.argmax.default in DTensor._op_dispatcher._custom_op_handlers
    assert callable(checkpoint_saver._save_state_dict) and callable(torch.autograd._engine_run_backward)
    assert "is_explicit" in inspect.signature(_redistribute.redistribute_local_tensor).parameters
    assert isinstance(torch._C._autograd._get_sequence_nr(), int) and torch._C._current_autograd_node() is None
    assert Partial().reduce_op == "sum"


def test_the_peak_of_memory_is_as_it_was_before_the_first_drop():
    memory, held = Memory(), storages(60, 40, 30)
    memory.hold(held[0], BUFFERS, "a")
    memory.hold(held[1], BUFFERS, "b")
    assert {kind: size for kind, size in memory.peak.by_kind.items() if size} == {BUFFERS: 100}
    memory.relabel(held[0], GRADIENTS)  # still at the peak, of which more is known now
    del held[1]
    memory.hold(held[1], PARAMETERS, "c")
    assert (memory.peak.bytes, memory.peak.module) == (100, "b")
    assert {kind: size for kind, size in memory.peak.by_kind.items() if size} == {BUFFERS: 40, GRADIENTS: 60}
    assert memory.peak.by_module == {"a": 60, "b": 40}
    held[0].resize_(80)
    memory.resized(held[0])  # it keeps its kind and its module
    assert (memory.peak.bytes, memory.peak.module, memory.peak.by_module["a"]) == (110, "a", 80)


def mixed():
    """Ops that come again: with other constants, in place, as views, with shards that the op moves, and of other layouts."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    cut, whole = (distribute_tensor(torch.ones(5, 4), mesh, [place]) for place in (Shard(0), Replicate()))
    weight = distribute_tensor(torch.ones(4, 4), mesh, [Shard(1)]).requires_grad_()
    moved = distribute_tensor(torch.ones(4, 5), mesh, [Shard(0)])
    ints, kept = cut.to(torch.int64), []
    for _ in range(3):
        (whole @ weight).t().sum().backward()
        cut.add_(1)
        kept += [cut * 2, cut.sum(0), cut.sum(1), cut.cumsum(1), cut + whole, cut @ moved, ints.pow(2), ints.pow(2.0)]
        torch.nn.functional.dropout(whole, 0.5)
        torch.ones(3, 3) @ torch.ones(3, 3)


class Forgetful(dict):
    def get(self, key):
        return None


@pytest.mark.parametrize("ranks", [2, 3])
def test_ops_that_come_again_are_recorded_as_the_first(ranks, monkeypatch):
    def facts(recording):
        return [
            (
                *(event.rank, event.kind, event.name, event.module, event.place, round(event.busy_end * 1e12)),
                *map(str, map(events.TracedSpec.of, (*event.takes, *event.gives))),
            )
            for event in sorted(recording.events, key=lambda event: event.rank)
            if event.kind != events.GC
        ]

    known = recording_of(mixed, ranks)
    init = op_watch.OpWatch.__init__

    def forgetful(watch, lane, rates):
        init(watch, lane, rates)
        watch._alike = Forgetful()

    monkeypatch.setattr(op_watch.OpWatch, "__init__", forgetful)
    anew = recording_of(mixed, ranks)
    assert facts(known) == facts(anew)
    assert [peak.bytes for peak in known.peaks] == [peak.bytes for peak in anew.peaks]
    assert known.busy == pytest.approx(anew.busy, rel=1e-9)


@pytest.fixture
def collecting():
    """An op of a user's, with a rule, during which garbage is collected, and which raises when it is told to."""
    raises = []

    @torch.library.custom_op("trace_tests::collect", mutates_args=())
    def collect(x: torch.Tensor) -> torch.Tensor:
        gc.collect()
        if raises:
            raise ValueError("told to")
        return x * 2

    collect.register_fake(torch.empty_like)
    tables = vars(DTensor._op_dispatcher.sharding_propagator).values()
    with ExitStack() as stack:
        for table in tables:
            if isinstance(table, dict):
                stack.enter_context(mock.patch.dict(table))
        register_sharding(torch.ops.trace_tests.collect.default)(lambda x: [([Shard(0)], [Shard(0)])])
        yield raises
    collect._lib._destroy()


def test_an_op_that_comes_again_with_something_inside_is_a_span_around_it(collecting):
    def program():
        x = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (2,)), [Shard(0)])
        for _ in range(3):
            torch.ops.trace_tests.collect(x)
        collecting.append(1)
        with pytest.raises(ValueError, match="told to"):
            torch.ops.trace_tests.collect(x)
        collecting.clear()
        x + x  # the spans before are closed

    recording = recording_of(program, 2)
    for rank in range(2):
        mine = [event for event in recording.events if event.rank == rank]
        ops = [event for event in mine if event.name == "trace_tests.collect.default"]
        assert [(len(one.takes), len(one.gives)) for one in ops] == [(1, 1), (1, 1), (1, 1), (1, 0)]
        for one in ops:
            inside = [event for event in mine if event.kind == events.GC and one.start <= event.start <= one.end]
            assert inside and all(event.end <= one.end for event in inside)
        assert mine[-1].name == "aten.add.Tensor" and mine[-1].start > ops[-1].end


def test_an_op_that_comes_again_and_gives_another_dtype_has_that():
    def program():
        x = distribute_tensor(torch.ones(4, 4, dtype=torch.int64), init_device_mesh("cpu", (2,)), [Shard(0)])
        for dtype in (torch.float32, torch.float32, torch.float64, torch.float64):
            torch.set_default_dtype(dtype)
            _clear_sharding_prop_cache()
            x / 2

    found = of_rank(recording_of(program, 2), 0, events.OP)
    gives = [str(events.TracedSpec.of(one.gives[0])) for one in found if one.name == "aten.div.Tensor"]
    assert [text.partition("[")[0] for text in gives] == ["f32", "f32", "f64", "f64"]
