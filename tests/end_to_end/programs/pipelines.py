"""Pipelines: four attention blocks in stages, microbatches over send and recv, a mask that is split with them."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torch.nn.functional import scaled_dot_product_attention

from tests.device import MESH

BATCH, LENGTH, WIDTH, BLOCKS, RATE = 8, 5, 6, 4, 0.5


class Block(nn.Module):
    """Attention of one head under a mask, then a small network, both with a way around."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.net = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        x = x + self.out(scaled_dot_product_attention(q, k, v, attn_mask=mask))
        return x + self.net(x)


class Blocks(nn.Sequential):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for block in self:
            x = block(x, mask)
        return x


def model() -> Blocks:
    torch.manual_seed(3)
    return Blocks(*[Block().double() for _ in range(BLOCKS)])


def batches(steps: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Inputs, targets and masks: causal, and each sample ends at a place of its own."""
    torch.manual_seed(5)
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    for step in range(steps):
        x, y = torch.randn(2, BATCH, LENGTH, WIDTH, dtype=torch.float64)
        ends = 1 + (torch.arange(BATCH) + step) % LENGTH
        yield x, y, causal & (torch.arange(LENGTH) < ends[:, None, None])


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def train(schedule: str, microbatches: int, blocks_per_stage: int, steps: int) -> dict[str, object]:
    """The losses and outputs that the last stage has, and this rank's weights after the last step."""
    return _train(dist.group.WORLD, schedule, microbatches, blocks_per_stage, steps)


def train_in_columns(schedule: str, microbatches: int, steps: int) -> dict[str, object]:
    """Two pipelines of two stages side by side, each with half of every batch; gradients are averaged across."""
    mesh = init_device_mesh(MESH, (2, 2), mesh_dim_names=("data", "pipe"))
    across = mesh["data"].get_group()
    half = slice(mesh["data"].get_local_rank(), None, 2)
    return _train(mesh["pipe"].get_group(), schedule, microbatches, BLOCKS // 2, steps, half, across)


def _train(
    group: dist.ProcessGroup,
    schedule: str,
    microbatches: int,
    blocks_per_stage: int,
    steps: int,
    part: slice = slice(None),
    across: dist.ProcessGroup | None = None,
) -> dict[str, object]:
    stages = _stages(group, blocks_per_stage)
    kind = get_schedule_class(schedule)
    staged = stages[0] if issubclass(kind, PipelineScheduleSingle) else stages
    pipe = kind(staged, microbatches, loss_fn=mean_square)
    weights = {name: weight for stage in stages for name, weight in stage.submod.named_parameters()}
    optimizer = torch.optim.SGD(weights.values(), lr=RATE)
    first, last = any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)
    losses, outputs = [], []
    for x, y, mask in batches(steps):
        here: list[Tensor] = []
        given = (x[part],) if first else ()
        out = pipe.step(*given, target=y[part] if last else None, losses=here if last else None, mask=mask[part])
        for weight in weights.values() if across else ():
            dist.all_reduce(weight.grad, group=across)
            weight.grad /= dist.get_world_size(across)
        optimizer.step()
        optimizer.zero_grad()
        losses += [torch.stack(here).detach()] if last else []
        outputs += [out.detach()] if out is not None else []
    return {"losses": losses, "outputs": outputs, "weights": {n: w.detach() for n, w in weights.items()}}


def _stages(group: dist.ProcessGroup, blocks_per_stage: int) -> list[PipelineStage]:
    """This rank's stages: so many blocks each, dealt to the ranks in turn.  A block keeps its name."""
    whole, count = model(), BLOCKS // blocks_per_stage
    mine = range(dist.get_rank(group), count, dist.get_world_size(group))
    return [
        PipelineStage(
            whole[i * blocks_per_stage : (i + 1) * blocks_per_stage], i, count, torch.device(MESH), group=group
        )
        for i in mine
    ]


def train_on_one_device(steps: int) -> dict[str, object]:
    whole = model()
    optimizer = torch.optim.SGD(whole.parameters(), lr=RATE)
    losses, outputs = [], []
    for x, y, mask in batches(steps):
        out = whole(x, mask)
        loss = mean_square(out, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        outputs.append(out.detach())
    return {"losses": losses, "outputs": outputs, "weights": {n: w.detach() for n, w in whole.named_parameters()}}


def relay(rounds: int) -> list[float]:
    """A token goes around by plain send and recv, and each rank that has it adds its number."""
    me, ranks = dist.get_rank(), dist.get_world_size()
    token, seen = torch.zeros(1), []
    for turn in range(rounds):
        if turn or me:
            dist.recv(token, (me - 1) % ranks, tag=turn)
        token += me
        seen.append(token.item())
        if turn + 1 < rounds or me + 1 < ranks:
            dist.send(token, (me + 1) % ranks, tag=turn + (me + 1 == ranks))
    return seen
