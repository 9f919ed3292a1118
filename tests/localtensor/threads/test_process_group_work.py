import gc
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc

import localtensor as lt
from localtensor.errors import EarlyReturn, WorkNotWaited

three_ranks = pytest.mark.ranks(3, schedules=6)
two_ranks = pytest.mark.ranks(2, schedules=6)


def begin(value=1.0, **kw):
    x = torch.full((2,), value)
    return x, dist.all_reduce(x, async_op=True, **kw)


@three_ranks
def test_a_second_wait_changes_nothing():
    x, work = begin()
    assert work.wait() is True
    x += 1
    assert work.wait() is work.is_completed() is True
    assert x.tolist() == [4.0, 4.0]


@three_ranks
def test_who_polls_lets_the_others_come_and_may_then_read_without_a_wait(rank):
    x, work = begin(rank)
    polls = 0
    while not work.is_completed():
        polls += 1
    assert x.tolist() == [3.0, 3.0] and polls < 50
    assert work.is_success() and work.exception() is None


@three_ranks
def test_a_future_waits_and_passes_its_outputs_on():
    x, work = begin()
    y, other = begin(2.0)
    doubled = work.get_future().then(lambda future: future.value()[0] * 2)
    later = other.get_future()
    seen = []
    later.add_done_callback(lambda future: seen.append(future.value()[0].tolist()))
    assert doubled.wait().tolist() == [6.0, 6.0]
    assert later.done() and later.wait()[0].tolist() == [6.0, 6.0] and seen == [[6.0, 6.0]]
    assert x.tolist() == [3.0, 3.0] and y.tolist() == [6.0, 6.0]


@three_ranks
def test_a_future_that_is_asked_in_a_loop_is_done_in_the_end():
    x, work = begin()
    future = work.get_future()
    while not future.done():
        pass
    assert x.tolist() == [3.0, 3.0]


@three_ranks
def test_works_may_be_waited_for_in_any_order_and_each_rank_in_its_own(rank):
    begun = [begin(float(number)) for number in range(5)]
    for _, work in (begun, begun[::-1], begun[2:] + begun[:2])[rank]:
        work.wait()
    assert [x[0].item() for x, _ in begun] == [0.0, 3.0, 6.0, 9.0, 12.0]


@three_ranks
def test_a_work_may_be_waited_for_in_another_function():
    class Later:
        def __init__(self):
            self.x, self.work = begin()

        def finish(self):
            self.work.synchronize()
            return self.x.tolist()

    assert Later().finish() == [3.0, 3.0]


@two_ranks
def test_the_result_of_a_work_are_its_outputs(rank):
    outputs = [torch.zeros(1), torch.zeros(1)]
    work = dist.all_gather(outputs, torch.tensor([rank + 1.0]), async_op=True)
    held = work.result()
    assert [x.item() for x in held] == [1.0, 2.0]
    assert all([a is b for a, b in zip(held, outputs, strict=True)])


@two_ranks
def test_the_input_may_not_change_what_was_sent_and_the_output_comes_at_the_wait(rank):
    source, target = torch.full((2,), rank + 1.0), torch.full((4,), -1.0)
    work = dist.all_gather_into_tensor(target, source, async_op=True)
    work.wait()
    source.fill_(9)
    assert target.tolist() == [1.0, 1.0, 2.0, 2.0]


@pytest.mark.ranks(3, schedules=6, leftovers="raise")
def test_works_of_several_groups_do_not_wait_for_each_other(rank):
    pair, all_of_us = dist.new_group([0, 1]), dist.group.WORLD
    x, whole = begin(group=all_of_us)
    y, ours = begin(group=pair) if rank < 2 else (None, None)
    if ours is not None:
        ours.wait()
    whole.wait()
    if rank < 2:
        dist.destroy_process_group(pair)
    assert x[0].item() == 3.0 and (y is None if rank == 2 else y[0].item() == 2.0)


@pytest.mark.slow
@two_ranks
def test_each_output_of_a_coalesced_functional_collective_may_be_waited_for():
    ones = torch.ones(2), torch.ones(3) * 2
    first = fc.all_reduce_coalesced(list(ones), "sum", dist.group.WORLD)
    second = fc.all_reduce_coalesced(list(ones), "sum", dist.group.WORLD)
    name = dist.group.WORLD.group_name
    third = [
        torch.ops._c10d_functional.wait_tensor(x)
        for x in torch.ops._c10d_functional.all_reduce_coalesced(list(ones), "sum", name)
    ]
    assert first[0].wait().sum() == 4
    gc.collect()  # a Work whose Python side is gone would make C++ wait for ever
    assert first[1].wait().sum() == 12
    assert [(x + 0).sum() for x in second[::-1]] == [12, 4]
    assert third[1].sum() == 12


@two_ranks
def test_a_functional_collective_that_no_one_reads_is_not_a_fault(comms):
    fc.all_reduce(torch.ones(2), "sum", dist.group.WORLD)
    assert comms.kinds == ["all_reduce"]


def test_a_work_that_is_never_waited_for_is_named_with_its_line():
    def program():
        begin()

    line = begin.__code__.co_firstlineno + 2
    with pytest.raises(WorkNotWaited) as caught:
        lt.run(program, ranks=2)
    assert str(caught.value) == (
        "all_reduce #0 in group 0: async_op: not waited for on ranks 0, 1: the function returned while its output may "
        "still be on the way. Keep the Work that the call returns, and call its wait() before the output is read.\n"
        "  ranks 0, 1: all_reduce #0 of f32[2] on cpu, op=sum, in group 0 (ranks 0, 1), "
        f"at test_process_group_work.py:{line} in begin"
    )


def test_a_wait_for_a_rank_that_never_comes_ends_at_once():
    def program():
        if dist.get_rank():
            begin()[1].wait()

    with pytest.raises(EarlyReturn) as caught:
        lt.run(program, ranks=3)
    assert [wait.ranks for wait in caught.value.waits] == [(0,), (0,)]


def test_what_a_work_held_is_let_go_when_it_is_over():
    seen = []

    def program():
        for _ in range(20):
            x, work = begin()
            work.wait()
            y = fc.all_reduce(torch.ones(2), "sum", dist.group.WORLD)
            y.wait()
            seen.extend(map(weakref.ref, (x, work)))
        del x, work, y
        return sum(ref() is not None for ref in seen)

    gc.disable()  # nobody has to look for circles
    try:
        assert lt.run(program, ranks=1).values == (0,)
    finally:
        gc.enable()


def test_a_work_that_was_waited_for_says_so_after_the_run_too():
    def program():
        _, work = begin()
        work.wait()
        return work

    work = lt.run(program, ranks=2)[1]
    assert work.wait() and work.is_success()


class Box:
    def __init__(self, x):
        self.x = x


def returns_what_it_has_not_read():
    total = fc.all_reduce(torch.ones(2) * (dist.get_rank() + 1), "sum", dist.group.WORLD)
    most = fc.all_reduce(torch.arange(3) * dist.get_rank(), "max", dist.group.WORLD)
    return total, {"nested": Box(most)}


@pytest.mark.parametrize("on", ["threads", "gloo"])
def test_a_result_that_no_rank_has_read_has_its_numbers_behind_the_run(on):
    for total, nested in lt.run(returns_what_it_has_not_read, ranks=3, on=on):
        assert total.tolist() == [6, 6]
        assert nested["nested"].x.tolist() == [0, 2, 4]
