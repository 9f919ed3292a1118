from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch.distributed.nn.functional import all_gather as gather_with_gradients
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

import localtensor as lt
from localtensor.errors import LayoutMismatch, RankRaised, ReadBeforeWait
from localtensor.threads.process_group import _to_one_device

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # under both their names
WRITES = {
    "all_reduce": dist.all_reduce,
    "all_reduce, later": lambda x: dist.all_reduce(x, async_op=True).wait(),
    "broadcast": lambda x: dist.broadcast(x, 0),
    "reduce": lambda x: dist.reduce(x, 0),
    "scatter": lambda x: dist.scatter(x, [torch.ones(4)] * 2 if dist.get_rank() == 0 else None),
    "all_gather": lambda x: dist.all_gather([x, torch.zeros(4)], torch.ones(4)),
    "all_gather_into_tensor": lambda x: dist.all_gather_into_tensor(x, torch.ones(2)),
    "reduce_scatter_tensor": lambda x: dist.reduce_scatter_tensor(x, torch.ones(8)),
    "all_to_all_single": lambda x: dist.all_to_all_single(x, torch.ones(4)),
    "send and recv": lambda x: dist.recv(x, 0) if dist.get_rank() else dist.send(x, 1),
}


@pytest.mark.ranks(2, leftovers="raise")
@pytest.mark.parametrize("name", WRITES)
def test_version_counters_do_not_notice_what_a_collective_writes(name):
    x = torch.full((4,), 2.0)
    before = x._version
    WRITES[name](x)
    assert x._version == before


@pytest.mark.ranks(2, leftovers="raise")
@pytest.mark.parametrize("name", WRITES)
def test_what_backward_needs_may_be_overwritten_as_on_a_real_backend(name):
    """Autograd does not see the write, so it computes with the new numbers instead of raising."""
    x, leaf = torch.full((4,), 2.0), torch.ones(4, requires_grad=True)
    product = (leaf * x).sum()
    WRITES[name](x)
    product.backward()
    assert torch.equal(leaf.grad, x)


@pytest.mark.ranks(2)
def test_a_leaf_may_be_written_though_it_wants_a_gradient(rank):
    leaf = torch.full((2,), float(rank), requires_grad=True)
    dist.broadcast(leaf, 1)
    (leaf * leaf).sum().backward()
    assert leaf.is_leaf and leaf.grad.tolist() == [2.0, 2.0]


@pytest.mark.mesh((3,))
@pytest.mark.ranks(schedules=2, leftovers="raise")
@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=str)
def test_a_leaf_that_is_distributed_keeps_its_gradient(placement, mesh):
    leaf = torch.arange(20, dtype=torch.float64).reshape(5, 4).requires_grad_()
    spread = distribute_tensor(leaf, mesh, [placement])
    (spread * spread).sum().backward()
    again = distribute_tensor(leaf, mesh, [Replicate()])
    again.redistribute(mesh, [Shard(0)]).to_local().sum().backward()
    assert leaf._version == 0 and torch.equal(spread.full_tensor(), leaf)
    assert torch.equal(spread.grad.full_tensor(), leaf * 2)
    assert again.grad.full_tensor().sum() == 20


@pytest.mark.mesh((2, 2))
@pytest.mark.ranks(schedules=2, leftovers="raise")
def test_gradients_flow_through_redistributions(mesh):
    whole = torch.arange(15, dtype=torch.float64).reshape(5, 3)
    x = distribute_tensor(whole, mesh, [Shard(0), Shard(1)]).requires_grad_()
    y = x.redistribute(mesh, [Shard(1), Replicate()]).redistribute(mesh, [Replicate(), Replicate()])
    (y.to_local(grad_placements=[Partial(), Partial()]) ** 2).sum().backward()
    assert torch.equal(x.grad.full_tensor(), whole * 2 * 4)


@pytest.mark.ranks(2)
def test_functional_collectives_and_those_of_nn_carry_gradients(rank):
    x = torch.full((2,), rank + 1.0, requires_grad=True)
    fc.all_gather_tensor_autograd(x, 0, dist.group.WORLD).pow(2).sum().backward()
    first, x.grad = x.grad, None
    torch.cat(gather_with_gradients(x)).pow(2).sum().backward()
    assert first.tolist() == [4.0 + 4.0 * rank] * 2 and x.grad.tolist() == first.tolist()


@pytest.mark.ranks(3, schedule="shuffled:5")
def test_a_collective_inside_backward_is_served_in_the_ranks_own_thread(rank):
    class Summed(torch.autograd.Function):
        @staticmethod
        def forward(_ctx, x):
            return x * 1

        @staticmethod
        def backward(_ctx, grad):
            grad = grad.clone()
            dist.all_reduce(grad)
            return grad

    x = torch.ones(2, requires_grad=True)
    (Summed.apply(x) * (rank + 1)).sum().backward()
    assert x.grad.tolist() == [6.0, 6.0]


@pytest.mark.ranks(2)
def test_autocast_and_inference_mode_do_not_touch_a_collective():
    x = torch.full((2,), 1.0 + 2**-20, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        dist.all_reduce(x, dist.ReduceOp.PRODUCT)
    with torch.inference_mode():
        y = torch.ones(2)
        dist.all_reduce(y)
    assert x.dtype is torch.float64 and x[0].item() == (1.0 + 2**-20) ** 2
    assert y.tolist() == [2.0, 2.0] and y.is_inference()


@pytest.mark.ranks(2)
def test_a_default_device_is_not_for_what_a_collective_makes_by_itself():
    x = torch.ones(4)
    torch.set_default_device("meta")
    dist.all_reduce(x)
    dist.barrier()
    y = fc.all_reduce(x, "sum", dist.group.WORLD).wait()
    assert x.tolist() == [2.0] * 4 and y.tolist() == [4.0] * 4


@pytest.mark.ranks(2)
def test_a_strided_output_is_written_through_its_strides(rank):
    whole = torch.zeros(3, 2)
    dist.all_gather([whole[:, 0], whole[:, 1]], torch.full((3,), rank + 1.0))
    assert whole.tolist() == [[1.0, 2.0]] * 3


@pytest.mark.ranks(3)
def test_ranks_never_share_memory_after_a_collective(rank):
    x = torch.full((2,), float(rank))
    held = [torch.zeros(2) for _ in range(3)]
    dist.all_gather(held, x)
    dist.broadcast(x, 0)
    x += rank * 10
    held[0] += rank
    dist.barrier()
    assert x.tolist() == [rank * 10.0] * 2
    assert [one[0].item() for one in held] == [rank, 1, 2]


def test_a_buffer_that_does_not_fit_is_refused_with_its_line():
    def program():
        target = torch.zeros(2, 3) if dist.get_rank() else torch.zeros(4)
        dist.group.WORLD.allgather([[target, torch.zeros(4)]], [torch.ones(4)]).wait()

    with pytest.raises(RankRaised) as caught:
        lt.run(program, ranks=2)
    line = program.__code__.co_firstlineno + 2
    assert str(caught.value.__cause__) == (
        "all_gather: outputs: outputs[0]: invalid tensor size at index 0 (expected (4,), got (2, 3)). "
        "Let the tensors of one call have one dtype, one layout and one shape."
    )
    assert [(place.line, place.function) for place in caught.value.places] == [(line, "program")]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.bfloat16, torch.complex64, torch.int64], ids=str)
def test_any_dtype_travels(dtype, rank):
    sent = [torch.tensor([number, 1]).to(dtype) for number in (0, 1)]
    x, held = sent[rank].clone(), [torch.zeros(2, dtype=dtype) for _ in range(2)]
    dist.all_gather(held, x)
    dist.broadcast(x, 1)
    assert [one.tolist() for one in held] == [one.tolist() for one in sent]
    assert x.tolist() == sent[1].tolist()


@pytest.mark.ranks(2)
def test_empty_and_scalar_tensors_travel(rank):
    empty, scalar = torch.zeros(0, 3), torch.tensor(float(rank + 1))
    dist.all_reduce(empty)
    dist.all_reduce(scalar)
    row = torch.zeros(2)
    dist.all_gather_into_tensor(row, torch.tensor(float(rank)))
    assert empty.shape == (0, 3) and scalar.item() == 3.0 and row.tolist() == [0.0, 1.0]


@pytest.mark.ranks(3)
def test_objects_travel(rank):
    everybody = [None] * 3
    dist.all_gather_object(everybody, {"rank": rank, "x": torch.tensor([rank])})
    assert [one["x"].item() for one in everybody] == [0, 1, 2]
    told = [f"from {rank}", {rank}]
    dist.broadcast_object_list(told, src=2)
    assert told == ["from 2", {2}]
    mine = [None]
    dist.scatter_object_list(mine, [f"for {r}" for r in range(3)] if rank == 1 else None, src=1)
    assert mine == [f"for {rank}"]
    gathered = [None] * 3 if rank == 0 else None
    dist.gather_object(rank * 2, gathered, dst=0)
    assert gathered == ([0, 2, 4] if rank == 0 else None)


def summed_in_columns_on_one_rank():
    x = torch.arange(6.0)
    x = x.reshape(3, 2) if dist.get_rank() == 0 else x.reshape(2, 3).t()
    dist.all_reduce(x)
    return x.tolist()


def test_buffers_that_lie_in_different_orders_are_refused():
    with pytest.raises(LayoutMismatch) as refused:
        lt.run(summed_in_columns_on_one_rank, ranks=2)
    assert "contiguous on rank 0, strides (1, 3) on rank 1" in str(refused.value)


@pytest.mark.ranks(2)
def test_buffers_that_lie_in_one_order_are_added_whatever_it_is():
    x = torch.arange(6.0).reshape(2, 3).t()
    dist.all_reduce(x)
    assert x.tolist() == [[0, 6], [2, 8], [4, 10]]


TRAVELS = {
    "message": lambda x: dist.irecv(x, 0) if dist.get_rank() else dist.isend(x, 1),
    "broadcast": lambda x: dist.broadcast(x, 0, async_op=True),
    "reduction": lambda x: dist.reduce(x, 1, async_op=True),
}


def reads_while_it_travels(name, reader):
    x = torch.ones(4)
    work = TRAVELS[name](x)
    total = x.sum().item() if dist.get_rank() == reader else None
    work.wait()
    return total


@pytest.mark.parametrize("name", ["message", "broadcast"])
def test_what_a_rank_only_sends_may_be_read_meanwhile(name):
    assert lt.run(reads_while_it_travels, name, 0, ranks=2).values == (4, None)


@pytest.mark.parametrize("name", TRAVELS)
def test_what_a_rank_gets_may_not_be_read_before_the_wait(name):
    with pytest.raises(ReadBeforeWait):
        lt.run(reads_while_it_travels, name, 1, ranks=2)


def test_what_comes_from_several_devices_meets_on_the_first_ranks():
    """As with a GPU for each rank."""
    brought = [
        SimpleNamespace(device=torch.device(name), inputs=[torch.ones(2, device=name)]) for name in ("meta", "cpu")
    ]
    assert [part.inputs[0].device.type for part in _to_one_device(brought)] == ["meta", "meta"]
