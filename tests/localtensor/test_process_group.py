import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch.distributed.nn.functional import all_gather as gather_with_gradients
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor, init_device_mesh

import localtensor as lt
from localtensor.errors import CollectiveFailed, LayoutMismatch

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # under both their names
SCHEDULES = ["round_robin", "shuffled:1"]


def run(program, *args, ranks=2, schedule="round_robin"):
    return lt.run(program, *args, ranks=ranks, schedule=schedule, leftovers="raise").values


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


@pytest.mark.parametrize("name", WRITES)
def test_version_counters_do_not_notice_what_a_collective_writes(name):
    def program():
        x = torch.full((4,), 2.0)
        before = x._version
        WRITES[name](x)
        return x._version - before

    assert run(program) == (0, 0)


@pytest.mark.parametrize("name", WRITES)
def test_what_backward_needs_may_be_overwritten_as_on_a_real_backend(name):
    """Autograd does not see the write, so it computes with the new numbers instead of raising."""

    def program():
        x, leaf = torch.full((4,), 2.0), torch.ones(4, requires_grad=True)
        product = (leaf * x).sum()
        WRITES[name](x)
        product.backward()
        return torch.equal(leaf.grad, x)

    assert run(program) == (True, True)


def test_a_leaf_may_be_written_though_it_wants_a_gradient():
    def program():
        leaf = torch.full((2,), float(dist.get_rank()), requires_grad=True)
        dist.broadcast(leaf, 1)
        (leaf * leaf).sum().backward()
        return leaf.is_leaf, leaf.grad.tolist()

    assert run(program) == ((True, [2.0, 2.0]),) * 2


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=str)
def test_a_leaf_that_is_distributed_keeps_its_gradient(placement, schedule):
    def program():
        mesh = init_device_mesh("cpu", (3,))
        leaf = torch.arange(20, dtype=torch.float64).reshape(5, 4).requires_grad_()
        spread = distribute_tensor(leaf, mesh, [placement])
        (spread * spread).sum().backward()
        again = distribute_tensor(leaf, mesh, [Replicate()])
        again.redistribute(mesh, [Shard(0)]).to_local().sum().backward()
        kept = torch.equal(spread.full_tensor(), leaf)
        return (
            leaf._version,
            torch.equal(spread.grad.full_tensor(), leaf * 2),
            again.grad.full_tensor().sum().item(),
            kept,
        )

    assert run(program, ranks=3, schedule=schedule) == ((0, True, 20.0, True),) * 3


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradients_flow_through_redistributions(schedule):
    def program():
        mesh = init_device_mesh("cpu", (2, 2))
        whole = torch.arange(15, dtype=torch.float64).reshape(5, 3)
        x = distribute_tensor(whole, mesh, [Shard(0), Shard(1)]).requires_grad_()
        y = x.redistribute(mesh, [Shard(1), Replicate()]).redistribute(mesh, [Replicate(), Replicate()])
        (y.to_local(grad_placements=[Partial(), Partial()]) ** 2).sum().backward()
        return torch.equal(x.grad.full_tensor(), whole * 2 * 4)

    assert run(program, ranks=4, schedule=schedule) == (True,) * 4


def test_functional_collectives_and_those_of_nn_carry_gradients():
    def program():
        x = torch.full((2,), dist.get_rank() + 1.0, requires_grad=True)
        fc.all_gather_tensor_autograd(x, 0, dist.group.WORLD).pow(2).sum().backward()
        first, x.grad = x.grad, None
        torch.cat(gather_with_gradients(x)).pow(2).sum().backward()
        return first.tolist(), x.grad.tolist()

    assert run(program) == (([4.0, 4.0], [4.0, 4.0]), ([8.0, 8.0], [8.0, 8.0]))


def test_a_collective_inside_backward_is_served_in_the_ranks_own_thread():
    class Summed(torch.autograd.Function):
        @staticmethod
        def forward(_ctx, x):
            return x * 1

        @staticmethod
        def backward(_ctx, grad):
            grad = grad.clone()
            dist.all_reduce(grad)
            return grad

    def program():
        x = torch.ones(2, requires_grad=True)
        (Summed.apply(x) * (dist.get_rank() + 1)).sum().backward()
        return x.grad.tolist()

    assert run(program, ranks=3, schedule="shuffled:5") == ([6.0, 6.0],) * 3


def test_autocast_and_inference_mode_do_not_touch_a_collective():
    def program():
        x = torch.full((2,), 1.0 + 2**-20, dtype=torch.float64)
        with torch.autocast("cpu", torch.bfloat16):
            dist.all_reduce(x, dist.ReduceOp.PRODUCT)
        with torch.inference_mode():
            y = torch.ones(2)
            dist.all_reduce(y)
        return x.dtype, x[0].item() == (1.0 + 2**-20) ** 2, y.tolist(), y.is_inference()

    assert run(program) == ((torch.float64, True, [2.0, 2.0], True),) * 2


def test_a_default_device_is_not_for_what_a_collective_makes_by_itself():
    def program():
        x = torch.ones(4)
        torch.set_default_device("meta")
        dist.all_reduce(x)
        dist.barrier()
        y = fc.all_reduce(x, "sum", dist.group.WORLD).wait()
        return x.tolist(), y.tolist()

    assert run(program) == (([2.0] * 4, [4.0] * 4),) * 2


def test_a_strided_output_is_written_through_its_strides():
    def program():
        whole = torch.zeros(3, 2)
        dist.all_gather([whole[:, 0], whole[:, 1]], torch.full((3,), dist.get_rank() + 1.0))
        return whole.tolist()

    assert run(program) == ([[1.0, 2.0]] * 3,) * 2


def test_ranks_never_share_memory_after_a_collective():
    def program():
        x = torch.full((2,), float(dist.get_rank()))
        held = [torch.zeros(2) for _ in range(3)]
        dist.all_gather(held, x)
        dist.broadcast(x, 0)
        x += dist.get_rank() * 10
        held[0] += dist.get_rank()
        dist.barrier()
        return x.tolist(), [one[0].item() for one in held]

    assert run(program, ranks=3) == (
        ([0.0, 0.0], [0.0, 1.0, 2.0]), ([10.0, 10.0], [1.0, 1.0, 2.0]), ([20.0, 20.0], [2.0, 1.0, 2.0]),
    )  # fmt: skip


def test_a_buffer_that_does_not_fit_is_refused_with_its_line():
    def program():
        target = torch.zeros(2, 3) if dist.get_rank() else torch.zeros(4)
        dist.group.WORLD.allgather([[target, torch.zeros(4)]], [torch.ones(4)]).wait()

    with pytest.raises(CollectiveFailed) as caught:
        run(program)
    line = program.__code__.co_firstlineno + 2
    assert str(caught.value).splitlines()[0] == (
        "all_gather #0 in group 0: tensors: of rank 1: all ranks have arrived, and what they bring is refused. "
        "rank 1 offers a buffer of shape (2, 3) of torch.float32 for a result of shape (4,) of torch.float32"
    )
    assert [(place.line, place.function) for place in caught.value.places] == [(line, "program")]


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.bfloat16, torch.complex64, torch.int64], ids=str)
def test_any_dtype_travels(dtype):
    def program():
        rank = dist.get_rank()
        x = torch.tensor([rank, 1]).to(dtype)
        held = [torch.zeros(2, dtype=dtype) for _ in range(2)]
        dist.all_gather(held, x)
        dist.broadcast(x, 1)
        return [one.tolist() for one in held], x.tolist()

    sent = [torch.tensor([rank, 1]).to(dtype).tolist() for rank in (0, 1)]
    assert run(program) == ((sent, sent[1]),) * 2


def test_empty_and_scalar_tensors_travel():
    def program():
        empty, scalar = torch.zeros(0, 3), torch.tensor(float(dist.get_rank() + 1))
        dist.all_reduce(empty)
        dist.all_reduce(scalar)
        row = torch.zeros(2)
        dist.all_gather_into_tensor(row, torch.tensor(float(dist.get_rank())))
        return tuple(empty.shape), scalar.item(), row.tolist()

    assert run(program) == (((0, 3), 3.0, [0.0, 1.0]),) * 2


def test_objects_travel():
    def program():
        rank = dist.get_rank()
        everybody = [None] * 3
        dist.all_gather_object(everybody, {"rank": rank, "x": torch.tensor([rank])})
        told = [f"from {rank}", {rank}]
        dist.broadcast_object_list(told, src=2)
        mine = [None]
        dist.scatter_object_list(mine, [f"for {r}" for r in range(3)] if rank == 1 else None, src=1)
        gathered = [None] * 3 if rank == 0 else None
        dist.gather_object(rank * 2, gathered, dst=0)
        return [one["x"].item() for one in everybody], told, mine, gathered

    values = run(program, ranks=3)
    assert values == tuple(([0, 1, 2], ["from 2", {2}], [f"for {r}"], [0, 2, 4] if r == 0 else None) for r in range(3))


def summed_in_columns_on_one_rank():
    x = torch.arange(6.0)
    x = x.reshape(3, 2) if dist.get_rank() == 0 else x.reshape(2, 3).t()
    dist.all_reduce(x)
    return x.tolist()


def summed_in_columns():
    x = torch.arange(6.0).reshape(2, 3).t()
    dist.all_reduce(x)
    return x.tolist()


def test_buffers_that_lie_in_different_orders_are_refused():
    with pytest.raises(LayoutMismatch) as refused:
        lt.run(summed_in_columns_on_one_rank, ranks=2)
    assert "contiguous on rank 0, strides (1, 3) on rank 1" in str(refused.value)


def test_buffers_that_lie_in_one_order_are_added_whatever_it_is():
    assert lt.run(summed_in_columns, ranks=2).values == ([[0, 6], [2, 8], [4, 10]],) * 2
