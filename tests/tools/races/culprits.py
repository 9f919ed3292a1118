"""Planted races: small classes that are wrong in one way each, every one beside a twin that is right.

The harness has to find each of them before its silence about the real cache is evidence.
"""

from __future__ import annotations

from tests.tools.races.culprits_caches import CACHES
from tests.tools.races.culprits_clears import CLEARS
from tests.tools.races.culprits_keys import KEYS
from tests.tools.races.culprits_locks import LOCKS
from tests.tools.races.culprits_values import Culprit

CULPRITS: tuple[Culprit, ...] = (*CACHES, *CLEARS, *KEYS, *LOCKS)
