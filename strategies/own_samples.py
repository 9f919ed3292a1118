"""Calls for every overload that has a rule of our own: one pass over OpInfo for all of them, then their relatives'."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from strategies import samples
from strategies.choice import choose
from strategies.derived import gather
from strategies.executors import Hands
from strategies.rules import Sample

DTYPES = ("float64", "int64", "complex64")
"""Real numbers, integers, and where there is no order."""


@dataclass(frozen=True, slots=True)
class Calls:
    """The calls of each overload, the most different ones first, and why an overload has none."""

    of: Mapping[str, tuple[Sample, ...]]
    without: Mapping[str, str] = field(default_factory=dict)


def calls(
    crew: Hands,
    wanted: Collection[str],
    *,
    seed: int = 0,
    most: int = 24,
    dtypes: Sequence[str] = DTYPES,
    sizes: Sequence[str] = tuple(samples.SIZES),
    tick: Callable[[int], None] = lambda _: None,
) -> Calls:
    """At most so many calls of each wanted overload, the same for the same seed.

    Each OpInfo runs once for all of them, here.  An overload that none reaches has calls made from a relative's, or drawn
    from its schema, by the crew: some ops end their process where they should refuse.  `tick` is told after each OpInfo.
    """
    names = frozenset(wanted)
    met: dict[str, list[Sample]] = defaultdict(list)
    is_wanted = functools.cache(lambda func: str(func) in names)
    for info in samples.database():
        for dtype in dtypes:
            if samples.DTYPES[dtype] in info.supported_dtypes("cpu"):
                for which in sizes:
                    for sample in _captured(info, dtype, which, seed, is_wanted):
                        met[sample.op].append(sample)
        tick(1)
    made, without = gather(crew, met, sorted(names), seed)
    return Calls({op: tuple(choose(found, most)) for op, found in sorted({**met, **made}.items())}, without)


def _captured(info: Any, dtype: str, which: str, seed: int, wanted: Callable[[Any], bool]) -> list[Sample]:
    return samples.capture(info, samples.DTYPES[dtype], which, device="cpu", seed=seed, wanted=wanted)[0]
