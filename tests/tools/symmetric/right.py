"""Forty programs without a fault; most check their own numbers."""

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch.distributed.device_mesh import init_device_mesh

from tests.device import MESH
from tests.tools.symmetric.labels import buffer, flag, group, name, of, right, until

OPS = torch.ops.symm_mem


def total(world):
    return world * (world - 1) / 2


@right()
def pull_all_gather():
    _, h = buffer(3, fill=dist.get_rank())
    h.barrier()
    out = torch.cat([of(h, peer, 3) for peer in range(h.world_size)])
    h.barrier()
    assert out.tolist() == [float(r) for r in range(h.world_size) for _ in range(3)]


@right()
def push_all_gather():
    mine, h = buffer(4)
    for peer in range(h.world_size):
        of(h, peer, 4)[h.rank].fill_(h.rank)
    h.barrier()
    assert mine.tolist() == [0, 1, 2, 3]


@right()
def pull_all_reduce():
    _, h = buffer(8, fill=dist.get_rank())
    h.barrier()
    out = sum(of(h, peer, 8).clone() for peer in range(h.world_size))
    h.barrier()
    assert (out == total(h.world_size)).all()


@right()
def ring_all_reduce_by_signals():
    """Each rank adds its value to what comes from the left and passes it on; each step has a slot of its own."""
    slots, h = buffer(h_size := dist.get_world_size())
    value = torch.tensor([float(h.rank)])
    for step in range(h_size - 1):
        of(h, h.rank + 1, h_size)[step : step + 1].copy_(value)
        h.put_signal((h.rank + 1) % h_size)
        h.wait_signal((h.rank - 1) % h_size)
        value = slots[step : step + 1] + h.rank
    assert value.item() == total(h_size)


@right(8)
def tree_all_reduce():
    mine, h = buffer(2, fill=dist.get_rank())
    step = 1
    while step < h.world_size:
        if h.rank % (2 * step) == 0:
            h.wait_signal(h.rank + step)
            mine += of(h, h.rank + step, 2)
        elif h.rank % (2 * step) == step:
            h.put_signal(h.rank - step)
            break
        step *= 2
    dist.barrier()
    assert (of(h, 0, 2) == total(h.world_size)).all()


@right()
def two_shot_all_reduce_by_hand():
    mine, h = buffer(8, fill=dist.get_rank())
    h.barrier()
    part = slice(2 * h.rank, 2 * h.rank + 2)
    mine_reduced = sum(of(h, peer, 8)[part] for peer in range(h.world_size))
    h.barrier()
    for peer in range(h.world_size):
        of(h, peer, 8)[part].copy_(mine_reduced)
    h.barrier()
    assert (mine == total(4)).all()


@right()
def reduce_scatter_by_pulling():
    _, h = buffer(4, 2, fill=dist.get_rank())
    h.barrier()
    out = sum(of(h, peer, 4, 2)[h.rank] for peer in range(h.world_size))
    h.barrier()
    assert (out == total(4)).all()


@right()
def all_gather_matmul_by_chunks():
    x, weight = torch.ones(2, 3), torch.ones(3, 2)
    shard, h = buffer(2, 3)
    shard.copy_(x * h.rank)
    h.barrier()
    out = torch.empty(8, 2)
    for step in range(h.world_size):
        peer = (h.rank + step) % h.world_size
        out[2 * peer : 2 * peer + 2] = of(h, peer, 2, 3) @ weight
    h.barrier()
    assert out[:, 0].tolist() == [0, 0, 3, 3, 6, 6, 9, 9]


@right(2)
def double_buffer_with_two_barriers():
    mine, h = buffer(2, 4)
    for step in range(6):
        mine[step % 2].fill_(step)
        h.barrier()
        assert (of(h, h.rank + 1, 2, 4)[step % 2] == step).all()
    h.barrier()


@right(2)
def double_buffer_by_signals():
    mine, h = buffer(2, 4)
    for step in range(6):
        if h.rank == 0:
            if step >= 2:
                h.wait_signal(1, channel=2 + step % 2)  # the consumer has read this half
            mine[step % 2].fill_(step)
            h.put_signal(1, channel=step % 2)
        else:
            h.wait_signal(0, channel=step % 2)
            assert (of(h, 0, 2, 4)[step % 2] == step).all()
            if step < 4:
                h.put_signal(0, channel=2 + step % 2)


@right(2)
def producer_and_consumer():
    mine, h = buffer(4)
    for step in range(5):
        if h.rank == 0:
            of(h, 1, 4).fill_(step)
            h.put_signal(1)
            h.wait_signal(1)
        else:
            h.wait_signal(0)
            assert (mine == step).all()
            h.put_signal(0)


@right(3)
def pipeline_of_three_stages():
    mine, h = buffer(4)
    for step in range(4):
        if h.rank > 0:
            h.wait_signal(h.rank - 1, channel=1)
            value = mine.clone()
            h.put_signal(h.rank - 1, channel=2)
        else:
            value = torch.full((4,), float(step))
        if h.rank < 2:
            if step:
                h.wait_signal(h.rank + 1, channel=2)
            of(h, h.rank + 1, 4).copy_(value + 1)
            h.put_signal(h.rank + 1, channel=1)
        else:
            assert (value == step + 2).all()
    if h.rank < 2:
        h.wait_signal(h.rank + 1, channel=2)


@right(2)
def flags_with_epochs():
    mine, h = buffer(4)
    for epoch in range(1, 6):
        if h.rank == 0:
            until(flag(h, 0), epoch - 1)  # the reader is done with the epoch before
            of(h, 1, 4).fill_(epoch)
            flag(h, 1).fill_(epoch)
        else:
            until(flag(h, 1), epoch)
            assert (mine == epoch).all()
            flag(h, 0).fill_(epoch)


@right()
def flags_of_all_peers():
    mine, h = buffer(4)
    for peer in range(4):
        of(h, peer, 4)[h.rank].fill_(h.rank)
        flag(h, peer, h.rank).fill_(1)
    for peer in range(4):
        until(flag(h, h.rank, peer), 1)
    assert mine.tolist() == [0, 1, 2, 3]


@right(2)
def flag_written_as_a_word():
    mine, h = buffer(4)
    if h.rank == 0:
        of(h, 1, 4).fill_(9)
        symm_mem._SymmetricMemory.stream_write_value32(h.get_signal_pad(1), 2100, 5)
    else:
        while h.get_signal_pad(1)[2100].item() != 5:
            pass
        assert (mine == 9).all()


@right()
def experts_by_push():
    """Each rank sends rows to the expert of each rank, at an offset of its own."""
    mine, h = buffer(4, 2)
    for expert in range(4):
        of(h, expert, 4, 2)[h.rank] = 10.0 * h.rank + expert
    h.barrier()
    assert mine[:, 0].tolist() == [10.0 * r + h.rank for r in range(4)]


@right()
def experts_by_index():
    """Interleaved rows of one buffer, written by index: no two ranks write the same row."""
    _, h = buffer(12, 2)
    of(h, 0, 12, 2).index_copy_(0, torch.arange(h.rank, 12, 4), torch.full((3, 2), float(h.rank)))
    h.barrier()
    assert of(h, 0, 12, 2)[:, 0].tolist() == [0, 1, 2, 3] * 3


@right()
def experts_by_all_to_all_vdev():
    x, _ = buffer(8, 2, fill=dist.get_rank())
    out, _ = buffer(8, 2, fill=-1)
    splits, _ = buffer(4, dtype=torch.int64, fill=2)
    table, _ = buffer(2, 4, dtype=torch.int64, fill=0)
    OPS.all_to_all_vdev(x, out, splits, table, name())
    assert out[:, 0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


@right()
def columns_of_one_buffer():
    _, h = buffer(3, 4)
    of(h, 0, 3, 4)[:, h.rank].fill_(h.rank)
    h.barrier()
    assert of(h, 0, 3, 4)[2].tolist() == [0, 1, 2, 3]


@right(2)
def every_other_byte():
    _, h = buffer(16, dtype=torch.uint8)
    of(h, 0, 16, dtype=torch.uint8)[h.rank :: 2].fill_(h.rank)
    h.barrier()
    assert of(h, 1 - 1, 16, dtype=torch.uint8).tolist() == [0, 1] * 8


@right(2)
def order_by_a_collective():
    mine, h = buffer(4)
    mine.fill_(h.rank)
    dist.all_reduce(torch.ones(1))
    assert (of(h, h.rank + 1, 4) == 1 - h.rank).all()
    dist.all_reduce(torch.ones(1))
    mine.zero_()


@right(2)
def order_by_a_message():
    mine, h = buffer(4)
    if h.rank == 0:
        mine.fill_(3)
        dist.send(torch.ones(1), 1)
        dist.recv(torch.ones(1), 1)
        mine.fill_(4)
    else:
        dist.recv(torch.ones(1), 0)
        assert (of(h, 0, 4) == 3).all()
        dist.send(torch.ones(1), 0)


@right(3)
def order_by_a_chain_of_messages():
    mine, h = buffer(4)
    if h.rank == 0:
        mine.fill_(3)
        dist.send(torch.ones(1), 1)
    elif h.rank == 1:
        dist.recv(torch.ones(1), 0)
        dist.send(torch.ones(1), 2)
    else:
        dist.recv(torch.ones(1), 1)
        assert (of(h, 0, 4) == 3).all()


@right(2)
def order_by_a_store():
    mine, h = buffer(4)
    store = dist.distributed_c10d._get_default_store()
    if h.rank == 0:
        mine.fill_(3)
        store.set("ready", "1")
    else:
        store.wait(["ready"])
        assert (of(h, 0, 4) == 3).all()


@right()
def order_by_a_broadcast_of_the_writer():
    mine, h = buffer(4)
    if h.rank == 0:
        mine.fill_(7)
    dist.broadcast(torch.ones(1), 0)
    assert (of(h, 0, 4) == 7).all()


@right()
def subgroups_by_mesh_axis():
    mesh = init_device_mesh(MESH, (2, 2), mesh_dim_names=("dp", "tp"))
    mine = symm_mem.empty(4, device=MESH).fill_(dist.get_rank())
    for axis in ("dp", "tp"):
        h = symm_mem.rendezvous(mine, mesh.get_group(axis))
        h.barrier()
        peer = h.get_buffer(1 - h.rank, (4,), torch.float32)
        assert peer[0] == dist.get_rank() ^ (1 if axis == "tp" else 2)
        h.barrier()
    mine.zero_()


@right(2)
def channels_for_two_buffers():
    a, ha = buffer(4)
    b, hb = buffer(4)
    for step in range(3):
        a.fill_(step)
        ha.barrier(channel=1)
        b.copy_(of(ha, ha.rank + 1, 4))
        hb.barrier(channel=2)
        assert (of(hb, hb.rank + 1, 4) == step).all()
        ha.barrier(channel=1)


@right(2)
def a_side_stream_that_is_waited_for():
    mine, h = buffer(4)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        mine.fill_(5)
    torch.cuda.current_stream().wait_stream(side)
    h.barrier()
    assert (of(h, h.rank + 1, 4) == 5).all()
    h.barrier()


@right(2)
def an_event_between_streams():
    mine, h = buffer(4)
    side, event = torch.cuda.Stream(), torch.cuda.Event()
    mine.fill_(5)
    event.record()
    with side:
        event.wait()
        h.barrier(channel=3)
        copy = of(h, h.rank + 1, 4).clone()
        h.barrier(channel=3)
    torch.cuda.synchronize()
    mine.zero_()
    assert (copy == 5).all()


@right(4)
def alternating_streams_of_a_pipeline():
    mine, h = buffer(4, fill=dist.get_rank())
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()
    h.barrier()
    side.wait_stream(main)
    parts = []
    for step in range(1, 4):
        with side if step % 2 else main:
            parts.append(of(h, h.rank + step, 4).clone())
    main.wait_stream(side)
    h.barrier()
    mine.fill_(-1)
    assert [int(p[0]) for p in parts] == [(h.rank + s) % 4 for s in range(1, 4)]


@right()
def fused_all_gather_matmul_twice():
    x, weight = torch.full((2, 3), float(dist.get_rank())), torch.ones(3, 2)
    for _ in range(2):
        whole, (product,) = OPS.fused_all_gather_matmul(x, [weight], 0, name())
    assert product[:, 0].tolist() == [0, 0, 3, 3, 6, 6, 9, 9]
    assert whole.shape == (8, 3)


@right()
def fused_matmul_reduce_scatter_and_gather():
    x, weight = torch.ones(8, 3), torch.ones(3, 4)
    part = OPS.fused_matmul_reduce_scatter(x, weight, "sum", 0, name())
    whole, _ = OPS.fused_all_gather_matmul(part, [torch.ones(4, 4)], 0, name())
    assert (whole == 12).all()


@right()
def one_shot_and_two_shot():
    mine, h = buffer(8, fill=dist.get_rank())
    first = OPS.one_shot_all_reduce(mine, "sum", name())
    OPS.two_shot_all_reduce_(mine, "sum", name())
    assert (first == mine).all()
    h.barrier()


@right()
def low_contention_pair():
    x = torch.full((4, 2), float(dist.get_rank()))
    wait = torch.ops._c10d_functional.wait_tensor
    whole = wait(OPS._low_contention_all_gather(x, name()))
    part = wait(OPS._low_contention_reduce_scatter(whole, "avg", name()))
    assert torch.equal(part, x)
    assert x.shape == (4, 2)


@right(2)
def put_with_signal_and_wait():
    x, h = buffer(4, fill=dist.get_rank() + 1)
    pad = h.get_signal_pad(h.rank, (1,), torch.int64, 1000)
    h.barrier()
    if h.rank == 0:
        OPS.nvshmem_put_with_signal(x, pad, 3, 1)
    else:
        OPS.nvshmem_wait_for_signal(pad, 3, 0)
        assert (x == 1).all()


@right(2)
def a_padded_buffer_of_which_a_part_is_used():
    mine, h = buffer(16)
    mine[:6].fill_(h.rank)
    h.barrier()
    whole = of(h, h.rank + 1, 16).clone()
    h.barrier()
    assert (whole[:6] == 1 - h.rank).all()


@right(2)
def buffers_of_several_dtypes():
    for dtype in (torch.bfloat16, torch.float64, torch.int32, torch.bool):
        mine, h = buffer(4, dtype=dtype)
        mine.copy_(torch.full((4,), h.rank))
        h.barrier()
        assert of(h, h.rank + 1, 4, dtype=dtype).sum().item() == (4 if h.rank == 0 else 0)
        h.barrier()


@right(2)
def bytes_seen_as_another_dtype():
    mine, h = buffer(8, dtype=torch.int32)
    mine[:4].fill_(1)
    mine[4:].view(torch.float32).fill_(1.5)
    h.barrier()
    assert of(h, h.rank + 1, 4, at=4).tolist() == [1.5] * 4
    h.barrier()


@right()
def a_barrier_made_of_a_collective_op():
    mine, h = buffer(4, fill=dist.get_rank())
    h.barrier()
    dist.all_gather(list(torch.empty(4, 4)), mine)
    peer = of(h, h.rank + 1, 4).clone()
    dist.barrier(group())
    mine.copy_(peer)
    assert mine[0] == (h.rank + 1) % 4


@right(3)
def readers_of_one_buffer_and_one_writer():
    mine, h = buffer(4)
    for step in range(3):
        if h.rank == 0:
            mine.fill_(step)
            for peer in (1, 2):
                h.put_signal(peer)
            for peer in (1, 2):
                h.wait_signal(peer)
        else:
            h.wait_signal(0)
            assert (of(h, 0, 4) == step).all()
            h.put_signal(0)


@right(4)
def a_counter_in_a_pad():
    """Each rank adds to one word when it has written its slot; the last value stands for all of them."""
    mine, h = buffer(4)
    of(h, 0, 4)[h.rank].fill_(h.rank)
    flag(h, 0).add_(1)
    if h.rank == 0:
        until(flag(h, 0), 4)
        assert mine.tolist() == [0, 1, 2, 3]
