"""Data-parallel training, fully sharded and not: on a mesh of any shape, and the empty shape, (), is one device.

Each rank learns from its own rows.  What it returns is whole and means the same on every rank, so that it can be
compared with one device that learnt from all rows.
"""

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from tests.device import MESH
from tests.end_to_end.programs.tensor_parallel_programs import Record, Shape, transformer_plan, whole
from tests.end_to_end.programs.transformer import Feedforward, Transformer, noise, seeded, tokens

ROWS = 8  # in a batch; each rank, or each row of ranks, has as many as any other
LONGEST = 0.1  # a gradient that is longer is clipped to this


def my_rows(batch: Tensor, mesh: DeviceMesh | None) -> Tensor:
    return batch.unflatten(0, (mesh.size(), -1))[mesh.get_local_rank()] if mesh else batch


def mean_of_ranks(x: Tensor, mesh: DeviceMesh | None) -> Tensor:
    total = x.detach().clone()
    if mesh:
        dist.all_reduce(total, group=mesh.get_group())
        total /= mesh.size()
    return total


def learnt(model: nn.Module) -> Record:
    return {name.removeprefix("module."): whole(part) for name, part in model.named_parameters()}


def loss_of(model: nn.Module, text: Tensor, following: Tensor) -> Tensor:
    return functional.cross_entropy(model(text).flatten(0, 1), following.flatten())


def learn(model: nn.Module, mesh: DeviceMesh | None, steps: int = 3) -> Record:
    """A few steps of AdamW, the gradient clipped; losses, lengths, and what was learnt."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    losses, lengths = [], []
    text, following = (my_rows(part, mesh) for part in tokens(ROWS))
    for _ in range(steps):
        loss = loss_of(model, text, following)
        optimizer.zero_grad()
        loss.backward()
        lengths.append(whole(clip_grad_norm_(model.parameters(), max_norm=LONGEST)))
        optimizer.step()
        losses.append(mean_of_ranks(loss, mesh))
    return {"losses": torch.stack(losses), "lengths": torch.stack(lengths), **learnt(model)}


def shard_each_block(model: nn.Module, mesh: DeviceMesh, **options: Any) -> None:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def fully_sharded(mesh: Shape, reshard_after_forward: bool | None, dtype: torch.dtype) -> Record:
    """FSDP2, a group for each block and one for the rest; every weight is cut along dim 0, evenly or not."""
    model, world = seeded(Transformer).to(dtype), None
    if mesh:
        world = init_device_mesh(MESH, mesh)
        shard_each_block(model, world, reshard_after_forward=reshard_after_forward)
    return learn(model, world)


def recomputed(mesh: Shape) -> Record:
    """FSDP2 with each block run again in the backward, for which its weights are gathered once more."""
    model, world = seeded(Transformer), None
    for number, block in enumerate(model.blocks):
        model.blocks[number] = checkpoint_wrapper(block)
    if mesh:
        world = init_device_mesh(MESH, mesh)
        shard_each_block(model, world)
    return learn(model, world)


def rows_held(mesh: Shape) -> dict[str, int]:
    """How many rows of each weight this rank holds under FSDP2."""
    model = seeded(Transformer)
    shard_each_block(model, init_device_mesh(MESH, mesh))
    return {name: part.to_local().shape[0] for name, part in model.named_parameters()}


def hybrid_sharded(mesh: Shape) -> Record:
    """Cut within a row of the mesh, and each row has the same (HSDP)."""
    model, world = seeded(Transformer), None
    if mesh:
        shard_each_block(model, init_device_mesh(MESH, mesh, mesh_dim_names=("same", "cut")))
        world = init_device_mesh(MESH, (dist.get_world_size(),))
    return learn(model, world)


def sharded_in_two_ways(mesh: Shape) -> Record:
    """FSDP2 across the rows of the mesh, tensor and sequence parallel within each: one weight, cut twice."""
    model, down = seeded(Transformer), None
    if mesh:
        grid = init_device_mesh(MESH, mesh, mesh_dim_names=("data", "tensor"))
        head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
        parallelize_module(model, grid["tensor"], transformer_plan(head))
        down = grid["data"]
        shard_each_block(model, down)
    return learn(model, down)


def replicated(mesh: Shape) -> Record:
    """DistributedDataParallel, in buckets so small that a step takes several all-reduces."""
    model, world = seeded(Transformer), None
    if mesh:
        world = init_device_mesh(MESH, mesh)
        model = DistributedDataParallel(model, bucket_cap_mb=0.001)
    return learn(model, world)


def accumulated(mesh: Shape, how: str) -> Record:
    """Two batches make one gradient, and the ranks talk about it once, after the second."""
    model, world = seeded(Transformer), None
    if mesh:
        world = init_device_mesh(MESH, mesh)
        if how == "sharded":
            shard_each_block(model, world)
        else:
            model = DistributedDataParallel(model)
    for last in (False, True):
        text, following = (my_rows(part, world) for part in tokens(ROWS, seed=int(last)))
        if mesh and how == "sharded":
            model.set_requires_gradient_sync(last)
        with model.no_sync() if mesh and how == "replicated" and not last else nullcontext():
            (loss_of(model, text, following) / 2).backward()
    return {name.removeprefix("module."): whole(part.grad) for name, part in model.named_parameters()}


def joined(mesh: Shape, pieces: int) -> Record:
    """Rank r has r + 1 batches: who has no more shadows the others' all-reduces, as if its gradients were 0."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    batches = noise(pieces, 4, 3)
    if mesh:
        model = DistributedDataParallel(model)
        mine = range(dist.get_rank() + 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with Join([model]) if mesh else nullcontext():
        for step in mine if mesh else range(pieces):
            optimizer.zero_grad()
            if mesh:
                error_on(model, batches[dist.get_rank()], step).backward()
            else:
                sum(error_on(model, batches[rank], step) / pieces for rank in range(step, pieces)).backward()
            optimizer.step()
    return learnt(model)


def error_on(model: nn.Module, batch: Tensor, step: int) -> Tensor:
    return (model(batch) - step).square().mean()


class Branches(nn.Module):
    """Three ways through; who calls it says which are taken.  Three hidden units: over 4 ranks, one has none."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.idle = (Feedforward(hidden=3) for _ in range(3))

    def forward(self, x: Tensor, taken: tuple[str, ...]) -> Tensor:
        return sum((self.get_submodule(name)(x) for name in taken), x)


def taken_by(rank: int, how: str) -> tuple[str, ...]:
    """FSDP2 gathers each weight on all ranks, so there all take the same ways; nobody ever takes the idle one."""
    return ("left",) if how == "sharded" or rank % 2 == 0 else ("left", "right")


def unused(mesh: Shape, how: str, pieces: int) -> Record:
    """The gradients that are not None after a step in which some weights served nobody, or not every rank.

    AdamW shrinks a weight that has a gradient, even of zeros, and leaves one alone that has None.
    """
    model = seeded(Branches)
    batches, names = noise(2 * pieces, 8).chunk(pieces), list(dict(model.named_parameters()))
    if not mesh:
        losses = [model(batch, taken_by(rank, how)).square().mean() for rank, batch in enumerate(batches)]
        torch.stack(losses).mean().backward()
    else:
        rank = dist.get_rank()
        if how == "sharded":
            fully_shard(model, mesh=init_device_mesh(MESH, mesh))
        wrapped = DistributedDataParallel(model, find_unused_parameters=True) if how == "replicated" else model
        wrapped(batches[rank], taken_by(rank, how)).square().mean().backward()
        if how == "by hand":
            average_what_anyone_has(model)
    torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1).step()
    parts = dict(zip(names, model.parameters(), strict=True))
    found = {f"gradient of {name}": whole(part.grad) for name, part in parts.items() if part.grad is not None}
    return {**found, **learnt(model)}


def different_ways(mesh: Shape) -> None:
    """FSDP2, and rank 0 alone takes another way: it has more gradients to bring than its peers."""
    model = seeded(Branches)
    fully_shard(model, mesh=init_device_mesh(MESH, mesh))
    taken = ("left", "right") if dist.get_rank() == 0 else ("left",)
    model(noise(2, 8), taken).sum().backward()


def average_what_anyone_has(model: nn.Module) -> None:
    """Each gradient that at least one rank has; without the first all-reduce, the ranks would not agree on which."""
    there = torch.tensor([part.grad is not None for part in model.parameters()], dtype=torch.int32)
    dist.all_reduce(there, dist.ReduceOp.MAX)
    for part, anyone in zip(model.parameters(), there.tolist(), strict=True):
        if anyone:
            part.grad = torch.zeros_like(part) if part.grad is None else part.grad
            dist.all_reduce(part.grad, dist.ReduceOp.AVG)
