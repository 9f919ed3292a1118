"""Tiny models on one device."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

VOCAB, WIDTH, LENGTH = 16, 8, 8


def attend(q: Tensor, k: Tensor, v: Tensor, first: int = 0, *, causal: bool = True) -> Tensor:
    """Attention of (batch, heads, length, width); `first` is the position of the first query."""
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if causal:
        at = torch.arange(q.shape[-2])[:, None] + first
        scores = scores.masked_fill(torch.arange(k.shape[-2])[None] > at, float("-inf"))
    return scores.softmax(-1) @ v


def heads_of(x: Tensor, width: int) -> Tensor:
    """(batch, length, heads * width) as (batch, heads, length, width)."""
    return x.unflatten(-1, (-1, width)).transpose(1, 2)


def merged(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


class Mlp(nn.Module):
    def __init__(self, width: int = WIDTH, hidden: int = 16, *, bias: bool = True) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden, bias=bias)
        self.fc2 = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class SwiGlu(nn.Module):
    def __init__(self, width: int = WIDTH, hidden: int = 16) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Attention(nn.Module):
    def __init__(self, width: int = WIDTH, heads: int = 4, *, causal: bool = True) -> None:
        super().__init__()
        self.head, self.causal = width // heads, causal
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads_of(one, self.head) for one in self.qkv(x).chunk(3, -1))
        return self.proj(merged(attend(q, k, v, causal=self.causal)))


class SharedKv(nn.Module):
    """Attention whose heads of queries share one head of keys and values."""

    def __init__(self, width: int = WIDTH, heads: int = 4) -> None:
        super().__init__()
        self.head = width // heads
        self.q = nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(width, 2 * self.head, bias=False)
        self.proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q = heads_of(self.q(x), self.head)
        k, v = (heads_of(one, self.head) for one in self.kv(x).chunk(2, -1))
        return self.proj(merged(attend(q, k, v)))


class Block(nn.Module):
    def __init__(self, width: int = WIDTH, heads: int = 4) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), Attention(width, heads)
        self.norm2, self.mlp = nn.LayerNorm(width), Mlp(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class NormMlp(nn.Module):
    """x + mlp(norm(x)), then a last norm."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.mlp, self.last = nn.LayerNorm(width), Mlp(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.mlp(self.norm(x)))


class Gpt(nn.Module):
    """Tokens to logits; with a target, to the mean loss of all tokens whose target is not -100."""

    def __init__(self, layers: int = 1, *, tied: bool = False, seed: int | None = None) -> None:
        super().__init__()
        self.emb, self.pos = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.emb.weight

    def hidden(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        at = torch.arange(ids.shape[1]) if positions is None else positions
        x = self.emb(ids) + self.pos(at)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, ids: Tensor, target: Tensor | None = None) -> Tensor:
        logits = self.head(self.hidden(ids))
        return logits if target is None else F.cross_entropy(logits.flatten(0, 1), target.flatten())


class Experts(nn.Module):
    """A router with one expert for each token, chosen by the token's index; weighted by the router."""

    def __init__(self, width: int = WIDTH, count: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        self.w1 = nn.Parameter(torch.randn(count, width, 2 * width) / width**0.5)
        self.w2 = nn.Parameter(torch.randn(count, 2 * width, width) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        gates = self.router(x).softmax(-1)
        out = torch.zeros_like(x)
        for index in range(self.w1.shape[0]):
            out = out + gates[..., index : index + 1] * (F.gelu(x @ self.w1[index]) @ self.w2[index])
        return out


class Residual(nn.Module):
    """A linear layer, then `inner` with a residual, then a head."""

    def __init__(self, inner: nn.Module, width: int = WIDTH, out: int = 4) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(width, width), inner, nn.Linear(width, out)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(x + self.inner(x))


def rows(count: int = 4, width: int = WIDTH, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, width).to(dtype)


def sequences(count: int = 4, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, LENGTH, WIDTH).to(dtype)


def tokens(count: int = 4) -> dict[str, Tensor]:
    return {
        "ids": torch.randint(0, VOCAB, (count, LENGTH)),
        "target": torch.randint(0, VOCAB, (count, LENGTH)),
    }


def square(y: Tensor) -> Tensor:
    return y.float().square().mean()


def as_is(y: Tensor) -> Tensor:
    return y


def tilted(y: Tensor) -> Tensor:
    """A loss that the output of a norm does not make constant."""
    return (y.float() - torch.linspace(-1.0, 1.0, y.shape[-1])).square().mean()
