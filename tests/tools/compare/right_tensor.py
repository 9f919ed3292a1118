"""Right programs: tensor and sequence parallelism, by hand and by parallelize_module."""

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.tools.compare import layers, models, plans
from tests.tools.compare.cases import right

SGD = torch.optim.SGD


def by_hand(build: Any, cut: Any, size: int = 2, **more: Any) -> dict[str, Any]:
    def parallelize(model: nn.Module, mesh: Any) -> nn.Module:
        got = cut(model, mesh.get_group("tp"))
        return model if got is None else got

    given = {"build": build, "parallelize": parallelize, "batch": models.rows, "mesh": {"tp": size}}
    return given | {"loss": models.square, "optimizer": lambda p: SGD(p, lr=0.1)} | more


def by_plan(build: Any, plan: dict[str, Any], size: int = 2, **more: Any) -> dict[str, Any]:
    def parallelize(model: nn.Module, mesh: Any) -> nn.Module:
        return parallelize_module(model, mesh["tp"], plan)

    given = {"build": build, "parallelize": parallelize, "batch": models.rows, "mesh": {"tp": size}}
    return given | {"loss": models.square, "optimizer": lambda p: SGD(p, lr=0.1)} | more


@right()
def mlp_of_column_and_row() -> dict[str, Any]:
    return by_hand(models.Mlp, plans.cut_mlp)


@right()
def mlp_of_column_and_row_on_four() -> dict[str, Any]:
    return by_hand(models.Mlp, plans.cut_mlp, 4, steps=3, optimizer=torch.optim.AdamW)


@right()
def mlp_without_bias_in_bfloat16() -> dict[str, Any]:
    return by_hand(
        lambda: models.Mlp(bias=False).bfloat16(), plans.cut_mlp, batch=lambda: models.rows(dtype=torch.bfloat16)
    )


@right()
def swiglu_with_fused_gate() -> dict[str, Any]:
    return by_hand(models.SwiGlu, plans.cut_swiglu, steps=2)


@right()
def swiglu_with_fused_gate_in_bfloat16() -> dict[str, Any]:
    return by_hand(
        lambda: models.SwiGlu().bfloat16(), plans.cut_swiglu, batch=lambda: models.rows(dtype=torch.bfloat16)
    )


@right()
def attention_with_fused_qkv() -> dict[str, Any]:
    return by_hand(models.Attention, plans.cut_attention, batch=models.sequences)


@right()
def attention_with_fused_qkv_on_four() -> dict[str, Any]:
    return by_hand(models.Attention, plans.cut_attention, 4, batch=models.sequences, steps=2)


@right()
def attention_with_fused_qkv_in_bfloat16() -> dict[str, Any]:
    return by_hand(
        lambda: models.Attention().bfloat16(),
        plans.cut_attention,
        batch=lambda: models.sequences(dtype=torch.bfloat16),
    )


@right()
def attention_with_shared_kv() -> dict[str, Any]:
    return by_hand(models.SharedKv, plans.KeptSharedKv, batch=models.sequences)


@right()
def block_by_hand() -> dict[str, Any]:
    return by_hand(models.Block, plans.cut_block, batch=models.sequences, steps=2)


@right()
def block_by_hand_in_bfloat16() -> dict[str, Any]:
    build = lambda: models.Block().bfloat16()  # noqa: E731
    return by_hand(build, plans.cut_block, batch=lambda: models.sequences(dtype=torch.bfloat16))


@right()
def norms_and_mlp_with_sequence_parallelism() -> dict[str, Any]:
    return by_hand(models.NormMlp, plans.SequenceNormMlp, batch=models.sequences, loss=models.tilted, steps=2)


@right()
def norms_and_mlp_with_sequence_parallelism_in_bfloat16() -> dict[str, Any]:
    build = lambda: models.NormMlp().bfloat16()  # noqa: E731
    return by_hand(
        build, plans.SequenceNormMlp, batch=lambda: models.sequences(dtype=torch.bfloat16), loss=models.tilted
    )


@right()
def vocabulary_cut() -> dict[str, Any]:
    return by_hand(models.Gpt, plans.VocabGpt, batch=models.tokens, loss=models.as_is, steps=2)


@right()
def vocabulary_cut_on_four() -> dict[str, Any]:
    return by_hand(models.Gpt, plans.VocabGpt, 4, batch=models.tokens, loss=models.as_is)


@right()
def tied_vocabulary_cut() -> dict[str, Any]:
    return by_hand(lambda: models.Gpt(tied=True), plans.VocabGpt, batch=models.tokens, loss=models.as_is, steps=2)


@right()
def experts_cut_over_equal_tokens() -> dict[str, Any]:
    return by_hand(
        lambda: models.Residual(models.Experts()), lambda m, g: setattr(m, "inner", plans.LocalExperts(m.inner, g))
    )


@right()
def clipped_by_the_norm_of_all_parts() -> dict[str, Any]:
    return by_hand(models.Block, plans.cut_block, batch=models.sequences, optimizer=layers.ClippedSGD, steps=2)


MLP = {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()}


@right()
def plan_of_mlp() -> dict[str, Any]:
    return by_plan(models.Mlp, MLP)


@right()
def plan_of_mlp_on_four_with_adamw() -> dict[str, Any]:
    return by_plan(models.Mlp, MLP, 4, steps=3, optimizer=torch.optim.AdamW)


@right()
def plan_of_mlp_in_bfloat16() -> dict[str, Any]:
    return by_plan(lambda: models.Mlp().bfloat16(), MLP, batch=lambda: models.rows(dtype=torch.bfloat16))


@right()
def plan_with_sequence_parallelism() -> dict[str, Any]:
    plan = {
        "norm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "mlp.fc1": ColwiseParallel(),
        "mlp.fc2": RowwiseParallel(output_layouts=Shard(1)),
        "last": SequenceParallel(),
        "": PrepareModuleInputOutput(
            input_layouts=Replicate(),
            desired_input_layouts=Shard(1),
            use_local_input=True,
            output_layouts=Shard(1),
            desired_output_layouts=Replicate(),
        ),
    }
    return by_plan(models.NormMlp, plan, batch=models.sequences, loss=models.tilted)


@right()
def plan_of_vocabulary_and_head() -> dict[str, Any]:
    def build() -> nn.Module:
        return nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 16))

    plan = {
        "0": RowwiseParallel(input_layouts=Replicate()),
        "1": ColwiseParallel(),
        "3": RowwiseParallel(),
    }
    return by_plan(build, plan, batch=lambda: torch.randint(0, 16, (4, 8)), steps=2)


@right()
def plan_with_gathered_outputs() -> dict[str, Any]:
    return by_plan(models.Mlp, {"fc1": ColwiseParallel(output_layouts=Replicate())})


@right()
def plan_with_clipping() -> dict[str, Any]:
    class Clipped(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            nn.utils.clip_grad_norm_([p for one in self.param_groups for p in one["params"]], 0.05)
            return super().step(closure)

    whole = {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()}
    return by_plan(lambda: models.Mlp(bias=False), whole, optimizer=lambda p: Clipped(p, lr=0.1), steps=2)
