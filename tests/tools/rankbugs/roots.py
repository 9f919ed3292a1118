"""RootMismatch and SplitMismatch: who gives, and how much to whom."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from tests.tools.rankbugs.corpus import fault, right


@fault("RootMismatch", ranks=2)
def each_rank_takes_itself_for_the_source():
    x = torch.tensor([float(dist.get_rank())])
    dist.broadcast(x, src=dist.get_rank())  # fault


@right(ranks=2)
def each_rank_is_the_source_in_turn():
    got = []
    for source in range(2):
        x = torch.tensor([float(dist.get_rank())])
        dist.broadcast(x, src=source)
        got.append(x.item())
    assert got == [0.0, 1.0]


@fault("RootMismatch", ranks=3)
def one_rank_reduces_to_another_place():
    x = torch.ones(2)
    if dist.get_rank() == 1:
        dist.reduce(x, dst=1)  # fault
    else:
        dist.reduce(x, dst=0)


@right(ranks=3)
def every_rank_reduces_to_one_place():
    x = torch.ones(2)
    dist.reduce(x, dst=1)
    if dist.get_rank() == 1:
        assert x.tolist() == [3.0, 3.0]


@fault("RootMismatch", ranks=4)
def the_last_rank_gathers_by_itself():
    collector = 3 if dist.get_rank() == 3 else 0
    room = [torch.empty(1) for _ in range(4)] if dist.get_rank() == collector else None
    dist.gather(torch.ones(1), room, dst=collector)  # fault


@right(ranks=4)
def the_last_rank_gathers_for_all():
    collector = 3
    room = [torch.empty(1) for _ in range(4)] if dist.get_rank() == collector else None
    dist.gather(torch.full((1,), float(dist.get_rank())), room, dst=collector)
    assert room is None or torch.cat(room).tolist() == [0.0, 1.0, 2.0, 3.0]


@fault("RootMismatch", ranks=2)
def both_ranks_scatter():
    me = dist.get_rank()
    mine = torch.empty(2)
    dist.scatter(mine, [torch.ones(2), torch.zeros(2)], src=me)  # fault


@right(ranks=2)
def one_rank_scatters_and_then_the_other():
    sums = []
    for source in (1, 0):
        mine = torch.empty(2)
        pieces = [torch.ones(2), torch.full((2,), 4.0 + source)] if dist.get_rank() == source else None
        dist.scatter(mine, pieces, src=source)
        sums.append(mine.sum().item())
    assert sums == ([2.0, 2.0] if dist.get_rank() == 0 else [10.0, 8.0])


@fault("RootMismatch", ranks=4)
def in_a_subgroup_the_second_rank_is_taken_for_the_first():
    group = dist.new_group([2, 3])
    if dist.get_rank() >= 2:
        x = torch.ones(3)
        dist.broadcast(x, src=dist.get_rank() if dist.get_rank() == 3 else 2, group=group)  # fault


@right(ranks=4)
def in_a_subgroup_the_source_is_a_global_rank():
    group = dist.new_group([2, 3])
    x = torch.full((3,), float(dist.get_rank()))
    if dist.get_rank() >= 2:
        dist.broadcast(x, src=3, group=group)
        dist.broadcast(x, group_src=1, group=group)
    assert x[0].item() == (3.0 if dist.get_rank() >= 2 else dist.get_rank())


@fault("RootMismatch", ranks=3)
def the_configuration_comes_from_two_places():
    config = [{"lr": 0.1}] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(config, src=1 if dist.get_rank() == 2 else 0)  # fault


@right(ranks=3)
def the_configuration_comes_from_one_place():
    config = [{"lr": 0.1}, "adam"] if dist.get_rank() == 2 else [None, None]
    dist.broadcast_object_list(config, src=2)
    assert config == [{"lr": 0.1}, "adam"]


@fault("RootMismatch", ranks=4)
def the_owner_of_the_third_layer_is_off_by_one():
    for layer in range(6):
        owner = layer % 4
        if layer == 2 and dist.get_rank() == 1:
            owner += 1
        weights = torch.full((2,), float(dist.get_rank()))
        dist.broadcast(weights, src=owner)  # fault


@right(ranks=4)
def each_layer_has_its_owner():
    owners = []
    for layer in range(6):
        weights = torch.full((2,), float(dist.get_rank()))
        dist.broadcast(weights, src=layer % 4)
        owners.append(weights[0].item())
    assert owners == [0.0, 1.0, 2.0, 3.0, 0.0, 1.0]


def leader(score):
    return int(score.argmax())


@fault("RootMismatch", ranks=3)
def the_leader_is_found_in_local_scores():
    score = torch.zeros(3)
    score[2 - dist.get_rank()] = 1.0
    x = functional.broadcast(torch.ones(2), leader(score), dist.group.WORLD)  # fault
    return x + 1


@right(ranks=3)
def the_leader_is_found_in_shared_scores():
    score = torch.zeros(3)
    score[2 - dist.get_rank()] = float(dist.get_rank())
    dist.all_reduce(score)
    x = functional.broadcast(torch.full((2,), dist.get_rank() + 5.0), leader(score), dist.group.WORLD)
    assert (x + 1).tolist() == [6.0, 6.0]


# -- splits


@fault("SplitMismatch", ranks=2)
def one_rank_expects_less_than_it_is_sent():
    sent = [1, 3] if dist.get_rank() == 0 else [2, 2]
    wanted = [1, 1] if dist.get_rank() == 0 else [3, 2]
    out = torch.empty(sum(wanted))
    dist.all_to_all_single(out, torch.ones(4), wanted, sent)  # fault


@right(ranks=2)
def each_rank_expects_what_it_is_sent():
    sent = [1, 3] if dist.get_rank() == 0 else [2, 2]
    wanted = [1, 2] if dist.get_rank() == 0 else [3, 2]
    out = torch.empty(sum(wanted))
    dist.all_to_all_single(out, torch.arange(4.0) + 10 * dist.get_rank(), wanted, sent)
    assert out.tolist() == ([0.0, 10.0, 11.0] if dist.get_rank() == 0 else [1.0, 2.0, 3.0, 12.0, 13.0])


@fault("SplitMismatch", ranks=3)
def tokens_are_expected_as_they_are_sent():
    counts = [[1, 2, 0], [2, 0, 1], [1, 1, 1]][dist.get_rank()]
    tokens = torch.ones(sum(counts), 4)
    got = torch.empty(sum(counts), 4)
    dist.all_to_all_single(got, tokens, counts, counts)  # fault


@right(ranks=3)
def counts_travel_before_the_tokens():
    counts = torch.tensor([[1, 2, 0], [2, 0, 1], [1, 1, 1]][dist.get_rank()])
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts)
    tokens = torch.full((int(counts.sum()), 4), float(dist.get_rank()))
    got = torch.empty(int(arriving.sum()), 4)
    dist.all_to_all_single(got, tokens, arriving.tolist(), counts.tolist())
    assert got[:, 0].tolist() == [[0.0, 1.0, 1.0, 2.0], [0.0, 0.0, 2.0], [1.0, 2.0]][dist.get_rank()]


@fault("SplitMismatch", ranks=2)
def one_rank_leaves_its_splits_out():
    if dist.get_rank() == 0:
        dist.all_to_all_single(torch.empty(4), torch.ones(4), [2, 2], [3, 1])  # fault
    else:
        dist.all_to_all_single(torch.empty(4), torch.ones(4))  # fault


@right(ranks=2)
def one_rank_leaves_its_even_splits_out():
    out = torch.empty(4)
    if dist.get_rank() == 0:
        dist.all_to_all_single(out, torch.arange(4.0), [2, 2], [2, 2])
    else:
        dist.all_to_all_single(out, torch.arange(4.0))
    assert out.tolist() == ([0.0, 1.0, 0.0, 1.0] if dist.get_rank() == 0 else [2.0, 3.0, 2.0, 3.0])


@fault("SplitMismatch", ranks=4)
def in_a_subgroup_the_pieces_are_turned_round():
    group = dist.new_group([1, 3])
    if dist.get_rank() == 1:
        dist.all_to_all_single(torch.empty(3), torch.ones(5), [1, 2], [1, 4], group=group)  # fault
    elif dist.get_rank() == 3:
        dist.all_to_all_single(torch.empty(6), torch.ones(4), [2, 4], [2, 2], group=group)  # fault


@right(ranks=4)
def in_a_subgroup_the_pieces_fit():
    group = dist.new_group([1, 3])
    out = torch.zeros(0)
    if dist.get_rank() == 1:
        out = torch.empty(3)
        dist.all_to_all_single(out, torch.ones(5), [1, 2], [1, 4], group=group)
    elif dist.get_rank() == 3:
        out = torch.empty(6)
        dist.all_to_all_single(out, torch.full((4,), 2.0), [4, 2], [2, 2], group=group)
    assert out.sum().item() == [0.0, 5.0, 0.0, 8.0][dist.get_rank()]


@fault("SplitMismatch", ranks=2)
def the_counts_of_the_third_step_are_stale():
    arriving = [1, 1]
    for step in range(4):
        counts = [1, 1] if step < 2 or dist.get_rank() == 0 else [2, 1]
        out = torch.empty(sum(arriving))
        dist.all_to_all_single(out, torch.ones(sum(counts)), arriving, counts)  # fault


@right(ranks=2)
def the_counts_of_each_step_are_fresh():
    rows = 0
    for step in range(4):
        counts = [1, 1] if step < 2 or dist.get_rank() == 0 else [2, 1]
        arriving = [torch.empty(1, dtype=torch.int64) for _ in range(2)]
        dist.all_to_all(arriving, [torch.tensor([count]) for count in counts])
        out = torch.empty(int(sum(arriving)))
        dist.all_to_all_single(out, torch.ones(sum(counts)), [int(n) for n in arriving], counts)
        rows += int(out.sum())
    assert rows == (10 if dist.get_rank() == 0 else 8)


@fault("SplitMismatch", ranks=2)
def functional_exchange_with_wrong_sizes():
    sizes = ([2, 1], [2, 1]) if dist.get_rank() == 0 else ([2, 1], [1, 2])
    y = functional.all_to_all_single(torch.ones(3), sizes[0], sizes[1], dist.group.WORLD)  # fault
    return y.sum()


@right(ranks=2)
def functional_exchange_with_fitting_sizes():
    sizes = ([2, 1], [2, 1]) if dist.get_rank() == 0 else ([1, 2], [1, 2])
    y = functional.all_to_all_single(torch.arange(3.0), sizes[0], sizes[1], dist.group.WORLD)
    assert (y + 0).tolist() == ([0.0, 1.0, 0.0] if dist.get_rank() == 0 else [2.0, 1.0, 2.0])


@right(ranks=3)
def an_exchange_in_which_one_rank_sends_nothing():
    sent = [[0, 0, 0], [1, 0, 2], [2, 1, 0]]
    wanted = [list(column) for column in zip(*sent)]
    me = dist.get_rank()
    out = torch.empty(sum(wanted[me]))
    dist.all_to_all_single(out, torch.full((sum(sent[me]),), float(me)), wanted[me], sent[me])
    assert out.tolist() == [[1.0, 2.0, 2.0], [2.0], [1.0, 1.0]][me]


@fault("SplitMismatch", ranks=4)
def each_rank_expects_the_share_of_its_right_neighbour():
    me = dist.get_rank()
    sent = [int(peer == (me + 1) % 4) for peer in range(4)]
    wanted = [int(peer == (me + 1) % 4) for peer in range(4)]
    out = torch.empty(1)
    dist.all_to_all_single(out, torch.ones(1), wanted, sent)  # fault


@right(ranks=4)
def each_rank_expects_the_share_of_its_left_neighbour():
    me = dist.get_rank()
    sent = [int(peer == (me + 1) % 4) for peer in range(4)]
    wanted = [int(peer == (me - 1) % 4) for peer in range(4)]
    out = torch.empty(1)
    dist.all_to_all_single(out, torch.ones(1) * me, wanted, sent)
    assert out.item() == (me - 1) % 4


@fault("SplitMismatch", ranks=3)
def the_router_of_one_rank_drops_a_token():
    routed = [[2, 1, 1], [1, 2, 1], [1, 1, 2]]
    arriving = [row[dist.get_rank()] for row in routed]
    if dist.get_rank() == 0:
        routed[0][1] = 0
    counts = routed[dist.get_rank()]
    dist.all_to_all_single(torch.empty(sum(arriving), 2), torch.ones(sum(counts), 2), arriving, counts)  # fault
