"""An item at an index of each rank, of a list or of what is made where it is taken: each rank's own, or refused."""

import pytest
import torch
import torch.distributed as dist

from localtensor.errors import RanksDiverge
from localtensor.lockstep.mode import LocalTensorMode
from tests.end_to_end.programs.lockstep_ways import assert_both

RANKS = 4


def takes_items_of_what_is_made():
    rank, x, rows = dist.get_rank(), torch.arange(8.0), True
    mine = x.chunk(4)[rank] if rows else x
    pair: tuple = (x.split(2)[rank // 2] + rank, [10, 20, 30, 40][rank] + len(range(rank)))
    named = (x + 1, x + 2, x + 3, x + 4)
    y = named[rank] if rank else x
    made = [torch.tensor(value) for value in ([0], [2, 4], [1], [3, 3])][rank] * (1, 2, 3, 4)[rank]
    return mine, pair, y, made


def computes_with_floats_and_ranges():
    rank, x = dist.get_rank(), torch.arange(16.0).reshape(4, 4)
    half, mine = int(rank / 2), x[range(rank, rank + 1), :]
    more: int = int(float(rank) * 1.5) + int(8 / (rank + 1))
    named = [[0, 1], [2, 3], [4, 5], [6, 7]]
    row = x.to(torch.int32)[rank // 2].tolist()
    return half, mine, more, named[half], row, (x * rank > 4).int().tolist()


def test_an_assigned_number_is_each_ranks_own():
    assert_both(computes_with_floats_and_ranges, ranks=RANKS)


def test_an_assigned_item_is_each_ranks_own():
    assert_both(takes_items_of_what_is_made, ranks=RANKS)


class Worker:
    def __init__(self):
        self.rank, self.steps = dist.get_rank(), 0


def takes_an_item_that_one_rank_lacks():
    x = torch.ones(6)
    try:
        mine = x.chunk(3)[dist.get_rank()]
    except IndexError:
        mine = x
    return mine


def draws_beside_an_item():
    mine = [torch.rand(2), torch.zeros(2), torch.zeros(2), torch.zeros(2)][dist.get_rank()]
    return mine  # noqa: RET504


def takes_an_item_for_an_attribute():
    worker = Worker()
    worker.steps = torch.ones(4).chunk(4)[worker.rank]
    return worker.steps


@pytest.mark.parametrize(
    "program", [takes_an_item_that_one_rank_lacks, draws_beside_an_item, takes_an_item_for_an_attribute]
)
def test_what_cannot_be_done_for_each_kind_of_rank_is_refused(program):
    with LocalTensorMode(RANKS), pytest.raises(RanksDiverge):
        program()
