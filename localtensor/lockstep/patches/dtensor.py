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
from torch.distributed.tensor import DTensor, _api, _collective_utils, _utils
from torch.distributed.tensor.placement_types import Replicate, Shard, _MaskPartial, _StridedShard
from torch.utils import _python_dispatch

from localtensor._util.call_sites import Fn
from localtensor.lockstep.comms.collectives import select, stacked_value
from localtensor.lockstep.dispatch.dispatcher import plain_dispatch
from localtensor.lockstep.patches import device_mesh, nn_modules, shard_offsets
from localtensor.lockstep.patches.device_mesh import Narrowing, for_each_rank_group, keep_ranks, wait_for
from localtensor.lockstep.patches.rank_queries import Patch, patch_attribute
from localtensor.lockstep.patches.shard_offsets import AnyShard, any_differs, own_chunk
from localtensor.lockstep.values.local_tensor import LocalTensor, Mode, wrap
from localtensor.lockstep.values.partition import NOWHERE, Array, partition
from localtensor.lockstep.values.rank_int import Int, is_rank_int, on_rank, rank_int, rank_values


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
    padding = options.get("with_padding", True)
    if type(shard) is Shard and not padding and 0 <= shard.dim < tensor.dim():
        indices, keep_order = _indices_of_ranks(index), options.get("clone", True)
        return own_chunk(mode, tensor, shard.dim, num_chunks, indices, keep_order=keep_order)

    def cut(of: Narrowing) -> Any:
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
    if not any_differs(pad_size):
        return original(tensor, pad_dim, pad_size)
    pad: list[Any] = [0, 0] * (tensor.dim() - pad_dim)
    pad[-1] = pad_size
    return torch.nn.functional.pad(tensor, pad)


def _unpad(mode: Mode, original: Fn, tensor: Tensor, pad_dim: int, pad_size: Any) -> object:
    if not any_differs(pad_size):
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
        with mode.running_as(members[0]):
            return original(output, scatter_list, mesh, mesh_dim, async_op, group_src=group_src)  # raises
    with mode.running_as(members[group_src]):
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
    return _to_replicate_by_group(mode, original, shard, local, mesh, mesh_dim, current_logical_shape)


_to_replicate_by_group = by_rank_group(4, "current_logical_shape")


def _chunk_cat(mode: Mode, original: Fn, tensor: Tensor, num_chunks: int, narrow_dim: int, cat_dim: int = 0) -> Any:
    """Chunks along one dim concatenated along another, as for gathers and scatters on dims other than 0."""

    def on_group(of: Narrowing) -> Any:
        x, size = of(tensor), of(tensor.shape[narrow_dim])
        if narrow_dim == cat_dim or num_chunks < 2 or not size or size % num_chunks:
            return original(x, num_chunks, narrow_dim, cat_dim)
        apart = x.unflatten(narrow_dim, (num_chunks, size // num_chunks)).movedim(narrow_dim, cat_dim)
        return apart.flatten(cat_dim, cat_dim + 1)

    return for_each_rank_group(mode, _sizes(tensor), on_group)


# -- meshes that leave ranks out


def _shard(
    mode: Mode, original: Fn, shard: AnyShard, tensor: Tensor, mesh: DeviceMesh, *args: object, **kwargs: object
) -> object:
    return _of_members(mode, _shard_by_group(mode, original, shard, tensor, mesh, *args, **kwargs), mesh)


_shard_by_group = by_rank_group(1, "tensor")


def _replicate(
    mode: Mode, original: Fn, cls: type, tensor: Tensor, mesh: DeviceMesh, *args: object, **kwargs: object
) -> object:
    return _of_members(mode, original(cls, tensor, mesh, *args, **kwargs), mesh)


def _from_local(
    mode: Mode, original: Fn, ctx: Any, local: Tensor, mesh: DeviceMesh, placements: object, check: bool, *given: Any
) -> object:
    """Make a DTensor of local tensors; `given` are the shape, the strides and the placements of a gradient, in torch's order."""
    members = device_mesh.mesh_members(mode, mesh)
    if len(given) > 1 and given[1] is not None and any_differs(*given[1]):
        # Backward of `to_local`: torch multiplies the strides of each rank's own piece, so uneven shards give each rank others.
        # A DTensor in lockstep has one stride for all ranks; that of the mesh's first rank is the one of the longest piece.
        first = int(mesh.mesh.flatten()[0])
        given = (given[0], tuple(on_rank(x, first) for x in given[1]), *given[2:])
    made = original(ctx, keep_ranks(mode, local, members), mesh, placements, check, *given)
    if members is not None:
        made._local_tensor.shape_elsewhere = (0,)
    return made


def _made(mode: Mode, original: Fn, *args: object, **kwargs: object) -> object:
    made = original(*args, **kwargs)
    made._local_tensor = _of_members(mode, made._local_tensor, made.device_mesh)
    return made


def _of_members(mode: Mode, local: object, mesh: DeviceMesh) -> object:
    """The part of a tensor of the ranks of the mesh.  torch gives the others an empty tensor."""
    members = device_mesh.mesh_members(mode, mesh)
    kept = keep_ranks(mode, local, members)
    if members is not None and isinstance(kept, LocalTensor):
        kept.shape_elsewhere = (0,)
    return kept


def _to_local(mode: Mode, original: Fn, x: DTensor, **kwargs: object) -> object:
    """The local tensor; on ranks outside of the mesh a branch finds what torch gives them: of the result of an op without dims zero."""
    found = original(x, **kwargs)
    if isinstance(found, LocalTensor) and device_mesh.mesh_members(mode, x.device_mesh) is not None:
        found.shape_elsewhere = getattr(x._local_tensor, "shape_elsewhere", None) or ((0,) if x.dim() else ())
    return found


def equal(mode: Any, func: Any, args: Any, kwargs: Any) -> bool:
    """Whether DTensors are equal: torch asks each rank about its own shards, and then all of them for the least answer."""
    mode.answers = []
    _python_dispatch._push_mode(mode)
    try:
        return bool(func(*args, **kwargs)) and all(mode.answers)
    finally:
        _python_dispatch._pop_mode()
        mode.answers = None


# The owner of each function, its name, and its replacement.  Tried on torch 2.13.0 and 2.15.0; read in the sources of 2.11 to 2.14.
PATCHES: list[tuple[Any, str, Patch]] = [
    (Shard, "_select_split_tensor", _select_split),
    (Shard, "_maybe_unpad_tensor_with_sizes", _unpad_with_sizes),
    (Shard, "_shard_tensor", _shard),
    (Shard, "_reduce_shard_tensor", by_rank_group(1, "tensor")),
    (Shard, "_to_replicate_tensor", _to_replicate),
    (Shard, "_to_new_shard_dim", by_rank_group(4, "current_logical_shape")),
    (Shard, "local_shard_size_and_offset", shard_offsets.local_size),
    (_StridedShard, "_select_split_tensor", _select_split),
    (_StridedShard, "_select_shard", _select_shard),
    (_StridedShard, "_shard_tensor", _shard),
    (_StridedShard, "_to_replicate_tensor", by_rank_group(4, "current_logical_shape")),
    (_StridedShard, "_local_shard_size", shard_offsets.length),
    (_StridedShard, "local_shard_size_and_offset", shard_offsets.strided_size),
    (_MaskPartial, "_mask_tensor", nn_modules.mask_of_rows),
    (Replicate, "_make_replicate_tensor", _replicate),
    (_api._FromTorchTensor, "forward", _from_local),
    (_api, "_dtensor_init_helper", _made),
    (DTensor, "to_local", _to_local),
    (_utils, "_compute_local_shape_and_global_offset", shard_offsets.shapes_and_offsets),
    (_utils, "compute_global_tensor_shape", shard_offsets.global_shape),
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
