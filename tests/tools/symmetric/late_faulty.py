"""Ten faulty programs that were written without a look at the detector or at the other programs, for a blind score.

They and the ten right ones of `late_right` were scored once, as they came: all ten were found for the right reason, nine
under round robin and the last in the first shuffled order, each with its lines; no right one raised an alarm in 18 orders.
"""

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch.distributed.device_mesh import init_device_mesh

from tests.device import MESH
from tests.tools.symmetric.labels import faulty

RACE = "SymmetricRace"
FLAG = 2000  # a word of the signal pad that no barrier uses


@faulty("no order before a reuse", RACE, ranks=3)
def gradients_zeroed_after_the_rendezvous():
    grads = symm_mem.empty(8, device=MESH)
    handle = symm_mem.rendezvous(grads, dist.group.WORLD)
    rank, world = handle.rank, handle.world_size
    grads.zero_()  # here
    right = (rank + 1) % world
    own = torch.full((4,), float(rank + 1), device=MESH)
    handle.get_buffer(right, (4,), torch.float32, 4).copy_(own)  # here
    handle.barrier()
    total = grads[4:] + own
    handle.barrier()
    return total.sum().item()


def exchange(handle, mine):
    peer = handle.get_buffer(1 - handle.rank, mine.shape, mine.dtype)
    peer.copy_(mine)


@faulty("wrong barrier", RACE, ranks=4)
def a_barrier_of_the_other_axis_of_the_mesh():
    def send(handle, mine):
        peer = handle.get_buffer(1 - handle.rank, mine.shape, mine.dtype)
        peer.copy_(mine)  # here

    mesh = init_device_mesh(MESH, (2, 2), mesh_dim_names=("dp", "tp"))
    partial = symm_mem.empty(4, 4, device=MESH).zero_()
    replica = symm_mem.empty(4, 4, device=MESH)
    tp = symm_mem.rendezvous(partial, mesh.get_group("tp"))
    dp = symm_mem.rendezvous(replica, mesh.get_group("dp"))

    tp.barrier()
    activation = torch.ones(4, 4, device=MESH) * (dist.get_rank() + 1)
    send(tp, activation)
    dp.barrier()
    activation = activation + partial  # here
    tp.barrier()

    gradient = activation * 2
    exchange(dp, gradient)
    dp.barrier()
    gradient = (gradient + replica) / 2
    dp.barrier()
    return gradient.sum().item()


@faulty("no order before a reuse", RACE, ranks=3)
def slots_for_one_step_less_than_are_ahead():
    count, ahead = 2, 2
    slots = symm_mem.empty(count, 4, device=MESH)
    handle = symm_mem.rendezvous(slots, dist.group.WORLD)
    views = [handle.get_buffer(peer, slots.shape, slots.dtype) for peer in range(handle.world_size)]

    def publish(step):
        slots[step % count].fill_(float(step * 10 + handle.rank))  # here

    for step in range(ahead):
        publish(step)
    handle.barrier()
    sums = []
    for step in range(4):
        publish(step + ahead)
        whole = torch.stack([view[step % count] for view in views])  # here
        sums.append(whole.sum().item())
        handle.barrier()
    return sums


@faulty("wrong signal", RACE, ranks=4)
def a_halo_read_after_the_signal_of_the_other_neighbour():
    to_right, to_left = 0, 1
    halo = symm_mem.empty(2, 4, device=MESH).zero_()  # row 0 of the left one, row 1 of the right one
    handle = symm_mem.rendezvous(halo, dist.group.WORLD)
    handle.barrier(2)
    rank, world = handle.rank, handle.world_size
    left, right = (rank - 1) % world, (rank + 1) % world
    inside = torch.arange(12.0, device=MESH).view(3, 4) + 100 * rank

    handle.get_buffer(right, (2, 4), torch.float32)[0].copy_(inside[-1])
    handle.put_signal(right, to_right)
    handle.get_buffer(left, (2, 4), torch.float32)[1].copy_(inside[0])  # here
    handle.put_signal(left, to_left)

    handle.wait_signal(left, to_right)
    below = inside[-1] - halo[1]  # here
    handle.wait_signal(right, to_left)
    above = inside[0] - halo[0]
    handle.barrier(2)
    return above.sum().item() + below.sum().item()


@faulty("overlapping writes", RACE, ranks=4)
def chunks_of_bfloat16_at_offsets_of_float32():
    world, count = dist.get_world_size(), 8
    size = world * count * torch.bfloat16.itemsize
    handle = symm_mem.get_symm_mem_workspace(dist.group.WORLD.group_name, min_size=size)
    handle.get_buffer(handle.rank, (size,), torch.uint8).zero_()
    handle.barrier()

    chunk = torch.full((count,), float(handle.rank + 1), dtype=torch.bfloat16, device=MESH)
    where = handle.rank * chunk.numel() * chunk.element_size() // torch.float32.itemsize
    handle.get_buffer(0, (count,), chunk.dtype, storage_offset=where).copy_(chunk)  # here
    handle.barrier()
    result = None
    if handle.rank == 0:
        result = handle.get_buffer(0, (world, count), torch.bfloat16).float().sum().item()
    handle.barrier()
    return result


@faulty("out of bounds", "OutsideBuffer", ranks=3)
def a_last_share_that_is_not_cut():
    rows, width = 10, 4
    table = symm_mem.empty(rows, width, device=MESH)
    handle = symm_mem.rendezvous(table, dist.group.WORLD)
    rank, world = handle.rank, handle.world_size
    table.fill_(float(rank))
    handle.barrier()
    per_rank = -(-rows // world)
    start = rank * per_rank
    total = torch.zeros(per_rank, width, device=MESH)
    for peer in range(world):
        total += handle.get_buffer(peer, (per_rank, width), torch.float32, start * width)  # here
    handle.barrier()  # here
    for peer in range(world):
        handle.get_buffer(peer, (per_rank, width), torch.float32, start * width).copy_(total)
    handle.barrier()
    return table.sum().item()


@faulty("streams without order", RACE)
def pulls_that_the_barrier_of_the_layer_does_not_wait_for():
    shard = symm_mem.empty(16, device=MESH)
    handle = symm_mem.rendezvous(shard, dist.group.WORLD)
    side = torch.cuda.Stream()
    gathered = torch.zeros(3, 16, device=MESH)
    for layer in range(3):
        shard.fill_(float(10 * layer + handle.rank))  # here
        handle.barrier()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for step in range(1, handle.world_size):
                peer = (handle.rank + step) % handle.world_size
                gathered[layer] += handle.get_buffer(peer, (16,), torch.float32)  # here
        handle.barrier()
    torch.cuda.current_stream().wait_stream(side)
    handle.barrier()
    return gathered.sum(1).tolist()


@faulty("unwritten memory", "ReadUnwritten", ranks=3)
def a_mean_over_the_capacity_of_an_expert():
    capacity, width = 6, 4
    rank, world = dist.get_rank(), dist.get_world_size()
    inbox = symm_mem.empty(capacity, width, device=MESH)
    count = symm_mem.empty(1, dtype=torch.int64, device=MESH)
    handle = symm_mem.rendezvous(inbox, dist.group.WORLD)
    counts = symm_mem.rendezvous(count, dist.group.WORLD)

    tokens = torch.ones(capacity - rank, width, device=MESH) * (rank + 1)
    expert = (rank + 1) % world
    handle.get_buffer(expert, inbox.shape, inbox.dtype)[: len(tokens)].copy_(tokens)
    counts.get_buffer(expert, (1,), torch.int64).fill_(len(tokens))
    handle.barrier()
    mean = inbox.sum(0) / count.item()  # here
    handle.barrier()
    return mean.tolist()


@faulty("pads and channels", "PadReused", ranks=3)
def a_barrier_before_the_wait_for_the_routing_table():
    table = symm_mem.empty(4, dtype=torch.int32, device=MESH)
    handle = symm_mem.rendezvous(table, dist.group.WORLD)
    if handle.rank == 0:
        routes = torch.tensor([3, 1, 2, 0], dtype=torch.int32, device=MESH)
        handle.get_buffer(1, (4,), torch.int32).copy_(routes)
        handle.put_signal(1)  # here

    scratch = torch.zeros(4, device=MESH)
    for _ in range(3):
        scratch += handle.rank
    handle.barrier()  # here

    if handle.rank == 1:
        handle.wait_signal(0)
        return table.sum().item()
    return scratch.sum().item()


@faulty("only in some orders", RACE, ranks=4, schedules=True)
def a_flag_that_is_never_taken_back():
    weights = symm_mem.empty(4, device=MESH).zero_()
    handle = symm_mem.rendezvous(weights, dist.group.WORLD)
    handle.barrier()
    mine = handle.get_signal_pad(handle.rank, (1,), torch.int32, FLAG)
    seen = []
    for step in range(3):
        if handle.rank == 0:
            for peer in range(1, handle.world_size):
                handle.get_buffer(peer, (4,), torch.float32).fill_(step + 1.0)  # here
                handle.get_signal_pad(peer, (1,), torch.int32, FLAG).fill_(1)
        else:
            while mine.item() != 1:
                pass
            seen.append(weights.sum().item())  # here
        handle.barrier()
    return seen
