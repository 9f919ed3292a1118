"""A wrong rule's case, shrunk: what to bring before real processes, the smallest first."""

from __future__ import annotations

from strategies.oracle import Witness
from strategies.probe import Case
from strategies.shrink import BUDGET, shrink
from strategies.verdicts import Instance

FALLBACKS = 4
"""Smaller cases that are offered beside the one that was given."""


def smallest(instance: Instance, case: Case, *, seed: int = 0, budget: int = BUDGET) -> list[tuple[Instance, Case]]:
    """The smallest instance and case of the same rule that the probe finds wrong in the same way, then larger
    ones, and at the end those that were given.

    DTensor's own run may clear a small case that the probe finds wrong, and confirm a larger one.  A claim that
    only a real run can judge comes back alone.
    """
    witness = Witness(instance, case, seed=seed)
    tries = shrink(witness.start, witness, budget=budget).to_try(FALLBACKS)
    charges = [charge for program in tries if (charge := witness.charge(program)) is not None]
    return [*charges, (instance, case)]
