"""Ranks as real processes: pool, worker, forked ranks, transport of exceptions."""

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:  # for readers and type checkers; _ROOM below says the same to the interpreter
    from localtensor.processes.forked import run_forked as run_forked
    from localtensor.processes.job import moved as moved
    from localtensor.processes.pool import Pool as Pool
    from localtensor.processes.run import run_in_processes as run_in_processes
    from localtensor.processes.worker_group import deaf as deaf
    from localtensor.processes.worker_group import environ as environ

__all__ = [
    "Pool",
    "deaf",
    "environ",
    "moved",
    "run_forked",
    "run_in_processes",
]

_ROOM = {
    "Pool": "localtensor.processes.pool",
    "deaf": "localtensor.processes.worker_group",
    "environ": "localtensor.processes.worker_group",
    "moved": "localtensor.processes.job",
    "run_forked": "localtensor.processes.forked",
    "run_in_processes": "localtensor.processes.run",
}


def __getattr__(name: str) -> _typing.Any:
    if name not in _ROOM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(_importlib.import_module(_ROOM[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
