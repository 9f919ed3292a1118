"""Process groups that are made without `new_group`, or by each rank for itself, as on gloo processes."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

import localtensor as lt
from localtensor.errors import CollectiveTimeout, GroupMismatch, RankRaised


def numbers():
    return torch.full((2,), 1.0 + dist.get_rank())


def direct(path):
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.FileStore(path, size)
    group = dist.ProcessGroupGloo(dist.PrefixStore("first", store), rank, size)
    x, y, z, w = numbers(), numbers(), numbers(), numbers()
    group.allreduce([x]).wait()
    group.allreduce(y, dist.ReduceOp.MAX).wait()
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MIN
    group.allreduce([z], options).wait()
    group.broadcast(w, root=1).wait()
    gathered = [[torch.zeros(2) for _ in range(size)]]
    group.allgather(gathered, [numbers()]).wait()
    group.barrier().wait()
    if rank == 0:
        group.send([x], 1, 3).wait()
    if rank == 1:
        group.recv([x], 0, 3).wait()
    again = dist.ProcessGroupGloo(dist.PrefixStore("second", store), rank, size, timedelta(seconds=50))
    again.allreduce(x).wait()
    return group.rank(), group.size(), group.name(), *(t.tolist() for t in (x, y, z, w, *gathered[0]))


def halves(path):
    """Two groups at once, whose members have other numbers in the group than in the world."""
    rank = dist.get_rank()
    store = dist.FileStore(path, 4)
    group = dist.ProcessGroupGloo(dist.PrefixStore(f"half {rank % 2}", store), 1 - rank // 2, 2)
    x = numbers()
    group.broadcast(x, root=0).wait()
    return group.rank(), x.tolist()


def alone(path):
    group = dist.new_group([dist.get_rank()])
    x = numbers()
    dist.all_reduce(x, group=group)
    own = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
    own.allreduce(x).wait()
    found = x.tolist(), dist.get_rank(group), dist.get_world_size(group), dist.get_process_group_ranks(group)
    dist.destroy_process_group(group)
    return found


@pytest.mark.parametrize(("program", "ranks"), [(direct, 2), (halves, 4), (alone, 2)])
def test_a_group_does_what_it_does_in_processes(program, ranks, tmp_path):
    want = lt.run(program, str(tmp_path / "gloo"), ranks=ranks, on="gloo").values
    for seed in range(3):
        path = str(tmp_path / f"threads {seed}")
        assert lt.run(program, path, ranks=ranks, schedule=lt.shuffled(seed)).values == want


def test_a_group_of_one_rank_only_is_of_that_rank():
    def program():
        dist.new_group([0] if dist.get_rank() == 0 else [0, 1])

    with pytest.raises(GroupMismatch):
        lt.run(program, ranks=2)


def coalesced():
    with _coalescing_manager(device=torch.device("cpu")):
        torch.ops._c10d_functional.all_reduce(torch.ones(1), "sum", dist.group.WORLD.group_name)


@pytest.mark.parametrize("on", ["threads", "gloo"])
def test_a_device_of_the_coalescing_manager_is_refused_as_gloo_refuses_it(on):
    with pytest.raises(RankRaised, match="RuntimeError: Backend gloo does not implement startCoalescing"):
        lt.run(coalesced, ranks=2, on=on, timeout=60)


def sum_of_ones():
    x = torch.ones(1)
    dist.all_reduce(x)
    return x.item()


def test_a_coalescing_manager_that_raised_leaves_nothing_to_the_next_job_of_the_same_processes():
    with pytest.raises(RankRaised):
        lt.run(coalesced, ranks=2, on="gloo", timeout=60)
    assert lt.run(sum_of_ones, ranks=2, on="gloo", timeout=60).values == (2.0, 2.0)


def identity():
    world = dist.group.WORLD
    backend, work = world._get_backend(torch.device("cpu")), dist.all_reduce(numbers(), async_op=True)
    work.wait()
    x, y = numbers(), numbers()
    backend.allreduce([x]).wait()  # of the backend itself: it must not return its input
    backend.broadcast(y, root=1).wait()
    with pytest.raises(AttributeError):
        backend.no_such_method()
    return (
        isinstance(backend, dist.ProcessGroupGloo),
        isinstance(backend, dist.distributed_c10d.Backend),
        isinstance(world._get_backend(torch.device("cuda")), dist.ProcessGroupGloo),
        (backend.name(), backend._get_backend_name(), world._get_backend_name(), backend.rank(), backend.size()),
        (backend.options.backend, type(backend.options).__name__, backend.options.global_ranks_in_group),
        (backend.supports_splitting, backend.supports_coalescing),
        backend.supports_tensor_alloc(torch.device("cpu")),
        (type(work).__name__, type(work).__module__, type(work).__qualname__, isinstance(work, dist.Work)),
        (x.tolist(), y.tolist()),
    )


def sequence():
    """The number of calls that each collective makes of a group."""
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    one, parts, counts = torch.ones(size), [torch.ones(1) for _ in range(size)], []
    start = group._get_sequence_number_for_group()  # a worker process has a past
    for call in (
        lambda: dist.all_reduce(one),
        lambda: dist.broadcast(one, 0),
        dist.barrier,
        lambda: dist.reduce(one, 0),
        lambda: dist.all_gather(parts, torch.ones(1)),
        lambda: dist.gather(torch.ones(1), parts if rank == 0 else None),
        lambda: dist.scatter(torch.ones(1), parts if rank == 0 else None),
        lambda: dist.reduce_scatter(torch.ones(1), parts),
        lambda: dist.reduce_scatter_tensor(torch.ones(1), one),
        lambda: dist.all_to_all_single(torch.ones(size), one),
        lambda: dist.send(one, 1) if rank == 0 else dist.recv(one, 0),
        dist.monitored_barrier,
        lambda: dist.all_gather_object([None] * size, rank),
    ):
        call()
        counts.append(group._get_sequence_number_for_group() - start)
    return counts


@pytest.mark.parametrize("program", [identity, sequence])
def test_a_group_is_known_by_the_names_of_gloo(program):
    assert lt.run(program, ranks=2).values == lt.run(program, ranks=2, on="gloo").values


def test_the_time_limit_of_a_backend_is_that_of_its_group():
    def program():
        assert dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=1800)
        set_limit = getattr(dist.distributed_c10d, "set_timeout", dist.distributed_c10d._set_pg_timeout)  # new in 2.15
        set_limit(timedelta(seconds=7), dist.group.WORLD)
        assert dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=7)
        with pytest.raises(CollectiveTimeout, match="7000 ms"):
            dist.recv(torch.ones(1), 1 - dist.get_rank())

    lt.run(program, ranks=2)


def test_a_backend_of_another_name_is_of_its_type():
    def program():
        group = dist.new_group([0, 1], backend="cpu:gloo,cuda:nccl")
        kind = group._get_backend(torch.device("cpu"))
        found = isinstance(kind, dist.ProcessGroupGloo), kind.name()
        other = group._get_backend(torch.device("cuda"))
        dist.destroy_process_group(group)
        return *found, isinstance(other, dist.ProcessGroupGloo)

    assert lt.run(program, ranks=2).values == ((True, "gloo", False),) * 2


def test_a_direct_group_has_the_options_of_gloo_and_a_group_of_torchs_class_has_none(tmp_path):
    def program():
        group = dist.ProcessGroupGloo(
            dist.FileStore(str(tmp_path / "store"), 2), dist.get_rank(), 2, timedelta(seconds=50)
        )
        before = group.options._timeout
        group._set_default_timeout(timedelta(seconds=23))
        with pytest.raises(AttributeError):
            _ = dist.group.WORLD.options
        return before, group.options._timeout

    assert lt.run(program, ranks=2).values == ((timedelta(seconds=50), timedelta(seconds=23)),) * 2
    assert not hasattr(dist.ProcessGroup, "options")


def test_the_backend_of_a_group_makes_devices_as_gloo_does():
    def program():
        return type(dist.group.WORLD._get_backend(torch.device("cpu")).create_device(interface="lo")).__name__

    assert lt.run(program, ranks=2).values == ("Device", "Device")
