"""ReadBeforeWait: the answer is used before it is there."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

from tests.tools.rankbugs.corpus import fault, right


@fault("ReadBeforeWait", ranks=2)
def arithmetic_on_a_sum_in_flight():
    x = torch.ones(2)
    work = dist.all_reduce(x, async_op=True)
    mean = x / dist.get_world_size()  # fault
    work.wait()
    return mean


@right(ranks=2)
def arithmetic_on_a_sum_that_is_there():
    x = torch.ones(2) + dist.get_rank()
    work = dist.all_reduce(x, async_op=True)
    size = dist.get_world_size()
    work.wait()
    mean = x / size
    assert mean.tolist() == [1.5, 1.5]


@fault("ReadBeforeWait", ranks=3)
def the_loss_is_logged_too_soon():
    loss = torch.tensor(float(dist.get_rank()))
    work = dist.all_reduce(loss, async_op=True)
    logged = loss.item()  # fault
    work.wait()
    return logged


@right(ranks=3)
def the_local_loss_is_logged():
    loss = torch.tensor(float(dist.get_rank()))
    logged = loss.item()
    work = dist.all_reduce(loss, async_op=True)
    work.wait()
    assert (logged, loss.item()) == (dist.get_rank(), 3.0)


@fault("ReadBeforeWait", ranks=2)
def a_tensor_is_printed_in_flight():
    x = torch.arange(3.0)
    work = dist.broadcast(x, src=0, async_op=True)
    if dist.get_rank() == 1:
        str(x)  # fault
    work.wait()


@fault("ReadBeforeWait", ranks=2)
def a_flag_is_tested_in_flight():
    stop = torch.tensor([dist.get_rank()])
    work = dist.all_reduce(stop, async_op=True)
    if stop > 0:  # fault
        stop = torch.zeros(1)
    work.wait()


@right(ranks=2)
def a_flag_is_tested_after_the_wait():
    stop = torch.tensor([dist.get_rank()])
    work = dist.all_reduce(stop, async_op=True)
    work.wait()
    if stop > 0:
        stop = torch.zeros(1)
    assert stop.item() == 0.0


@fault("ReadBeforeWait", ranks=2)
def a_letter_is_read_before_it_has_come():
    x = torch.zeros(2)
    if dist.get_rank() == 0:
        dist.send(torch.ones(2), dst=1)
    else:
        coming = dist.irecv(x, src=0)
        x.sum()  # fault
        coming.wait()


@right(ranks=2)
def a_letter_is_read_when_it_has_come():
    x, other = torch.zeros(2), torch.ones(3)
    if dist.get_rank() == 0:
        dist.send(torch.ones(2), dst=1)
    else:
        coming = dist.irecv(x, src=0)
        other = other * 2
        coming.wait()
    assert x.sum().item() + other.sum().item() == (3.0 if dist.get_rank() == 0 else 8.0)


@fault("ReadBeforeWait", ranks=3)
def gathered_pieces_are_stacked_in_flight():
    pieces = [torch.empty(2) for _ in range(3)]
    work = dist.all_gather(pieces, torch.ones(2), async_op=True)
    whole = torch.stack(pieces)  # fault
    work.wait()
    return whole


@right(ranks=3)
def gathered_pieces_are_stacked_at_the_end():
    pieces, mine = [torch.empty(2) for _ in range(3)], torch.ones(2) * dist.get_rank()
    work = dist.all_gather(pieces, mine, async_op=True)
    twice = mine * 2  # what is sent may be read
    work.wait()
    whole = torch.stack(pieces)
    assert whole[:, 0].tolist() == [0.0, 1.0, 2.0] and twice.sum().item() == 4.0 * dist.get_rank()


@fault("ReadBeforeWait", ranks=4)
def a_shard_is_used_before_the_reduction_is_over():
    gradient, shard = torch.ones(8), torch.empty(2)
    work = dist.reduce_scatter_tensor(shard, gradient, async_op=True)
    norm = torch.linalg.vector_norm(shard)  # fault
    work.wait()
    return norm


@right(ranks=4)
def a_shard_is_used_after_the_reduction():
    gradient, shard = torch.ones(8), torch.empty(2)
    work = dist.reduce_scatter_tensor(shard, gradient, async_op=True)
    work.wait()
    assert torch.linalg.vector_norm(shard, ord=1).item() == 8.0


@fault("ReadBeforeWait", ranks=2)
def a_view_of_a_flat_buffer_is_read():
    flat = torch.ones(6)
    weight = flat[:4].view(2, 2)
    work = dist.all_reduce(flat, async_op=True)
    y = weight @ torch.ones(2)  # fault
    work.wait()
    return y


@right(ranks=2)
def another_part_of_the_buffer_is_read():
    flat = torch.ones(6)
    head, tail = flat[:4], flat[4:]
    work = dist.all_reduce(head, async_op=True)
    seen = tail.sum().item()
    work.wait()
    assert seen == 2.0 and flat.tolist() == [2.0] * 4 + [1.0] * 2


def scaled(gradient):
    return gradient.mul(0.5)  # fault


@fault("ReadBeforeWait", ranks=3, helpers=(scaled,))
def a_helper_reads_on_the_last_rank_only():
    gradient = torch.ones(4)
    work = dist.all_reduce(gradient, async_op=True)
    if dist.get_rank() == 2:
        scaled(gradient)
    work.wait()
    scaled(gradient)


@right(ranks=3)
def a_helper_reads_after_the_wait():
    gradient = torch.ones(4)
    work = dist.all_reduce(gradient, async_op=True)
    work.wait()
    assert scaled(gradient).tolist() == [1.5] * 4


@fault("ReadBeforeWait", ranks=2)
def the_other_work_was_waited_for():
    a, b = torch.ones(2), torch.ones(2)
    first, second = dist.all_reduce(a, async_op=True), dist.all_reduce(b, async_op=True)
    first.wait()
    y = b.clone()  # fault
    second.wait()
    return y


@right(ranks=2)
def the_work_of_this_tensor_was_waited_for():
    a, b = torch.ones(2), torch.zeros(2) + dist.get_rank()
    first, second = dist.all_reduce(a, async_op=True), dist.all_reduce(b, async_op=True)
    second.wait()
    y = b.clone()
    first.wait()
    assert (y + a).tolist() == [3.0, 3.0]


@fault("ReadBeforeWait", ranks=2)
def in_the_third_step_the_wait_comes_late():
    weight = torch.zeros(2)
    for step in range(4):
        gradient = torch.ones(2)
        work = dist.all_reduce(gradient, async_op=True)
        if step != 2:
            work.wait()
        weight -= 0.5 * gradient  # fault
        work.wait()


@right(ranks=2)
def the_wait_of_each_step_comes_one_step_later():
    weight, before = torch.zeros(2), None
    for _ in range(4):
        gradient = torch.ones(2)
        work = dist.all_reduce(gradient, async_op=True)
        if before is not None:
            before[1].wait()
            weight -= 0.5 * before[0]
        before = gradient, work
    before[1].wait()
    assert weight.tolist() == [-3.0, -3.0]


@fault("ReadBeforeWait", ranks=2)
def a_layer_is_fed_with_a_tensor_in_flight():
    layer, x, out = nn.Linear(3, 1), torch.ones(3), torch.empty(6)
    work = dist.all_gather_into_tensor(out, x, async_op=True)
    y = layer(out.view(2, 3))  # fault
    work.wait()
    return y.sum()


@fault("ReadBeforeWait", ranks=2)
def a_raw_functional_call_without_its_wait():
    group = dist.group.WORLD.group_name
    y = torch.ops._c10d_functional.all_reduce(torch.ones(2), "sum", group)
    total = y.sum()  # fault
    torch.ops._c10d_functional.wait_tensor(y)
    return total


@right(ranks=2)
def a_raw_functional_call_and_its_wait():
    group = dist.group.WORLD.group_name
    y = torch.ops._c10d_functional.all_reduce(torch.ones(2) + dist.get_rank(), "sum", group)
    y = torch.ops._c10d_functional.wait_tensor(y)
    assert y.sum().item() == 6.0


@right(ranks=2)
def a_functional_result_waits_by_itself():
    y = functional.all_reduce(torch.ones(2) + dist.get_rank(), "max", dist.group.WORLD)
    assert (y * 2).tolist() == [4.0, 4.0]


@fault("ReadBeforeWait", ranks=4)
def the_step_is_taken_before_the_gradients_are_there():
    model = nn.Linear(2, 1)
    model(torch.ones(3, 2)).sum().backward()
    works = [dist.all_reduce(weight.grad, async_op=True) for weight in model.parameters()]
    with torch.no_grad():
        for weight in model.parameters():
            weight.sub_(weight.grad, alpha=0.25)  # fault
    for work in works:
        work.wait()


@right(ranks=4)
def the_step_is_taken_when_the_gradients_are_there():
    model = nn.Linear(2, 1)
    nn.init.zeros_(model.weight)
    model(torch.ones(3, 2)).sum().backward()
    works = [dist.all_reduce(weight.grad, async_op=True) for weight in model.parameters()]
    for work in works:
        work.wait()
    with torch.no_grad():
        for weight in model.parameters():
            weight.sub_(weight.grad, alpha=0.25)
    assert model.weight.tolist() == [[-3.0, -3.0]]
