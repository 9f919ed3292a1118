"""Process groups that are made without `new_group`, or by each rank for itself, as on gloo processes."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

import localtensor as lt
from localtensor.errors import GroupMismatch, RankRaised


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
