"""MessageMismatch and MessagesLeftOver: letters of the wrong size, and letters that nobody opens."""

import torch
import torch.distributed as dist

from tests.tools.rankbugs.corpus import fault, right


@fault("MessageMismatch", ranks=2)
def the_receiver_has_less_room():
    if dist.get_rank() == 0:
        dist.send(torch.ones(4), dst=1)  # fault
    else:
        dist.recv(torch.empty(3), src=0)  # fault


@right(ranks=2)
def the_receiver_has_room_enough():
    if dist.get_rank() == 0:
        dist.send(torch.arange(4.0), dst=1)
    x = torch.zeros(4)
    if dist.get_rank() == 1:
        sender = dist.recv(x, src=0)
        assert sender == 0
    assert x.sum().item() == 6.0 * dist.get_rank()


@fault("MessageMismatch", ranks=3)
def floats_are_received_as_integers():
    if dist.get_rank() == 2:
        dist.send(torch.ones(2), dst=0)  # fault
    elif dist.get_rank() == 0:
        x = torch.empty(2, dtype=torch.int32)
        dist.recv(x, src=2)  # fault


@right(ranks=3)
def integers_are_received_as_integers():
    x = torch.tensor([7, 8], dtype=torch.int32)
    if dist.get_rank() == 2:
        dist.send(x + 1, dst=0)
    elif dist.get_rank() == 0:
        dist.recv(x, src=2)
    assert x.tolist() == ([8, 9] if dist.get_rank() == 0 else [7, 8])


@fault("MessageMismatch", ranks=4)
def in_a_ring_one_rank_sends_its_longer_block():
    me = dist.get_rank()
    block = torch.ones(3 if me == 2 else 2)
    before = torch.empty(2)
    sending = dist.isend(block, dst=(me + 1) % 4)  # fault
    receiving = dist.irecv(before, src=(me - 1) % 4)  # fault
    sending.wait()
    receiving.wait()


@right(ranks=4)
def in_a_ring_blocks_go_all_the_way_round():
    me = dist.get_rank()
    block, total = torch.full((2,), float(me)), 0.0
    for _ in range(4):
        total += block[0].item()
        before = torch.empty(2)
        works = [dist.isend(block, dst=(me + 1) % 4), dist.irecv(before, src=(me - 1) % 4)]
        for work in works:
            work.wait()
        block = before
    assert total == 6.0 and block.tolist() == [float(me)] * 2


@fault("MessageMismatch", ranks=2)
def a_batch_of_messages_with_one_of_another_size():
    peer = 1 - dist.get_rank()
    mine = torch.ones(2, 2) if dist.get_rank() else torch.ones(2, 3)
    theirs = torch.empty(2, 2)
    ops = [dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, theirs, peer)]
    for work in dist.batch_isend_irecv(ops):  # fault
        work.wait()


@right(ranks=2)
def a_batch_of_messages_of_two_sizes():
    me, peer = dist.get_rank(), 1 - dist.get_rank()
    mine = torch.ones(2, 2) if me else torch.ones(2, 3)
    theirs = torch.empty(2, 3) if me else torch.empty(2, 2)
    ops = [dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, theirs, peer)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert theirs.sum().item() == (6.0 if me else 4.0)


@fault("MessageMismatch", ranks=2)
def the_tags_of_two_letters_are_swapped():
    if dist.get_rank() == 1:
        dist.send(torch.ones(5), dst=0, tag=1)  # fault
        dist.send(torch.ones(2), dst=0, tag=2)
    else:
        dist.recv(torch.empty(2), src=1, tag=1)  # fault
        dist.recv(torch.empty(5), src=1, tag=2)


@right(ranks=2)
def two_letters_are_told_apart_by_their_tags():
    short, long = torch.zeros(2), torch.zeros(5)
    if dist.get_rank() == 1:
        works = [dist.isend(torch.ones(5), dst=0, tag=1), dist.isend(torch.ones(2), dst=0, tag=2)]
    else:
        works = [dist.irecv(short, src=1, tag=2), dist.irecv(long, src=1, tag=1)]
    for work in works:
        work.wait()
    assert short.sum().item() + long.sum().item() == (0.0 if dist.get_rank() else 7.0)


@fault("MessageMismatch", ranks=3)
def whoever_writes_first_writes_too_much():
    if dist.get_rank() == 0:
        dist.recv(torch.empty(2))  # fault
    elif dist.get_rank() == 2:
        dist.send(torch.ones(4), dst=0)  # fault


@right(ranks=3)
def letters_from_anyone():
    if dist.get_rank() != 1:
        dist.send(torch.full((2,), 1.0 + dist.get_rank()), dst=1)
    else:
        seen = {}
        for _ in range(2):
            x = torch.empty(2)
            sender = dist.recv(x)
            seen[sender] = x.tolist()
        assert seen == {0: [1.0, 1.0], 2: [3.0, 3.0]}


def stage(x, first, last):
    me = dist.get_rank()
    if not first:
        dist.recv(x, src=me - 1)  # fault
    if not last:
        dist.send(x * 2, dst=me + 1)  # fault
    return x


@fault("MessageMismatch", ranks=3, helpers=(stage,))
def the_third_micro_batch_is_smaller_on_one_stage():
    me = dist.get_rank()
    for step in range(4):
        rows = 2 if step == 2 and me == 1 else 4
        stage(torch.ones(rows), first=me == 0, last=me == 2)


@right(ranks=3)
def the_third_micro_batch_is_smaller_on_every_stage():
    me, sums = dist.get_rank(), []
    for step in range(4):
        rows = 2 if step == 2 else 4
        sums.append(stage(torch.ones(rows), first=me == 0, last=me == 2).sum().item())
    assert sums == [4.0 * 2**me, 4.0 * 2**me, 2.0 * 2**me, 4.0 * 2**me]


# -- letters that nobody opens


@fault("MessagesLeftOver", ranks=2)
def a_letter_is_never_received():
    works = []
    if dist.get_rank() == 0:
        works.append(dist.isend(torch.ones(2), dst=1))  # fault
    dist.barrier()


@right(ranks=2)
def a_letter_is_received_after_the_barrier():
    x = torch.full((2,), 1.0 - dist.get_rank())
    work = dist.isend(x, dst=1) if dist.get_rank() == 0 else dist.irecv(x, src=0)
    dist.barrier()
    work.wait()
    assert x.tolist() == [1.0, 1.0]


@fault("MessagesLeftOver", ranks=3)
def a_letter_box_stays_empty():
    x = torch.zeros(2)
    waiting = []
    if dist.get_rank() == 2:
        waiting.append(dist.irecv(x, src=0))  # fault
    y = torch.ones(2)
    dist.all_reduce(y)


@fault("MessagesLeftOver", ranks=4)
def the_last_rank_of_a_chain_sends_on():
    me = dist.get_rank()
    x = torch.ones(2)
    if me > 0:
        dist.recv(x, src=me - 1)
    work = dist.isend(x, dst=(me + 1) % 4)  # fault
    if me < 3:
        work.wait()


@right(ranks=4)
def the_last_rank_of_a_chain_keeps_it():
    me = dist.get_rank()
    x = torch.ones(2)
    if me > 0:
        dist.recv(x, src=me - 1)
    if me < 3:
        work = dist.isend(x + 1, dst=me + 1)
        work.wait()
    assert x.tolist() == [1.0 + me] * 2


@fault("MessagesLeftOver", ranks=2)
def sender_and_receiver_use_two_tags():
    x = torch.ones(3)
    if dist.get_rank() == 0:
        dist.isend(x, dst=1, tag=1)  # fault
    else:
        dist.irecv(x, src=0, tag=2)  # fault
    dist.barrier()


@right(ranks=2)
def sender_and_receiver_use_one_tag():
    x = torch.full((3,), 2.0 * dist.get_rank())
    work = dist.isend(x, dst=0, tag=2) if dist.get_rank() == 1 else dist.irecv(x, src=1, tag=2)
    dist.barrier()
    work.wait()
    assert x.tolist() == [2.0] * 3


@fault("MessagesLeftOver", ranks=2)
def one_letter_more_than_is_read():
    letters = 3 if dist.get_rank() == 0 else 2
    works = []
    for number in range(letters):
        x = torch.full((1,), float(number))
        works.append(dist.isend(x, dst=1) if dist.get_rank() == 0 else dist.irecv(x, src=0))  # fault
    for work in works[:2]:
        work.wait()


@right(ranks=2)
def as_many_letters_as_are_read():
    boxes = [torch.full((1,), float(number * (1 - dist.get_rank()))) for number in range(3)]
    works = [dist.isend(x, dst=1) if dist.get_rank() == 0 else dist.irecv(x, src=0) for x in boxes]
    for work in works:
        work.wait()
    assert torch.cat(boxes).tolist() == [0.0, 1.0, 2.0]


@fault("MessagesLeftOver", ranks=4)
def the_halo_of_the_border_goes_nowhere():
    me = dist.get_rank()
    row, halo = torch.ones(3), torch.zeros(3)
    ops = [dist.P2POp(dist.isend, row, (me + 1) % 4)]
    if me > 0:
        ops.append(dist.P2POp(dist.irecv, halo, me - 1))
    works = dist.batch_isend_irecv(ops)  # fault
    for work in works if me < 3 else works[1:]:
        work.wait()


@right(ranks=4)
def the_halo_of_the_border_is_left_out():
    me = dist.get_rank()
    row, halo = torch.full((3,), float(me)), torch.zeros(3)
    ops = []
    if me < 3:
        ops.append(dist.P2POp(dist.isend, row, me + 1))
    if me > 0:
        ops.append(dist.P2POp(dist.irecv, halo, me - 1))
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert halo.tolist() == [max(me - 1.0, 0.0)] * 3


@fault("MessagesLeftOver", ranks=4)
def a_letter_within_a_group_is_never_opened():
    odds = dist.new_group([1, 3])
    if dist.get_rank() == 3:
        dist.isend(torch.ones(2), group=odds, group_dst=0)  # fault
    elif dist.get_rank() == 1:
        dist.barrier(group=odds)
    if dist.get_rank() == 3:
        dist.barrier(group=odds)


@fault("MessageMismatch", ranks=4)
def a_flag_is_received_as_a_number():
    me = dist.get_rank()
    if me == 1:
        dist.send(torch.tensor([True]), dst=3)  # fault
    elif me == 3:
        dist.recv(torch.zeros(1), src=1)  # fault
    dist.barrier()
