"""Functions of torch.distributed that ask which rank they are."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
import torch.distributed.nn.functional as with_gradients
from torch.distributed.device_mesh import init_device_mesh

from localtensor.errors import BufferReused, CollectiveFailed, NotInLockstep, RanksDiverge, ReadBeforeWait
from localtensor.lockstep.mode import LocalTensorMode
from localtensor.lockstep.values.rank_int import rank_int
from tests.localtensor.both_ways import check_both_ways, here, numbers

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")


@pytest.mark.parametrize("root", [0, 3])
def test_from_and_to_a_root(root):
    def program():
        x, y = numbers(4), numbers(4, seed=1)
        dist.broadcast(x, root)
        dist.reduce(y, root)
        out = torch.zeros(4)
        dist.scatter(out, [numbers(4, seed=2 + i) for i in range(4)] if dist.get_rank() == root else None, root)
        return x, y, out

    def in_lockstep():
        x, y, out = numbers(4), numbers(4, seed=1), torch.zeros(4)
        dist.broadcast(x, root)
        dist.reduce(y, root)
        dist.scatter(out, [numbers(4, seed=2 + i) for i in range(4)], root)
        return x, y, out

    check_both_ways(lambda: program() if dist.get_world_size() and type(dist.get_rank()) is int else in_lockstep())
    with LocalTensorMode(4):
        lists = [torch.zeros(4) for _ in range(4)]
        dist.gather(numbers(4), lists, root)
        wanted = [numbers(4).on(rank) for rank in range(4)]
        for rank, want in enumerate(wanted):
            assert torch.equal(lists[rank].on(root), want) and not lists[rank].on(1).any()


def test_splits_may_differ_from_rank_to_rank():
    def program():
        me = dist.get_rank()
        sent = [1, 2, 3, 4]
        got = [me + 1] * 4
        out = here(lambda rank: torch.zeros(4 * (rank + 1), 2))
        dist.all_to_all_single(out, numbers(10, 2), got, sent)
        return out

    assert len(check_both_ways(program)._cells) == 4


def test_ints_that_differ_can_be_roots_only_where_they_mean_one_position():
    with LocalTensorMode(4):
        pairs = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])[0]
        x = numbers(3)
        want = [x.on(rank) for rank in (1, 1, 3, 3)]
        dist.broadcast(x, rank_int([1, 1, 3, 3]), group=pairs)
        assert [torch.equal(x.on(rank), want[rank]) for rank in range(4)] == [True] * 4
        with pytest.raises(RanksDiverge):
            dist.broadcast(x, rank_int([0, 1, 2, 3]), group=pairs)


MESSAGES = {
    "send": lambda x: dist.send(x, 1),
    "recv": lambda x: dist.recv(x, 1),
    "isend": lambda x: dist.isend(x, 1),
    "irecv": lambda x: dist.irecv(x, 1),
    "send_object_list": lambda x: dist.send_object_list([x], 1),
    "recv_object_list": lambda x: dist.recv_object_list([x], 1),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_messages_are_refused_with_the_way_out(name):
    with (
        LocalTensorMode(2),
        pytest.raises(NotInLockstep, match=r"who sends to whom.*Run the function by localtensor.run"),
    ):
        MESSAGES[name](torch.ones(2))


GRADIENTS = {
    "all_gather_tensor_autograd": lambda x, g: fc.all_gather_tensor_autograd(x, 0, g),
    "reduce_scatter_tensor_autograd": lambda x, g: fc.reduce_scatter_tensor_autograd(x, "sum", 0, g),
    "all_to_all_single_autograd": lambda x, g: fc.all_to_all_single_autograd(x, None, None, g),
    "all_reduce": lambda x, g: fc.all_reduce(x, "sum", g),
    "nn.all_reduce": lambda x, g: with_gradients.all_reduce(x, group=g),
    "nn.broadcast": lambda x, g: with_gradients.broadcast(x, 1),
    "nn.reduce": lambda x, g: with_gradients.reduce(x, 1),
    "nn.all_gather": lambda x, g: torch.cat(with_gradients.all_gather(x)),
    "nn.gather": lambda x, g: torch.cat(with_gradients.gather(x, 2)),
    "nn.scatter": lambda x, g: with_gradients.scatter([x * (i + 1) for i in range(4)], 2),
    "nn.reduce_scatter": lambda x, g: with_gradients.reduce_scatter(torch.zeros(2, 4), [x[:2], x[2:]], group=g),
    "nn.all_to_all": lambda x, g: torch.cat(
        with_gradients.all_to_all([torch.zeros(1, 4) for _ in range(4)], list(x.split(1)))
    ),
    "nn.all_to_all_single": lambda x, g: with_gradients.all_to_all_single(torch.zeros(4, 4), x, group=g),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_through_torchs_own_collectives(name):
    def program():
        pairs, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
        x = numbers(4, 4).requires_grad_()
        y = GRADIENTS[name](x, pairs)
        (y * numbers(*y.shape, seed=3)).sum().backward()
        return y.detach(), x.grad

    _, gradient = check_both_ways(program)
    assert gradient is not None


# -- messages from rank to rank


def exchange(*messages):
    """Each message is a function, a tensor, a peer, and options."""
    found = [dist.P2POp(op, x, peer, **options) for op, x, peer, options in messages]
    works = dist.batch_isend_irecv(found)
    assert len(works) == len(messages)
    for work in works:
        work.wait()


def around_the_ring():
    rank, x = dist.get_rank(), numbers(3)
    y, z = torch.zeros(3), torch.zeros(3)
    exchange(
        (dist.irecv, y, (rank - 1) % 4, {}), (dist.isend, x, (rank + 1) % 4, {}), (dist.isend, x * 2, (rank + 1) % 4, {}),
        (dist.irecv, z, (rank - 1) % 4, {}),
    )  # fmt: skip
    return y, z


def both_ways_in_pairs():
    rank, x = dist.get_rank(), numbers(2, 2)
    y, z = torch.zeros(2, 2), torch.zeros(2, 2)
    exchange(
        (dist.isend, x, 1 ^ rank, {"tag": 1}), (dist.isend, x + 1, 1 ^ rank, {"tag": 2}),
        (dist.irecv, z, 1 ^ rank, {"tag": 2}), (dist.irecv, y, 1 ^ rank, {"tag": 1}),
    )  # fmt: skip
    return y, z


def in_groups():
    rank, x, y = dist.get_rank(), numbers(3), torch.zeros(3)
    mesh = init_device_mesh("cpu", (2, 2))
    there = 1 - mesh.get_local_rank(1)
    given = {"group": mesh.get_group(1)}
    exchange(
        (dist.isend, x * rank, None, {**given, "group_peer": there}),
        (dist.irecv, y, None, {**given, "group_peer": there}),
    )
    z = torch.zeros(3)
    peer = 1 ^ rank
    exchange((dist.isend, x * rank, peer, given), (dist.irecv, z, peer, given))
    return y, z


@pytest.mark.parametrize("program", [around_the_ring, both_ways_in_pairs, in_groups])
def test_a_batch_in_which_each_rank_sends_and_receives(program):
    check_both_ways(program)


def sends_to_one(rank, x):
    exchange((dist.isend, x, 1, {}), (dist.irecv, torch.zeros(2), 0, {}))


def receives_more(rank, x):
    y, z = torch.zeros(2), torch.zeros(2)
    exchange((dist.isend, x, 1 ^ rank, {}), (dist.irecv, y, 1 ^ rank, {}), (dist.irecv, z, 1 ^ rank, {}))


def sends_more(rank, x):
    exchange((dist.isend, x, 1 ^ rank, {}), (dist.isend, x, 1 ^ rank, {}), (dist.irecv, torch.zeros(2), 1 ^ rank, {}))


def sends_to_itself(rank, x):
    exchange((dist.isend, x, rank, {}), (dist.irecv, torch.zeros(2), rank, {}))


def sends_elsewhere(rank, x):
    exchange((dist.isend, x, rank + 1, {}), (dist.irecv, torch.zeros(2), rank - 1, {}))


def sends_by_another_tag(rank, x):
    exchange((dist.isend, x, 1 ^ rank, {"tag": 1}), (dist.irecv, torch.zeros(2), 1 ^ rank, {"tag": 2}))


def sends_on_some_ranks(rank, x):
    y = torch.zeros(2)
    if rank == 0:
        exchange((dist.isend, x, 1, {}), (dist.irecv, y, 1, {}))


@pytest.mark.parametrize(
    "program", [sends_to_one, receives_more, sends_more, sends_to_itself, sends_elsewhere, sends_by_another_tag, sends_on_some_ranks]
)  # fmt: skip
def test_a_message_that_finds_no_other_is_refused(program):
    with (
        LocalTensorMode(4),
        pytest.raises(NotInLockstep, match=r"does not send|no rank receives|no group|in another way than the others"),
    ):
        program(dist.get_rank(), numbers(2))


def test_a_buffer_in_use_and_one_of_another_size_are_refused():
    with LocalTensorMode(2):
        x, peer = numbers(2), 1 ^ dist.get_rank()
        with pytest.raises(BufferReused):
            exchange((dist.isend, x, peer, {}), (dist.irecv, x, peer, {}))
        with pytest.raises(CollectiveFailed, match=r"\(3,\).*\(2,\)"):
            exchange((dist.isend, x, peer, {}), (dist.irecv, torch.zeros(3), peer, {}))
        x.add_(1)


def test_a_received_tensor_is_not_read_before_the_wait():
    with LocalTensorMode(2):
        x, y, peer = numbers(2), torch.zeros(2), 1 ^ dist.get_rank()
        works = dist.batch_isend_irecv([dist.P2POp(dist.irecv, y, peer), dist.P2POp(dist.isend, x, peer)])
        with pytest.raises(ReadBeforeWait):
            y + 1
        with pytest.raises(BufferReused):
            x.add_(1)
        for work in works:
            work.wait()
        assert torch.equal(y.on(0), x.on(1))
