"""Ten programs that were written last, without a look at the detector: five without a fault, five with one each.

They are written in styles that the first ones have not: classes, autograd functions, barriers made by hand, tables of
pages, queues with counters, grids of two mesh axes.  Scored once, as they were: the five faulty ones were found with their
lines, and one of the five right ones raised an alarm under two of three schedules.  The alarm was true: barriers of two
groups on one pad took each other's signals.  That program stands at the end, with its fault; the right one has channels.
"""

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch.distributed.device_mesh import init_device_mesh

from tests.device import MESH
from tests.tools.symmetric.labels import buffer, faulty, flag, of, right, until

RACE = "SymmetricRace"


class Slots:
    """Two halves of a symmetric buffer that take turns: one to be read, one for the left neighbour to fill."""

    def __init__(self, *size):
        self.size, self.turn = size, 0
        self.mine, self.handle = buffer(2, *size, fill=0.0)

    def half(self, owner, which):
        return of(self.handle, owner, 2, *self.size)[which]

    @property
    def current(self):
        return self.half(self.handle.rank, self.turn)

    def rotate(self):
        """Sends what is current to the right, and turns to what came from the left."""
        self.half(self.handle.rank + 1, 1 - self.turn).copy_(self.current)
        self.handle.barrier(channel=self.turn)
        self.turn = 1 - self.turn


@right()
def ring_attention_with_keys_that_rotate():
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    query, keys = torch.randn(world, 3, 4).to(MESH), torch.randn(world, 3, 4).to(MESH)
    slots = Slots(3, 4)
    slots.current.copy_(keys[rank])
    slots.handle.barrier()
    scores = [None] * world
    for step in range(world):
        scores[(rank - step) % world] = query[rank] @ slots.current.T
        if step < world - 1:
            slots.rotate()
    expected = query[rank] @ keys.reshape(-1, 4).T
    torch.testing.assert_close(torch.cat(scores, 1), expected)
    slots.handle.barrier()


@right(8)
def all_gather_by_recursive_doubling():
    rank, world = dist.get_rank(), dist.get_world_size()
    mine, handle = buffer(world, fill=-1.0)
    handle.barrier()
    mine.narrow(0, rank, 1).fill_(float(rank))
    distance = 1
    while distance < world:
        peer, start = rank ^ distance, rank // distance * distance
        of(handle, peer, world)[start : start + distance].copy_(mine[start : start + distance])
        handle.put_signal(peer, channel=distance)
        handle.wait_signal(peer, channel=distance)
        distance *= 2
    assert mine.tolist() == [float(one) for one in range(world)]
    handle.barrier()


def dissemination(handle, rounds):
    """A barrier of signals: in round k each rank tells the one 2**k places to its right, and hears of the one to its left."""
    for at in range(rounds):
        handle.put_signal((handle.rank + 2**at) % handle.world_size, channel=at)
        handle.wait_signal((handle.rank - 2**at) % handle.world_size, channel=at)


@right(5)
def a_barrier_by_dissemination():
    mine, handle = buffer(4, fill=0.0)
    for epoch in range(3):
        mine.copy_(torch.full((4,), float(epoch * 10 + handle.rank)))
        dissemination(handle, 3)
        seen = [of(handle, handle.rank + step, 4).sum().item() for step in range(1, handle.world_size)]
        assert sorted(seen) == [4.0 * (epoch * 10 + r) for r in range(handle.world_size) if r != handle.rank]
        dissemination(handle, 3)


@right()
def an_autograd_function_that_gathers_and_scatters():
    rank, world = dist.get_rank(), dist.get_world_size()
    shards, handle = buffer(2, 3)
    grads, of_grads = buffer(world, 2, 3)

    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(_, part):
            shards.copy_(part)
            handle.barrier()
            full = torch.cat([of(handle, peer, 2, 3) for peer in range(world)])
            handle.barrier()
            return full

        @staticmethod
        def backward(_, grad):
            for peer, part in enumerate(grad.split(2)):
                of(of_grads, peer, world, 2, 3)[rank] = part
            of_grads.barrier()
            total = grads.sum(0)
            of_grads.barrier()
            return total

    part = torch.full((2, 3), float(rank), device=MESH, requires_grad=True)
    for _ in range(2):
        part.grad = None
        (Gather.apply(part) * (rank + 1)).sum().backward()
        assert part.grad.eq(world * (world + 1) / 2).all()


def exchange_halos(tile, by_row, by_column, now):
    """Fills the other half of the tile: its inside from this rank's, its edges from the neighbours of a grid of 2 x 2."""
    beside = by_row.get_buffer(1 - by_row.rank, (2, 4, 4), torch.float32)[now, :, ::3].clone()
    above = by_column.get_buffer(1 - by_column.rank, (2, 4, 4), torch.float32)[now, ::3, :].clone()
    target = tile[1 - now]
    torch._foreach_copy_([target[:, ::3], target[:, 1:3]], [beside, tile[now, :, 1:3]])
    target[::3, 1:3] = above[:, 1:3]
    return 1 - now


def grid():
    """A tile with two halves on each rank of a grid of 2 x 2, and its handles along the rows and the columns."""
    mesh = init_device_mesh(MESH, (2, 2), mesh_dim_names=("y", "x"))
    tile = symm_mem.empty(2, 4, 4, device=MESH).fill_(float(dist.get_rank()))
    return tile, *(symm_mem.rendezvous(tile, mesh[axis].get_group()) for axis in ("x", "y"))


@right()
def halos_of_a_grid_on_two_mesh_axes():
    tile, by_row, by_column = grid()
    now = 0
    for _ in range(2):
        by_row.barrier(channel=0)
        by_column.barrier(channel=1)
        now = exchange_halos(tile, by_row, by_column, now)
    by_row.barrier(channel=0)
    by_column.barrier(channel=1)


# Faulty ones.


@faulty("only in some orders", RACE, schedules=True)
def a_queue_that_takes_one_item_too_many():
    rank, slots, items = dist.get_rank(), 3, 8
    queue, handle = buffer(slots, 2, fill=0.0)
    head, tail = flag(handle, 1, 0), flag(handle, 0, 1)
    handle.barrier()
    if rank == 0:
        theirs = of(handle, 1, slots, 2)
        for item in range(items):
            until(tail, item - slots)  # one item later than it must be
            theirs[item % slots].fill_(float(item))  # here
            head.fill_(item + 1)
    else:
        for item in range(items):
            until(head, item + 1)
            queue[item % slots].sum().item()  # here
            tail.fill_(item + 1)
    handle.barrier()


@faulty("no order before a read", RACE, ranks=4)
def a_dissemination_with_a_round_too_few():
    mine, handle = buffer(4, fill=0.0)
    handle.barrier()
    mine.add_(1.0 + handle.rank)  # here
    dissemination(handle, 1)
    across = of(handle, handle.rank + 2, 4).mul(2)  # here
    handle.barrier()
    return across


@faulty("no order before a reuse", RACE, ranks=3)
def a_backward_that_reuses_the_buffer_of_the_forward():
    world = dist.get_world_size()
    shards, handle = buffer(4)

    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(_, part):
            shards.copy_(part)
            handle.barrier()
            return torch.cat([of(handle, peer, 4) for peer in range(world)])  # here

        @staticmethod
        def backward(_, grad):
            shards.copy_(grad[:4])  # here
            handle.barrier()
            total = sum(of(handle, peer, 4) for peer in range(world))
            handle.barrier()
            return total

    part = torch.ones(4, device=MESH, requires_grad=True)
    Gather.apply(part).sum().backward()


@faulty("overlapping writes", RACE, ranks=3)
def a_page_that_two_ranks_were_given():
    rank = dist.get_rank()
    cache, handle = buffer(8, 2, fill=0.0)
    tables = {0: [0, 3], 1: [1, 4], 2: [2, 3]}
    handle.barrier()
    pages = torch.tensor(tables[rank], device=MESH)
    keys = torch.ones(2, 2, device=MESH) * rank
    of(handle, 0, 8, 2)[pages] = keys  # here
    handle.barrier()
    return cache


@faulty("wrong barrier", RACE, ranks=4)
def a_corner_that_the_barrier_of_the_row_does_not_cover():
    rank = dist.get_rank()
    mesh = init_device_mesh(MESH, (2, 2), mesh_dim_names=("y", "x"))
    tile, handle = buffer(4, 4, fill=0.0)
    by_row = symm_mem.rendezvous(tile, mesh["x"].get_group())
    handle.barrier()
    tile[::3].fill_(float(rank))  # here
    by_row.barrier()
    corner = of(handle, 3 - rank, 4, 4)[0, 0] + 1.0  # here
    handle.barrier()
    return corner


@faulty("pads and channels", "PadReused", ranks=4)
def halos_whose_two_barriers_share_the_words_of_one_pad():
    tile, by_row, by_column = grid()
    now = 0
    for _ in range(2):
        by_row.barrier()  # here
        by_column.barrier()  # here
        now = exchange_halos(tile, by_row, by_column, now)
