"""The sizes that the axes of a mesh can have: the ranks come first, and the last axis has as many as are left.

So any axis can go, and one rank after the other, without the numbers that were drawn for the rest meaning another mesh.
Values that stand in a table several times come more often, and are as simple as the first of them.
"""

from __future__ import annotations

import functools

AXES = "abcdefgh"
"""What axes are called if nobody names them."""
HALVES = ("lower", "lower", "lower", "lower", "lower", "lower", "lower", "upper")
"""Seldom an axis takes more than half of the ranks that are left: then no proper axis comes after it."""


@functools.lru_cache(256)
def ranks_between(least: int, most: int) -> tuple[int, ...]:
    """The numbers of ranks; those on which two proper axes have room come more often.

    >>> ranks_between(2, 5)
    (2, 3, 4, 4, 4, 5, 5, 5)
    """
    return tuple(ranks for ranks in range(least, most + 1) for _ in range(3 if ranks > 3 else 1))


@functools.lru_cache(4096)
def sizes_left(least: int, ranks: int, before: int, half: str) -> tuple[int, ...]:
    """The sizes of the next axis but the last, after axes of `before` ranks in all, on a mesh of up to `ranks`.

    Each leaves a last axis with which the mesh has `least` ranks.

    >>> sizes_left(1, 8, 1, "lower"), sizes_left(1, 8, 1, "upper"), sizes_left(1, 8, 3, "lower")
    ((1, 2, 2, 3, 3, 4, 4), (5, 6, 7, 8), (1,))
    >>> sizes_left(6, 6, 1, "lower")
    (1, 2, 2, 3, 3)
    """
    left = ranks // before
    fit = tuple(size for size in range(1, left + 1) if before * size * (left // size) >= least)
    lower = tuple(size for size in fit if size <= left // 2 for _ in range(2 if size > 1 else 1))
    upper = tuple(size for size in fit if size > left // 2)
    return (lower or upper) if half == "lower" else (upper or lower)
