import weakref

import pytest
import torch
import torch.distributed as dist

import localtensor as lt
from localtensor.errors import (
    DeviceMismatch,
    DtypeMismatch,
    KindMismatch,
    LengthMismatch,
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
def test_what_must_be_alike_and_is_not_is_told_with_every_part(name, schedule):
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
def test_parts_are_taken_in_the_order_of_the_group_whoever_came_first(schedule):
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
