"""Right programs: data parallelism by DDP, by FSDP2, by hand, and together with tensor parallelism."""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.tools.compare import layers, models, plans
from tests.tools.compare.cases import right


def data(build: Any, parallelize: Any, size: int = 2, **more: Any) -> dict[str, Any]:
    given = {"build": build, "parallelize": parallelize, "batch": lambda: models.rows(8), "mesh": {"dp": size}}
    return given | {"loss": models.square, "optimizer": lambda p: torch.optim.SGD(p, lr=0.1)} | more


def ddp(model: nn.Module, mesh: Any) -> nn.Module:
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


def fsdp(model: nn.Module, mesh: Any) -> nn.Module:
    for child in model.children():
        if not isinstance(child, nn.ModuleList):
            fully_shard(child, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def flat(model: nn.Module, mesh: Any) -> nn.Module:
    return fully_shard(model, mesh=mesh["dp"])


def hooked(model: nn.Module, mesh: Any) -> nn.Module:
    for parameter in model.parameters():
        layers.mean_gradient(parameter, mesh.get_group("dp"))
    return model


@right()
def ddp_of_mlp() -> dict[str, Any]:
    return data(models.Mlp, ddp, steps=2)


@right()
def ddp_of_mlp_on_four() -> dict[str, Any]:
    return data(models.Mlp, ddp, 4, steps=3, optimizer=torch.optim.AdamW)


@right()
def ddp_of_mlp_in_bfloat16() -> dict[str, Any]:
    return data(lambda: models.Mlp().bfloat16(), ddp, batch=lambda: models.rows(8, dtype=torch.bfloat16))


@right()
def ddp_of_tied_gpt() -> dict[str, Any]:
    return data(lambda: models.Gpt(tied=True), ddp, batch=models.tokens, loss=models.as_is, steps=2)


@right()
def ddp_with_buffers() -> dict[str, Any]:
    class Scaled(models.Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.rand(8) + 0.5)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.scale)

    return data(Scaled, ddp)


@right()
def ddp_with_synchronised_batch_norm() -> dict[str, Any]:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 4))

    class Global(nn.Module):
        """Batch norm by the statistics of all rows."""

        def __init__(self, norm: nn.BatchNorm1d, group: Any) -> None:
            super().__init__()
            self.weight, self.bias, self.eps, self.group = norm.weight, norm.bias, norm.eps, group

        def forward(self, x: Tensor) -> Tensor:
            size = layers.place(self.group)[1]
            total = layers.Copy.apply(layers.Reduce.apply(x.mean(0), self.group), self.group) / size
            spread = layers.Copy.apply(layers.Reduce.apply((x - total).square().mean(0), self.group), self.group)
            return (x - total) / (spread / size + self.eps).sqrt() * self.weight + self.bias

    def parallelize(model: nn.Sequential, mesh: Any) -> nn.Module:
        model[1] = Global(model[1], mesh.get_group("dp"))  # type: ignore[arg-type]
        return ddp(model, mesh)

    return data(build, parallelize)


@right()
def ddp_with_checkpointed_block() -> dict[str, Any]:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = models.Block()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, x, use_reentrant=False)

    return data(Checkpointed, ddp, batch=models.sequences)


class Accumulated(nn.Module):
    """The mean loss of the rows, in micro-batches."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.mlp, self.count = models.Mlp(), count

    def forward(self, x: Tensor) -> Tensor:
        return sum(self.mlp(part).square().mean() for part in x.chunk(self.count)) / self.count  # type: ignore[return-value]


@right()
def ddp_with_micro_batches() -> dict[str, Any]:
    return data(lambda: Accumulated(2), ddp, loss=models.as_is, steps=2)


@right()
def ddp_with_micro_batches_beside_one_batch() -> dict[str, Any]:
    def parallelize(model: Accumulated, mesh: Any) -> nn.Module:
        model.count = 2
        return ddp(model, mesh)

    return data(lambda: Accumulated(1), parallelize, loss=models.as_is)


class Uneven(nn.Module):
    """The loss of tokens whose target is not -100, over their number in the whole batch."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self.head, self.group = nn.Linear(8, 16), group

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        total = F.cross_entropy(self.head(x), target, reduction="sum")
        count = (target != -100).sum().float()
        if self.group is None:
            return total / count
        return total * layers.place(self.group)[1] / layers.summed(count, self.group)


def uneven() -> dict[str, Tensor]:
    target = torch.randint(0, 16, (8,))
    target[[0, 1, 3]] = -100
    return {"x": models.rows(8), "target": target}


@right()
def ddp_with_uneven_targets() -> dict[str, Any]:
    def parallelize(model: Uneven, mesh: Any) -> nn.Module:
        model.group = mesh.get_group("dp")
        return ddp(model, mesh)

    return data(Uneven, parallelize, batch=uneven, loss=models.as_is, steps=2)


@right()
def ddp_with_clipping() -> dict[str, Any]:
    return data(models.Block, ddp, batch=models.sequences, optimizer=layers.ClippedSGD, steps=2)


@right()
def fsdp_of_mlp() -> dict[str, Any]:
    return data(models.Mlp, fsdp, steps=2)


@right()
def fsdp_of_mlp_on_four() -> dict[str, Any]:
    return data(models.Mlp, flat, 4, steps=3, optimizer=torch.optim.AdamW)


@right()
def fsdp_of_block() -> dict[str, Any]:
    return data(models.Block, fsdp, batch=models.sequences)


@right()
def fsdp_of_tied_gpt() -> dict[str, Any]:
    return data(lambda: models.Gpt(tied=True), flat, batch=models.tokens, loss=models.as_is, steps=2)


@right()
def fsdp_in_bfloat16() -> dict[str, Any]:
    return data(lambda: models.Mlp().bfloat16(), fsdp, batch=lambda: models.rows(8, dtype=torch.bfloat16))


@right()
def fsdp_with_mixed_precision() -> dict[str, Any]:
    def parallelize(model: nn.Module, mesh: Any) -> nn.Module:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        return fully_shard(model, mesh=mesh["dp"], mp_policy=policy)

    return data(models.Mlp, parallelize, steps=2)


@right()
def fsdp_with_mixed_precision_of_block() -> dict[str, Any]:
    def parallelize(model: models.Block, mesh: Any) -> nn.Module:
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
        )
        fully_shard(model.mlp, mesh=mesh["dp"], mp_policy=policy)
        return fully_shard(model, mesh=mesh["dp"], mp_policy=policy)

    return data(models.Block, parallelize, batch=models.sequences)


@right()
def fsdp_with_clipping() -> dict[str, Any]:
    class Clipped(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            nn.utils.clip_grad_norm_([p for one in self.param_groups for p in one["params"]], 0.05)
            return super().step(closure)

    return data(models.Mlp, fsdp, optimizer=lambda p: Clipped(p, lr=0.1), steps=2)


@right()
def hybrid_shards() -> dict[str, Any]:
    def parallelize(model: nn.Module, mesh: Any) -> nn.Module:
        return fully_shard(model, mesh=mesh["replicate", "shard"])

    mesh = {"replicate": 2, "shard": 2}
    return data(models.Mlp, parallelize, mesh=mesh, batch_axes=("replicate", "shard"), steps=2)


@right()
def gradients_averaged_by_hooks() -> dict[str, Any]:
    return data(models.Mlp, hooked, steps=2)


@right()
def gradients_averaged_by_hooks_on_four_in_bfloat16() -> dict[str, Any]:
    return data(lambda: models.Mlp().bfloat16(), hooked, 4, batch=lambda: models.rows(8, dtype=torch.bfloat16))


@right()
def gradients_averaged_before_the_step() -> dict[str, Any]:
    class Averaged(torch.optim.SGD):
        group: Any = None

        def step(self, closure: Any = None) -> Any:
            for parameter in (p for one in self.param_groups for p in one["params"]):
                group = getattr(parameter, "data_group", None)
                if group is not None:
                    parameter.grad = layers.summed(parameter.grad, group) / layers.place(group)[1]
            return super().step(closure)

    def parallelize(model: nn.Module, mesh: Any) -> nn.Module:
        for parameter in model.parameters():
            parameter.data_group = mesh.get_group("dp")  # type: ignore[attr-defined]
        return model

    return data(models.Mlp, parallelize, optimizer=lambda p: Averaged(p, lr=0.1), steps=2)


@right()
def ddp_and_plan() -> dict[str, Any]:
    def parallelize(model: nn.Module, mesh: Any) -> nn.Module:
        parallelize_module(model, mesh["tp"], {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()})
        return fully_shard(model, mesh=mesh["dp"])

    return data(models.Mlp, parallelize, mesh={"dp": 2, "tp": 2}, steps=2)


@right()
def hooks_and_layers_by_hand() -> dict[str, Any]:
    def parallelize(model: models.Block, mesh: Any) -> nn.Module:
        plans.cut_block(model, mesh.get_group("tp"))
        return hooked(model, mesh)

    return data(models.Block, parallelize, mesh={"dp": 2, "tp": 2}, batch=models.sequences)


@right()
def experts_with_all_to_all() -> dict[str, Any]:
    def parallelize(model: models.Residual, mesh: Any) -> nn.Module:
        model.inner = plans.SentExperts(model.inner, mesh.get_group("dp"))  # type: ignore[arg-type]
        for part in (model.first, model.last):
            hooked(part, mesh)
        return model

    return data(lambda: models.Residual(models.Experts()), parallelize, steps=2)


@right()
def experts_with_all_to_all_on_four() -> dict[str, Any]:
    return experts_with_all_to_all() | {"mesh": {"dp": 4}, "steps": 1}
