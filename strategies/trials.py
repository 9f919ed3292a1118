"""The work of a worker: a docket of whatever kind of trial is heard."""

from __future__ import annotations

import time

from strategies.dockets import Docket, Hearing
from strategies.followed import on_meshes, with_followers
from strategies.stage import at_home
from strategies.trial import Note, alone
from strategies.units import ALONE, MESHES, PAIRS

_KINDS = {ALONE: alone, PAIRS: with_followers, MESHES: on_meshes}


def hear(docket: Docket, note: Note) -> list[Hearing]:
    """One hearing for each unit of the docket, none if its time is up.  The rules module that it names is imported."""
    if docket.until and time.time() >= docket.until:
        return []
    at_home(*docket.home)
    return _KINDS[docket.trial](docket, note)
