"""Faulty programs: context parallelism and experts."""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from tests.tools.compare import layers, models, plans
from tests.tools.compare.cases import faulty
from tests.tools.compare.right_context import context
from tests.tools.compare.right_data import data, hooked
from tests.tools.compare.right_tensor import by_hand


class Cut(plans.ContextGpt):
    """ContextGpt, whose positions and targets a program chooses."""

    def positions(self, here: int) -> Tensor:
        return torch.arange(here) + layers.place(self.group)[0] * here

    def mine(self, full: Tensor) -> Tensor:
        rank, size = layers.place(self.group)
        return full.chunk(size, 1)[rank]

    def targets(self, full: Tensor) -> Tensor:
        return self.mine(full)

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        ids, target = self.mine(ids), self.targets(target)
        x = self.emb(ids) + self.pos(self.positions(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), target.flatten())


@faulty("positional offset", "pos", "slice", "NVIDIA/Megatron-LM#560", op="arange|embedding")
def positions_from_zero_on_each_rank() -> dict[str, Any]:
    class Zero(Cut):
        def positions(self, here: int) -> Tensor:
            return torch.arange(here)  # fault: positions_from_zero_on_each_rank

    return context(models.Gpt, Zero)


@faulty("positional offset", "pos", "slice", "NVIDIA/Megatron-LM#1612", op="arange|embedding|add")
def positions_one_too_far() -> dict[str, Any]:
    class Ahead(Cut):
        def positions(self, here: int) -> Tensor:
            rank, size = layers.place(self.group)
            return (torch.arange(here) + rank * (here - 1)) % (here * size)  # fault: positions_one_too_far

    return context(models.Gpt, Ahead)


@faulty("wrong slice", "loss", "slice|values", "modelscope/ms-swift#6293", op="chunk|split|slice|nll_loss")
def targets_of_the_first_part() -> dict[str, Any]:
    class First(Cut):
        def targets(self, full: Tensor) -> Tensor:
            return full[:, : full.shape[1] // layers.place(self.group)[1]]  # fault: targets_of_the_first_part

    return context(models.Gpt, First)


@faulty("wrong slice", "loss", "values", "huggingface/transformers#36607", op="nll_loss|cat|roll")
def targets_shifted_within_the_part() -> dict[str, Any]:
    class Next(models.Gpt):
        """Gpt that predicts the next token of `ids`; the last has none."""

        def forward(self, ids: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(ids, F.pad(ids[:, 1:], (0, 1), value=-100))

    class Local(Cut):
        def forward(self, ids: Tensor) -> Tensor:  # type: ignore[override]
            target = F.pad(self.mine(ids)[:, 1:], (0, 1), value=-100)  # fault: targets_shifted_within_the_part
            return super().forward(ids, target)

        def targets(self, full: Tensor) -> Tensor:
            return full

    return context(Next, Local, batch=lambda: {"ids": models.tokens()["ids"]})


@faulty(
    "mask or softmax over the local part",
    "blocks.0.attn.proj|blocks.0.attn",
    "values",
    "pytorch/torchtitan#592",
    op="masked_fill|gt|arange",
)
def mask_without_offset() -> dict[str, Any]:
    class Unmoved(plans.ContextAttention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (models.heads_of(one, self.head) for one in self.qkv(x).chunk(3, -1))
            k, v = (layers.Gather.apply(one, 2, self.group) for one in (k, v))
            return self.proj(models.merged(models.attend(q, k, v, 0)))  # fault: mask_without_offset

    return context(models.Gpt, lambda m, g: plans.ContextGpt(m, g, Unmoved))


@faulty(
    "mask or softmax over the local part",
    "blocks.0.attn.proj|blocks.0.attn",
    "values",
    "vllm-project/vllm-omni#6841",
    op="_softmax|softmax|bmm|matmul",
)
def attention_to_the_local_keys() -> dict[str, Any]:
    class Local(plans.ContextAttention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (models.heads_of(one, self.head) for one in self.qkv(x).chunk(3, -1))
            return self.proj(models.merged(models.attend(q, k, v)))  # fault: attention_to_the_local_keys

    return context(models.Gpt, lambda m, g: plans.ContextGpt(m, g, Local))


@faulty(
    "all_to_all in wrong order",
    "blocks.0.attn.proj|blocks.0.attn",
    "slice",
    "deepspeedai/DeepSpeed#6392",
    op="all_to_all|transpose",
)
def heads_come_back_in_other_order() -> dict[str, Any]:
    class Other(plans.UlyssesAttention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (models.heads_of(one, self.head) for one in self.qkv(x).chunk(3, -1))
            q, k, v = (layers.Exchange.apply(one, 1, 2, self.group) for one in (q, k, v))
            out = layers.Exchange.apply(models.attend(q, k, v), 2, 1, self.group)
            size = layers.place(self.group)[1]
            out = out.unflatten(1, (size, -1)).transpose(1, 2).flatten(1, 2)  # fault: heads_come_back_in_other_order
            return self.proj(models.merged(out))

    return context(models.Gpt, lambda m, g: plans.ContextGpt(m, g, Other))


def moe() -> nn.Module:
    return models.Residual(models.Experts())


@faulty("expert routing", "inner", "slice", "vllm-project/vllm#49122", op="slice|mul")
def gates_without_offset() -> dict[str, Any]:
    class First(plans.LocalExperts):
        def forward(self, x: Tensor) -> Tensor:
            x, gates = (layers.Copy.apply(one, self.group) for one in (x, self.router(x).softmax(-1)))
            out = torch.zeros_like(x)
            for at in range(self.w1.shape[0]):
                gate = gates[..., at : at + 1]  # fault: gates_without_offset
                out = out + gate * (F.gelu(x @ self.w1[at]) @ self.w2[at])
            return layers.Reduce.apply(out, self.group)

    return by_hand(moe, lambda m, g: setattr(m, "inner", First(m.inner, g)))


@faulty("mask or softmax over the local part", "inner", "values", "NVIDIA-NeMo/Automodel#2995", op="softmax|_softmax")
def gates_over_the_local_experts() -> dict[str, Any]:
    class Local(plans.LocalExperts):
        def forward(self, x: Tensor) -> Tensor:
            first, count = layers.place(self.group)[0] * self.w1.shape[0], self.w1.shape[0]
            x, scores = (layers.Copy.apply(one, self.group) for one in (x, self.router(x)))
            gates = scores[..., first : first + count].softmax(-1)  # fault: gates_over_the_local_experts
            out = torch.zeros_like(x)
            for at in range(count):
                out = out + gates[..., at : at + 1] * (F.gelu(x @ self.w1[at]) @ self.w2[at])
            return layers.Reduce.apply(out, self.group)

    return by_hand(moe, lambda m, g: setattr(m, "inner", Local(m.inner, g)))


def sent(experts: Any) -> dict[str, Any]:
    def parallelize(model: models.Residual, mesh: Any) -> nn.Module:
        model.inner = experts(model.inner, mesh.get_group("dp"))
        for part in (model.first, model.last):
            hooked(part, mesh)
        return model

    return data(moe, parallelize)


@faulty("gradient scaled by n", "inner.w2|inner.w1|inner", "large", "pytorch/pytorch#160285", op="bmm|mm|matmul")
def expert_gradients_not_divided() -> dict[str, Any]:
    class Undivided(plans.SentExperts):
        def __init__(self, whole: models.Experts, group: Any) -> None:
            super().__init__(whole, group)
            self.w1 = layers.shard(whole.w1, 0, group)
            self.w2 = layers.shard(whole.w2, 0, group)  # fault: expert_gradients_not_divided

    return sent(Undivided)


@faulty("expert routing", "inner.router", "values", "huggingface/transformers#48687", op="detach|softmax")
def gates_without_gradient() -> dict[str, Any]:
    class Detached(plans.SentExperts):
        def forward(self, x: Tensor) -> Tensor:
            size, here = layers.place(self.group)[1], self.w1.shape[0]
            gates = self.router(x).softmax(-1).detach()  # fault: gates_without_gradient
            got = layers.Exchange.apply(x.unsqueeze(0).expand(size * here, *x.shape), 0, 1, self.group)
            done = torch.stack([F.gelu(got[at] @ self.w1[at]) @ self.w2[at] for at in range(here)])
            back = layers.Exchange.apply(done, 1, 0, self.group)
            return torch.einsum("e...d,...e->...d", back, gates) + 0 * self.router(x).sum()

    return sent(Detached)
