import pytest
import torch
import torch.distributed as dist

import localtensor as lt
from localtensor.errors import Deadlock, MessageMismatch, MessagesLeftOver


def number(value):
    return torch.tensor([float(value)])


def heard(*source, **how):
    x = torch.zeros(1)
    who = dist.recv(x, *source, **how)
    return who, x.item()


@pytest.mark.ranks(2, schedules=7)
def test_messages_of_one_sender_and_tag_arrive_in_the_order_in_which_they_were_sent(rank):
    if rank == 0:
        works = [dist.isend(number(value), 1, tag=value % 2) for value in range(6)]
        assert all([work.wait() for work in works])
    else:
        assert [heard(0, tag=tag)[1] for tag in (1, 0, 0, 1, 1, 0)] == [1.0, 0.0, 2.0, 3.0, 5.0, 4.0]


@pytest.mark.ranks(2, schedules=7)
def test_groups_do_not_hear_each_others_messages(rank):
    group = dist.new_group([0, 1])
    if rank == 0:
        for work in [dist.isend(number(1), 1), dist.isend(number(2), 1, group=group)]:
            work.wait()
    else:
        assert heard(group=group, group_src=0) == (0, 2.0)
        assert heard(0) == (0, 1.0)


def test_a_default_group_that_is_made_again_does_not_hear_what_was_sent_before():
    def program():
        work = dist.isend(number(1), 1) if dist.get_rank() == 0 else dist.barrier
        dist.destroy_process_group()
        dist.init_process_group()
        heard(0) if dist.get_rank() else dist.barrier()
        return work

    with pytest.raises(Deadlock) as caught:
        lt.run(program, ranks=2, leftovers="ignore")
    assert [wait.call.kind for wait in caught.value.waits] == ["barrier", "recv"]


@pytest.mark.ranks(4, schedules=7)
def test_a_receive_from_any_says_who_it_was(rank):
    if rank == 0:
        assert sorted(heard() for _ in range(3)) == [(1, 10.0), (2, 20.0), (3, 30.0)]
    else:
        dist.send(number(rank * 10), 0)


@pytest.mark.ranks(3)
def test_a_receive_from_any_takes_the_tag_that_it_asks_for(rank):
    if rank == 0:
        assert [heard(tag=2), heard(tag=1)] == [(2, 2.0), (1, 1.0)]
    else:
        assert dist.isend(number(rank), 0, tag=rank).wait()


@pytest.mark.ranks(2)
def test_what_is_sent_is_what_the_tensor_was_at_the_send(rank):
    if rank == 0:
        x = number(5)
        work = dist.isend(x.clone(), 1)
        x.zero_()
        assert work.wait()
    else:
        assert heard(0) == (0, 5.0)


@pytest.mark.ranks(2)
def test_a_sender_that_went_on_may_write_what_it_has_sent(rank):
    x = number(5 if rank == 0 else 0)
    if rank == 0:
        dist.send(x, 1)
        x.zero_()
        dist.barrier()
    else:
        work = dist.irecv(x, 0)
        dist.barrier()
        work.wait()
        assert x.item() == 5.0


def test_of_several_that_wait_the_schedule_chooses_who_is_heard():
    def program():
        posted = [dist.isend(number(dist.get_rank()), 0)] if dist.get_rank() else []
        dist.barrier()
        return [heard()[0] for _ in range(3)] if not posted else posted[0].wait()

    orders = {tuple(lt.run(program, ranks=4, schedule=f"pct:{seed}:1")[0]) for seed in range(20)}
    assert len(orders) > 2 and {tuple(sorted(order)) for order in orders} == {(1, 2, 3)}
    assert lt.run(program, ranks=4)[0] == [1, 2, 3]


@pytest.mark.ranks(5)
def test_a_batch_of_messages_goes_round_the_ring(rank, world_size):
    x = torch.zeros(2, 2)
    ops = [
        dist.P2POp(dist.isend, torch.full((2, 2), float(rank)), (rank + 1) % world_size),
        dist.P2POp(dist.irecv, x, (rank - 1) % world_size),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert x.unique().item() == (rank - 1) % 5


def test_a_rank_that_writes_to_itself_is_refused_by_torch():
    with pytest.raises(lt.LocalTensorError) as caught:
        lt.run(lambda: dist.send(number(1), dist.get_rank()), ranks=1)
    assert "Invalid destination rank" in str(caught.value.__cause__)


def test_a_send_waits_for_its_receive_as_on_gloo():
    def program():
        dist.send(number(1), 1 - dist.get_rank())
        dist.recv(number(0), 1 - dist.get_rank())

    with pytest.raises(Deadlock) as caught:
        lt.run(program, ranks=2)
    line = program.__code__.co_firstlineno + 1
    assert str(caught.value).splitlines()[1:] == [
        f"  rank 0 waits for rank 1 in send #0 to 1 at test_rendezvous_mailbox.py:{line} in program",
        f"  rank 1 waits for rank 0 in send #0 to 0 at test_rendezvous_mailbox.py:{line} in program",
    ]


@pytest.mark.parametrize("other", [torch.zeros(2), torch.zeros(1, dtype=torch.float64), torch.zeros(1, 1)])
def test_a_receive_that_does_not_fit_its_send_is_told(other):
    def program():
        return dist.recv(other.clone(), 0) if dist.get_rank() else dist.send(number(1), 1)

    with pytest.raises(MessageMismatch) as caught:
        lt.run(program, ranks=2)
    assert "f32[1]" in str(caught.value) and caught.value.places[0].function == "program"


def test_messages_that_never_met_are_named():
    def program():
        work = dist.isend(number(1), 1, tag=3) if dist.get_rank() == 0 else None
        del work

    with pytest.raises(MessagesLeftOver) as caught:
        lt.run(program, ranks=2)
    line = program.__code__.co_firstlineno + 1
    first, second = str(caught.value).splitlines()
    assert first == (
        "send #0 to 1 with tag 3: peer: never met on rank 0: "
        "a send meets the recv of the rank that it names, in the same group and with the same tag. "
        "Make the other half of each call on the rank that it names, or leave the call out."
    )
    assert second == (
        "  rank 0: send #0 of f32[1] on cpu, peer=1, tag=3, in group 0 (ranks 0, 1), "
        f"at test_rendezvous_mailbox.py:{line} in program"
    )
