"""WorkNotWaited: something was begun, and nobody looked whether it was finished."""

import torch
import torch.distributed as dist
from torch import nn

from tests.tools.rankbugs.corpus import fault, right


@fault("WorkNotWaited", ranks=2)
def a_work_is_dropped():
    x = torch.ones(2)
    dist.all_reduce(x, async_op=True)  # fault


@right(ranks=2)
def a_work_is_waited_for():
    x = torch.ones(2)
    dist.all_reduce(x, async_op=True).wait()
    assert x.tolist() == [2.0, 2.0]


@fault("WorkNotWaited", ranks=3)
def only_the_last_work_is_waited_for():
    work = None
    for _ in range(3):
        work = dist.all_reduce(torch.ones(2), async_op=True)  # fault
    work.wait()


@right(ranks=3)
def all_works_are_waited_for_last_first():
    parts = [torch.ones(2) * i for i in range(3)]
    works = [dist.all_reduce(part, async_op=True) for part in parts]
    while works:
        works.pop().wait()
    assert [part[0].item() for part in parts] == [0.0, 3.0, 6.0]


@fault("WorkNotWaited", ranks=3)
def one_rank_does_not_wait():
    x = torch.ones(2)
    work = dist.broadcast(x, src=0, async_op=True)  # fault
    if dist.get_rank() != 1:
        work.wait()


@right(ranks=3)
def one_rank_waits_later():
    x, y = torch.full((2,), float(dist.get_rank())), torch.ones(1)
    work = dist.broadcast(x, src=2, async_op=True)
    if dist.get_rank() != 1:
        work.wait()
    dist.all_reduce(y)
    if dist.get_rank() == 1:
        work.wait()
    assert x.tolist() == [2.0, 2.0] and y.item() == 3.0


@fault("WorkNotWaited", ranks=2)
def a_letter_is_posted_and_forgotten():
    x = torch.ones(2)
    if dist.get_rank() == 0:
        dist.isend(x, dst=1)  # fault
    else:
        dist.recv(x, src=0)


@fault("WorkNotWaited", ranks=2)
def a_letter_is_expected_and_forgotten():
    x = torch.ones(2)
    if dist.get_rank() == 0:
        dist.irecv(x, src=1)  # fault
    else:
        dist.send(x, dst=0)


@right(ranks=2)
def a_letter_is_posted_and_seen_off():
    x = torch.ones(2)
    if dist.get_rank() == 0:
        sending = dist.isend(x * 3, dst=1)
        sending.wait()
    else:
        dist.recv(x, src=0)
    assert x.sum().item() == (2.0 if dist.get_rank() == 0 else 6.0)


@fault("WorkNotWaited", ranks=4)
def a_batch_of_messages_is_not_waited_for():
    me = dist.get_rank()
    x, y = torch.ones(2), torch.zeros(2)
    ops = [dist.P2POp(dist.isend, x, (me + 1) % 4), dist.P2POp(dist.irecv, y, (me - 1) % 4)]
    dist.batch_isend_irecv(ops)  # fault
    dist.barrier()


@right(ranks=4)
def a_batch_of_messages_is_waited_for_after_a_barrier():
    me = dist.get_rank()
    x, y = torch.full((2,), float(me)), torch.zeros(2)
    ops = [dist.P2POp(dist.isend, x, (me + 1) % 4), dist.P2POp(dist.irecv, y, (me - 1) % 4)]
    works = dist.batch_isend_irecv(ops)
    dist.barrier()
    for work in works:
        work.wait()
    assert y.tolist() == [(me - 1.0) % 4] * 2


@fault("WorkNotWaited", ranks=2)
def nobody_waits_at_the_barrier():
    dist.barrier(async_op=True)  # fault
    return torch.ones(1)


@right(ranks=2)
def both_wait_at_the_barrier():
    work = dist.barrier(async_op=True)
    x = torch.ones(1) * 2
    work.wait()
    assert x.item() == 2.0


@fault("WorkNotWaited", ranks=2)
def in_the_third_step_the_loop_goes_on_without_waiting():
    for step in range(4):
        x = torch.full((2,), float(step))
        work = dist.all_reduce(x, async_op=True)  # fault
        if step == 2:
            continue
        work.wait()


@right(ranks=2)
def in_the_third_step_the_loop_waits_before_it_goes_on():
    kept = []
    for step in range(4):
        x = torch.full((2,), float(step))
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        if step == 2:
            continue
        kept.append(x[0].item())
    assert kept == [0.0, 2.0, 6.0]


class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = torch.zeros(1)
        self.pending = []

    def forward(self, x):
        self.seen += len(x)
        count = self.seen.clone()
        self.pending.append(dist.all_reduce(count, async_op=True))  # fault
        return x * 2


@fault("WorkNotWaited", ranks=2, helpers=(Counted.forward,))
def a_module_keeps_its_works():
    model = Counted()
    for _ in range(2):
        model(torch.ones(3))
    model.pending.pop(0).wait()


@right(ranks=2)
def a_module_hands_out_its_works():
    model = Counted()
    y = sum(model(torch.ones(3 + dist.get_rank())).sum() for _ in range(2))
    for work in model.pending:
        work.wait()
    assert y.item() == (12.0 if dist.get_rank() == 0 else 16.0)


@fault("WorkNotWaited", ranks=3)
def an_error_comes_between_the_work_and_its_wait():
    mine = torch.ones(2)
    try:
        work = dist.all_gather([torch.empty(2) for _ in range(3)], mine, async_op=True)  # fault
        mine.reshape(3)
        work.wait()
    except RuntimeError:
        dist.all_reduce(torch.ones(1))  # no barrier: gloo's waits for the work


@right(ranks=3)
def an_error_comes_and_the_work_is_waited_for_all_the_same():
    mine, got = torch.full((2,), float(dist.get_rank())), [torch.empty(2) for _ in range(3)]
    work = dist.all_gather(got, mine, async_op=True)
    try:
        mine.reshape(3)
    except RuntimeError:
        dist.barrier()
    finally:
        work.wait()
    assert torch.cat(got).sum().item() == 6.0


def begin(x, group):
    return dist.reduce(x, group_dst=0, group=group, async_op=True)  # fault


@fault("WorkNotWaited", ranks=4, helpers=(begin,))
def the_works_of_one_subgroup_are_forgotten():
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    work = begin(torch.ones(2), groups[dist.get_rank() // 2])
    if dist.get_rank() < 2:
        work.wait()


@right(ranks=4)
def the_works_of_both_subgroups_are_waited_for():
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    x = torch.ones(2)
    work = begin(x, groups[dist.get_rank() // 2])
    work.wait()
    assert x.tolist() == [2.0, 2.0] or dist.get_rank() % 2


@right(ranks=2)
def a_work_is_waited_for_twice():
    x = torch.ones(2)
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    x += 1
    work.wait()
    assert x.tolist() == [3.0, 3.0]


@right(ranks=2)
def a_work_is_waited_for_through_its_future():
    x = torch.ones(2) + dist.get_rank()
    work = dist.all_reduce(x, async_op=True)
    work.get_future().wait()
    assert x.tolist() == [3.0, 3.0]


@right(ranks=2)
def a_work_is_asked_until_it_is_done():
    x, asked = torch.ones(2), 1
    work = dist.all_reduce(x, async_op=True)
    while not work.is_completed():
        asked += 1
    work.wait()
    assert x.tolist() == [2.0, 2.0] and asked > 0


@right(ranks=3)
def works_are_waited_for_in_another_order_on_each_rank():
    parts = [torch.full((2,), float(i)) for i in range(3)]
    works = [dist.all_reduce(part, async_op=True) for part in parts]
    me = dist.get_rank()
    for work in works[me:] + works[:me]:
        work.wait()
    assert torch.stack(parts).sum().item() == 18.0


@fault("WorkNotWaited", ranks=2)
def the_second_of_two_works_is_forgotten():
    a, b = torch.ones(2), torch.ones(3)
    first = dist.all_reduce(a, async_op=True)
    dist.all_gather([torch.empty(3) for _ in range(2)], b, async_op=True)  # fault
    first.wait()
