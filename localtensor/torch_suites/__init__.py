"""localtensor/torch_suites."""

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:  # for readers and type checkers; _ROOM below says the same to the interpreter
    from localtensor.torch_suites.bases import is_suite as is_suite
    from localtensor.torch_suites.bases import put_on as put_on
    from localtensor.torch_suites.rank_run import TIMEOUT as TIMEOUT
    from localtensor.torch_suites.rank_run import How as How

__all__ = [
    "TIMEOUT",
    "How",
    "is_suite",
    "put_on",
]

_ROOM = {
    "How": "localtensor.torch_suites.rank_run",
    "TIMEOUT": "localtensor.torch_suites.rank_run",
    "is_suite": "localtensor.torch_suites.bases",
    "put_on": "localtensor.torch_suites.bases",
}


def __getattr__(name: str) -> _typing.Any:
    if name not in _ROOM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(_importlib.import_module(_ROOM[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


pytest_plugins = ("localtensor.torch_suites.hooks",)  # so that the rest of the package does without pytest
