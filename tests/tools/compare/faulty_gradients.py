"""Faulty programs: the forward pass is right, and gradients go wrong between the ranks of tensor and sequence parallelism."""

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tests.tools.compare import layers, models, plans
from tests.tools.compare.cases import faulty
from tests.tools.compare.right_data import data
from tests.tools.compare.right_tensor import by_hand


@faulty(
    "missing reduction of a gradient", "first|inner.fc1|inner", "missing", "NovaSky-AI/SkyRL#1886", op="linear|addmm|mm"
)
def column_without_sum_in_backward() -> dict[str, Any]:
    class Bare(layers.Column):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight, self.bias)  # fault: column_without_sum_in_backward

    def cut(model: models.Residual, group: Any) -> None:
        mlp = model.inner
        mlp.fc1, mlp.fc2 = Bare(mlp.fc1, group), layers.Row(mlp.fc2, group)  # type: ignore[arg-type,assignment]

    return by_hand(lambda: models.Residual(models.Mlp()), cut)


@faulty("missing reduction of a gradient", "kv", "missing", "bigcode-project/Megatron-LM#37", op="split|chunk|linear")
def shared_kv_without_sum_in_backward() -> dict[str, Any]:
    class Bare(plans.KeptSharedKv):
        def forward(self, x: Tensor) -> Tensor:
            q = models.heads_of(self.q(x), self.head)
            k, v = (
                models.heads_of(y, self.head) for y in self.kv(x).chunk(2, -1)
            )  # fault: shared_kv_without_sum_in_backward
            return self.proj(models.merged(models.attend(q, k, v)))

    return by_hand(models.SharedKv, Bare, batch=models.sequences)


@faulty("missing reduction of a gradient", "inner.router", "missing", "pytorch/torchtitan#2416", op="softmax|slice")
def router_without_sum_in_backward() -> dict[str, Any]:
    class Bare(plans.LocalExperts):
        def forward(self, x: Tensor) -> Tensor:
            first = layers.place(self.group)[0] * self.w1.shape[0]
            gates = self.router(x).softmax(-1)  # fault: router_without_sum_in_backward
            x = layers.Copy.apply(x, self.group)
            out = 0 * x
            for at in range(self.w1.shape[0]):
                out = out + gates[..., first + at : first + at + 1] * (F.gelu(x @ self.w1[at]) @ self.w2[at])
            return layers.Reduce.apply(out, self.group)

    return by_hand(lambda: models.Residual(models.Experts()), lambda m, g: setattr(m, "inner", Bare(m.inner, g)))


@faulty("gradient scaled by n", "fc2|fc1", "large", "pytorch/pytorch#58005", op="all_reduce")
def sum_whose_backward_sums() -> dict[str, Any]:
    class Twice(layers.Row):
        def forward(self, x: Tensor) -> Tensor:
            y = dist_nn.all_reduce(F.linear(x, self.weight), group=self.group)  # fault: sum_whose_backward_sums
            return y + self.bias

    def cut(mlp: models.Mlp, group: Any) -> None:
        mlp.fc1, mlp.fc2 = layers.Column(mlp.fc1, group), Twice(mlp.fc2, group)  # type: ignore[assignment]

    return by_hand(models.Mlp, cut)


@faulty("gradient scaled by n", "kv", "large", "NVIDIA/Megatron-LM#6839", op="all_reduce|Copy")
def shared_kv_summed_twice_in_backward() -> dict[str, Any]:
    class Twice(plans.KeptSharedKv):
        def forward(self, x: Tensor) -> Tensor:
            q = models.heads_of(self.q(x), self.head)
            kv = layers.Copy.apply(self.kv(x), self.group)
            kv = layers.Copy.apply(kv, self.group)  # fault: shared_kv_summed_twice_in_backward
            k, v = (models.heads_of(one, self.head) for one in kv.chunk(2, -1))
            return self.proj(models.merged(models.attend(q, k, v)))

    return by_hand(models.SharedKv, Twice, batch=models.sequences)


@faulty("gradient scaled by n", "last|norm", "large", "inclusionAI/AReno#496", op="all_reduce")
def norms_summed_without_need() -> dict[str, Any]:
    def cut(model: models.NormMlp, group: Any) -> None:
        plans.cut_mlp(model.mlp, group)
        for parameter in [*model.norm.parameters(), *model.last.parameters()]:
            layers.sum_gradient(parameter, group)  # fault: norms_summed_without_need

    return by_hand(models.NormMlp, cut, batch=models.sequences, loss=models.tilted)


class Sequence(plans.SequenceNormMlp):
    """SequenceNormMlp; `reduce` is called with each parameter of its norms."""

    def __init__(self, whole: models.NormMlp, group: Any, reduce: Any) -> None:
        nn.Module.__init__(self)
        self.group = group
        self.norm, self.mlp, self.last = whole.norm, whole.mlp, whole.last
        plans.cut_mlp(self.mlp, group, sequence=True)
        for name, parameter in self.named_parameters():
            if not name.startswith("mlp"):
                reduce(name, parameter)


@faulty(
    "layer norm under sequence parallelism",
    "last",
    "missing",
    "NVIDIA/Megatron-LM#1446",
    op="native_layer_norm_backward|layer_norm",
)
def last_norm_without_sum() -> dict[str, Any]:
    def cut(model: models.NormMlp, group: Any) -> nn.Module:
        def reduce(name: str, parameter: nn.Parameter) -> None:
            if not name.startswith("last"):  # fault: last_norm_without_sum
                layers.sum_gradient(parameter, group)

        return Sequence(model, group, reduce)

    return by_hand(models.NormMlp, cut, batch=models.sequences, loss=models.tilted)


@faulty(
    "layer norm under sequence parallelism",
    "last|norm",
    "missing",
    "NVIDIA/TransformerEngine#441",
    op="native_layer_norm_backward|layer_norm",
)
def norms_without_sum_on_four() -> dict[str, Any]:
    def cut(model: models.NormMlp, group: Any) -> nn.Module:
        return Sequence(model, group, lambda name, parameter: None)  # fault: norms_without_sum_on_four

    return by_hand(models.NormMlp, cut, 4, batch=models.sequences, loss=models.tilted)


@faulty("layer norm under sequence parallelism", "last|norm", "small", "EleutherAI/gpt-neox#1259", op="all_reduce")
def norms_averaged() -> dict[str, Any]:
    def cut(model: models.NormMlp, group: Any) -> nn.Module:
        def reduce(name: str, parameter: nn.Parameter) -> None:
            layers.mean_gradient(parameter, group)  # fault: norms_averaged

        return Sequence(model, group, reduce)

    return by_hand(models.NormMlp, cut, batch=models.sequences, loss=models.tilted)


@faulty(
    "layer norm under sequence parallelism", "mlp.fc2.bias|mlp.fc2", "missing", "NVIDIA/Megatron-LM#236", op="add|sum"
)
def row_bias_without_sum() -> dict[str, Any]:
    def cut(model: models.NormMlp, group: Any) -> nn.Module:
        cut = plans.SequenceNormMlp(model, group)
        cut.mlp.fc2.bias = layers.whole(cut.mlp.fc2.bias)  # fault: row_bias_without_sum
        return cut

    return by_hand(models.NormMlp, cut, batch=models.sequences, loss=models.tilted)


@faulty(
    "layer norm under sequence parallelism",
    "norm",
    "missing",
    "pytorch/torchtitan#2532",
    op="to_local|native_layer_norm_backward",
)
def norm_of_local_weights() -> dict[str, Any]:
    class Norm(nn.Module):
        def __init__(self, norm: nn.LayerNorm, mesh: Any) -> None:
            super().__init__()
            self.weight = nn.Parameter(distribute_tensor(norm.weight.detach(), mesh, [Replicate()]))
            self.bias = nn.Parameter(distribute_tensor(norm.bias.detach(), mesh, [Replicate()]))

        def forward(self, x: Tensor) -> Tensor:
            return F.layer_norm(
                x, x.shape[-1:], self.weight.to_local(), self.bias.to_local()
            )  # fault: norm_of_local_weights

    def parallelize(model: models.NormMlp, mesh: Any) -> nn.Module:
        cut = plans.SequenceNormMlp(model, mesh.get_group("tp"))
        cut.norm = Norm(model.norm, mesh["tp"])  # type: ignore[assignment]
        return cut

    return by_hand(models.NormMlp, None, batch=models.sequences, loss=models.tilted) | {"parallelize": parallelize}


class Sliced(layers.Gather):
    """all_gather whose backward is only this rank's slice."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        rank, size = layers.place(ctx.group)
        return grad.chunk(size, ctx.dim)[rank].contiguous(), None, None


@faulty("backward of a gather", "norm|mlp.fc1|mlp", "missing", "pytorch/xla#5784", op="all_gather|slice")
def gather_whose_backward_slices() -> dict[str, Any]:
    class Bare(layers.Column):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(
                Sliced.apply(x, 1, self.group), self.weight, self.bias
            )  # fault: gather_whose_backward_slices

    def cut(model: models.NormMlp, group: Any) -> nn.Module:
        linear = model.mlp.fc1
        cut = plans.SequenceNormMlp(model, group)
        cut.mlp.fc1 = Bare(linear, group)  # type: ignore[assignment]
        return cut

    return by_hand(models.NormMlp, cut, batch=models.sequences, loss=models.tilted)


@faulty(
    "backward of a gather", "blocks.0.attn.qkv|blocks.0.attn", "missing", "lightly-ai/lightly#1531", op="all_gather"
)
def keys_gathered_without_sum_in_backward() -> dict[str, Any]:
    class Bare(plans.ContextAttention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (models.heads_of(one, self.head) for one in self.qkv(x).chunk(3, -1))
            first = layers.place(self.group)[0] * x.shape[1]
            k, v = (Sliced.apply(one, 2, self.group) for one in (k, v))  # fault: keys_gathered_without_sum_in_backward
            return self.proj(models.merged(models.attend(q, k, v, first)))

    def parallelize(model: models.Gpt, mesh: Any) -> nn.Module:
        return plans.ContextGpt(model, mesh.get_group("cp"), Bare)

    given = by_hand(models.Gpt, None, batch=models.tokens, loss=models.as_is)
    return given | {"parallelize": parallelize, "mesh": {"cp": 2}}


class Pairs(nn.Module):
    """A loss of all pairs of rows, as of contrastive learning."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        return (y @ y.t()).square().mean()


@faulty("backward of a gather", "fc", "missing", "huggingface/accelerate#76", op="all_gather|cat")
def pairs_gathered_without_gradient() -> dict[str, Any]:
    class Gathered(Pairs):
        def forward(self, x: Tensor) -> Tensor:
            y = self.fc(x)
            parts = [y.detach().clone() for _ in range(dist.get_world_size())]
            dist.all_gather(parts, y.detach())  # fault: pairs_gathered_without_gradient
            parts[dist.get_rank()] = y
            return (y @ torch.cat(parts).t()).square().mean()

    def parallelize(model: Pairs, mesh: Any) -> nn.Module:
        model.__class__ = Gathered
        return DistributedDataParallel(model, process_group=mesh.get_group("dp"))

    return data(Pairs, parallelize, loss=models.as_is)


@faulty("tied weights not reduced", "emb|head", "missing", "NVIDIA/Megatron-LM#844", op="embedding")
def tied_weights_in_two_copies() -> dict[str, Any]:
    def cut(model: models.Gpt, group: Any) -> nn.Module:
        cut = plans.VocabGpt(model, group)
        cut.head.weight = layers.shard(model.emb.weight, 0, group)  # fault: tied_weights_in_two_copies
        return cut

    return by_hand(lambda: models.Gpt(tied=True), cut, batch=models.tokens, loss=models.as_is, steps=2)


@faulty(
    "all_reduce in place of reduce_scatter", "mlp.fc2", "slice", "huggingface/nanotron#46", op="all_reduce|slice|narrow"
)
def summed_and_cut_at_the_first_part() -> dict[str, Any]:
    class First(layers.Row):
        def forward(self, x: Tensor) -> Tensor:
            y = layers.Reduce.apply(F.linear(x, self.weight), self.group)
            y = y[:, : y.shape[1] // layers.place(self.group)[1]]  # fault: summed_and_cut_at_the_first_part
            return y + self.bias

    def cut(model: models.NormMlp, group: Any) -> nn.Module:
        linear = model.mlp.fc2
        cut = plans.SequenceNormMlp(model, group)
        cut.mlp.fc2 = First(linear, group)  # type: ignore[assignment]
        return cut

    return by_hand(models.NormMlp, cut, batch=models.sequences, loss=models.tilted)
