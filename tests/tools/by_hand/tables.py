"""All checks: whoever imports this has entered them."""

from __future__ import annotations

from tests.tools.by_hand import controls, dtypes, gradients, in_place, losses, partials, public, reductions, whole
from tests.tools.by_hand.words import CHECKS

TABLES = (controls, dtypes, gradients, in_place, losses, partials, public, reductions, whole)
__all__ = ["CHECKS", "TABLES"]
