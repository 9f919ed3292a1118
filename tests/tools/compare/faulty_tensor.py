"""Faulty programs: tensor parallelism, in the forward pass."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.tensor import Partial
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from tests.tools.compare import layers, models, plans
from tests.tools.compare.cases import faulty
from tests.tools.compare.right_tensor import by_hand, by_plan


def mlp_with(row: Any, **more: Any) -> dict[str, Any]:
    """An mlp without biases, unless `build` is given, whose second layer is `row`."""

    def cut(mlp: models.Mlp, group: Any) -> None:
        mlp.fc1, mlp.fc2 = layers.Column(mlp.fc1, group), row(mlp.fc2, group)  # type: ignore[assignment]

    return by_hand(lambda: models.Mlp(bias=False), cut, **more)


@faulty("missing all_reduce in forward", "fc2", "missing", "sgl-project/sglang#14811", op="linear|mm|t|matmul")
def row_without_sum() -> dict[str, Any]:
    class Unsummed(layers.Row):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight)  # fault: row_without_sum

    return mlp_with(Unsummed)


@faulty("missing all_reduce in forward", "fc2", "missing", "pytorch/pytorch#172932", op="linear|mm|matmul")
def plan_that_keeps_partial_sums() -> dict[str, Any]:
    plan = {
        "fc1": ColwiseParallel(),
        "fc2": RowwiseParallel(output_layouts=Partial()),  # fault: plan_that_keeps_partial_sums
    }
    return by_plan(lambda: models.Mlp(bias=False), plan)


@faulty("missing all_reduce in forward", "emb", "missing", "vllm-project/vllm-gaudi#1451", op="masked_fill|embedding")
def embedding_without_sum() -> dict[str, Any]:
    class Unsummed(layers.VocabEmbedding):
        def forward(self, ids: Tensor) -> Tensor:
            rows = self.weight.shape[0]
            local = ids - layers.place(self.group)[0] * rows
            outside = (local < 0) | (local >= rows)
            found = F.embedding(local.masked_fill(outside, 0), self.weight)
            return found.masked_fill(outside.unsqueeze(-1), 0.0)  # fault: embedding_without_sum

    def cut(model: models.Gpt, group: Any) -> nn.Module:
        vocabulary = plans.VocabGpt(model, group)
        vocabulary.emb = Unsummed(model.emb, group)
        return vocabulary

    return by_hand(models.Gpt, cut, batch=models.tokens, loss=models.as_is)


@faulty("missing all_reduce in forward", "inner", "missing", "vllm-project/vllm-gaudi#1451", op="add|mul")
def experts_without_sum() -> dict[str, Any]:
    class Unsummed(plans.LocalExperts):
        def forward(self, x: Tensor) -> Tensor:
            first = layers.place(self.group)[0] * self.w1.shape[0]
            gates = self.router(x).softmax(-1)
            out = torch.zeros_like(x)
            for at in range(self.w1.shape[0]):
                gate = gates[..., first + at : first + at + 1]
                out = out + gate * (F.gelu(x @ self.w1[at]) @ self.w2[at])  # fault: experts_without_sum
            return out

    return by_hand(lambda: models.Residual(models.Experts()), lambda m, g: setattr(m, "inner", Unsummed(m.inner, g)))


@faulty("missing all_reduce in forward", "attn.proj", "missing", "sgl-project/sglang#14811", op="linear|addmm|mm")
def block_without_sum_of_heads() -> dict[str, Any]:
    class Unsummed(layers.Row):
        def forward(self, x: Tensor) -> Tensor:
            y = F.linear(x, self.weight)  # fault: block_without_sum_of_heads
            return y + self.bias / layers.place(self.group)[1]

    def cut(block: models.Block, group: Any) -> None:
        proj = block.attn.proj
        plans.cut_block(block, group)
        block.attn.proj = Unsummed(proj, group)  # type: ignore[assignment]

    return by_hand(models.Block, cut, batch=models.sequences)


@faulty("bias added by each rank", "fc2", "counted", "huggingface/text-generation-inference#1036", op="linear|addmm")
def row_bias_before_sum() -> dict[str, Any]:
    class Before(layers.Row):
        def forward(self, x: Tensor) -> Tensor:
            y = F.linear(x, self.weight, self.bias)  # fault: row_bias_before_sum
            return layers.Reduce.apply(y, self.group)

    return mlp_with(Before) | {"build": models.Mlp}


@faulty("bias added by each rank", "fc2", "counted", "GeeeekExplorer/nano-vllm#99", op="add")
def row_bias_before_sum_on_four() -> dict[str, Any]:
    class Before(layers.Row):
        def forward(self, x: Tensor) -> Tensor:
            y = x @ self.weight.t()
            return layers.Reduce.apply(y + self.bias, self.group)  # fault: row_bias_before_sum_on_four

    return mlp_with(Before) | {"build": models.Mlp, "mesh": {"tp": 4}}


@faulty("replicated term added by each rank", "last", "counted|missing", "pytorch/torchtitan#2106", op="add")
def residual_before_sum() -> dict[str, Any]:
    class Late(nn.Module):
        def __init__(self, whole: models.Residual, group: Any) -> None:
            super().__init__()
            self.first, self.inner, self.last, self.group = whole.first, whole.inner, whole.last, group
            self.inner.fc1 = layers.Column(whole.inner.fc1, group)  # type: ignore[arg-type]
            self.inner.fc2.weight = layers.shard(whole.inner.fc2.weight, 1, group)  # type: ignore[arg-type]

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            x = layers.Reduce.apply(x + self.inner(x), self.group)  # fault: residual_before_sum
            return self.last(x)

    return by_hand(lambda: models.Residual(models.Mlp(bias=False)), Late)


@faulty("wrong slice", "qkv|proj", "slice", "pytorch/pytorch#140069", op="chunk|split")
def fused_qkv_in_one_piece() -> dict[str, Any]:
    def cut(attention: models.Attention, group: Any) -> None:
        attention.qkv = layers.Column(attention.qkv, group)  # type: ignore[assignment] # fault: fused_qkv_in_one_piece
        attention.proj = layers.Row(attention.proj, group)  # type: ignore[assignment]

    return by_hand(models.Attention, cut, batch=models.sequences)


@faulty("wrong slice", "gate_up|down", "slice", "tenstorrent/tt-forge-models#798", op="chunk|split")
def fused_gate_in_one_piece() -> dict[str, Any]:
    def cut(mlp: models.SwiGlu, group: Any) -> None:
        mlp.gate_up = layers.Column(mlp.gate_up, group)  # type: ignore[assignment] # fault: fused_gate_in_one_piece
        mlp.down = layers.Row(mlp.down, group)  # type: ignore[assignment]

    return by_hand(models.SwiGlu, cut)


@faulty("wrong slice", "fc1", "slice", "Wenyueh/MinivLLM#81", op="addmm|linear|add")
def bias_of_the_first_rank() -> dict[str, Any]:
    class First(layers.Column):
        def __init__(self, linear: nn.Linear, group: Any) -> None:
            super().__init__(linear, group)
            size = layers.place(group)[1]
            self.bias = layers.whole(linear.bias.chunk(size)[0])  # fault: bias_of_the_first_rank

    def cut(mlp: models.Mlp, group: Any) -> None:
        mlp.fc1, mlp.fc2 = First(mlp.fc1, group), layers.Row(mlp.fc2, group)  # type: ignore[assignment]

    return by_hand(models.Mlp, cut)


@faulty("wrong slice", "fc2", "slice", "turboderp-org/exllamav2#614", op="linear|mm|matmul")
def row_slices_in_other_order() -> dict[str, Any]:
    class Reversed(layers.Row):
        def __init__(self, linear: nn.Linear, group: Any) -> None:
            super().__init__(linear, group)
            rank, size = layers.place(group)
            self.weight = layers.whole(
                linear.weight.chunk(size, 1)[size - 1 - rank]
            )  # fault: row_slices_in_other_order

    return mlp_with(Reversed)


@faulty("wrong group", "fc2", "group", "SJTU-DENG-Lab/Diffulex#37", op="all_reduce")
def row_summed_over_the_world() -> dict[str, Any]:
    class World(layers.Row):
        def forward(self, x: Tensor) -> Tensor:
            return layers.Reduce.apply(F.linear(x, self.weight), None)  # fault: row_summed_over_the_world

    return mlp_with(World) | {"mesh": {"dp": 2, "tp": 2}, "batch": lambda: models.rows(8)}


@faulty("wrong group", "fc1", "group", "areal-project/AReaL#311", op="all_gather")
def column_gathered_over_data() -> dict[str, Any]:
    class Other(layers.Column):
        def forward(self, x: Tensor) -> Tensor:
            return layers.Join.apply(super().forward(x), -1, self.other)  # fault: column_gathered_over_data

    def parallelize(mlp: models.Mlp, mesh: Any) -> nn.Module:
        mlp.fc1 = Other(mlp.fc1, mesh.get_group("tp"))  # type: ignore[assignment]
        mlp.fc1.other = mesh.get_group("dp")  # type: ignore[assignment]
        return mlp

    mesh = {"dp": 2, "tp": 2}
    return by_hand(models.Mlp, None, batch=lambda: models.rows(8)) | {"parallelize": parallelize, "mesh": mesh}


@faulty("statistics over the local part", "norm", "missing", "aws-neuron/neuronx-distributed#28", op="mean|rms_norm")
def norm_over_the_local_width() -> dict[str, Any]:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.norm, self.fc2 = nn.Linear(8, 16), nn.RMSNorm(16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc2(self.norm(self.fc1(x)))

    class Local(nn.Module):
        def __init__(self, norm: nn.RMSNorm, group: Any) -> None:
            super().__init__()
            self.weight = layers.shard(norm.weight, 0, group)

        def forward(self, x: Tensor) -> Tensor:
            return (
                x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.weight
            )  # fault: norm_over_the_local_width

    def cut(model: Model, group: Any) -> None:
        plans.cut_mlp(model, group)  # type: ignore[arg-type]
        model.norm = Local(model.norm, group)  # type: ignore[assignment]

    return by_hand(Model, cut)


@faulty(
    "softmax over the local part", "loss", "missing", "bigscience-workshop/Megatron-DeepSpeed#394", op="sum|exp|log"
)
def cross_entropy_over_the_local_vocabulary() -> dict[str, Any]:
    class Local(plans.VocabGpt):
        def forward(self, ids: Tensor, target: Tensor) -> Tensor:
            x = self.emb(ids) + self.pos(torch.arange(ids.shape[1]))
            for block in self.blocks:
                x = block(x)
            logits = self.head(self.norm(x))
            rows = logits.shape[-1]
            total = logits.exp().sum(-1)  # fault: cross_entropy_over_the_local_vocabulary
            local = target - layers.place(self.group)[0] * rows
            outside = (local < 0) | (local >= rows)
            picked = logits.gather(-1, local.masked_fill(outside, 0).unsqueeze(-1)).squeeze(-1)
            return (total.log() - layers.Reduce.apply(picked.masked_fill(outside, 0.0), self.group)).mean()

    return by_hand(models.Gpt, Local, batch=models.tokens, loss=models.as_is)


@faulty("dtype lost", "fc2", "dtype", "tenstorrent/tt-metal#36749", op="all_reduce|_to_copy|to")
def row_summed_in_bfloat16() -> dict[str, Any]:
    class Short(layers.Row):
        def forward(self, x: Tensor) -> Tensor:
            y = F.linear(x, self.weight).bfloat16()  # fault: row_summed_in_bfloat16
            return layers.Reduce.apply(y, self.group).float()

    return mlp_with(Short)


@faulty("dtype lost", "norm", "dtype", "NVIDIA/TransformerEngine#3193", op="native_layer_norm|layer_norm|_to_copy")
def norm_in_bfloat16() -> dict[str, Any]:
    class Short(nn.Module):
        def __init__(self, norm: nn.LayerNorm) -> None:
            super().__init__()
            self.weight, self.bias = norm.weight, norm.bias

        def forward(self, x: Tensor) -> Tensor:
            y = F.layer_norm(x.bfloat16(), x.shape[-1:])  # fault: norm_in_bfloat16
            return y.float() * self.weight + self.bias

    def cut(model: models.NormMlp, group: Any) -> None:
        plans.cut_mlp(model.mlp, group)
        model.norm = Short(model.norm)  # type: ignore[assignment]

    return by_hand(models.NormMlp, cut, batch=models.sequences, loss=models.tilted)


@faulty("wrong dim in gather", "fc1", "slice", "EleutherAI/gpt-neox#1260", op="all_gather|cat|view")
def columns_gathered_along_the_rows() -> dict[str, Any]:
    class Rows(layers.Column):
        def forward(self, x: Tensor) -> Tensor:
            y = layers.Join.apply(super().forward(x), 0, self.group)  # fault: columns_gathered_along_the_rows
            return y.view(x.shape[0], -1)

    return by_hand(models.Mlp, lambda m, g: setattr(m, "fc1", Rows(m.fc1, g)))


@faulty("sum in place of mean", "fc2", "large", "vllm-project/tpu-inference#2248", op="all_reduce")
def replicated_output_summed() -> dict[str, Any]:
    class Twice(layers.Row):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            dist.all_reduce(y.data, group=self.group)  # fault: replicated_output_summed
            return y

    return mlp_with(Twice)
