"""Tools for tests, yours and ours.  This is their door: each name opens its room on first use.

same         assert_same: two runs left the same on each rank
reference    check_op, rank_by_rank: an op in lockstep held against a plain loop over the ranks; that loop
schedules    check_schedule: the full examination of a `Schedule`
"""

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:  # for readers and type checkers; _ROOM below says the same to the interpreter
    from localtensor.testing.reference import check_op as check_op
    from localtensor.testing.reference import rank_by_rank as rank_by_rank
    from localtensor.testing.same import assert_same as assert_same
    from localtensor.testing.schedules import check_schedule as check_schedule

__all__ = ["assert_same", "check_op", "check_schedule", "rank_by_rank"]

_ROOM = {
    "assert_same": "localtensor.testing.same",
    "check_op": "localtensor.testing.reference",
    "check_schedule": "localtensor.testing.schedules",
    "rank_by_rank": "localtensor.testing.reference",
}


def __getattr__(name: str) -> _typing.Any:
    if name not in _ROOM:
        raise AttributeError(f"module 'localtensor.testing' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(_importlib.import_module(_ROOM[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
