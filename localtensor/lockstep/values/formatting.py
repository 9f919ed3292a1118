"""A LocalTensor in print: each different value once, with the ranks that hold it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from localtensor.errors.formatting import rank_names
from localtensor.lockstep.values.partition import Partition
from localtensor.lockstep.values.stacks import equal_once

MOST = 12  # values that are printed; a thousand are not for reading


def shown(values: Sequence[tuple[list[int], Tensor]], held: Partition, requires_grad: bool) -> str:
    """The printed form of a LocalTensor: a line for each value, or the one value of all ranks.

    Values that have come to be equal have one line, though they are held apart.

    >>> from localtensor.lockstep.values.partition import by_value
    >>> print(shown([([0, 1], torch.tensor(1)), ([2], torch.tensor(5))], by_value([1, 1, 5]), False))
    LocalTensor(3 ranks, 2 different values,
      ranks 0, 1: tensor(1),
      rank 2: tensor(5))
    """
    values = _equal_once(values)
    ranks = sum(len(holders) for holders, _ in values)
    of = f"{ranks} rank{'s' if ranks != 1 else ''}"
    if ranks < held.world:
        of = f"{rank_names([rank for holders, _ in values for rank in holders])} of {held.world}"
    tail = ", requires_grad=True" if requires_grad else ""
    if len(values) == 1:
        return f"LocalTensor({of}, the same on all: {_indented(values[0][1], 2)}{tail})"
    lines = [f"  {rank_names(holders)}: {_indented(value, 2)}" for holders, value in values[:MOST]]
    if len(values) > MOST:
        lines.append(f"  and {len(values) - MOST} more: x.on(rank) gives each")
    body = ",\n".join(lines)
    return f"LocalTensor({of}, {len(values)} different values,\n{body}{tail})"


def _equal_once(values: Sequence[tuple[list[int], Tensor]]) -> list[tuple[list[int], Tensor]]:
    found: dict[int, tuple[list[int], Tensor]] = {}
    dense = [value.contiguous() if value.layout is torch.strided else value for _, value in values]
    for (holders, value), same in zip(values, equal_once(dense), strict=True):
        found.setdefault(id(same), ([], value))[0].extend(holders)
    return [(sorted(holders), value) for holders, value in found.values()]


def _indented(value: Tensor, by: int) -> str:
    return repr(value).replace("\n", "\n" + " " * by)
