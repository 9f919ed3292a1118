"""All bugs planted by hand, module by module: each is one that somebody could write, and that a user would meet."""

from __future__ import annotations

from tests.tools.mutants import (
    planted_caches,
    planted_judges,
    planted_numbers,
    planted_plans,
    planted_ranks,
    planted_surfaces,
)
from tests.tools.mutants.values import Planted

PLANTED: tuple[Planted, ...] = (
    *planted_numbers.PLANTED,
    *planted_ranks.PLANTED,
    *planted_judges.PLANTED,
    *planted_caches.PLANTED,
    *planted_surfaces.PLANTED,
    *planted_plans.PLANTED,
)
