"""Pipelines, by an author who had read the documentation alone; programs and labels stand as they came."""

import copy

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, ScheduleInterleaved1F1B

from tests.tools.compare.cases import faulty, right

LAYERS = 12


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({str(i): Layer() for i in range(LAYERS)})

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return x


def in_stages(model, mesh):
    rank, world = mesh.get_rank(), mesh.size()
    part = copy.deepcopy(model)
    names = [name for name in part.layers if int(name) * world // LAYERS == rank]
    part.layers = nn.ModuleDict(
        {name: part.layers[name] for name in sorted(names)}
    )  # fault: layers_in_the_order_of_their_names
    stage = PipelineStage(part, rank, world, torch.device("cpu"), group=mesh.get_group("pp"))
    return ScheduleGPipe(stage, n_microbatches=2, loss_fn=lambda y, _: y.square().mean())


@faulty("layers in another order", "layers.6|layers.10", "values", "meta-pytorch/torchrec#4759", late=True)
def layers_in_the_order_of_their_names():
    return {
        "build": Tower,
        "parallelize": in_stages,
        "batch": lambda: torch.randn(4, 8),
        "mesh": {"pp": 2},
        "loss": lambda y: y.square().mean(),
        "optimizer": torch.optim.SGD,
        "steps": 1,
    }


STAGE_OF = {"0": 0, "1": 0, "2": 1, "3": 2, "4": 2, "5": 3}


class MlpLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.layers = nn.ModuleDict({name: MlpLayer() for name in STAGE_OF})
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        if self.embed is not None:
            x = self.embed(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(x)


def part(model, stage, last):
    model = copy.deepcopy(model)
    for name, owner in STAGE_OF.items():
        if owner != stage:
            del model.layers[name]
    if stage != 0:
        model.embed = None
    if stage != last:
        model.head = None
    return model


def interleaved(model, mesh):
    rank, ranks = mesh.get_rank(), mesh.size()
    count = 2 * ranks
    stages = [
        PipelineStage(part(model, i, count - 1), i, count, torch.device("cpu"), group=mesh.get_group("pp"))
        for i in range(rank, count, ranks)
    ]
    return ScheduleInterleaved1F1B(stages, n_microbatches=4, loss_fn=lambda y, _: y.square().mean())


@right(late=True)
def interleaved_stages_of_unlike_sizes():
    return {
        "build": Net,
        "parallelize": interleaved,
        "batch": lambda: torch.randint(10, (8, 3)),
        "mesh": {"pp": 2},
        "loss": lambda y: y.square().mean(),
        "optimizer": torch.optim.AdamW,
        "steps": 2,
    }
