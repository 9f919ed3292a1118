import pytest
import torch
import torch.distributed as dist

import localtensor as lt
from localtensor.errors import NotInLockstep
from localtensor.lockstep.values.joined_tensors import JoinedTensors


@pytest.fixture
def made():
    with lt.LocalTensorMode(2):
        one, two, copy = (torch.zeros(2) for _ in range(3))
        joined = JoinedTensors()
        joined.joined(copy, [one, two])
        yield joined, one, two, copy


@pytest.mark.parametrize("which", [1, 2, 3])
def test_neither_the_copy_nor_what_it_is_made_of_is_written_to(made, which):
    with pytest.raises(NotInLockstep, match="add_ on some ranks: the tensor is on each rank another one of several"):
        made[0].check_write(made[which].view(1, 2), "add_")


def test_a_copy_whose_originals_are_gone_is_written_to():
    with lt.LocalTensorMode(2):
        joined, copy = JoinedTensors(), torch.zeros(2)
        joined.joined(copy, [torch.zeros(2), torch.ones(2)])
        joined.check_write(copy, "add_")


def test_a_copy_of_a_part_leads_to_the_whole():
    with lt.LocalTensorMode(2):
        joined, whole, other, copy = JoinedTensors(), torch.zeros(2), torch.zeros(2), torch.zeros(2)
        part = torch.zeros(2)
        joined.narrowed(part, whole)
        joined.check_write(whole, "add_")  # until it is joined
        joined.joined(copy, [part])
        with pytest.raises(NotInLockstep):
            joined.check_write(whole, "add_")
        joined.check_write(other, "add_")


def test_a_tensor_from_outside_is_known_by_its_storage():
    outside = torch.zeros(2)
    with lt.LocalTensorMode(2):
        joined, copy = JoinedTensors(), torch.zeros(2)
        joined.joined(copy, [outside])
        with pytest.raises(NotInLockstep):
            joined.check_write(outside.view(1, 2), "add_")


@pytest.mark.parametrize("differs", [False, True])
def test_a_collective_that_changes_nothing_is_no_write(differs):
    with lt.LocalTensorMode(4):
        rank = dist.get_rank()
        whole = torch.arange(8.0) + (rank if differs else 0)
        mine = whole.chunk(4)[rank]
        if differs:
            with pytest.raises(NotInLockstep, match="broadcast on some ranks"):
                dist.broadcast(whole, 0)
        else:
            dist.broadcast(whole, 0)
        assert mine.on(3).tolist() == ([9.0, 10.0] if differs else [6.0, 7.0])
