"""Pipeline schedules: micro-batches are put together again, and each stage is compared on the ranks that have it."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

import localtensor as lt
from localtensor.errors import Diverged
from localtensor.runner.torchrun import TorchrunOptions
from localtensor.testing.compare.divergence import MOSTLY_JUMP
from localtensor.testing.compare.pipelines import Pipeline, pipeline_of
from localtensor.testing.compare.scripts import compare_scripts


class Layers(nn.Module):
    """Four layers; a stage has some of them, under their names in the whole model."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({str(i): nn.Linear(8, 8) for i in range(4)})

    def forward(self, x):
        for layer in self.layers.values():
            x = torch.tanh(layer(x))
        return x


def square(y):
    return y.square().mean()


def stage_of(model, mesh, number, count, group):
    part, each = copy.deepcopy(model), 4 // count
    for name in list(part.layers):
        if int(name) // each != number:
            del part.layers[name]
    return PipelineStage(part, number, count, torch.device("cpu"), group=group)


def schedule(kind, stages=2, **options):
    def parallelize(model, mesh):
        group = mesh.get_group("pp")
        many = stages // group.size()
        made = [stage_of(model, mesh, group.rank() + group.size() * turn, stages, group) for turn in range(many)]
        loss = lambda y, _: square(y)  # noqa: E731
        return kind(made if kind is ScheduleInterleaved1F1B else made[0], n_microbatches=4, loss_fn=loss, **options)

    return parallelize


TRAINED = {"batch": lambda: torch.randn(8, 8), "loss": square, "optimizer": torch.optim.AdamW, "steps": 2}


@pytest.mark.parametrize(("kind", "stages"), [(ScheduleGPipe, 2), (Schedule1F1B, 2), (ScheduleInterleaved1F1B, 4)])
def test_a_right_schedule_passes_and_every_stage_is_compared(kind, stages):
    done = lt.compare(Layers, schedule(kind, stages), mesh={"pp": 2}, **TRAINED)
    assert done.divergence is None and not done.not_compared
    assert all(f"output of layers.{i}, step 1" in done.layouts for i in range(4))
    assert all(f"gradient of layers.{i}.weight, step 1" in done.layouts for i in range(4))
    assert "the loss, step 0" in done.layouts and "output of the whole model, step 0" in done.layouts


def test_gradients_that_are_not_divided_by_the_micro_batches_are_reported():
    with pytest.raises(Diverged, match="4 times too large") as told:
        lt.compare(Layers, unscaled, mesh={"pp": 2}, **TRAINED)
    assert told.value.comparison.divergence.key.kind == "gradient"


def unscaled(model, mesh):
    made = schedule(ScheduleGPipe)(model, mesh)
    made._stage.perform_reduce_grad = lambda factor: None  # forgets to divide
    return made


def test_a_stage_with_another_function_is_named():
    def twisted(model, mesh):
        if mesh.get_local_rank("pp") == 1:
            model.layers["3"] = nn.Sequential(model.layers["3"], nn.ReLU())
        return schedule(Schedule1F1B)(model, mesh)

    with pytest.raises(Diverged) as told:
        lt.compare(Layers, twisted, mesh={"pp": 2}, **TRAINED)
    assert "layers.3" in str(told.value.comparison.divergence.key)


def test_the_parts_of_a_schedule_are_where_we_look():
    def parts():
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
        one, many = (pipeline_of(schedule(kind, stages)(Layers(), mesh)) for kind, stages in KINDS)
        return [(len(each.stages), each.microbatches, each.schedule.scale_grads) for each in (one, many)]

    assert lt.run(parts, ranks=2, leftovers="ignore")[0] == [(1, 4, True), (2, 4, True)]
    assert pipeline_of(nn.Linear(2, 2)) is None and Pipeline is not None


KINDS = ((ScheduleGPipe, 2), (ScheduleInterleaved1F1B, 4))


class Normed(Layers):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(super().forward(x))


def test_a_stage_may_have_an_identity_where_another_has_a_module():
    def parallelize(model, mesh):
        if mesh.get_rank() == 0:
            model.norm = nn.Identity()
        return schedule(Schedule1F1B)(model, mesh)

    done = lt.compare(Normed, parallelize, mesh={"pp": 2}, **TRAINED)
    assert done.divergence is None and done.layouts["output of norm, step 0"] == "R"
    noise = set(done.not_compared.values())  # the mean square of a norm's output has next to no gradient
    assert noise <= {MOSTLY_JUMP} and len(done.not_compared) < len(done.layouts)


SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B


class Layers(nn.Module):
    def __init__(self, numbers):
        super().__init__()
        self.layers = nn.ModuleDict({str(number): nn.Linear(8, 8) for number in numbers})
        for number, layer in self.layers.items():
            nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(int(number)))
            nn.init.zeros_(layer.bias)

    def forward(self, x):
        for layer in self.layers.values():
            x = torch.tanh(layer(x))
        return x


dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
model = Layers(range(rank * 4 // ranks, (rank + 1) * 4 // ranks))
torch.manual_seed(0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
mse = nn.functional.mse_loss
if ranks > 1:
    stage = PipelineStage(model, rank, ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=mse, scale_grads="unscaled" not in sys.argv)
for step in range(2):
    x, target = torch.randn(2, 8, 8)
    if ranks == 1:
        mse(model(x), target).backward()
    elif rank == 0:
        schedule.step(x)
    else:
        schedule.step(target=target)
    norm = sum(parameter.grad.square().sum() for parameter in model.parameters())
    dist.all_reduce(norm)
    for parameter in model.parameters():
        parameter.grad.mul_(1 if "whole" in sys.argv else 0.05 / norm.sqrt())
    optimizer.step()
    optimizer.zero_grad()
"""


def compared_scripts(folder, *arguments):
    (folder / "train.py").write_text(SCRIPT)
    alone, parallel = (TorchrunOptions(str(folder / "train.py"), arguments, ranks) for ranks in (1, 2))
    return compare_scripts(alone, parallel, mesh={"pp": 2})


def test_scripts_that_clip_the_gradients_of_a_pipeline_by_hand_are_compared_in_the_step(tmp_path):
    done = compared_scripts(tmp_path)
    assert done.divergence is None
    assert "as a pipeline's" in done.not_compared["gradient of layers.0.weight, step 1"]
    assert {f"gradient in the step of layers.{at}.weight, step 1" for at in range(4)} <= set(done.layouts)


def test_gradients_of_a_scripts_pipeline_that_are_added_up_are_too_large(tmp_path):
    found = compared_scripts(tmp_path, "unscaled", "whole").divergence
    assert found.key.kind == "gradient in the step" and found.what == "it is 4 times too large"
