"""Torchrun's variables around a rank test.

Each rank has RANK and its like for itself, and monkeypatch is one for all: at the end of the test it puts back, in
pytest's own environment, what one of the ranks had.
"""

import os

from localtensor.threads.state.special_slots import torchrun_environment
from localtensor.threads.state.swap import RankState


class Environment:
    """Remembers the variables when it is made, before a test is set up, and at each look."""

    def __init__(self) -> None:
        self._seen = [_now()]

    def look(self) -> None:
        self._seen.append(_now())

    def tidy_up(self) -> None:
        """A variable that is as it never was before is as it was at first; what fixtures set or put back stays."""
        for name, value in _now().items():
            first = self._seen[0][name]
            if value in [before[name] for before in self._seen]:
                continue
            if first is None:
                del os.environ[name]
            else:
                os.environ[name] = first


def _now() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in torchrun_environment(RankState(0, 1, 0))}
