"""GroupsLeftOver: groups that a program makes and leaves behind."""

import torch
import torch.distributed as dist

from tests.tools.rankbugs.corpus import fault, right


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


@fault("GroupsLeftOver", ranks=4, leftovers="raise")
def a_group_of_members_alone_is_left_behind():
    half = [0, 1] if dist.get_rank() < 2 else [2, 3]
    group = dist.new_group(half, use_local_synchronization=True)  # fault
    dist.all_reduce(torch.ones(1), group=group)
    return dist.get_world_size(group)


@right(ranks=3, leftovers="raise")
def only_members_destroy_their_group():
    pair, x = dist.new_group([0, 2]), torch.ones(1)
    if dist.get_rank() != 1:
        dist.all_reduce(x, group=pair)
        dist.destroy_process_group(pair)
    assert x.item() == (1.0 if dist.get_rank() == 1 else 2.0)
