"""Right, though a hasty checker might object: groups, objects, functional calls, autograd."""

from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch import nn
from torch.distributed.distributed_c10d import _coalescing_manager

from tests.tools.rankbugs.corpus import right


@right(ranks=1)
def a_world_of_one():
    x = torch.ones(2)
    dist.all_reduce(x)
    got = [torch.empty(2)]
    dist.all_gather(got, x)
    dist.barrier()
    assert got[0].tolist() == [1.0, 1.0]


@right(ranks=4)
def overlapping_groups_in_another_order_on_each_side():
    low, high = dist.new_group([0, 1, 2]), dist.new_group([1, 2, 3])
    me = dist.get_rank()
    order = [group for group in (low, high) if group is not dist.GroupMember.NON_GROUP_MEMBER]
    if me == 2:
        order.reverse()
    parts = {group: torch.ones(1) * me for group in order}
    works = [dist.all_reduce(parts[group], group=group, async_op=True) for group in order]
    for work in works:
        work.wait()
    assert sum(part.item() for part in parts.values()) == [3.0, 9.0, 9.0, 6.0][me]


@right(ranks=5)
def ranks_skip_the_groups_they_are_not_in():
    pairs = [(rank, rank + 1) for rank in range(4)]
    groups = [dist.new_group(list(pair)) for pair in pairs]
    x = torch.tensor([float(dist.get_rank())])
    for pair, group in zip(pairs, groups):
        if dist.get_rank() in pair:
            dist.all_reduce(x, group=group)
    assert x.item() == [1.0, 3.0, 6.0, 10.0, 10.0][dist.get_rank()]


@right(ranks=3)
def the_world_is_named():
    x = torch.ones(2)
    dist.all_reduce(x, group=dist.group.WORLD)
    dist.all_reduce(x, group=None)
    assert x.tolist() == [9.0, 9.0] and dist.get_process_group_ranks(dist.group.WORLD) == [0, 1, 2]


@right(ranks=3)
def objects_of_two_sizes_are_gathered():
    mine = {"rank": dist.get_rank(), "words": ["x"] * dist.get_rank()}
    everyone = [None] * 3
    dist.all_gather_object(everyone, mine)
    assert [one["words"] for one in everyone] == [[], ["x"], ["x", "x"]]


@right(ranks=3)
def objects_are_scattered():
    mine = [None]
    dist.scatter_object_list(mine, ["a", ("b", 2), {"c": 3}] if dist.get_rank() == 1 else None, src=1)
    assert mine[0] == ["a", ("b", 2), {"c": 3}][dist.get_rank()]


@right(ranks=4)
def objects_are_gathered_in_a_subgroup():
    odds = dist.new_group([1, 3])
    everyone = [None, None]
    if dist.get_rank() % 2:
        dist.all_gather_object(everyone, f"rank {dist.get_rank()}", group=odds)
        assert everyone == ["rank 1", "rank 3"]
    assert dist.get_group_rank(odds, 3) == 1 if dist.get_rank() % 2 else everyone == [None, None]


@right(ranks=3)
def a_manager_reduces_without_waiting_at_once():
    tensors = [torch.full((2,), float(i + dist.get_rank())) for i in range(3)]
    with _coalescing_manager(async_ops=True) as manager:
        for x in tensors:
            dist.all_reduce(x)
    manager.wait()
    assert [x[0].item() for x in tensors] == [3.0, 6.0, 9.0]


@right(ranks=2)
def a_manager_gathers():
    parts = [torch.full((2,), float(dist.get_rank())), torch.ones(3)]
    wholes = [torch.empty(4), torch.empty(6)]
    with _coalescing_manager():
        for whole, part in zip(wholes, parts):
            dist.all_gather_into_tensor(whole, part)
    assert wholes[0].tolist() == [0.0, 0.0, 1.0, 1.0] and wholes[1].sum().item() == 6.0


@right(ranks=3)
def a_barrier_that_keeps_watch():
    x = torch.ones(1)
    dist.monitored_barrier(timeout=timedelta(seconds=20))
    dist.all_reduce(x)
    assert x.item() == 3.0


@right(ranks=2)
def the_world_is_destroyed_in_the_end():
    x = torch.ones(2)
    dist.all_reduce(x)
    dist.destroy_process_group()
    assert x.tolist() == [2.0, 2.0] and not dist.is_initialized()


@right(ranks=4)
def all_ranks_skip_every_second_collective():
    x = torch.ones(1)
    for step in range(6):
        if step % 2:
            continue
        dist.all_reduce(x)
    assert x.item() == 64.0


@right(ranks=4)
def a_group_within_a_group():
    half = dist.new_group([0, 1, 2])
    quarter = dist.new_group([1, 2])
    x = torch.ones(1) * dist.get_rank()
    if dist.get_rank() in (1, 2):
        dist.all_reduce(x, group=quarter)
    if dist.get_rank() < 3:
        dist.all_reduce(x, group=half)
    assert x.item() == (3.0 if dist.get_rank() == 3 else 6.0)


@right(ranks=4)
def functional_calls_in_a_chain():
    x = torch.arange(4.0) + dist.get_rank()
    summed = functional.all_reduce(x, "sum", dist.group.WORLD)
    mine = functional.reduce_scatter_tensor(summed, "sum", 0, dist.group.WORLD)
    whole = functional.all_gather_tensor(mine, 0, dist.group.WORLD)
    assert whole.tolist() == [4 * (6.0 + 4 * i) for i in range(4)]


@right(ranks=4)
def a_functional_permutation():
    x = functional.permute_tensor(torch.tensor([float(dist.get_rank())]), [1, 2, 3, 0], dist.group.WORLD)
    assert (x + 0).item() == (dist.get_rank() - 1) % 4


@right(ranks=2)
def functional_gradients():
    x = torch.full((2,), 1.0 + dist.get_rank(), requires_grad=True)
    whole = functional.all_gather_tensor_autograd(x, 0, dist.group.WORLD)
    (whole * torch.arange(4.0)).sum().backward()
    assert x.grad.tolist() == ([0.0, 2.0] if dist.get_rank() == 0 else [4.0, 6.0])


@right(ranks=3)
def gradients_flow_back_through_a_sum():
    x = torch.full((2,), 1.0 + dist.get_rank(), requires_grad=True)
    total = differentiable.all_reduce(x)
    (total * (1 + dist.get_rank())).sum().backward()
    assert total.tolist() == [6.0, 6.0] and x.grad.tolist() == [6.0, 6.0]


@right(ranks=2)
def gradients_flow_back_through_an_exchange():
    x = (torch.arange(4.0) * (1 + dist.get_rank())).requires_grad_()
    y = differentiable.all_to_all_single(torch.empty(4), x)
    (y * torch.tensor([1.0, 2.0, 3.0, 4.0])).sum().backward()
    assert x.grad.tolist() == ([1.0, 2.0] * 2 if dist.get_rank() == 0 else [3.0, 4.0] * 2)


class Summed(torch.autograd.Function):
    """The tensor-parallel pair: identity forward, sum backward."""

    @staticmethod
    def forward(_ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(_ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


@right(ranks=2)
def a_layer_cut_by_hand():
    x = torch.ones(2, 3, requires_grad=True)
    weight = torch.full((3, 2), 1.0 + dist.get_rank(), requires_grad=True)
    (Summed.apply(x) @ weight).sum().backward()
    assert x.grad.tolist() == [[6.0] * 3] * 2 and weight.grad.tolist() == [[2.0, 2.0]] * 3


@right(ranks=3)
def one_rank_prints_and_the_others_do_not():
    loss = torch.tensor(1.0 + dist.get_rank())
    dist.all_reduce(loss)
    lines = []
    if dist.get_rank() == 0:
        lines.append(f"loss {loss.item()}")
    dist.barrier()
    assert lines == (["loss 6.0"] if dist.get_rank() == 0 else [])


@right(ranks=4)
def statistics_of_uneven_batches():
    x = torch.arange(1.0 + dist.get_rank())
    count, total = torch.tensor(float(len(x))), x.sum()
    dist.all_reduce(count)
    dist.all_reduce(total)
    assert (total / count).item() == 1.0


@right(ranks=2)
def a_transposed_tensor_is_reduced():
    x = torch.arange(6.0).view(2, 3).t()
    dist.all_reduce(x)
    assert x.tolist() == [[0.0, 6.0], [2.0, 8.0], [4.0, 10.0]]


@right(ranks=2)
def parameters_are_broadcast_under_no_grad():
    model = nn.Linear(2, 1)
    nn.init.constant_(model.weight, 3.0 + dist.get_rank())
    with torch.no_grad():
        for weight in model.parameters():
            dist.broadcast(weight, src=1)
    assert model.weight.tolist() == [[4.0, 4.0]]


@right(ranks=3)
def an_error_is_agreed_upon_and_raised_by_all():
    bad = torch.tensor([int(dist.get_rank() == 1)])
    dist.all_reduce(bad, dist.ReduceOp.MAX)
    caught = False
    try:
        if bad.item():
            raise ValueError("some rank has a bad sample")  # noqa: TRY301
    except ValueError:
        caught = True
    dist.barrier()
    assert caught
