"""Pools of symmetric memory where there is no GPU: what an op makes inside `use_mem_pool` is symmetric."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

import localtensor as lt
from localtensor.errors import NotServed, RankRaised, ReadUnwritten, SymmetricRace

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has its own pool"),
    pytest.mark.skipif(not hasattr(symm_mem, "get_mem_pool"), reason="this torch has no such function"),
]


def world():
    return dist.group.WORLD


def pooled():
    return torch.cuda.use_mem_pool(symm_mem.get_mem_pool("cuda"))


def peer_of(handle, count):
    return handle.get_buffer(1 - handle.rank, (count,), torch.float32)


def test_results_of_ops_lie_in_the_pool_and_keep_their_values():
    def program():
        x = torch.ones(3, 2, requires_grad=True)
        with pooled():
            row = torch.arange(4.0) + dist.get_rank()
            product = x @ torch.full((2, 2), 2.0)
            view, blank = row[1:], torch.empty(4)
        product.sum().backward()
        summed = torch.ops.symm_mem.one_shot_all_reduce(product.detach(), "sum", world().group_name)
        handle = symm_mem.rendezvous(row, world())
        handle.barrier()
        seen = peer_of(handle, 4).tolist()
        handle.barrier()
        kept = view.data_ptr() == row.data_ptr() + 4 and blank.shape == (4,)
        return seen, summed[0].tolist(), x.grad[0].tolist(), kept, symm_mem.rendezvous(torch.ones(2), world())

    first, second = lt.run(program, ranks=2).values
    assert first == ([1.0, 2.0, 3.0, 4.0], [8.0, 8.0], [4.0, 4.0], True, None)
    assert second[0] == [0.0, 1.0, 2.0, 3.0]


def test_memory_of_tensors_that_are_gone_is_used_again_and_is_unwritten_then():
    def program():
        with pooled():
            first = torch.ones(8)
        handle = symm_mem.rendezvous(first, world())
        handle.barrier()
        theirs = peer_of(handle, 8)  # a view that another rank keeps is none of this rank's tensors
        theirs.sum()
        handle.barrier()
        where, part = first.data_ptr(), torch.nn.Parameter(first)
        del first
        with pooled():
            second = torch.ones(8)
        del part
        with pooled():
            third, other = torch.empty(8), torch.empty(6)
        same = (second.data_ptr() == where, third.data_ptr() == where, other.data_ptr() == where)
        symm_mem.rendezvous(third, world()).barrier()
        return same, third if dist.get_rank() else third.sum()

    with pytest.raises(ReadUnwritten, match="by sum on rank 0"):
        lt.run(program, ranks=2)
    assert lt.run(program, ranks=2, races=False).values[1][0] == (False, True, False)


def test_a_race_in_a_pool_is_found():
    def program():
        with pooled():
            mine = torch.zeros(4)
        handle = symm_mem.rendezvous(mine, world())
        handle.barrier()
        mine.add_(1)
        return peer_of(handle, 4).clone()

    with pytest.raises(SymmetricRace) as caught:
        lt.run(program, ranks=2)
    assert {caught.value.first.op, caught.value.second.op} == {"add_", "clone"}


def test_another_pool_is_refused_by_name():
    def program():
        with torch.cuda.use_mem_pool(object()):
            pass

    with pytest.raises(RankRaised) as caught:
        lt.run(program, ranks=1)
    assert type(caught.value.__cause__) is NotServed
    assert "torch.cuda.use_mem_pool" in str(caught.value.__cause__)
