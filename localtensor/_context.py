"""The simulation that runs now, if any: the one piece of ambient state; everything else is an argument.

Only one can run at a time, because a running simulation owns what torch keeps once per process.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_turn = threading.Lock()
_running: list[Any] = []


def running() -> Any | None:
    """The simulation that runs now, or None."""
    return _running[-1] if _running else None


@contextmanager
def entered(simulation: object) -> Iterator[None]:
    """While inside, `running()` is this simulation; a second thread waits outside until it is over."""
    with _turn:
        _running.append(simulation)
        try:
            yield
        finally:
            _running.pop()
