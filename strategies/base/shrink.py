"""The smallest value that still shows what a large one showed: greedy, in a fixed order, to a fixpoint."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from localtensor._util import pickling

T = TypeVar("T")
Candidates = Callable[[T], Iterable[T]]
"""A stage of shrinking: what is a little smaller than a value, the boldest first."""


@dataclass(frozen=True, slots=True)
class Shrunk(Generic[T]):
    """What is left, how many candidates it took, and the way there.

    `steps` are the values that still showed, each smaller than the one before; the last is `smallest`,
    and there are none where nothing smaller showed.  `stages` names the stage that made each.
    """

    smallest: T
    tried: int
    steps: tuple[T, ...] = ()
    stages: tuple[str, ...] = ()

    def to_try(self, most: int = 4) -> list[T]:
        """The smallest first, then what each earlier stage had come to: what to fall back on where a dearer
        witness does not agree about the smallest."""
        last = {f"{stage} {i}": step for i, (stage, step) in enumerate(zip(self.stages, self.steps, strict=True))
                if i + 1 == len(self.steps) or self.stages[i + 1] != stage}  # fmt: skip
        return list(reversed(last.values()))[:most]


def shrink(
    start: T, shows: Callable[[T], bool], *, budget: int, stages: Sequence[tuple[str, Candidates[T]]]
) -> Shrunk[T]:
    """The smallest value found that `shows` says yes to, after at most `budget` questions, no two alike.

    Where it says no to the start, the start comes back with no steps.  The stages are gone through in their order,
    again and again until none of them helps.

    >>> shrink(13, lambda n: n >= 7, budget=99, stages=[("less", lambda n: [n // 2, n - 1])]).smallest
    7
    """
    asked: set[bytes] = set()

    def left(_: object = None) -> bool:
        return len(asked) < budget

    def ask(value: T) -> bool:
        key = pickling.dumps(value)
        if key in asked or not left():
            return False
        asked.add(key)
        return shows(value)

    now, steps, names = start, list[T](), list[str]()
    moved = ask(start)
    while moved and left():
        moved = False
        for name, stage in stages:
            while (found := next(filter(ask, itertools.takewhile(left, stage(now))), None)) is not None:
                now, moved = found, True
                steps.append(found)
                names.append(name)
    return Shrunk(now, len(asked), tuple(steps), tuple(names))
