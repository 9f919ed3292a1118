"""Ten faulty programs and ten right ones, written after all others, from the names of the corpus and the issue."""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleInterleaved1F1B
from torch.nn.parallel import DistributedDataParallel

from tests.tools.compare import last_layers, layers, models, plans
from tests.tools.compare.cases import faulty, right
from tests.tools.compare.right_data import data, hooked
from tests.tools.compare.right_tensor import by_hand


def many_tokens() -> Tensor:
    return torch.randint(0, models.VOCAB, (16, models.LENGTH))


def padded(rows: Any) -> dict[str, Any]:
    def cut(model: Any, group: Any) -> None:
        model.emb = rows(model.emb, group)

    return by_hand(last_layers.Padded, cut, batch=many_tokens)


@right(late=True)
def padding_row_on_its_rank() -> dict[str, Any]:
    return padded(last_layers.PaddedRows)


@faulty("wrong slice", "emb.weight|emb", "values", "pytorch/torchtitan#4637", op="embedding", late=True)
def padding_row_of_each_rank() -> dict[str, Any]:
    class SameOnEach(last_layers.PaddedRows):
        def forward(self, ids: Tensor) -> Tensor:
            rows = self.weight.shape[0]
            local = ids - layers.place(self.group)[0] * rows
            outside = (local < 0) | (local >= rows)
            found = F.embedding(local.masked_fill(outside, 0), self.weight, 5)  # fault: padding_row_of_each_rank
            return layers.Reduce.apply(found.masked_fill(outside.unsqueeze(-1), 0.0), self.group)

    return padded(SameOnEach)


@right(late=True)
def norm_of_heads_summed() -> dict[str, Any]:
    def cut(model: Any, group: Any) -> None:
        plans.cut_attention(model, group)
        for parameter in model.q_norm.parameters():
            layers.sum_gradient(parameter, group)

    return by_hand(last_layers.HeadNorm, cut, batch=models.sequences, steps=2)


@faulty(
    "missing reduction of a gradient",
    "q_norm",
    "missing",
    "NVIDIA-NeMo/RL#3716",
    op="native_layer_norm|layer_norm|mul",
    late=True,
)
def norm_of_heads_not_summed() -> dict[str, Any]:
    def cut(model: Any, group: Any) -> None:
        plans.cut_attention(model, group)  # fault: norm_of_heads_not_summed

    return by_hand(last_layers.HeadNorm, cut, batch=models.sequences, steps=2)


def routed(balance: Any) -> dict[str, Any]:
    def parallelize(model: Any, mesh: Any) -> nn.Module:
        model.balance = balance(mesh.get_group("dp"))
        return DistributedDataParallel(model, process_group=mesh.get_group("dp"))

    return data(last_layers.Routed, parallelize, loss=models.as_is)


@right(late=True)
def balance_of_all_tokens() -> dict[str, Any]:
    return routed(last_layers.BalanceOfAll)


@faulty("gradient scaled by n", "balance", "small", "NVIDIA/Megatron-LM#3769", op="div|sum", late=True)
def balance_divided_by_all_tokens() -> dict[str, Any]:
    class Divided(last_layers.BalanceOfAll):
        def probability(self, probabilities: Tensor) -> Tensor:
            tokens = probabilities.shape[0] * layers.place(self.group)[1]
            return probabilities.sum(0) / tokens  # fault: balance_divided_by_all_tokens

    return routed(Divided)


def pipeline(parallelize: Any, **more: Any) -> dict[str, Any]:
    given = {"build": last_layers.TiedLayers, "parallelize": parallelize, "batch": many_tokens, "mesh": {"pp": 2}}
    return given | {"loss": models.square, "optimizer": lambda p: last_layers.TiedSGD(p, lr=0.1)} | more


@right(late=True)
def tied_ends_of_a_pipeline() -> dict[str, Any]:
    def parallelize(model: Any, mesh: Any) -> Any:
        stage = last_layers.stage_of(model, mesh.get_rank(), 2, mesh)
        last_layers.tie(stage, mesh.get_group("pp"))
        return Schedule1F1B(stage, 4, loss_fn=lambda y, _: models.square(y))

    return pipeline(parallelize, steps=2)


@faulty("tied weights not reduced", "emb|head", "missing", "uw-syfi/piper#25", op="embedding|mm|linear|t", late=True)
def ends_of_a_pipeline_not_tied() -> dict[str, Any]:
    def parallelize(model: Any, mesh: Any) -> Any:
        stage = last_layers.stage_of(model, mesh.get_rank(), 2, mesh)  # fault: ends_of_a_pipeline_not_tied
        return Schedule1F1B(stage, 4, loss_fn=lambda y, _: models.square(y))

    return pipeline(parallelize, steps=2)


@right(late=True)
def interleaved_pipeline_of_sums() -> dict[str, Any]:
    def parallelize(model: Any, mesh: Any) -> Any:
        stages = [last_layers.stage_of(model, mesh.get_rank() + 2 * at, 4, mesh) for at in range(2)]
        for stage in stages:
            last_layers.tie(stage, mesh.get_group("pp"))
        return ScheduleInterleaved1F1B(stages, 4, loss_fn=lambda y, _: models.square(y) / 4, scale_grads=False)

    return pipeline(parallelize)


@faulty("accumulation divided twice", "loss|head", "small", "pytorch/torchtitan#1733", op="div|mul", late=True)
def pipeline_divided_twice() -> dict[str, Any]:
    def parallelize(model: Any, mesh: Any) -> Any:
        stage = last_layers.stage_of(model, mesh.get_rank(), 2, mesh)
        last_layers.tie(stage, mesh.get_group("pp"))
        return Schedule1F1B(
            stage,
            4,
            loss_fn=lambda y, _: models.square(y) / 4,  # fault: pipeline_divided_twice
        )

    return pipeline(parallelize)


@right(late=True)
def convolution_with_halo() -> dict[str, Any]:
    return by_hand(last_layers.Convolved, last_layers.ConvolvedParts, batch=models.sequences, steps=2)


@faulty(
    "halo", "first|conv", "values|missing", "fla-org/flash-linear-attention#774", op="slice|cat|backward", late=True
)
def halo_without_its_gradient() -> dict[str, Any]:
    class OneWay(last_layers.Halo):
        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return grad[:, ctx.width :], None, None  # fault: halo_without_its_gradient

    class Parts(last_layers.ConvolvedParts):
        def before(self, x: Tensor) -> Tensor:
            return OneWay.apply(x, 2, self.group)

    return by_hand(last_layers.Convolved, Parts, batch=models.sequences, steps=2)


def running(module: Any) -> dict[str, Any]:
    def parallelize(model: Any, mesh: Any) -> nn.Module:
        model[0] = module(mesh.get_group("dp"))
        return DistributedDataParallel(model, process_group=mesh.get_group("dp"), broadcast_buffers=False)

    return data(lambda: nn.Sequential(last_layers.Running(), models.Mlp()), parallelize, steps=3)


@right(late=True)
def running_mean_of_all_rows() -> dict[str, Any]:
    return running(last_layers.RunningOfAll)


@faulty("statistics over the local part", "0", "replicas", "espnet/espnet#6284", op="mean|lerp_|sub", late=True)
def running_mean_of_own_rows() -> dict[str, Any]:
    class Own(last_layers.RunningOfAll):
        def statistic(self, x: Tensor) -> Tensor:
            return x.mean(0)  # fault: running_mean_of_own_rows

    return running(Own)


def adapted(row: Any, size: int) -> dict[str, Any]:
    def cut(model: Any, group: Any) -> None:
        model.fc1, model.fc2 = layers.Column(model.fc1, group), row(model.fc2, group)

    return by_hand(last_layers.AdaptedMlp, cut, size)


@right(late=True)
def low_rank_part_in_one_sum() -> dict[str, Any]:
    return adapted(last_layers.AdaptedRow, 4)


@faulty("replicated term added by each rank", "fc2", "counted", "NVIDIA-NeMo/Megatron-Bridge#5635", op="add", late=True)
def low_rank_part_summed_twice() -> dict[str, Any]:
    class Twice(last_layers.AdaptedRow):
        def sum_of_up(self) -> None:
            pass

        def forward(self, x: Tensor) -> Tensor:
            low = layers.Reduce.apply(F.linear(x, self.down), self.group)
            partial = F.linear(x, self.weight) + F.linear(low, self.up)  # fault: low_rank_part_summed_twice
            return layers.Reduce.apply(partial, self.group)

    return adapted(Twice, 2)


@right(late=True)
def ring_in_bfloat16() -> dict[str, Any]:
    return by_hand(
        lambda: last_layers.Encoder().bfloat16(),
        last_layers.EncoderParts,
        4,
        batch=lambda: models.sequences(dtype=torch.bfloat16),
    )


@faulty(
    "mask or softmax over the local part",
    "attn.proj|attn",
    "values",
    "zhuzilin/ring-flash-attention#20",
    op="add|exp|sub",
    late=True,
)
def ring_that_adds_logarithms() -> dict[str, Any]:
    class Added(last_layers.RingAttention):
        def total(self, before: Tensor, block: Tensor) -> Tensor:
            return block if before.isinf().all() else before + block  # fault: ring_that_adds_logarithms

    return by_hand(last_layers.Encoder, lambda m, g: last_layers.EncoderParts(m, g, Added), 4, batch=models.sequences)


def flat(optimizer: Any) -> dict[str, Any]:
    def parallelize(model: nn.Module, mesh: Any) -> nn.Module:
        for parameter in model.parameters():
            parameter.flat_group = mesh.get_group("dp")  # type: ignore[assignment]
        return hooked(model, mesh)

    return data(models.Mlp, parallelize, 3, batch=lambda: models.rows(6), optimizer=optimizer, steps=2)


@right(late=True)
def flat_parameters_with_a_remainder() -> dict[str, Any]:
    return flat(lambda p: last_layers.FlatSGD(p, lr=0.1))


@faulty(
    "optimizer step wrong on one rank",
    "fc2.bias|fc2",
    "stale",
    "deepspeedai/DeepSpeed#6974",
    op="copy_|slice|cat",
    late=True,
)
def flat_parameters_without_the_remainder() -> dict[str, Any]:
    class Floor(last_layers.FlatSGD):
        def part(self, numel: int, size: int) -> int:
            return numel // size  # fault: flat_parameters_without_the_remainder

    return flat(lambda p: Floor(p, lr=0.1))
