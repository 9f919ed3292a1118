"""Asynchronous collectives in lockstep: done at once, and watched until they are waited for."""

import gc
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from localtensor.errors import BufferReused, ReadBeforeWait, WorkNotWaited
from localtensor.lockstep.comms.c10d_dispatch import LockstepWork
from localtensor.lockstep.mode import LocalTensorMode
from tests.localtensor.both_ways import check_both_ways, numbers

STARTS = {
    "all_reduce": lambda x, out: dist.all_reduce(x, async_op=True),
    "broadcast": lambda x, out: dist.broadcast(x, 1, async_op=True),
    "all_gather_into_tensor": lambda x, out: dist.all_gather_into_tensor(out, x, async_op=True),
    "reduce_scatter_tensor": lambda x, out: dist.reduce_scatter_tensor(x[:1], out, async_op=True),
    "all_to_all_single": lambda x, out: dist.all_to_all_single(out, out.clone(), async_op=True),
    "all_gather": lambda x, out: dist.all_gather(list(out.chunk(4)), x, async_op=True),
}


@pytest.mark.parametrize("name", STARTS)
def test_after_the_wait_it_is_as_without_async(name):
    def program():
        x, out = numbers(2), numbers(8, seed=1)
        if name == "reduce_scatter_tensor":
            out = out[:4].clone()
        work = STARTS[name](x, out)
        work.wait()
        assert work.is_completed() and work.is_success() and work.wait()
        return x, out

    assert len(check_both_ways(program)) == 2


def test_it_hands_back_its_outputs_and_a_future():
    with LocalTensorMode(2):
        x = numbers(2)
        work = dist.all_reduce(x, async_op=True)
        assert type(work) is LockstepWork and work.result()[0] is x and work.get_future().value()[0] is x
        assert dist.barrier(async_op=True).wait() and dist.all_reduce(x) is None


def test_a_work_outlives_its_wait():
    with LocalTensorMode(2):
        work = dist.all_reduce(numbers(2), async_op=True)
        work.wait()
        gc.collect()
        assert work.wait() and work.is_completed()


def test_a_work_that_no_one_waited_for_is_reported_at_the_end():
    mode = LocalTensorMode(3)
    with pytest.raises(WorkNotWaited) as caught, mode:
        dist.all_reduce(torch.ones(2), group=dist.new_group([0, 2]), async_op=True)
    words = str(caught.value)
    assert words.startswith("all_reduce") and "not waited for on ranks 0, 2" in words
    assert Path(__file__).name in words and [call.rank for call in caught.value.calls] == [0, 2]
    assert mode.in_flight == []


def test_an_error_inside_is_not_hidden_by_a_work_left_over():
    def program():
        with LocalTensorMode(2):
            dist.all_reduce(torch.ones(2), async_op=True)
            raise KeyError

    with pytest.raises(KeyError):
        program()


WRITES = {
    "the tensor": lambda x: x.add_(1),
    "a view": lambda x: x[0].zero_(),
    "by a collective": dist.all_reduce,
    "functional": lambda x: torch.ops._c10d_functional.all_reduce_(x, "sum", dist.group.WORLD.group_name),
    "by copy": lambda x: x.copy_(torch.ones(2)),
}
READS = {
    "an op": lambda x: x + 1,
    "a view": lambda x: x[0] * 2,
    "by a collective": lambda x: dist.all_gather_into_tensor(torch.zeros(4), x),
    "functional": lambda x: torch.ops._c10d_functional.all_reduce(x, "sum", dist.group.WORLD.group_name),
}


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("name", WRITES)
def test_a_write_into_a_tensor_in_flight(name, outside):
    x = torch.ones(2)
    with LocalTensorMode(2):
        x = x if outside else numbers(2)
        work = dist.all_gather_into_tensor(torch.zeros(4), x, async_op=True)
        x.sum()  # reading what is read is no fault
        with pytest.raises(BufferReused, match="until wait") as caught:
            WRITES[name](x)
        work.wait()
        WRITES[name](x)
        assert Path(__file__).name in str(caught.value)


@pytest.mark.parametrize("name", READS)
def test_a_read_of_what_is_written_before_the_wait(name):
    with LocalTensorMode(2):
        x = numbers(2)
        row = x[:1]
        work = dist.all_reduce(x, async_op=True)
        with pytest.raises(ReadBeforeWait, match="until wait"):
            READS[name](x)
        with pytest.raises(ReadBeforeWait):
            row + 1
        assert torch.zeros_like(x).shape == x.view(2, 1).view(2).shape  # shapes and views read nothing
        work.wait()
        READS[name](x)


def test_the_modes_own_end_forgets_what_was_in_flight():
    mode = LocalTensorMode(2)
    with pytest.raises(WorkNotWaited), mode:
        dist.all_reduce(numbers(2), async_op=True)
    with mode:
        assert mode.in_flight == [] and dist.get_world_size() == 2
