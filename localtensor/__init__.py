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
from localtensor.mesh import Mesh as Mesh

if _typing.TYPE_CHECKING:  # for readers and type checkers; _ROOM below says the same to the interpreter
    import localtensor.testing as testing  # noqa: F401, PLR0402  # a room behind the door, no name of it
    from localtensor._run import LeftoverWarning as LeftoverWarning
    from localtensor._run import Run as Run
    from localtensor._run import run as run
    from localtensor.lockstep import LocalTensorMode as LocalTensorMode
    from localtensor.lockstep import rank_map as rank_map
    from localtensor.lockstep import tensor_map as tensor_map
    from localtensor.lockstep_collectives import all_gather as all_gather
    from localtensor.lockstep_collectives import all_gather_into_tensor as all_gather_into_tensor
    from localtensor.lockstep_collectives import all_reduce as all_reduce
    from localtensor.lockstep_collectives import all_to_all as all_to_all
    from localtensor.lockstep_collectives import all_to_all_single as all_to_all_single
    from localtensor.lockstep_collectives import barrier as barrier
    from localtensor.lockstep_collectives import broadcast as broadcast
    from localtensor.lockstep_collectives import gather as gather
    from localtensor.lockstep_collectives import permute as permute
    from localtensor.lockstep_collectives import reduce as reduce
    from localtensor.lockstep_collectives import reduce_scatter as reduce_scatter
    from localtensor.lockstep_collectives import reduce_scatter_tensor as reduce_scatter_tensor
    from localtensor.lockstep_collectives import scatter as scatter
    from localtensor.lockstep_collectives import shard_dim_alltoall as shard_dim_alltoall
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
    from localtensor.tensor import LocalTensor as LocalTensor

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
    "LeftoverWarning": "localtensor._run",
    "LocalTensor": "localtensor.tensor",
    "LocalTensorMode": "localtensor.lockstep",
    "Run": "localtensor._run",
    "Spec": "localtensor.placement",
    "all_gather": "localtensor.lockstep_collectives",
    "all_gather_into_tensor": "localtensor.lockstep_collectives",
    "all_reduce": "localtensor.lockstep_collectives",
    "all_to_all": "localtensor.lockstep_collectives",
    "all_to_all_single": "localtensor.lockstep_collectives",
    "assemble": "localtensor.shards",
    "assert_same_on_all_ranks": "localtensor.same",
    "barrier": "localtensor.lockstep_collectives",
    "broadcast": "localtensor.lockstep_collectives",
    "gather": "localtensor.lockstep_collectives",
    "parse": "localtensor.placement",
    "pct": "localtensor.schedule",
    "permute": "localtensor.lockstep_collectives",
    "rank_map": "localtensor.lockstep",
    "reduce": "localtensor.lockstep_collectives",
    "reduce_scatter": "localtensor.lockstep_collectives",
    "reduce_scatter_tensor": "localtensor.lockstep_collectives",
    "replay": "localtensor.schedule",
    "round_robin": "localtensor.schedule",
    "run": "localtensor._run",
    "scatter": "localtensor.lockstep_collectives",
    "shard_dim_alltoall": "localtensor.lockstep_collectives",
    "short": "localtensor.placement",
    "shuffled": "localtensor.schedule",
    "split": "localtensor.shards",
    "tensor_map": "localtensor.lockstep",
}


def __getattr__(name: str) -> _typing.Any:
    if name == "testing":
        return _importlib.import_module("localtensor.testing")
    if name not in _ROOM:
        raise AttributeError(f"module 'localtensor' has no attribute {name!r}; it has {', '.join(__all__)}")
    if name == "LocalTensor":  # made outside of any mode, it belongs to one that nobody has entered
        _importlib.import_module("localtensor.lockstep")
    return getattr(_importlib.import_module(_ROOM[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
