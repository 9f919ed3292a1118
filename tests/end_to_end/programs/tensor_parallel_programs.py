"""Tensor-parallel programs: each works on a mesh of any shape, and an empty shape, (), is one device and plain torch.

A rank returns whole tensors, so that its answers and those of one device have the same names and the same shapes.
"""

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional

from tests.device import MESH
from tests.end_to_end.programs.transformer import Attention, Block, Feedforward, Transformer, noise, seeded, tokens

Shape = tuple[int, ...]
Plan = dict[str, Any]
Record = dict[str, Tensor]


def whole(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach()


def gradients(model: nn.Module) -> Record:
    return {f"gradient of {name}": whole(part.grad) for name, part in model.named_parameters()}


def split(model: nn.Module, plan: Plan, mesh: Shape) -> nn.Module:
    return parallelize_module(model, init_device_mesh(MESH, mesh), plan) if mesh else model


def forward(logits: Tensor, target: Tensor, reduction: str) -> Tensor:
    return functional.cross_entropy(logits, target, reduction=reduction)


def backward(loss: Tensor) -> None:
    loss.backward(torch.ones_like(loss))


def forward_and_backward(model: nn.Module, x: Tensor) -> Record:
    out = model(x)
    backward(out.square().mean())
    return {"out": whole(out), "gradient of x": whole(x.grad), **gradients(model)}


def mlp(mesh: Shape) -> Record:
    """The classic: columns of the first weight, rows of the second, one all-reduce forward and one backward."""
    model = split(seeded(Feedforward), {"up": ColwiseParallel(), "down": RowwiseParallel()}, mesh)
    return forward_and_backward(model, noise(3, 5, 8).requires_grad_())


def uneven_mlp(mesh: Shape, hidden: int) -> Record:
    """Hidden units that the ranks cannot share evenly; the layer between the two must then stay a DTensor."""
    torch.manual_seed(0)
    plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
    model = split(Feedforward(hidden=hidden).double(), plan, mesh)
    return forward_and_backward(model, noise(3, 5, 8).requires_grad_())


ATTENTION_PLAN = {
    "query": ColwiseParallel(),
    "key": ColwiseParallel(),
    "value": ColwiseParallel(),
    "out": RowwiseParallel(),
}


def attention(mesh: Shape) -> Record:
    """Each rank has some of the heads."""
    return forward_and_backward(split(seeded(Attention), ATTENTION_PLAN, mesh), noise(3, 5, 8).requires_grad_())


def block_plan(prefix: str = "") -> Plan:
    """Between the blocks, and in its norms, a rank has some of the positions; inside, some of the hidden units."""
    along = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    plan = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(**along),
        **{f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
        "attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "feedforward_norm": SequenceParallel(),
        "feedforward": PrepareModuleInput(**along),
        "feedforward.up": ColwiseParallel(),
        "feedforward.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    return {prefix + name: style for name, style in plan.items()}


def sequence_parallel_block(mesh: Shape) -> Record:
    model = split(seeded(Block), block_plan(), mesh)
    x = noise(3, 4, 8).requires_grad_()
    if not mesh:
        return forward_and_backward(model, x)
    mine = distribute_tensor(x.detach(), init_device_mesh(MESH, mesh), [Shard(1)]).requires_grad_()
    out = model(mine.to_local())
    backward(out.square().sum() / x.numel())
    gathered = DTensor.from_local(out, mine.device_mesh, [Shard(1)])
    return {"out": whole(gathered), "gradient of x": whole(mine.grad), **gradients(model)}


def transformer_plan(head: ColwiseParallel, depth: int = 2) -> Plan:
    blocks = [block_plan(f"blocks.{number}.") for number in range(depth)]
    return {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        **{name: style for block in blocks for name, style in block.items()},
        "norm": SequenceParallel(),
        "head": head,
    }


def language_model(mesh: Shape, steps: int) -> Record:
    """A whole transformer learns: sequence parallel, and the loss from logits that no rank has in one piece.

    On CUDA torch takes `foreach=True` by default, which on torch 2.11 is wrong here on gloo processes, too.
    """
    head = ColwiseParallel(input_layouts=Shard(1), use_local_output=False)
    model = split(seeded(Transformer), transformer_plan(head), mesh)
    text, following = tokens(rows=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, foreach=False)
    losses = []
    with loss_parallel() if mesh else contextlib.nullcontext():
        for _ in range(steps):
            loss = functional.cross_entropy(model(text).flatten(0, 1), following.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(whole(loss))
    learnt = {name: whole(part) for name, part in model.named_parameters()}
    return {"losses": torch.stack(losses), **learnt}


def cross_entropy(mesh: Shape, reduction: str, dim: int, rows: int, ignored: int) -> Record:
    """The loss of logits that are cut along `dim`: 0 is the batch, 1 the classes, and then within loss_parallel."""
    logits, target = noise(rows, 12), torch.arange(rows) * 5 % 12
    target[:ignored] = -100
    if mesh:
        device_mesh = init_device_mesh(MESH, mesh)
        logits = distribute_tensor(logits, device_mesh, [Shard(dim)])
        target = distribute_tensor(target, device_mesh, [Shard(0) if dim == 0 else Replicate()])
    logits.requires_grad_()
    with loss_parallel() if mesh and dim == 1 else contextlib.nullcontext():
        loss = forward(logits, target, reduction)
        backward(loss)
    return {"loss": whole(loss), "gradient": whole(logits.grad)}


def collectives_of_block(mesh: Shape) -> dict[str, int]:
    """What a block takes there and back, by torch's own count."""
    with CommDebugMode() as counted:
        sequence_parallel_block(mesh)
    return {str(op).rpartition(".")[2].rstrip("_"): count for op, count in counted.get_comm_counts().items()}
