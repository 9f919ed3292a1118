"""GroupMismatch, LengthMismatch and GroupsLeftOver: who belongs together, and how many tensors make one call."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.distributed_c10d import _coalescing_manager

from tests.rankbugs.corpus import fault, right


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
            pieces = functional.reduce_scatter_tensor_coalesced(
                bucket, "sum", [0] * len(bucket), dist.group.WORLD
            )  # fault
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


# -- groups that are left behind


@fault("GroupsLeftOver", ranks=2, leftovers="raise")
def a_group_is_made_and_kept():
    group = dist.new_group([0, 1])  # fault
    dist.all_reduce(torch.ones(1), group=group)


@right(ranks=2, leftovers="raise")
def a_group_is_made_and_destroyed():
    group = dist.new_group([0, 1])
    x = torch.ones(1)
    dist.all_reduce(x, group=group)
    dist.destroy_process_group(group)
    assert x.item() == 2.0


@fault("GroupsLeftOver", ranks=4, leftovers="raise")
def one_group_of_two_is_destroyed():
    rows = dist.new_group([0, 1, 2])
    columns = dist.new_group([0, 1, 3])  # fault
    if dist.get_rank() != 2:
        dist.all_reduce(torch.ones(1), group=columns)
    dist.destroy_process_group(rows)


@right(ranks=4, leftovers="raise")
def destroying_the_world_destroys_its_groups():
    me = dist.get_rank()
    rows, columns = dist.new_group([0, 1, 2]), dist.new_group([0, 1, 3])
    x = torch.ones(1)
    if me != 3:
        dist.all_reduce(x, group=rows)
    if me != 2:
        dist.all_reduce(x, group=columns)
    dist.destroy_process_group()
    assert x.item() == (3.0 if me == 2 else 7.0)


def team_total(x):
    team = dist.new_group(list(range(dist.get_world_size())))  # fault
    dist.all_reduce(x, group=team)
    return x.item()


@fault("GroupsLeftOver", ranks=3, leftovers="raise", helpers=(team_total,))
def a_helper_makes_a_group_each_time():
    return [team_total(torch.ones(1)) for _ in range(3)]


@right(ranks=3, leftovers="raise")
def a_helper_is_given_the_group():
    team = dist.new_group([0, 1, 2])
    totals = []
    for step in range(3):
        x = torch.ones(1) * step
        dist.all_reduce(x, group=team)
        totals.append(x.item())
    dist.destroy_process_group(team)
    assert totals == [0.0, 3.0, 6.0]


@fault("GroupsLeftOver", ranks=2, leftovers="raise")
def an_error_on_the_way_skips_the_cleaning_up():
    try:
        group = dist.new_group([0, 1])  # fault
        dist.barrier(group=group)
        assert dist.get_world_size(group) == 3
        dist.destroy_process_group(group)
    except AssertionError:
        dist.barrier()


@right(ranks=2, leftovers="raise")
def an_error_on_the_way_does_not_skip_the_cleaning_up():
    group, seen = dist.new_group([0, 1]), ""
    try:
        dist.barrier(group=group)
        raise ValueError("on the way")  # noqa: TRY301
    except ValueError as error:
        seen = str(error)
    finally:
        dist.destroy_process_group(group)
    assert seen == "on the way"


@fault("GroupsLeftOver", ranks=4, leftovers="raise")
def the_parts_of_the_world_are_left_behind():
    part, _ = dist.new_subgroups(group_size=2)  # fault
    dist.barrier(group=part)


@right(ranks=4, leftovers="raise")
def the_parts_of_the_world_are_destroyed():
    part, parts = dist.new_subgroups(group_size=2)
    x = torch.ones(1)
    dist.all_reduce(x, group=part)
    for one in parts:
        dist.destroy_process_group(one)
    assert x.item() == 2.0
