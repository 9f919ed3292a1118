"""What is kept of the other runs of a reference: how far a right value may be away, and whether two runs are equal.

Each value is looked at when the run computes it, beside the one that the first run has kept, and is not kept itself: so the
memory of a comparison does not grow with the number of runs.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from localtensor.layout.tolerance import measured_slack, widen_slack
from localtensor.testing.compare.watch import Key, Watch

LEAST_TO_FREE = 32 * 2**20
"""Bytes that a run keeps from which on the memory of a run is given back before the next."""


def free_what_is_left(reference: Watch) -> None:
    """Gives the memory of a run that has ended back, if runs are large: models and optimizers refer to themselves."""
    if sum(one.value.nbytes for one in reference.seen.values()) < LEAST_TO_FREE:
        return
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


@dataclass
class Slacks:
    """How far a right value may be from that of the `reference`, by its key: `found`, from the runs that are varied."""

    reference: Watch
    found: dict[Key, Tensor] = field(default_factory=dict)

    @contextmanager
    def of_run(self, *, double: bool = False) -> Iterator[Callable[[Key, Tensor], None]]:
        """Gives what takes the values of one run; of several values of a key the last counts, as in a watch.

        Runs with noise of one unit in the last place come before that in double precision.
        """
        own: dict[Key, Tensor] = {}

        def take(key: Key, value: Tensor) -> None:
            one = self.reference.seen.get(key)
            if one is None:
                return
            base = self.found.get(key, measured_slack(one.value, ())) if double else None
            slack = widen_slack(base, one.value, value) if double else measured_slack(one.value, (value,))
            if slack is not None:
                own[key] = slack

        yield take
        for key, slack in own.items():
            before = None if double else self.found.get(key)
            self.found[key] = slack if before is None else torch.maximum(before, slack)

    def take(self, watch: Watch, *, double: bool = False) -> None:
        """Takes all values that a varied run has kept."""
        with self.of_run(double=double) as take:
            for key, one in watch.seen.items():
                take(key, one.value)


@dataclass
class Repeated:
    """A second run of the `reference` from the same seed: `missing` are the keys without an equal value so far."""

    reference: Watch
    missing: dict[Key, None] = field(init=False)

    def __post_init__(self) -> None:
        self.missing = dict.fromkeys(self.reference.seen)

    def take(self, key: Key, value: Tensor) -> None:
        """Takes a value of the second run."""
        one = self.reference.seen.get(key)
        if one is not None and torch.equal(one.value.nan_to_num(), value.nan_to_num()):
            self.missing.pop(key, None)
        elif one is not None:
            self.missing[key] = None

    @property
    def other(self) -> Key | None:
        """The first value that differs; None if the runs are equal."""
        return next(iter(self.missing), None)
