"""Collectives by way of copies, on real gloo processes; tensors of the CPU stand for those of a GPU, and are copied, too."""

import pytest
import torch
import torch.distributed as dist

import localtensor as lt
from localtensor.collectives.calls_seen import kernels_of_device
from localtensor.processes.staging import staged_kernel

RANKS = 3


def _staged(name, *arguments):
    schema = getattr(torch.ops.c10d, name).default._schema
    group = dist.group.WORLD.boxed()
    at = [a.name for a in schema.arguments].index("process_group")
    return staged_kernel(name, schema, None)(*arguments[:at], group, *arguments[at:])


def gathered():
    mine = torch.full((2,), float(dist.get_rank()))
    into = torch.empty(2 * RANKS)
    lists = [torch.empty(2) for _ in range(RANKS)]
    returned, _ = _staged("_allgather_base_", into, mine)
    _staged("allgather_", [lists], [mine])
    assert returned is into  # what the caller gave, not the copy
    return into, torch.cat(lists), mine


def exchanged():
    mine = torch.arange(float(RANKS)) + 10 * dist.get_rank()
    into = torch.empty(RANKS)
    _staged("alltoall_base_", into, mine, [], [])
    first = mine.clone()
    _staged("broadcast_", [first], 1, 0)
    return into, first


def sent():
    """Each rank receives before it sends: a receive that waited at once would never end."""
    rank = dist.get_rank()
    into = torch.zeros(4)
    coming = dist.Work.unbox(_staged("recv_", [into], (rank - 1) % RANKS, 0))
    going = _staged("send", [torch.full((4,), float(rank))], (rank + 1) % RANKS, 0)
    before = into.clone()
    coming.wait()
    going.wait()
    return before, into


def test_gathered_pieces_are_in_the_tensors_of_the_caller():
    for rank, (into, lists, mine) in enumerate(lt.run(gathered, ranks=RANKS, on="gloo")):
        assert into.tolist() == lists.tolist() == [0, 0, 1, 1, 2, 2]
        assert mine.tolist() == [rank, rank]


def test_what_is_exchanged_or_broadcast_is_that_of_the_ranks():
    for rank, (into, first) in enumerate(lt.run(exchanged, ranks=RANKS, on="gloo")):
        assert into.tolist() == [rank, 10 + rank, 20 + rank]
        assert first.tolist() == [10, 11, 12]


def test_a_message_is_there_after_its_wait_and_may_be_received_first():
    for rank, (before, into) in enumerate(lt.run(sent, ranks=RANKS, on="gloo", timeout=60)):
        assert before.tolist() == [0] * 4
        assert into.tolist() == [(rank - 1) % RANKS] * 4


def gathered_below_a_device():
    """As `calls_seen` calls an operator: with the kernels of a device in force, here of one that has none."""
    into, mine = torch.empty(2 * RANKS), torch.full((2,), float(dist.get_rank()))
    with kernels_of_device(torch._C.DispatchKey.MAIA):
        _staged("_allgather_base_", into, mine)
    return into


def test_copies_are_made_also_where_the_kernels_of_one_device_are_in_force():
    for into in lt.run(gathered_below_a_device, ranks=RANKS, on="gloo").values:
        assert into.tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("served", ["nccl", "gloo"])
def test_groups_of_other_backends_keep_their_kernel(monkeypatch, served):
    monkeypatch.setattr("localtensor.processes.staging._backend", lambda group: served)
    monkeypatch.setattr(dist.ProcessGroup, "unbox", staticmethod(lambda group: group))
    monkeypatch.setattr(torch.ops.c10d, "barrier", _Operator())
    kernel = staged_kernel("barrier", torch.ops.c10d.barrier.default._schema, lambda *arguments: "previous")
    assert kernel(torch.zeros(1), None, [], True, -1) == ("previous" if served == "nccl" else None)


class _Operator:
    """Stands for an operator of c10d that returns nothing."""

    class default:  # noqa: N801  # as torch names it
        _schema = torch._C._get_schema("c10d::barrier", "")

        def __new__(cls, *_):
            return None
