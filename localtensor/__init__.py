"""Tests distributed PyTorch without a cluster.  This is the front door; the rooms behind it, bottom up:

    errors, mesh, placement    refusals; integers; torch's placements, parsed and printed
    shards, collectives        what each rank holds: plain functions on tensors, no process group
    run, schedule              any program: its ranks as threads of this process, or as real processes
    testing                    what a test asks: are two runs the same, is this schedule one
    processes                  real processes, the truth that the rest is held to

Rooms that need torch open on first use, so that `import localtensor` stays quick.
"""

import importlib as _importlib
import typing as _typing

from localtensor.errors.base import LocalTensorError as LocalTensorError
from localtensor.mesh import Mesh as Mesh

if _typing.TYPE_CHECKING:  # for readers and type checkers; _ROOM below says the same to the interpreter
    import localtensor.testing as testing  # noqa: F401, PLR0402  # a room behind the door, no name of it
    from localtensor._run import LeftoverWarning as LeftoverWarning
    from localtensor._run import Run as Run
    from localtensor._run import run as run
    from localtensor.placement import Spec as Spec
    from localtensor.placement import parse as parse
    from localtensor.placement import short as short
    from localtensor.same import assert_same_on_all_ranks as assert_same_on_all_ranks
    from localtensor.schedule import pct as pct
    from localtensor.schedule import replay as replay
    from localtensor.schedule import round_robin as round_robin
    from localtensor.schedule import shuffled as shuffled
    from localtensor.shards import assemble as assemble
    from localtensor.shards import split as split

__version__ = "0.1.0.dev0"

__all__ = [
    "LeftoverWarning",
    "LocalTensorError",
    "Mesh",
    "Run",
    "Spec",
    "assemble",
    "assert_same_on_all_ranks",
    "parse",
    "pct",
    "replay",
    "round_robin",
    "run",
    "short",
    "shuffled",
    "split",
]

_ROOM = {
    "LeftoverWarning": "localtensor._run",
    "Run": "localtensor._run",
    "Spec": "localtensor.placement",
    "assemble": "localtensor.shards",
    "assert_same_on_all_ranks": "localtensor.same",
    "parse": "localtensor.placement",
    "pct": "localtensor.schedule",
    "replay": "localtensor.schedule",
    "round_robin": "localtensor.schedule",
    "run": "localtensor._run",
    "short": "localtensor.placement",
    "shuffled": "localtensor.schedule",
    "split": "localtensor.shards",
}


def __getattr__(name: str) -> _typing.Any:
    if name == "testing":
        return _importlib.import_module("localtensor.testing")
    if name not in _ROOM:
        raise AttributeError(f"module 'localtensor' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(_importlib.import_module(_ROOM[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
