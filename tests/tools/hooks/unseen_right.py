"""Ten right hooks of an author who had read the documentation alone."""

# ruff: noqa: ARG004 (hooks and kernels keep the arguments that they have)

import spmd_types as spmd
import torch
import torch.distributed as dist
from spmd_types import rules

from tests.tools.hooks.corpus import Hook


def _sizes(n, group):
    """The ranks' numbers of rows."""
    world = dist.get_world_size(group)
    mine = torch.tensor([n])
    theirs = [torch.zeros_like(mine) for _ in range(world)]
    dist.all_gather(theirs, mine, group=group)
    return [int(t) for t in theirs]


def _gather(x, dim, sizes, group):
    """The whole of pieces of unlike sizes."""
    x = x.movedim(dim, 0)
    padded = x.new_zeros(max(sizes), *x.shape[1:])
    padded[: x.shape[0]] = x
    pieces = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(pieces, padded, group=group)
    return torch.cat([p[:n] for p, n in zip(pieces, sizes)]).movedim(0, dim).contiguous()


class SwiGLU(torch.autograd.Function):
    """silu(first half) * second half: the last dim must be whole."""

    @staticmethod
    def spmd_typecheck(*, x):
        return rules.einsum("..._->..._", x)

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, -1)
        s = torch.sigmoid(gate)
        return torch.cat((grad * up * s * (1 + gate * (1 - s)), grad * gate * s), -1)


class CopyToRegion(torch.autograd.Function):
    """Megatron's f."""

    @staticmethod
    def spmd_typecheck(*, x, group):
        return rules.convert(x, group, src=spmd.I, dst=spmd.R)

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        total = grad.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class ReduceFromRegion(torch.autograd.Function):
    """Megatron's g."""

    @staticmethod
    def spmd_typecheck(out, *, x, group):
        rules.all_reduce(x, group, src=spmd.P, dst=spmd.I, out=out)

    @staticmethod
    def forward(ctx, x, group):
        y = x.clone()
        dist.all_reduce(y, group=group)
        return y

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class GatherUnevenRows(torch.autograd.Function):
    """all_gather along dim 0 of pieces of any sizes; backward is its transpose."""

    @staticmethod
    def spmd_typecheck(*, x, group):
        return rules.all_gather(x, group, src=spmd.S(0), dst=spmd.R)

    @staticmethod
    def forward(ctx, x, group):
        ctx.group, ctx.sizes = group, _sizes(x.shape[0], group)
        return _gather(x, 0, ctx.sizes, group)

    @staticmethod
    def backward(ctx, grad):
        total = grad.clone()
        dist.all_reduce(total, group=ctx.group)
        return total.split(ctx.sizes)[dist.get_rank(ctx.group)].clone(), None


class MaskedMean(torch.autograd.Function):
    """The mean loss of the tokens that count, on all ranks."""

    @staticmethod
    def spmd_typecheck(*, losses, mask, group):
        return rules.all_reduce(rules.einsum("t,t->", losses, mask), group, src=spmd.P, dst=spmd.I)

    @staticmethod
    def forward(ctx, losses, mask, group):
        total, count = (losses * mask).sum(), mask.sum()
        both = torch.stack((total, count))
        dist.all_reduce(both, group=group)
        total, count = both[0], both[1]
        ctx.save_for_backward(mask, count)
        return total / count

    @staticmethod
    def backward(ctx, grad):
        mask, count = ctx.saved_tensors
        return grad * mask / count, None, None


class ScaleAndShift(torch.autograd.Function):
    """x * scale + shift: linear in x and shift together."""

    @staticmethod
    def spmd_typecheck(*, x, scale, shift):
        return rules.einsum("mn,n,n->mn", x, scale, shift, linear_in=((0, 2),))

    @staticmethod
    def forward(ctx, x, scale, shift):
        ctx.save_for_backward(x, scale)
        return torch.addcmul(shift, x, scale)

    @staticmethod
    def backward(ctx, grad):
        x, scale = ctx.saved_tensors
        return grad * scale, (grad * x).sum(0), grad.sum(0)


class VocabParallelEmbedding(torch.autograd.Function):
    """Each rank looks up the ids that are in its rows."""

    @staticmethod
    def spmd_typecheck(*, ids, table, group):
        return rules.all_reduce(rules.einsum("b,vd->bd", ids, table), group, src=spmd.P, dst=spmd.I)

    @staticmethod
    def forward(ctx, ids, table, group):
        sizes = _sizes(table.shape[0], group)
        first = sum(sizes[: dist.get_rank(group)])
        own = (ids >= first) & (ids < first + table.shape[0])
        rows = torch.where(own, ids - first, 0)
        ctx.save_for_backward(rows, own)
        ctx.shape = table.shape
        y = table.new_zeros(len(ids), table.shape[1])
        if len(table):
            y = table[rows] * own[:, None]
        dist.all_reduce(y, group=group)
        return y

    @staticmethod
    def backward(ctx, grad):
        rows, own = ctx.saved_tensors
        dtable = grad.new_zeros(ctx.shape)
        if ctx.shape[0]:
            dtable.index_add_(0, rows, grad * own[:, None])
        return None, dtable, None


class Ulysses(torch.autograd.Function):
    """From a part of the tokens with all columns to all tokens with a part of the columns."""

    @staticmethod
    def spmd_typecheck(*, x, group):
        return rules.all_to_all(x, group, src=spmd.S(0), dst=spmd.S(1))

    @staticmethod
    def forward(ctx, x, group):
        ctx.group, ctx.sizes = group, _sizes(x.shape[0], group)
        rank, step = dist.get_rank(group), -(-x.shape[1] // dist.get_world_size(group))
        return _gather(x, 0, ctx.sizes, group)[:, rank * step : (rank + 1) * step].clone()

    @staticmethod
    def backward(ctx, grad):
        columns = _sizes(grad.shape[1], ctx.group)
        whole = _gather(grad, 1, columns, ctx.group)
        return whole.split(ctx.sizes)[dist.get_rank(ctx.group)].clone(), None


class LinearWithEnergy(torch.autograd.Function):
    """y = x @ w.T, and the sum of squares of each row of y."""

    @staticmethod
    def spmd_typecheck(*, x, w):
        y = rules.einsum("m_,n_->mn", x, w, linear_in=())
        return y, rules.einsum("mn->m", y)

    @staticmethod
    def forward(x, w):
        y = x @ w.t()
        return y, y.square().sum(-1)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs, output[0])

    @staticmethod
    def backward(ctx, gy, gz):
        x, w, y = ctx.saved_tensors
        g = gy + 2 * gz[:, None] * y
        return g @ w, g.t() @ x


class SumAlong(torch.autograd.Function):
    """x.sum(dim, keepdim) of a matrix."""

    @staticmethod
    def spmd_typecheck(*, x, dim, keepdim):
        kept = "_" if keepdim else ""
        to = {0: f"{kept}n", 1: f"m{kept}"}[dim % 2]
        return rules.einsum(f"mn->{to}", x, linear_in=(0,))

    @staticmethod
    def forward(ctx, x, dim=0, keepdim=False):
        ctx.shape, ctx.dim, ctx.keepdim = x.shape, dim, keepdim
        return x.sum(dim, keepdim=keepdim)

    @staticmethod
    def backward(ctx, grad):
        if not ctx.keepdim:
            grad = grad.unsqueeze(ctx.dim)
        return grad.expand(ctx.shape).clone(), None, None


def _r(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def every():
    return [
        Hook("swiglu", SwiGLU, (_r(6, 8),)),
        Hook("copy_to_region", CopyToRegion, (_r(6, 4), "tp")),
        Hook("reduce_from_region", ReduceFromRegion, (_r(6, 4), "tp")),
        Hook("gather_uneven_rows", GatherUnevenRows, (_r(6, 4), "tp")),
        Hook("masked_mean", MaskedMean, (_r(6), torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0, 0.0]), "tp")),
        Hook("scale_and_shift", ScaleAndShift, (_r(6, 4), _r(4), _r(4) + 1)),
        Hook("vocab_parallel_embedding", VocabParallelEmbedding, (torch.tensor([0, 5, 2, 2, 4]), _r(6, 4), "tp")),
        Hook("ulysses", Ulysses, (_r(6, 6), "tp")),
        Hook("linear_with_energy", LinearWithEnergy, (_r(6, 4), _r(6, 4))),
        Hook("sum_along", SumAlong, (_r(6, 4), -1, True)),
    ]
