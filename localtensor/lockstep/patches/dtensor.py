"""DTensor in lockstep: replacements for the few functions of DTensor that branch on the rank.

Most of DTensor runs unchanged: coordinates, offsets and sizes that differ are ints of each rank, on which its own
arithmetic works.  `PATCHES` are the other functions; tests compare each replacement with torch's own function, run for
every rank.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import _api, _collective_utils, _utils
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard, _MaskPartial, _StridedShard

from localtensor._util.call_sites import Fn
from localtensor.lockstep.comms.collectives import select, stacked_value
from localtensor.lockstep.dispatch.dispatcher import plain_dispatch
from localtensor.lockstep.patches import device_mesh, nn_modules, shard_offsets
from localtensor.lockstep.patches.device_mesh import for_each_rank_group, keep_ranks, wait_for
from localtensor.lockstep.patches.rank_queries import Patch, patch_attribute
from localtensor.lockstep.patches.shard_offsets import own_chunk, shard_sizes_and_starts
from localtensor.lockstep.values.local_tensor import LocalTensor, Mode, wrap
from localtensor.lockstep.values.partition import NOWHERE, Array, by_value, partition
from localtensor.lockstep.values.rank_int import Int, is_rank_int, rank_int, rank_values

AnyShard = Shard | _StridedShard


def _any_differs(*values: object) -> bool:
    return any(is_rank_int(value) for value in values)


def by_rank_group(place: int, name: str) -> Patch:
    """A patch that runs torch's own function for each rank group by one argument: ints, or a tensor's sizes."""

    def patch(mode: Mode, original: Fn, *args: object, **kwargs: object) -> object:
        given = args[place] if place < len(args) else kwargs[name]
        given = _sizes(given) if isinstance(given, Tensor) else given
        ints = given if isinstance(given, Sequence) else (given,)
        return for_each_rank_group(
            mode, ints, lambda of: original(*map(of, args), **{k: of(v) for k, v in kwargs.items()})
        )

    return patch


# -- cutting


def _select_split(
    mode: Mode, original: Fn, shard: AnyShard, tensor: Tensor, num_chunks: int, index: Int, **options: Any
) -> Any:
    """Each rank's own chunk; torch cuts all chunks on each rank."""
    if not is_rank_int(index):
        return for_each_rank_group(
            mode, _sizes(tensor), lambda of: original(shard, of(tensor), num_chunks, index, **options)
        )
    if type(shard) is Shard and not options.get("with_padding", True) and 0 <= shard.dim < tensor.dim():
        indices, keep_order = _indices_of_ranks(index), options.get("clone", True)
        return own_chunk(mode, tensor, shard.dim, num_chunks, indices, keep_order=keep_order)
    padding = options.get("with_padding", True)

    def cut(of: Any) -> Any:
        whole = shard._split_tensor(of(tensor), num_chunks, with_padding=padding, contiguous=False)[0]
        return _select_by_index(mode, whole, of(index))

    return for_each_rank_group(mode, _sizes(tensor), cut)


def _sizes(x: object) -> Any:
    """The sizes of a tensor if they may differ between ranks, else ()."""
    return x.shape if isinstance(x, LocalTensor) and len(x._cells) > 1 else ()


def _indices_of_ranks(index: Any) -> Array:
    held = index.node.held
    return np.array(index.node.values) if held is None else np.where(held, index.node.values, -1)


def _select_by_index(mode: Mode, listed: Sequence[Tensor], index: Any) -> object:
    """A copy of the tensor at each rank's index."""
    if not is_rank_int(index):
        return listed[index].clone()
    with plain_dispatch():
        return wrap(*select([stacked_value(mode, x) for x in listed], _indices_of_ranks(index)), mode)


def _select_shard(mode: Mode, original: Fn, shards: Sequence[Tensor], shard_index: Int) -> object:
    return _select_by_index(mode, shards, shard_index)


def _unpad_with_sizes(
    mode: Mode, original: Fn, dim: int, local_tensor: Tensor, pad_sizes: Sequence[int], rank: Any, contiguous: bool
) -> object:
    """Remove each rank's own padding, `pad_sizes[rank]`."""
    places = rank_values(rank, mode.world)
    if places is None:
        return original(dim, local_tensor, pad_sizes, rank, contiguous)
    padding = rank_int(np.array(pad_sizes, np.int64)[places], rank.node.held)
    local_tensor = _on_holders(mode, local_tensor, rank)
    if type(padding) is int and padding == 0:
        return local_tensor
    kept = local_tensor.narrow(dim, 0, local_tensor.size(dim) - padding)
    return kept.contiguous() if contiguous else kept


def _pad(mode: Mode, original: Fn, tensor: Tensor, pad_dim: int, pad_size: Int) -> object:
    if not _any_differs(pad_size):
        return original(tensor, pad_dim, pad_size)
    pad: list[Any] = [0, 0] * (tensor.dim() - pad_dim)
    pad[-1] = pad_size
    return torch.nn.functional.pad(tensor, pad)


def _unpad(mode: Mode, original: Fn, tensor: Tensor, pad_dim: int, pad_size: Any) -> object:
    if not _any_differs(pad_size):
        return original(tensor, pad_dim, pad_size)
    tensor = _on_holders(mode, tensor, pad_size)
    return tensor.narrow(pad_dim, 0, tensor.size(pad_dim) - pad_size)


def _on_holders(mode: Mode, x: Tensor, number: torch.SymInt) -> Tensor:
    """The tensor on the ranks that hold this int: on a mesh of some ranks, the others hold none."""
    held = number.node.held
    return x if held is None else keep_ranks(mode, x, partition(np.where(held, 0, NOWHERE), [1]))


# -- communicating


def _scatter(
    mode: Mode, original: Fn, output: Tensor, scatter_list: list[Tensor] | None, mesh: Any, mesh_dim: int = 0, async_op: bool = False,
    *, group_src: int = 0,
) -> object:  # fmt: skip
    """Scatter from the roots of all groups at once; in lockstep every rank has the list."""
    if output.is_meta:
        return None
    group = mesh.get_group(mesh_dim)
    members = group.family.groups[0]
    if not 0 <= group_src < len(members):
        with mode.standing_at(members[0]):
            return original(output, scatter_list, mesh, mesh_dim, async_op, group_src=group_src)  # raises
    with mode.standing_at(members[group_src]):
        return dist.scatter(output, scatter_list, group=group, async_op=async_op, group_src=group_src)


def _all_to_all(
    mode: Mode, original: Fn, local: Tensor, gather_dim: int, shard_dim: int, mesh: DeviceMesh, mesh_dim: int
) -> object:
    """DTensor's algorithm for this device: on the CPU, gather all, then keep a chunk."""
    index = mesh.get_local_rank(mesh_dim)
    if mesh.device_type != "cpu" or not is_rank_int(index):
        return original(local, gather_dim, shard_dim, mesh, mesh_dim)
    whole = wait_for(shard_offsets.all_gather(local, gather_dim, (mesh, mesh_dim)))
    return own_chunk(mode, whole, shard_dim, mesh.size(mesh_dim), _indices_of_ranks(index), keep_order=False)


def _to_replicate(
    mode: Mode, original: Fn, shard: AnyShard, local: Any, mesh: DeviceMesh, mesh_dim: int, current_logical_shape: Any
) -> object:
    """Gather uneven shards in three steps; shards that are even, or uneven on several axes, as torch does."""
    size = current_logical_shape[shard.dim]
    quick = type(shard) is Shard and type(local) is LocalTensor and isinstance(size, int) and size % mesh.size(mesh_dim)
    if quick and not (local.requires_grad and torch.is_grad_enabled()):
        return shard_offsets.gather_uneven(mode, local, shard.dim, size, mesh, mesh_dim)
    return _to_replicate_by_kind(mode, original, shard, local, mesh, mesh_dim, current_logical_shape)


_to_replicate_by_kind = by_rank_group(4, "current_logical_shape")


def _chunk_cat(mode: Mode, original: Fn, tensor: Tensor, num_chunks: int, narrow_dim: int, cat_dim: int = 0) -> Any:
    """Chunks along one dim concatenated along another, as for gathers and scatters on dims other than 0."""

    def of_kind(of: Any) -> Any:
        x, size = of(tensor), of(tensor.shape[narrow_dim])
        if narrow_dim == cat_dim or num_chunks < 2 or not size or size % num_chunks:
            return original(x, num_chunks, narrow_dim, cat_dim)
        apart = x.unflatten(narrow_dim, (num_chunks, size // num_chunks)).movedim(narrow_dim, cat_dim)
        return apart.flatten(cat_dim, cat_dim + 1)

    return for_each_rank_group(mode, _sizes(tensor), of_kind)


# -- the rows of an embedding


def _mask(mode: Mode, original: Fn, tensor: Tensor, offset: Int, size: Int) -> Any:
    """The mask of rows that a rank does not have, and the indices of the others in its shard."""
    if not _any_differs(offset, size):
        return original(tensor, offset, size)
    start, length = _as_tensor(mode, offset), _as_tensor(mode, size)
    mask = (tensor < start) | (tensor >= start + length)
    return mask, torch.where(mask, 0, tensor - start).to(tensor.dtype)


def _as_tensor(mode: Mode, number: Any) -> Any:
    """The int of each rank as a tensor without dims; a plain int as it is."""
    values = rank_values(number, mode.world)
    if values is None:
        return number
    held = number.node.held
    with plain_dispatch():
        rows = torch.from_numpy(np.unique(values if held is None else values[held]))
    return wrap((rows,), partition(by_value(values, held).row_of, [len(rows)]), mode)


# -- shapes


def _global_shape(mode: Mode, original: Fn, shape: Any, mesh: DeviceMesh, placements: Any) -> object:
    """The global shape: the sum of all ranks' sizes on the sharded dim, which torch gathers."""
    if len(placements) != 1 or mesh.ndim != 1 or not isinstance(placements[0], Shard):
        return original(shape, mesh, placements)
    dim, whole = placements[0].dim, list(shape)
    if any(is_rank_int(size) for place, size in enumerate(shape) if place != dim % len(whole)):
        raise RuntimeError("Non-sharded dimensions should have identical size across ranks.")  # torch's own message
    sizes, total = rank_values(shape[dim], mode.world), np.zeros(mode.world, np.int64)
    with mode.disable():
        ranks = device_mesh.mesh_ranks(mesh)
    total[ranks] = ranks.shape[1] * shape[dim] if sizes is None else sizes[ranks].sum(1, keepdims=True)
    held = np.isin(np.arange(mode.world), ranks)
    whole[dim] = rank_int(total, None if held.all() else held)
    return torch.Size(whole)


def _shapes_and_offsets(
    mode: Mode, original: Fn, global_shape: Sequence[Int], mesh_shape: Sequence[int], my_coordinate: Any, placements: Any,
    skip_offset: bool = False,
) -> object:  # fmt: skip
    """The shape of each rank's shard, and its offset in the whole tensor."""
    if my_coordinate is None or _any_differs(*global_shape):
        return original(global_shape, mesh_shape, my_coordinate, placements, skip_offset)
    listed = isinstance(my_coordinate, list | tuple)
    places = [my_coordinate[axis] if listed else my_coordinate(axis) for axis in range(len(placements))]
    cut = {axis: _cut(placed, mesh_shape[axis]) for axis, placed in enumerate(placements) if _is_shard(placed)}
    if not _any_differs(*(places[axis] for axis in cut)):
        return original(global_shape, mesh_shape, places, placements, skip_offset)
    shape, offset = list(global_shape), [0] * len(global_shape)
    for dim in {placements[axis].dim for axis in cut}:
        axes = [axis for axis in cut if placements[axis].dim == dim]
        even = shard_offsets.even_size(shape[dim], [cut[axis] for axis in axes]) if skip_offset else None
        if even is not None:  # else its sizes are those of the example: a graph for them alone
            shape[dim] = even
            continue
        sizes, starts = shard_sizes_and_starts(int(shape[dim]), tuple(cut[axis] for axis in axes), int(shape[dim]))
        shape[dim], offset[dim] = _entries_at(mode, (sizes, starts), [places[axis] for axis in axes])
    return tuple(shape), () if skip_offset else tuple(offset)


def _is_shard(placement: Placement) -> bool:
    return isinstance(placement, Shard | _StridedShard)


def _cut(placement: Placement, chunks: int) -> tuple[int, int]:
    return int(chunks), int(placement.split_factor) if isinstance(placement, _StridedShard) else 0


def _entries_at(mode: Mode, tables: Sequence[Any], places: Sequence[Any]) -> list[Any]:
    """The entry of each rank in each table, by its coordinates."""
    index: list[Any] = []
    held = np.ones(mode.world, bool)
    for place in places:
        values = rank_values(place, mode.world)
        index.append(np.full(mode.world, place) if values is None else values)
        if values is not None and place.node.held is not None:
            held &= place.node.held
    where = tuple(np.where(held, one, 0) for one in index)
    return [rank_int(table[where], None if held.all() else held) for table in tables]


def _size(mode: Mode, original: Fn, curr_local_size: Int, num_chunks: int, rank: Int) -> object:
    """The size of each rank's shard, and its first index; torch 2.11 also branches on the rank."""
    by = [curr_local_size, rank] if torch.__version__.startswith("2.11.") else [curr_local_size]
    return for_each_rank_group(mode, by, lambda of: original(of(curr_local_size), of(num_chunks), of(rank)))


def _strided_size(
    mode: Mode, original: Fn, shard: AnyShard, curr_local_size: Int, num_chunks: int, rank: Int,
    *offsets: object, **named: object,
) -> object:  # fmt: skip
    """The size of each rank's strided shard, and its offsets by `offset_mode` (before 2.13 `return_first_offset`)."""
    offset_mode = next(iter((*offsets, *named.values())), None)
    wants_all = offset_mode is False or getattr(offset_mode, "name", "") == "ALL"

    def of_kind(of: Any) -> Any:
        size, place = of(curr_local_size), of(rank)
        if not is_rank_int(place) or wants_all:
            return for_each_rank_group(
                mode, [place], lambda of: original(shard, size, num_chunks, of(place), *offsets, **named)
            )
        sizes, starts = shard_sizes_and_starts(size, (_cut(shard, num_chunks),), -1)
        own, first = _entries_at(mode, (sizes, starts), [place])
        return own, None if getattr(offset_mode, "name", "") == "NONE" else first

    return for_each_rank_group(mode, [curr_local_size], of_kind)


def _length(mode: Mode, original: Fn, sharded_indices: Sequence[Tensor], rank: Int) -> object:
    if not is_rank_int(rank):
        return original(sharded_indices, rank)
    return _entries_at(mode, [np.array([len(one) for one in sharded_indices])], [rank])[0]


# -- meshes that leave ranks out


def _shard(
    mode: Mode, original: Fn, shard: AnyShard, tensor: Tensor, mesh: DeviceMesh, *args: object, **kwargs: object
) -> object:
    found = _shard_by_kind(mode, original, shard, tensor, mesh, *args, **kwargs)
    return keep_ranks(mode, found, device_mesh.mesh_members(mode, mesh))


_shard_by_kind = by_rank_group(1, "tensor")


def _replicate(
    mode: Mode, original: Fn, cls: type, tensor: Tensor, mesh: DeviceMesh, *args: object, **kwargs: object
) -> object:
    return keep_ranks(mode, original(cls, tensor, mesh, *args, **kwargs), device_mesh.mesh_members(mode, mesh))


def _from_local(
    mode: Mode, original: Fn, ctx: Any, local: Tensor, mesh: DeviceMesh, *args: object, **kwargs: object
) -> object:
    return original(ctx, keep_ranks(mode, local, device_mesh.mesh_members(mode, mesh)), mesh, *args, **kwargs)


# The owner of each function, its name, and its replacement.  Tried on torch 2.13.0 and 2.15.0; read in the sources of 2.11 to 2.14.
PATCHES: list[tuple[Any, str, Patch]] = [
    (Shard, "_select_split_tensor", _select_split),
    (Shard, "_maybe_unpad_tensor_with_sizes", _unpad_with_sizes),
    (Shard, "_shard_tensor", _shard),
    (Shard, "_reduce_shard_tensor", by_rank_group(1, "tensor")),
    (Shard, "_to_replicate_tensor", _to_replicate),
    (Shard, "_to_new_shard_dim", by_rank_group(4, "current_logical_shape")),
    (Shard, "local_shard_size_and_offset", _size),
    (_StridedShard, "_select_split_tensor", _select_split),
    (_StridedShard, "_select_shard", _select_shard),
    (_StridedShard, "_shard_tensor", _shard),
    (_StridedShard, "_to_replicate_tensor", by_rank_group(4, "current_logical_shape")),
    (_StridedShard, "_local_shard_size", _length),
    (_StridedShard, "local_shard_size_and_offset", _strided_size),
    (_MaskPartial, "_mask_tensor", _mask),
    (Replicate, "_make_replicate_tensor", _replicate),
    (_api._FromTorchTensor, "forward", _from_local),
    (_utils, "_compute_local_shape_and_global_offset", _shapes_and_offsets),
    (_utils, "compute_global_tensor_shape", _global_shape),
    (torch._utils, "_maybe_view_chunk_cat", by_rank_group(0, "res")),
    (torch._utils, "_chunk_or_narrow_cat", _chunk_cat),
    (_collective_utils, "pad_tensor", _pad),
    (_collective_utils, "unpad_tensor", _unpad),
    (_collective_utils, "mesh_scatter", _scatter),
    (_collective_utils, "shard_dim_alltoall", _all_to_all),
]


@cache
def install() -> None:
    """Patch DTensor, also where one of its modules has imported a function by name."""
    device_mesh.install()
    nn_modules.install()
    for owner, name, replacement in PATCHES:
        if not hasattr(owner, name):
            continue  # this version of torch lacks it
        before = getattr(owner, name)
        patch_attribute(owner, name, _waiting_first(replacement))
        if isinstance(owner, ModuleType):
            _replace_imported(name, before, getattr(owner, name))


def _replace_imported(name: str, before: object, after: object) -> None:
    """Put the patched function wherever a module has imported the original by its name: torch's modules, and a user's."""
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and vars(module).get(name) is before:
            setattr(module, name, after)


def _waiting_first(replacement: Patch) -> Patch:
    """The patch with all arguments waited for: a functional collective returns a wrapper."""

    def patch(mode: Mode, original: Fn, *args: object, **kwargs: object) -> object:
        return replacement(
            mode, original, *map(wait_for, args), **{name: wait_for(value) for name, value in kwargs.items()}
        )

    return patch
