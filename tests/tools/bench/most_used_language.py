"""Language models: trained by several optimizers, padded, sampled from, adapted, quantised; and recurrent ones."""

import torch
from torch import nn

from tests.tools.bench.most_used_training import HEADS, WIDTH, steps

VOCABULARY = 64


class Block(nn.Module):
    """A transformer block of the older kind: layer norm, GELU, biases, dropout."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down, self.drop = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x):
        q, k, v = self.qkv(self.one(x)).split(WIDTH, dim=-1)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.drop(self.out(y))
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.two(x)))))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(16, WIDTH)
        self.blocks, self.norm = nn.ModuleList([Block(), Block()]), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def words(*shape):
    return torch.randint(0, VOCABULARY, shape)


def next_word(model):
    ids = words(2, 9)
    return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def gpt_adamw_foreach():
    model = Gpt()
    steps(model, next_word, torch.optim.AdamW(model.parameters(), foreach=True))


def gpt_adamw_fused():
    model = Gpt()
    steps(model, next_word, torch.optim.AdamW(model.parameters(), fused=True))


def gpt_adam_for_loop():
    model = Gpt()
    steps(model, next_word, torch.optim.Adam(model.parameters(), foreach=False, amsgrad=True))


def gpt_autocast():
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def loss(model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return next_word(model)

    steps(model, loss, optimizer)


def rotated(x, cos, sin):
    one, two = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-two, one], dim=-1) * sin


def angles(length, width):
    inverse = 1.0 / (10000 ** (torch.arange(0, width, 2).float() / width))
    freqs = torch.outer(torch.arange(length).float(), inverse)
    both = torch.cat([freqs, freqs], dim=-1)
    return both.cos(), both.sin()


class Rms(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class LlamaBlock(nn.Module):
    """Grouped queries, rotary places, RMS norm, SwiGLU, no biases."""

    def __init__(self, keys=2):
        super().__init__()
        self.keys, each = keys, WIDTH // HEADS
        self.one, self.two = Rms(), Rms()
        self.q, self.k, self.v = (nn.Linear(WIDTH, n * each, bias=False) for n in (HEADS, keys, keys))
        self.out, self.gate = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x, cos, sin, cache=None, mask=None):
        y = self.one(x)
        q, k, v = (f(y).view(*y.shape[:2], -1, WIDTH // HEADS).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        if cache is not None:
            cache[0], cache[1] = torch.cat([cache[0], k], dim=2), torch.cat([cache[1], v], dim=2)
            k, v = cache
        k, v = (t.repeat_interleave(HEADS // self.keys, dim=1) for t in (k, v))
        y = nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=cache is None and mask is None
        )
        x = x + self.out(y.transpose(1, 2).contiguous().view(x.shape))
        y = self.two(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.RMSNorm(WIDTH)
        self.blocks, self.head = nn.ModuleList([LlamaBlock(), LlamaBlock()]), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids, caches=None, start=0, mask=None):
        x = self.words(ids)
        cos, sin = (t[start:] for t in angles(start + ids.shape[1], WIDTH // HEADS))
        for i, block in enumerate(self.blocks):
            x = block(x, cos, sin, None if caches is None else caches[i], mask)
        return self.head(self.norm(x))


def llama_training():
    model = Llama()
    steps(model, next_word, torch.optim.AdamW(model.parameters(), foreach=True, weight_decay=0.1))


def llama_padded_training():
    """Sequences of several lengths, with a mask, and a loss that leaves the padding out."""
    model, lengths = Llama(), torch.tensor([5, 8])

    def loss(model):
        ids = words(2, 9)
        here = torch.arange(8) < lengths[:, None]
        mask = torch.ones(8, 8, dtype=torch.bool).tril() & here[:, None, None, :]
        bias = torch.zeros(mask.shape).masked_fill(~mask, -1e9)
        target = ids[:, 1:].masked_fill(~here, -100)
        return nn.functional.cross_entropy(model(ids[:, :-1], mask=bias).transpose(1, 2), target, ignore_index=-100)

    steps(model, loss, torch.optim.AdamW(model.parameters()))


def sampling():
    """Generation with a cache of keys and values: temperature, top-k, top-p, repetition penalty."""
    model, ids = Llama().eval(), words(2, 4)
    caches = [[torch.empty(2, 2, 0, WIDTH // HEADS) for _ in "kv"] for _ in model.blocks]
    with torch.no_grad():
        logits = model(ids, caches)[:, -1]
        for _ in range(3):
            logits = logits.scatter(1, ids, logits.gather(1, ids) / 1.3) / 0.8
            least = logits.topk(20).values[:, -1:]
            logits = torch.where(logits < least, float("-inf"), logits)
            ordered, places = logits.sort(descending=True)
            over = ordered.softmax(-1).cumsum(-1) > 0.9
            over[:, 1:] = over[:, :-1].clone()
            over[:, 0] = False
            logits = logits.masked_fill(over.scatter(1, places, over), float("-inf"))
            new = torch.multinomial(logits.softmax(-1), 1)
            ids = torch.cat([ids, new], dim=1)
            logits = model(new, caches, ids.shape[1] - 1)[:, -1]
        ended = (ids == 1).any(dim=1)
        return ids, ended.all(), logits.argmax(-1)


def translation():
    """An encoder and a decoder with torch's own modules and masks."""
    model, table = (
        nn.Transformer(WIDTH, HEADS, 1, 1, 64, batch_first=True),
        nn.Embedding(VOCABULARY, WIDTH, padding_idx=0),
    )
    whole = nn.ModuleList([model, table])

    def loss(_):
        source, target = words(2, 7), words(2, 5)
        mask = nn.Transformer.generate_square_subsequent_mask(5)
        y = model(table(source), table(target), tgt_mask=mask, src_key_padding_mask=source == 0)
        logits = y @ table.weight.t()
        return nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), target.reshape(-1), ignore_index=0)

    steps(whole, loss, torch.optim.Adam(whole.parameters(), betas=(0.9, 0.98)))


def lstm():
    model = nn.ModuleList(
        [nn.Embedding(VOCABULARY, 16), nn.LSTM(16, 16, 2, batch_first=True), nn.Linear(16, VOCABULARY)]
    )

    def loss(model):
        ids = words(3, 6)
        hidden, _ = model[1](model[0](ids[:, :-1]))
        return nn.functional.cross_entropy(model[2](hidden).transpose(1, 2), ids[:, 1:])

    steps(model, loss, torch.optim.SGD(model.parameters(), lr=0.5))


def gated_recurrence():
    cell, out = nn.GRUCell(8, 16), nn.Linear(16, 1)
    whole = nn.ModuleList([cell, out])

    def loss(_):
        h, total = torch.zeros(4, 16), 0.0
        for x in torch.randn(5, 4, 8).unbind(0):
            h = cell(x, h)
            total = total + nn.functional.smooth_l1_loss(out(h).squeeze(-1), x.sum(-1))
        return total

    steps(whole, loss, torch.optim.Adagrad(whole.parameters()))


def state_space():
    """A selective scan, step by step and by cumulative sums."""
    a, b = nn.Parameter(torch.randn(8)), nn.Linear(8, 24)
    whole = nn.ModuleList([b])

    def loss(_):
        x = torch.randn(2, 6, 8)
        gate, keep, value = b(x).tensor_split(3, dim=-1)
        decay = (-nn.functional.softplus(keep) * a.abs()).cumsum(1)
        state = decay.exp() * (value / decay.exp().clamp_min(1e-6)).cumsum(1)
        return (state * torch.tanh(gate)).flip(1).roll(1, 1).var(dim=1).mean() + nn.functional.pad(
            state, (0, 0, 1, 0)
        ).norm()

    steps(whole, loss, torch.optim.NAdam(whole.parameters()))


def low_rank_adapters():
    """Frozen weights, two small factors, gradients accumulated and unscaled, an average of the weights."""
    base, a, b = nn.Linear(16, 16), nn.Parameter(torch.randn(16, 2)), nn.Parameter(torch.zeros(2, 16))
    base.requires_grad_(False)
    optimizer = torch.optim.SGD([a, b], lr=0.1, momentum=0.9, foreach=True)
    for _ in range(2):
        optimizer.zero_grad(set_to_none=False)
        for x in torch.randn(2, 4, 16):
            y = base(x) + nn.functional.dropout(x, 0.1) @ a @ b * 2.0
            ((y - x).abs().mean() * 128).backward()
        torch._foreach_mul_([p.grad for p in (a, b)], 1 / 128)
        torch.nn.utils.clip_grad_value_([a, b], 1.0)
        optimizer.step()
    with torch.no_grad():
        base.weight.add_((a @ b).t(), alpha=2.0)


def quantised_inference():
    """Weights in eight bits with a scale for each row, dequantised where they are used."""
    with torch.no_grad():
        weight = torch.randn(16, 32)
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        packed = (weight / scale).round().clamp(-128, 127).to(torch.int8)
        x = torch.randn(4, 32).bfloat16()
        y = nn.functional.linear(x, packed.to(torch.bfloat16)) * scale.squeeze(1).bfloat16()
        low = (packed & 15) | ((packed >> 4) << 4)
        return y.float(), low.ne(packed).sum(), torch.count_nonzero(packed)
