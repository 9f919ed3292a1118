"""The policies by themselves, each a `Schedule`, which says what they promise; the makers there check settings."""

import random
from bisect import bisect_left
from collections.abc import Sequence


class RoundRobin:
    text = "round_robin"

    def begin(self, ranks: int) -> None:
        pass

    def next(self, runnable: Sequence[int], current: int | None) -> int:
        if current is None:
            return runnable[0]
        place = bisect_left(runnable, current)
        return runnable[place] if place < len(runnable) else runnable[0]

    def number(self, below: int) -> int:
        return 0


class Shuffled:
    def __init__(self, seed: int) -> None:
        self.text = f"shuffled:{seed}"
        self._seed = seed

    def begin(self, ranks: int) -> None:
        self._rng = random.Random(self._seed)

    def next(self, runnable: Sequence[int], current: int | None) -> int:
        return runnable[_draw(self._rng, len(runnable))]

    def number(self, below: int) -> int:
        return _draw(self._rng, below)


class Pct:
    def __init__(self, seed: int, depth: int, steps: int) -> None:
        self.text = f"pct:{seed}:{depth}:{steps}"
        self._seed, self._depth, self._steps = seed, depth, steps

    def begin(self, ranks: int) -> None:
        rng = self._rng = random.Random(self._seed)
        order = sorted(range(ranks), key=lambda _: rng.random())
        self._priority = {rank: self._depth + place for place, rank in enumerate(order)}
        self._falls = {1 + _draw(rng, self._steps): low for low in range(self._depth - 1)}  # after which step, to what
        self._step = 0

    def next(self, runnable: Sequence[int], current: int | None) -> int:
        rank = max(runnable, key=self._priority.__getitem__)
        self._step += 1
        if self._step in self._falls:
            self._priority[rank] = self._falls[self._step]
        return rank

    def number(self, below: int) -> int:
        return _draw(self._rng, below)


def _draw(rng: random.Random, below: int) -> int:
    """From 0 to below - 1.  By random() alone, whose values Python promises to keep: a text outlives an upgrade."""
    return min(int(rng.random() * below), below - 1)
