import pytest
import torch
from torch import nn

import localtensor as lt
from localtensor.errors import Diverged

spmd = pytest.importorskip("spmd_types")
rules, checker = spmd.rules, pytest.importorskip("spmd_types.checker")


class RowLinear(torch.autograd.Function):
    """The hook claims a sum over the ranks, which the kernel does not do."""

    @staticmethod
    def spmd_typecheck(*, x, weight, group):
        return rules.all_reduce(rules.einsum("mk,nk->mn", x, weight), group, src=spmd.P, dst=spmd.R)

    @staticmethod
    def forward(ctx, x, weight, group):  # noqa: ARG004
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x, None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class TypedBlock(nn.Module):
    """Block with the hidden dim sharded."""

    def __init__(self, block, mesh):
        super().__init__()
        self.mesh, self.tp = mesh, mesh.get_group("tp")
        rank, size = mesh.get_local_rank("tp"), mesh.size()
        self.up = nn.Parameter(block.up.weight.detach().chunk(size, 0)[rank].clone())
        self.down = nn.Parameter(block.down.weight.detach().chunk(size, 1)[rank].clone())
        self.relu = nn.ReLU()  # a module that is called, and watched, while types are checked

    def forward(self, x):
        with spmd.set_current_mesh(self.mesh), checker.typecheck(local=False):
            spmd.assert_type(x, {self.tp: spmd.R})
            spmd.assert_type(self.up, {self.tp: spmd.S(0)})
            spmd.assert_type(self.down, {self.tp: spmd.S(1)})
            return self.product(self.relu(nn.functional.linear(x, self.up)))

    def product(self, y):
        return RowLinear.apply(y, self.down, self.tp)


class SummedBlock(TypedBlock):
    def product(self, y):
        return spmd.all_reduce(nn.functional.linear(y, self.down), self.tp, src=spmd.P, dst=spmd.I)


def compared(parallel):
    return lt.compare(
        Block, parallel, lambda: torch.randn(4, 8), mesh={"tp": 2}, loss=lambda y: y.square().mean(), steps=1
    )


def test_a_claim_that_is_wrong_is_named_with_the_call():
    with pytest.raises(Diverged) as caught:
        compared(TypedBlock)
    (call,) = caught.value.comparison.calls
    assert call.startswith("mm, test_typed.py") and "in forward, from test_typed.py" in call and "rules.py" not in call
    assert call.endswith("; typed R along tp")
    assert "an all_reduce over tp is missing" in str(caught.value)


def test_a_typed_block_that_is_right_computes_what_one_device_does():
    done = compared(SummedBlock)
    assert done.divergence is None and done.layouts["output of the whole model, step 0"] == "R"
