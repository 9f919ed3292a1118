"""GroupMismatch and LengthMismatch: who belongs together, and how many tensors make one call."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.distributed_c10d import _coalescing_manager

from tests.tools.rankbugs.corpus import fault, right


@fault("GroupMismatch", ranks=4)
def rank_zero_counts_one_member_more():
    members = [0, 1, 2] if dist.get_rank() == 0 else [0, 1]
    group = dist.new_group(members)  # fault
    if dist.get_rank() < 2:
        dist.all_reduce(torch.ones(1), group=group)


@right(ranks=4)
def all_ranks_count_the_same_members():
    members = [0, 1, 2]
    group = dist.new_group(members)
    x = torch.ones(1)
    if dist.get_rank() in members:
        dist.all_reduce(x, group=group)
    assert x.item() == (1.0 if dist.get_rank() == 3 else 3.0)


@fault("GroupMismatch", ranks=4)
def odd_ranks_make_their_group_first():
    if dist.get_rank() % 2:
        odds, _ = dist.new_group([1, 3]), dist.new_group([0, 2])  # fault
        mine = odds
    else:
        evens, _ = dist.new_group([0, 2]), dist.new_group([1, 3])  # fault
        mine = evens
    dist.all_reduce(torch.ones(2), group=mine)


@right(ranks=4)
def all_ranks_make_both_groups_in_one_order():
    evens, odds = dist.new_group([0, 2]), dist.new_group([1, 3])
    x = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(x, group=odds if dist.get_rank() % 2 else evens)
    assert x.item() == (4.0 if dist.get_rank() % 2 else 2.0)


@fault("GroupMismatch", ranks=3)
def each_rank_makes_a_group_of_the_others():
    others = [rank for rank in range(3) if rank != dist.get_rank()]
    dist.new_group(others)  # fault


@right(ranks=3)
def a_group_is_made_without_each_rank_in_turn():
    total = 0.0
    for absent in range(3):
        members = [rank for rank in range(3) if rank != absent]
        group = dist.new_group(members)
        x = torch.ones(1)
        if dist.get_rank() != absent:
            dist.all_reduce(x, group=group)
        total += x.item()
    assert total == 5.0


@fault("GroupMismatch", ranks=4)
def the_last_rank_counts_the_stages_backwards():
    stages = [[0, 1], [1, 2], [2, 3]]
    if dist.get_rank() == 3:
        stages.reverse()
    for stage in stages:
        dist.new_group(stage)  # fault


def split_by(size):
    group, _ = dist.new_subgroups(group_size=size)  # fault
    return group


@fault("GroupMismatch", ranks=4, helpers=(split_by,))
def one_rank_splits_the_world_in_larger_parts():
    group = split_by(2 if dist.get_rank() else 4)
    dist.barrier(group=group)


@right(ranks=4)
def all_ranks_split_the_world_in_the_same_parts():
    x = torch.tensor([dist.get_rank()])
    dist.all_reduce(x, group=split_by(2))
    assert x.item() == (1 if dist.get_rank() < 2 else 5)


@right(ranks=3)
def the_members_of_a_group_may_be_listed_in_any_order():
    group = dist.new_group([2, 0] if dist.get_rank() else [0, 2])
    x = torch.tensor([1.0 + dist.get_rank()])
    if dist.get_rank() != 1:
        dist.broadcast(x, src=2, group=group)
    assert x.item() == (2.0 if dist.get_rank() == 1 else 3.0)


@right(ranks=4)
def members_alone_make_a_group():
    half = [0, 1] if dist.get_rank() < 2 else [2, 3]
    group = dist.new_group(half, use_local_synchronization=True)
    x = torch.tensor([1.0 + dist.get_rank()])
    dist.all_reduce(x, group=group)
    assert x.item() == (3.0 if dist.get_rank() < 2 else 7.0)


@right(ranks=3)
def a_rank_makes_no_group_that_it_is_not_in():
    x = torch.ones(1)
    if dist.get_rank() != 0:
        pair = dist.new_group([1, 2], use_local_synchronization=True)
        dist.all_reduce(x, group=pair)
        dist.destroy_process_group(pair)
    dist.all_reduce(x)
    assert x.item() == 5.0


# -- lists of tensors


@fault("LengthMismatch", ranks=2)
def one_rank_coalesces_two_and_the_other_three():
    tensors = [torch.ones(2) for _ in range(2 + dist.get_rank())]
    sums = functional.all_reduce_coalesced(tensors, "sum", dist.group.WORLD)  # fault
    return [one + 0 for one in sums]


@right(ranks=2)
def both_ranks_coalesce_three():
    tensors = [torch.ones(2) * i for i in range(3)]
    sums = functional.all_reduce_coalesced(tensors, "sum", dist.group.WORLD)
    assert [(one + 0).tolist() for one in sums] == [[0.0, 0.0], [2.0, 2.0], [4.0, 4.0]]


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)

    def forward(self, x, both):
        return self.left(x) + self.right(x) if both else self.left(x)


def averaged(gradients):
    return functional.all_reduce_coalesced(gradients, "sum", dist.group.WORLD)  # fault


@fault("LengthMismatch", ranks=3, helpers=(averaged,))
def the_gradients_of_an_unused_branch_are_left_out():
    model = Branches()
    model(torch.ones(4, 2), both=dist.get_rank() != 1).sum().backward()
    return averaged([weight.grad for weight in model.parameters() if weight.grad is not None])


@right(ranks=3)
def the_gradients_of_an_unused_branch_are_zeros():
    model = Branches()
    model(torch.ones(4, 2), both=dist.get_rank() != 1).sum().backward()
    gradients = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in model.parameters()]
    assert [(one + 0).tolist() for one in averaged(gradients)] == [[[12.0, 12.0]], [[8.0, 8.0]]]


@fault("LengthMismatch", ranks=2)
def a_coalesced_gather_misses_the_bias():
    parts = [torch.ones(2), torch.ones(3)] if dist.get_rank() == 0 else [torch.ones(2)]
    whole = functional.all_gather_into_tensor_coalesced(parts, dist.group.WORLD)  # fault
    return [one + 0 for one in whole]


@right(ranks=2)
def a_coalesced_gather_has_weight_and_bias():
    parts = [torch.ones(2), torch.full((3,), float(dist.get_rank()))]
    whole = functional.all_gather_into_tensor_coalesced(parts, dist.group.WORLD)
    assert [(one + 0).sum().item() for one in whole] == [4.0, 3.0]


@fault("LengthMismatch", ranks=3)
def a_manager_collects_one_more_on_the_last_rank():
    tensors = [torch.ones(2) for _ in range(3 if dist.get_rank() == 2 else 2)]
    with _coalescing_manager():  # fault
        for x in tensors:
            dist.all_reduce(x)  # fault


@right(ranks=3)
def a_manager_collects_two_on_every_rank():
    tensors = [torch.ones(2), torch.ones(3) * dist.get_rank()]
    with _coalescing_manager():
        for x in tensors:
            dist.all_reduce(x)
    assert tensors[0].tolist() == [3.0, 3.0] and tensors[1].tolist() == [3.0, 3.0, 3.0]


@fault("LengthMismatch", ranks=2)
def in_the_third_step_a_bucket_is_flushed_late():
    bucket = []
    for step in range(4):
        bucket.append(torch.ones(2))
        if step == 1 and dist.get_rank() == 0:
            bucket.append(torch.ones(2))
        if step == 2:
            dims = [0] * len(bucket)
            pieces = functional.reduce_scatter_tensor_coalesced(bucket, "sum", dims, dist.group.WORLD)  # fault
            bucket = [piece + 0 for piece in pieces]


@right(ranks=2)
def in_the_third_step_both_buckets_are_flushed():
    bucket = []
    for step in range(3):
        bucket.append(torch.tensor([1.0, 10.0]) * (step + 1))
        if step == 2:
            pieces = functional.reduce_scatter_tensor_coalesced(bucket, "sum", [0] * len(bucket), dist.group.WORLD)
            bucket = [piece + 0 for piece in pieces]
    scale = 10.0 if dist.get_rank() else 1.0
    assert torch.cat(bucket).tolist() == [2 * scale, 4 * scale, 6 * scale]


@fault("GroupMismatch", ranks=3)
def the_best_two_are_chosen_from_local_scores():
    scores = torch.tensor([0.5, 0.5, 0.5])
    scores[dist.get_rank()] += 0.25
    scores[(dist.get_rank() + 1) % 3] += 0.5
    best = sorted(scores.topk(2).indices.tolist())
    dist.new_group(best)  # fault


@right(ranks=3)
def the_best_two_are_chosen_from_shared_scores():
    scores = torch.zeros(3)
    scores[dist.get_rank()] = 2.0 - dist.get_rank()
    dist.all_reduce(scores)
    best = sorted(scores.topk(2).indices.tolist())
    pair = dist.new_group(best)
    x = torch.ones(1)
    if dist.get_rank() in best:
        dist.all_reduce(x, group=pair)
    assert best == [0, 1] and x.item() == (1.0 if dist.get_rank() == 2 else 2.0)


@fault("GroupMismatch", ranks=4)
def the_third_group_has_another_member_on_one_rank():
    for width in (2, 3, 4):
        members = list(range(width))
        if width == 4 and dist.get_rank() == 1:
            members.pop()
        group = dist.new_group(members)  # fault
        if dist.get_rank() in members:
            dist.all_reduce(torch.ones(1), group=group)


@fault("LengthMismatch", ranks=4)
def in_one_subgroup_a_gradient_is_missing():
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    gradients = [torch.ones(2), torch.ones(3), torch.ones(1)]
    if dist.get_rank() == 3:
        del gradients[1]
    sums = functional.all_reduce_coalesced(gradients, "sum", groups[dist.get_rank() // 2])  # fault
    return [one + 0 for one in sums]


@fault("LengthMismatch", ranks=2)
def a_manager_gathers_one_more_on_rank_zero():
    parts = [torch.ones(2)] * (2 if dist.get_rank() == 0 else 1)
    with _coalescing_manager():  # fault
        for part in parts:
            dist.all_gather_into_tensor(torch.empty(4), part)  # fault
