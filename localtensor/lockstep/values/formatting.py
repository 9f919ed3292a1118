"""Printed forms of LocalTensors and of values that differ by rank, and the answers to torch's questions about them."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import Tensor

from localtensor._util import ambient
from localtensor._util.call_sites import place_of_frame
from localtensor._util.events import Place
from localtensor.errors import NotInLockstep, RanksDiverge
from localtensor.errors.base import rank_names
from localtensor.lockstep.values.partition import NOWHERE, Array, Partition
from localtensor.lockstep.values.stacks import deduplicate

MOST_VALUES = 12  # values that are printed


def format_tensor(values: Sequence[tuple[list[int], Tensor]], held: Partition, requires_grad: bool) -> str:
    """The printed form of a LocalTensor: a line for each value, or the one value of all ranks.

    Equal values share a line, also where they are stored apart.

    >>> from localtensor.lockstep.values.partition import Array, by_value
    >>> print(format_tensor([([0, 1], torch.tensor(1)), ([2], torch.tensor(5))], by_value([1, 1, 5]), False))
    LocalTensor(3 ranks, 2 different values,
      ranks 0, 1: tensor(1),
      rank 2: tensor(5))
    """
    equal: dict[int, tuple[list[int], Tensor]] = {}
    dense = [value.contiguous() if value.layout is torch.strided else value for _, value in values]
    for (holders, value), same in zip(values, deduplicate(dense), strict=True):
        equal.setdefault(id(same), ([], value))[0].extend(holders)
    values = [(sorted(holders), value) for holders, value in equal.values()]
    ranks = sum(len(holders) for holders, _ in values)
    of = f"{ranks} rank{'s' if ranks != 1 else ''}"
    if ranks < held.world:
        of = f"{rank_names([rank for holders, _ in values for rank in holders])} of {held.world}"
    tail = ", requires_grad=True" if requires_grad else ""
    if len(values) == 1:
        return f"LocalTensor({of}, the same on all: {_indented(values[0][1])}{tail})"
    lines = [f"  {rank_names(holders)}: {_indented(value)}" for holders, value in values[:MOST_VALUES]]
    if len(values) > MOST_VALUES:
        lines.append(f"  and {len(values) - MOST_VALUES} more: x.on(rank) gives each")
    body = ",\n".join(lines)
    return f"LocalTensor({of}, {len(values)} different values,\n{body}{tail})"


def _indented(value: Tensor) -> str:
    return repr(value).replace("\n", "\n  ")


FLOATS = "it would be a float of its own on each rank, and only ints can be that"
MAX_LENGTH = 100  # characters
MOST_INTS = 8  # of more values, the first three and the last


def values_by_rank(values: Array, held: Array | None) -> dict[int, Any]:
    """The value of each rank that holds one.

    >>> values_by_rank(np.array([5, 0, 7]), np.array([True, False, True]))
    {0: 5, 2: 7}
    """
    listed = values.tolist()
    return dict(enumerate(listed)) if held is None else {int(rank): listed[rank] for rank in np.flatnonzero(held)}


def format_ints(values: Array, held: Array | None) -> str:
    """The values in rank order, a dash for a rank that holds none.

    >>> format_ints(np.arange(4), np.arange(4) != 1), format_ints(np.arange(256), None)
    ('0, -, 2, 3', '0, 1, 2, ... 255')
    """
    world = len(values)
    ranks = [*range(world)] if world <= MOST_INTS else [0, 1, 2, world - 1]
    texts = [str(values[rank]) if held is None or held[rank] else "-" for rank in ranks]
    return ", ".join(texts if world <= MOST_INTS else [*texts[:3], f"... {texts[3]}"])


def shorten(text: str) -> str:
    """A text cut to `MAX_LENGTH` characters.

    >>> len(shorten("x" * 200))
    100
    """
    return text if len(text) <= MAX_LENGTH else f"{text[: MAX_LENGTH - 3]}..."


def user_place() -> Place | None:
    """The line of user code that is running."""
    return place_of_frame(sys._getframe(1))


_padding: ContextVar[bool] = ContextVar("padding", default=False)


@contextmanager
def as_if_padded() -> Iterator[None]:
    """While inside, a size is > 0 if it is on any rank, and sizes are equal only if they are on all ranks.

    For code that pads shorter tensors: padding changes nothing on ranks that need none.
    """
    before = _padding.set(True)
    try:
        yield
    finally:
        _padding.reset(before)


def keeps_grad(words: str) -> bool:
    """Whether autograd asks if it may keep a gradient without a copy; either answer is correct."""
    node = torch._C._current_autograd_node() if words.endswith(" != 1") else None
    return node is not None and node.name() == "torch::autograd::AccumulateGrad"


Branches = Callable[[Any, Array, Array | None], bool | None]
BRANCHES: list[Branches] = []
"""The function that runs an `if` statement for some ranks, see patches/branches.py."""


Items = Callable[[Any, Array, Array | None], int | None]
ITEMS: list[Items] = []
"""The function that finds the item of a list at an index of each rank, see patches/branches.py."""


Choices = Callable[[Any, Array, Array | None], int | None]
CHOICES: list[Choices] = []
"""The function that runs an assignment for each kind of rank, and returns the rank whose value it takes meanwhile, see patches/branches.py."""


def one_answer(words: str, values: Array, held: Array | None) -> bool:
    """The answer of all ranks to a question on which they differ.

    Raises `RanksDiverge` unless the ranks that run now agree, within `as_if_padded`, and where the `if` statement that asks can be
    run for those ranks alone on which it holds.
    """
    if _padding.get() and (words.endswith(" > 0") or " == " in words):
        return words.endswith(" > 0")
    if (here := value_here(values, held)) is not None:
        return bool(here)
    for run in BRANCHES:
        if (answer := run(ambient.lockstep(), values, held)) is not None:
            return answer
    raise divergence("bool", words, values, held)


def one_int(values: Array, held: Array | None) -> int:
    """The int of the ranks that run now.  Raises `RanksDiverge` where they differ."""
    here: int | None = value_here(values, held)
    if here is not None:
        return here
    for find in ITEMS:
        if (place := find(ambient.lockstep(), values, held)) is not None:
            return place
    raise divergence("int", "value", values, held)


def one_float(words: str, values: Array, held: Array | None) -> float:
    """The float of the ranks that run now; of one of them, where the assignment that asks for it runs for each kind of rank.

    Raises `NotInLockstep` where they differ.
    """
    if (here := value_here(values, held)) is not None:
        return float(here)
    mine = values if held is None else values[held]
    if (mine == mine[0]).all():
        return float(mine[0])
    for choose in CHOICES:
        kinds = np.unique(values, return_inverse=True)[1].reshape(-1)
        if (rank := choose(ambient.lockstep(), kinds, held)) is not None:
            return float(values[rank])
    raise NotInLockstep(words, FLOATS)


TEXTS: list[Callable[[], str | None]] = []
"""The function that finds the expression which computes with a text, see text_uses.py."""


def node_text(kind: str, values: Array, held: Array | None) -> str:
    """`RankInts(0, 1)`, or the one value of the ranks that run now.

    Raises `NotInLockstep` where the user's code compares this text, or looks something up by it: no rank has it.
    """
    here = value_here(values, held)
    if here is not None:
        return str(here)
    text = f"{kind}({format_ints(values, held)})"
    if ambient.lockstep() is not None:
        for find in TEXTS:
            if (use := find()) is not None:
                raise NotInLockstep(
                    f"`{use}`, of the text of {text}", "it would be another text on each rank, and is this one on all"
                )
    return text


def value_here(values: Array, held: Array | None) -> Any:
    """The value of the ranks for which the control flow runs now, if it runs for some ranks only and these have one; else None."""
    mode = ambient.lockstep()
    if mode is None or mode.groups.only is None:
        return None
    here = mode.groups.only.row_of != NOWHERE
    found = values[here if held is None else here & held]
    return found[0].item() if found.size and bool((found == found[0]).all()) else None


def divergence(call: str, words: str, values: Array, held: Array | None) -> RanksDiverge:
    """The error for a value that differs between ranks where torch needs one, at the line of user code that runs."""
    return RanksDiverge(call, words, values_by_rank(values, held), user_place())
