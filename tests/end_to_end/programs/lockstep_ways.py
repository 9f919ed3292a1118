"""One program run in lockstep, and what each rank would have returned: to be held against `lt.run` on rank threads."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

import localtensor as lt
from localtensor.lockstep.mode import LocalTensorMode
from localtensor.lockstep.values.local_tensor import LocalTensor
from localtensor.lockstep.values.rank_int import is_rank_int, on_rank, rank_int
from tests.device import DEVICE

Program = Callable[..., Any]


def in_lockstep(program: Program, *args: Any, ranks: int) -> list[Any]:
    """What the program returns for each rank; a list as an argument has an entry for each rank, as for `lt.run`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        with LocalTensorMode(ranks):
            found = program(*(rank_int(arg) if isinstance(arg, list) else arg for arg in args))
    return [of_rank(found, rank) for rank in range(ranks)]


def of_rank(value: Any, rank: int) -> Any:
    """What a rank has of it: its own tensor where ranks differ, and the value itself where they do not."""
    value = value.wait() if isinstance(value, AsyncCollectiveTensor) else value
    if isinstance(value, DTensor):
        spec = value._spec
        return {"local": of_rank(value._local_tensor, rank), "placements": spec.placements, "shape": tuple(spec.shape)}
    if isinstance(value, LocalTensor):
        return value.on(rank).detach_() if rank in value.ranks else None
    if isinstance(value, Tensor):
        return value.detach()
    if is_rank_int(value):
        return on_rank(value, rank) if value.node.held is None or value.node.held[rank] else None
    if isinstance(value, dict):
        return {key: of_rank(item, rank) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [of_rank(item, rank) for item in value]
    return value


def on_threads(program: Program, *args: Any, ranks: int) -> list[Any]:
    """What each rank returns on rank threads, in the same form."""
    done = lt.run(_of_here, program, *args, ranks=ranks, device=DEVICE)
    return [done[rank] for rank in range(ranks)]


def _of_here(program: Program, *args: Any) -> Any:
    torch.manual_seed(0)
    return of_rank(program(*args), -1)


FEW_BITS = {torch.float64: 1e-11, torch.float32: 1e-4}  # of products of matrices, whose sums are of another order


def assert_bits(mine: Any, theirs: Any, where: str = "", *, exact: bool = True) -> None:
    """Equal to the last bit, shape and dtype included; or to the last few."""
    assert type(mine) is type(theirs), f"{where}: {type(mine)} in lockstep, {type(theirs)} on threads"
    if isinstance(mine, Tensor):
        facts = [(x.dtype, tuple(x.shape), x.requires_grad) for x in (mine, theirs)]
        assert facts[0] == facts[1], f"{where}: {facts[0]} in lockstep, {facts[1]} on threads"
        close = 0 if exact else FEW_BITS.get(mine.dtype, 0)
        same = torch.equal(bits(mine), bits(theirs)) or (close and torch.allclose(mine, theirs, rtol=close, atol=close))
        assert same, f"{where}: {mine} in lockstep, {theirs} on threads"
    elif isinstance(mine, dict):
        assert list(mine) == list(theirs), where
        for key in mine:
            assert_bits(mine[key], theirs[key], f"{where}[{key!r}]", exact=exact)
    elif isinstance(mine, list | tuple):
        assert len(mine) == len(theirs), where
        for index, pair in enumerate(zip(mine, theirs)):
            assert_bits(*pair, f"{where}[{index}]", exact=exact)
    else:
        assert mine == theirs or (mine != mine and theirs != theirs), f"{where}: {mine!r}, {theirs!r} on threads"


def bits(x: Tensor) -> Tensor:
    """The bytes of a tensor's values, so that nan equals nan and 0.0 not -0.0."""
    return torch.empty(x.numel(), dtype=x.dtype).copy_(x.reshape(-1)).view(torch.uint8)


def assert_both(program: Program, *args: Any, ranks: int, exact: bool = True) -> list[Any]:
    """Lockstep gives what rank threads give, on every rank, to the last bit or the last few.  Returns it."""
    mine, theirs = in_lockstep(program, *args, ranks=ranks), on_threads(program, *args, ranks=ranks)
    for rank in range(ranks):
        assert_bits(mine[rank], theirs[rank], f"rank {rank}", exact=exact)
    return mine
