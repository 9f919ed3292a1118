import inspect

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch.distributed.device_mesh import init_device_mesh
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import localtensor as lt
from localtensor.errors import (
    ChannelsDiffer,
    CollectiveTimeout,
    Deadlock,
    EarlyReturn,
    NoSuchPeer,
    NotServed,
    OutsideBuffer,
    PadReused,
    RankRaised,
    ReadUnwritten,
    ShapeMismatch,
    SignalNotConsumed,
    SymmetricRace,
)
from localtensor.threads.symmetric import signals
from localtensor.threads.symmetric.handle import CPP
from localtensor.threads.symmetric.watch import SymmetricWatch


def meet(count=8, dtype=torch.float32, group=None, fill=True):
    """A buffer of this rank, filled with its rank, and the handle."""
    mine = symm_mem.empty(count, dtype=dtype, device="cpu")
    if fill:
        mine.fill_(dist.get_rank())
    return mine, symm_mem.rendezvous(mine, group or dist.group.WORLD)


def fails(error, fn, ranks=2, **options):
    """The error of this class with which the run ends."""
    with pytest.raises(error) as caught:
        lt.run(fn, ranks=ranks, **options)
    return caught.value


def lines_of(error):
    return [place.line for place in error.places]


def line_of(fn, text):
    source = inspect.getsource(fn).splitlines()
    return fn.__code__.co_firstlineno + next(at for at, line in enumerate(source) if text in line)


def test_a_handle_has_what_torch_documents():
    def program():
        mine, handle = meet(8)
        assert isinstance(handle, symm_mem._SymmetricMemory)
        if hasattr(symm_mem, "is_symm_mem_tensor"):  # not in 2.11
            assert symm_mem.is_symm_mem_tensor(mine)
            assert not symm_mem.is_symm_mem_tensor(torch.ones(2))
        assert symm_mem.rendezvous(torch.ones(2), dist.group.WORLD) is None
        handle.barrier()
        peer = (handle.rank + 1) % handle.world_size
        theirs = handle.get_remote_tensor(peer, (2, 4), torch.float32)
        part = handle.get_buffer(peer, (2,), torch.float32, storage_offset=6)
        pad = handle.get_signal_pad(peer)
        facts = (handle.rank, handle.world_size, handle.buffer_size, handle.device.type, handle.multicast_ptr)
        return facts, theirs.tolist(), part.tolist(), pad.dtype, pad.numel() * 4 == handle.signal_pad_size

    values = lt.run(program, ranks=3).values
    assert values[1] == ((1, 3, 32, "cpu", 0), [[2.0] * 4] * 2, [2.0] * 2, torch.uint32, True)
    assert values[2][1] == [[0.0] * 4] * 2


def test_a_second_rendezvous_is_no_collective_and_a_view_has_its_own_offset():
    def program():
        mine, handle = meet(8)
        again = symm_mem.rendezvous(mine[4:], dist.group.WORLD) if handle.rank == 0 else handle
        handle.barrier()
        return again.offset, again.get_remote_tensor(1, (4,), torch.float32).tolist()

    assert lt.run(program, ranks=2).values == ((16, [1.0] * 4), (0, [1.0] * 4))


def test_groups_by_mesh_axis_exchange_among_their_ranks():
    def program():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        _, handle = meet(2, group=mesh.get_group("tp"))
        handle.barrier()
        values = [handle.get_buffer(peer, (1,), torch.float32).item() for peer in range(2)]
        handle.barrier()
        return values

    assert lt.run(program, ranks=4).values == ([0, 1], [0, 1], [2, 3], [2, 3])


def test_new_memory_is_nan_and_minus_one():
    def program():
        kinds = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.float8_e4m3fn)
        return [str(symm_mem.empty(1, dtype=dtype, device="cpu")[0].float().tolist()) for dtype in kinds]

    assert fails(ReadUnwritten, program, 1).buffer.startswith("buffer 0 of rank 0 (8 bytes")
    assert lt.run(program, ranks=1, races=False).values == (["nan"] * 4 + ["-1.0", "nan"],)


def test_sizes_that_differ_are_refused_at_the_rendezvous():
    def program():
        meet(8 if dist.get_rank() else 4)

    assert "u8[16]" in str(fails(ShapeMismatch, program))


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda handle: handle.get_buffer(1, (9,), torch.float32), OutsideBuffer, "ends at byte 36"),
        (lambda handle: handle.get_buffer(1, (4,), torch.float32, 6), OutsideBuffer, "ends at byte 40"),
        (lambda handle: handle.get_signal_pad(1, (4000,)), OutsideBuffer, "signal pad of rank 1"),
        (lambda handle: handle.get_buffer(2, (1,), torch.float32), NoSuchPeer, "must be in [0, 2)"),
        (lambda handle: handle.put_signal(7), NoSuchPeer, "dst_rank=7"),
        (
            lambda handle: handle.barrier(channel=100_000),
            NoSuchPeer,
            "maximum supported channel of this signal pad is 1151 for 2",
        ),
        (lambda handle: handle.buffer_ptrs, NotServed, "buffer_ptrs"),
        (lambda handle: handle.signal_pad_ptrs_dev, NotServed, "signal_pad_ptrs_dev"),
    ],
)
def test_what_cannot_be_is_refused_by_name(call, kind, words):
    def program():
        call(meet(8)[1])

    error = fails(RankRaised, program)
    assert isinstance(error.__cause__, kind)
    assert words in str(error.__cause__)


def test_an_ordinary_thread_has_torchs_own():
    lt.run(lambda: meet(2), ranks=1)
    with pytest.raises(RuntimeError, match="does not support device type cpu"):
        symm_mem.empty(2, device="cpu")
    assert symm_mem.get_backend("cpu") is None


def write_read_race():
    mine, handle = meet(8)
    if handle.rank == 0:
        mine.fill_(5)  # the write
    else:
        handle.get_buffer(0, (4,), torch.float32, 2).sum()  # the read


def test_a_race_names_both_ranks_both_lines_the_bytes_and_the_missing_edge():
    for schedule in ("round_robin", "shuffled:1", "pct:3"):
        error = fails(SymmetricRace, write_read_race, schedule=schedule)
        assert set(error.ranks) == {0, 1}
        assert set(lines_of(error)) == {line_of(write_read_race, "# the write"), line_of(write_read_race, "# the read")}
        assert error.common == (8, 24)
        assert error.buffer.startswith("buffer 0 of rank 0 (32 bytes, allocated at test_memory.py:")
        first, second = error.first.rank, error.second.rank
        assert f"Let rank {second} wait for a signal of rank {first} before line {error.second.place.line}" in str(
            error
        )


def test_the_replay_line_repeats_a_race():
    error = fails(SymmetricRace, write_read_race, schedule="shuffled:1")
    text = error.replay.partition("'")[2].rstrip("'")
    assert str(fails(SymmetricRace, write_read_race, schedule=text)).splitlines()[0] == str(error).splitlines()[0]


def a_stream_that_the_barrier_does_not_wait_for():
    mine, handle = meet(8)
    handle.barrier()
    for _ in range(12):  # more streams than an access keeps the times of
        side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with side:
        handle.get_buffer(1 - handle.rank, (8,), torch.float32).clone()  # the read
    handle.barrier()
    mine.fill_(2)  # the write


def a_stream_that_does_not_wait_for_the_barrier():
    mine, handle = meet(8)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    handle.barrier()
    mine.fill_(1)  # the write
    handle.barrier()
    with side:
        handle.get_buffer(1 - handle.rank, (8,), torch.float32).clone()  # the read


@pytest.mark.parametrize("schedule", ["round_robin", "shuffled:1", "pct:3"])
def test_a_race_of_a_stream_names_the_stream_that_has_to_wait(schedule):
    fn = a_stream_that_the_barrier_does_not_wait_for
    error = fails(SymmetricRace, fn, schedule=schedule)
    reader, line = error.first.rank, line_of(fn, "# the read")
    assert error.past == (reader, "the default stream")
    edge = f"Let the default stream of rank {reader} wait for stream 12 (wait_stream, or an event recorded after line {line})"
    assert f"{edge} before the call that lets rank {1 - reader} go on." in str(error)
    fn = a_stream_that_does_not_wait_for_the_barrier
    error = fails(SymmetricRace, fn, schedule=schedule)
    reader, line = error.second.rank, line_of(fn, "# the read")
    assert error.past == (reader, "the default stream")
    assert f"Let stream 1 of rank {reader} wait for the default stream (wait_stream, or an event)" in str(error)
    assert f"which has waited for rank {1 - reader}, before line {line}." in str(error)


QUESTIONS = {
    "a stream": lambda side: side.query(),
    "an event": lambda side: side.record_event().query(),
    "an event recorded in it": lambda side: torch.cuda.Event().record(side),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has its own streams")
@pytest.mark.parametrize("question", QUESTIONS)
def test_what_a_stream_has_done_by_its_own_word_is_known_to_the_rank(question):
    def program():
        mine, handle = meet(8)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        handle.barrier()
        with side:
            theirs = handle.get_buffer(1 - handle.rank, (8,), torch.float32).clone()
            theirs.record_stream(side)
        if QUESTIONS[question](side):
            handle.barrier()
        mine.fill_(2)

    if question == "an event recorded in it":  # that asks nothing
        fails(SymmetricRace, program)
    else:
        assert lt.run(program, ranks=2).values == (None, None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has its own streams")
def test_a_rank_sets_the_device_that_it_names():
    assert lt.run(lambda: torch.cuda.set_device(dist.get_rank()), ranks=2).values == (None, None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has its own streams")
def test_a_stream_that_is_made_late_races_with_an_early_write():
    def program():
        mine, handle = meet(400)
        early = torch.cuda.Stream()
        for at in range(200):
            mine[at : at + 1].fill_(1)
        for _ in range(2):
            handle.barrier()
        early.wait_stream(torch.cuda.current_stream())
        handle.barrier()
        for at in range(200, 400):  # so many that accesses which all streams know are removed
            mine[at : at + 1].clone()
        handle.barrier()
        with torch.cuda.Stream():  # it has waited for nothing
            handle.get_buffer(1 - handle.rank, (400,), torch.float32)[7:8].clone()
        handle.barrier()

    error = fails(SymmetricRace, program)
    assert (error.first.op, error.second.op) == ("fill_", "clone")


def test_ranks_without_any_order_have_to_wait_for_each_other_whatever_their_streams():
    def program():
        mine, handle = meet(8)
        with torch.cuda.Stream():
            mine.fill_(1) if handle.rank else handle.get_buffer(1, (8,), torch.float32).clone()

    error = fails(SymmetricRace, program)
    assert error.past is None
    assert "wait for a signal of rank" in str(error)


EDGES = {
    "barrier": lambda handle: handle.barrier(),
    "all_reduce": lambda handle: dist.all_reduce(torch.ones(1)),
    "dist.barrier": lambda handle: dist.barrier(),
    "signal": lambda handle: handle.wait_signal(0) if handle.rank else handle.put_signal(1),
    "message": lambda handle: dist.recv(torch.ones(1), 0) if handle.rank else dist.send(torch.ones(1), 1),
    "broadcast": lambda handle: dist.broadcast(torch.ones(1), 0),
    "reduce": lambda handle: dist.reduce(torch.ones(1), 1),
    "object": lambda handle: dist.broadcast_object_list([1], 0),
    "async": lambda handle: dist.all_reduce(torch.ones(1), async_op=True).wait(),
    "store": lambda handle: store().get("key") if handle.rank else store().set("key", "1"),
    "pad": lambda handle: spin(handle) if handle.rank else handle.get_signal_pad(1)[3:4].view(torch.int32).fill_(7),
}


def store():
    return dist.distributed_c10d._get_default_store()


def spin(handle):
    word = handle.get_signal_pad(1)[3:4].view(torch.int32)
    while word.item() != 7:
        pass


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("schedule", ["round_robin", "shuffled:5"])
def test_each_way_to_order_two_ranks_orders_their_accesses(edge, schedule):
    def program():
        mine, handle = meet(8)
        if handle.rank == 0:
            mine.fill_(5)
        EDGES[edge](handle)
        if handle.rank == 1:
            return handle.get_buffer(0, (8,), torch.float32).sum().item()
        return None

    assert lt.run(program, ranks=2, schedule=schedule).values == (None, 40.0)


@pytest.mark.parametrize("edge", ["broadcast", "reduce", "message", "store", "pad", "signal"])
def test_an_order_of_one_direction_is_no_order_of_the_other(edge):
    """What rank 1 has read may be overwritten by rank 0: it has not waited for rank 1."""

    def program():
        mine, handle = meet(8)
        if handle.rank == 1:
            handle.get_buffer(0, (8,), torch.float32).sum()
        EDGES[edge](handle)
        if handle.rank == 0:
            mine.fill_(5)

    error = fails(SymmetricRace, program)
    assert (error.first.op, error.second.op) == ("sum", "fill_")


def test_views_that_share_no_byte_do_not_race():
    def program():
        mine, handle = meet(12)
        handle.barrier()
        grid = handle.get_buffer(0, (4, 3), torch.float32)
        grid[:, handle.rank].fill_(handle.rank)  # columns: their ranges of bytes overlap
        handle.get_buffer(1, (12,), torch.float32).index_fill_(0, torch.arange(handle.rank, 12, 3), 1.0)
        handle.barrier()
        return mine.tolist()

    assert lt.run(program, ranks=3).values[0] == [0, 1, 2] * 4


@pytest.mark.parametrize("copy", [
    lambda x: x.narrow_copy(0, 0, 4), lambda x: torch.slice_copy(x, 0, 0, 4),
    lambda x: torch.select_copy(x.view(2, 4), 0, 0), lambda x: torch.diagonal_copy(x.view(4, 2)),
])  # fmt: skip
def test_a_copy_of_a_part_reads_no_more(copy):
    def program():
        mine, handle = meet(8, fill=False)
        mine[:4].fill_(1)
        handle.barrier()
        theirs = handle.get_buffer(0, (8,), torch.float32)
        total = copy(theirs).sum().item() if handle.rank else theirs[4:].fill_(2).sum().item()
        handle.barrier()
        return total

    first, second = lt.run(program, ranks=2).values
    assert first == 8.0
    assert second in (2.0, 4.0)


def test_strided_views_that_share_a_byte_race():
    def program():
        _mine, handle = meet(12)
        handle.barrier()
        grid = handle.get_buffer(0, (4, 3), torch.float32)
        grid[:, handle.rank].fill_(handle.rank) if handle.rank else grid[2, 1:].fill_(0)

    assert fails(SymmetricRace, program).common == (28, 36)


READS = {
    "sum": torch.sum, "item": lambda x: x[0].item(), "tolist": torch.Tensor.tolist, "numpy": torch.Tensor.numpy, "str": str,
    "operand": lambda x: torch.ones(2) + x, "out of another": lambda x: torch.add(x, 1, out=torch.empty(2)),
    "copy from": lambda x: torch.ones(2).copy_(x), "select": lambda x: x.index_select(0, torch.tensor([0])),
    "dlpack": torch.from_dlpack, "array": np.asarray, "copy of a part": lambda x: x.narrow_copy(0, 1, 1),
}  # fmt: skip
WRITES = {
    "fill": lambda x: x.fill_(1), "add": lambda x: x.add_(1), "out": lambda x: torch.add(x, 1, out=x),
    "copy": lambda x: x.copy_(torch.ones(2)), "item": lambda x: x.__setitem__(0, 3.0), "random": lambda x: x.uniform_(),
    "matmul": lambda x: torch.mm(torch.ones(1, 1), torch.ones(1, 2), out=x.view(1, 2)),
    "foreach": lambda x: torch._foreach_add_([x], 1.0), "data": lambda x: x.detach().data.zero_(),
    "collective": lambda x: dist.all_reduce(x, group=dist.new_group([dist.get_rank()], use_local_synchronization=True)),
}  # fmt: skip


def both_touch(first, second):
    def program():
        _, handle = meet(2)
        handle.barrier()
        (second if handle.rank else first)(handle.get_buffer(0, (2,), torch.float32))

    return lambda: lt.run(program, ranks=2, leftovers="ignore")


@pytest.mark.parametrize("read", READS)
def test_every_way_to_read_is_seen(read):
    both_touch(READS[read], READS["sum"])()
    for run in (both_touch(READS[read], WRITES["fill"]), both_touch(WRITES["fill"], READS[read])):
        with pytest.raises(SymmetricRace):
            run()


@pytest.mark.parametrize("write", WRITES)
def test_every_way_to_write_is_seen(write):
    for run in (both_touch(WRITES[write], READS["sum"]), both_touch(READS["sum"], WRITES[write])):
        with pytest.raises(SymmetricRace):
            run()


def test_a_read_of_what_no_rank_has_written_is_an_error_and_a_padded_copy_is_not():
    def program(count):
        mine, handle = meet(8, fill=False)
        mine[:4].fill_(1)
        handle.barrier()
        theirs = handle.get_buffer(1 - handle.rank, (8,), torch.float32)
        torch.empty(8).copy_(theirs)  # moves 16 bytes that nobody wrote along with the others
        return theirs[:count].sum().item()

    assert lt.run(program, 4, ranks=2).values == (4.0, 4.0)
    error = fails(ReadUnwritten, lambda: program(5))
    assert "4 of them were not written" in str(error)
    assert error.access.op == "sum"


@pytest.mark.parametrize("choose", [
    lambda x, mask: torch.where(mask, x, 0.0), lambda x, mask: x.masked_fill(~mask, 0.0), lambda x, mask: x[mask],
    lambda x, mask: x.clone().masked_fill_(~mask, 0.0), lambda x, mask: x.masked_select(mask),
])  # fmt: skip
def test_rows_that_a_mask_leaves_out_may_be_unwritten(choose):
    def program():
        mine, handle = meet(8, fill=False)
        mine[:4].fill_(1)
        handle.barrier()
        theirs = handle.get_buffer(1 - handle.rank, (8,), torch.float32)
        return choose(theirs, torch.arange(8) < 4).sum().item()

    assert lt.run(program, ranks=2).values == (4.0, 4.0)
    fails(ReadUnwritten, lambda: torch.where(torch.tensor(True), meet(8, fill=False)[0], 0.0))


def test_a_read_before_the_write_is_a_race_and_not_a_read_of_unwritten_memory():
    def program():
        mine, handle = meet(8, fill=False)
        if handle.rank == 1:  # it arrives last at the rendezvous, and goes on
            handle.get_buffer(0, (8,), torch.float32).clone()
        else:
            mine.fill_(1)

    assert fails(SymmetricRace, program).second.op == "fill_"


def test_a_wrong_value_from_unwritten_memory_is_named_before_the_assertion_that_it_breaks():
    def program():
        mine, handle = meet(8, fill=False)
        handle.barrier()
        assert mine.sum() == 8

    assert isinstance(fails(ReadUnwritten, program), ReadUnwritten)


# What each of two streams does, given handles of two buffers and of a buffer of another group, and the first buffer.
STREAMS = {
    "barriers": (lambda one, *_: one.barrier(), lambda one, *_: one.barrier(channel=1)),
    "barriers of two buffers": (lambda one, *_: one.barrier(), lambda _, two, *__: two.barrier()),
    "signals": (lambda one, *_: exchange(one, 0), lambda one, *_: exchange(one, 1)),
    "ops": (lambda _, __, ___, mine: one_shot(mine), lambda _, __, ___, mine: one_shot(mine)),
    "groups": (lambda one, *_: one.barrier(), lambda _, __, other, ___: other.barrier()),
}


def exchange(handle, channel):
    handle.put_signal(1 - handle.rank, channel)
    handle.wait_signal(1 - handle.rank, channel)


def one_shot(mine):
    torch.ops.symm_mem.one_shot_all_reduce(mine, "sum", dist.group.WORLD.group_name)


@pytest.mark.few(12)
@pytest.mark.parametrize("backend", ["CUDA", "NVSHMEM", "NCCL"])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("calls", STREAMS)
def test_since_215_the_calls_of_a_group_are_ordered_whatever_their_stream(calls, ordered, backend, monkeypatch):
    def program():
        symm_mem.set_backend(backend)
        mine, handle = meet(8)
        parts = (handle, meet(8)[1], meet(8, group=dist.new_group([0, 1]))[1], mine)
        first, second = torch.cuda.Stream(), torch.cuda.Stream()
        with first:
            mine.fill_(1)
            STREAMS[calls][0](*parts)
        with second:
            STREAMS[calls][1](*parts)
            mine.fill_(2)
        torch.cuda.synchronize()
        return mine[0].item()

    monkeypatch.setattr(signals, "STREAMS_ORDERED", ordered)
    kernels_wait = backend == "CUDA" or (backend == "NCCL" and calls != "signals")
    if ordered and kernels_wait and calls != "groups":
        assert lt.run(program, ranks=2, leftovers="ignore").values == (2.0, 2.0)
    else:
        error = fails(SymmetricRace, program, leftovers="ignore")
        assert {error.first.stream, error.second.stream} != {"the default stream"}


def test_a_signal_that_no_rank_waits_for_is_an_error():
    def program():
        _, handle = meet()
        if handle.rank == 0:
            handle.put_signal(1, channel=3)

    error = fails(SignalNotConsumed, program)
    assert error.signals[0][:3] == (0, 1, 3)


def test_a_second_signal_waits_until_the_first_is_consumed():
    def program():
        mine, handle = meet(1)
        seen = []
        for step in range(3):
            if handle.rank == 0:
                mine.fill_(step)
                handle.put_signal(1)
                handle.wait_signal(1)
            else:
                handle.wait_signal(0)
                seen.append(handle.get_buffer(0, (1,), torch.float32).item())
                handle.put_signal(0)
        return seen

    for seed in range(5):
        assert lt.run(program, ranks=2, schedule=f"shuffled:{seed}").values[1] == [0, 1, 2]


def test_a_signal_put_twice_and_waited_for_once_is_a_reused_pad():
    def program():
        _, handle = meet()
        if handle.rank == 0:
            handle.put_signal(1)
            handle.put_signal(1)
            handle.put_signal(1)
        else:
            handle.wait_signal(0)

    error = fails(PadReused, program)
    assert (error.put[0], error.taken[0], error.channel) == (0, 0, 0)


def test_a_barrier_that_takes_a_signal_for_its_own_is_a_reused_pad():
    def program():
        _, handle = meet()
        if handle.rank == 0:
            handle.put_signal(1)
            handle.barrier()
        else:
            handle.barrier()
            handle.wait_signal(0)

    error = fails(PadReused, program)
    assert (error.put[1], error.taken[1]) == ("put_signal", "barrier")


def test_a_signal_and_a_barrier_may_share_a_channel_in_one_order():
    def program():
        _, handle = meet()
        handle.put_signal(1) if handle.rank == 0 else handle.wait_signal(0)
        handle.barrier()
        return handle.rank

    for seed in range(5):
        assert lt.run(program, ranks=2, schedule=f"shuffled:{seed}").values == (0, 1)


def test_barriers_of_unlike_channels_are_named():
    def program():
        meet()[1].barrier(channel=dist.get_rank() // 2)

    error = fails(ChannelsDiffer, program, 3)
    assert error.channels == {0: 0, 1: 0, 2: 1}
    assert "channel=1 on rank 2" in str(error)


def test_ranks_that_wait_for_each_others_signals_are_a_deadlock_with_its_graph():
    def program():
        _, handle = meet()
        other = 1 - handle.rank
        handle.wait_signal(other)
        handle.put_signal(other)

    error = fails(Deadlock, program)
    assert error.circle == (0, 1)
    assert "rank 0 waits for rank 1 in symm_mem.wait_signal(channel=0) #0 from 1" in str(error)
    assert "put its signal before it waits" in str(error)


def test_a_rank_that_returns_without_its_barrier_is_named():
    def program():
        _, handle = meet()
        if handle.rank == 0:
            handle.barrier()

    assert "rank 1 returned" in str(fails(EarlyReturn, program))


@pytest.mark.slow
def test_a_loop_on_a_pad_that_no_rank_sets_is_a_deadlock():
    def program():
        _, handle = meet()
        while handle.get_signal_pad(handle.rank)[0].item() == 0:
            pass

    assert "a loop that reads a signal pad" in str(fails(Deadlock, program))


def test_a_time_limit_passes_where_no_signal_comes():
    def program():
        _, handle = meet()
        if handle.rank == 0:
            with pytest.raises(CollectiveTimeout, match="3 ms"):
                handle.wait_signal(1, timeout_ms=3)

    lt.run(program, ranks=2)


def test_without_detection_races_are_not_reported():
    assert lt.run(write_read_race, ranks=2, races=False).values == (None, None)


def test_workspaces_are_of_each_rank_and_grow():
    def program():
        with pytest.warns(FutureWarning):
            symm_mem.enable_symm_mem_for_group(dist.group.WORLD.group_name)
        assert symm_mem.is_symm_mem_enabled_for_group(dist.group.WORLD.group_name)
        return [symm_mem.get_symm_mem_workspace(dist.group.WORLD.group_name, n).buffer_size for n in (16, 8, 32)]

    assert lt.run(program, ranks=2).values == ([16, 16, 32],) * 2
    assert not symm_mem._group_name_to_workspace_tensor


def test_the_backend_is_each_ranks_own_until_it_has_memory():
    def program():
        symm_mem.set_backend("NVSHMEM")
        meet()
        with pytest.raises(RuntimeError, match="cannot be changed"):
            symm_mem.set_backend("NCCL")
        with pytest.raises(RuntimeError, match="unknown backend"):
            symm_mem.set_backend("MPI")
        return symm_mem.get_backend("cpu"), symm_mem.is_nvshmem_available()

    assert lt.run(program, ranks=2).values == (("NVSHMEM", symm_mem.is_nvshmem_available()),) * 2


def test_a_rank_leaves_no_mode_on_its_thread():
    """torch frees a thread's mode stack after the thread has ended, which aborts the process where Python is gone."""
    ends = []
    end = SymmetricWatch.end

    def look(watch):
        end(watch)
        ends.append((_get_current_dispatch_mode_stack(), _get_current_function_mode_stack()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SymmetricWatch, "end", look)
        lt.run(meet, ranks=2)
        fails(SymmetricRace, write_read_race)
    assert ends == [([], [])] * 4


def test_an_allocation_with_a_number_has_the_memory_of_the_one_before():
    def program():
        def allocate(count=4):
            return CPP.empty_strided_p2p((count,), (1,), torch.float32, torch.device("cpu"), alloc_id=7)

        first = allocate().fill_(3.0)
        with pytest.raises(RuntimeError, match=r"alloc_id: 7 on rank \d: the tensor before is still active"):
            allocate()
        where = first.data_ptr()
        del first
        with pytest.raises(RuntimeError, match="20 bytes, and 16 bytes before"):
            allocate(5)
        again = allocate()
        return again.data_ptr() == where, again.tolist()

    assert lt.run(program, ranks=2).values == ((True, [3.0] * 4),) * 2
