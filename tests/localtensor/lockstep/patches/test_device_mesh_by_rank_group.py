"""One kind of ranks at a time: who is meant inside, and how the answers come together."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from localtensor.errors import NotInLockstep, RanksDiverge
from localtensor.lockstep.mode import LocalTensorMode, rank_map
from localtensor.lockstep.patches.device_mesh import for_each_rank_group, keep_ranks, wait_for
from localtensor.lockstep.values.partition import partition
from localtensor.lockstep.values.rank_int import rank_int, rank_values

SIZES = [2, 2, 3, 2]


def test_a_function_runs_once_for_each_kind_with_plain_ints_and_stacks():
    seen = []

    def do(of):
        size, x = of(sizes), of(each)
        seen.append((size, x.ranks))
        return x * size

    with LocalTensorMode(4) as mode:
        sizes, each = rank_int(SIZES), rank_map(torch.tensor)
        found = for_each_rank_group(mode, [sizes, 7], do)
    assert seen == [(2, (0, 1, 3)), (3, (2,))]
    assert [found.on(rank).item() for rank in range(4)] == [0, 2, 6, 6]


def test_without_an_int_that_differs_it_runs_once_on_all():
    with LocalTensorMode(4) as mode:
        assert for_each_rank_group(mode, [3, 4], lambda of: of(mode.ranks)) == (0, 1, 2, 3)


def test_inside_a_kind_collectives_are_of_its_groups_and_ranks_are_its_ranks():
    with LocalTensorMode(4) as mode:
        pairs, sizes = dist.new_subgroups(2)[0], rank_int([5, 5, 6, 6])

        def do(of):
            x = of(rank_map(torch.tensor))
            dist.all_reduce(x, group=pairs)
            return x + of(sizes), rank_values(dist.get_rank(), 4)[mode.everyone.row_of >= 0].tolist()[0]

        found, first = for_each_rank_group(mode, [sizes], do)
    assert [found.on(rank).item() for rank in range(4)] == [6, 6, 11, 11]
    assert rank_values(first, 4).tolist() == [0, 0, 2, 2]


def test_a_kind_that_cuts_a_group_in_two_cannot_communicate():
    with LocalTensorMode(4) as mode, pytest.raises(NotInLockstep, match="some ranks of a group"):
        for_each_rank_group(mode, [rank_int(SIZES)], lambda of: dist.all_reduce(of(torch.ones(1))))
    with LocalTensorMode(4) as mode:
        pairs = dist.new_subgroups(2)[0]
        with pytest.raises(NotInLockstep, match="some ranks of a group"):  # of 2 and 3; 0 and 1 are of one kind
            for_each_rank_group(mode, [rank_int(SIZES)], lambda of: dist.all_reduce(of(torch.ones(1)), group=pairs))


def test_lists_ints_and_what_is_the_same_come_together():
    with LocalTensorMode(4) as mode:
        sizes = rank_int(SIZES)
        found = for_each_rank_group(mode, [sizes], lambda of: ([of(sizes), None, "x"], of(sizes) > 1))
    assert rank_values(found[0][0], 4).tolist() == SIZES
    assert found[0][1:] == [None, "x"]
    assert found[1] is True


@pytest.mark.parametrize("answer", [lambda size: size > 2, lambda size: [1] * size], ids=["a bool", "a length"])
def test_what_cannot_be_one_thing_is_reported(answer):
    with LocalTensorMode(4) as mode, pytest.raises((RanksDiverge, NotInLockstep)):
        for_each_rank_group(mode, [rank_int(SIZES)], lambda of: answer(of(rank_int(SIZES))))


def test_ranks_without_the_int_hold_nothing_of_the_answer():
    with LocalTensorMode(4) as mode:
        sizes = rank_int([1, 0, 2, 0], np.array([True, False, True, False]))
        found = for_each_rank_group(mode, [sizes], lambda of: of(torch.ones(3)) * of(sizes))
    assert found.ranks == (0, 2)


def test_a_tensor_of_some_ranks_is_a_copy():
    with LocalTensorMode(2) as mode:
        x = rank_map(torch.tensor)
        mine = keep_ranks(mode, x, partition([-1, 0], [1]))
        mine.add_(5)
    assert mine.ranks == (1,)
    assert (mine.on(1).item(), x.on(1).item()) == (6, 1)


def test_what_a_collective_brings_is_waited_for():
    brought = torch.distributed._functional_collectives.AsyncCollectiveTensor(torch.ones(1))
    found = wait_for([brought, (brought, 3)])
    assert [type(found[0]), type(found[1][0]), found[1][1]] == [torch.Tensor, torch.Tensor, 3]
