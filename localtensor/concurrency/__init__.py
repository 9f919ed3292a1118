"""Schedules, the explorer of interleavings, the single-flight cache.  No torch.distributed."""

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:  # for readers and type checkers; _ROOM below says the same to the interpreter
    from localtensor.concurrency.controlled_sync import Scheduled as Scheduled
    from localtensor.concurrency.explorer import Maker as Maker
    from localtensor.concurrency.explorer import explore as explore
    from localtensor.concurrency.line_yield_points import by_lines as by_lines
    from localtensor.concurrency.results import Failure as Failure
    from localtensor.concurrency.results import Program as Program
    from localtensor.concurrency.schedule import LONGEST as LONGEST
    from localtensor.concurrency.schedule import Schedule as Schedule
    from localtensor.concurrency.schedule import pct as pct
    from localtensor.concurrency.schedule import replay as replay
    from localtensor.concurrency.schedule import round_robin as round_robin
    from localtensor.concurrency.schedule import shuffled as shuffled
    from localtensor.concurrency.single_flight import LIMIT as LIMIT
    from localtensor.concurrency.single_flight import BadCache as BadCache
    from localtensor.concurrency.single_flight import Once as Once
    from localtensor.concurrency.single_flight import Stats as Stats
    from localtensor.concurrency.single_flight import clear_all as clear_all
    from localtensor.concurrency.single_flight_cells import Circular as Circular
    from localtensor.concurrency.single_flight_cells import Tally as Tally
    from localtensor.concurrency.single_flight_cells import brief as brief
    from localtensor.concurrency.single_flight_explain import Part as Part
    from localtensor.concurrency.sync import THREADS as THREADS
    from localtensor.concurrency.sync import Gate as Gate
    from localtensor.concurrency.sync import Sync as Sync
    from localtensor.concurrency.sync import Threads as Threads

__all__ = [
    "LIMIT",
    "LONGEST",
    "THREADS",
    "BadCache",
    "Circular",
    "Failure",
    "Gate",
    "Maker",
    "Once",
    "Part",
    "Program",
    "Schedule",
    "Scheduled",
    "Stats",
    "Sync",
    "Tally",
    "Threads",
    "brief",
    "by_lines",
    "clear_all",
    "explore",
    "pct",
    "replay",
    "round_robin",
    "shuffled",
]

_ROOM = {
    "BadCache": "localtensor.concurrency.single_flight",
    "Circular": "localtensor.concurrency.single_flight_cells",
    "Failure": "localtensor.concurrency.results",
    "Gate": "localtensor.concurrency.sync",
    "LIMIT": "localtensor.concurrency.single_flight",
    "LONGEST": "localtensor.concurrency.schedule",
    "Maker": "localtensor.concurrency.explorer",
    "Once": "localtensor.concurrency.single_flight",
    "Part": "localtensor.concurrency.single_flight_explain",
    "Program": "localtensor.concurrency.results",
    "Schedule": "localtensor.concurrency.schedule",
    "Scheduled": "localtensor.concurrency.controlled_sync",
    "Stats": "localtensor.concurrency.single_flight",
    "Sync": "localtensor.concurrency.sync",
    "THREADS": "localtensor.concurrency.sync",
    "Tally": "localtensor.concurrency.single_flight_cells",
    "Threads": "localtensor.concurrency.sync",
    "brief": "localtensor.concurrency.single_flight_cells",
    "by_lines": "localtensor.concurrency.line_yield_points",
    "clear_all": "localtensor.concurrency.single_flight",
    "explore": "localtensor.concurrency.explorer",
    "pct": "localtensor.concurrency.schedule",
    "replay": "localtensor.concurrency.schedule",
    "round_robin": "localtensor.concurrency.schedule",
    "shuffled": "localtensor.concurrency.schedule",
}


def __getattr__(name: str) -> _typing.Any:
    if name not in _ROOM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(_importlib.import_module(_ROOM[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
