import copy
import ctypes
import io
import pickle

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import Shard, distribute_tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import localtensor as lt
from localtensor.errors import BufferReused, ReadBeforeWait
from localtensor.threads.buffer_watch import BufferWatch


def begin(x=None):
    x = torch.ones(4) if x is None else x
    return x, dist.all_reduce(x, async_op=True)


def gather():
    target, source = torch.zeros(8), torch.ones(4)
    return target, source, dist.all_gather_into_tensor(target, source, async_op=True)


READS = {
    "adds": lambda x: x + 1, "item": lambda x: x[0].item(), "tolist": lambda x: x.tolist(), "numpy": lambda x: x.numpy(),
    "prints": str, "formats": lambda x: f"{x[0]:.2f}", "array": np.asarray, "compares": lambda x: x == x,
    "boolean": lambda x: bool(x[0]), "copies from": lambda x: torch.zeros(4).copy_(x), "clones": torch.clone,
    "a view of it": lambda x: x[1:].T.reshape(3, 1) + 1, "saves": lambda x: torch.cat([x, x]),
    "sends": lambda x: dist.send(x, 1 - dist.get_rank()), "pickles": pickle.dumps, "copies": copy.deepcopy,
    "writes to a file": lambda x: torch.save({"x": x[1:]}, io.BytesIO()),
    "sends in an object": lambda x: dist.all_gather_object([None, None], [x]),
}  # fmt: skip


@pytest.mark.parametrize("name", READS)
def test_who_reads_an_output_before_its_wait_is_reported(name):
    def program():
        x, work = begin()
        READS[name](x)
        work.wait()

    with pytest.raises((ReadBeforeWait, BufferReused)) as caught:
        lt.run(program, ranks=2)
    assert {place.function for place in caught.value.places} >= {"begin"}
    if name != "sends":
        assert type(caught.value) is ReadBeforeWait


WRITES = {
    "adds": lambda x: x.add_(1), "fills": lambda x: x.fill_(1), "through a view": lambda x: x[1:].zero_(),
    "assigns": lambda x: x.__setitem__(0, 5.0), "out": lambda x: torch.ones(4, out=x),
    "another collective": dist.all_reduce, "receives": lambda x: dist.recv(x, 1 - dist.get_rank()),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITES)
def test_who_writes_a_buffer_before_its_wait_is_reported(name):
    def program():
        x, work = begin()
        WRITES[name](x)
        work.wait()

    with pytest.raises((BufferReused, ReadBeforeWait)):
        lt.run(program, ranks=2)


@pytest.mark.ranks(2)
def test_who_reads_an_input_before_its_wait_is_not_told():
    target, source, work = gather()
    assert source.sum() == 4
    work.wait()
    assert target.sum() == 8


@pytest.mark.ranks(2)
def test_who_gathers_an_input_once_more_before_its_wait_is_not_told():
    target, source, work = gather()
    again = torch.zeros(8)
    dist.all_gather_into_tensor(again, source)
    work.wait()
    assert again.tolist() == target.tolist() == [1.0] * 8


def test_who_gathers_an_output_before_its_wait_reads_it():
    def program():
        x, work = begin()
        dist.all_gather_into_tensor(torch.zeros(8), x)
        work.wait()

    with pytest.raises(ReadBeforeWait, match=r"read by c10d\._allgather_base_\.default"):
        lt.run(program, ranks=2)


def test_who_writes_an_input_before_its_wait_is_reported():
    def writes():
        _, source, work = gather()
        source.zero_()
        work.wait()

    with pytest.raises(BufferReused) as caught:
        lt.run(writes, ranks=2)
    line = writes.__code__.co_firstlineno + 2
    assert str(caught.value).splitlines()[0] == (
        f"all_gather_into_tensor #0 in group 0: buffer: written by aten.zero_.default on rank {caught.value.ranks[0]} "
        f"at test_buffer_watch.py:{line} in writes: until wait() the collective may still read it, or write to it. "
        "Call wait() before the tensor is written, or pass the call a clone."
    )


@pytest.mark.ranks(2)
def test_metadata_views_and_other_memory_may_be_looked_at():
    whole = torch.ones(4, 4)
    row, work = begin(whole[0])
    assert row.shape == (4,) and row.view(2, 2).dtype is torch.float32
    assert row.data_ptr() == whole.data_ptr() and whole[1].sum() == 4
    whole[2:] += 1
    work.wait()
    assert whole.sum() == 4 * 2 + 4 + 16


LOOKS = {
    "zeros like it": torch.zeros_like, "empty like it": torch.empty_like, "random like it": torch.rand_like,
    "full like it": lambda x: torch.full_like(x, 3), "new zeros": lambda x: x.new_zeros(2),
    "new strides": lambda x: x.new_empty_strided((2,), (1,)), "is it pinned": lambda x: x.is_pinned(),
}  # fmt: skip


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", LOOKS)
def test_who_asks_for_shape_or_dtype_only_reads_nothing(name):
    x, work = begin()
    LOOKS[name](x)
    work.wait()
    assert x.sum() == 8


@pytest.mark.ranks(3)
def test_the_root_of_a_broadcast_may_read_what_it_sends_and_send_it_twice(rank):
    groups = [dist.new_group([0, 1]), dist.new_group([0, 2])]
    x = torch.full((2,), rank + 1.0)
    works = [dist.broadcast(x, 0, group=group, async_op=True) for group in groups]
    if rank == 0:
        assert x.sum() == 2
    for work in filter(None, works):
        work.wait()
    assert x.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("what", ["reads on another rank", "writes on the root"])
def test_a_broadcast_is_watched_where_it_writes_and_guarded_where_it_reads(what):
    def program():
        x = torch.ones(2)
        work = dist.broadcast(x, 0, async_op=True)
        if what == "writes on the root" and dist.get_rank() == 0:
            x.zero_()
        if what == "reads on another rank" and dist.get_rank() == 1:
            x.sum()
        work.wait()

    with pytest.raises((ReadBeforeWait, BufferReused)) as caught:
        lt.run(program, ranks=2)
    assert type(caught.value) is (BufferReused if what == "writes on the root" else ReadBeforeWait)


@pytest.mark.mesh((2,))
def test_dtensors_may_be_computed_while_something_else_is_in_flight(mesh):
    sharded = distribute_tensor(torch.arange(6.0).reshape(3, 2), mesh, [Shard(0)])
    other, work = begin()
    total = (sharded @ sharded.T).softmax(0).sum().full_tensor()
    work.wait()
    assert round(total.item(), 3) == 3 and other[0] == 2


@pytest.mark.ranks(2)
def test_fake_tensors_may_be_computed_while_something_is_in_flight():
    x, work = begin()
    with FakeTensorMode():
        assert (torch.ones(4, 2) + 1).sum(1).shape == (4,)
    work.wait()
    assert x[0] == 2


class Passes(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class PassesByHelper(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.called(func, args, kwargs or {})

    def called(self, func, args, kwargs):
        return func(*args, **kwargs)


class Calls(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def stacks():
    return torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()


@pytest.mark.ranks(2)
def test_blocks_of_the_users_modes_nest_with_what_is_in_flight_in_any_order():
    assert stacks() == (0, 0)
    x, first = begin()
    with Passes(), Calls():
        y, second = begin()
        first.wait()
        z, third = begin()
        assert stacks() == (2, 2)
        second.wait()
    third.wait()
    assert stacks() == (0, 0)
    assert [t[0].item() for t in (x, y, z)] == [2.0] * 3


@pytest.mark.ranks(2)
def test_a_block_that_ends_while_something_is_in_flight_is_still_the_users():
    with Passes():
        x, work = begin()
    y = torch.ones(1) + 1
    work.wait()
    assert x[0] == y == 2 and stacks() == (0, 0)


@pytest.mark.ranks(2)
def test_a_mode_that_passes_ops_on_by_a_function_of_its_own_reads_nothing():
    with PassesByHelper():
        summed = fc.all_reduce(torch.ones(2), "sum", dist.group.WORLD)
        assert summed.sum().item() == 4


def test_what_one_rank_has_in_flight_is_nothing_to_another():
    def program():
        x, work = begin()
        shared.append(x)
        dist.barrier()
        if dist.get_rank() == 1:
            found = shared[0].sum().item()  # a bug of another kind: ranks do not share memory
        work.wait()
        return found if dist.get_rank() == 1 else None

    shared: list = []
    assert lt.run(program, ranks=2)[1] in (4.0, 8.0)


def test_blocking_sends_and_receives_are_not_watched_and_their_likes_are(monkeypatch):
    watched = []
    begin = BufferWatch.begin
    monkeypatch.setattr(
        BufferWatch, "begin", lambda self, ticket, *rest: (watched.append(ticket.part), begin(self, ticket, *rest))
    )

    def program():
        x, peer = torch.ones(4), 1 - dist.get_rank()
        dist.send(x, peer) if peer else dist.recv(x, peer)
        (dist.isend if peer else dist.irecv)(x, peer).wait()

    lt.run(program, ranks=2)
    assert sorted((part.rank, part.kind, part.number) for part in watched) == [(0, "send", 1), (1, "recv", 1)]


@pytest.mark.ranks(2)
def test_functional_collectives_wait_by_themselves_and_are_not_watched():
    x = torch.ones(2)
    y = fc.all_reduce(x, "sum", dist.group.WORLD)
    x += 1
    assert (y + 0).tolist() == x.tolist() == [2.0, 2.0]


@pytest.mark.ranks(2)
def test_gradients_may_be_computed_while_something_else_is_in_flight():
    leaf = torch.ones(3, requires_grad=True)
    other, work = begin()
    (leaf * 2).sum().backward()
    work.wait()
    assert leaf.grad.tolist() == [2.0] * 3 and other[0] == 2


BLIND_WRITES = {
    "numpy": lambda x: x.numpy(), "memoryview": lambda x: memoryview(x.numpy()),
    "ctypes": lambda x: (ctypes.c_float * x.numel()).from_address(x.data_ptr()),
}  # fmt: skip


@pytest.mark.parametrize("size", [4, 30_001])
@pytest.mark.parametrize("name", BLIND_WRITES)
@pytest.mark.parametrize("buffer", ["input", "output", "sent", "received"])
def test_a_write_that_torch_does_not_see_is_found_at_the_wait(name, size, buffer):
    def program(writes):
        rank, source, target = dist.get_rank(), torch.ones(size), torch.zeros(2 * size)
        alias = BLIND_WRITES[name](target if buffer == "output" else source)
        if buffer == "sent":
            work = dist.isend(source, 1) if rank == 0 else dist.irecv(target[:size], 0)
        elif buffer == "received":
            work = dist.irecv(source, 0) if rank == 1 else dist.isend(torch.ones(size), 1)
        else:
            work = dist.all_gather_into_tensor(target, source, async_op=True)
        if writes and rank == (buffer == "received"):
            alias[size - 1] = 7.0
        work.wait()
        return "right"

    assert lt.run(program, False, ranks=2).values == ("right", "right")
    with pytest.raises(BufferReused, match=r"found changed on rank \d at its wait") as caught:
        lt.run(program, True, ranks=2)
    assert caught.value.places[0].function == "program"


def test_ranks_that_share_a_tensor_on_purpose_write_their_results_into_it():
    shared = torch.ones(3)

    def program():
        work = dist.all_reduce(shared, async_op=True)
        dist.barrier()
        work.wait()
        return shared.tolist()

    assert lt.run(program, ranks=3).values[2] == [3.0] * 3
