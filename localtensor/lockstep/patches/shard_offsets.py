"""The sizes and offsets of all shards of one dim, each rank's chunk of a tensor, and gathers of uneven shards.

A dim can be cut by several axes of a mesh, from left to right.  A cut is (chunks, stride): plain cuts follow
torch.chunk and have stride 0; a strided one cuts the dim into `stride` pieces first, and a shard is a chunk of each.
"""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement, Shard, _StridedShard

from localtensor._util.call_sites import Args, Fn, Kwargs
from localtensor.errors import NotTraceable
from localtensor.layout.shards import chunk_bounds
from localtensor.lockstep.comms.collectives import StackedValue, has_no_values, stacked_value
from localtensor.lockstep.dispatch.dispatcher import plain_dispatch
from localtensor.lockstep.patches.device_mesh import Narrowing, for_each_rank_group, mesh_ranks, wait_for
from localtensor.lockstep.values.formatting import user_place
from localtensor.lockstep.values.local_tensor import LocalTensor, Mode, wrap
from localtensor.lockstep.values.partition import NOWHERE, Array, by_value, partition
from localtensor.lockstep.values.rank_int import Int, is_rank_int, rank_int, rank_values
from localtensor.lockstep.values.stacks import merge_alike

_FAKE = torch._C._TorchDispatchModeKey.FAKE
Cut = tuple[int, int]
AnyShard = Shard | _StridedShard


def any_differs(*values: object) -> bool:
    """Whether any of these is an int that differs between ranks."""
    return any(is_rank_int(value) for value in values)


@lru_cache(1024)
def shard_sizes_and_starts(size: int, cuts: tuple[Cut, ...], past: int) -> tuple[Array, Array]:
    """The size and the first index of each shard, int64 with a dim for each cut; an empty one begins at `past`.

    >>> shard_sizes_and_starts(5, ((4, 0),), 5)
    (array([2, 2, 1, 0]), array([0, 2, 4, 5]))
    >>> shard_sizes_and_starts(9, ((4, 2),), 9)[0]
    array([3, 3, 2, 1])
    """
    sizes, starts = _plain(size, cuts) if not any(stride for _, stride in cuts) else _strided(size, cuts)
    return sizes, np.where(sizes > 0, starts, past)


def even_size(size: Int, cuts: Sequence[Cut]) -> Int | None:
    """The size of every shard of a dim with a symbolic size, if all are as long; else None."""
    chunks = math.prod(chunks for chunks, _ in cuts)
    if type(size) is int or any(stride for _, stride in cuts) or size % chunks != 0:
        return None
    return size // chunks


def _plain(size: int, cuts: Sequence[Cut]) -> tuple[Array, Array]:
    sizes, starts = np.array(size), np.array(0)
    for chunks, _ in cuts:
        sizes, starts = sizes[..., None], starts[..., None]
        step = -(-sizes // chunks)
        inside = np.minimum(step * np.arange(chunks), sizes)
        sizes, starts = np.minimum(step, sizes - inside), starts + inside
    return sizes, starts


def _strided(size: int, cuts: Sequence[Cut]) -> tuple[Array, Array]:
    """Sizes and first indices by the list of each shard's indices."""
    held = [np.arange(size)]
    for chunks, stride in cuts:
        held = [shard for whole in held for shard in _cut(whole, chunks, max(stride, 1))]
    shape = [chunks for chunks, _ in cuts]
    sizes = np.array([len(shard) for shard in held])
    starts = np.array([shard[0] if len(shard) else 0 for shard in held])
    return sizes.reshape(shape), starts.reshape(shape)


def _cut(whole: Array, chunks: int, stride: int) -> list[Array]:
    pieces = [_chunks(piece, chunks) for piece in _chunks(whole, stride)]
    return [np.concatenate([piece[place] for piece in pieces]) for place in range(chunks)]


def _chunks(whole: Array, chunks: int) -> list[Array]:
    step = -(-len(whole) // chunks)
    return [whole[step * place : step * (place + 1)] for place in range(chunks)]


def take_chunk(value: StackedValue, dim: int, chunks: int, index: Array, *, keep_order: bool = False) -> StackedValue:
    """Each rank's chunk: the `index`-th of `chunks` along `dim`, as torch.chunk cuts; a contiguous copy.

    `index` is int64 of shape [world]; a rank whose index is negative takes nothing.  With `keep_order`, the dims of a
    chunk keep their order in memory, as in a clone.  One pass for all ranks: a split for each would be quadratic.
    """
    held = value.held
    row_of, cells, sizes, start = np.full(held.world, NOWHERE), [], [], 0
    for cell, rows, first in zip(value.cells, held.sizes, held.starts, strict=True):
        stack = cell if rows > 1 else cell[None]
        order = _order(stack) if keep_order else list(range(stack.dim()))
        stack = stack.permute(order)
        here = (held.row_of >= first) & (held.row_of < first + rows) & (index >= 0)
        for taken, codes, ranks in _pieces(stack, order.index(dim + 1), chunks, held.row_of - first, index, here):
            distinct, places = np.unique(codes, return_inverse=True)
            row_of[ranks] = start + places.reshape(-1)
            wanted = torch.from_numpy(distinct).to(taken.device)
            all_in_order = len(distinct) == taken.shape[0]  # codes are row numbers of `taken`, in order
            fresh = (
                taken.clone(memory_format=torch.contiguous_format) if all_in_order else taken.index_select(0, wanted)
            )
            fresh = fresh.permute(np.argsort(order).tolist())
            cells.append(fresh if len(distinct) > 1 else fresh[0])
            sizes.append(len(distinct))
            start += len(distinct)
    return StackedValue(*merge_alike(tuple(cells), partition(row_of, sizes)))


def own_chunk(mode: Mode, x: Tensor, dim: int, chunks: int, index: Array, *, keep_order: bool) -> Tensor:
    """Each rank's chunk as `take_chunk`, of a tensor; while a graph is recorded, a node of the graph, which cuts all ranks' chunks.

    On a rank there stand the nodes of torch.split and of the one piece that the rank takes.  Raises `NotTraceable` where the chunks of a
    compiled graph are not all of one size.
    """
    if not _is_recorded(mode, x):
        value = StackedValue((x.detach(),), mode.everyone) if _is_shown(x) else stacked_value(mode, x)
        with plain_dispatch():
            return wrap(*take_chunk(value, dim, chunks, index, keep_order=keep_order), mode)
    if has_no_values(x) and (x.shape[dim] % chunks or min(index) < 0):
        problem = f"{chunks} ranks cut it, and not all of them take a chunk of one size"
        raise NotTraceable(
            "torch.compile", f"a size of {x.shape[dim]}", problem, "Run this part op by op.", user_place()
        )
    made: Tensor = torch.ops.localtensor.own_chunk(x, dim, chunks, index.tolist(), keep_order)
    return made


def _is_recorded(mode: Mode, x: Tensor) -> bool:
    """Whether what is done to the tensor is to be a node of a graph."""
    recorded = mode.tracing is not None and mode.tracing.depth == 0 and mode.tracing.records()
    return recorded or (has_no_values(x) and not _is_shown(x))


def _is_shown(x: Tensor) -> bool:
    """Whether it is a tensor without values of a graph that is there already."""
    return isinstance(x, FakeTensor) and torch._C._get_dispatch_mode(_FAKE) is None


def number_of_rank(mode: Mode, number: Int, like: Tensor) -> Tensor | int:
    """The int of each rank as a tensor without dims, on the device of `like`, and a plain int as it is; a node of the graph that records `like`."""
    values = rank_values(number, mode.world)
    if values is None:
        return int(number)
    if _is_recorded(mode, like):
        made: Tensor = torch.ops.localtensor.number_of_rank(like, values.tolist())
        return made
    return _number(mode, values, number.node.held, like)  # type: ignore[union-attr]


def _number(mode: Mode, values: Array, held: Array | None, like: Tensor) -> LocalTensor:
    with plain_dispatch():
        rows = torch.from_numpy(np.unique(values if held is None else values[held])).to(like.device)
        return wrap((rows if len(rows) > 1 else rows[0],), partition(by_value(values, held).row_of, [len(rows)]), mode)


def run_node(mode: Mode, func: object, args: Args, kwargs: Kwargs) -> Tensor:
    """A node of ours on the tensors of all ranks."""
    if func is torch.ops.localtensor.number_of_rank.default:
        return _number(mode, np.array(args[1]), mode.everyone.held, args[0])
    x, dim, chunks, index, keep_order = args
    with plain_dispatch():
        return wrap(*take_chunk(stacked_value(mode, x), dim, chunks, np.array(index), keep_order=keep_order), mode)


def _one_chunk(x: Tensor, dim: int, chunks: int, index: list[int], keep_order: bool) -> Tensor:
    """The metadata of a chunk, which is the same on each rank."""
    chunk = x.narrow(dim, 0, x.shape[dim] // chunks)
    return torch.empty_like(chunk) if keep_order else chunk.new_empty(chunk.shape)


_OPS = torch.library.Library("localtensor", "FRAGMENT")
_OPS.define("own_chunk(Tensor x, int dim, int chunks, int[] index, bool keep_order) -> Tensor")
_OPS.impl("own_chunk", _one_chunk, "Meta")
_OPS.define("number_of_rank(Tensor like, int[] values) -> Tensor")
_OPS.impl("number_of_rank", lambda like, values: like.new_empty((), dtype=torch.int64), "Meta")


def _order(stack: Tensor) -> list[int]:
    """The dim of rows, then the others by descending stride."""
    return [0, *sorted(range(1, stack.dim()), key=lambda dim: -int(stack.stride()[dim]))]


def _pieces(
    stack: Tensor, dim: int, chunks: int, row: Array, index: Array, here: Array
) -> Iterator[tuple[Tensor, Array, Array]]:
    """For each chunk size: a stack of chunks, the rows that ranks take, and those ranks."""
    size = stack.shape[dim]
    lengths = [length for _, length in chunk_bounds(size, chunks)]
    full = lengths[0]
    count = sum(length == full for length in lengths) if full else 0
    if count:
        ranks = np.flatnonzero(here & (index < count))
        if len(ranks):
            cut = stack.narrow(dim, 0, count * full).unflatten(dim, (count, full)).movedim(dim, 1).flatten(0, 1)
            yield cut, row[ranks] * count + index[ranks], ranks
    for place in range(count, chunks):
        ranks = np.flatnonzero(here & (index == place if lengths[place] else index >= place))
        if len(ranks):
            start = min(full * place, size)
            codes = row[ranks] if lengths[place] else np.zeros(len(ranks), np.int64)
            piece = stack.narrow(dim, start, lengths[place])
            yield (piece if lengths[place] else piece[:1]), codes, ranks
        if not lengths[place]:
            break


def all_gather(x: Tensor, dim: int, group: tuple[DeviceMesh, int]) -> Any:
    """torch's functional all_gather, under its name in this version.

    Along a dim of another number than 0 torch asks for the sizes of what was gathered: each kind of rank has its own.
    """
    one: Any = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor  # the name before 2.13
    if dim == 0 or not is_rank_int(x.shape[0]):
        return one(x, dim, group)
    mesh, axis = group
    return torch._utils._maybe_view_chunk_cat(wait_for(one(x, 0, group)), mesh.size(axis), dim)


def gather_uneven(mode: Mode, local: LocalTensor, dim: int, size: int, mesh: DeviceMesh, mesh_dim: int) -> LocalTensor:
    """The whole tensor, `size` long along `dim`, of each rank's shard, which may be short or empty.

    Shards are padded, gathered and cut back in three steps, where torch takes a dozen ops.
    """
    chunks = mesh.size(mesh_dim)
    with plain_dispatch():
        fitting = wrap(*_padded(StackedValue(local._cells, local._partition), dim, -(-size // chunks)), mode)
    found = all_gather(fitting, 0, (mesh, mesh_dim))
    found = found.wait() if hasattr(found, "wait") else found
    with plain_dispatch():
        pairs = zip(found._cells, found._partition.sizes, strict=True)
        return wrap(
            tuple(_merge_chunks(cell, rows > 1, dim, chunks, size) for cell, rows in pairs), found._partition, mode
        )


def _padded(value: StackedValue, dim: int, length: int) -> StackedValue:
    """Every rank's tensor padded with zeros to this length along `dim`."""
    cells = []
    for cell, rows in zip(value.cells, value.held.sizes, strict=True):
        along = dim + (rows > 1)
        missing = [length - size if place == along else size for place, size in enumerate(cell.shape)]
        zeros = cell.new_zeros(missing) if missing[along] else None
        whole = torch.cat([cell, zeros], along) if zeros is not None and cell.shape[along] else zeros
        cells.append(cell.contiguous() if whole is None else whole)
    return StackedValue(*merge_alike(tuple(cells), value.held, by_shape=True))


def _merge_chunks(cell: Tensor, stacked: bool, dim: int, chunks: int, size: int) -> Tensor:
    """The chunks along dim 0 concatenated along `dim`, and cut to `size`."""
    first = int(stacked)
    apart: Tensor = cell.unflatten(first, (chunks, cell.shape[first] // chunks))
    length = apart.shape[dim + first + 1] or 1
    apart = apart.narrow(first, 0, -(-size // length))  # the others have nothing but zeros
    whole: Tensor = apart.movedim(first, dim + first).flatten(dim + first, dim + first + 1)
    if whole.shape[dim + first] == size and whole.untyped_storage().data_ptr() != cell.untyped_storage().data_ptr():
        return whole
    return whole.narrow(dim + first, 0, size).clone(memory_format=torch.contiguous_format)


# -- shapes, as replacements of DTensor's functions


def global_shape(mode: Mode, original: Fn, shape: Sequence[Any], mesh: DeviceMesh, placements: Sequence[Any]) -> object:
    """The global shape: the sum of all ranks' sizes on the sharded dim, which torch gathers."""
    if len(placements) != 1 or mesh.ndim != 1 or not isinstance(placements[0], Shard):
        return original(shape, mesh, placements)
    dim, whole = placements[0].dim, list(shape)
    if any(is_rank_int(size) for place, size in enumerate(shape) if place != dim % len(whole)):
        raise RuntimeError("Non-sharded dimensions should have identical size across ranks.")  # torch's own message
    sizes, total = rank_values(shape[dim], mode.world), np.zeros(mode.world, np.int64)
    with mode.disable():
        ranks = mesh_ranks(mesh)
    total[ranks] = ranks.shape[1] * shape[dim] if sizes is None else sizes[ranks].sum(1, keepdims=True)
    held = np.isin(np.arange(mode.world), ranks)
    whole[dim] = rank_int(total, None if held.all() else held)
    return torch.Size(whole)


def shapes_and_offsets(
    mode: Mode, original: Fn, global_shape: Sequence[Int], mesh_shape: Sequence[int], my_coordinate: Any, placements: Sequence[Any],
    skip_offset: bool = False,
) -> object:  # fmt: skip
    """The shape of each rank's shard, and its offset in the whole tensor."""
    if my_coordinate is None or any_differs(*global_shape):
        return original(global_shape, mesh_shape, my_coordinate, placements, skip_offset)
    listed = isinstance(my_coordinate, list | tuple)
    places = [my_coordinate[axis] if listed else my_coordinate(axis) for axis in range(len(placements))]
    cut = {axis: _cut_of(placed, mesh_shape[axis]) for axis, placed in enumerate(placements) if _is_shard(placed)}
    if not any_differs(*(places[axis] for axis in cut)):
        return original(global_shape, mesh_shape, places, placements, skip_offset)
    shape, offset = list(global_shape), list[Int]([0] * len(global_shape))
    for dim in {placements[axis].dim for axis in cut}:
        axes = [axis for axis in cut if placements[axis].dim == dim]
        even = even_size(shape[dim], [cut[axis] for axis in axes]) if skip_offset else None
        if even is not None:  # else its sizes are those of the example: a graph for them alone
            shape[dim] = even
            continue
        sizes, starts = shard_sizes_and_starts(int(shape[dim]), tuple(cut[axis] for axis in axes), int(shape[dim]))
        shape[dim], offset[dim] = _entries_at(mode, (sizes, starts), [places[axis] for axis in axes])
    return tuple(shape), () if skip_offset else tuple(offset)


def _is_shard(placement: Placement) -> bool:
    return isinstance(placement, Shard | _StridedShard)


def _cut_of(placement: Placement, chunks: int) -> tuple[int, int]:
    return int(chunks), int(placement.split_factor) if isinstance(placement, _StridedShard) else 0


def _entries_at(mode: Mode, tables: Sequence[Array], places: Sequence[Any]) -> list[Int]:
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


def local_size(mode: Mode, original: Fn, curr_local_size: Int, num_chunks: int, rank: Int) -> object:
    """The size of each rank's shard, and its first index; torch 2.11 also branches on the rank."""
    by = [curr_local_size, rank] if torch.__version__.startswith("2.11.") else [curr_local_size]
    return for_each_rank_group(mode, by, lambda of: original(of(curr_local_size), of(num_chunks), of(rank)))


def strided_size(
    mode: Mode, original: Fn, shard: AnyShard, curr_local_size: Int, num_chunks: int, rank: Int,
    *offsets: object, **named: object,
) -> object:  # fmt: skip
    """The size of each rank's strided shard, and its offsets by `offset_mode` (before 2.13 `return_first_offset`)."""
    offset_mode = next(iter((*offsets, *named.values())), None)
    wants_all = offset_mode is False or getattr(offset_mode, "name", "") == "ALL"

    def on_group(of: Narrowing) -> Any:
        size, place = of(curr_local_size), of(rank)
        if not is_rank_int(place) or wants_all:
            return for_each_rank_group(
                mode, [place], lambda of: original(shard, size, num_chunks, of(place), *offsets, **named)
            )
        sizes, starts = shard_sizes_and_starts(size, (_cut_of(shard, num_chunks),), -1)
        own, first = _entries_at(mode, (sizes, starts), [place])
        return own, None if getattr(offset_mode, "name", "") == "NONE" else first

    return for_each_rank_group(mode, [curr_local_size], on_group)


def length(mode: Mode, original: Fn, sharded_indices: Sequence[Tensor], rank: Int) -> object:
    """The number of indices of each rank's strided shard."""
    if not is_rank_int(rank):
        return original(sharded_indices, rank)
    return _entries_at(mode, [np.array([len(one) for one in sharded_indices])], [rank])[0]
