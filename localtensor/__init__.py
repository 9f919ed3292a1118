"""Tests distributed PyTorch without a cluster.  This is the front door; the rooms behind it, bottom up:

    errors, mesh, placement    refusals; integers; torch's placements, parsed and printed
    shards, collectives        what each rank holds: plain functions on tensors, no process group
    processes                  the same on real processes, the truth that the rest is held to

Rooms that need torch open on first use, so that `import localtensor` stays quick.
"""

import importlib as _importlib
import typing as _typing

from localtensor.errors import LocalTensorError as LocalTensorError
from localtensor.mesh import Mesh as Mesh

if _typing.TYPE_CHECKING:  # for readers and type checkers; _ROOM below says the same to the interpreter
    from localtensor.placement import Spec as Spec
    from localtensor.placement import parse as parse
    from localtensor.placement import short as short
    from localtensor.shards import assemble as assemble
    from localtensor.shards import split as split

__version__ = "0.1.0.dev0"

__all__ = ["LocalTensorError", "Mesh", "Spec", "assemble", "parse", "short", "split"]

_ROOM = {
    "Spec": "localtensor.placement",
    "assemble": "localtensor.shards",
    "parse": "localtensor.placement",
    "short": "localtensor.placement",
    "split": "localtensor.shards",
}


def __getattr__(name: str) -> _typing.Any:
    if name not in _ROOM:
        raise AttributeError(f"module 'localtensor' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(_importlib.import_module(_ROOM[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
