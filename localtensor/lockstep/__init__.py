"""All ranks in one control flow: LocalTensorMode and the collectives on its tensors."""

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:  # for readers and type checkers; _ROOM below says the same to the interpreter
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
    from localtensor.lockstep.dispatch.dispatcher import plainly as plainly
    from localtensor.lockstep.dispatch.results import same as same
    from localtensor.lockstep.mode import LocalTensorMode as LocalTensorMode
    from localtensor.lockstep.mode import current as current
    from localtensor.lockstep.mode import rank_map as rank_map
    from localtensor.lockstep.mode import tensor_map as tensor_map
    from localtensor.lockstep.values.local_tensor import LocalTensor as LocalTensor
    from localtensor.lockstep.values.rank_int import is_rank_int as is_rank_int
    from localtensor.lockstep.values.rank_int import on_rank as on_rank
    from localtensor.lockstep.values.stacks import dense_strides as dense_strides
    from localtensor.lockstep.values.stacks import is_in_blocks as is_in_blocks

__all__ = [
    "LocalTensor",
    "LocalTensorMode",
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "current",
    "dense_strides",
    "gather",
    "is_in_blocks",
    "is_rank_int",
    "on_rank",
    "permute",
    "plainly",
    "rank_map",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "same",
    "scatter",
    "shard_dim_alltoall",
    "tensor_map",
]

_ROOM = {
    "LocalTensor": "localtensor.lockstep.values.local_tensor",
    "LocalTensorMode": "localtensor.lockstep.mode",
    "all_gather": "localtensor.lockstep.collectives_api",
    "all_gather_into_tensor": "localtensor.lockstep.collectives_api",
    "all_reduce": "localtensor.lockstep.collectives_api",
    "all_to_all": "localtensor.lockstep.collectives_api",
    "all_to_all_single": "localtensor.lockstep.collectives_api",
    "barrier": "localtensor.lockstep.collectives_api",
    "broadcast": "localtensor.lockstep.collectives_api",
    "current": "localtensor.lockstep.mode",
    "dense_strides": "localtensor.lockstep.values.stacks",
    "gather": "localtensor.lockstep.collectives_api",
    "is_in_blocks": "localtensor.lockstep.values.stacks",
    "is_rank_int": "localtensor.lockstep.values.rank_int",
    "on_rank": "localtensor.lockstep.values.rank_int",
    "permute": "localtensor.lockstep.collectives_api",
    "plainly": "localtensor.lockstep.dispatch.dispatcher",
    "rank_map": "localtensor.lockstep.mode",
    "reduce": "localtensor.lockstep.collectives_api",
    "reduce_scatter": "localtensor.lockstep.collectives_api",
    "reduce_scatter_tensor": "localtensor.lockstep.collectives_api",
    "same": "localtensor.lockstep.dispatch.results",
    "scatter": "localtensor.lockstep.collectives_api",
    "shard_dim_alltoall": "localtensor.lockstep.collectives_api",
    "tensor_map": "localtensor.lockstep.mode",
}


def __getattr__(name: str) -> _typing.Any:
    if name not in _ROOM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(_importlib.import_module(_ROOM[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
