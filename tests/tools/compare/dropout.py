"""Programs with dropout: which ranks have to drop the same elements, and which may not."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from tests.tools.compare import layers, models, plans
from tests.tools.compare.cases import faulty, right
from tests.tools.compare.right_data import data, ddp
from tests.tools.compare.right_tensor import by_hand


class Tracker:
    """Streams of random numbers by name, as Megatron keeps them: `fork` draws from one, and leaves the default as it is."""

    def __init__(self, **seeds: int) -> None:
        self.states = {name: torch.Generator().manual_seed(seed).get_state() for name, seed in seeds.items()}

    @contextmanager
    def fork(self, name: str) -> Iterator[None]:
        before = torch.get_rng_state()
        torch.set_rng_state(self.states[name])
        try:
            yield
        finally:
            self.states[name] = torch.get_rng_state()
            torch.set_rng_state(before)


class Dropping(nn.Module):
    """Attention with dropout of its weights, and dropout of what is added."""

    tracker: Tracker | None = None

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn, self.drop = nn.LayerNorm(8), models.Attention(), nn.Dropout(0.2)
        self.attn.forward = self.attend  # type: ignore[method-assign]

    def weights(self, scores: Tensor) -> Tensor:
        if self.tracker is None:
            return F.dropout(scores, 0.2, self.training)
        with self.tracker.fork("parallel"):
            return F.dropout(scores, 0.2, self.training)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (models.heads_of(one, 2) for one in self.attn.qkv(x).chunk(3, -1))
        scores = (q @ k.transpose(-1, -2) / 2**0.5).softmax(-1)
        return self.attn.proj(models.merged(self.weights(scores) @ v))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.attn(self.norm(x)))


def dropping(seed: Any, **more: Any) -> dict[str, Any]:
    def cut(model: Dropping, group: Any) -> None:
        plans.cut_attention(model.attn, group)
        seed(model, layers.place(group)[0])

    return by_hand(Dropping, cut, batch=models.sequences, steps=2, **more)


@right()
def streams_of_a_tracker() -> dict[str, Any]:
    def seed(model: Dropping, rank: int) -> None:
        torch.manual_seed(42)
        model.tracker = Tracker(parallel=2718 + 42 + rank)

    return dropping(seed)


@right()
def one_stream_for_all() -> dict[str, Any]:
    return dropping(lambda model, rank: torch.manual_seed(42))


@faulty("replica not broadcast, or wrong seed", "drop", "replicas", "InternLM/InternLM#405", op="dropout")
def stream_of_each_rank() -> dict[str, Any]:
    return dropping(lambda model, rank: torch.manual_seed(42 + rank))  # fault: stream_of_each_rank


@faulty("replica not broadcast, or wrong seed", "drop", "replicas", "awslabs/slapo#21", op="dropout")
def stream_of_the_parts_for_all() -> dict[str, Any]:
    class Residual(Dropping):
        def forward(self, x: Tensor) -> Tensor:
            y = self.attn(self.norm(x))
            if self.tracker is None:
                return x + self.drop(y)
            with self.tracker.fork("parallel"):
                return x + self.drop(y)  # fault: stream_of_the_parts_for_all

    def cut(model: Residual, group: Any) -> None:
        plans.cut_attention(model.attn, group)
        torch.manual_seed(42)
        model.tracker = Tracker(parallel=2718 + 42 + layers.place(group)[0])

    return by_hand(Residual, cut, batch=models.sequences)


class NormDropping(models.NormMlp):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.drop(self.mlp(self.norm(x))))


@right()
def dropout_of_dtensors() -> dict[str, Any]:
    plan = {
        "norm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=torch.distributed.tensor.Replicate()),
        "mlp.fc1": ColwiseParallel(),
        "mlp.fc2": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "drop": SequenceParallel(),
        "last": SequenceParallel(),
    }

    def parallelize(model: nn.Module, mesh: Any) -> nn.Module:
        parallelize_module(model, mesh["tp"], plan)
        model.register_forward_pre_hook(lambda _, args: (sharded(args[0], mesh),))
        return model

    def sharded(x: Tensor, mesh: Any) -> Tensor:
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(x, mesh["tp"], [Shard(1)])

    given = by_hand(NormDropping, None, batch=models.sequences)
    return given | {"parallelize": parallelize, "loss": lambda y: models.tilted(whole(y))}


def whole(y: Any) -> Tensor:
    return y.full_tensor() if hasattr(y, "full_tensor") else y


@right()
def dropout_of_rows_with_a_seed_for_each_rank() -> dict[str, Any]:
    def parallelize(model: nn.Module, mesh: Any) -> nn.Module:
        torch.manual_seed(1 + mesh.get_local_rank("dp"))
        return ddp(model, mesh)

    return data(NormDropping, parallelize, batch=models.sequences, loss=models.tilted, steps=2)


class Checkpointed(NormDropping):
    keep = True

    def forward(self, x: Tensor) -> Tensor:
        def inner(y: Tensor) -> Tensor:
            return self.drop(self.mlp(self.norm(y)))  # fault: state_not_kept_for_checkpoints

        return self.last(x + checkpoint(inner, x, use_reentrant=False, preserve_rng_state=self.keep))


@right()
def checkpointed_dropout() -> dict[str, Any]:
    def cut(model: Checkpointed, group: Any) -> None:
        plans.cut_mlp(model.mlp, group)

    return by_hand(Checkpointed, cut, batch=models.sequences, loss=models.tilted)


@faulty("dropout computed again otherwise", "drop", "replicas|values", "allenai/OLMo-core#828", op="dropout")
def state_not_kept_for_checkpoints() -> dict[str, Any]:
    def cut(model: Checkpointed, group: Any) -> None:
        plans.cut_mlp(model.mlp, group)
        model.keep = False

    return by_hand(Checkpointed, cut, batch=models.sequences, loss=models.tilted)
