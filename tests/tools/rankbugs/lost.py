"""Ranks that die, messages that are lost, and limits of time that pass on the simulated clock."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

import localtensor as lt
from tests.tools.rankbugs.corpus import fault, right

SOON, LATER = timedelta(seconds=2), timedelta(seconds=20)


@fault("RankRaised", ranks=3, cause="PeerLost", faults=lt.Faults(kill={1: 2}))
def a_peer_dies_and_no_rank_notices():
    x = torch.ones(2)
    for _ in range(3):
        dist.all_reduce(x)  # fault


@right(ranks=3, faults=lt.Faults(kill={1: 2}))
def a_peer_dies_and_the_others_stop():
    x, done = torch.ones(2), 0
    try:
        for _ in range(3):
            dist.all_reduce(x)
            done += 1
    except RuntimeError:
        pass
    assert done == 1


@fault("RankRaised", ranks=2, cause="PeerLost", faults=lt.Faults(kill=[{0: 1}, {0: 1}], restart=1))
def a_rank_dies_more_often_than_it_is_started():
    dist.all_reduce(torch.ones(2))  # fault


@right(ranks=2, faults=lt.Faults(kill=[{0: 1}, {0: 1}], restart=2))
def a_rank_dies_as_often_as_it_is_started():
    x = torch.ones(2)
    dist.all_reduce(x)
    assert os.environ["TORCHELASTIC_RESTART_COUNT"] == "2" and x.tolist() == [2.0, 2.0]


@fault("RankRaised", ranks=4, cause="PeerLost", faults=lt.Faults(kill={3: 1}))
def a_message_to_a_rank_that_has_died():
    if dist.get_rank() == 3:
        dist.barrier(group=dist.group.WORLD)
    elif dist.get_rank() == 0:
        dist.recv(torch.ones(1), src=3)  # fault


@right(ranks=4, faults=lt.Faults(kill={3: 1}))
def messages_among_those_that_live():
    me, x = dist.get_rank(), torch.tensor([float(dist.get_rank())])
    if me == 3:
        dist.barrier()
    if me == 0:
        dist.send(x + 5, dst=1)
    elif me == 1:
        dist.recv(x, src=0)
    assert x.item() == {0: 0.0, 1: 5.0, 2: 2.0}[me]


@fault("RankRaised", ranks=4, cause="PeerLost", faults=lt.Faults(split=[(0, 1), (2, 3)], split_at=2))
def a_network_falls_apart():
    for step in range(3):
        dist.broadcast(torch.ones(4), src=step)  # fault


@right(ranks=4, faults=lt.Faults(split=[(0, 1), (2, 3)], split_at=2))
def each_part_of_a_network_goes_on():
    parts = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    x = torch.ones(2)
    dist.all_reduce(x)
    dist.all_reduce(x, group=parts[dist.get_rank() // 2])
    assert x.tolist() == [8.0, 8.0]


@fault("RankRaised", ranks=2, cause="CollectiveTimeout", faults=lt.Faults(delay={1: 5.0}))
def a_wait_is_shorter_than_a_slow_rank():
    x = torch.ones(2)
    work = dist.all_reduce(x, async_op=True)
    work.wait(SOON)  # fault


@right(ranks=2, faults=lt.Faults(delay={1: 5.0}))
def a_wait_is_longer_than_a_slow_rank():
    x = torch.ones(2)
    work = dist.all_reduce(x, async_op=True)
    work.wait(LATER)
    assert x.tolist() == [2.0, 2.0]


@fault("RankRaised", ranks=3, cause="CollectiveTimeout", faults=lt.Faults(delay={2: 5.0}))
def a_monitored_barrier_loses_patience():
    dist.monitored_barrier(timeout=SOON)  # fault


@right(ranks=3, faults=lt.Faults(delay={2: 5.0}))
def a_monitored_barrier_has_patience():
    dist.monitored_barrier(timeout=LATER)
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == 3


@fault("RankRaised", ranks=2, cause="CollectiveTimeout", faults=lt.Faults(delay={0: 5.0}))
def a_group_has_a_limit_that_passes():
    group = dist.new_group([0, 1], timeout=SOON)
    dist.all_reduce(torch.ones(2), group=group)  # fault


@right(ranks=2, faults=lt.Faults(delay={0: 5.0}))
def a_group_has_a_limit_that_does_not_pass():
    group = dist.new_group([0, 1], timeout=LATER)
    x = torch.ones(2)
    dist.all_reduce(x, group=group)
    assert x.tolist() == [2.0, 2.0]


@fault("Deadlock", ranks=2)
def a_receive_with_a_limit_has_no_sender():
    if dist.get_rank() == 0:
        dist.irecv(torch.ones(2), src=1).wait(SOON)  # fault
    dist.barrier()  # fault


@right(ranks=2, faults=lt.Faults(drop=[(1, 0, 1)]))
def a_receive_with_a_limit_is_tried_again():
    x = torch.zeros(1)
    if dist.get_rank() == 1:
        dist.send(x + 3, dst=0)
        dist.send(x + 4, dst=0)
    else:
        dist.recv(x, src=1)
    assert x.item() == (4.0 if dist.get_rank() == 0 else 0.0)


@fault("EarlyReturn", ranks=2, faults=lt.Faults(drop=[(0, 1, 2)]))
def the_second_of_two_messages_is_lost():
    for step in range(2):
        x = torch.tensor([float(step)])
        dist.send(x, dst=1) if dist.get_rank() == 0 else dist.recv(x, src=0)  # fault


@right(ranks=2, faults=lt.Faults(drop=[(0, 1, 2)]))
def a_third_message_makes_up_for_a_lost_one():
    got = []
    for step in range(3 if dist.get_rank() == 0 else 2):
        x = torch.tensor([float(step)])
        dist.send(x, dst=1) if dist.get_rank() == 0 else dist.recv(x, src=0)
        got.append(x.item())
    assert got == ([0.0, 1.0, 2.0] if dist.get_rank() == 0 else [0.0, 2.0])


@fault("Deadlock", ranks=3)
def a_key_is_awaited_that_no_rank_sets():
    store = dist.TCPStore("localhost", 29711, 3, dist.get_rank() == 0)
    if dist.get_rank() == 1:
        store.set("started", "1")
    store.wait(["ready"], SOON)  # fault


@right(ranks=3)
def a_key_is_awaited_that_a_rank_sets():
    store = dist.TCPStore("localhost", 29712, 3, dist.get_rank() == 0)
    if dist.get_rank() == 1:
        store.set("ready", "1")
    store.wait(["ready"], SOON)
    assert store.get("ready") == b"1"
