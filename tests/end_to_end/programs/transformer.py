"""A transformer small enough to train whole in a test, in float64, so that a wrong number stands out from rounding.

The sizes are chosen to be awkward: a vocabulary of 14 does not divide by 3 or 4, and a bias of 8 over 3 ranks leaves
pieces of 3, 3 and 2.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.device import integers, normal

VOCABULARY, WIDTH, HEADS, HIDDEN, LENGTH = 14, 8, 4, 12, 4


class Attention(nn.Module):
    """Causal self-attention.  How many heads it has follows from its weights: a rank may hold some of them."""

    def __init__(self, width: int = WIDTH, heads: int = HEADS) -> None:
        super().__init__()
        self.head_width = width // heads
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = [
            project(x).view(batch, length, -1, self.head_width).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        ]
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


class Feedforward(nn.Module):
    def __init__(self, width: int = WIDTH, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.feedforward_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.feedforward = Attention(), Feedforward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feedforward(self.feedforward_norm(x))


class Transformer(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def seeded(make: type[nn.Module], seed: int = 0) -> nn.Module:
    """The model that every caller of this seed gets: each rank, and the one device that they are compared with."""
    torch.manual_seed(seed)
    return make().double()


def tokens(rows: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """So many rows of tokens, and after each token the next one."""
    text = integers(0, VOCABULARY, (rows, LENGTH + 1), seed)
    return text[:, :-1], text[:, 1:]


def noise(*shape: int, seed: int = 2) -> Tensor:
    return normal(*shape, seed=seed)
