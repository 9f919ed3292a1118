"""Faulty programs: clipping, the optimizer's step, and values kept from an earlier step."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from tests.tools.compare import layers, models, plans
from tests.tools.compare.cases import faulty
from tests.tools.compare.right_data import data, hooked
from tests.tools.compare.right_tensor import by_hand


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [p for one in optimizer.param_groups for p in one["params"] if p.grad is not None]


class NormMlpWithoutBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(8, bias=False), models.Mlp(bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.norm(x))


def cut(model: NormMlpWithoutBias, group: Any) -> None:
    plans.cut_mlp(model.mlp, group)


@faulty(
    "gradient clipping by the local norm",
    "norm|mlp.fc1|mlp.fc2",
    "values",
    "pytorch/pytorch#72548",
    op="clip_grad_norm_|mul_|_foreach_mul_",
)
def clipped_by_the_local_norm() -> dict[str, Any]:
    class Local(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            nn.utils.clip_grad_norm_(parameters_of(self), 0.05)  # fault: clipped_by_the_local_norm
            return super().step(closure)

    return by_hand(NormMlpWithoutBias, cut, optimizer=lambda p: Local(p, lr=0.5))


@faulty(
    "gradient clipping by the local norm",
    "norm1|norm2|attn.qkv|attn.proj|mlp.fc1|mlp.fc2",
    "values",
    "NVIDIA-NeMo/RL#3788",
    op="all_reduce|mul_",
)
def replicas_counted_in_the_norm() -> dict[str, Any]:
    class Counted(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            mine = parameters_of(self)
            total = sum(p.grad.square().sum() for p in mine)  # type: ignore[union-attr,misc]
            groups = [p.shard_group for p in mine if hasattr(p, "shard_group")]
            if groups:
                total = layers.summed(total, groups[0])  # type: ignore[arg-type] # fault: replicas_counted_in_the_norm
            for parameter in mine:
                parameter.grad.mul_(0.05 / total.sqrt())  # type: ignore[union-attr]
            return super().step(closure)

    return by_hand(models.Block, plans.cut_block, batch=models.sequences, optimizer=lambda p: Counted(p, lr=0.5))


@faulty("gradient clipping by the local norm", "norm", "replicas", "deepspeedai/DeepSpeed#1801", op="mul_")
def clipped_on_the_first_rank_only() -> dict[str, Any]:
    class First(layers.ClippedSGD):
        def step(self, closure: Any = None) -> Any:
            kept = [(p, p.grad.clone()) for p in parameters_of(self) if hasattr(p, "unclipped")]  # type: ignore[union-attr]
            layers.clip_to(parameters_of(self), self.limit)
            for parameter, grad in kept:
                parameter.grad = grad  # fault: clipped_on_the_first_rank_only
            return torch.optim.SGD.step(self, closure)

    def parallelize(model: NormMlpWithoutBias, mesh: Any) -> nn.Module:
        cut(model, mesh.get_group("tp"))
        if mesh.get_local_rank("tp") > 0:
            model.norm.weight.unclipped = True  # type: ignore[assignment]
        return model

    return by_hand(NormMlpWithoutBias, None, optimizer=First) | {"parallelize": parallelize}


@faulty("gradient clipping by the local norm", "fc1|fc2", "values", "ByteDance-Seed/VeOmni#862", op="all_reduce|mul_")
def shards_summed_over_replicas_too() -> dict[str, Any]:
    class Over(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            total = sum(getattr(p.grad, "_local_tensor", p.grad).square().sum() for p in parameters_of(self))
            if isinstance(parameters_of(self)[0].grad, torch.distributed.tensor.DTensor):
                dist.all_reduce(total)  # type: ignore[arg-type] # fault: shards_summed_over_replicas_too
            for parameter in parameters_of(self):
                getattr(parameter.grad, "_local_tensor", parameter.grad).mul_(0.05 / total.sqrt())  # type: ignore[union-attr]
            return super().step(closure)

    def parallelize(model: nn.Module, mesh: Any) -> nn.Module:
        from torch.distributed.fsdp import fully_shard

        return fully_shard(model, mesh=mesh["replicate", "shard"])

    mesh = {"replicate": 2, "shard": 2}
    given = data(lambda: models.Mlp(bias=False), parallelize, mesh=mesh, batch_axes=("replicate", "shard"))
    return given | {"optimizer": lambda p: Over(p, lr=0.5)}


@faulty(
    "optimizer step wrong on one rank",
    "fc2.bias|fc2",
    "replicas",
    "NVIDIA-NeMo/Automodel#2995",
    op="add_|_foreach_add_|step",
)
def step_skipped_on_one_rank() -> dict[str, Any]:
    class Skipped(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for parameter in parameters_of(self):
                if hasattr(parameter, "without_tokens"):
                    parameter.grad = None  # fault: step_skipped_on_one_rank
            return super().step(closure)

    def parallelize(model: models.Mlp, mesh: Any) -> nn.Module:
        if mesh.get_local_rank("dp") == 1:
            model.fc2.bias.without_tokens = True  # type: ignore[attr-defined]
        return hooked(model, mesh)

    return data(models.Mlp, parallelize, optimizer=lambda p: Skipped(p, lr=0.1))


@faulty(
    "optimizer step wrong on one rank",
    "fc1|fc2",
    "values",
    "NVIDIA/Megatron-LM#5974",
    op="step|addcdiv_|_foreach_addcdiv_|lerp_",
)
def adam_with_a_step_too_many() -> dict[str, Any]:
    def adam(parameters: Any) -> torch.optim.Optimizer:
        kept = list(parameters)
        optimizer = torch.optim.Adam(kept, lr=0.01)
        if any(hasattr(one, "warm") for one in kept):
            for one in kept:
                one.grad = torch.zeros_like(one)
            optimizer.step()  # fault: adam_with_a_step_too_many
            optimizer.zero_grad()
        return optimizer

    def parallelize(model: nn.Module, mesh: Any) -> nn.Module:
        for parameter in model.parameters():
            parameter.warm = True  # type: ignore[attr-defined]
        return hooked(model, mesh)

    return data(models.Mlp, parallelize, optimizer=adam, steps=2)


@faulty(
    "optimizer step wrong on one rank",
    "fc2",
    "stale|replicas",
    "deepspeedai/DeepSpeed#545",
    op="broadcast|all_gather|step",
)
def last_partition_not_gathered() -> dict[str, Any]:
    class Partitioned(torch.optim.SGD):
        """Each rank steps its own parameters, and sends them to the others."""

        def step(self, closure: Any = None) -> Any:
            mine = parameters_of(self)
            owners = [getattr(p, "owner", None) for p in mine]
            before = [p.detach().clone() for p in mine]
            result = super().step(closure)
            for parameter, owner, old in zip(mine, owners, before, strict=True):
                if owner is not None and owner != dist.get_rank():
                    parameter.data.copy_(old)
            for parameter, owner in list(zip(mine, owners, strict=True))[:-1]:  # fault: last_partition_not_gathered
                if owner is not None:
                    dist.broadcast(parameter.data, owner)
            return result

    def parallelize(model: nn.Module, mesh: Any) -> nn.Module:
        for at, parameter in enumerate(model.parameters()):
            parameter.owner = at % 2  # type: ignore[attr-defined]
        return hooked(model, mesh)

    return data(lambda: models.Mlp(bias=False), parallelize, optimizer=lambda p: Partitioned(p, lr=0.1), steps=2)


class Kept(nn.Module):
    """A linear layer whose weight is cut, and gathered for use."""

    def __init__(self, linear: nn.Linear, group: Any) -> None:
        super().__init__()
        self.weight, self.group = layers.shard(linear.weight, 0, group), group
        self.full: Tensor | None = None

    def gathered(self) -> Tensor:
        return layers.Gather.apply(self.weight, 0, self.group) / layers.place(self.group)[1]


@faulty("stale values", "fc1", "stale", "NVIDIA/Megatron-LM#6336", op="linear|mm|all_gather")
def weight_gathered_only_once() -> dict[str, Any]:
    class Once(Kept):
        def forward(self, x: Tensor) -> Tensor:
            now = self.gathered() * layers.place(self.group)[1]
            if self.full is None:
                self.full = now.detach()  # fault: weight_gathered_only_once
            return F.linear(x, self.full + (now - now.detach()) / layers.place(self.group)[1])

    def parallelize(model: models.Mlp, mesh: Any) -> nn.Module:
        hooked(model.fc2, mesh)
        model.fc1 = Once(model.fc1, mesh.get_group("dp"))  # type: ignore[assignment]
        return model

    return data(lambda: models.Mlp(bias=False), parallelize, steps=2)


@faulty("stale values", "fc1|fc2", "stale", "NVIDIA/Megatron-LM#1012", op="all_reduce")
def gradients_of_the_step_before() -> dict[str, Any]:
    class Early(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for parameter in parameters_of(self):
                if hasattr(parameter, "late"):
                    now = parameter.grad.clone()  # type: ignore[union-attr]
                    parameter.grad = (
                        parameter.late if parameter.late is not None else now
                    )  # fault: gradients_of_the_step_before
                    parameter.late = now
            return super().step(closure)

    def parallelize(model: nn.Module, mesh: Any) -> nn.Module:
        for parameter in model.parameters():
            parameter.late = None  # type: ignore[attr-defined]
        return hooked(model, mesh)

    return data(models.Mlp, parallelize, optimizer=lambda p: Early(p, lr=0.1), steps=3)


@faulty("stale values", "emb|head", "stale|values", "uw-syfi/piper#13", op="mm|linear")
def tied_head_copied_at_the_start() -> dict[str, Any]:
    class Copied(plans.VocabGpt):
        def __init__(self, whole: models.Gpt, group: Any) -> None:
            super().__init__(whole, group)
            del self.head.weight
            self.head.register_buffer(
                "weight", self.emb.weight.detach().clone()
            )  # fault: tied_head_copied_at_the_start

    return by_hand(lambda: models.Gpt(tied=True), Copied, batch=models.tokens, loss=models.as_is, steps=2)
