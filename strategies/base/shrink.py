"""Shrinking of a value that shows a failure: greedy, in a fixed order, until nothing smaller shows it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from localtensor._util import pickling

T = TypeVar("T")
Candidates = Callable[[T], Iterable[T]]
"""A stage of shrinking: values a little smaller than a given one, the largest steps first."""


@dataclass(frozen=True, slots=True)
class Shrunk(Generic[T]):
    """The smallest value, the number of candidates tested, and the path there.

    `steps` are the values that still failed, each smaller than the one before; the last is `smallest`. They are empty
    if nothing smaller failed. `stages` names the stage of each.
    """

    smallest: T
    tried: int
    steps: tuple[T, ...] = ()
    stages: tuple[str, ...] = ()

    def to_try(self, most: int = 4) -> list[T]:
        """The smallest value, then the result of each earlier stage: fallbacks for a test that rejects the smallest."""
        last = {
            f"{stage} {i}": step
            for i, (stage, step) in enumerate(zip(self.stages, self.steps, strict=True))
            if i + 1 == len(self.steps) or self.stages[i + 1] != stage
        }
        return list(reversed(last.values()))[:most]


def shrink(
    start: T, shows: Callable[[T], bool], *, budget: int, stages: Sequence[tuple[str, Candidates[T]]]
) -> Shrunk[T]:
    """The smallest value found for which `shows` holds, after at most `budget` calls of it, no two with equal values.

    If `shows` does not hold for the start, the start is returned without steps. The stages run in their order,
    repeatedly, until none of them helps.

    >>> shrink(13, lambda n: n >= 7, budget=99, stages=[("less", lambda n: [n // 2, n - 1])]).smallest
    7
    """
    tested: set[bytes] = set()

    def left(_: object = None) -> bool:
        return len(tested) < budget

    def fails(value: T) -> bool:
        key = pickling.dumps(value)
        if key in tested or not left():
            return False
        tested.add(key)
        return shows(value)

    now, steps, names = start, list[T](), list[str]()
    moved = fails(start)
    while moved and left():
        moved = False
        for name, stage in stages:
            while (found := next(filter(fails, itertools.takewhile(left, stage(now))), None)) is not None:
                now, moved = found, True
                steps.append(found)
                names.append(name)
    return Shrunk(now, len(tested), tuple(steps), tuple(names))
