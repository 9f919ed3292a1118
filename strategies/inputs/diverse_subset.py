"""Which of many calls to try: those that differ most in what a rule could look at."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from strategies.model.rule import Leaf, Sample


def features(sample: Sample) -> list[tuple[int, str]]:
    """What a rule could look at, argument by argument: dtype, number of dims, ones, evenness, scalars."""

    def show(value: Any) -> str:
        if isinstance(value, Leaf):
            x = sample.tensors[value.index]
            sizes = "".join("1" if size == 1 else "e" if size % 2 == 0 else "o" for size in x.shape)
            return f"{x.dtype}{sizes}{'' if x.is_contiguous() else ' strided'}"
        if isinstance(value, float):
            return _number(value)
        return f"{type(value).__name__}({', '.join(map(show, value))})" if isinstance(value, (list, tuple)) else repr(value)  # fmt: skip

    shown = [show(a) for a in sample.call.args] + [f"{n}={show(v)}" for n, v in sample.call.kwargs]
    shapes = {tuple(t.shape) for t in sample.tensors}
    beside = [(-3 - i, _beside(sample.tensors[0], t)) for i, t in enumerate(sample.tensors[1:])]
    return [*enumerate(shown), (-1, f"{len(shapes)} shapes"), (-2, f"{len(shown)} arguments"), *beside]


def _number(value: float) -> str:
    """Small whole numbers and infinities mean something of their own (the order of a norm); of others only the kind."""
    if not math.isfinite(value) or (value.is_integer() and abs(value) <= 4):
        return repr(value)
    return ("-" if value < 0 else "+") + ("integral" if value.is_integer() else "float")


def _beside(first: Tensor, other: Tensor) -> str:
    """Dim by dim, whether the other tensor is as long as the first, shorter or longer."""
    if first.ndim != other.ndim:
        return f"{other.ndim - first.ndim:+d} dims"
    return "".join("=" if a == b else "<" if b < a else ">" for a, b in zip(first.shape, other.shape, strict=True))


MOST_CANDIDATES = 200


def choose(found: Sequence[Sample], most: int) -> list[Sample]:
    """At most so many samples of one overload, each chosen for what it adds to those before it.

    New values of an argument count most, then new pairs of values; of equals one that can be split
    is taken before one that cannot, then the smaller, then the earlier.  The order is that of choice.
    """
    unique: dict[str, tuple[Sample, set[Any]]] = {}
    for sample in sorted(found, key=lambda s: (_largest(s) < 4, s.size)):
        seen = features(sample)
        unique.setdefault(repr(seen), (sample, _weighed(seen)))
    left = list(unique.values())[:MOST_CANDIDATES]
    covered: set[Any] = set()
    chosen: list[Sample] = []
    while left and len(chosen) < most:
        gains = [sum(_WORTH[len(f)] for f in worth - covered) for _, worth in left]
        best, worth = left.pop(max(range(len(left)), key=lambda i: (gains[i], -i)))
        covered |= worth
        chosen.append(best)
    return chosen


def _largest(sample: Sample) -> int:
    return max((t.numel() for t in sample.tensors), default=0)


_WORTH = {1: 12, 2: 1}


def _weighed(seen: Sequence[tuple[int, str]]) -> set[Any]:
    """Values alone, as 1-tuples, and pairs of them."""
    return {(f,) for f in seen} | set(itertools.combinations(seen, 2))
