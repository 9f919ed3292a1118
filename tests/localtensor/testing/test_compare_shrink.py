"""Smaller programs that show the same divergence."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import localtensor as lt
from localtensor.errors import Diverged


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def summed(model, mesh):
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad, group=mesh.get_group("dp")))


def test_a_divergence_is_shown_by_fewer_steps_ranks_layers_and_rows():
    with pytest.raises(Diverged) as told:
        lt.compare(
            Stack, summed, lambda: torch.randn(8, 8), mesh={"dp": 2, "tp": 2}, loss=lambda y: y.square().mean(),
            optimizer=torch.optim.SGD, steps=3, shrink=True,
        )  # fmt: skip
    [note] = [note for note in told.value.comparison.notes if note.startswith("the same shows with")]
    assert all(words in note for words in ("steps=1", "tp=1", "1 layer of 3", "2 rows")) and "dp=1" not in note
