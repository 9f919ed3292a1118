"""Tensors from one placement to the next, uneven, strided and complex ones, and their gradients on the way back."""

from collections.abc import Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

import localtensor as lt
from tests.device import MESH, integers

Case: TypeAlias = tuple[tuple[int, ...], torch.dtype, Sequence[str]]  # shape, dtype, placements from first to last


def placements(text: str) -> tuple[Placement, ...]:
    return tuple(lt.parse(part) for part in text.split(", "))


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Small whole numbers, so that sums are exact; complex ones turn when they are conjugated."""
    real, imaginary = integers(-9, 10, (2, *shape), seed)
    return torch.complex(real.double(), imaginary.double()).to(dtype) if dtype.is_complex else real.to(dtype)


def contribution(x: Tensor, rank: int, ranks: int) -> Tensor:
    """One rank's part of a sum, all of which make x."""
    return x * (rank + 1) if rank + 1 < ranks else x - x * (ranks * (ranks - 1) // 2)


def walks(mesh_shape: tuple[int, ...], cases: tuple[Case, ...]) -> list[list[Tensor]]:
    """For each case, what this rank has after each step of the path, the first included, and the whole in the end."""
    mesh = init_device_mesh(MESH, mesh_shape)
    return [_walk(mesh, *case) for case in cases]


def _walk(mesh: DeviceMesh, shape: tuple[int, ...], dtype: torch.dtype, path: Sequence[str]) -> list[Tensor]:
    x = values(shape, dtype)
    if "P(sum)" in path[0]:
        mine = contribution(x, dist.get_rank(), dist.get_world_size())
        here = DTensor.from_local(mine, mesh, placements(path[0]), run_check=False)
    else:
        here = distribute_tensor(x, mesh, placements(path[0]), src_data_rank=None)
    seen = [here.to_local()]
    for step in path[1:]:
        here = here.redistribute(mesh, placements(step))
        seen.append(here.to_local())
    return [*seen, here.full_tensor()]


def there_and_back(mesh_shape: tuple[int, ...], cases: tuple[Case, ...]) -> list[dict[str, object]]:
    """For each case, the gradient at this rank's piece at the start of the path, from weights given at its end."""
    mesh = init_device_mesh(MESH, mesh_shape)
    gradients = [_there_and_back(mesh, *case) for case in cases]
    return [
        {"placements": ", ".join(map(lt.short, gradient.placements)), "local": gradient.to_local()}
        for gradient in gradients
    ]


def _there_and_back(mesh: DeviceMesh, shape: tuple[int, ...], dtype: torch.dtype, path: Sequence[str]) -> DTensor:
    start = distribute_tensor(values(shape, dtype), mesh, placements(path[0]), src_data_rank=None).requires_grad_()
    here = start
    for step in path[1:]:
        here = here.redistribute(mesh, placements(step))
    here.backward(distribute_tensor(values(shape, dtype, seed=1), mesh, placements(path[-1]), src_data_rank=None))
    return start.grad


def pieces(mesh_shape: tuple[int, ...], x: Tensor, placed: str) -> list[Tensor]:
    """What each rank has by plain arithmetic; for the strided shard of two axes, in the other order of axes."""
    where = placements(placed)
    if "SS" in placed:
        rows, columns = mesh_shape
        turned = pieces((columns, rows), x, "S(0), S(0)")
        return [turned[column * rows + row] for row in range(rows) for column in range(columns)]
    return lt.split(x, lt.Spec(lt.Mesh.of(*mesh_shape), where, tuple(x.shape), x.dtype))
