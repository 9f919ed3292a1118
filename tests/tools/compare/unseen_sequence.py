"""Sequences in parts, by an author who had read the documentation alone; programs and labels stand as they came."""

import torch
import torch.distributed as dist
from torch import nn

from tests.tools.compare.cases import faulty, right

DIM, HEADS = 16, 2


class GatherTokens(torch.autograd.Function):
    """All tokens of all ranks; their gradients are summed over the ranks, and the own part kept."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(dist.get_world_size(ctx.group), 1)[dist.get_rank(ctx.group)].contiguous(), None


class GatherOutput(GatherTokens):
    """What follows is the same on all ranks."""

    @staticmethod
    def backward(ctx, grad):
        return grad.chunk(dist.get_world_size(ctx.group), 1)[dist.get_rank(ctx.group)].contiguous(), None


def rotate(x):
    """Rotary embedding of [batch, tokens, heads, dim]."""
    half = x.shape[-1] // 2
    position = torch.arange(x.shape[1], dtype=x.dtype)  # fault: rotary_positions_from_zero_on_each_rank
    angle = position[:, None] * 100.0 ** (
        -torch.arange(half, dtype=x.dtype) / half
    )  # fault: rotary_positions_from_zero_on_each_rank
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]  # fault: rotary_positions_from_zero_on_each_rank
    a, b = x[..., :half], x[..., half:]  # fault: rotary_positions_from_zero_on_each_rank
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)  # fault: rotary_positions_from_zero_on_each_rank


class Attention(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (w(x).unflatten(-1, (HEADS, -1)) for w in (self.q, self.k, self.v))
        q, k = rotate(q), rotate(k)  # fault: rotary_positions_from_zero_on_each_rank
        if self.group is not None:
            k, v = GatherTokens.apply(k, self.group), GatherTokens.apply(v, self.group)
        out = nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
        return self.o(out.transpose(1, 2).flatten(2))


class Encoder(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.norm, self.attention, self.head = nn.LayerNorm(DIM), Attention(), nn.Linear(DIM, 4)

    def forward(self, x):
        if self.group is not None:
            x = x.chunk(dist.get_world_size(self.group), 1)[dist.get_rank(self.group)]
        x = x + self.attention(self.norm(x))
        y = self.head(x)
        return y if self.group is None else GatherOutput.apply(y, self.group)


def sequence_parallel(model, mesh):
    group = mesh.get_group("sp")
    model.group = model.attention.group = group
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad, group=group))


@faulty("positional offset", "attention|attention.o", "values", "NVIDIA/Megatron-LM#4075", late=True)
def rotary_positions_from_zero_on_each_rank():
    return {
        "build": Encoder,
        "parallelize": sequence_parallel,
        "batch": lambda: torch.randn(2, 8, DIM),
        "mesh": {"sp": 2},
        "loss": lambda y: y.square().mean(),
        "optimizer": torch.optim.SGD,
        "steps": 2,
    }


NORM_DIM, HIDDEN = 8, 32


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, reduce_backward):
        ctx.group, ctx.reduce_backward = group, reduce_backward
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        if ctx.reduce_backward:
            dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size(), 1)[ctx.group.rank()].contiguous(), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x.chunk(group.size(), 1)[group.rank()].contiguous()

    @staticmethod
    def backward(ctx, grad):
        parts = [torch.empty_like(grad) for _ in range(ctx.group.size())]
        dist.all_gather(parts, grad.contiguous(), group=ctx.group)
        return torch.cat(parts, 1), None


class Mlp(nn.Module):
    def __init__(self, hidden=HIDDEN):
        super().__init__()
        self.up, self.down = nn.Linear(NORM_DIM, hidden), nn.Linear(hidden, NORM_DIM, bias=False)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x)))


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.mlp, self.ln_f = nn.LayerNorm(NORM_DIM), Mlp(), nn.LayerNorm(NORM_DIM)
        self.head = nn.Linear(NORM_DIM, 5)

    def forward(self, x):
        x = x + self.mlp(self.norm1(x))
        return self.head(self.ln_f(x))


class NormedInParts(nn.Module):
    def __init__(self, model, group):
        super().__init__()
        self.group = group
        self.norm1, self.mlp, self.ln_f, self.head = model.norm1, Mlp(HIDDEN // group.size()), model.ln_f, model.head
        with torch.no_grad():

            def own(w, dim):
                return w.chunk(group.size(), dim)[group.rank()]

            self.mlp.up.weight.copy_(own(model.mlp.up.weight, 0))
            self.mlp.up.bias.copy_(own(model.mlp.up.bias, 0))
            self.mlp.down.weight.copy_(own(model.mlp.down.weight, 1))
        for name, parameter in self.named_parameters():
            if "norm" in name:  # these see a part of the tokens only  # fault: final_norm_missed_by_its_name
                parameter.register_post_accumulate_grad_hook(
                    lambda p: dist.all_reduce(p.grad, group=group)
                )  # fault: final_norm_missed_by_its_name

    def forward(self, x):
        x = x.chunk(self.group.size(), 1)[self.group.rank()]
        inner = self.mlp(_Gather.apply(self.norm1(x), self.group, True))
        x = x + _ReduceScatter.apply(inner, self.group)
        return self.head(_Gather.apply(self.ln_f(x), self.group, False))


@faulty("layer norm under sequence parallelism", "ln_f", "missing", "NVIDIA/Megatron-LM#1446", late=True)
def final_norm_missed_by_its_name():
    return {
        "build": Normed,
        "parallelize": lambda model, mesh: NormedInParts(model, mesh.get_group("tp")),
        "batch": lambda: torch.randn(3, 6, NORM_DIM),
        "mesh": {"tp": 2},
        "loss": lambda y: y.square().mean(),
        "optimizer": torch.optim.AdamW,
        "steps": 2,
    }


CAUSAL_DIM, CAUSAL_HEADS = 12, 2


class GatherUnevenTokens(torch.autograd.Function):
    """Tokens of all ranks, whose numbers are `sizes`. `summed`: each rank uses them in its own way."""

    @staticmethod
    def forward(ctx, x, sizes, group, summed):
        ctx.sizes, ctx.group, ctx.summed = sizes, group, summed
        padded = nn.functional.pad(x, (0, 0, 0, max(sizes) - x.shape[1])).contiguous()
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:, :n] for part, n in zip(parts, sizes)], 1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        if ctx.summed:
            dist.all_reduce(grad, group=ctx.group)
        return grad.split(ctx.sizes, 1)[dist.get_rank(ctx.group)].contiguous(), None, None, None


def rotate_from(x, first):
    half = x.shape[-1] // 2
    position = torch.arange(first, first + x.shape[1], dtype=x.dtype)
    angle = position[:, None] * 100.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x.split(half, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class Decoder(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(CAUSAL_DIM)
        self.q, self.kv, self.o = (
            nn.Linear(CAUSAL_DIM, CAUSAL_DIM),
            nn.Linear(CAUSAL_DIM, 2 * CAUSAL_DIM),
            nn.Linear(CAUSAL_DIM, CAUSAL_DIM),
        )
        self.head = nn.Linear(CAUSAL_DIM, 5)

    def forward(self, x):
        sizes, first = [x.shape[1]], 0
        if self.group is not None:
            rank, parts = dist.get_rank(self.group), x.tensor_split(dist.get_world_size(self.group), 1)
            sizes = [part.shape[1] for part in parts]
            first, x = sum(sizes[:rank]), parts[rank]
        h = self.norm(x)
        q = rotate_from(self.q(h).unflatten(-1, (CAUSAL_HEADS, -1)), first)
        kv = self.kv(h)
        if self.group is not None:
            kv = GatherUnevenTokens.apply(kv, sizes, self.group, True)
        k, v = (t.unflatten(-1, (CAUSAL_HEADS, -1)) for t in kv.chunk(2, -1))
        k = rotate_from(k, 0)  # all keys are here
        seen = torch.arange(k.shape[1]) <= torch.arange(first, first + q.shape[1])[:, None]
        out = nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), attn_mask=seen)
        y = self.head(x + self.o(out.transpose(1, 2).flatten(2)))
        return y if self.group is None else GatherUnevenTokens.apply(y, sizes, self.group, False)


def context_parallel(model, mesh):
    group = model.group = mesh.get_group("cp")
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad, group=group))
    return model


@right(late=True)
def context_of_uneven_tokens():
    return {
        "build": Decoder,
        "parallelize": context_parallel,
        "batch": lambda: torch.randn(2, 8, CAUSAL_DIM),  # three, three and two tokens
        "mesh": {"cp": 3},
        "loss": lambda y: y.square().mean(),
        "optimizer": torch.optim.AdamW,
        "steps": 2,
    }


RING_HEADS, RING_TOKENS, RING_DIM = 2, 7, 4  # three, two and two tokens


def attention(q, k, v):
    return torch.softmax(q @ k.mT / RING_DIM**0.5, -1) @ v


def ring_attention(q, k, v, mesh):
    """Each rank has its queries, and the keys and values travel. The softmax is put together as they come."""
    rank, world = mesh.get_rank(), mesh.size()
    sizes = [t.shape[1] for t in q.tensor_split(world, 1)]
    q, k, v = (t.tensor_split(world, 1)[rank].contiguous() for t in (q, k, v))
    highest = torch.full((*q.shape[:2], 1), float("-inf"), dtype=q.dtype)
    total, out = torch.zeros_like(highest), torch.zeros_like(q)
    kv = torch.stack((k, v))
    for step in range(world):
        if step + 1 < world:
            coming = kv.new_empty(2, RING_HEADS, sizes[(rank - step - 1) % world], RING_DIM)
            work = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, kv, (rank + 1) % world),
                    dist.P2POp(dist.irecv, coming, (rank - 1) % world),
                ]
            )
        scores = q @ kv[0].mT / RING_DIM**0.5
        new = torch.maximum(highest, scores.amax(-1, keepdim=True))
        weights, decay = (scores - new).exp(), (highest - new).exp()
        total = total * decay + weights.sum(-1, keepdim=True)
        out = out * decay + weights @ kv[1]
        highest = new
        if step + 1 < world:
            for w in work:
                w.wait()
            kv = coming
    return out / total


@right(late=True)
def ring_attention_by_messages():
    generator = torch.Generator().manual_seed(3)
    inputs = tuple(torch.randn(RING_HEADS, RING_TOKENS, RING_DIM, generator=generator) for _ in range(3))
    return {"build": attention, "parallelize": ring_attention, "batch": inputs, "mesh": {"cp": 3}}
