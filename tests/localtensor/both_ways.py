"""One function, run by rank threads and in lockstep: what it returns on each rank must be the same, bit for bit."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import localtensor as lt
from localtensor._util import ambient
from localtensor.lockstep.mode import LocalTensorMode, rank_map
from localtensor.lockstep.values.local_tensor import LocalTensor
from localtensor.lockstep.values.rank_int import is_rank_int, on_rank


def here(make: Callable[[int], Tensor]) -> Tensor:
    """What `make(rank)` gives for this rank, or in lockstep for each."""
    return rank_map(make) if ambient.lockstep() is not None else make(dist.get_rank())


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Different ones on each rank."""

    def make(rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        if dtype.is_floating_point or dtype.is_complex:
            return torch.randn(shape, generator=generator, dtype=dtype)
        return torch.randint(0, 2 if dtype == torch.bool else 7, shape, generator=generator, dtype=dtype)

    return here(make)


def of_rank(value: Any, rank: int) -> Any:
    """What a rank has of a result."""
    if isinstance(value, LocalTensor):
        return value.on(rank) if rank in value.ranks else None
    if isinstance(value, Tensor) and hasattr(value, "elem"):  # an AsyncCollectiveTensor
        return of_rank(value.elem, rank)
    if is_rank_int(value):
        return on_rank(value, rank)
    if isinstance(value, dict):
        return {key: of_rank(each, rank) for key, each in value.items()}
    return type(value)([of_rank(each, rank) for each in value]) if isinstance(value, list | tuple) else value


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        alike = one.dtype == other.dtype and one.shape == other.shape
        return alike and torch.equal(_bits(one), _bits(other))
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


def _bits(x: Tensor) -> Tensor:
    return x.detach().contiguous().reshape(-1).view(torch.uint8)


def check_both_ways(program: Callable[[], Any], ranks: int = 4) -> Any:
    """Asserts it; the answer is what lockstep gave."""
    threads = lt.run(program, ranks=ranks, leftovers="ignore").values
    with LocalTensorMode(ranks):
        found = program()
    for rank, want in enumerate(threads):
        got = of_rank(found, rank)
        assert same(got, want), f"rank {rank}: lockstep {got}, threads {want}"
    return found
