"""LocalTensors and modes: after a mode has ended, in another one, within one, beside one, and from outside of any."""

import copy
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn

from localtensor.errors import AnotherMode, OutsideWrite
from localtensor.lockstep.mode import LocalTensorMode, rank_map
from localtensor.lockstep.values.local_tensor import LocalTensor


@pytest.fixture(autouse=True)
def mode():
    with LocalTensorMode(4) as made:
        yield made


@pytest.fixture
def x():
    return rank_map(lambda rank: torch.arange(3.0) + rank)


def on_all(x):
    return [x.on(rank).tolist() for rank in range(4)]


def test_arithmetic_goes_on_after_the_mode_has_ended():
    with LocalTensorMode(3):
        x = rank_map(lambda rank: torch.full((2, 2), float(rank)))
        weight = nn.Parameter(x)
        uneven = rank_map(lambda rank: torch.ones(rank, 2))
    with LocalTensorMode(5):
        pass
    # the mode of the fixture is still at work, and is another one
    with pytest.raises(
        AnotherMode,
        match=r"aten.add.Tensor: an input: used at test_local_tensor_modes.py:\d+ in .*another LocalTensorMode",
    ):
        x + 1
    with pytest.raises(AnotherMode):
        torch.cat([torch.ones(2, 2), x])

    def outside():
        weight.mul(torch.ones(2, 2)).sum().backward()
        x.add_(1)
        return x @ torch.eye(2), weight.grad, uneven * 2, copy.deepcopy(x), x.sum(), x[0] > 1

    product, grad, doubled, twin, total, more = in_a_thread(outside)
    assert [product.on(rank).tolist() for rank in range(3)] == [[[rank + 1.0] * 2] * 2 for rank in range(3)]
    assert grad.reconcile().tolist() == [[1, 1], [1, 1]] and doubled.on(2).tolist() == [[2, 2], [2, 2]]
    assert twin.on(2).sum() == total.on(2) == 12 and more.on(0).tolist() == [False, False]


def in_a_thread(work):
    """What the work gives in a thread without a mode."""
    found = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def test_made_outside_of_any_mode():
    def make():
        x = LocalTensor([torch.zeros(2), torch.ones(2)], requires_grad=True)
        (x * torch.arange(2.0)).sum().backward()
        return x, LocalTensor({0: torch.ones(1), 2: torch.ones(1)})

    x, some = in_a_thread(make)
    assert x.requires_grad and x.grad.reconcile().tolist() == [0, 1] and x.on(1).tolist() == [1, 1]
    assert some.ranks == (0, 2) and some._partition.world == 3


def test_a_mode_within_a_mode_has_ranks_of_its_own(x):
    with LocalTensorMode(2):
        y = rank_map(torch.tensor)
        assert y.ranks == (0, 1) and torch.ones(2)._partition.world == 2
        with pytest.raises(AnotherMode):
            x + 1
    assert on_all(x + 1)[0] == [1, 2, 3]
    with pytest.raises(AnotherMode):
        y + 1


def test_two_threads_do_not_see_each_others_modes(x):
    barrier = threading.Barrier(2, timeout=20)
    found = {}

    def work(world):
        barrier.wait()
        with LocalTensorMode(world) as mine:
            barrier.wait()
            y = rank_map(torch.tensor)
            dist.all_reduce(y)
            torch.manual_seed(dist.get_rank())
            barrier.wait()
            found[world] = (dist.get_world_size(), y.reconcile().item(), torch.rand(1)._mode is mine, type(plain + 1))
            barrier.wait()

    plain = x.on(0)
    threads = [threading.Thread(target=work, args=(world,)) for world in (2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {2: (2, 1, True, LocalTensor), 3: (3, 3, True, LocalTensor)}
    assert dist.get_world_size() == 4 and (x + 1)._mode is x._mode


def test_plain_tensors_from_outside_are_read_and_written_by_all_alike(x, mode):
    with mode.disable():
        plain = torch.zeros(3)
    tail = plain[1:]
    plain.add_(1)
    tail += 1
    plain.unsqueeze_(0).squeeze_(0)
    dist.all_reduce(plain)
    assert type(plain + 1) is LocalTensor and plain.tolist() == [4, 8, 8] and on_all(plain + x)[1] == [5, 10, 11]
    for write in (
        plain.add_,
        tail.add_,
        plain.copy_,
        plain.data.mul_,
        lambda y: torch.add(y, 1, out=plain),
        lambda y: plain.view(3, 1).t().sub_(y),
    ):
        with pytest.raises(
            OutsideWrite, match=r"float32\[.*\] at test_local_tensor_modes.py:\d+ in .*made outside the mode"
        ):
            write(x if write is not tail.add_ else x[1:])
    assert plain.tolist() == [4, 8, 8]
