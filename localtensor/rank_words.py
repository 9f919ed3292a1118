"""Values that differ by rank, in the words of a message."""

import sys
from typing import Any

import numpy as np

from localtensor.events import Place
from localtensor.frames import place_of

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
