"""Tests distributed PyTorch without a cluster.  This is the front door; the rooms behind it, bottom up:

    errors, mesh, placement    refusals; integers; torch's placements, parsed and printed
    shards, collectives        what each rank holds: plain functions on tensors, no process group
    run, schedule              any program: its ranks as threads of this process, or as real processes
    lockstep, tensor           all ranks in one control flow: LocalTensorMode and its tensors
    testing                    what a test asks: are two runs the same, is this schedule one
    processes                  real processes, the truth that the rest is held to

Rooms that need torch open on first use, so that `import localtensor` stays quick.
"""

import importlib as _importlib
import typing as _typing

from localtensor.errors.base import LocalTensorError as LocalTensorError
from localtensor.layout.mesh import Mesh as Mesh

if _typing.TYPE_CHECKING:  # for readers and type checkers; _ROOM below says the same to the interpreter
    import localtensor.testing as testing  # noqa: F401, PLR0402  # a room behind the door, no name of it
    from localtensor.collectives.compare import assert_same_on_all_ranks as assert_same_on_all_ranks
    from localtensor.concurrency.schedule import pct as pct
    from localtensor.concurrency.schedule import replay as replay
    from localtensor.concurrency.schedule import round_robin as round_robin
    from localtensor.concurrency.schedule import shuffled as shuffled
    from localtensor.layout.shards import assemble as assemble
    from localtensor.layout.shards import split as split
    from localtensor.layout.spec import Spec as Spec
    from localtensor.layout.spec import parse as parse
    from localtensor.layout.spec import short as short
    from localtensor.lockstep.collectives_api import all_gather as all_gather
    from localtensor.lockstep.collectives_api import all_gather_into_tensor as all_gather_into_tensor
    from localtensor.lockstep.collectives_api import all_reduce as all_reduce
    from localtensor.lockstep.collectives_api import all_to_all as all_to_all
    from localtensor.lockstep.collectives_api import all_to_all_single as all_to_all_single
    from localtensor.lockstep.collectives_api import barrier as barrier
    from localtensor.lockstep.collectives_api import broadcast as broadcast
    from localtensor.lockstep.collectives_api import gather as gather
    from localtensor.lockstep.collectives_api import permute as permute
    from localtensor.lockstep.collectives_api import reduce as reduce
    from localtensor.lockstep.collectives_api import reduce_scatter as reduce_scatter
    from localtensor.lockstep.collectives_api import reduce_scatter_tensor as reduce_scatter_tensor
    from localtensor.lockstep.collectives_api import scatter as scatter
    from localtensor.lockstep.collectives_api import shard_dim_alltoall as shard_dim_alltoall
    from localtensor.lockstep.mode import LocalTensorMode as LocalTensorMode
    from localtensor.lockstep.mode import rank_map as rank_map
    from localtensor.lockstep.mode import tensor_map as tensor_map
    from localtensor.lockstep.values.local_tensor import LocalTensor as LocalTensor
    from localtensor.runner.api import LeftoverWarning as LeftoverWarning
    from localtensor.runner.api import Run as Run
    from localtensor.runner.api import run as run

__version__ = "0.1.0"

__all__ = [
    "LeftoverWarning",
    "LocalTensor",
    "LocalTensorError",
    "LocalTensorMode",
    "Mesh",
    "Run",
    "Spec",
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "assemble",
    "assert_same_on_all_ranks",
    "barrier",
    "broadcast",
    "gather",
    "parse",
    "pct",
    "permute",
    "rank_map",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "replay",
    "round_robin",
    "run",
    "scatter",
    "shard_dim_alltoall",
    "short",
    "shuffled",
    "split",
    "tensor_map",
]

_ROOM = {
    "LeftoverWarning": "localtensor.runner.api",
    "LocalTensor": "localtensor.lockstep.values.local_tensor",
    "LocalTensorMode": "localtensor.lockstep.mode",
    "Run": "localtensor.runner.api",
    "Spec": "localtensor.layout.spec",
    "all_gather": "localtensor.lockstep.collectives_api",
    "all_gather_into_tensor": "localtensor.lockstep.collectives_api",
    "all_reduce": "localtensor.lockstep.collectives_api",
    "all_to_all": "localtensor.lockstep.collectives_api",
    "all_to_all_single": "localtensor.lockstep.collectives_api",
    "assemble": "localtensor.layout.shards",
    "assert_same_on_all_ranks": "localtensor.collectives.compare",
    "barrier": "localtensor.lockstep.collectives_api",
    "broadcast": "localtensor.lockstep.collectives_api",
    "gather": "localtensor.lockstep.collectives_api",
    "parse": "localtensor.layout.spec",
    "pct": "localtensor.concurrency.schedule",
    "permute": "localtensor.lockstep.collectives_api",
    "rank_map": "localtensor.lockstep.mode",
    "reduce": "localtensor.lockstep.collectives_api",
    "reduce_scatter": "localtensor.lockstep.collectives_api",
    "reduce_scatter_tensor": "localtensor.lockstep.collectives_api",
    "replay": "localtensor.concurrency.schedule",
    "round_robin": "localtensor.concurrency.schedule",
    "run": "localtensor.runner.api",
    "scatter": "localtensor.lockstep.collectives_api",
    "shard_dim_alltoall": "localtensor.lockstep.collectives_api",
    "short": "localtensor.layout.spec",
    "shuffled": "localtensor.concurrency.schedule",
    "split": "localtensor.layout.shards",
    "tensor_map": "localtensor.lockstep.mode",
}


def __getattr__(name: str) -> _typing.Any:
    if name == "testing":
        return _importlib.import_module("localtensor.testing")
    if name not in _ROOM:
        raise AttributeError(f"module 'localtensor' has no attribute {name!r}; it has {', '.join(__all__)}")
    if name == "LocalTensor":  # made outside of any mode, it belongs to one that nobody has entered
        _importlib.import_module("localtensor.lockstep.mode")
    return getattr(_importlib.import_module(_ROOM[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
