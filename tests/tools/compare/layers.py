"""Layers of parallel models written by hand, in the style of Megatron; the right programs are made of them."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


def place(group: Any) -> tuple[int, int]:
    return dist.get_rank(group), dist.get_world_size(group)


def shard(full: Tensor, dim: int, group: Any) -> nn.Parameter:
    """This rank's part of a parameter; it knows its group, for the norm of all gradients."""
    rank, size = place(group)
    part = nn.Parameter(full.detach().chunk(size, dim)[rank].clone())
    part.shard_group = group  # type: ignore[attr-defined]
    return part


def whole(full: Tensor) -> nn.Parameter:
    return nn.Parameter(full.detach().clone())


def summed(x: Tensor, group: Any) -> Tensor:
    x = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x


def joined(x: Tensor, dim: int, group: Any) -> Tensor:
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(place(group)[1])]
    dist.all_gather(parts, x.detach().contiguous(), group=group)
    return torch.cat(parts, dim)


def scattered(x: Tensor, dim: int, group: Any) -> Tensor:
    rank, size = place(group)
    parts = [part.contiguous() for part in x.detach().chunk(size, dim)]
    mine = torch.empty_like(parts[rank])
    dist.reduce_scatter(mine, parts, group=group)
    return mine


def exchanged(x: Tensor, split: int, cat: int, group: Any) -> Tensor:
    size = place(group)[1]
    sent = [part.contiguous() for part in x.detach().chunk(size, split)]
    got = [torch.empty_like(part) for part in sent]
    dist.all_to_all(got, sent, group=group)
    return torch.cat(got, cat)


class Copy(torch.autograd.Function):
    """Forward: as it is.  Backward: all_reduce."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return summed(grad, ctx.group), None


class Reduce(torch.autograd.Function):
    """Forward: all_reduce.  Backward: as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.set_materialize_grads(False)
        return summed(x, group)

    @staticmethod
    def backward(_: Any, grad: Tensor | None) -> Any:
        return grad, None


class Split(torch.autograd.Function):
    """Forward: this rank's slice.  Backward: all_gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Any) -> Tensor:
        ctx.dim, ctx.group = dim, group
        rank, size = place(group)
        return x.chunk(size, dim)[rank].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return joined(grad, ctx.dim, ctx.group), None, None


class Join(torch.autograd.Function):
    """Forward: all_gather.  Backward: this rank's slice (what follows is the same on each rank)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Any) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return joined(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        rank, size = place(ctx.group)
        return grad.chunk(size, ctx.dim)[rank].contiguous(), None, None


class Gather(torch.autograd.Function):
    """Forward: all_gather.  Backward: reduce_scatter (what follows differs from rank to rank)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Any) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return joined(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return scattered(grad, ctx.dim, ctx.group), None, None


class Scatter(torch.autograd.Function):
    """Forward: reduce_scatter.  Backward: all_gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Any) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return scattered(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return joined(grad, ctx.dim, ctx.group), None, None


class Exchange(torch.autograd.Function):
    """Forward: all_to_all from `split` to `cat`.  Backward: the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, split: int, cat: int, group: Any) -> Tensor:
        ctx.dims, ctx.group = (split, cat), group
        return exchanged(x, split, cat, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        split, cat = ctx.dims
        return exchanged(grad, cat, split, ctx.group), None, None, None


def sum_gradient(parameter: nn.Parameter, group: Any) -> None:
    parameter.register_hook(lambda grad: summed(grad, group))


def mean_gradient(parameter: nn.Parameter, group: Any) -> None:
    parameter.register_hook(lambda grad: summed(grad, group) / place(group)[1])


class Column(nn.Module):
    """Linear with its outputs cut; `sequence`: its input is cut along the sequence, dim 1."""

    def __init__(self, linear: nn.Linear, group: Any, *, sequence: bool = False) -> None:
        super().__init__()
        self.group, self.sequence = group, sequence
        self.weight = shard(linear.weight, 0, group)
        self.bias = None if linear.bias is None else shard(linear.bias, 0, group)

    def forward(self, x: Tensor) -> Tensor:
        x = Gather.apply(x, 1, self.group) if self.sequence else Copy.apply(x, self.group)
        return F.linear(x, self.weight, self.bias)


class Row(nn.Module):
    """Linear with its inputs cut; `sequence`: its output is cut along the sequence, dim 1."""

    def __init__(self, linear: nn.Linear, group: Any, *, sequence: bool = False) -> None:
        super().__init__()
        self.group, self.sequence = group, sequence
        self.weight = shard(linear.weight, 1, group)
        self.bias = None if linear.bias is None else whole(linear.bias)
        if sequence and self.bias is not None:
            sum_gradient(self.bias, group)

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight)
        y = Scatter.apply(y, 1, self.group) if self.sequence else Reduce.apply(y, self.group)
        return y if self.bias is None else y + self.bias


def fused_shard(full: Tensor, parts: int, group: Any) -> nn.Parameter:
    """A parameter of `parts` fused ones along dim 0: this rank's rows of each."""
    rank, size = place(group)
    cut = torch.cat([one.chunk(size, 0)[rank] for one in full.detach().chunk(parts, 0)])
    part = nn.Parameter(cut.clone())
    part.shard_group = group  # type: ignore[attr-defined]
    return part


class FusedColumn(nn.Module):
    """A fused linear (q, k and v; gate and up) cut within each of its `parts`."""

    def __init__(self, linear: nn.Linear, parts: int, group: Any) -> None:
        super().__init__()
        self.group = group
        self.weight = fused_shard(linear.weight, parts, group)
        self.bias = None if linear.bias is None else fused_shard(linear.bias, parts, group)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(Copy.apply(x, self.group), self.weight, self.bias)


class VocabEmbedding(nn.Module):
    """An embedding with its rows cut."""

    def __init__(self, embedding: nn.Embedding, group: Any) -> None:
        super().__init__()
        self.group = group
        self.weight = shard(embedding.weight, 0, group)

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.weight.shape[0]
        local = ids - place(self.group)[0] * rows
        outside = (local < 0) | (local >= rows)
        found = F.embedding(local.masked_fill(outside, 0), self.weight)
        return Reduce.apply(found.masked_fill(outside.unsqueeze(-1), 0.0), self.group)


def vocab_cross_entropy(logits: Tensor, target: Tensor, group: Any) -> Tensor:
    """Cross entropy of each token, of logits with the vocabulary cut along the last dim."""
    rows = logits.shape[-1]
    top = logits.detach().amax(-1)
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    shifted = logits - top.unsqueeze(-1)
    total = Reduce.apply(shifted.exp().sum(-1), group)
    local = target - place(group)[0] * rows
    outside = (local < 0) | (local >= rows)
    picked = shifted.gather(-1, local.masked_fill(outside, 0).unsqueeze(-1)).squeeze(-1)
    return total.log() - Reduce.apply(picked.masked_fill(outside, 0.0), group)


def clip_to(parameters: list[nn.Parameter], limit: float) -> None:
    """Scale all gradients to the norm `limit`; parts of parameters are summed over the group that holds them."""
    total = torch.zeros(())
    for parameter in parameters:
        square = parameter.grad.detach().float().square().sum()  # type: ignore[union-attr]
        group = getattr(parameter, "shard_group", None)
        total = total + (square if group is None else summed(square, group))
    scale = (limit / (total.sqrt() + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        parameter.grad.mul_(scale.to(parameter.grad.dtype))  # type: ignore[union-attr]


class ClippedSGD(torch.optim.SGD):
    def __init__(self, parameters: Any, lr: float = 0.1, limit: float = 0.05) -> None:
        super().__init__(parameters, lr=lr)
        self.limit = limit

    def step(self, closure: Any = None) -> Any:
        clip_to([p for one in self.param_groups for p in one["params"] if p.grad is not None], self.limit)
        return super().step(closure)
