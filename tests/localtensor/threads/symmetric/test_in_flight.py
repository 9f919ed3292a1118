"""Collectives and messages on symmetric memory: they read and write it until they have been waited for."""

import inspect

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

import localtensor as lt
from localtensor.errors import ReadUnwritten, SymmetricRace
from localtensor.threads.symmetric.order import Order

COUNT = 8


def share(fill=1.0):
    mine = symm_mem.empty(COUNT, device="cpu")
    return mine if fill is None else mine.fill_(fill), symm_mem.rendezvous(mine, dist.group.WORLD)


def part(x):
    return x[: COUNT // dist.get_world_size()]


def parts(x):
    return list(x.chunk(dist.get_world_size()))


def on_first(x):
    return parts(x) if dist.get_rank() == 0 else None


def coalesced(x, out):
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(x)
        dist.all_reduce(out)
    manager.wait()


# Of an input and an output.
CALLS = {
    "all_reduce": lambda x, out: dist.all_reduce(out),
    "broadcast": lambda x, out: dist.broadcast(out, 0),
    "reduce": lambda x, out: dist.reduce(out, 0),
    "all_gather": lambda x, out: dist.all_gather(parts(out), part(x)),
    "reduce_scatter": lambda x, out: dist.reduce_scatter(part(out), parts(x)),
    "all_to_all": lambda x, out: dist.all_to_all(parts(out), parts(x)),
    "all_to_all_single": lambda x, out: dist.all_to_all_single(out, x),
    "gather": lambda x, out: dist.gather(part(x), on_first(out), dst=0),
    "scatter": lambda x, out: dist.scatter(part(out), on_first(x), src=0),
    "future": lambda x, out: dist.all_reduce(out, async_op=True).get_future().wait(),
    "coalesced": coalesced,
    "two at once": lambda x, out: [work.wait() for work in (dist.isend(x, 1 - dist.get_rank()), dist.irecv(out))],
    "message": lambda x, out: dist.recv(out, 0) if dist.get_rank() else dist.send(x, 1),
}


@pytest.mark.few(8)
@pytest.mark.parametrize("schedule", ["round_robin", "shuffled:1"])
@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_has_returned_is_in_order_with_what_a_barrier_orders(call, schedule):
    def program():
        (x, of_x), (out, of_out) = share(), share()
        of_x.barrier()
        for _ in range(2):
            CALLS[call](x, out)
            of_x.barrier()
            for handle in (of_x, of_out):
                handle.get_buffer(1 - handle.rank, (COUNT,), torch.float32).sum()
            of_x.barrier()
            x.add_(1)
            out.add_(1)
        of_x.barrier()

    assert lt.run(program, ranks=2, schedule=schedule).values == (None, None)


def read_while_it_is_reduced():
    mine, handle = share()
    handle.barrier()
    work = dist.all_reduce(mine, async_op=True)  # the call
    handle.barrier()
    handle.get_buffer(1 - handle.rank, (COUNT,), torch.float32).sum()  # the other
    work.wait()
    handle.barrier()


def overwritten_while_it_is_sent():
    mine, handle = share()
    handle.barrier()
    if handle.rank == 0:
        work = dist.isend(mine, 1)  # the call
        handle.barrier()
        work.wait()
    else:
        handle.barrier()
        handle.get_buffer(0, (COUNT,), torch.float32).fill_(2)  # the other
        dist.recv(torch.zeros(COUNT), 0)


def read_as_soon_as_the_reader_has_its_own_result():
    mine, handle = share()
    handle.barrier()
    dist.all_reduce(mine)  # the call
    handle.get_buffer(1 - handle.rank, (COUNT,), torch.float32).sum()  # the other
    handle.barrier()


@pytest.mark.parametrize(
    "program",
    [read_while_it_is_reduced, overwritten_while_it_is_sent, read_as_soon_as_the_reader_has_its_own_result],
)
@pytest.mark.parametrize("schedule", ["round_robin", "shuffled:1", "pct:3"])
def test_what_a_call_in_flight_touches_is_in_order_with_nothing_before_its_wait(program, schedule):
    with pytest.raises(SymmetricRace) as caught:
        lt.run(program, ranks=2, schedule=schedule)
    error = caught.value
    flight = next(one for one in (error.first, error.second) if one.stream == "a call in flight")
    source = inspect.getsource(program).splitlines()
    lines = [program.__code__.co_firstlineno + at for at, line in enumerate(source) if "# the" in line]
    assert sorted(place.line for place in error.places) == lines
    assert flight.place.line == lines[0]
    if flight is error.first:
        assert f"Let the call of line {lines[0]} return on rank {flight.rank}, by wait() of its Work" in str(error)


def test_what_a_collective_has_read_may_be_overwritten_by_the_ranks_that_have_its_result():
    def program():
        mine, handle = share()
        handle.barrier()
        dist.all_gather([torch.zeros(COUNT) for _ in range(2)], mine)
        handle.get_buffer(1 - handle.rank, (COUNT,), torch.float32).fill_(2)
        handle.barrier()
        return mine[0].item()

    assert lt.run(program, ranks=2).values == (2.0, 2.0)


def test_an_all_reduce_of_memory_that_no_rank_has_written_is_an_error():
    with pytest.raises(ReadUnwritten, match="by allreduce_ on rank"):
        lt.run(lambda: dist.all_reduce(share(fill=None)[0]), ranks=2)


def test_what_is_in_flight_does_not_keep_the_accesses_of_the_others():
    order = Order(2)
    first, second = (host.current for host in order.hosts)
    order.in_flight(0, writes=True)
    time = first.time
    second.learn(first.publish())
    first.learn(second.publish())
    assert order.known_to_all({0, 1})[first.number] == time
