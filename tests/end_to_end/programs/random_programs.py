"""Programs that draw random numbers: each rank has generators of its own, as each process has.

On the CPU, DTensor keeps no account of what the ranks have drawn (torch.distributed.tensor._random: "only supports
cuda/cuda-like devices").  There, a rank fills its own piece from its own generator; the one-device twins below do
the same, piece by piece.
"""

import math
import random
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.tensor
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.device import MESH
from tests.end_to_end.programs.tensor_parallel_programs import Record, Shape, whole
from tests.end_to_end.programs.transformer import WIDTH, Feedforward, noise, seeded


def gradient_of_dropout(x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    functional.dropout(x, 0.4).sum().backward()
    return x.grad


SHAPE = (7, 6)  # over 4 ranks: 2, 2, 2 and 1 rows; 2, 2, 2 and 0 columns

DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal_": lambda x: nn.init.normal_(x, 1.0, 2.0),
    "uniform_": lambda x: nn.init.uniform_(x, -1.0, 3.0),
    "trunc_normal_": lambda x: nn.init.trunc_normal_(x, std=0.5, a=-1, b=1),
    "bernoulli_": lambda x: x.bernoulli_(0.3),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 100),
    "dropout": lambda x: functional.dropout(torch.ones_like(x), 0.4),
    "its gradient": gradient_of_dropout,
}


def draws(dim: int | None, seed: int) -> Record:
    """This rank's piece of a DTensor, filled in every way; the last is a plain tensor, drawn after all of them."""
    mesh = init_device_mesh(MESH, (dist.get_world_size(),))
    placements = [Replicate() if dim is None else Shard(dim)]
    torch.manual_seed(seed)
    drawn = {}
    for name, draw in DRAWS.items():
        drawn[name] = draw(distribute_tensor(torch.zeros(SHAPE), mesh, placements)).to_local()
    return {**drawn, "afterwards": torch.rand(3)}


def draws_of_piece(piece: Tensor, seed: int) -> Record:
    """The same by plain torch: what a rank draws that holds this piece of the zeros."""
    torch.manual_seed(seed)
    return {**{name: draw(piece.clone()) for name, draw in DRAWS.items()}, "afterwards": torch.rand(3)}


def kaiming(dim: int) -> Tensor:
    """An init whose spread depends on the number of columns: DTensor counts those of the whole weight."""
    mesh = init_device_mesh(MESH, (dist.get_world_size(),))
    torch.manual_seed(dist.get_rank())
    return nn.init.kaiming_uniform_(distribute_tensor(torch.zeros(SHAPE), mesh, [Shard(dim)])).to_local()


def kaiming_alone(piece: Tensor, rank: int) -> Tensor:
    torch.manual_seed(rank)
    bound = math.sqrt(6 / SHAPE[1])
    return piece.clone().uniform_(-bound, bound)


def made_by_factory() -> DTensor:
    mesh = init_device_mesh(MESH, (dist.get_world_size(),))
    return torch.distributed.tensor.rand(8, 2, device_mesh=mesh, placements=[Shard(0)])


def fresh_weights(how: str) -> Record:
    """A model that is made on "meta", cut there, and drawn only then: no rank ever holds it whole."""
    mesh = init_device_mesh(MESH, (dist.get_world_size(),))
    with torch.device("meta"):
        model = Feedforward()
    if how == "sharded":
        fully_shard(model, mesh=mesh)
    else:
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    model.to_empty(device=MESH)
    torch.manual_seed(dist.get_rank())
    return {name: filled(part).to_local().detach() for name, part in model.named_parameters()}


def filled(part: Tensor) -> Tensor:
    return nn.init.normal_(part) if part.dim() > 1 else nn.init.uniform_(part)


def fresh_weights_alone(how: str, rank: int, ranks: int) -> Record:
    """Plain pieces of the same shapes, drawn in the same order."""
    torch.manual_seed(rank)
    dims = {"up.weight": 0, "up.bias": 0, "down.weight": 0 if how == "sharded" else 1, "down.bias": 0}
    pieces = {name: part.detach().chunk(ranks, dims[name])[rank] for name, part in Feedforward().named_parameters()}
    if how != "sharded":
        pieces["down.bias"] = torch.empty(WIDTH)  # each rank has all of it
    torch.manual_seed(rank)
    return {name: filled(piece.clone()) for name, piece in pieces.items()}


def three_generators(rounds: int) -> list[list[float]]:
    """What torch, random and numpy give this rank, round by round, with a collective and other ranks in between."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    random.seed(rank)
    np.random.seed(rank)
    drawn = []
    for _ in range(rounds):
        drawn.append([torch.rand(()).item(), random.random(), float(np.random.rand())])
        dist.all_reduce(torch.ones(1))
    return drawn


def three_generators_alone(rank: int, rounds: int) -> list[list[float]]:
    torch.manual_seed(rank)
    random.seed(rank)
    np.random.seed(rank)
    return [[torch.rand(()).item(), random.random(), float(np.random.rand())] for _ in range(rounds)]


class Forgetful(Feedforward):
    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(super().forward(functional.dropout(x, 0.3)), 0.3)


def dropout(mesh: Shape, seed: int, backward: str) -> Record:
    """A tensor-parallel layer with dropout around it; its backward remembers, or it recomputes (checkpointing).

    Then the second run must draw what the first drew, although other ranks have drawn in between.  All ranks have
    the same seed, so that they drop the same: what they hold there is replicated.
    """
    model = seeded(Forgetful)
    if mesh:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, init_device_mesh(MESH, mesh), plan)
    x = noise(5, 8).requires_grad_()
    torch.manual_seed(seed)
    out = checkpoint(model, x, use_reentrant=False) if backward == "recomputes" else model(x)
    out.square().sum().backward()
    parts = {name: whole(part.grad) for name, part in model.named_parameters()}
    return {"out": whole(out), "gradient of x": whole(x.grad), **parts, "afterwards": torch.rand(2)}
