"""`lt.run` and `localtensor run`: threads or processes, arguments of each rank, torchrun scripts."""

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:  # for readers and type checkers; _ROOM below says the same to the interpreter
    from localtensor.runner.api import TIMEOUT as TIMEOUT
    from localtensor.runner.api import LeftoverWarning as LeftoverWarning
    from localtensor.runner.api import Run as Run
    from localtensor.runner.api import limit as limit
    from localtensor.runner.api import run as run

__all__ = [
    "TIMEOUT",
    "LeftoverWarning",
    "Run",
    "limit",
    "run",
]

_ROOM = {
    "LeftoverWarning": "localtensor.runner.api",
    "Run": "localtensor.runner.api",
    "TIMEOUT": "localtensor.runner.api",
    "limit": "localtensor.runner.api",
    "run": "localtensor.runner.api",
}


def __getattr__(name: str) -> _typing.Any:
    if name not in _ROOM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(_importlib.import_module(_ROOM[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
