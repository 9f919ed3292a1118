"""What each op of `torch.ops.symm_mem` computes: pure functions of what the ranks bring, in group order.

Each returns what each rank gets.  The kernels compute the same by one-sided accesses.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

Held = Sequence[Tensor]


def fold(held: Held, op: str = "sum", *, wide: bool = False) -> Tensor:
    """The reduction, in group order and in the tensors' own dtype, as the kernels add.

    With `wide`, as instructions of multicast memory add: bfloat16 in float32, rounded once.

    >>> fold([torch.tensor([1.0]), torch.tensor([2.0])], "avg")
    tensor([1.5000])
    """
    dtype = held[0].dtype
    total = held[0].float() if wide and dtype == torch.bfloat16 else held[0].clone()
    for x in held[1:]:
        total += x
    return (total / len(held) if op == "avg" else total).to(dtype)


def all_gather(held: Held, dim: int = 0) -> list[Tensor]:
    return [torch.cat(list(held), dim) for _ in held]


def reduce_scatter(held: Held, op: str = "sum", dim: int = 0) -> list[Tensor]:
    """Rank i gets the i-th of equal parts along `dim`, reduced."""
    parts = [x.chunk(len(held), dim) for x in held]
    return [fold([each[rank] for each in parts], op) for rank in range(len(held))]


def broadcast(held: Held, root: int) -> list[Tensor]:
    return [held[root].clone() for _ in held]


def all_to_all(held: Held) -> list[Tensor]:
    """Rank i gets the i-th of equal parts of each rank."""
    parts = [x.chunk(len(held)) for x in held]
    return [torch.cat([each[rank] for each in parts]) for rank in range(len(held))]


def all_gather_matmul(held: Held, weights: Sequence[Held], dim: int = 0) -> list[tuple[Tensor, list[Tensor]]]:
    """The gathered tensor, and its product with each of the rank's weights."""
    return [(whole, [whole @ B for B in mine]) for whole, mine in zip(all_gather(held, dim), weights)]


def matmul_reduce_scatter(held: Held, weights: Held, op: str = "sum", dim: int = 0) -> list[Tensor]:
    return reduce_scatter([A @ B for A, B in zip(held, weights)], op, dim)


Routed = tuple[Tensor, Tensor, Tensor]  # the rows that a rank receives, their splits, their offsets


def all_to_all_v(held: Held, splits: Held) -> list[Routed]:
    """Rank i gets the i-th part of each rank's rows, of `splits[rank][i]` rows.

    >>> rows = [torch.arange(3), torch.arange(10, 13)]
    >>> all_to_all_v(rows, [torch.tensor([1, 2]), torch.tensor([3, 0])])[0]
    (tensor([ 0, 10, 11, 12]), tensor([1, 3]), tensor([0, 1]))
    """
    return all_to_all_v_2d(held, splits, 1, pads=False)


def all_to_all_v_2d(held: Held, splits: Held, align: int = 1, *, pads: bool = True) -> list[Routed]:
    """Rank-major rows to expert-major rows: each rank has rows for each expert of each rank, in the order of the experts.

    A rank receives, for each of its experts, the rows of each rank.  The rows of an expert begin at a multiple of
    `align`, and an expert without rows takes `align` rows; rows between experts are 0 here.
    """
    ranks = len(held)
    experts = splits[0].numel() // ranks
    found = []
    for rank in range(ranks):
        counts = [[int(splits[source][rank * experts + e]) for source in range(ranks)] for e in range(experts)]
        begins = [[0, *accumulate(int(n) for n in splits[source])] for source in range(ranks)]
        rows, offsets, at = [], [], 0
        for e in range(experts):
            first = at
            for source in range(ranks):
                begin = begins[source][rank * experts + e]
                rows.append(held[source][begin : begin + counts[e][source]])
                offsets.append(at)
                at += counts[e][source]
            taken = max(-(-(at - first) // align) * align, align) if pads else at - first
            rows.append(held[0].new_zeros(first + taken - at, *held[0].shape[1:]))
            at = first + taken
        found.append((torch.cat(rows), torch.tensor(counts).reshape(-1), torch.tensor(offsets)))
    return found


def all_to_all_v_2d_offset(held: Held, splits: Held, offsets: Held) -> list[Routed]:
    """Expert-major rows back to rank-major rows; each part begins where `offsets` says."""
    ranks = len(held)
    experts = splits[0].numel() // ranks
    found = []
    for rank in range(ranks):
        rows, counts = [], []
        for source in range(ranks):
            for e in range(experts):
                at = e * ranks + rank
                begin, count = int(offsets[source][at]), int(splits[source][at])
                rows.append(held[source][begin : begin + count])
                counts.append(count)
        found.append((torch.cat(rows), torch.tensor(counts), torch.tensor([0, *accumulate(counts)][:-1])))
    return found
