"""Batches in parts, by an author who had read the documentation alone; programs and labels stand as they came."""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.tools.compare.cases import faulty, right

VOCAB, TOKENS = 11, 6


class Tagger(nn.Module):
    """The loss is that of the tokens that are no padding."""

    def __init__(self):
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, 8), nn.Linear(8, VOCAB)

    def forward(self, tokens, labels):
        logits = self.head(torch.tanh(self.body(self.embed(tokens))))
        return nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=-100
        )  # fault: mean_of_means_of_uneven_tokens


def padded():
    tokens = torch.randint(VOCAB, (4, TOKENS))
    lengths = torch.tensor([2, 1, 6, 5])
    labels = torch.where(torch.arange(TOKENS) < lengths[:, None], (tokens + 1) % VOCAB, -100)
    return tokens, labels


def averaged(model, mesh):
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))  # fault: mean_of_means_of_uneven_tokens


@faulty("loss averaged over uneven batches", "loss", "values", "vllm-project/speculators#942", late=True)
def mean_of_means_of_uneven_tokens():
    return {
        "build": Tagger,
        "parallelize": averaged,
        "batch": padded,
        "mesh": {"dp": 2},
        "loss": lambda loss: loss,
        "optimizer": torch.optim.AdamW,
        "steps": 2,
    }


class ZeroSGD(torch.optim.SGD):
    """ZeRO-1: each rank has the momentum of some of the parameters, updates these, and sends them to the others."""

    @torch.no_grad()
    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"]]
        group = getattr(parameters[0], "zero_group", None)
        if group is None:
            return super().step(closure)
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        each = -(-len(parameters) // world)
        for i, p in enumerate(parameters):
            p.grad.div_(world)
            dist.reduce(p.grad, dst=i % world, group=group)  # fault: gradients_reduced_to_another_owner
        for i, p in enumerate(parameters):
            if i // each != rank:  # fault: gradients_reduced_to_another_owner
                p.grad = None
        super().step(closure)
        for i, p in enumerate(parameters):
            dist.broadcast(p, src=i // each, group=group)
        return None


def replicate(model, mesh):
    for parameter in model.parameters():
        parameter.zero_group = mesh.get_group("dp")
    return model


@faulty("optimizer step wrong on one rank", "0.bias|2.weight", "missing", "deepspeedai/DeepSpeed#7807", late=True)
def gradients_reduced_to_another_owner():
    return {
        "build": lambda: nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3)),
        "parallelize": replicate,
        "batch": lambda: torch.randn(8, 6),
        "mesh": {"dp": 2},
        "loss": lambda y: y.square().mean(),
        "optimizer": lambda parameters: ZeroSGD(parameters, lr=0.1, momentum=0.9),
        "steps": 3,
    }


class RunningCenter(nn.Module):
    """Subtracts a running mean of what it has seen."""

    def __init__(self, dim):
        super().__init__()
        self.register_buffer("center", torch.zeros(dim))
        self.group = None

    @torch.no_grad()
    def update(self, x):
        mean = x.mean(0)
        if self.group is not None:
            dist.all_reduce(mean, group=self.group)
            mean /= dist.get_world_size(self.group)
        if self.group is None or dist.get_rank(self.group) == 0:  # fault: running_center_of_rank_zero_only
            self.center.lerp_(mean, 0.1)  # fault: running_center_of_rank_zero_only

    def forward(self, x):
        if self.training:
            self.update(x)
        return x - self.center


class Teacher(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.center, self.head = nn.Linear(6, 8), RunningCenter(8), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.center(self.body(x)).relu())


def data_parallel(model, mesh):
    group = model.center.group = mesh.get_group("dp")

    def average(p):
        dist.all_reduce(p.grad, group=group)
        p.grad /= dist.get_world_size(group)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(average)
    return model


@faulty("stale values", "center", "replicas|stale", "sangmichaelxie/doremi#8", late=True)
def running_center_of_rank_zero_only():
    return {
        "build": Teacher,
        "parallelize": data_parallel,
        "batch": lambda: torch.randn(8, 6) + 1,
        "mesh": {"dp": 2},
        "loss": lambda y: y.square().mean(),
        "optimizer": torch.optim.AdamW,
        "steps": 3,
    }


class BatchNorm(nn.Module):
    """Batch normalisation over the rows of all ranks of a group."""

    def __init__(self, dim):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))
        self.register_buffer("running_mean", torch.zeros(dim))
        self.register_buffer("running_var", torch.ones(dim))
        self.group = None

    def forward(self, x):
        moments = torch.stack((x.sum(0), x.square().sum(0)))
        rows = len(x)
        if self.group is not None:
            moments = dist_nn.all_reduce(moments, group=self.group)
            rows *= dist.get_world_size(self.group)
        mean = moments[0] / rows
        var = moments[1] / rows - mean.square()
        with torch.no_grad():
            self.running_mean.lerp_(mean, 0.1)
            self.running_var.lerp_(var * rows / (rows - 1), 0.1)
        return (x - mean) * torch.rsqrt(var + 1e-5) * self.weight + self.bias


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), BatchNorm(8), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(self.norm(self.first(x)).relu())


def with_batch_norm(model, mesh):
    model.norm.group = mesh.get_group("dp")
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"), broadcast_buffers=False)


@right(late=True)
def batch_norm_over_three_ranks():
    return {
        "build": Net,
        "parallelize": with_batch_norm,
        "batch": lambda: torch.randn(12, 6),
        "mesh": {"dp": 3},
        "loss": lambda y: y.square().mean(),
        "optimizer": torch.optim.AdamW,
        "steps": 3,
    }


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(12), nn.Linear(12, 30), nn.Linear(30, 12)

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


class LayersAndHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(12, 5)  # five rows on two ranks

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def hybrid(model, mesh):
    """HSDP with activation checkpointing; the last layer and the head stay gathered."""
    for i, layer in enumerate(model.layers):
        model.layers[i] = checkpoint_wrapper(layer, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
        fully_shard(model.layers[i], mesh=mesh, reshard_after_forward=i < len(model.layers) - 1)
    fully_shard(model.head, mesh=mesh, reshard_after_forward=False)
    return fully_shard(model, mesh=mesh)


@right(late=True)
def hybrid_shards_with_checkpoints():
    return {
        "build": LayersAndHead,
        "parallelize": hybrid,
        "batch": lambda: torch.randn(8, 12),
        "mesh": {"dp": 2, "fsdp": 2},
        "loss": lambda y: y.square().mean(),
        "optimizer": torch.optim.AdamW,
        "steps": 2,
    }


class CountingTagger(nn.Module):
    """The mean loss of all tokens that are no padding, those of the other ranks, too; in micro-batches."""

    group, rows = None, 4

    def __init__(self):
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, 8), nn.Linear(8, VOCAB)

    def forward(self, tokens, labels):
        count, ranks = (labels != -100).sum(), 1
        if self.group is not None:
            dist.all_reduce(count, group=self.group)
            ranks = dist.get_world_size(self.group)  # since DDP takes the mean over the ranks
        total = 0.0
        for some, theirs in zip(tokens.split(self.rows), labels.split(self.rows)):
            with torch.autocast("cpu", torch.bfloat16):
                logits = self.head(torch.tanh(self.body(self.embed(some))))
            total = total + nn.functional.cross_entropy(
                logits.float().flatten(0, 1), theirs.flatten(), ignore_index=-100, reduction="sum"
            )
        return total * ranks / count


def padded_rows():
    tokens = torch.randint(VOCAB, (4, TOKENS))
    lengths = torch.tensor([2, 1, 6, 5])
    return tokens, torch.where(torch.arange(TOKENS) < lengths[:, None], (tokens + 1) % VOCAB, -100)


def in_micro_batches(model, mesh):
    model.group, model.rows = mesh.get_group("dp"), 1
    return DistributedDataParallel(model, process_group=model.group)


@right(late=True)
def micro_batches_with_the_global_count():
    return {
        "build": CountingTagger,
        "parallelize": in_micro_batches,
        "batch": padded_rows,
        "mesh": {"dp": 2},
        "loss": lambda loss: loss,
        "optimizer": torch.optim.SGD,
        "steps": 2,
    }
