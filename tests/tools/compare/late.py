"""Programs that were written last, ten faulty and ten right."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.tools.compare import layers, models, plans
from tests.tools.compare.cases import faulty, right
from tests.tools.compare.right_data import Accumulated, Uneven, data, ddp, hooked, uneven
from tests.tools.compare.right_tensor import by_hand, by_plan


class Grouped(nn.Module):
    """Attention of four heads of queries and two of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.proj = (
            nn.Linear(8, 8, bias=False),
            nn.Linear(8, 8, bias=False),
            nn.Linear(8, 8, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        q = models.heads_of(self.q(x), 2)
        k, v = (models.heads_of(one, 2).repeat_interleave(2, 1) for one in self.kv(x).chunk(2, -1))
        return self.proj(models.merged(models.attend(q, k, v)))


class GroupedOnFour(nn.Module):
    """Grouped with a head of queries on each of four ranks; keys and values are on all."""

    def __init__(self, whole: Grouped, group: Any) -> None:
        super().__init__()
        self.group = group
        self.q, self.kv, self.proj = layers.Column(whole.q, group), whole.kv, layers.Row(whole.proj, group)

    def head(self) -> int:
        return layers.place(self.group)[0] // 2

    def forward(self, x: Tensor) -> Tensor:
        q = models.heads_of(self.q(x), 2)
        kv = layers.Copy.apply(self.kv(x), self.group)
        k, v = (models.heads_of(one, 2)[:, self.head()].unsqueeze(1) for one in kv.chunk(2, -1))
        return self.proj(models.merged(models.attend(q, k, v)))


@right(late=True)
def grouped_heads_on_four() -> dict[str, Any]:
    return by_hand(Grouped, GroupedOnFour, 4, batch=models.sequences)


@faulty("wrong slice", "proj", "slice", "sgl-project/sglang#32858", op="select|index|bmm", late=True)
def keys_of_another_head() -> dict[str, Any]:
    class Modulo(GroupedOnFour):
        def head(self) -> int:
            return layers.place(self.group)[0] % 2  # fault: keys_of_another_head

    return by_hand(Grouped, Modulo, 4, batch=models.sequences)


class Noise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seed = 7

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn(x.shape, generator=torch.Generator().manual_seed(self.seed))


def noisy() -> nn.Module:
    return nn.Sequential(Noise(), models.Mlp())


@right(late=True)
def equal_noise_on_each_rank() -> dict[str, Any]:
    return by_hand(noisy, lambda m, g: plans.cut_mlp(m[1], g))


@faulty(
    "replica not broadcast, or wrong seed", "0", "replicas", "NVIDIA/Megatron-LM#206", op="randn|normal_|add", late=True
)
def noise_from_the_seed_of_the_rank() -> dict[str, Any]:
    def cut(model: Any, group: Any) -> None:
        model[0].seed += layers.place(group)[0]  # fault: noise_from_the_seed_of_the_rank
        plans.cut_mlp(model[1], group)

    return by_hand(noisy, cut)


class Smoothed(nn.Module):
    """Cross entropy with smoothed targets."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 16, bias=False)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x), target, label_smoothing=0.2)


class SmoothedVocabulary(nn.Module):
    def __init__(self, whole: Smoothed, group: Any) -> None:
        super().__init__()
        self.head, self.group = layers.Column(whole.head, group), group

    def mean(self, logits: Tensor) -> Tensor:
        return layers.Reduce.apply(logits.sum(-1), self.group) / 16

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        logits = self.head(x)
        nll = layers.vocab_cross_entropy(logits, target, self.group)
        total = layers.Reduce.apply(logits.exp().sum(-1), self.group).log()
        return (0.8 * nll + 0.2 * (total - self.mean(logits))).mean()


def labelled() -> dict[str, Tensor]:
    return {"x": models.rows(8), "target": torch.randint(0, 16, (8,))}


@right(late=True)
def smoothing_over_the_vocabulary() -> dict[str, Any]:
    return by_hand(Smoothed, SmoothedVocabulary, batch=labelled, loss=models.as_is, steps=2)


@faulty("mask or softmax over the local part", "loss", "missing", "NVIDIA/Megatron-LM#737", op="mean|sum", late=True)
def smoothing_over_the_local_vocabulary() -> dict[str, Any]:
    class Local(SmoothedVocabulary):
        def mean(self, logits: Tensor) -> Tensor:
            return logits.mean(-1)  # fault: smoothing_over_the_local_vocabulary

    return by_hand(Smoothed, Local, batch=labelled, loss=models.as_is)


@right(late=True)
def loss_of_gathered_logits() -> dict[str, Any]:
    class Gathered(nn.Module):
        def __init__(self, whole: Smoothed, group: Any) -> None:
            super().__init__()
            self.head, self.group = layers.Column(whole.head, group), group

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            logits = layers.Join.apply(self.head(x), -1, self.group)
            return F.cross_entropy(logits, target, label_smoothing=0.2)

    return by_hand(Smoothed, Gathered, batch=labelled, loss=models.as_is)


class Plain(Smoothed):
    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x), target)


@faulty("softmax counted twice", "loss", "values", "NVIDIA/Megatron-LM#7452", op="all_reduce|exp", late=True)
def parallel_loss_of_gathered_logits() -> dict[str, Any]:
    class Twice(nn.Module):
        def __init__(self, whole: Plain, group: Any) -> None:
            super().__init__()
            self.head, self.group = layers.Column(whole.head, group), group

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            logits = layers.Join.apply(self.head(x), -1, self.group)
            total = layers.Reduce.apply(logits.exp().sum(-1), self.group)  # fault: parallel_loss_of_gathered_logits
            return (total.log() - logits.gather(-1, target[:, None])[:, 0]).mean()

    return by_hand(Plain, Twice, batch=labelled, loss=models.as_is)


@faulty(
    "all_to_all in wrong order",
    "inner",
    "slice",
    "facebookresearch/fairscale#741",
    op="all_to_all|transpose|einsum",
    late=True,
)
def experts_come_back_in_other_order() -> dict[str, Any]:
    class Other(plans.SentExperts):
        def forward(self, x: Tensor) -> Tensor:
            size, here = layers.place(self.group)[1], self.w1.shape[0]
            gates = self.router(x).softmax(-1)
            got = layers.Exchange.apply(x.unsqueeze(0).expand(size * here, *x.shape), 0, 1, self.group)
            done = torch.stack([F.gelu(got[at] @ self.w1[at]) @ self.w2[at] for at in range(here)])
            back = layers.Exchange.apply(done, 1, 0, self.group)
            back = (
                back.unflatten(0, (size, here)).transpose(0, 1).flatten(0, 1)
            )  # fault: experts_come_back_in_other_order
            return torch.einsum("e...d,...e->...d", back, gates)

    def parallelize(model: models.Residual, mesh: Any) -> nn.Module:
        model.inner = Other(model.inner, mesh.get_group("dp"))  # type: ignore[arg-type]
        for part in (model.first, model.last):
            hooked(part, mesh)
        return model

    return data(lambda: models.Residual(models.Experts()), parallelize)


@faulty("wrong group", "inner", "group", "vllm-project/tpu-inference#2248", op="all_reduce", late=True)
def different_tokens_summed() -> dict[str, Any]:
    def parallelize(model: models.Residual, mesh: Any) -> nn.Module:
        model.inner = plans.LocalExperts(model.inner, mesh.get_group("dp"))  # type: ignore[arg-type] # fault: different_tokens_summed
        for part in (model.first, model.last):
            hooked(part, mesh)
        return model

    return data(lambda: models.Residual(models.Experts()), parallelize)


@faulty("stale values", "fc1|fc2", "stale", "ServiceNow/Fast-LLM#551", op="add_|copy_", late=True)
def main_gradient_never_cleared() -> dict[str, Any]:
    class Main(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for parameter in (p for one in self.param_groups for p in one["params"]):
                if hasattr(parameter, "main_grad"):
                    parameter.main_grad.add_(parameter.grad)  # fault: main_gradient_never_cleared
                    parameter.grad = parameter.main_grad.clone()
            return super().step(closure)

    def parallelize(model: nn.Module, mesh: Any) -> nn.Module:
        for parameter in model.parameters():
            parameter.main_grad = torch.zeros_like(parameter)  # type: ignore[attr-defined]
        return hooked(model, mesh)

    return data(models.Mlp, parallelize, optimizer=lambda p: Main(p, lr=0.1), steps=2)


@faulty(
    "accumulation that loses a part",
    "mlp.fc2|mlp",
    "small",
    "huggingface/accelerate#3877",
    op="backward|mean",
    late=True,
)
def micro_batches_divided_twice() -> dict[str, Any]:
    class Divided(Accumulated):
        def forward(self, x: Tensor) -> Tensor:
            loss = super().forward(x)
            return loss.detach() + (loss - loss.detach()) / self.count  # fault: micro_batches_divided_twice

    def parallelize(model: Accumulated, mesh: Any) -> nn.Module:
        model.__class__ = Divided
        return ddp(model, mesh)

    return data(lambda: Accumulated(2), parallelize, loss=models.as_is)


@faulty("loss averaged over uneven batches", "loss", "large", "huggingface/accelerate#3661", op="mul|div", late=True)
def loss_times_ranks_and_summed() -> dict[str, Any]:
    class Times(Uneven):
        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            return super().forward(x, target) * layers.place(self.group)[1]  # fault: loss_times_ranks_and_summed

    def parallelize(model: Uneven, mesh: Any) -> nn.Module:
        model.__class__, model.group = Times, mesh.get_group("dp")
        return ddp(model, mesh)

    return data(Uneven, parallelize, batch=uneven, loss=models.as_is)


class Recomputed(nn.Module):
    """An mlp and an activation, computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.last = models.Mlp(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(lambda y: F.gelu(self.mlp(y)), x, use_reentrant=False))


@faulty("wrong group", "mlp.fc2|mlp", "group", "NVIDIA/Megatron-LM#7452", op="all_reduce", late=True)
def recomputed_with_another_group() -> dict[str, Any]:
    class Again(layers.Row):
        def forward(self, x: Tensor) -> Tensor:
            group = self.groups.pop(0)
            self.groups.append(group)
            return (
                layers.Reduce.apply(F.linear(x, self.weight), group) + self.bias
            )  # fault: recomputed_with_another_group

    def parallelize(model: Recomputed, mesh: Any) -> nn.Module:
        row = Again(model.mlp.fc2, mesh.get_group("tp"))
        row.groups = [mesh.get_group("tp"), mesh.get_group("dp")]  # type: ignore[assignment]
        model.mlp.fc1, model.mlp.fc2 = layers.Column(model.mlp.fc1, mesh.get_group("tp")), row  # type: ignore[assignment]
        return hooked(model, mesh)

    return data(Recomputed, parallelize, mesh={"dp": 2, "tp": 2})


@right(late=True)
def term_with_a_zero_weight() -> dict[str, Any]:
    class Gated(models.Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 0.0 * x.sum()

    return data(Gated, ddp)


@right(late=True)
def weight_gathered_for_each_use() -> dict[str, Any]:
    class Gathered(nn.Module):
        def __init__(self, linear: nn.Linear, group: Any) -> None:
            super().__init__()
            self.weight, self.group = layers.shard(linear.weight, 0, group), group
            self.weight.register_hook(lambda grad: grad / layers.place(group)[1])

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, layers.Gather.apply(self.weight, 0, self.group))

    def parallelize(model: models.Mlp, mesh: Any) -> nn.Module:
        hooked(model.fc2, mesh)
        model.fc1 = Gathered(model.fc1, mesh.get_group("dp"))  # type: ignore[assignment]
        return model

    return data(lambda: models.Mlp(bias=False), parallelize, steps=2)


@right(late=True)
def partitioned_steps() -> dict[str, Any]:
    class Partitioned(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            result = super().step(closure)
            for parameter in (p for one in self.param_groups for p in one["params"]):
                if hasattr(parameter, "owner"):
                    dist.broadcast(parameter.data, parameter.owner)
            return result

    def parallelize(model: nn.Module, mesh: Any) -> nn.Module:
        for at, parameter in enumerate(model.parameters()):
            parameter.owner = at % 2  # type: ignore[attr-defined]
        return hooked(model, mesh)

    return data(models.Mlp, parallelize, optimizer=Partitioned, steps=2)


@right(late=True)
def plan_and_shards_in_bfloat16() -> dict[str, Any]:
    def parallelize(model: nn.Module, mesh: Any) -> nn.Module:
        parallelize_module(model, mesh["tp"], {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()})
        return fully_shard(model, mesh=mesh["fsdp"])

    mesh = {"fsdp": 2, "tp": 2}
    batch = lambda: models.rows(8, dtype=torch.bfloat16)  # noqa: E731
    return data(lambda: models.Mlp().bfloat16(), parallelize, mesh=mesh, batch=batch)


@right(late=True)
def last_layer_by_columns() -> dict[str, Any]:
    return by_plan(models.Mlp, {"fc2": ColwiseParallel(output_layouts=torch.distributed.tensor.Replicate())})


@right(late=True)
def ddp_with_unused_rows() -> dict[str, Any]:
    def parallelize(model: nn.Module, mesh: Any) -> nn.Module:
        return DistributedDataParallel(model, process_group=mesh.get_group("dp"), find_unused_parameters=True)

    return data(lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.0), nn.Linear(8, 4)), parallelize, 4)
