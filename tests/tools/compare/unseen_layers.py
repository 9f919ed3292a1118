"""Vocabularies and experts in parts, by an author who had read the documentation alone; programs and labels stand as they came."""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
from torch import nn

from tests.tools.compare.cases import faulty, right

VOCAB, DIM = 12, 8


class VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, group):
        first = dist.get_rank(group) * logits.shape[-1]
        highest = logits.max(-1).values  # fault: maximum_of_own_vocabulary
        shifted = logits - highest[:, None]
        exponents = shifted.exp()
        total = exponents.sum(-1)
        dist.all_reduce(total, group=group)  # fault: maximum_of_own_vocabulary
        own = (target >= first) & (target < first + logits.shape[-1])
        index = torch.where(own, target - first, 0)
        predicted = torch.where(own, shifted.gather(-1, index[:, None]).squeeze(-1), 0.0)
        dist.all_reduce(predicted, group=group)
        ctx.save_for_backward(exponents / total[:, None], own, index)
        return (total.log() - predicted).mean()

    @staticmethod
    def backward(ctx, grad):
        probabilities, own, index = ctx.saved_tensors
        dlogits = probabilities.clone()
        dlogits.scatter_add_(-1, index[:, None], -own[:, None].to(dlogits.dtype))
        return dlogits * grad / len(index), None, None


class CopyForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(DIM, DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, x, target):
        return nn.functional.cross_entropy(self.head(self.body(x).relu()), target)


class ParallelClassifier(nn.Module):
    def __init__(self, model, group):
        super().__init__()
        self.group, self.body = group, model.body
        rows = model.head.weight.detach().chunk(dist.get_world_size(group))[dist.get_rank(group)]
        self.head = nn.Linear(DIM, len(rows), bias=False)
        self.head.weight.data.copy_(rows)

    def forward(self, x, target):
        logits = self.head(CopyForward.apply(self.body(x).relu(), self.group))
        return VocabParallelCrossEntropy.apply(logits, target, self.group)


@faulty("softmax over the local part", "loss", "missing", "tenstorrent/tt-metal#47806", late=True)
def maximum_of_own_vocabulary():
    return {
        "build": Classifier,
        "parallelize": lambda model, mesh: ParallelClassifier(model, mesh.get_group("tp")),
        "batch": lambda: (torch.randn(10, DIM), torch.randint(VOCAB, (10,))),
        "mesh": {"tp": 3},
        "loss": lambda loss: loss,
        "optimizer": torch.optim.SGD,
        "steps": 2,
    }


TIED_VOCAB, TIED_DIM = 13, 8  # seven rows and six


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.clone()

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


class CrossEntropy(torch.autograd.Function):
    """Of logits whose columns are spread; `label` is the local column where `own`."""

    @staticmethod
    def forward(ctx, logits, label, own, group):
        highest = logits.max(-1).values
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        exponents = (logits - highest[:, None]).exp()
        both = torch.stack((exponents.sum(-1), logits.gather(-1, label[:, None]).squeeze(-1) * own))
        dist.all_reduce(both, group=group)
        ctx.save_for_backward(exponents / both[0, :, None], label, own)
        return (both[0].log() + highest - both[1]).mean()

    @staticmethod
    def backward(ctx, grad):
        probability, label, own = ctx.saved_tensors
        dlogits = probability.scatter_add(-1, label[:, None], -own[:, None].to(probability.dtype))
        return dlogits * (grad / len(label)), None, None, None


class TiedModel(nn.Module):
    """The embedding is the head, too."""

    def __init__(self):
        super().__init__()
        self.embed, self.body = nn.Embedding(TIED_VOCAB, TIED_DIM), nn.Linear(TIED_DIM, TIED_DIM)

    def forward(self, tokens, labels):
        x = torch.tanh(self.body(self.embed(tokens)))
        return nn.functional.cross_entropy(x @ self.embed.weight.t(), labels)


class VocabEmbedding(nn.Module):
    def __init__(self, rows, first, group):
        super().__init__()
        self.weight, self.first, self.group = nn.Parameter(rows.clone()), first, group

    def local(self, ids):
        own = (ids >= self.first) & (ids < self.first + len(self.weight))
        return torch.where(own, ids - self.first, 0), own

    def forward(self, ids):
        local, own = self.local(ids)
        return Reduce.apply(nn.functional.embedding(local, self.weight) * own[:, None], self.group)


class ParallelTiedModel(nn.Module):
    def __init__(self, model, group):
        super().__init__()
        rank, parts = dist.get_rank(group), model.embed.weight.detach().chunk(dist.get_world_size(group))
        self.group = group
        self.embed = VocabEmbedding(parts[rank], sum(len(p) for p in parts[:rank]), group)
        self.body = model.body

    def forward(self, tokens, labels):
        x = torch.tanh(self.body(self.embed(tokens)))
        logits = Copy.apply(x, self.group) @ self.embed.weight.t()
        return CrossEntropy.apply(logits, *self.embed.local(labels), self.group)


@right(late=True)
def tied_vocabulary_of_thirteen():
    return {
        "build": TiedModel,
        "parallelize": lambda model, mesh: ParallelTiedModel(model, mesh.get_group("tp")),
        "batch": lambda: (torch.randint(TIED_VOCAB, (9,)), torch.randint(TIED_VOCAB, (9,))),
        "mesh": {"tp": 2},
        "loss": lambda loss: loss,
        "optimizer": torch.optim.AdamW,
        "steps": 3,
    }


BANK_DIM, BANK_SIZE = 8, 4


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(_, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(_, grad):
        return grad, None


class ToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Experts(nn.Module):
    """A bank of experts, those from number `first` on."""

    def __init__(self, w1, w2, first=0):
        super().__init__()
        self.w1, self.w2, self.first = nn.Parameter(w1), nn.Parameter(w2), first

    def forward(self, x, gates):
        gates = gates[:, self.first : self.first + len(self.w1)]
        hidden = torch.einsum("td,edh->teh", x, self.w1).relu()
        return torch.einsum("teh,ehd,te->td", hidden, self.w2, gates)


class GatedMoE(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.router, self.out = nn.Linear(BANK_DIM, BANK_SIZE), nn.Linear(BANK_DIM, BANK_DIM)
        self.experts = Experts(torch.randn(BANK_SIZE, BANK_DIM, 6) / 3, torch.randn(BANK_SIZE, 6, BANK_DIM) / 3)

    def gates(self, x):
        scores = self.router(x).softmax(-1)
        top = scores.topk(2, -1).indices
        return scores * torch.zeros_like(scores).scatter(-1, top, 1.0)

    def forward(self, x):
        gates = self.gates(x)
        if self.group is None:
            return self.out(self.experts(x, gates))
        y = self.experts(ToRanks.apply(x, self.group), ToRanks.apply(gates, self.group))
        return self.out(SumOverRanks.apply(y, self.group))


def bank_in_parts(model, mesh):
    group = model.group = mesh.get_group("ep")
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    w1, w2 = model.experts.w1.detach(), model.experts.w2.detach()
    model.experts = Experts(
        w1[rank::world].clone(), w2[rank::world].clone(), first=rank * (BANK_SIZE // world)
    )  # fault: experts_cut_by_stride
    return model


@faulty("expert routing", "experts", "slice", "vllm-project/vllm#23745", late=True)
def experts_cut_by_stride():
    return {
        "build": GatedMoE,
        "parallelize": bank_in_parts,
        "batch": lambda: torch.randn(8, BANK_DIM),
        "mesh": {"ep": 2},
        "loss": lambda y: y.square().mean(),
        "optimizer": torch.optim.AdamW,
        "steps": 2,
    }


SPARSE_DIM, EXPERTS = 6, 4


def expert():
    return nn.Sequential(nn.Linear(SPARSE_DIM, 8), nn.SiLU(), nn.Linear(8, SPARSE_DIM))


class MoE(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(SPARSE_DIM), nn.Linear(SPARSE_DIM, EXPERTS, bias=False)
        self.experts = nn.ModuleDict({str(e): expert() for e in range(EXPERTS)})

    def compute(self, rows, ids):
        y = torch.zeros_like(rows)
        for name, module in self.experts.items():
            index = (ids == int(name)).nonzero().squeeze(-1)
            y = y.index_add(0, index, module(rows[index]))
        return y

    def exchange(self, rows, ids):
        """Each token goes to the rank that has its expert, and comes back."""
        world = dist.get_world_size(self.group)
        order = ids.argsort(stable=True)
        send = torch.bincount(ids // (EXPERTS // world), minlength=world)
        receive = torch.empty_like(send)
        dist.all_to_all_single(receive, send, group=self.group)
        send, receive = send.tolist(), receive.tolist()
        there = ids.new_empty(sum(receive))
        dist.all_to_all_single(there, ids[order], receive, send, group=self.group)
        arrived = dist_nn.all_to_all_single(
            rows.new_empty(sum(receive), SPARSE_DIM), rows[order], receive, send, group=self.group
        )
        done = self.compute(arrived, there)
        back = dist_nn.all_to_all_single(torch.empty_like(rows), done, send, receive, group=self.group)
        return torch.zeros_like(rows).index_add(0, order, back)

    def forward(self, x):
        h = self.norm(x)
        gate, ids = self.router(h).softmax(-1).max(-1)
        y = self.compute(h, ids) if self.group is None else self.exchange(h, ids)
        return x + gate[:, None] * y


class SparseNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.moe, self.last = nn.Linear(5, SPARSE_DIM), MoE(), nn.Linear(SPARSE_DIM, 3)

    def forward(self, x):
        return self.last(self.moe(self.first(x)))


def expert_parallel(model, mesh):
    """The ranks that have rows of their own have experts of their own, too."""
    group = model.moe.group = mesh.get_group("dp")
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    for name in list(model.moe.experts):
        if int(name) // (EXPERTS // world) != rank:
            del model.moe.experts[name]

    def average(p):
        dist.all_reduce(p.grad, group=group)
        p.grad /= world

    def scale(p):  # an expert has had the tokens of all ranks, each of a mean over its own rows
        p.grad /= world

    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(scale if ".experts." in name else average)
    return model


@right(late=True)
def experts_by_all_to_all_of_unlike_sizes():
    return {
        "build": SparseNet,
        "parallelize": expert_parallel,
        "batch": lambda: torch.randn(16, 5),
        "mesh": {"dp": 2},
        "loss": lambda y: y.square().mean(),
        "optimizer": torch.optim.AdamW,
        "steps": 2,
    }
