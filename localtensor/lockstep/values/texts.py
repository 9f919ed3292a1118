"""Values that differ by rank, in the words of a message."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch

from localtensor._util.call_sites import place_of
from localtensor._util.events import Place
from localtensor.errors import RanksDiverge

LONGEST = 100  # characters
MOST_SHOWN = 8  # of more values, the first three and the last


def by_rank(values: Any, held: Any) -> dict[int, Any]:
    """The value of each rank that holds one.

    >>> by_rank(np.array([5, 0, 7]), np.array([True, False, True]))
    {0: 5, 2: 7}
    """
    listed = values.tolist()
    return dict(enumerate(listed)) if held is None else {int(rank): listed[rank] for rank in np.flatnonzero(held)}


def short(values: Any, held: Any) -> str:
    """The values in rank order, a dash for a rank that holds none.

    >>> short(np.arange(4), np.arange(4) != 1), short(np.arange(256), None)
    ('0, -, 2, 3', '0, 1, 2, ... 255')
    """
    world = len(values)
    ranks = [*range(world)] if world <= MOST_SHOWN else [0, 1, 2, world - 1]
    texts = [str(values[rank]) if held is None or held[rank] else "-" for rank in ranks]
    return ", ".join(texts if world <= MOST_SHOWN else [*texts[:3], f"... {texts[3]}"])


def cut(text: str) -> str:
    """A text that is not too long.

    >>> len(cut("x" * 200))
    100
    """
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def place_here() -> Place | None:
    """The user's line that is being run."""
    return place_of(sys._getframe(1))


_padding: ContextVar[bool] = ContextVar("padding", default=False)


@contextmanager
def as_if_padded() -> Iterator[None]:
    """While inside, a size counts as more than 0 if it is on any rank, and sizes as equal only if they are on all.

    For code that pads what is shorter: what it does for the ranks that need it changes nothing on the others.
    """
    before = _padding.set(True)
    try:
        yield
    finally:
        _padding.reset(before)


def accumulates(words: str) -> bool:
    """Whether it is the question of autograd whether a gradient may be kept as it is, or is copied: of no importance."""
    node = torch._C._current_autograd_node() if words.endswith(" != 1") else None
    return node is not None and node.name() == "torch::autograd::AccumulateGrad"


def one_answer(words: str, values: Any, held: Any) -> bool:
    """What all ranks answer to a question.  Raises `RanksDiverge`: that is asked where they differ."""
    if _padding.get() and (words.endswith(" > 0") or " == " in words):
        return words.endswith(" > 0")
    raise RanksDiverge("bool", words, by_rank(values, held), place_here())
