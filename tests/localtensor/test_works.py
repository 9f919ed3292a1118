import gc
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc

import localtensor as lt
from localtensor.errors import EarlyReturn, WorkNotWaited

SCHEDULES = ["round_robin", *(f"shuffled:{seed}" for seed in range(4)), "pct:1"]


@pytest.fixture(params=SCHEDULES)
def runs(request):
    return lambda program, ranks=3, **kw: lt.run(program, ranks=ranks, schedule=request.param, **kw).values


def begin(value=1.0, **kw):
    x = torch.full((2,), value)
    return x, dist.all_reduce(x, async_op=True, **kw)


def test_a_second_wait_changes_nothing(runs):
    def program():
        x, work = begin()
        first = work.wait()
        x += 1
        return first, work.wait(), work.is_completed(), x.tolist()

    assert runs(program) == ((True, True, True, [4.0, 4.0]),) * 3


def test_who_polls_lets_the_others_come_and_may_then_read_without_a_wait(runs):
    def program():
        x, work = begin(dist.get_rank())
        polls = 0
        while not work.is_completed():
            polls += 1
        return x.tolist(), work.is_success(), work.exception(), polls < 50

    assert runs(program) == (([3.0, 3.0], True, None, True),) * 3


def test_a_future_waits_and_passes_its_outputs_on(runs):
    def program():
        x, work = begin()
        y, other = begin(2.0)
        doubled = work.get_future().then(lambda future: future.value()[0] * 2)
        later = other.get_future()
        seen = []
        later.add_done_callback(lambda future: seen.append(future.value()[0].tolist()))
        return doubled.wait().tolist(), later.done(), later.wait()[0].tolist(), seen, x.tolist(), y.tolist()

    expected = [6.0, 6.0], True, [6.0, 6.0], [[6.0, 6.0]], [3.0, 3.0], [6.0, 6.0]
    assert runs(program) == (expected,) * 3


def test_a_future_that_is_asked_in_a_loop_is_done_in_the_end(runs):
    def program():
        x, work = begin()
        future = work.get_future()
        while not future.done():
            pass
        return x.tolist()

    assert runs(program) == ([3.0, 3.0],) * 3


def test_works_may_be_waited_for_in_any_order_and_each_rank_in_its_own(runs):
    def program():
        begun = [begin(float(number)) for number in range(5)]
        rank = dist.get_rank()
        for _, work in (begun, begun[::-1], begun[2:] + begun[:2])[rank]:
            work.wait()
        return [x[0].item() for x, _ in begun]

    assert runs(program) == ([0.0, 3.0, 6.0, 9.0, 12.0],) * 3


def test_a_work_may_be_waited_for_in_another_function(runs):
    class Later:
        def __init__(self):
            self.x, self.work = begin()

        def finish(self):
            self.work.synchronize()
            return self.x.tolist()

    assert runs(lambda: Later().finish()) == ([3.0, 3.0],) * 3


def test_the_result_of_a_work_are_its_outputs(runs):
    def program():
        outputs = [torch.zeros(1), torch.zeros(1)]
        work = dist.all_gather(outputs, torch.tensor([dist.get_rank() + 1.0]), async_op=True)
        held = work.result()
        return [x.item() for x in held], [a is b for a, b in zip(held, outputs)]

    assert runs(program, 2) == (([1.0, 2.0], [True, True]),) * 2


def test_the_input_may_not_change_what_was_sent_and_the_output_comes_at_the_wait(runs):
    def program():
        source, target = torch.full((2,), dist.get_rank() + 1.0), torch.full((4,), -1.0)
        work = dist.all_gather_into_tensor(target, source, async_op=True)
        work.wait()
        source.fill_(9)
        return target.tolist()

    assert runs(program, 2) == ([1.0, 1.0, 2.0, 2.0],) * 2


def test_works_of_several_groups_do_not_wait_for_each_other(runs):
    def program():
        rank = dist.get_rank()
        pair, all_of_us = dist.new_group([0, 1]), dist.group.WORLD
        x, whole = begin(group=all_of_us)
        y, ours = begin(group=pair) if rank < 2 else (None, None)
        if ours is not None:
            ours.wait()
        whole.wait()
        if rank < 2:
            dist.destroy_process_group(pair)
        return x[0].item(), None if y is None else y[0].item()

    assert runs(program) == ((3.0, 2.0), (3.0, 2.0), (3.0, None))


def test_each_output_of_a_coalesced_functional_collective_may_be_waited_for(runs):
    def program():
        ones = torch.ones(2), torch.ones(3) * 2
        first = fc.all_reduce_coalesced(list(ones), "sum", dist.group.WORLD)
        second = fc.all_reduce_coalesced(list(ones), "sum", dist.group.WORLD)
        name = dist.group.WORLD.group_name
        third = [
            torch.ops._c10d_functional.wait_tensor(x)
            for x in torch.ops._c10d_functional.all_reduce_coalesced(list(ones), "sum", name)
        ]
        totals = [first[0].wait().sum().item()]
        gc.collect()  # a Work whose Python side is gone would make C++ wait for ever
        totals.append(first[1].wait().sum().item())
        return (
            totals,
            [(x + 0).sum().item() for x in second[::-1]],
            third[1].sum().item(),
        )

    assert runs(program, 2) == (([4.0, 12.0], [12.0, 4.0], 12.0),) * 2


def test_a_functional_collective_that_nobody_reads_is_not_a_fault(runs):
    def program():
        fc.all_reduce(torch.ones(2), "sum", dist.group.WORLD)
        return 5

    assert runs(program, 2) == (5, 5)


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
        f"at test_works.py:{line} in begin"
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
