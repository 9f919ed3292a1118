"""Faulty programs: data parallelism, losses, accumulation."""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.tools.compare import layers, models, plans
from tests.tools.compare.cases import faulty
from tests.tools.compare.right_data import Accumulated, Uneven, data, ddp, hooked, uneven


@faulty("gradient scaled by n", "fc2|fc1", "large", "arXiv 2506.09280", op="all_reduce")
def gradients_summed() -> dict[str, Any]:
    def parallelize(model: nn.Module, mesh: Any) -> nn.Module:
        for parameter in model.parameters():
            layers.sum_gradient(parameter, mesh.get_group("dp"))  # fault: gradients_summed
        return model

    return data(models.Mlp, parallelize)


@faulty("gradient scaled by n", "fc2|fc1", "small", "deepspeedai/DeepSpeed#4957", op="div|mul|all_reduce")
def gradients_divided_twice() -> dict[str, Any]:
    def parallelize(model: nn.Module, mesh: Any) -> nn.Module:
        for parameter in model.parameters():
            parameter.register_hook(lambda grad: grad / mesh["dp"].size())  # fault: gradients_divided_twice
        return ddp(model, mesh)

    return data(models.Mlp, parallelize)


@faulty("gradient scaled by n", "fc2|fc1", "small", "meta-pytorch/torchtune#2420", op="div|mul|all_reduce")
def gradients_divided_by_the_world() -> dict[str, Any]:
    def parallelize(model: models.Mlp, mesh: Any) -> nn.Module:
        plans.cut_mlp(model, mesh.get_group("tp"))
        group = mesh.get_group("dp")
        for parameter in model.parameters():
            parameter.register_hook(
                lambda g: layers.summed(g, group) / mesh.size()
            )  # fault: gradients_divided_by_the_world
        return model

    return data(models.Mlp, parallelize, mesh={"dp": 2, "tp": 2})


@faulty(
    "gradient scaled by n", "fc2|fc1", "large", "pytorch/pytorch#155903", op="reduce_scatter|set_gradient_divide_factor"
)
def shards_with_another_divisor() -> dict[str, Any]:
    def parallelize(model: nn.Module, mesh: Any) -> nn.Module:
        sharded = fully_shard(model, mesh=mesh["dp"])
        sharded.set_gradient_divide_factor(1.0)  # fault: shards_with_another_divisor
        return sharded

    return data(models.Mlp, parallelize)


@faulty(
    "missing reduction of a gradient", "fc2.weight|fc2", "missing", "speechbrain/speechbrain#2010", op="mm|linear|t"
)
def one_parameter_left_to_itself() -> dict[str, Any]:
    def parallelize(model: nn.Module, mesh: Any) -> nn.Module:
        ignore = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
        ignore(model, ["fc2.weight"])  # fault: one_parameter_left_to_itself
        return ddp(model, mesh)

    return data(models.Mlp, parallelize)


@faulty("missing reduction of a gradient", "fc1.weight|fc1", "missing", "deepspeedai/DeepSpeed#4879", op="mm|linear|t")
def last_bucket_not_reduced() -> dict[str, Any]:
    def parallelize(model: nn.Module, mesh: Any) -> nn.Module:
        bucket: list[nn.Parameter] = []
        for parameter in reversed(list(model.parameters())):
            bucket.append(parameter)
            if len(bucket) == 3:  # fault: last_bucket_not_reduced
                for one in bucket:
                    layers.mean_gradient(one, mesh.get_group("dp"))
                bucket.clear()
        return model

    return data(models.Mlp, parallelize)


@faulty(
    "missing reduction of a gradient", "fc2|fc1", "missing", "pytorch/pytorch#125484", op="reduce_scatter|fully_shard"
)
def hybrid_shards_without_all_reduce() -> dict[str, Any]:
    def parallelize(model: nn.Module, mesh: Any) -> nn.Module:
        return fully_shard(model, mesh=mesh["shard"])  # fault: hybrid_shards_without_all_reduce

    mesh = {"replicate": 2, "shard": 2}
    return data(models.Mlp, parallelize, mesh=mesh, batch_axes=("replicate", "shard"))


@faulty("missing reduction of a gradient", "head", "missing", "pytorch/torchtitan#685", op="mm|linear|t")
def context_without_reduction() -> dict[str, Any]:
    def parallelize(model: models.Gpt, mesh: Any) -> nn.Module:
        return plans.ContextGpt(
            model,
            mesh.get_group("cp"),
            reduce=lambda parameter, group: None,  # fault: context_without_reduction
        )

    return data(models.Gpt, parallelize, mesh={"cp": 2}, batch=models.tokens, loss=models.as_is)


@faulty("wrong group", "fc2|fc1", "group", "facebookresearch/fairscale#1189", op="all_reduce")
def gradients_averaged_over_the_other_axis() -> dict[str, Any]:
    def parallelize(model: models.Mlp, mesh: Any) -> nn.Module:
        plans.cut_mlp(model, mesh.get_group("tp"))
        for parameter in model.parameters():
            layers.mean_gradient(parameter, mesh.get_group("tp"))  # fault: gradients_averaged_over_the_other_axis
        return model

    return data(models.Mlp, parallelize, mesh={"dp": 2, "tp": 2})


@faulty(
    "replica not broadcast, or wrong seed", "fc2", "replicas", "facebookresearch/detr#544", op="normal_|linear|addmm"
)
def head_from_the_seed_of_the_rank() -> dict[str, Any]:
    def parallelize(model: models.Mlp, mesh: Any) -> nn.Module:
        torch.manual_seed(mesh.get_local_rank("dp"))
        nn.init.normal_(model.fc2.weight)  # fault: head_from_the_seed_of_the_rank
        return hooked(model, mesh)

    return data(models.Mlp, parallelize)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("by", torch.rand(8) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by


@faulty("replica not broadcast, or wrong seed", "0.by|0", "replicas", "pytorch/pytorch#111138", op="mul|uniform_")
def buffers_from_the_seed_of_the_rank() -> dict[str, Any]:
    def parallelize(model: nn.Sequential, mesh: Any) -> nn.Module:
        torch.manual_seed(mesh.get_local_rank("dp"))
        model[0].by.uniform_(0.5, 1.5)  # fault: buffers_from_the_seed_of_the_rank
        return DistributedDataParallel(model, process_group=mesh.get_group("dp"), broadcast_buffers=False)

    return data(lambda: nn.Sequential(Scale(), models.Mlp()), parallelize)


@faulty("statistics over the local part", "1", "values", "facebookresearch/moco#41", op="native_batch_norm|batch_norm")
def batch_norm_of_the_local_rows() -> dict[str, Any]:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 4))

    def parallelize(model: nn.Module, mesh: Any) -> nn.Module:
        return ddp(model, mesh)  # fault: batch_norm_of_the_local_rows

    return data(build, parallelize)


@faulty("loss averaged over uneven batches", "loss", "values", "huggingface/transformers#34242", op="div|nll_loss")
def mean_of_the_ranks_means() -> dict[str, Any]:
    def parallelize(model: Uneven, mesh: Any) -> nn.Module:
        return ddp(model, mesh)  # fault: mean_of_the_ranks_means

    return data(Uneven, parallelize, batch=uneven, loss=models.as_is)


@faulty("loss averaged over uneven batches", "loss", "values", "huggingface/transformers#24725", op="div|nll_loss")
def mean_of_the_micro_batches_means() -> dict[str, Any]:
    class Pieces(Uneven):
        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            pairs = zip(x.chunk(2), target.chunk(2), strict=True)
            return sum(F.cross_entropy(self.head(a), b) for a, b in pairs) / 2  # type: ignore[return-value] # fault: mean_of_the_micro_batches_means

    def parallelize(model: Uneven, mesh: Any) -> nn.Module:
        model.__class__ = Pieces
        return ddp(model, mesh)

    def batch() -> dict[str, Tensor]:
        target = torch.randint(0, 16, (8,))
        target[[0, 4]] = -100  # one of each rank, in its first micro-batch
        return {"x": models.rows(8), "target": target}

    return data(Uneven, parallelize, batch=batch, loss=models.as_is)


@faulty("accumulation without division", "loss", "large", "deepspeedai/DeepSpeed#7773", op="add|mean")
def micro_batches_not_divided() -> dict[str, Any]:
    class Summed(Accumulated):
        def forward(self, x: Tensor) -> Tensor:
            return sum(self.mlp(part).square().mean() for part in x.chunk(self.count))  # type: ignore[return-value] # fault: micro_batches_not_divided

    def parallelize(model: Accumulated, mesh: Any) -> nn.Module:
        model.__class__ = Summed
        return ddp(model, mesh)

    return data(lambda: Accumulated(2), parallelize, loss=models.as_is)


@faulty("accumulation that loses a part", "mlp.fc2|mlp", "values", "allenai/open-instruct#1498", op="detach|mean")
def only_the_last_micro_batch() -> dict[str, Any]:
    class Last(Accumulated):
        def forward(self, x: Tensor) -> Tensor:
            losses = [self.mlp(part).square().mean() for part in x.chunk(self.count)]
            return (
                sum(one.detach() for one in losses[:-1]) + losses[-1]
            ) / self.count  # fault: only_the_last_micro_batch

    def parallelize(model: Accumulated, mesh: Any) -> nn.Module:
        model.__class__ = Last
        return ddp(model, mesh)

    return data(lambda: Accumulated(2), parallelize, loss=models.as_is)


@faulty("accumulation that loses a part", "mlp.fc2|mlp", "missing", "huggingface/picotron#5", op="all_reduce")
def only_the_first_micro_batch_is_reduced() -> dict[str, Any]:
    def parallelize(model: Accumulated, mesh: Any) -> nn.Module:
        group = mesh.get_group("dp")

        class Both(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.mlp, self.count = model.mlp, model.count

            def forward(self, x: Tensor) -> Tensor:
                first, last = x.chunk(2)
                plain = dict(self.mlp.named_parameters())
                synced = {name: Averaged.apply(one, group) for name, one in plain.items()}
                a = torch.func.functional_call(self.mlp, synced, (first,)).square().mean()
                return (a + self.mlp(last).square().mean()) / 2  # fault: only_the_first_micro_batch_is_reduced

        return Both()

    return data(lambda: Accumulated(2), parallelize, loss=models.as_is)


class Averaged(torch.autograd.Function):
    """Forward: as it is.  Backward: the mean over the group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return layers.summed(grad, ctx.group) / layers.place(ctx.group)[1], None


@faulty("dtype lost", "fc2|fc1", "dtype", "NVIDIA/Megatron-LM#6624", op="all_reduce|_to_copy|to")
def gradients_reduced_in_bfloat16() -> dict[str, Any]:
    def parallelize(model: nn.Module, mesh: Any) -> nn.Module:
        group, size = mesh.get_group("dp"), mesh["dp"].size()
        for parameter in model.parameters():
            parameter.register_hook(
                lambda grad: (
                    layers.summed(grad.bfloat16(), group).float() / size
                )  # fault: gradients_reduced_in_bfloat16
            )
        return model

    return data(models.Mlp, parallelize)


@faulty("gradient scaled by n", "loss", "small", "NVIDIA/Megatron-LM#673", op="div|nll_loss")
def context_loss_divided_again() -> dict[str, Any]:
    class Divided(plans.ContextGpt):
        def forward(self, ids: Tensor, target: Tensor) -> Tensor:
            return super().forward(ids, target) / layers.place(self.group)[1]  # fault: context_loss_divided_again

    def parallelize(model: models.Gpt, mesh: Any) -> nn.Module:
        return Divided(model, mesh.get_group("cp"))

    return data(models.Gpt, parallelize, mesh={"cp": 2}, batch=models.tokens, loss=models.as_is)
