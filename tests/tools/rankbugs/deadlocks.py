"""Deadlock: all are there, and each waits for another."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.tools.rankbugs.corpus import fault, right


@fault("Deadlock", ranks=2)
def both_receive_first():
    x, y = torch.ones(2), torch.empty(2)
    peer = 1 - dist.get_rank()
    dist.recv(y, src=peer)  # fault
    dist.send(x, dst=peer)


@fault("Deadlock", ranks=2)
def both_send_first():
    x, y = torch.ones(2), torch.empty(2)
    peer = 1 - dist.get_rank()
    dist.send(x, dst=peer)  # fault
    dist.recv(y, src=peer)


@right(ranks=2)
def one_sends_first_and_the_other_receives():
    x, y = torch.full((2,), float(dist.get_rank())), torch.empty(2)
    if dist.get_rank() == 0:
        dist.send(x, dst=1)
        dist.recv(y, src=1)
    else:
        dist.recv(y, src=0)
        dist.send(x, dst=0)
    assert y.tolist() == [1.0 - dist.get_rank()] * 2


@right(ranks=2)
def both_post_their_send_and_receive():
    x, y = torch.full((2,), float(dist.get_rank())), torch.empty(2)
    peer = 1 - dist.get_rank()
    sending = dist.isend(x, dst=peer)
    dist.recv(y, src=peer)
    sending.wait()
    assert y.tolist() == [float(peer)] * 2


@fault("Deadlock", ranks=4)
def a_ring_of_sends():
    me, x, y = dist.get_rank(), torch.ones(2), torch.empty(2)
    dist.send(x, dst=(me + 1) % 4)  # fault
    dist.recv(y, src=(me - 1) % 4)


@right(ranks=4)
def a_ring_in_which_even_ranks_send_first():
    me = dist.get_rank()
    x, y = torch.full((2,), float(me)), torch.empty(2)
    if me % 2 == 0:
        dist.send(x, dst=(me + 1) % 4)
        dist.recv(y, src=(me - 1) % 4)
    else:
        dist.recv(y, src=(me - 1) % 4)
        dist.send(x, dst=(me + 1) % 4)
    assert y.tolist() == [(me - 1.0) % 4] * 2


@fault("Deadlock", ranks=3)
def a_ring_of_receives():
    me, token = dist.get_rank(), torch.ones(1)
    dist.recv(token, src=(me + 2) % 3)  # fault
    dist.send(token + 1, dst=(me + 1) % 3)


@right(ranks=3)
def a_ring_in_which_rank_zero_begins():
    me, token = dist.get_rank(), torch.ones(1)
    if me == 0:
        dist.send(token + 1, dst=1)
        dist.recv(token, src=2)
    else:
        dist.recv(token, src=me - 1)
        dist.send(token + 1, dst=(me + 1) % 3)
    assert token.item() == (4.0 if me == 0 else 1.0 + me)


@fault("Deadlock", ranks=2)
def a_barrier_before_the_letter():
    x = torch.ones(2)
    if dist.get_rank() == 0:
        dist.barrier()  # fault
        dist.send(x, dst=1)
    else:
        dist.recv(x, src=0)  # fault
        dist.barrier()


@right(ranks=2)
def a_barrier_after_the_letter():
    x = torch.zeros(2) + dist.get_rank()
    if dist.get_rank() == 0:
        dist.recv(x, src=1)
        dist.barrier()
    else:
        dist.send(x, dst=0)
        dist.barrier()
    assert x.tolist() == [1.0, 1.0]


@fault("Deadlock", ranks=3)
def world_and_subgroup_in_crossed_order():
    pair = dist.new_group([0, 1])
    x, y = torch.ones(2), torch.ones(3)
    if dist.get_rank() == 1:
        dist.all_reduce(y, group=pair)  # fault
        dist.all_reduce(x)
    elif dist.get_rank() == 0:
        dist.all_reduce(x)  # fault
        dist.all_reduce(y, group=pair)
    else:
        dist.all_reduce(x)


@right(ranks=3)
def world_and_subgroup_in_one_order():
    pair = dist.new_group([0, 1])
    x, y = torch.ones(2), torch.ones(3)
    if dist.get_rank() < 2:
        dist.all_reduce(y, group=pair)
    dist.all_reduce(x)
    assert x.sum().item() == 6.0 and y.sum().item() == (6.0 if dist.get_rank() < 2 else 3.0)


@fault("Deadlock", ranks=3)
def three_pairs_that_wait_in_a_circle():
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 2]), dist.new_group([0, 2])]
    me = dist.get_rank()
    for pair in (pairs[me], pairs[(me + 2) % 3]):
        dist.all_reduce(torch.ones(1), group=pair)  # fault


@right(ranks=3)
def three_pairs_one_after_another():
    members = [[0, 1], [1, 2], [0, 2]]
    pairs = [dist.new_group(pair) for pair in members]
    x = torch.tensor([1.0 + dist.get_rank()])
    for pair, ranks in zip(pairs, members):
        if dist.get_rank() in ranks:
            dist.all_reduce(x, group=pair)
    assert x.item() == [9.0, 6.0, 9.0][dist.get_rank()]


@fault("Deadlock", ranks=2)
def a_letter_with_another_tag_than_expected():
    x = torch.ones(2)
    if dist.get_rank() == 0:
        dist.send(x, dst=1, tag=7)  # fault
    else:
        dist.recv(x, src=0, tag=8)  # fault
    dist.barrier()


@fault("Deadlock", ranks=3)
def each_listens_to_the_wrong_neighbour():
    me, x = dist.get_rank(), torch.zeros(1)
    if me == 0:
        dist.recv(x, src=2)  # fault
    elif me == 1:
        dist.send(x, dst=2)  # fault
    else:
        dist.send(x, dst=1)  # fault
    dist.barrier()


@fault("Deadlock", ranks=2)
def a_posted_receive_is_awaited_before_the_send():
    peer, x = 1 - dist.get_rank(), torch.empty(2)
    receiving = dist.irecv(x, src=peer)  # fault
    receiving.wait()  # fault
    dist.isend(torch.ones(2), dst=peer).wait()


@right(ranks=2)
def a_posted_receive_is_awaited_after_the_send():
    peer, x = 1 - dist.get_rank(), torch.empty(2)
    receiving = dist.irecv(x, src=peer)
    sending = dist.isend(torch.ones(2) + peer, dst=peer)
    receiving.wait()
    sending.wait()
    assert x.tolist() == [1.0 + dist.get_rank()] * 2


@fault("Deadlock", ranks=2)
def a_letter_is_read_after_the_barrier_only():
    x = torch.ones(2)
    if dist.get_rank() == 0:
        dist.barrier()  # fault
        dist.recv(x, src=1)
    else:
        dist.send(x, dst=0)  # fault
        dist.barrier()


@fault("Deadlock", ranks=4)
def in_the_third_round_one_pair_writes_letters():
    me, x = dist.get_rank(), torch.ones(1)
    for step in range(4):
        if step == 2 and me == 3:
            dist.recv(x, src=2)  # fault
        dist.all_reduce(x)  # fault
        if step == 2 and me == 2:
            dist.send(x, dst=3)


@right(ranks=4)
def in_the_third_round_one_pair_writes_letters_in_time():
    me, x = dist.get_rank(), torch.ones(1)
    for step in range(4):
        if step == 2 and me == 3:
            dist.recv(x, src=2)
        if step == 2 and me == 2:
            dist.send(x * 2, dst=3)
        dist.all_reduce(x)
    assert x.item() == 320.0


def exchange(mine, peer):
    theirs = torch.empty_like(mine)
    dist.send(mine, dst=peer)  # fault
    dist.recv(theirs, src=peer)
    return theirs


@fault("Deadlock", ranks=2, helpers=(exchange,))
def activations_and_gradients_meet_half_way():
    x = torch.ones(2)
    if dist.get_rank() == 0:
        dist.send(x, dst=1)
        exchange(x + 1, 1)
    else:
        dist.recv(x, src=0)
        exchange(x * 2, 0)


@right(ranks=2)
def activations_and_gradients_take_turns():
    x, gradient = torch.ones(2), torch.empty(2)
    if dist.get_rank() == 0:
        dist.send(x, dst=1)
        dist.recv(gradient, src=1)
        dist.send(x + 1, dst=1)
    else:
        dist.recv(x, src=0)
        dist.send(x * 2, dst=0)
        dist.recv(gradient, src=0)
    assert gradient.tolist() == [2.0, 2.0]


@fault("Deadlock", ranks=4)
def rows_and_columns_of_a_mesh_in_crossed_order():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))
    names = ("column", "row") if dist.get_rank() in (0, 3) else ("row", "column")
    for name in names:
        dist.all_reduce(torch.ones(2), group=mesh.get_group(name))  # fault


@right(ranks=4)
def rows_and_columns_of_a_mesh_in_one_order():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))
    x = torch.full((2,), float(dist.get_rank()))
    for name in ("column", "row"):
        dist.all_reduce(x, group=mesh.get_group(name))
    assert x.tolist() == [6.0, 6.0]


@fault("Deadlock", ranks=2)
def two_groups_one_awaited_before_the_other_begins():
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    groups = [first, second] if dist.get_rank() == 0 else [second, first]
    for group in groups:
        work = dist.all_reduce(torch.ones(1), group=group, async_op=True)  # fault
        work.wait()  # fault


@right(ranks=2)
def two_groups_both_begun_before_one_is_awaited():
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    groups = [first, second] if dist.get_rank() == 0 else [second, first]
    parts = [torch.ones(1) * dist.get_rank() for _ in groups]
    works = [dist.all_reduce(x, group=group, async_op=True) for x, group in zip(parts, groups)]
    for work in works:
        work.wait()
    assert torch.cat(parts).tolist() == [1.0, 1.0]


@fault("Deadlock", ranks=8)
def one_of_eight_waits_for_a_letter_from_the_next():
    me, x = dist.get_rank(), torch.ones(1)
    if me == 5:
        dist.recv(x, src=6)  # fault
    dist.barrier()  # fault
    if me == 6:
        dist.send(x, dst=5)
