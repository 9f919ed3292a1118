"""EarlyReturn: a rank is done while others still wait for it."""

import torch
import torch.distributed as dist

from tests.tools.rankbugs.corpus import fault, right


@fault("EarlyReturn", ranks=2)
def a_rank_without_work_goes_home():
    if dist.get_rank() == 1:
        return  # fault
    dist.all_reduce(torch.ones(2))  # fault


@right(ranks=2)
def a_rank_without_work_brings_zeros():
    x = torch.zeros(2) if dist.get_rank() == 1 else torch.ones(2)
    dist.all_reduce(x)
    assert x.tolist() == [1.0, 1.0]


@fault("EarlyReturn", ranks=4)
def rank_zero_skips_the_last_barrier():
    x = torch.ones(2)
    dist.all_reduce(x)
    if dist.get_rank() != 0:
        dist.barrier()  # fault


@right(ranks=4)
def all_ranks_skip_the_last_barrier():
    x = torch.ones(2)
    dist.all_reduce(x)
    if x[0].item() != 4.0:
        dist.barrier()
    assert x.tolist() == [4.0, 4.0]


@fault("EarlyReturn", ranks=3)
def one_rank_has_fewer_batches():
    batches = 3 if dist.get_rank() == 1 else 4
    for step in range(batches):
        loss = torch.tensor(float(step))
        dist.all_reduce(loss)  # fault


@right(ranks=3)
def all_ranks_do_the_least_number_of_batches():
    batches = torch.tensor([3 if dist.get_rank() == 1 else 4])
    dist.all_reduce(batches, dist.ReduceOp.MIN)
    done = torch.zeros(())
    for step in range(int(batches)):
        loss = torch.tensor(float(step))
        dist.all_reduce(loss)
        done += loss
    assert done.item() == 9.0


@fault("EarlyReturn", ranks=2)
def the_reply_was_forgotten():
    x = torch.ones(2)
    if dist.get_rank() == 0:
        dist.send(x, dst=1)
        dist.recv(x, src=1)  # fault
    else:
        dist.recv(x, src=0)


@right(ranks=2)
def the_reply_is_sent():
    x = torch.ones(2)
    if dist.get_rank() == 0:
        dist.send(x, dst=1)
        dist.recv(x, src=1)
    else:
        dist.recv(x, src=0)
        dist.send(x * 3, dst=0)
    assert x.sum().item() == (6.0 if dist.get_rank() == 0 else 2.0)


@fault("EarlyReturn", ranks=3)
def a_send_to_a_rank_that_has_left():
    if dist.get_rank() == 2:
        dist.send(torch.ones(2), dst=0)  # fault


@fault("EarlyReturn", ranks=4)
def one_rank_breaks_off_when_its_loss_is_large():
    weight = torch.tensor(1.0)
    for step in range(5):
        loss = weight * step * (dist.get_rank() + 1)
        if loss > 11:
            break  # fault
        dist.all_reduce(loss)  # fault


@right(ranks=4)
def all_ranks_break_off_when_one_loss_is_large():
    steps = 0
    for step in range(5):
        loss = torch.tensor(step * (dist.get_rank() + 1.0))
        dist.all_reduce(loss, dist.ReduceOp.MAX)
        if loss > 11:
            break
        steps += 1
    assert steps == 3


@fault("EarlyReturn", ranks=4)
def a_member_of_a_subgroup_returns():
    group = dist.new_group([1, 2, 3])
    if dist.get_rank() in (0, 3):
        return  # fault
    dist.all_reduce(torch.ones(2), group=group)  # fault


@right(ranks=4)
def who_is_not_in_the_subgroup_returns():
    group = dist.new_group([1, 2, 3])
    if dist.get_rank() == 0:
        return
    x = torch.ones(2)
    dist.all_reduce(x, group=group)
    assert x.tolist() == [3.0, 3.0]


@fault("EarlyReturn", ranks=2)
def a_work_is_awaited_that_the_other_never_begins():
    x = torch.ones(2)
    if dist.get_rank() == 0:
        work = dist.all_reduce(x, async_op=True)  # fault
        work.wait()  # fault


@right(ranks=2)
def a_work_is_awaited_that_the_other_begins_late():
    x = torch.ones(2)
    if dist.get_rank() == 0:
        work = dist.all_reduce(x, async_op=True)
    else:
        doubled = x * 2
        work = dist.all_reduce(doubled.sub_(x), async_op=True)
    work.wait()
    assert x.sum().item() == (4.0 if dist.get_rank() == 0 else 2.0)


@fault("EarlyReturn", ranks=3)
def the_state_is_gathered_for_saving_on_one_rank_only():
    state = {"rank": dist.get_rank()}
    if dist.get_rank() == 0:
        everyone = [None] * 3
        dist.all_gather_object(everyone, state)  # fault


@right(ranks=3)
def the_state_is_gathered_for_saving_by_all():
    state = {"rank": dist.get_rank()}
    everyone = [None] * 3 if dist.get_rank() == 0 else None
    dist.gather_object(state, everyone, dst=0)
    assert dist.get_rank() != 0 or everyone == [{"rank": 0}, {"rank": 1}, {"rank": 2}]


@fault("EarlyReturn", ranks=3)
def a_handler_returns():
    x = torch.tensor([1.0, 2.0, 3.0])
    try:
        x = x[: dist.get_rank()].reshape(dist.get_rank(), 1) if dist.get_rank() < 2 else x.reshape(2, 2)
    except RuntimeError:
        return  # fault
    dist.barrier()  # fault


@right(ranks=3)
def a_handler_goes_on():
    x, caught = torch.tensor([1.0, 2.0, 3.0]), torch.zeros(1)
    try:
        x.reshape(2, 2) if dist.get_rank() == 2 else x.reshape(3, 1)
    except RuntimeError:
        caught += 1
    dist.all_reduce(caught)
    assert caught.item() == 1.0


@fault("EarlyReturn", ranks=8)
def a_source_goes_before_it_has_given():
    weights = torch.ones(4)
    if dist.get_rank() == 6:
        return  # fault
    dist.broadcast(weights, src=6)  # fault


@right(ranks=8)
def a_source_gives_before_it_goes():
    weights = torch.full((4,), float(dist.get_rank()))
    dist.broadcast(weights, src=6)
    if dist.get_rank() == 6:
        return
    assert weights.tolist() == [6.0] * 4


def log(loss):
    if dist.get_rank() == 0:
        dist.reduce(loss, dst=0)  # fault
    return loss.item()


@fault("EarlyReturn", ranks=2, helpers=(log,))
def the_log_is_reduced_on_rank_zero_only():
    weight = torch.ones(2, requires_grad=True)
    (weight * 2).sum().backward()
    log(weight.grad.sum())


@right(ranks=2)
def the_log_is_reduced_by_both():
    weight = torch.ones(2, requires_grad=True)
    (weight * 2).sum().backward()
    total = weight.grad.sum()
    dist.reduce(total, dst=0)
    if dist.get_rank() == 0:
        assert total.item() == 8.0


@fault("EarlyReturn", ranks=2)
def an_empty_queue_ends_one_rank():
    queue = [1, 2, 3] if dist.get_rank() == 0 else [1, 2]
    while queue:
        x = torch.tensor([queue.pop()])
        got = [torch.empty_like(x) for _ in range(2)]
        dist.all_gather(got, x)  # fault


@right(ranks=2)
def both_ranks_go_on_until_all_queues_are_empty():
    queue, seen = [1, 2, 3] if dist.get_rank() == 0 else [1, 2], []
    while True:
        left = torch.tensor([len(queue)])
        dist.all_reduce(left)
        if not left:
            break
        got = [torch.empty(1, dtype=torch.int64) for _ in range(2)]
        dist.all_gather(got, torch.tensor([queue.pop() if queue else 0]))
        seen.append([int(one) for one in got])
    assert seen == [[3, 2], [2, 1], [1, 0]]
