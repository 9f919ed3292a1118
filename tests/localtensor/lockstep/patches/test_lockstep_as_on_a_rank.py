"""What a program gets in lockstep as on a rank: views in inference mode, tensors that wait, FlexAttention, comparisons, imported functions."""

import math
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor._collective_utils import mesh_scatter
from torch.nn.attention import flex_attention as flex

import localtensor as lt
from localtensor.errors import NotInLockstep, RanksDiverge
from tests.end_to_end.programs.lockstep_ways import assert_both
from tests.torch_here import since_2_12

RANKS = 3


def infers():
    x = torch.arange(6.0).view(2, 3) * (dist.get_rank() + 1)
    with torch.inference_mode():
        mesh = init_device_mesh("cpu", (RANKS,))  # first used inside
        views = [x.t(), x[0], x.view(-1), *x.chunk(2), x.as_strided((2,), (1,)), x.detach()]
        whole = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)]).redistribute(mesh, [Replicate()]).to_local()
        made = x + 1
        flags = [one.is_inference() for one in (*views, made)]
        return [*(view * 2 for view in views), whole * 2, made * 1, torch.tensor(flags)]


def waits():
    x = torch.ones(4) * dist.get_rank()
    y = functional.all_reduce(x, "sum", dist.group.WORLD)
    flags = [isinstance(y, AsyncCollectiveTensor), y.completed]
    view = y.view(2, 2)
    flags += [isinstance(view, AsyncCollectiveTensor), y.completed]
    total = y + 1
    flags += [isinstance(total, AsyncCollectiveTensor), y.completed]
    return [total, view * 2, y.wait(), torch.tensor(flags)]


def attends():
    torch.manual_seed(0)
    query = torch.randn(1, 2, 32, 8) * (dist.get_rank() + 1)
    mask = flex.create_block_mask(lambda b, h, i, j: i >= j, None, None, 32, 32, device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        masked = flex.flex_attention(query, query, query, block_mask=mask)
        return [masked, flex.flex_attention(query, query, query, score_mod=lambda score, b, h, i, j: score + (i - j))]


def scatters():
    mesh = init_device_mesh("cpu", (RANKS,))
    parts = [torch.ones(2) * place for place in range(RANKS)]
    got = torch.empty(2)
    mesh_scatter(got, parts, mesh, mesh_dim=0)
    return [got]


def gradients_of_uneven_shards():
    mesh = init_device_mesh("cpu", (RANKS,))
    found = []
    for dims in ((4, 5), (2, 5, 3)):
        x = distribute_tensor(torch.arange(math.prod(dims)).view(dims) * 1.0, mesh, [Shard(1)]).requires_grad_()
        (x.to_local() ** 2).sum().backward()
        found += [x.grad.full_tensor(), torch.tensor(x.grad.stride())]
    return found


@pytest.mark.parametrize(
    "program", [infers, waits, attends, scatters, pytest.param(gradients_of_uneven_shards, marks=since_2_12)]
)
def test_it_is_that_of_rank_threads(program):
    assert_both(program, ranks=RANKS)


@since_2_12
def test_a_gradient_in_lockstep_has_the_strides_of_the_first_rank_of_its_mesh():
    def strides():
        seen = []
        x = distribute_tensor(torch.ones(4, 5), init_device_mesh("cpu", (RANKS,)), [Shard(1)]).requires_grad_() * 1
        x.register_hook(lambda grad: seen.append(grad.stride()))
        (x.to_local() ** 2).sum().backward()
        return seen[0]

    each = lt.run(strides, ranks=RANKS).values
    assert each == ((6, 1), (6, 1), (3, 1))  # pieces of 2, 2 and 1 columns: torch gives each rank its own
    with lt.LocalTensorMode(RANKS):
        assert strides() == each[0]


def test_a_tensor_that_waits_has_the_queries_of_a_local_tensor():
    with lt.LocalTensorMode(RANKS):
        x = functional.all_reduce(lt.rank_map(torch.tensor), "sum", dist.group.WORLD)
    assert (x.on(1).item(), x.reconcile().item(), x.ranks) == (3, 3, (0, 1, 2))


def test_an_operator_without_an_eager_kernel_is_refused():
    class Mine(torch._ops.HigherOrderOperator):
        def __init__(self):
            super().__init__("mine_for_lockstep")

        def __call__(self, *args):
            return super().__call__(*args)

    with (
        lt.LocalTensorMode(RANKS),
        pytest.raises(NotInLockstep, match="no eager kernel"),
        torch._C._AutoDispatchBelowAutograd(),
    ):
        Mine()(torch.ones(2))


def test_numbers_of_a_tensor_are_those_of_each_rank():
    with lt.LocalTensorMode(RANKS):
        x = lt.rank_map(torch.tensor)
        n, flag = x.item(), (x > 0).item()
        assert (n + 1) // 2 == (dist.get_rank() + 1) // 2
        y = torch.arange(6.0)[n : n + 2]
        with pytest.raises(RanksDiverge, match=r"Tensor\.item"):
            x.double().item()
        with pytest.raises(RanksDiverge):
            int(x)
    assert [y.on(rank).tolist() for rank in range(RANKS)] == [[0, 1], [1, 2], [2, 3]]
    assert flag.node.values.tolist() == [False, True, True]


def test_tensors_are_compared_rank_by_rank():
    with lt.LocalTensorMode(RANKS):
        x = torch.ones(2) * dist.get_rank()
        torch.testing.assert_close(x, x + 1e-7)
        with pytest.raises(AssertionError, match=r"On rank 0: .*not close"):
            torch.testing.assert_close(x, x + 1)
        with pytest.raises(RanksDiverge, match=r"True on rank 1, False on ranks 0, 2") as caught:
            torch.testing.assert_close(x, torch.ones(2))
        assert "On rank 0" in str(caught.value.__cause__)
