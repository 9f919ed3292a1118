"""Right, though a hasty checker might object: messages from rank to rank."""

import torch
import torch.distributed as dist

from tests.tools.rankbugs.corpus import right


@right(ranks=3)
def letters_from_anyone_in_any_order():
    if dist.get_rank() == 0:
        total = 0.0
        for _ in range(4):
            x = torch.empty(1)
            sender = dist.recv(x)
            assert sender in (1, 2)
            total += x.item()
        assert total == 2 * 3.0
    else:
        for _ in range(2):
            dist.send(torch.ones(1) * dist.get_rank(), dst=0)


@right(ranks=2)
def many_letters_keep_their_order():
    boxes = [torch.zeros(1) for _ in range(5)]
    if dist.get_rank() == 0:
        works = [dist.isend(torch.ones(1) * i, dst=1) for i in range(5)]
    else:
        works = [dist.irecv(box, src=0) for box in boxes]
    for work in works:
        work.wait()
    assert torch.cat(boxes).tolist() == ([0.0] * 5 if dist.get_rank() == 0 else [0.0, 1.0, 2.0, 3.0, 4.0])


@right(ranks=2)
def letters_are_opened_by_tag_and_not_by_date():
    first, second = torch.zeros(1), torch.zeros(1)
    if dist.get_rank() == 1:
        works = [dist.isend(torch.ones(1), dst=0, tag=1), dist.isend(torch.ones(1) * 2, dst=0, tag=2)]
        for work in works:
            work.wait()
    else:
        dist.recv(second, src=1, tag=2)
        dist.recv(first, src=1, tag=1)
        assert (first.item(), second.item()) == (1.0, 2.0)
    assert dist.get_rank() == 0 or first.item() == 0.0


@right(ranks=4)
def a_sum_by_hand_round_the_ring():
    me, size = dist.get_rank(), 4
    total = block = torch.tensor([1.0 + me])
    for _ in range(size - 1):
        coming = torch.empty(1)
        ops = [dist.P2POp(dist.isend, block, (me + 1) % size), dist.P2POp(dist.irecv, coming, (me - 1) % size)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        block = coming
        total = total + block
    assert total.item() == 10.0


@right(ranks=8)
def a_sum_by_hand_in_a_hypercube():
    me, total = dist.get_rank(), torch.tensor([float(dist.get_rank())])
    for bit in (1, 2, 4):
        theirs = torch.empty(1)
        receiving = dist.irecv(theirs, src=me ^ bit)
        sending = dist.isend(total, dst=me ^ bit)
        receiving.wait()
        sending.wait()
        total = total + theirs
    assert total.item() == 28.0


@right(ranks=4)
def a_pipeline_forward_and_back():
    me, last = dist.get_rank(), 3
    x = torch.tensor([2.0])
    if me > 0:
        dist.recv(x, src=me - 1)
    x.requires_grad_()
    y = x * (me + 1)
    if me < last:
        dist.send(y.detach(), dst=me + 1)
        gradient = torch.empty(1)
        dist.recv(gradient, src=me + 1)
    else:
        gradient = torch.ones(1)
    y.backward(gradient)
    if me > 0:
        dist.send(x.grad, dst=me - 1)
    assert (y.item(), x.grad.item()) == [(2.0, 24.0), (4.0, 24.0), (12.0, 12.0), (48.0, 4.0)][me]


@right(ranks=3)
def letters_while_the_others_reduce():
    pair = dist.new_group([0, 1])
    x, note = torch.ones(2), torch.zeros(1)
    if dist.get_rank() < 2:
        dist.all_reduce(x, group=pair)
    if dist.get_rank() == 2:
        dist.send(torch.ones(1) * 5, dst=0)
    elif dist.get_rank() == 0:
        dist.recv(note, src=2)
    dist.barrier()
    assert note.item() + x[0].item() == [7.0, 2.0, 1.0][dist.get_rank()]


@right(ranks=4)
def letters_within_a_group_by_its_own_ranks():
    odds = dist.new_group([1, 3])
    x = torch.zeros(2)
    if dist.get_rank() == 3:
        dist.send(torch.ones(2), group=odds, group_dst=0)
    elif dist.get_rank() == 1:
        dist.recv(x, group=odds, group_src=1)
    assert x.sum().item() == (2.0 if dist.get_rank() == 1 else 0.0)


@right(ranks=2)
def objects_are_sent():
    if dist.get_rank() == 0:
        dist.send_object_list([{"step": 3}, "go"], dst=1)
    else:
        got = [None, None]
        dist.recv_object_list(got, src=0)
        assert got == [{"step": 3}, "go"]


@right(ranks=2)
def the_receive_is_posted_long_before_the_send():
    x, y = torch.zeros(2), torch.ones(2)
    coming = dist.irecv(x, src=1) if dist.get_rank() == 0 else None
    for _ in range(3):
        dist.all_reduce(y)
    if dist.get_rank() == 1:
        dist.send(y, dst=0)
    else:
        coming.wait()
        assert torch.equal(x, y)
    assert y.tolist() == [8.0, 8.0]


@right(ranks=3)
def a_server_and_its_clients():
    me = dist.get_rank()
    if me == 0:
        for client in (2, 1):
            question = torch.empty(1)
            dist.recv(question, src=client)
            dist.send(question * 10, dst=client)
        dist.barrier()
    else:
        answer = torch.empty(1)
        dist.send(torch.ones(1) * me, dst=0)
        dist.recv(answer, src=0)
        dist.barrier()
        assert answer.item() == 10.0 * me
    assert dist.get_world_size() == 3


@right(ranks=4)
def halos_on_both_sides():
    me = dist.get_rank()
    mine, left, right_side = torch.full((2,), float(me)), torch.zeros(2), torch.zeros(2)
    ops = []
    for peer, halo in ((me - 1, left), (me + 1, right_side)):
        if 0 <= peer < 4:
            ops += [dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, halo, peer)]
    for work in reversed(dist.batch_isend_irecv(ops)):
        work.wait()
    assert (left + right_side)[0].item() == [1.0, 2.0, 4.0, 2.0][me]
