"""Right ways to cut the models, by hand."""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from tests.tools.compare import layers, models


def cut_mlp(mlp: models.Mlp, group: Any, *, sequence: bool = False) -> None:
    mlp.fc1 = layers.Column(mlp.fc1, group, sequence=sequence)  # type: ignore[assignment]
    mlp.fc2 = layers.Row(mlp.fc2, group, sequence=sequence)  # type: ignore[assignment]


def cut_swiglu(mlp: models.SwiGlu, group: Any) -> None:
    mlp.gate_up = layers.FusedColumn(mlp.gate_up, 2, group)  # type: ignore[assignment]
    mlp.down = layers.Row(mlp.down, group)  # type: ignore[assignment]


def cut_attention(attention: models.Attention, group: Any) -> None:
    attention.qkv = layers.FusedColumn(attention.qkv, 3, group)  # type: ignore[assignment]
    attention.proj = layers.Row(attention.proj, group)  # type: ignore[assignment]


def cut_block(block: models.Block, group: Any) -> None:
    cut_attention(block.attn, group)
    cut_mlp(block.mlp, group)


class KeptSharedKv(nn.Module):
    """SharedKv with the queries cut and the one head of keys and values on each rank."""

    def __init__(self, whole: models.SharedKv, group: Any) -> None:
        super().__init__()
        self.head, self.group = whole.head, group
        self.q, self.kv, self.proj = layers.Column(whole.q, group), whole.kv, layers.Row(whole.proj, group)

    def forward(self, x: Tensor) -> Tensor:
        q = models.heads_of(self.q(x), self.head)
        kv = layers.Copy.apply(self.kv(x), self.group)
        k, v = (models.heads_of(one, self.head) for one in kv.chunk(2, -1))
        return self.proj(models.merged(models.attend(q, k, v)))


class SequenceNormMlp(nn.Module):
    """NormMlp with sequence parallelism: the norms see a part of the sequence, dim 1."""

    def __init__(self, whole: models.NormMlp, group: Any) -> None:
        super().__init__()
        self.group = group
        self.norm, self.mlp, self.last = whole.norm, whole.mlp, whole.last
        cut_mlp(self.mlp, group, sequence=True)
        for norm in (self.norm, self.last):
            for parameter in norm.parameters():
                layers.sum_gradient(parameter, group)

    def forward(self, x: Tensor) -> Tensor:
        x = layers.Split.apply(x, 1, self.group)
        return layers.Join.apply(self.last(x + self.mlp(self.norm(x))), 1, self.group)


class ContextAttention(nn.Module):
    """Attention of a part of the sequence to all keys before it."""

    def __init__(self, whole: models.Attention, group: Any) -> None:
        super().__init__()
        self.head, self.group, self.causal = whole.head, group, whole.causal
        self.qkv, self.proj = whole.qkv, whole.proj

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (models.heads_of(one, self.head) for one in self.qkv(x).chunk(3, -1))
        first = layers.place(self.group)[0] * x.shape[1]
        k, v = (layers.Gather.apply(one, 2, self.group) for one in (k, v))
        return self.proj(models.merged(models.attend(q, k, v, first, causal=self.causal)))


class UlyssesAttention(ContextAttention):
    """Attention of all the sequence with a part of the heads, between two all_to_alls."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (models.heads_of(one, self.head) for one in self.qkv(x).chunk(3, -1))
        q, k, v = (layers.Exchange.apply(one, 1, 2, self.group) for one in (q, k, v))
        out = layers.Exchange.apply(models.attend(q, k, v, causal=self.causal), 2, 1, self.group)
        return self.proj(models.merged(out))


class ContextGpt(nn.Module):
    """Gpt with the sequence cut: its loss is that of the rank's own tokens."""

    def __init__(
        self, whole: models.Gpt, group: Any, attention: Any = ContextAttention, reduce: Any = layers.mean_gradient
    ) -> None:
        super().__init__()
        self.group = group
        self.emb, self.pos, self.blocks, self.norm, self.head = (
            whole.emb, whole.pos, whole.blocks, whole.norm, whole.head,
        )  # fmt: skip
        for block in self.blocks:
            block.attn = attention(block.attn, group)
        for parameter in self.parameters():
            reduce(parameter, group)

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        rank, size = layers.place(self.group)
        ids, target = (one.chunk(size, 1)[rank] for one in (ids, target))
        x = self.emb(ids) + self.pos(torch.arange(ids.shape[1]) + rank * ids.shape[1])
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())


class VocabGpt(nn.Module):
    """Gpt with its vocabulary cut, and the cross entropy of cut logits; tied if the given one is."""

    def __init__(self, whole: models.Gpt, group: Any) -> None:
        super().__init__()
        self.group = group
        tied = whole.head.weight is whole.emb.weight
        self.emb, self.pos, self.blocks, self.norm = (
            layers.VocabEmbedding(whole.emb, group), whole.pos, whole.blocks, whole.norm,
        )  # fmt: skip
        self.head = layers.Column(whole.head, group)
        if tied:
            self.head.weight = self.emb.weight
        for block in self.blocks:
            cut_block(block, group)

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        x = self.emb(ids) + self.pos(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return layers.vocab_cross_entropy(self.head(self.norm(x)), target, self.group).mean()


class LocalExperts(nn.Module):
    """Experts cut over ranks that all hold every token; the parts of the sum are reduced."""

    def __init__(self, whole: models.Experts, group: Any) -> None:
        super().__init__()
        self.group, self.router = group, whole.router
        self.w1, self.w2 = layers.shard(whole.w1, 0, group), layers.shard(whole.w2, 0, group)

    def forward(self, x: Tensor) -> Tensor:
        first = layers.place(self.group)[0] * self.w1.shape[0]
        x, gates = (layers.Copy.apply(one, self.group) for one in (x, self.router(x).softmax(-1)))
        out = torch.zeros_like(x)
        for index in range(self.w1.shape[0]):
            gate = gates[..., first + index : first + index + 1]
            out = out + gate * (F.gelu(x @ self.w1[index]) @ self.w2[index])
        return layers.Reduce.apply(out, self.group)


class SentExperts(nn.Module):
    """Experts cut over data-parallel ranks: every token is sent to each expert, and comes back.

    The loss is a mean over each rank's rows, so the experts' gradients are divided by the number of ranks.
    """

    def __init__(self, whole: models.Experts, group: Any) -> None:
        super().__init__()
        self.group, self.router = group, whole.router
        self.w1, self.w2 = layers.shard(whole.w1, 0, group), layers.shard(whole.w2, 0, group)
        for one in (self.w1, self.w2):
            one.register_hook(lambda grad: grad / layers.place(group)[1])
        for one in self.router.parameters():
            layers.mean_gradient(one, group)

    def forward(self, x: Tensor) -> Tensor:
        size = layers.place(self.group)[1]
        gates = self.router(x).softmax(-1)
        here = self.w1.shape[0]
        sent = x.unsqueeze(0).expand(size * here, *x.shape)  # a copy of the tokens for each expert
        got = layers.Exchange.apply(sent, 0, 1, self.group)  # (experts here, tokens of all ranks, width)
        done = torch.stack([F.gelu(got[at] @ self.w1[at]) @ self.w2[at] for at in range(here)])
        back = layers.Exchange.apply(done, 1, 0, self.group)
        return torch.einsum("e...d,...e->...d", back, gates)
