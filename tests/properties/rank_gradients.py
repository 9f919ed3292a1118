"""Chains of linear collectives with a backward, and their twin: the matrix of the whole program, column by column."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from hypothesis import strategies as st
from torch import Tensor

import localtensor as lt

ROWS = 4


@dataclass(frozen=True)
class Link:
    """The members add what the collective `name` makes of their vectors; the root is a place in the group."""

    name: str
    group: int
    root: int
    keep: int


@dataclass(frozen=True)
class Chain:
    groups: tuple[tuple[int, ...], ...]
    links: tuple[Link, ...]


def pieces(v: Any, many: int) -> list[Any]:
    return [v * (i + 1) for i in range(many)]


def weighted(parts: Any) -> Any:
    return sum((i + 2) * part for i, part in enumerate(parts))


# What a member makes of its vector `v`, by torch: its place in the group, how many they are, the root, the group.
TORCH: dict[str, Callable[[Tensor, int, int, int, Any], Tensor]] = {
    "nn.all_reduce": lambda v, me, many, root, g: differentiable.all_reduce(v, group=g),
    "nn.broadcast": lambda v, me, many, root, g: differentiable.broadcast(v, root, g),
    "nn.reduce": lambda v, me, many, root, g: differentiable.reduce(v, root, group=g) * (me == root),
    "nn.all_gather": lambda v, me, many, root, g: weighted(differentiable.all_gather(v, g)),
    "nn.gather": lambda v, me, many, root, g: weighted(differentiable.gather(v, root, g)) * (me == root),
    "nn.scatter": lambda v, me, many, root, g: differentiable.scatter(pieces(v, many), root, g),
    "nn.reduce_scatter": lambda v, me, many, root, g: differentiable.reduce_scatter(
        torch.zeros_like(v), pieces(v, many), group=g
    ),
    "nn.all_to_all": lambda v, me, many, root, g: weighted(
        differentiable.all_to_all([torch.zeros_like(v) for _ in range(many)], pieces(v, many), g)
    ),
    "nn.all_to_all_single": lambda v, me, many, root, g: weighted(
        differentiable.all_to_all_single(v.new_zeros(many * ROWS), torch.cat(pieces(v, many)), group=g).chunk(many)
    ),
    "all_reduce": lambda v, me, many, root, g: functional.all_reduce(v, "sum", g),
    "all_gather": lambda v, me, many, root, g: weighted(functional.all_gather_tensor_autograd(v, 0, g).chunk(many)),
    "all_gather dim 1": lambda v, me, many, root, g: weighted(
        functional.all_gather_tensor_autograd(v.reshape(ROWS, 1), 1, g).unbind(1)
    ),
    "reduce_scatter": lambda v, me, many, root, g: functional.reduce_scatter_tensor_autograd(
        torch.cat(pieces(v, many)), "sum", 0, g
    ),
    "all_to_all_single": lambda v, me, many, root, g: weighted(
        functional.all_to_all_single_autograd(torch.cat(pieces(v, many)), [ROWS] * many, [ROWS] * many, g).chunk(many)
    ),
}  # fmt: skip

# The same by numpy, of all members' vectors.
MEANT: dict[str, Callable[[list[Any], int, int], Any]] = {
    "all_reduce": lambda held, me, root: sum(held),
    "broadcast": lambda held, me, root: held[root],
    "reduce": lambda held, me, root: sum(held) * (me == root),
    "all_gather": lambda held, me, root: weighted(held),
    "gather": lambda held, me, root: weighted(held) * (me == root),
    "scatter": lambda held, me, root: held[root] * (me + 1),
    "reduce_scatter": lambda held, me, root: sum(v * (me + 1) for v in held),
    "all_to_all": lambda held, me, root: weighted([v * (me + 1) for v in held]),
    "all_to_all_single": lambda held, me, root: weighted([v * (me + 1) for v in held]),
}


@st.composite
def chains(draw: st.DrawFn) -> Chain:
    """torch.distributed.nn counts some roots within the group and some not: its groups begin with rank 0, 1, 2..."""
    ranks = draw(st.integers(1, 5))
    everyone = tuple(range(ranks))
    some = st.sets(st.sampled_from(everyone), min_size=1).map(lambda chosen: tuple(sorted(chosen)))
    groups = (everyone, *draw(st.lists(some, max_size=3)))
    links = []
    for _ in range(draw(st.integers(1, 5))):
        group = draw(st.integers(0, len(groups) - 1))
        first = groups[group] == tuple(range(len(groups[group])))
        name = draw(st.sampled_from([name for name in TORCH if first or not name.startswith("nn.")]))
        links.append(Link(name, group, draw(st.integers(0, len(groups[group]) - 1)), draw(st.integers(0, 3))))
    return Chain(groups, tuple(links))


def gradients(chain: Chain, schedule: Any) -> list[list[float]]:
    """Of the sum of all ranks' losses, in each rank's own leaf."""

    def body() -> list[float]:
        rank = dist.get_rank()
        groups = [dist.group.WORLD, *(dist.new_group(list(members)) for members in chain.groups[1:])]
        leaf = torch.arange(1.0, ROWS + 1, dtype=torch.float64, requires_grad=True)
        v = leaf * 1
        for link in chain.links:
            members = chain.groups[link.group]
            if rank in members:
                made = TORCH[link.name](v, members.index(rank), len(members), link.root, groups[link.group])
                v = v * link.keep + made
        (v * direction(rank)).sum().backward()
        return leaf.grad.tolist()

    return list(lt.run(body, ranks=len(chain.groups[0]), schedule=schedule, timeout=20, leftovers="ignore"))


def direction(rank: int) -> Tensor:
    return torch.tensor([(rank * 7 + i * 3) % 5 - 2 for i in range(ROWS)], dtype=torch.float64)


def forward(chain: Chain, states: list[Any]) -> list[Any]:
    for link in chain.links:
        members = chain.groups[link.group]
        meant = MEANT[link.name.removeprefix("nn.").removesuffix(" dim 1")]
        held = [states[rank] for rank in members]
        for me, rank in enumerate(members):
            states[rank] = held[me] * link.keep + meant(held, me, link.root)
    return states


def adjoint(chain: Chain) -> list[list[float]]:
    """One number of one leaf at a time: what it moves, times the direction of the loss."""
    ranks = len(chain.groups[0])
    found = []
    for rank in range(ranks):
        found.append([])
        for i in range(ROWS):
            moved = forward(chain, [np.eye(ROWS)[i] * (other == rank) for other in range(ranks)])
            found[-1].append(sum(float(moved[other] @ direction(other).numpy()) for other in range(ranks)))
    return found
