"""Layers, models and optimizers of the programs in `last`; each has the place where a faulty program differs as a method."""

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from tests.tools.compare import layers, models


class Padded(nn.Module):
    """An embedding with a row that gets no gradient, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(models.VOCAB, models.WIDTH, padding_idx=5), nn.Linear(models.WIDTH, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.emb(ids))


class PaddedRows(layers.VocabEmbedding):
    def padding(self) -> int | None:
        at = 5 - layers.place(self.group)[0] * self.weight.shape[0]
        return at if 0 <= at < self.weight.shape[0] else None

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.weight.shape[0]
        local = ids - layers.place(self.group)[0] * rows
        outside = (local < 0) | (local >= rows)
        found = F.embedding(local.masked_fill(outside, 0), self.weight, self.padding())
        return layers.Reduce.apply(found.masked_fill(outside.unsqueeze(-1), 0.0), self.group)


class HeadNorm(models.Attention):
    """Attention with a norm of each head's queries."""

    def __init__(self) -> None:
        super().__init__()
        self.q_norm = nn.LayerNorm(self.head)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (models.heads_of(one, self.head) for one in self.qkv(x).chunk(3, -1))
        return self.proj(models.merged(models.attend(self.q_norm(q), k, v)))


class Balance(nn.Module):
    """The loss that keeps experts equally busy: the mean probability of each times the share of tokens it gets."""

    def share(self, chosen: Tensor) -> Tensor:
        return chosen.float().mean(0)

    def probability(self, probabilities: Tensor) -> Tensor:
        return probabilities.mean(0)

    def forward(self, probabilities: Tensor) -> Tensor:
        count = probabilities.shape[-1]
        chosen = F.one_hot(probabilities.argmax(-1), count)
        return count * (self.probability(probabilities) * self.share(chosen)).sum()


class BalanceOfAll(Balance):
    """Balance with the share over the tokens of all ranks; the ranks' losses are averaged."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group = group

    def share(self, chosen: Tensor) -> Tensor:
        return layers.summed(chosen.float().mean(0), self.group) / layers.place(self.group)[1]


class Routed(nn.Module):
    """The loss of weighted experts, with the loss of their balance."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(8, 4, bias=False), nn.Linear(8, 4)
        self.balance = Balance()

    def forward(self, x: Tensor) -> Tensor:
        probabilities = self.router(x).softmax(-1)
        return (self.experts(x) * probabilities).square().mean() + 0.1 * self.balance(probabilities)


class TiedLayers(nn.Module):
    """An embedding, four layers, and the embedding once more as the head; what a stage does not have is None."""

    def __init__(self) -> None:
        super().__init__()
        self.emb: nn.Embedding | None = nn.Embedding(models.VOCAB, models.WIDTH)
        self.layers = nn.ModuleDict({str(at): nn.Linear(models.WIDTH, models.WIDTH) for at in range(4)})
        self.head: nn.Linear | None = nn.Linear(models.WIDTH, models.VOCAB, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.emb is None else self.emb(x)
        for layer in self.layers.values():
            x = torch.tanh(layer(x))
        return x if self.head is None else self.head(x)


def stage_of(model: TiedLayers, index: int, count: int, mesh: Any) -> PipelineStage:
    part = copy.deepcopy(model)
    if part.emb is not None and part.head is not None:
        part.head.weight = nn.Parameter(part.head.weight.detach().clone())
    each = 4 // count
    for name in list(part.layers):
        if int(name) // each != index:
            del part.layers[name]
    if index > 0:
        part.emb = None
    if index < count - 1:
        part.head = None
    return PipelineStage(part, index, count, torch.device("cpu"), group=mesh.get_group("pp"))


def tie(stage: PipelineStage, group: Any) -> None:
    for end in (stage.submod.emb, stage.submod.head):
        if end is not None:
            end.weight.tied_group = group  # type: ignore[union-attr]


class TiedSGD(torch.optim.SGD):
    """SGD that sums the gradients of a parameter that several ranks have, first."""

    def step(self, closure: Any = None) -> Any:
        for parameter in (p for one in self.param_groups for p in one["params"]):
            if hasattr(parameter, "tied_group"):
                dist.all_reduce(parameter.grad, group=parameter.tied_group)
        return super().step(closure)


class Halo(torch.autograd.Function):
    """Forward: the last tokens of the rank before, then the own ones.  Backward: their gradients go back to it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, width: int, group: Any) -> Tensor:
        ctx.width, ctx.group = width, group
        rank, size = layers.place(group)
        tails = layers.joined(x[:, -width:], 1, group).chunk(size, 1)
        return torch.cat([tails[rank - 1] if rank else torch.zeros_like(tails[0]), x], 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        rank, size = layers.place(ctx.group)
        heads = layers.joined(grad[:, : ctx.width], 1, ctx.group).chunk(size, 1)
        mine = grad[:, ctx.width :].clone()
        if rank + 1 < size:
            mine[:, -ctx.width :] += heads[rank + 1]
        return mine, None, None


class Convolved(nn.Module):
    """A causal convolution of three tokens between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.conv = nn.Conv1d(8, 8, 3, groups=8)

    def before(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 2, 0))

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(self.first(x))
        return self.last(F.silu(self.conv(x.transpose(1, 2)).transpose(1, 2)))


class ConvolvedParts(Convolved):
    """Convolved with the sequence cut; its output is that of the rank's tokens."""

    def __init__(self, whole: Convolved, group: Any) -> None:
        nn.Module.__init__(self)
        self.group = group
        self.first, self.conv, self.last = whole.first, whole.conv, whole.last
        for parameter in self.parameters():
            layers.mean_gradient(parameter, group)

    def before(self, x: Tensor) -> Tensor:
        return Halo.apply(x, 2, self.group)

    def forward(self, x: Tensor) -> Tensor:
        rank, size = layers.place(self.group)
        return super().forward(x.chunk(size, 1)[rank])


class Running(nn.Module):
    """x without the running mean of the rows before, which is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def statistic(self, x: Tensor) -> Tensor:
        return x.mean(0)

    def forward(self, x: Tensor) -> Tensor:
        out = x - self.mean
        with torch.no_grad():
            self.mean.lerp_(self.statistic(x.detach()), 0.5)
        return out


class RunningOfAll(Running):
    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group = group

    def statistic(self, x: Tensor) -> Tensor:
        return layers.summed(x.mean(0), self.group) / layers.place(self.group)[1]


class Adapted(nn.Module):
    """A linear layer with a low-rank part."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 16) / 4)
        self.down, self.up = nn.Parameter(torch.randn(2, 16) / 4), nn.Parameter(torch.randn(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) + F.linear(F.linear(x, self.down), self.up)


class AdaptedRow(nn.Module):
    """Adapted with its inputs cut: one sum of both parts."""

    def __init__(self, whole: Adapted, group: Any) -> None:
        super().__init__()
        self.group = group
        self.weight, self.down = layers.shard(whole.weight, 1, group), layers.shard(whole.down, 1, group)
        self.up = layers.whole(whole.up)
        self.sum_of_up()

    def sum_of_up(self) -> None:
        layers.sum_gradient(self.up, self.group)

    def forward(self, x: Tensor) -> Tensor:
        partial = F.linear(x, self.weight) + F.linear(F.linear(x, self.down), self.up)
        return layers.Reduce.apply(partial, self.group)


class AdaptedMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 16), Adapted()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Encoder(nn.Module):
    """Attention of each token to all, between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.attn = models.Attention(causal=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(x + self.attn(x))


class RingAttention(nn.Module):
    """Attention of a part of the sequence to one rank's keys after the other, merged as they come."""

    def __init__(self, whole: models.Attention, group: Any) -> None:
        super().__init__()
        self.head, self.group = whole.head, group
        self.qkv, self.proj = whole.qkv, whole.proj

    def total(self, before: Tensor, block: Tensor) -> Tensor:
        return torch.logaddexp(before, block)

    def forward(self, x: Tensor) -> Tensor:
        size = layers.place(self.group)[1]
        q, k, v = (models.heads_of(one, self.head) for one in self.qkv(x).chunk(3, -1))
        keys, values = (layers.Gather.apply(one, 2, self.group).chunk(size, 2) for one in (k, v))
        out, before = torch.zeros_like(q), torch.full_like(q[..., :1], float("-inf"))
        for key, value in zip(keys, values, strict=True):
            scores = q @ key.transpose(-1, -2) / self.head**0.5
            block = scores.logsumexp(-1, keepdim=True)
            total = self.total(before, block)
            out = out * (before - total).exp() + (scores.softmax(-1) @ value) * (block - total).exp()
            before = total
        return self.proj(models.merged(out))


class EncoderParts(Encoder):
    """Encoder with the sequence cut; its output is that of the rank's tokens."""

    def __init__(self, whole: Encoder, group: Any, attention: Any = RingAttention) -> None:
        nn.Module.__init__(self)
        self.group = group
        self.first, self.last, self.attn = whole.first, whole.last, attention(whole.attn, group)
        for parameter in self.parameters():
            layers.mean_gradient(parameter, group)

    def forward(self, x: Tensor) -> Tensor:
        rank, size = layers.place(self.group)
        return super().forward(x.chunk(size, 1)[rank])


class FlatSGD(torch.optim.SGD):
    """SGD in which each rank of the parameters' group updates a part of all of them, as one flat tensor."""

    def part(self, numel: int, size: int) -> int:
        return -(-numel // size)

    def step(self, closure: Any = None) -> Any:
        [given] = self.param_groups
        parameters = given["params"]
        group = getattr(parameters[0], "flat_group", None)
        if group is None:
            return super().step(closure)
        rank, size = layers.place(group)
        flat = torch.cat([one.detach().flatten() for one in parameters])
        grad = torch.cat([one.grad.flatten() for one in parameters])
        each = self.part(flat.numel(), size)
        mine = (
            F.pad(flat, (0, each * size))[rank * each :][:each]
            - given["lr"] * F.pad(grad, (0, each * size))[rank * each :][:each]
        )
        flat = torch.cat([layers.joined(mine, 0, group)[: flat.numel()], flat[each * size :]])
        with torch.no_grad():
            for one, new in zip(parameters, flat.split([one.numel() for one in parameters]), strict=True):
                one.copy_(new.view_as(one))
        return None
