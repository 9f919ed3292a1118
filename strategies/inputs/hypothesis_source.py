"""Hypothesis as a source of choices: so many different values, the same for a seed in any process.

Every choice is made of Hypothesis' coin flips alone.  Its integers, floats and texts would also try numbers
that it finds in the source of whatever modules this process has loaded, so that the same seed would draw
other values elsewhere; it would keep those numbers on disk, too.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol, TypeVar

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis import strategies as st

T = TypeVar("T")
V = TypeVar("V", bound=Hashable)
SPARE = 2
"""How many more examples than values: some come twice, or to nothing."""


class Pick(Protocol):
    """One of the options; every one of them can come."""

    def __call__(self, options: Sequence[T]) -> T: ...


def drawn(make: Callable[[Pick], V | None], *, seed: int, budget: int) -> list[V]:
    """At most `budget` different values that `make` builds of what it picks, in the order in which they come.

    What is None does not count.  `make` must not raise, and may pick from what it holds alone: then the same
    seed gives the same values.
    """
    found = dict.fromkeys(_examples(make, seed, budget + SPARE)) if budget > 0 else {}
    return list(itertools.islice((value for value in found if value is not None), budget))


def _examples(make: Callable[[Pick], V | None], number: int, count: int) -> list[V | None]:
    values: list[V | None] = []
    flips = st.booleans()

    @st.composite
    def examples(draw: Callable[[st.SearchStrategy[bool]], bool]) -> V | None:
        def pick(options: Sequence[T]) -> T:
            bits = (len(options) - 1).bit_length()
            place = sum(draw(flips) << bit for bit in range(bits))
            return options[place * len(options) >> bits]

        return make(pick)

    @seed(number)
    @settings(
        database=None, phases=(Phase.generate,), max_examples=count, deadline=None, derandomize=False,
        suppress_health_check=list(HealthCheck), verbosity=Verbosity.quiet,
    )  # fmt: skip
    @given(examples())
    def collect(value: V | None) -> None:
        values.append(value)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        collect()
    return values
