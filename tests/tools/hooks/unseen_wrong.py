"""Ten wrong hooks of an author who had read the documentation alone: each says something else than its kernel does."""

# ruff: noqa: ARG004 (hooks and kernels keep the arguments that they have)

import spmd_types as spmd
import torch
import torch.distributed as dist
from spmd_types import rules

from tests.tools.hooks.corpus import BACKWARD, FORWARD, KIND, ONE_DIM, UNEVEN, Hook


class RMSNorm(torch.autograd.Function):
    """y = x / rms(x) * weight, over the last dim."""

    @staticmethod
    def spmd_typecheck(*, x, weight, eps):
        return rules.einsum("...d,d->...d", x, weight)  # WRONG (d must be whole)

    @staticmethod
    def forward(ctx, x, weight, eps):
        inv = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, inv)
        return x * inv * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight, inv = ctx.saved_tensors
        g = grad * weight
        dx = g * inv - x * inv.pow(3) * (g * x).mean(-1, keepdim=True)
        dw = (grad * x * inv).flatten(0, -2).sum(0)
        return dx, dw, None


class ColumnLinear(torch.autograd.Function):
    """x @ weight.T; the gradient of x is summed over the group here, as in Megatron."""

    @staticmethod
    def spmd_typecheck(*, x, weight, group):
        return rules.einsum("mk,nk->mn", x, weight)  # WRONG (x is I, not R: its gradient is whole on each rank)

    @staticmethod
    def forward(ctx, x, weight, group):
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        dx = grad @ weight
        dist.all_reduce(dx, group=ctx.group)
        return dx, grad.t() @ x, None


class ReduceFromRegion(torch.autograd.Function):
    """all_reduce forward, nothing backward."""

    @staticmethod
    def spmd_typecheck(*, x, group):
        return rules.all_reduce(x, group, src=spmd.P, dst=spmd.R)  # WRONG (dst is I)

    @staticmethod
    def forward(ctx, x, group):
        y = x.clone()
        dist.all_reduce(y, group=group)
        return y

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class MeanOverRows(torch.autograd.Function):
    """The mean over all rows of all ranks, if each rank has as many as the others."""

    @staticmethod
    def spmd_typecheck(*, x, group):
        return rules.all_reduce(rules.einsum("mn->n", x), group, src=spmd.P, dst=spmd.I)  # WRONG (for uneven shards)

    @staticmethod
    def forward(ctx, x, group):
        ctx.rows, ctx.world = x.shape[0], dist.get_world_size(group)
        y = x.mean(0)
        dist.all_reduce(y, group=group)
        return y / ctx.world

    @staticmethod
    def backward(ctx, grad):
        return (grad / (ctx.rows * ctx.world)).expand(ctx.rows, -1).clone(), None


class TokenShift(torch.autograd.Function):
    """RWKV's shift: each token sees a part of the one before it."""

    @staticmethod
    def spmd_typecheck(*, x, mix):
        return rules.einsum("btc,c->btc", x, mix)  # WRONG (for t only)

    @staticmethod
    def forward(ctx, x, mix):
        before = torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]
        ctx.save_for_backward(x, before, mix)
        return x * mix + before * (1 - mix)

    @staticmethod
    def backward(ctx, grad):
        x, before, mix = ctx.saved_tensors
        shifted = torch.nn.functional.pad(grad * (1 - mix), (0, 0, 0, 1))[:, 1:]
        return grad * mix + shifted, (grad * (x - before)).sum((0, 1))


class PooledSum(torch.autograd.Function):
    """The sum over rows, or their average."""

    @staticmethod
    def spmd_typecheck(*, x, average):
        return rules.einsum("mn->n", x, linear_in=(0,))  # WRONG (for average=True)

    @staticmethod
    def forward(ctx, x, average=False):
        ctx.rows, ctx.scale = x.shape[0], 1 / x.shape[0] if average else 1.0
        return x.sum(0) * ctx.scale

    @staticmethod
    def backward(ctx, grad):
        return (grad * ctx.scale).expand(ctx.rows, -1).clone(), None


class ScaledWithPositions(torch.autograd.Function):
    """x * weight, and the number of each row."""

    @staticmethod
    def spmd_typecheck(outputs, *, x, weight):
        y, positions = outputs
        typed = rules.einsum("tc,c->tc", x, weight)
        rules.output(y, typed)
        rules.output(positions, rules.einsum("t_,_->t", x, weight))  # WRONG (rows are numbered from 0 on each rank)

    @staticmethod
    def forward(x, weight):
        return x * weight, torch.arange(x.shape[0])

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, grad, _):
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum(0)


class ScaleAndShift(torch.autograd.Function):
    """x * scale + shift."""

    @staticmethod
    def spmd_typecheck(*, x, scale, shift):
        return rules.einsum("mn,n,n->mn", x, scale, shift, linear_in=(0,))  # WRONG (affine: shift counts once per rank)

    @staticmethod
    def forward(ctx, x, scale, shift):
        ctx.save_for_backward(x, scale)
        return torch.addcmul(shift, x, scale)

    @staticmethod
    def backward(ctx, grad):
        x, scale = ctx.saved_tensors
        return grad * scale, (grad * x).sum(0), grad.sum(0)


class UnitGradient(torch.autograd.Function):
    """x; backward, its gradient with norm 1 ("stabilises the residual stream")."""

    @staticmethod
    def spmd_typecheck(*, x):
        return rules.einsum("...->...", x)  # WRONG (backward: the norm is that of a piece)

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad / (grad.norm() + 1e-6)


class GatherRows(torch.autograd.Function):
    """all_gather along dim 0; backward sums the ranks' gradients and keeps the own rows."""

    @staticmethod
    def spmd_typecheck(*, x, group):
        return rules.all_gather(x, group, src=spmd.S(0), dst=spmd.I)  # WRONG (dst is R)

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        pieces = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(pieces, x.contiguous(), group=group)
        return torch.cat(pieces)

    @staticmethod
    def backward(ctx, grad):
        total = grad.clone()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)].clone(), None


def _r(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def every():
    return [
        Hook("rms_norm", RMSNorm, (_r(6, 4), _r(4), 1e-5), ONE_DIM),
        Hook("column_linear", ColumnLinear, (_r(4, 6), _r(6, 6), "tp"), KIND),
        Hook("reduce_from_region", ReduceFromRegion, (_r(6, 4), "tp"), KIND),
        Hook("mean_over_rows", MeanOverRows, (_r(6, 4), "tp"), UNEVEN),
        Hook("token_shift", TokenShift, (_r(6, 6, 6), _r(6)), ONE_DIM),
        Hook("pooled_sum", PooledSum, (_r(6, 4), True), FORWARD),
        Hook("scaled_with_positions", ScaledWithPositions, (_r(6, 6), _r(6)), FORWARD),
        Hook("scale_and_shift", ScaleAndShift, (_r(6, 4), _r(4), _r(4) + 1), FORWARD),
        Hook("unit_gradient", UnitGradient, (_r(6, 4),), BACKWARD),
        Hook("gather_rows", GatherRows, (_r(6, 4), "tp"), KIND),
    ]
