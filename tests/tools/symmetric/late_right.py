"""Ten right programs that were written without a look at the detector or at the other programs: see `late_faulty`."""

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch.distributed.device_mesh import init_device_mesh

from tests.device import MESH
from tests.tools.symmetric.labels import of, right

UP, DOWN, ACK = 0, 1, 2  # channels
SLOTS, CAPACITY, WIDTH = 2, 12, 2
FILLED, FREED = 2000, 2001  # words of the signal pads that no barrier uses


@right()
def a_ring_of_slots_in_two_rounds():
    count, world = 4, dist.get_world_size()
    inbox = symm_mem.empty(2 * (world - 1), count, device=MESH)
    handle = symm_mem.rendezvous(inbox, dist.group.WORLD)
    rank = handle.rank
    left, right = (rank - 1) % world, (rank + 1) % world
    theirs = handle.get_buffer(right, inbox.shape, inbox.dtype)
    chunks = [torch.full((count,), float((rank + 1) * (c + 1))) for c in range(world)]
    for step in range(world - 1):
        theirs[step].copy_(chunks[(rank - step) % world])
        handle.put_signal(right)
        handle.wait_signal(left)
        chunks[(rank - step - 1) % world] += inbox[step]
    for step in range(world - 1):
        slot = world - 1 + step
        theirs[slot].copy_(chunks[(rank + 1 - step) % world])
        handle.put_signal(right)
        handle.wait_signal(left)
        chunks[(rank - step) % world] = inbox[slot].clone()
    whole = torch.stack(chunks)
    assert torch.equal(whole, torch.arange(1.0, world + 1)[:, None].expand(world, count) * sum(range(1, world + 1)))
    return whole.sum().item()


@right()
def a_binomial_tree_that_only_pulls():
    box = symm_mem.empty(4, device=MESH)
    handle = symm_mem.rendezvous(box, dist.group.WORLD)
    rank, world = handle.rank, handle.world_size
    parent = rank & (rank - 1) if rank else None
    children = [c for c in range(1, world) if c & (c - 1) == rank]
    totals = []
    for turn in range(3):
        box.fill_(float(rank + 1 + turn))
        for child in children:
            handle.wait_signal(child, UP)
            box.add_(of(handle, child, 4))
        if parent is not None:
            handle.put_signal(parent, UP)
            handle.wait_signal(parent, DOWN)
            box.copy_(of(handle, parent, 4))
            handle.put_signal(parent, ACK)
        for child in reversed(children):
            handle.put_signal(child, DOWN)
        totals.append(box.sum().item())
        for child in children:
            handle.wait_signal(child, ACK)
        assert totals[-1] == 4 * sum(r + 1 + turn for r in range(world))
    return totals


@right(3)
def an_all_gather_with_one_barrier_a_step():
    slots = symm_mem.empty(SLOTS, 4, device=MESH)
    handle = symm_mem.rendezvous(slots, dist.group.WORLD)
    views = [handle.get_buffer(p, (SLOTS, 4), torch.float32) for p in range(handle.world_size)]
    sums = []
    for step in range(5):
        slots[step % SLOTS] = float(step + handle.rank)
        handle.barrier(channel=step % 3)
        gathered = torch.cat([view[step % SLOTS] for view in views])
        sums.append(gathered.sum().item())
        assert sums[-1] == 4 * sum(step + r for r in range(handle.world_size))
    return sums


@right(3)
def interleaved_columns_indices_and_transposed_views():
    rows, columns = 6, 12
    board = symm_mem.empty(rows, columns, device=MESH)
    handle = symm_mem.rendezvous(board, dist.group.WORLD)
    rank, world = handle.rank, handle.world_size
    board.fill_(1.0)
    handle.barrier()

    of_0 = handle.get_buffer(0, (rows, columns), torch.float32)
    of_0[0::2, rank::world] = float(rank + 2)
    if rank == 0:
        assert board[1::2].sum().item() == rows // 2 * columns

    of_1 = handle.get_buffer(1, (rows * columns,), torch.float32)
    mine = torch.arange(rank, rows * columns, world)
    of_1.index_copy_(0, mine, torch.full((len(mine),), 10.0 * rank))

    transposed = handle.get_buffer(2, (rows, columns), torch.float32).t()
    transposed[rank * columns // world : (rank + 1) * columns // world].mul_(rank + 3)
    handle.barrier()

    total = board.sum().item()
    each = rows * columns // world
    assert total == [rows // 2 * columns + each // 2 * (2 + 3 + 4), each * (0 + 10 + 20), each * (3 + 4 + 5)][rank]
    return total


def all_to_all_v(handle, inbox, tokens, counts):
    """`tokens` are sorted by destination, `counts[d]` of them for rank d. The receiver's rows are sorted by source."""
    rank, world = handle.rank, handle.world_size
    table = [torch.empty_like(counts) for _ in range(world)]
    dist.all_gather(table, counts)
    table = torch.stack(table)  # [source, destination]
    begin = 0
    for destination in range(world):
        n = int(table[rank, destination])
        first = int(table[:rank, destination].sum())
        if n:
            window = handle.get_buffer(destination, (n, WIDTH), torch.float32, first * WIDTH)
            window.copy_(tokens[begin : begin + n])
        begin += n
    handle.barrier()
    return inbox[: int(table[:, rank].sum())].clone(), table


@right(3)
def an_all_to_all_of_unlike_sizes():
    inbox = symm_mem.empty(CAPACITY, WIDTH, device=MESH)  # what no rank has sent stays unwritten
    handle = symm_mem.rendezvous(inbox, dist.group.WORLD)
    rank, world = handle.rank, handle.world_size
    results = []
    for turn in range(2):
        counts = torch.tensor([(rank + 2 * d + turn) % 4 for d in range(world)])
        tokens = torch.repeat_interleave(torch.arange(world), counts)[:, None].expand(-1, WIDTH) * 10.0 + rank
        got, table = all_to_all_v(handle, inbox, tokens, counts)
        expected = torch.repeat_interleave(torch.arange(world), table[:, rank])[:, None].expand(-1, WIDTH) + 10.0 * rank
        assert torch.equal(got, expected)
        results.append(got.sum().item())
        handle.barrier()  # all have read before the next turn writes
    return results


@right()
def order_by_collectives_and_messages_alone():
    data = symm_mem.empty(8, device=MESH)
    handle = symm_mem.rendezvous(data, dist.group.WORLD)
    rank, world = handle.rank, handle.world_size
    data.zero_()
    dist.all_reduce(torch.zeros(1))  # all have zeroed
    seen = []
    for epoch in range(3):
        if rank == 0:
            for peer in range(1, world):
                handle.get_buffer(peer, (8,), torch.float32).fill_(epoch + 1.0)
        dist.broadcast(torch.tensor([float(epoch)]), src=0)  # the root's writes are before this
        if rank:
            seen.append(data.sum().item())
        dist.reduce(torch.ones(1), dst=0)  # the reads are before the root's next writes
    token = torch.zeros(1)
    if rank == 2:
        dist.send(token, 3)  # it has read: rank 3 may write
        dist.recv(token, 3)
        seen.append(data.sum().item())
    elif rank == 3:
        dist.recv(token, 2)
        handle.get_buffer(2, (8,), torch.float32).add_(10.0)
        dist.send(token, 2)
    assert seen == ([8.0, 16.0, 24.0] if rank else []) + ([104.0] if rank == 2 else [])
    return seen


@right()
def one_tensor_in_two_groups_with_channels():
    mesh = init_device_mesh(MESH, (2, 2), mesh_dim_names=("dp", "tp"))
    data = symm_mem.empty(4, device=MESH)
    tp = symm_mem.rendezvous(data, mesh.get_group("tp"))
    dp = symm_mem.rendezvous(data, mesh.get_group("dp"))
    data.fill_(2.0 ** dist.get_rank())

    tp.barrier(channel=0)
    other = tp.get_buffer(1 - tp.rank, (4,), torch.float32).clone()
    tp.barrier(channel=0)  # the peer has read, before this rank writes
    data.add_(other)

    dp.barrier(channel=1)
    total = data + dp.get_buffer(1 - dp.rank, (4,), torch.float32)
    dp.barrier(channel=1)
    data.copy_(total)
    assert data.tolist() == [15.0] * 4
    return data.sum().item()


def drawn(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """The same numbers on every default device."""
    return torch.randn(*shape, generator=generator, device=generator.device).to(torch.get_default_device())


@right()
def a_parallel_mlp_of_fused_ops():
    name = dist.group.WORLD.group_name
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(1)
    results = []
    for _ in range(2):
        x, up, down = (drawn(generator, *shape) for shape in ((8, 4), (4, 8), (8, 4)))
        shard = x.chunk(world)[rank].contiguous()
        whole, (hidden,) = torch.ops.symm_mem.fused_all_gather_matmul(
            shard, [up.chunk(world, 1)[rank].contiguous()], 0, name
        )
        out = torch.ops.symm_mem.fused_matmul_reduce_scatter(
            hidden.relu(), down.chunk(world, 0)[rank].contiguous(), "sum", 0, name
        )
        torch.testing.assert_close(whole, x)
        torch.testing.assert_close(out, ((x @ up).relu() @ down).chunk(world)[rank])
        results.append(out.shape)
    return results


@right(2)
def a_queue_with_credits():
    items = 5
    queue = symm_mem.empty(SLOTS, 4, device=MESH)  # that of rank 1 is used
    handle = symm_mem.rendezvous(queue, dist.group.WORLD)
    slots = handle.get_buffer(1, (SLOTS, 4), torch.float32)
    filled = handle.get_signal_pad(1, (1,), torch.int32, FILLED)
    freed = handle.get_signal_pad(0, (1,), torch.int32, FREED)
    if handle.rank == 0:
        for item in range(1, items + 1):
            while freed.item() < item - SLOTS:
                pass
            slots[item % SLOTS].fill_(float(item))
            filled.fill_(item)
        return None
    sums = []
    for item in range(1, items + 1):
        while filled.item() < item:
            pass
        sums.append(slots[item % SLOTS].sum().item())
        freed.fill_(item)
    assert sums == [4.0 * item for item in range(1, items + 1)]
    return sums


@right(3)
def pulls_in_a_side_stream_with_events():
    shard = symm_mem.empty(4, device=MESH)
    handle = symm_mem.rendezvous(shard, dist.group.WORLD)
    rank, world = handle.rank, handle.world_size
    side = torch.cuda.Stream()
    totals = []
    for step in range(3):
        shard.fill_(float(rank + 1 + step))
        handle.barrier()
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        pulled = []
        with torch.cuda.stream(side):
            for turn in range(1, world):
                staging = torch.empty(4)
                staging.copy_(handle.get_buffer((rank + turn) % world, (4,), torch.float32))
                event = torch.cuda.Event()
                event.record()
                pulled.append((staging, event))
        total = shard.clone()
        for staging, event in pulled:
            main.wait_event(event)
            total += staging
        handle.barrier()
        totals.append(total.sum().item())
        assert totals[-1] == 4 * sum(r + 1 + step for r in range(world))
    return totals
