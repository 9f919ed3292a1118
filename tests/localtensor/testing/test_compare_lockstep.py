"""`lt.compare(on="lockstep")`: the report of rank threads, or a refusal by the name of what lockstep does not run."""

import pytest
import torch
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import localtensor as lt
from localtensor.errors import Diverged, NotComparable


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(16, 32), nn.Dropout(0.5), nn.Linear(32, 16, bias=False)

    def forward(self, x):
        return x + self.down(self.drop(self.up(x)).relu())


TRAINED = {
    "batch": lambda: torch.randn(8, 16), "loss": lambda y: y.square().mean(), "optimizer": torch.optim.AdamW, "steps": 2,
}  # fmt: skip


def compared(parallelize, mesh, on):
    try:
        return lt.compare(Block, parallelize, mesh=mesh, on=on, **TRAINED)
    except Diverged as told:
        return told.comparison


def two_ways(model, mesh):
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["dp"])


class Rows(nn.Module):
    """A layer that is cut along its input, without its all_reduce."""

    def __init__(self, whole, mesh):
        super().__init__()
        rank, parts = mesh.get_rank(), list(whole.weight.detach().chunk(mesh.size(), 1))
        mine = parts[rank]
        self.weight, self.mesh = nn.Parameter(mine.clone()), mesh

    def forward(self, x):
        rank, parts = self.mesh.get_rank(), list(x.chunk(self.mesh.size(), -1))
        mine = parts[rank]
        return nn.functional.linear(mine, self.weight)


def unreduced(model, mesh):
    model.down = Rows(model.down, mesh)


def summed(model, mesh):
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: all_reduce(grad, "sum", mesh))


def other_seeds(model, mesh):
    torch.manual_seed(mesh.get_rank())


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("parallelize", "mesh", "problem"),
    [
        (two_ways, {"dp": 2, "tp": 2}, None),
        (unreduced, {"tp": 2}, "an all_reduce over tp is missing"),
        (summed, {"dp": 2}, "summed and not averaged"),
        (other_seeds, {"tp": 2}, "the wrong seed"),
    ],
)
def test_the_report_is_that_of_rank_threads(parallelize, mesh, problem):
    threads, lockstep = (compared(parallelize, mesh, on) for on in ("threads", "lockstep"))
    if problem is None:
        assert lockstep.divergence is None
    else:
        assert problem in lockstep.divergence.what
    written = [
        {key: x for key, x in one.as_json().items() if key not in ("collectives", "text")}
        for one in (threads, lockstep)
    ]
    assert written[0] == written[1] and len(lockstep.values) > 60


def in_stages(model, mesh):
    return ScheduleGPipe(PipelineStage(model, 0, 2, torch.device("cpu"), group=mesh.get_group("pp")), 2)


def one_rank_alone(model, mesh):
    if mesh.get_rank() == 1:
        model.up.weight.data.mul_(2)


@pytest.mark.parametrize(
    ("parallelize", "axis", "problem"),
    [
        (lambda model, mesh: DistributedDataParallel(model), "dp", "DistributedDataParallel"),
        (one_rank_alone, "tp", "if: aten.mul_"),
        (in_stages, "pp", "a pipeline schedule"),
    ],
)
def test_what_lockstep_does_not_run_is_refused_by_its_name(parallelize, axis, problem):
    with pytest.raises(NotComparable) as refused:
        compared(parallelize, {axis: 2}, "lockstep")
    said = str(refused.value)
    assert (
        problem in said
        and "\n" not in said
        and said.endswith('Pass on="threads", where each rank has a control flow of its own.')
    )
    assert said.count("control flow of its own") == 1


def test_another_way_to_run_is_refused():
    with pytest.raises(NotComparable, match="on: 'mpi' is no way to run"):
        compared(two_ways, {"dp": 2, "tp": 2}, "mpi")
