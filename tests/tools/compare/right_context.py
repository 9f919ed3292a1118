"""Right programs: context parallelism, by hand, and what is left."""

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.tools.compare import layers, models, plans
from tests.tools.compare.cases import right


def context(build: Any, parallelize: Any, size: int = 2, **more: Any) -> dict[str, Any]:
    def cut(model: Any, mesh: Any) -> nn.Module:
        return parallelize(model, mesh.get_group("cp"))

    given = {"build": build, "parallelize": cut, "batch": models.tokens, "mesh": {"cp": size}}
    return given | {"loss": models.as_is, "optimizer": lambda p: torch.optim.SGD(p, lr=0.1)} | more


class Sequences(nn.Module):
    """An attention of a part of the sequence, put together again at the end."""

    def __init__(self, attention: nn.Module, group: Any) -> None:
        super().__init__()
        self.inner, self.group = attention, group
        for parameter in attention.parameters():
            layers.sum_gradient(parameter, group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return layers.Join.apply(self.inner(layers.Split.apply(x, 1, self.group)), 1, self.group)


class Alone(nn.Module):
    def __init__(self, *, causal: bool = True) -> None:
        super().__init__()
        self.inner = models.Attention(causal=causal)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


@right()
def context_parallel_gpt() -> dict[str, Any]:
    return context(models.Gpt, plans.ContextGpt, steps=2)


@right()
def context_parallel_gpt_on_four() -> dict[str, Any]:
    return context(models.Gpt, plans.ContextGpt, 4)


@right()
def context_parallel_gpt_of_two_layers() -> dict[str, Any]:
    return context(lambda: models.Gpt(2), plans.ContextGpt)


class Total(plans.ContextGpt):
    """ContextGpt whose loss is that of all tokens, on each rank."""

    def __init__(self, whole: models.Gpt, group: Any) -> None:
        super().__init__(whole, group, reduce=layers.sum_gradient)

    def forward(self, ids: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = super().forward(ids, target) / layers.place(self.group)[1]
        return layers.Reduce.apply(loss, self.group)


@right()
def context_parallel_gpt_with_the_loss_of_all() -> dict[str, Any]:
    return context(models.Gpt, Total, steps=2)


@right()
def context_parallel_gpt_with_the_loss_of_all_on_four() -> dict[str, Any]:
    return context(models.Gpt, Total, 4)


@right()
def ulysses_gpt() -> dict[str, Any]:
    return context(models.Gpt, lambda m, g: plans.ContextGpt(m, g, plans.UlyssesAttention), steps=2)


@right()
def ulysses_gpt_on_four_with_adamw() -> dict[str, Any]:
    build = lambda m, g: plans.ContextGpt(m, g, plans.UlyssesAttention)  # noqa: E731
    return context(models.Gpt, build, 4, optimizer=torch.optim.AdamW, steps=2)


@right()
def gathered_attention() -> dict[str, Any]:
    def cut(model: Alone, group: Any) -> nn.Module:
        return Sequences(plans.ContextAttention(model.inner, group), group)

    return context(Alone, cut, batch=models.sequences, loss=models.square)


@right()
def gathered_attention_without_mask_in_bfloat16() -> dict[str, Any]:
    def cut(model: Alone, group: Any) -> nn.Module:
        return Sequences(plans.ContextAttention(model.inner, group), group)

    return context(
        lambda: Alone(causal=False).bfloat16(),
        cut,
        batch=lambda: models.sequences(dtype=torch.bfloat16),
        loss=models.square,
    )


@right()
def ulysses_attention_in_bfloat16() -> dict[str, Any]:
    def cut(model: Alone, group: Any) -> nn.Module:
        return Sequences(plans.UlyssesAttention(model.inner, group), group)

    return context(
        lambda: Alone().bfloat16(), cut, batch=lambda: models.sequences(dtype=torch.bfloat16), loss=models.square
    )


@right()
def context_and_data() -> dict[str, Any]:
    def parallelize(model: models.Gpt, mesh: Any) -> nn.Module:
        cut = plans.ContextGpt(model, mesh.get_group("cp"))
        for parameter in cut.parameters():
            layers.mean_gradient(parameter, mesh.get_group("dp"))
        return cut

    return context(models.Gpt, None) | {"parallelize": parallelize, "mesh": {"dp": 2, "cp": 2}}


@right()
def checkpointed_tensor_parallel_block() -> dict[str, Any]:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = models.Block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.block, x, use_reentrant=False)

    def cut(model: Checkpointed, group: Any) -> nn.Module:
        plans.cut_block(model.block, group)
        return model

    return context(Checkpointed, cut, batch=models.sequences, loss=models.square)
