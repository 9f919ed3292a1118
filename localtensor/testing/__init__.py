"""Tools for tests, yours and ours.  This is their door: each name opens its room on first use.

same         assert_same: two runs left the same on each rank
schedules    check_schedule: the full examination of a `Schedule`
"""

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:  # for readers and type checkers; _ROOM below says the same to the interpreter
    from localtensor.testing.same import assert_same as assert_same
    from localtensor.testing.schedules import check_schedule as check_schedule

__all__ = ["assert_same", "check_schedule"]

_ROOM = {
    "assert_same": "localtensor.testing.same",
    "check_schedule": "localtensor.testing.schedules",
}


def __getattr__(name: str) -> _typing.Any:
    if name not in _ROOM:
        raise AttributeError(f"module 'localtensor.testing' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(_importlib.import_module(_ROOM[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
