"""BufferReused: what is under way is written over."""

import torch
import torch.distributed as dist
from torch import nn

from tests.tools.rankbugs.corpus import fault, right


@fault("BufferReused", ranks=2)
def one_is_added_in_flight():
    x = torch.ones(2)
    work = dist.all_reduce(x, async_op=True)
    x.add_(1)  # fault
    work.wait()


@right(ranks=2)
def one_is_added_after_the_wait():
    x = torch.ones(2)
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    x.add_(1)
    assert x.tolist() == [3.0, 3.0]


@fault("BufferReused", ranks=2)
def a_letter_is_wiped_out_on_its_way():
    x = torch.ones(2)
    if dist.get_rank() == 0:
        sending = dist.isend(x, dst=1)
        x.zero_()  # fault
        sending.wait()
    else:
        dist.recv(x, src=0)


@right(ranks=2)
def a_letter_may_be_read_on_its_way():
    x = torch.ones(2)
    if dist.get_rank() == 0:
        sending = dist.isend(x, dst=1)
        total = x.sum().item()
        sending.wait()
        x.zero_()
        assert total == 2.0 and x.tolist() == [0.0, 0.0]
    else:
        dist.recv(x, src=0)
        assert x.tolist() == [1.0, 1.0]


@fault("BufferReused", ranks=3)
def one_element_is_assigned_in_flight():
    x, whole = torch.ones(2), torch.empty(6)
    work = dist.all_gather_into_tensor(whole, x, async_op=True)
    x[0] = 5.0  # fault
    work.wait()


@right(ranks=3)
def one_element_of_a_copy_is_assigned():
    x, whole = torch.ones(2), torch.empty(6)
    work = dist.all_gather_into_tensor(whole, x, async_op=True)
    mine = x.clone()
    mine[0] = 5.0
    work.wait()
    assert whole.tolist() == [1.0] * 6 and mine.tolist() == [5.0, 1.0]


@fault("BufferReused", ranks=2)
def one_buffer_for_every_step():
    buffer, works = torch.empty(2), []
    for step in range(3):
        buffer.copy_(torch.full((2,), float(step)))  # fault
        works.append(dist.all_reduce(buffer, async_op=True))
    for work in works:
        work.wait()


@right(ranks=2)
def two_buffers_in_turn():
    buffers, works, sums = [torch.empty(2), torch.empty(2)], [None, None], []
    for step in range(4):
        if works[step % 2]:
            works[step % 2].wait()
            sums.append(buffers[step % 2][0].item())
        buffers[step % 2].copy_(torch.full((2,), float(step)))
        works[step % 2] = dist.all_reduce(buffers[step % 2], async_op=True)
    for work in works:
        work.wait()
    assert sums == [0.0, 2.0] and [buffer[0].item() for buffer in buffers] == [4.0, 6.0]


@fault("BufferReused", ranks=2)
def an_incoming_letter_is_written_over():
    x = torch.ones(2)
    if dist.get_rank() == 1:
        coming = dist.irecv(x, src=0)
        x.fill_(7.0)  # fault
        coming.wait()
    else:
        dist.send(x, dst=1)


@fault("BufferReused", ranks=4)
def a_view_is_written_on_one_rank():
    flat = torch.ones(8)
    head = flat.view(2, 4)[0]
    work = dist.reduce(flat, dst=3, async_op=True)
    if dist.get_rank() == 1:
        head.mul_(2)  # fault
    work.wait()


@right(ranks=4)
def the_other_half_is_written_on_one_rank():
    flat = torch.ones(8)
    head, tail = flat.view(2, 4)
    work = dist.all_reduce(head, async_op=True)
    if dist.get_rank() == 1:
        tail.mul_(2)
    work.wait()
    assert flat.sum().item() == (24.0 if dist.get_rank() == 1 else 20.0)


@fault("BufferReused", ranks=2)
def an_output_argument_points_at_a_buffer_in_flight():
    a, b, total = torch.ones(3), torch.ones(3), torch.zeros(3)
    work = dist.all_reduce(a, async_op=True)
    torch.add(b, total, out=a)  # fault
    work.wait()


@right(ranks=2)
def an_output_argument_points_elsewhere():
    a, b, total = torch.ones(3), torch.ones(3), torch.zeros(3)
    work = dist.all_reduce(a, async_op=True)
    torch.add(b, b, out=total)
    work.wait()
    assert (a + total).tolist() == [4.0] * 3


@fault("BufferReused", ranks=3)
def gradients_are_zeroed_while_they_are_summed():
    model = nn.Linear(2, 1)
    model(torch.ones(3, 2)).sum().backward()
    works = [dist.all_reduce(weight.grad, async_op=True) for weight in model.parameters()]
    model.zero_grad(set_to_none=False)  # fault
    for work in works:
        work.wait()


@right(ranks=3)
def gradients_are_dropped_while_they_are_summed():
    model = nn.Linear(2, 1)
    model(torch.ones(3, 2)).sum().backward()
    gradients = [weight.grad for weight in model.parameters()]
    works = [dist.all_reduce(gradient, async_op=True) for gradient in gradients]
    model.zero_grad(set_to_none=True)
    for work in works:
        work.wait()
    assert gradients[0].tolist() == [[9.0, 9.0]] and model.weight.grad is None


def clean(buffer):
    buffer[1:] = 0  # fault
    return buffer


@fault("BufferReused", ranks=2, helpers=(clean,))
def a_helper_cleans_the_output_of_an_exchange():
    x, out = torch.ones(4), torch.empty(4)
    work = dist.all_to_all_single(out, x, async_op=True)
    clean(out)
    work.wait()


@right(ranks=2)
def a_helper_cleans_the_output_in_the_end():
    x, out = torch.ones(4) + dist.get_rank(), torch.empty(4)
    work = dist.all_to_all_single(out, x, async_op=True)
    work.wait()
    assert clean(out).tolist() == [1.0, 0.0, 0.0, 0.0]


@fault("BufferReused", ranks=2)
def in_the_third_step_the_sum_goes_on():
    total = torch.zeros(2)
    work = None
    for step in range(4):
        if work is not None and step != 2:
            work.wait()
        total += step  # fault
        if work is not None:
            work.wait()
        work = dist.all_reduce(total, async_op=True)
    work.wait()


@right(ranks=2)
def a_new_tensor_takes_the_name_of_the_one_in_flight():
    total, kept = torch.ones(2), []
    works = []
    for step in range(3):
        works.append(dist.all_reduce(total, async_op=True))
        kept.append(total)
        total = torch.full((2,), float(step))
    for work in works:
        work.wait()
    assert [one[0].item() for one in kept] == [2.0, 0.0, 2.0]


@fault("BufferReused", ranks=4)
def a_batch_of_messages_and_a_buffer_for_two():
    me, x = dist.get_rank(), torch.ones(2)
    halo = torch.zeros(2)
    ops = [dist.P2POp(dist.isend, x, (me + 1) % 4), dist.P2POp(dist.irecv, halo, (me - 1) % 4)]
    works = dist.batch_isend_irecv(ops)
    x *= 2  # fault
    for work in works:
        work.wait()


@right(ranks=4)
def a_batch_of_messages_and_a_buffer_each():
    me, x = dist.get_rank(), torch.ones(2)
    halo = torch.zeros(2)
    ops = [dist.P2POp(dist.isend, x, (me + 1) % 4), dist.P2POp(dist.irecv, halo, (me - 1) % 4)]
    works = dist.batch_isend_irecv(ops)
    y = x * 2
    for work in works:
        work.wait()
    x *= 3
    assert (x + y + halo).tolist() == [6.0, 6.0]


@fault("BufferReused", ranks=3)
def gradients_are_scaled_all_at_once_in_flight():
    gradients = [torch.ones(2), torch.ones(3)]
    works = [dist.all_reduce(gradient, async_op=True) for gradient in gradients]
    torch._foreach_mul_(gradients, 0.5)  # fault
    for work in works:
        work.wait()


@fault("BufferReused", ranks=2)
def the_second_of_two_buffers_is_wiped():
    first, second = torch.ones(2), torch.ones(2)
    works = [dist.all_reduce(first, async_op=True), dist.all_reduce(second, async_op=True)]
    works[0].wait()
    first.zero_()
    second.zero_()  # fault
    works[1].wait()


@right(ranks=2)
def the_first_of_two_buffers_is_wiped_when_it_is_done():
    first, second = torch.ones(2), torch.ones(2)
    works = [dist.all_reduce(first, async_op=True), dist.all_reduce(second, async_op=True)]
    works[0].wait()
    first.zero_()
    works[1].wait()
    assert first.tolist() == [0.0, 0.0] and second.tolist() == [2.0, 2.0]
