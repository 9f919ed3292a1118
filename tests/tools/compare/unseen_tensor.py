"""Tensor parallelism, by an author who had read the documentation alone; programs and labels stand as they came."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.tools.compare.cases import faulty, right


class FusedAttention(nn.Module):
    def __init__(self, dim=16, heads=4):
        super().__init__()
        self.head_dim = dim // heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(x).chunk(3, dim=-1)  # fault: fused_projection_cut_in_pieces
        q, k, v = (t.view(batch, tokens, -1, self.head_dim).transpose(1, 2) for t in (q, k, v))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(out.transpose(1, 2).flatten(2))


class FusedBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(16), FusedAttention()
        self.norm2, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


def in_pieces(model, mesh):
    plan = {
        "attn.qkv": ColwiseParallel(),  # fault: fused_projection_cut_in_pieces
        "attn.proj": RowwiseParallel(),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
    }
    return parallelize_module(model, mesh["tp"], plan)  # fault: fused_projection_cut_in_pieces


@faulty("wrong slice", "attn.qkv|attn|attn.proj", "slice|values", "awslabs/slapo#46", late=True)
def fused_projection_cut_in_pieces():
    return {
        "build": FusedBlock,
        "parallelize": in_pieces,
        "batch": lambda: torch.randn(2, 6, 16),
        "mesh": {"tp": 2},
        "loss": lambda y: y.square().mean(),
        "optimizer": torch.optim.AdamW,
        "steps": 2,
    }


CLIP_DIM, CLIP_HIDDEN = 8, 16


class F(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class G(torch.autograd.Function):
    @staticmethod
    def forward(_, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(_, grad):
        return grad, None


class Net(nn.Module):
    def __init__(self, hidden=CLIP_HIDDEN, group=None):
        super().__init__()
        self.group = group
        self.norm = nn.LayerNorm(CLIP_DIM)
        self.up, self.down = nn.Linear(CLIP_DIM, hidden), nn.Linear(hidden, CLIP_DIM, bias=False)

    def forward(self, x):
        h = self.norm(x)
        if self.group is None:
            return x + self.down(self.up(h).relu())
        return x + G.apply(self.down(self.up(F.apply(h, self.group)).relu()), self.group)


class ClippedSGD(torch.optim.SGD):
    """SGD on gradients that are clipped to a norm of 0.05 in all."""

    @torch.no_grad()
    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"]]
        squares = sum(p.grad.square().sum() for p in parameters)  # fault: replicas_counted_twice_in_the_norm
        tp = next((p.tp_group for p in parameters if hasattr(p, "tp_group")), None)
        if tp is not None:
            dist.all_reduce(squares, group=tp)  # fault: replicas_counted_twice_in_the_norm
        scale = (0.05 / (squares.sqrt() + 1e-6)).clamp(max=1.0)
        for p in parameters:
            p.grad.mul_(scale)
        return super().step(closure)


def clipped_parts(model, mesh):
    group = mesh.get_group("tp")
    part = Net(CLIP_HIDDEN // mesh.size(), group)
    part.norm.load_state_dict(model.norm.state_dict())
    for mine, whole, dim in (
        (part.up.weight, model.up.weight, 0),
        (part.up.bias, model.up.bias, 0),
        (part.down.weight, model.down.weight, 1),
    ):
        mine.data.copy_(whole.detach().chunk(mesh.size(), dim)[mesh.get_rank()])
        mine.tp_group = group
    return part


@faulty(
    "gradient clipping by the local norm", "norm.weight|norm.bias|up.weight", "small", "NVIDIA-NeMo/RL#3788", late=True
)
def replicas_counted_twice_in_the_norm():
    return {
        "build": Net,
        "parallelize": clipped_parts,
        "batch": lambda: torch.randn(6, CLIP_DIM),
        "mesh": {"tp": 2},
        "loss": lambda y: y.square().sum(),
        "optimizer": lambda parameters: ClippedSGD(parameters, lr=0.5),
        "steps": 2,
    }


VOCAB, DIM, HEADS = 12, 16, 4


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, x):
        # -1: on a rank there are fewer heads
        q, k, v = (w(x).unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w2, self.w3 = (
            nn.Linear(DIM, 32, bias=False),
            nn.Linear(32, DIM, bias=False),
            nn.Linear(DIM, 32, bias=False),
        )

    def forward(self, x):
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(DIM), Attention()
        self.ffn_norm, self.feed_forward = nn.LayerNorm(DIM), FeedForward()

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.output = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def tensor_and_sequence_parallel(model, mesh):
    tp = mesh["tp"]
    parallelize_module(
        model,
        tp,
        {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    for layer in model.layers:
        parallelize_module(
            layer,
            tp,
            {
                "attention_norm": SequenceParallel(),
                "attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                "attention.wq": ColwiseParallel(),
                "attention.wk": ColwiseParallel(),
                "attention.wv": ColwiseParallel(),
                "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
                "ffn_norm": SequenceParallel(),
                "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                "feed_forward.w1": ColwiseParallel(),
                "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
                "feed_forward.w3": ColwiseParallel(),
            },
        )
    return model


@right(late=True)
def small_llama_with_sequence_parallelism():
    return {
        "build": Llama,
        "parallelize": tensor_and_sequence_parallel,
        "batch": lambda: torch.randint(VOCAB, (2, 6)),
        "mesh": {"tp": 2},
        "loss": lambda y: y.logsumexp(-1).mean() - y[..., 0].mean(),
        "optimizer": torch.optim.AdamW,
        "steps": 2,
    }


BLOCK_DIM, BLOCK_HEADS, BLOCK_HIDDEN = 16, 4, 24


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(_, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(_, grad):
        return grad, None


class Rows(nn.Module):
    """A linear layer whose input is sharded. Its bias is added once, after the sum."""

    def __init__(self, fan_in, fan_out, group=None):
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.randn(fan_out, fan_in) / fan_in**0.5),
            nn.Parameter(torch.zeros(fan_out)),
        )
        self.group = group

    def forward(self, x):
        y = x @ self.weight.t()
        if self.group is not None:
            y = Reduce.apply(y, self.group)
        return y + self.bias


class MegatronBlock(nn.Module):
    def __init__(self, heads=BLOCK_HEADS, hidden=BLOCK_HIDDEN, group=None):
        super().__init__()
        self.heads, self.group, size = heads, group, BLOCK_DIM // BLOCK_HEADS
        self.norm1, self.norm2 = nn.LayerNorm(BLOCK_DIM), nn.LayerNorm(BLOCK_DIM)
        self.qkv = nn.Linear(BLOCK_DIM, heads * 3 * size)  # rows are those of head 0 (q, k, v), head 1 (q, k, v), ...
        self.proj = Rows(heads * size, BLOCK_DIM, group)
        self.up, self.down = nn.Linear(BLOCK_DIM, hidden), Rows(hidden, BLOCK_DIM, group)

    def enter(self, x):
        return x if self.group is None else Copy.apply(x, self.group)

    def forward(self, x):
        q, k, v = self.qkv(self.enter(self.norm1(x))).unflatten(-1, (self.heads, -1)).transpose(1, 2).chunk(3, -1)
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(out.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.enter(self.norm2(x)))))


def megatron(model, mesh):
    tp, dp = mesh.get_group("tp"), mesh.get_group("dp")
    rank, world = mesh.get_local_rank("tp"), mesh["tp"].size()
    part = MegatronBlock(BLOCK_HEADS // world, BLOCK_HIDDEN // world, tp)
    dims = {"qkv.weight": 0, "qkv.bias": 0, "up.weight": 0, "up.bias": 0, "proj.weight": 1, "down.weight": 1}
    whole = model.state_dict()
    part.load_state_dict({n: w.chunk(world, dims[n])[rank] if n in dims else w for n, w in whole.items()})

    def average(p):
        dist.all_reduce(p.grad, group=dp)
        p.grad /= dist.get_world_size(dp)

    for parameter in part.parameters():
        parameter.register_post_accumulate_grad_hook(average)
    return part


@right(late=True)
def megatron_block_interleaved_by_head():
    return {
        "build": MegatronBlock,
        "parallelize": megatron,
        "batch": lambda: torch.randn(4, 5, BLOCK_DIM),
        "mesh": {"dp": 2, "tp": 2},
        "loss": lambda y: y.square().mean(),
        "optimizer": torch.optim.AdamW,
        "steps": 2,
    }
