"""torch.nn, FlexAttention, torch.load and FSDP2 in lockstep, where their handling of tensors does not suit LocalTensors.

`PATCHES` are functions of torch and their replacements; `REFUSED` are classes that cannot be supported, and why.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Sequence
from functools import cache
from typing import Any, SupportsIndex

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.testing._comparison import ErrorMeta

from localtensor._util import ambient
from localtensor._util.call_sites import Args, Fn, Kwargs
from localtensor.errors import NotInLockstep, RanksDiverge
from localtensor.lockstep.comms.collectives import select, stacked_value
from localtensor.lockstep.dispatch.dispatcher import plain_dispatch
from localtensor.lockstep.patches.rank_queries import Patch, dispatch_by_mode, patch_attribute, refuse
from localtensor.lockstep.patches.shard_offsets import number_of_rank
from localtensor.lockstep.values.formatting import as_if_padded, user_place
from localtensor.lockstep.values.local_tensor import LocalTensor, Mode, wrap
from localtensor.lockstep.values.rank_int import Int, is_rank_int

# -- the rows of an embedding


def mask_of_rows(mode: Mode, original: Fn, tensor: Tensor, offset: Int, size: Int) -> Any:
    """The mask of rows that a rank does not have, and the indices of the others in its shard."""
    if not (is_rank_int(offset) or is_rank_int(size)):
        return original(tensor, offset, size)
    start, length = number_of_rank(mode, offset, tensor), number_of_rank(mode, size, tensor)
    mask = (tensor < start) | (tensor >= start + length)
    return mask, torch.where(mask, 0, tensor - start).to(tensor.dtype)


# -- torch.nn


def _swap(original: Fn, one: Tensor, other: Tensor) -> None:
    """Swap two tensors, as `Module.to` does.

    torch refuses tensors with weak references, which a memory has to its views: they leave it meanwhile.
    """
    replacement = [x for x in (one, other) if isinstance(x, LocalTensor) and x._memory is not None]
    for x in replacement:
        x._memory.leave(x)  # type: ignore[union-attr]
    try:
        original(one, other)
    finally:
        both: tuple[Any, ...] = (one, other) if replacement else ()
        for each in both:
            memory = each.__dict__.get("_memory")
            if memory is not None:
                each._memory = None
                memory.join(each)


def _hash_of(original: Fn) -> Any:
    def __hash__(self: torch.SymInt) -> int:  # noqa: N807
        if is_rank_int(self):
            why = "it would be another key on each rank; the sizes of a whole DTensor, for one, are the same on all"
            raise NotInLockstep(f"hash({self.node.words})", why)
        return original(self)  # type: ignore[no-any-return]

    return __hash__


def _deepcopy(mode: Any, original: Fn, x: Tensor, memo: dict[int, Any]) -> object:
    """A copy of a tensor from outside, which ranks may write apart; a plain one where torch copies a graph that it compiles."""
    if type(x) is not Tensor or not x.is_leaf or id(x) in memo or mode._paused:
        return original(x, memo)
    if torch._guards.TracingContext.try_get() is not None:
        with mode.disable():
            return original(x, memo)
    with plain_dispatch():
        copied = memo[id(x)] = wrap((x.detach().clone(),), mode.everyone, mode)
    copied.requires_grad_(x.requires_grad)
    copied.grad = None if x.grad is None else copy.deepcopy(x.grad, memo)
    return copied


def _validate_loaded(mode: Mode, original: Fn, *args: object, **kwargs: object) -> None:
    """Validate the sparse tensors of each rank, below any mode, since torch reads their memory."""
    of_thread = getattr(torch._utils, "_get_sparse_tensors_to_validate", None)  # since 2.15
    waiting = of_thread() if of_thread else getattr(torch._utils, "_sparse_tensors_to_validate", [])
    waiting[:] = [own for one in waiting for own in (one._cells if isinstance(one, LocalTensor) else (one,))]
    with plain_dispatch():
        original(*args, **kwargs)


# -- torch.testing


def _compare_values(mode: Any, original: Fn, pair: Any, actual: Tensor, expected: Tensor) -> None:
    """Compare the tensors of each rank.  Raises torch's error if they differ on all ranks; `RanksDiverge` if on some only."""
    given = [x.trigger_wait() if isinstance(x, AsyncCollectiveTensor) else x for x in (actual, expected)]
    held = [x for x in given if isinstance(x, LocalTensor)]
    if all(x._partition.uniform for x in held):
        original(pair, actual, expected)
        return
    kinds: dict[tuple[int, ...], int] = {}
    for rank in [rank for rank in mode.ranks if all(x._partition.row_of[rank] >= 0 for x in held)]:
        kinds.setdefault(tuple(x._partition.row_of[rank] for x in held), rank)
    found: dict[int, Any] = {}
    with mode.disable():
        for rank in kinds.values():
            try:
                own = [x.__localtensor_on__(rank) if isinstance(x, LocalTensor) else x for x in given]
                found[rank] = original(pair, *own)
            except ErrorMeta as error:
                error.msg = f"On rank {rank}: {error.msg}"
                found[rank] = error
    errors = [error for error in found.values() if error is not None]
    if errors and len(errors) < len(found):
        diverge = RanksDiverge(
            "torch.testing.assert_close", "equal", {rank: one is None for rank, one in found.items()}, user_place()
        )
        diverge.__cause__ = AssertionError(errors[0].msg)
        kind: Any = lambda _: diverge  # noqa: E731  # torch calls it with the message
        raise ErrorMeta(kind, str(diverge))
    if errors:
        raise errors[0]


# -- FSDP2: its shards are chunks of dim 0, padded to the length of the first


class RankChunks(list[Any]):
    """The chunks of a tensor, indexed by an int of each rank."""

    def __init__(self, mode: Mode, chunks: Sequence[Tensor]) -> None:
        super().__init__(chunks)
        self.mode = mode

    def __getitem__(self, place: SupportsIndex | slice) -> Any:
        if not is_rank_int(place):
            return super().__getitem__(place)
        with plain_dispatch():
            return wrap(*select([stacked_value(self.mode, x) for x in self], place.node.values), self.mode)


def _chunk_with_empty(mode: Mode, original: Fn, tensor: Tensor, num_chunks: int, dim: int) -> RankChunks:
    """Chunks where ranks beyond the last get zero rows, while torch gives them an empty tensor of one dim."""
    found = list(torch.chunk(tensor, num_chunks, dim=dim))
    return RankChunks(mode, found + [tensor.narrow(dim, 0, 0)] * (num_chunks - len(found)))


def _size_of_chunk(mode: Mode, original: Fn, chunk: Tensor, unchunked_size: Int, dim: int) -> torch.Size:
    return chunk.size() if is_rank_int(chunk.numel()) else original(chunk, unchunked_size, dim)


def _run_padded(mode: Mode, original: Fn, *args: object, **kwargs: object) -> object:
    with as_if_padded():
        return original(*args, **kwargs)


def _keep_storage(mode: Mode, original: Fn, tensor: Tensor) -> None:
    """Keep the memory of a LocalTensor: FSDP2 refills it before it reads it."""
    if not isinstance(tensor, LocalTensor):
        original(tensor)
    elif mode.recorder is not None:
        mode.recorder.resized(tensor, freed=original.__name__ == "free_storage")


def copy_in(mode: Mode, func: OpOverload, args: Args, kwargs: Kwargs) -> tuple[Tensor, Tensor]:
    """The input of FSDP2's gather; it need not be written to the output, since the gather does so."""
    inputs, output, *_ = args
    return torch.cat([x.reshape(-1) for x in inputs]).to(output.dtype), output


OP_HANDLERS: dict[str, Any] = {"fsdp::all_gather_copy_in": copy_in}


class _NotCompiled:
    """torch's flag by which `flex_attention` runs as it is written and not compiled: true in a thread with a mode."""

    def __init__(self, otherwise: object) -> None:
        self._otherwise = otherwise

    def __bool__(self) -> bool:
        return ambient.lockstep() is not None or bool(self._otherwise)


def _block_mask(mode: Mode, original: Fn, *args: object, **kwargs: object) -> object:
    """The block mask of context parallel, which torch compiles as a whole: it knows the rank's place, so it is made op by op."""
    return importlib.import_module(_FLEX).create_block_mask(*args, **kwargs)


def _compiled_block_mask(*args: object, **kwargs: object) -> object:
    """As torch's own, which it compiles when it is first called."""
    return _compile_block_mask()(*args, **kwargs)


@cache
def _compile_block_mask() -> Any:
    return torch.compile(importlib.import_module(_FLEX).create_block_mask, dynamic=False, fullgraph=True)


_FLEX, _FLAG = "torch.nn.attention.flex_attention", "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
_CONTEXT = "torch.distributed.tensor.experimental._context_parallel._attention"
_MASK = "_compiled_create_block_mask"
_FSDP = "torch.distributed.fsdp._fully_shard"
# Module, class (or ""), name, and replacement.  Tried on torch 2.11.0, 2.13.0 and 2.15.0; read in the sources of 2.12
# and 2.14.
PATCHES: list[tuple[str, str, str, Patch]] = [
    ("torch.testing._comparison", "TensorLikePair", "_compare_values", _compare_values),
    ("torch", "Tensor", "__deepcopy__", _deepcopy),
    ("torch._utils", "", "_validate_loaded_sparse_tensors", _validate_loaded),
    (f"{_FSDP}._fsdp_param", "", "_chunk_with_empty", _chunk_with_empty),
    (f"{_FSDP}._fsdp_param", "", "_get_dim_chunked_size", _size_of_chunk),
    (f"{_FSDP}._fsdp_param", "", "alloc_storage", _keep_storage),
    (f"{_FSDP}._fsdp_param", "", "free_storage", _keep_storage),
    (f"{_FSDP}._fsdp_param_group", "", "alloc_storage", _keep_storage),
    (f"{_FSDP}._fsdp_param", "FSDPParam", "_init_sharded_param", _run_padded),
    (f"{_FSDP}._fsdp_param", "FSDPParam", "reset_sharded_param", _run_padded),
]

# Unsupported: module, class, and why.
REFUSED: list[tuple[str, str, str]] = [
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "its reducer, in C++, reads the bytes of gradients"),
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel",
     "it keeps all weights in one tensor, whose memory it takes apart; fully_shard works"),
]  # fmt: skip


@cache
def install() -> None:
    """Patch torch.nn, torch.load and FSDP; tensors other than LocalTensors are treated as before."""
    original = torch.utils.swap_tensors

    def swap_tensors(t1: Tensor, t2: Tensor) -> None:
        _swap(original, t1, t2)

    swap_tensors.__doc__ = original.__doc__
    torch.utils.swap_tensors = swap_tensors
    torch.SymInt.__hash__ = _hash_of(torch.SymInt.__hash__)  # type: ignore[method-assign]
    for name, kind, function, replacement in PATCHES:
        module = importlib.import_module(name)
        owner = getattr(module, kind, None) if kind else module
        if owner is not None and hasattr(owner, function):
            patch_attribute(owner, function, replacement)
    attention = importlib.import_module(_FLEX)
    if hasattr(attention, _FLAG):
        setattr(attention, _FLAG, _NotCompiled(getattr(attention, _FLAG)))
    parallel = importlib.import_module(_CONTEXT)
    if hasattr(parallel, _MASK):
        setattr(parallel, _MASK, dispatch_by_mode(getattr(parallel, _MASK) or _compiled_block_mask, _block_mask))
    for name, kind, why in REFUSED:
        owner = getattr(importlib.import_module(name), kind, None)
        if owner is not None:
            patch_attribute(owner, "__init__", refuse(kind, why))
