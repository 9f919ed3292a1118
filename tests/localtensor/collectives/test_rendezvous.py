import weakref

import pytest
import torch
import torch.distributed as dist

import localtensor as lt
from localtensor.errors import (
    Deadlock,
    DeviceMismatch,
    DtypeMismatch,
    KindMismatch,
    LengthMismatch,
    MessageMismatch,
    MessagesLeftOver,
    ReduceOpMismatch,
    RootMismatch,
    ShapeMismatch,
    SplitMismatch,
)

SCHEDULES = ["round_robin", "shuffled:1", "shuffled:2", "pct:3"]
ones, world = torch.ones, lambda: dist.group.WORLD
SPLITS = [[1, 1], [1, 1], [0, 2]]  # rank 2 sends two rows to rank 1 of 3, and rank 1 expects one

MISMATCHES = {  # the error, and what ranks 0 and 1 do; then what rank 2 does
    "kind": (KindMismatch, lambda: dist.all_reduce(ones(2)), lambda: dist.broadcast(ones(2), 0)),
    "barrier or not": (KindMismatch, dist.barrier, lambda: dist.all_reduce(ones(1))),
    "reduction": (
        ReduceOpMismatch, lambda: dist.all_reduce(ones(2)), lambda: dist.all_reduce(ones(2), dist.ReduceOp.MAX)),
    "root": (RootMismatch, lambda: dist.broadcast(ones(2), 0), lambda: dist.broadcast(ones(2), 1)),
    "dtype": (DtypeMismatch, lambda: dist.all_reduce(ones(2)), lambda: dist.all_reduce(ones(2).double())),
    "shape": (ShapeMismatch, lambda: dist.all_reduce(ones(2)), lambda: dist.all_reduce(ones(3))),
    "dims": (ShapeMismatch, lambda: dist.all_reduce(ones(4)), lambda: dist.all_reduce(ones(2, 2))),
    "one element": (ShapeMismatch, lambda: dist.all_reduce(ones(1)), lambda: dist.all_reduce(ones(2))),
    "how many": (LengthMismatch,
        lambda: world().allreduce_coalesced([ones(1), ones(1), ones(1)]).wait(),
        lambda: world().allreduce_coalesced([ones(1), ones(1)]).wait()),
    "splits": (SplitMismatch,
        lambda: dist.all_to_all_single(ones(3), ones(3), [1, 1, 1], [1, 1, 1]),
        lambda: dist.all_to_all_single(ones(3), ones(4), [1, 1, 1], [1, 2, 1])),
    "device": (DeviceMismatch, lambda: dist.all_reduce(ones(2)), lambda: dist.all_reduce(ones(2, device="meta"))),
}  # fmt: skip


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", [name for name in MISMATCHES if name != "device"])
def test_what_must_be_alike_and_is_not_is_reported_with_every_part(name, schedule):
    kind, most, last = MISMATCHES[name]

    def program():
        dist.barrier()
        most() if dist.get_rank() < 2 else last()

    line = program.__code__.co_firstlineno + 2
    with pytest.raises(kind) as caught:
        lt.run(program, ranks=3, schedule=schedule)
    error = caught.value
    assert type(error) is kind and {call.number for call in error.calls} == {1}
    assert sorted(call.rank for call in error.calls) == [0, 1, 2]
    assert {place.function for place in error.places} <= {"program", "<lambda>"}
    assert error.places[0].line == line or error.places[0].function == "<lambda>"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_mismatch_is_found_though_some_ranks_never_come(schedule):
    def program():
        if dist.get_rank() < 2:
            dist.all_reduce(ones(2 + dist.get_rank()))

    with pytest.raises(ShapeMismatch) as caught:
        lt.run(program, ranks=3, schedule=schedule)
    assert [call.tensors for call in sorted(caught.value.calls, key=lambda call: call.rank)] == [
        ("f32[2]",),
        ("f32[3]",),
    ]


@pytest.mark.ranks(3, schedules=4)
def test_tensors_of_one_element_match_in_any_dims(rank):
    """No backend sends dims, and deepspeed's pipeline adds a loss of shape [] to one of shape [1]."""
    shape = [(), (1,), (1, 1)][rank]
    x, y = torch.full(shape, 2.0**rank), torch.full(shape, 2.0**rank)
    dist.all_reduce(x)
    gathered = [torch.zeros(shape) for _ in range(3)]
    dist.all_gather(gathered, y)
    dist.broadcast(y, 1)
    assert (x.shape, x.item(), y.shape, y.item()) == (shape, 7, shape, 2)
    assert [(one.shape, one.item()) for one in gathered] == [(shape, 1), (shape, 2), (shape, 4)]


@pytest.mark.ranks(3, schedules=4, leftovers="raise")
def test_the_nth_collective_of_a_rank_meets_the_nth_of_each_other_member(rank):
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [1, 2], [0, 2])]
    xs = [torch.tensor([10.0**rank]) for _ in range(6)]
    works = [dist.all_reduce(xs[i], async_op=True) for i in range(3)]
    works += [dist.all_reduce(x, group=g, async_op=True) for x, g in zip(xs[3:], groups) if dist.get_rank(g) >= 0]
    for work in reversed(works):
        work.wait()
    dist.destroy_process_group()
    of_pairs = ([11, 1, 101], [11, 110, 10], [100, 110, 101])[rank]
    assert [int(x) for x in xs] == [111, 111, 111, *of_pairs]


def test_the_message_shows_the_odd_one_out_and_what_went_well_before():
    def program():
        for _ in range(5):
            dist.all_reduce(ones(3))
        dist.all_reduce(ones(3 if dist.get_rank() else 4))

    line = program.__code__.co_firstlineno + 3
    with pytest.raises(ShapeMismatch) as caught:
        lt.run(program, ranks=3)
    text = str(caught.value)
    where = f"in group 0 (ranks 0, 1, 2), at test_rendezvous.py:{line} in program"
    assert f"  rank 0: all_reduce #5 of f32[4] on cpu, op=sum, {where}" in text.splitlines()
    assert f"  ranks 1, 2: all_reduce #5 of f32[3] on cpu, op=sum, {where}" in text.splitlines()
    assert [call.number for call in caught.value.last] == [2, 3, 4]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_parts_are_taken_in_the_order_of_the_group_whichever_came_first(schedule):
    def program():
        rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
        if rank < 2:
            store.get(f"{rank + 1} came")  # the last rank comes first
        every = [torch.zeros(1) for _ in range(3)]
        work = dist.all_gather(every, torch.full((1,), float(rank)), async_op=True)
        store.set(f"{rank} came", "yes")
        work.wait()
        return [x.item() for x in every]

    assert lt.run(program, ranks=3, schedule=schedule).values == ([0.0, 1.0, 2.0],) * 3


@pytest.mark.ranks(2)
def test_a_collective_that_is_over_keeps_no_tensor_alive():
    x = torch.ones(2)
    held = weakref.ref(x)
    dist.all_reduce(x)
    dist.barrier()  # the other rank has its result, too
    del x
    assert held() is None  # the log of a long run has all its calls


def number(value):
    return torch.tensor([float(value)])


def received(*source, **how):
    x = torch.zeros(1)
    who = dist.recv(x, *source, **how)
    return who, x.item()


@pytest.mark.ranks(2, schedules=7)
def test_messages_of_one_sender_and_tag_arrive_in_the_order_in_which_they_were_sent(rank):
    if rank == 0:
        works = [dist.isend(number(value), 1, tag=value % 2) for value in range(6)]
        assert all([work.wait() for work in works])
    else:
        assert [received(0, tag=tag)[1] for tag in (1, 0, 0, 1, 1, 0)] == [1.0, 0.0, 2.0, 3.0, 5.0, 4.0]


@pytest.mark.ranks(2, schedules=7)
def test_groups_do_not_hear_each_others_messages(rank):
    group = dist.new_group([0, 1])
    if rank == 0:
        for work in [dist.isend(number(1), 1), dist.isend(number(2), 1, group=group)]:
            work.wait()
    else:
        assert received(group=group, group_src=0) == (0, 2.0)
        assert received(0) == (0, 1.0)


def test_a_default_group_that_is_made_again_does_not_hear_what_was_sent_before():
    def program():
        work = dist.isend(number(1), 1) if dist.get_rank() == 0 else dist.barrier
        dist.destroy_process_group()
        dist.init_process_group()
        received(0) if dist.get_rank() else dist.barrier()
        return work

    with pytest.raises(Deadlock) as caught:
        lt.run(program, ranks=2, leftovers="ignore")
    assert [wait.call.kind for wait in caught.value.waits] == ["barrier", "recv"]


@pytest.mark.ranks(4, schedules=7)
def test_a_receive_from_any_says_who_it_was(rank):
    if rank == 0:
        assert sorted(received() for _ in range(3)) == [(1, 10.0), (2, 20.0), (3, 30.0)]
    else:
        dist.send(number(rank * 10), 0)


@pytest.mark.ranks(3)
def test_a_receive_from_any_takes_the_tag_that_it_asks_for(rank):
    if rank == 0:
        assert [received(tag=2), received(tag=1)] == [(2, 2.0), (1, 1.0)]
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
        assert received(0) == (0, 5.0)


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


def test_of_several_that_wait_the_schedule_chooses_whose_message_is_received():
    def program():
        posted = [dist.isend(number(dist.get_rank()), 0)] if dist.get_rank() else []
        dist.barrier()
        return [received()[0] for _ in range(3)] if not posted else posted[0].wait()

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
        f"  rank 0 waits for rank 1 in send #0 to 1 at test_rendezvous.py:{line} in program",
        f"  rank 1 waits for rank 0 in send #0 to 0 at test_rendezvous.py:{line} in program",
    ]


@pytest.mark.parametrize("other", [torch.zeros(2), torch.zeros(1, dtype=torch.float64), torch.zeros(0)])
def test_a_receive_that_does_not_fit_its_send_is_reported(other):
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
        f"at test_rendezvous.py:{line} in program"
    )
