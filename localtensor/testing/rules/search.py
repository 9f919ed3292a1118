"""Hypothesis looks for the smallest case that is wrong, and counts what was judged and what was not."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity, settings
from hypothesis import strategies as st
from hypothesis.errors import FlakyFailure, Unsatisfiable

from localtensor.testing.rules.case import Misfit, Skipped

C = TypeVar("C")
R = TypeVar("R")


HOPELESS = 200
"""If so many cases say nothing before one is judged, none will."""


class _Found(Exception):
    """Ends an example that is wrong."""


class _Hopeless(Exception):
    """Ends a search that judges nothing."""


@dataclass
class Search(Generic[C, R]):
    """What a search has come to: the smallest wrong case and what it gave, how many were judged, why others were not."""

    wrong: tuple[C, R] | None = None
    judged: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    misfits: Counter[str] = field(default_factory=Counter)

    @property
    def excuse(self) -> str:
        """Why nothing was judged, in the words of most."""
        for found in (self.misfits, self.skipped):
            if found:
                return found.most_common(1)[0][0]
        return "no call could be drawn"


def search(
    cases: st.SearchStrategy[C], judge: Callable[[C], tuple[R, bool]], *, max_examples: int, seed: int
) -> Search[C, R]:
    """The same for a seed in every run.  `judge` gives what came out and whether that is right, or raises `Skipped`."""
    found: Search[C, R] = Search()

    @hypothesis.seed(seed)
    @settings(
        database=None, phases=(Phase.generate, Phase.shrink), max_examples=max_examples, deadline=None,
        derandomize=False, suppress_health_check=list(HealthCheck), verbosity=Verbosity.quiet,
        report_multiple_bugs=False,
    )  # fmt: skip
    @hypothesis.given(cases)
    def example(case: C) -> None:
        try:
            ran, right = judge(case)
        except (Skipped, Misfit) as why:
            kind = found.misfits if isinstance(why, Misfit) else found.skipped
            kind[str(why)] += 1
            if not found.judged and found.skipped.total() + found.misfits.total() >= HOPELESS:
                raise _Hopeless from None
            hypothesis.reject()
        found.judged += 1
        if not right:
            found.wrong = case, ran
            raise _Found

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=hypothesis.errors.HypothesisWarning)
        try:
            example()
        except (_Found, _Hopeless, Unsatisfiable):
            pass  # what was found is kept; if nothing was judged, the counts say why
        except FlakyFailure:
            pass  # wrong once, and right when it was judged again: the case that was wrong is kept
    return found
