"""DTensor in lockstep: the few functions of DTensor in which ranks differ, for all ranks at once.

Most of DTensor needs nothing: coordinates, offsets and sizes that differ are ints for each rank, with which its own
arithmetic works.  `FORMS` are the functions for which that is not enough; each is installed once and asks the
thread's mode, and the test of this room compares each with torch's own, run for every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import _collective_utils, _redistribute, _utils, placement_types
from torch.distributed.tensor.placement_types import Partial, Shard

from localtensor import lockstep_mesh
from localtensor.c10d import value_of
from localtensor.cells import gathered
from localtensor.chunks import take_chunk
from localtensor.engine import Operands, Reader, each_row, plainly
from localtensor.errors import NotInLockstep
from localtensor.lockstep_doors import Door, route
from localtensor.rank_ints import is_rank_int, rank_int, values_of
from localtensor.tensor import LocalTensor, wrap


def by_class(mode: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
    """torch's own function, once for each different set of arguments; for functions that do not communicate."""
    final = Operands(mode, original, args, kwargs).final
    if final is None or final.rows == 0:
        with mode.disable():
            return _joined(mode, [original(*args, **kwargs)], mode.everyone)
    found = []
    for cell, rows in enumerate(final.sizes):
        reader = Reader(final, cell)
        with plainly():
            each = list(each_row(reader, args, kwargs, rows))
        for row, (mine, named) in enumerate(each):
            rank = final.ranks(final.starts[cell] + row)[0]
            with mode.disable(), mode.standing_at(rank):
                found.append(original(*mine, **named))
    return _joined(mode, found, final)


def _joined(mode: Any, rows: list[Any], final: Any) -> Any:
    """One result for each row of a partition, as one value."""
    first = rows[0]
    if isinstance(first, Tensor):
        with torch._C._DisableTorchDispatch():
            return wrap(*gathered([row.detach() for row in rows], final), mode)
    if isinstance(first, bool) or first is None:
        if any(row != first for row in rows):
            raise NotInLockstep("DTensor", "ranks decide differently")
        return first
    if isinstance(first, int):
        return rank_int(np.array(rows)[final.row_of], final.held)
    if isinstance(first, list | tuple):
        if len({len(row) for row in rows}) > 1:
            raise NotInLockstep("DTensor", "ranks get lists of different lengths")
        return type(first)(_joined(mode, [row[i] for row in rows], final) for i in range(len(first)))
    return first


def _differs(*values: Any) -> bool:
    return any(is_rank_int(value) for value in values)


# -- cutting


def _select_split(mode: Any, original: Any, shard: Shard, tensor: Any, num_chunks: int, index: Any, **options: Any) -> Any:
    """Each rank's own chunk: torch cuts all of them on each rank."""
    mine = values_of(index, mode.world)
    if mine is None or options.get("with_padding", True) or type(shard) is not Shard:
        return by_class(mode, original, shard, tensor, num_chunks, index, **options)
    return _chunk(mode, tensor, shard.dim, num_chunks, index)


def _chunk(mode: Any, tensor: Tensor, dim: int, chunks: int, index: Any) -> LocalTensor:
    held = index.node.held
    places = np.array(index.node.values) if held is None else np.where(held, index.node.values, -1)
    with plainly():
        return wrap(*take_chunk(value_of(mode, tensor), dim % max(tensor.dim(), 1), chunks, places), mode)


def _unpad_with_sizes(
    mode: Any, original: Any, dim: int, local_tensor: Tensor, pad_sizes: Sequence[int], rank: Any, contiguous: bool
) -> Any:
    """Each rank drops its own padding: the list of paddings is indexed by rank."""
    places = values_of(rank, mode.world)
    if places is None:
        return original(dim, local_tensor, pad_sizes, rank, contiguous)
    padding = rank_int(np.array(pad_sizes, np.int64)[places], rank.node.held)
    if type(padding) is int and padding == 0:
        return local_tensor
    kept = local_tensor.narrow(dim, 0, local_tensor.size(dim) - padding)
    return kept.contiguous() if contiguous else kept


def _pad(mode: Any, original: Any, tensor: Tensor, pad_dim: int, pad_size: Any) -> Any:
    if not _differs(pad_size):
        return original(tensor, pad_dim, pad_size)
    pad: list[Any] = [0, 0] * (tensor.dim() - pad_dim)
    pad[-1] = pad_size
    return torch.nn.functional.pad(tensor, pad)


def _unpad(mode: Any, original: Any, tensor: Tensor, pad_dim: int, pad_size: Any) -> Any:
    if not _differs(pad_size):
        return original(tensor, pad_dim, pad_size)
    return tensor.narrow(pad_dim, 0, tensor.size(pad_dim) - pad_size)


# -- communicating


def _scatter(
    mode: Any, original: Any, output: Any, scatter_list: Any, mesh: Any, mesh_dim: int = 0, async_op: bool = False,
    *, group_src: int = 0,
) -> Any:  # fmt: skip
    """The roots of all groups scatter at once: they all have a list, as every rank has here."""
    if output.is_meta:
        return None
    group = mesh.get_group(mesh_dim)
    with mode.standing_at(group.family.groups[0][group_src]):
        return dist.scatter(output, scatter_list, group=group, async_op=async_op, group_src=group_src)


def _all_to_all(mode: Any, original: Any, local: Any, gather_dim: int, shard_dim: int, mesh: Any, mesh_dim: int) -> Any:
    """As DTensor does it on this device: on the CPU, gather all, then keep a chunk."""
    if mesh.device_type != "cpu":
        return original(local, gather_dim, shard_dim, mesh, mesh_dim)
    functional: Any = torch.distributed._functional_collectives
    gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor  # the name before 2.13
    whole = gather(local, gather_dim, (mesh, mesh_dim))
    whole = whole.wait() if hasattr(whole, "wait") else whole
    index = mesh.get_local_rank(mesh_dim)
    chunks = mesh.size(mesh_dim)
    return _chunk(mode, whole, shard_dim, chunks, index) if is_rank_int(index) else whole.chunk(chunks, shard_dim)[index]


def _chunk_cat(
    mode: Any, original: Any, tensor: Tensor, num_chunks: int, narrow_dim: int, cat_dim: int = 0
) -> Tensor:
    """Chunks along one dim, joined along another: what a gather or scatter does on dims other than 0."""
    size = tensor.shape[narrow_dim]
    if narrow_dim == cat_dim or num_chunks < 2 or not isinstance(size, int) or not size or size % num_chunks:
        return original(tensor, num_chunks, narrow_dim, cat_dim)  # type: ignore[no-any-return]
    apart = tensor.unflatten(narrow_dim, (num_chunks, size // num_chunks)).movedim(narrow_dim, cat_dim)
    return apart.flatten(cat_dim, cat_dim + 1)


# -- partial values


def _partition_value(mode: Any, original: Any, partial: Partial, tensor: Tensor, mesh: Any, mesh_dim: int) -> Any:
    """What each rank holds of a replicated value that becomes partial: the first rank of a sum differs."""
    place = mesh.get_local_rank(mesh_dim)
    if type(partial) is not Partial or not is_rank_int(place):
        return original(partial, tensor, mesh, mesh_dim)
    first = rank_int((np.array(place.node.values) != 0).astype(np.int64), place.node.held)

    def of_rank(local: Tensor, later: int, rank: int) -> Tensor:
        with mode.standing_at(rank):
            return original(partial, local, mesh, mesh_dim).clone()  # type: ignore[no-any-return]

    return by_class(mode, _AsSomeRank(mode, of_rank), tensor, first)


class _AsSomeRank:
    """A function of each class's values, which is told a rank of the class."""

    def __init__(self, mode: Any, fn: Any) -> None:
        self.mode, self.fn = mode, fn

    def __call__(self, *args: Any) -> Any:
        with self.mode.standing_at(self.mode.standing):
            return self.fn(*args, self.mode.standing)


def _mask(mode: Any, original: Any, tensor: Any, offset: Any, size: Any) -> Any:
    """Which rows a rank does not have, and the others' places in its own shard."""
    if not _differs(offset, size):
        return original(tensor, offset, size)
    start, length = _as_tensor(mode, offset), _as_tensor(mode, size)
    mask = (tensor < start) | (tensor >= start + length)
    return mask, torch.where(mask, 0, tensor - start).to(tensor.dtype)


def _as_tensor(mode: Any, number: Any) -> LocalTensor:
    """The int of each rank as a tensor without dims."""
    values = values_of(number, mode.world)
    values = np.full(mode.world, number) if values is None else values
    distinct, row_of = np.unique(values, return_inverse=True)
    with torch._C._DisableTorchDispatch():
        from localtensor.folding import partition

        rows = torch.from_numpy(distinct.astype(np.int64))
        return wrap((rows if len(rows) > 1 else rows[0],), partition(row_of.reshape(-1), [len(rows)]), mode)


# -- shapes


def _global_shape(mode: Any, original: Any, shape: Any, mesh: Any, placements: Any) -> Any:
    """The sum of all ranks' sizes on the sharded dim: torch gathers them."""
    if len(placements) != 1 or mesh.ndim != 1 or type(placements[0]) is not Shard:
        return original(shape, mesh, placements)
    dim = placements[0].dim
    sizes = values_of(shape[dim], mode.world)
    whole = list(shape)
    ranks = lockstep_mesh.ranks_of(mesh).reshape(-1)
    whole[dim] = int(shape[dim]) * mesh.size() if sizes is None else int(sizes[ranks].sum())
    return torch.Size(whole)


# Where a function stands, and what serves it.  Tried on torch 2.13.0; read in the sources of 2.11 to 2.15.
FORMS: list[tuple[Any, str, Door]] = [
    (Shard, "_select_split_tensor", _select_split),
    (Shard, "_maybe_unpad_tensor_with_sizes", _unpad_with_sizes),
    (placement_types._StridedShard, "_select_split_tensor", _select_split),
    (placement_types._StridedShard, "_select_shard", by_class),
    (placement_types._StridedShard, "_local_shard_size", by_class),
    (placement_types._StridedShard, "local_shard_size_and_offset", by_class),
    (placement_types._MaskPartial, "_mask_tensor", _mask),
    (Partial, "_partition_value", _partition_value),
    (_utils, "_get_shard_size_and_offsets", by_class),
    (_utils, "_get_first_offset", by_class),
    (_utils, "compute_global_tensor_shape", _global_shape),
    (torch._utils, "_chunk_or_narrow_cat", _chunk_cat),
    (_collective_utils, "pad_tensor", _pad),
    (_collective_utils, "unpad_tensor", _unpad),
    (_collective_utils, "mesh_scatter", _scatter),
    (_collective_utils, "shard_dim_alltoall", _all_to_all),
]
_installed: list[bool] = []


def install() -> None:
    """DTensor asks the thread's mode, from now on; also where one of its modules has imported a function by name."""
    if _installed:
        return
    _installed.append(True)
    lockstep_mesh.install()
    for owner, name, ours in FORMS:
        if not hasattr(owner, name):
            continue  # this version of torch does it elsewhere
        before = getattr(owner, name)
        route(owner, name, ours)
        for module in (placement_types, _redistribute, _utils, torch.distributed._functional_collectives):
            if module is not owner and getattr(module, name, None) is before:
                setattr(module, name, getattr(owner, name))
