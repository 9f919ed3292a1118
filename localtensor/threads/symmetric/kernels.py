"""The ops of `torch.ops.symm_mem` on rank threads: by one-sided accesses, signals and barriers, as torch's CUDA kernels do.

What torch has in Python (the pipelines of fused ops, the low-contention collectives) runs as it is.  The others follow the
phases of torch's CUDA and NVSHMEM kernels.  They are registered for the CPU once per process, and refuse other threads.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from localtensor._util.ambient import simulation_of_this_rank
from localtensor.errors import NotServed
from localtensor.threads.symmetric import routing
from localtensor.threads.symmetric.handle import CPP, SymmetricHandle, handle_of, peers_of
from localtensor.threads.symmetric.memory import memory_of
from localtensor.threads.symmetric.watch import watched


def _fold(held: Sequence[Tensor], *, wide: bool = False) -> Tensor:
    """The sum, in group order and in the tensors' own dtype, as torch's kernels add.

    With `wide`, as instructions of multicast memory add: bfloat16 in float32, rounded once.

    >>> _fold([torch.tensor([1.0]), torch.tensor([2.0])])
    tensor([3.])
    """
    dtype = held[0].dtype
    total = held[0].float() if wide and dtype == torch.bfloat16 else held[0].clone()
    for x in held[1:]:
        total += x
    return total.to(dtype)


def _one_shot(call: str, x: Tensor, op: str, group: str, out: Tensor | None = None, *, wide: bool = False) -> Tensor:
    """Each rank reads the whole tensor of every peer."""
    handle = handle_of(call, x, group, op=op)
    handle.barrier()
    total = _fold(peers_of(handle, x), wide=wide)
    handle.barrier()
    return total if out is None else out.copy_(total)


def one_shot_all_reduce_copy(buffer: Tensor, local: Tensor, op: str, group: str) -> Tensor:
    held = buffer.flatten()[: local.numel()].copy_(local.flatten()).view(local.shape)
    return _one_shot("one_shot_all_reduce_copy", held, op, group)


def one_shot_all_reduce_copy_out(buffer: Tensor, local: Tensor, op: str, group: str, out: Tensor) -> Tensor:
    return out.copy_(one_shot_all_reduce_copy(buffer, local, op, group))


def _own_part(handle: SymmetricHandle, x: Tensor) -> Tensor:
    return x.view(-1).tensor_split(handle.world_size)[handle.rank]


def _two_shot(call: str, x: Tensor, op: str, group: str, *, wide: bool = False) -> Tensor:
    """Each rank reduces its part of the tensor, and writes it to every peer."""
    handle = handle_of(call, x, group, op=op)
    handle.barrier()
    parts = [_own_part(handle, peer) for peer in peers_of(handle, x)]
    total = _fold(parts, wide=wide)
    for part in parts:
        part.copy_(total)
    handle.barrier()
    return x


def two_shot_all_reduce_out(x: Tensor, op: str, group: str, output: Tensor) -> Tensor:
    """Each rank reduces its part into its own buffer; then each rank gathers the parts."""
    handle = handle_of("two_shot_all_reduce_out", x, group, op=op)
    handle.barrier()
    peers = peers_of(handle, x)
    _own_part(handle, x).copy_(_fold([_own_part(handle, peer) for peer in peers]))
    handle.barrier()
    parts = output.view(-1).tensor_split(handle.world_size)
    for rank, peer in enumerate(peers):
        parts[rank].copy_(peer.view(-1).tensor_split(handle.world_size)[rank])
    handle.barrier()
    return output


def multimem_one_shot_reduce_out(x: Tensor, op: str, root: int, group: str, out: Tensor) -> Tensor:
    """The root reads the tensor of every peer."""
    handle = handle_of("multimem_one_shot_reduce_out", x, group, op=op)
    handle.peer_number("multimem_one_shot_reduce_out", "root", root)
    handle.barrier()
    if handle.rank == root:
        out.copy_(_fold(peers_of(handle, x), wide=True))
    handle.barrier()
    return out


def multimem_all_gather_out(x: Tensor, group: str, out: Tensor) -> Tensor:
    """Each rank writes its tensor to the output of every peer, which is symmetric."""
    handle = handle_of("multimem_all_gather_out", out, group, "out")
    handle.barrier()
    for peer in peers_of(handle, out):
        peer.view(handle.world_size, -1)[handle.rank].copy_(x.reshape(-1))
    handle.barrier()
    return out


def _check_scatter(x: Tensor, ranks: int, split_last_dim: bool) -> None:
    """Raises RuntimeError where torch's kernel, which reads 4, 8 or 16 bytes at a time, cannot scatter the tensor."""
    begin, size = x.storage_offset() * x.element_size(), x.numel() * x.element_size()
    step = next(wide for wide in (16, 8, 4, 1) if begin % wide == 0 and size % wide == 0)
    counts = x.shape[-1] if split_last_dim else x.numel()
    multiple = ranks * max(step // x.element_size(), 1)
    if counts % multiple:
        what = "the last dimension" if split_last_dim else "the number of elements"
        raise RuntimeError(
            f"symm_mem.reduce_scatter_out: input: {what} is {counts}, and has to be divisible by {multiple}: a part for"
            f" each of {ranks} ranks, of whole steps of {step} bytes. Pad the tensor."
        )


def reduce_scatter_out(x: Tensor, group: str, split_last_dim: bool, output: Tensor) -> Tensor:
    """Each rank reads its part of the tensor of every peer: along the last dim, or of all elements in order."""
    handle = handle_of("reduce_scatter_out", x, group)
    _check_scatter(x, handle.world_size, split_last_dim)
    handle.barrier()
    peers = peers_of(handle, x)
    parts = [p.chunk(handle.world_size, -1) if split_last_dim else p.view(-1).chunk(handle.world_size) for p in peers]
    output.copy_(_fold([part[handle.rank] for part in parts]).view(output.shape))
    handle.barrier()
    return output


def memcpy_to_multicast(out: Tensor, source: Tensor, byte_offset: int, group: str) -> Tensor:
    """Writes the bytes of a tensor to the same place in the output of every peer, which is symmetric."""
    handle = handle_of("memcpy_to_multicast_", out, group, "symm_mem_out")
    raw = source.contiguous().view(-1).view(torch.uint8)
    for peer in peers_of(handle, out):
        peer.view(-1).view(torch.uint8)[byte_offset : byte_offset + raw.numel()].copy_(raw)
    return out


def tile_reduce(tile: Tensor, out: Tensor, root: int, group: str, op: str = "sum") -> None:
    """The root reads the same tile, which may be strided, of every peer."""
    handle = handle_of("tile_reduce", tile, group, "in_tile", op=op)
    handle.peer_number("tile_reduce", "root", root)
    handle.barrier()
    if handle.rank == root:
        out.copy_(_fold([_same_tile(handle, tile, peer) for peer in range(handle.world_size)]))
    handle.barrier()


def _same_tile(handle: SymmetricHandle, tile: Tensor, peer: int) -> Tensor:
    whole = handle.get_buffer(peer, (handle.buffer_size // tile.element_size(),), tile.dtype)
    return whole.as_strided(tile.shape, tile.stride(), tile.storage_offset())


def multi_root_tile_reduce(tiles: list[Tensor], out: Tensor, roots: Sequence[int], group: str, op: str = "sum") -> None:
    """Rank `roots[i]` gets the reduction of the i-th tile."""
    handle = handle_of("multi_root_tile_reduce", tiles[0], group, "in_tiles", op=op)
    for root in roots:
        handle.peer_number("multi_root_tile_reduce", "roots", root)
    handle.barrier()
    for tile, root in zip(tiles, roots, strict=True):
        if handle.rank == root:
            out.copy_(_fold([_same_tile(handle, tile, peer) for peer in range(handle.world_size)]))
    handle.barrier()


def nvshmem_broadcast(x: Tensor, root: int, group: str) -> Tensor:
    """Each rank reads the tensor of the root."""
    handle = handle_of("nvshmem_broadcast", x, group)
    handle.peer_number("nvshmem_broadcast", "root", root)
    handle.barrier()
    if handle.rank != root:
        x.copy_(peers_of(handle, x)[root])
    handle.barrier()
    return x


def nvshmem_all_to_all(x: Tensor, out: Tensor, group: str) -> Tensor:
    """Each rank writes a part of its tensor to the output of each peer."""
    handle_of("nvshmem_all_to_all", x, group)
    handle = handle_of("nvshmem_all_to_all", out, group, "out")
    handle.barrier()
    for theirs, part in zip(peers_of(handle, out), x.view(handle.world_size, -1)):
        theirs.view(handle.world_size, -1)[handle.rank].copy_(part)
    handle.barrier()
    return out


def put(x: Tensor, peer: int) -> None:
    """Write the tensor to where it lies on a peer."""
    _of_world("put", x, peer).copy_(x)


def get(x: Tensor, peer: int) -> None:
    """Read the tensor from where it lies on a peer."""
    x.copy_(_of_world("get", x, peer))


def _of_world(call: str, x: Tensor, peer: int) -> Tensor:
    """The tensor of a peer, numbered in the world: these ops name no group."""
    return handle_of(call, x, _world(), "tensor").get_remote_tensor(peer, x.shape, x.dtype)


def _world() -> str:
    return str(c10d._get_default_group().group_name)


def put_with_signal(x: Tensor, pad: Tensor, signal: int, peer: int) -> None:
    """Write the tensor to a peer, then set the first element of its signal pad."""
    put(x, peer)
    _same_pad(pad, peer).view(-1)[:1].fill_(signal)


def _same_pad(pad: Tensor, peer: int) -> Tensor:
    """Where `pad` lies, on a peer: in a signal pad, or in symmetric memory that serves as one."""
    simulation: Any = simulation_of_this_rank()
    memory = memory_of(simulation)
    own = memory.pad_of(pad)
    if own is None:
        return _of_world("put_with_signal", pad, peer)
    meeting = next(m for m in memory.meetings if any(b.pad is own for b in m.buffers) and m.group.name == _world())
    handle = SymmetricHandle(meeting, meeting.group.ranks.index(own.rank), 0)
    return handle.get_signal_pad(peer, pad.shape, pad.dtype, int(pad.storage_offset()))


def wait_for_signal(pad: Tensor, signal: int, peer: int) -> None:
    """Wait until the first element of the rank's own pad has this value."""
    word = pad.view(-1)[0].view(torch.int64 if pad.element_size() == 8 else torch.int32)
    while word.item() != signal:
        pass


def nccl_put_with_signal(x: Tensor, signal: int, peer: int) -> None:
    """Write the tensor to a peer, then set the first element of the signal pad of that memory."""
    put(x, peer)
    _first_word(x, peer).fill_(signal)


def nccl_wait_for_signal(x: Tensor, signal: int) -> None:
    """Wait until the first element of the signal pad of this rank's memory has this value, or a higher one."""
    while _first_word(x, None).item() < signal:
        pass


def _first_word(x: Tensor, peer: int | None) -> Tensor:
    handle = handle_of("nccl_wait_for_signal", x, _world(), "sigpad")
    return handle.get_signal_pad(handle.rank if peer is None else peer, (1,), torch.int64)


def nccl_put_signal(src: Tensor, handle: SymmetricHandle, peer: int) -> None:
    """Write a tensor to where the handle's tensor lies on a peer, and signal the peer."""
    handle.get_remote_tensor(peer, src.shape, src.dtype).copy_(src)
    handle.put_signal(peer)


def nccl_reduce_scatter_offset(
    x: Tensor,
    out: list[Tensor],
    group: str,
    dim: int,
    offsets: Sequence[int] | None = None,
    dst_ranks: Sequence[int] | None = None,
    op: str = "sum",
) -> None:
    """Blocks along `dim`, which end at `offsets`, are each reduced on the rank that `dst_ranks` names."""
    handle = handle_of("reduce_scatter_offset", x, group, op=op)
    ranks = handle.world_size
    ends = list(offsets) if offsets else [(i + 1) * x.shape[dim] // ranks for i in range(ranks)]
    owners = list(dst_ranks) if dst_ranks else [i % ranks for i in range(len(ends))]
    handle.barrier()
    peers, mine = [_same_tile(handle, x, peer) for peer in range(ranks)], iter(out)
    for begin, end, owner in zip([0, *ends], ends, owners, strict=False):
        if owner == handle.rank:
            next(mine).copy_(_fold([peer.narrow(dim, begin, end - begin) for peer in peers]))
    handle.barrier()


def _words(x: Tensor, offset: int, val: int, count: int = 1) -> Tensor:
    written: Tensor = CPP.memset32(x, offset, val, count)
    return written


def _of_python(name: str) -> Callable[..., Any]:
    """torch's own implementation for CUDA, in Python, which runs here as it is."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(sys.modules["torch.distributed._symmetric_memory"], name)(*args, **kwargs)

    return call


def async_input_mm(a: Tensor, b: Tensor, signals: Tensor, pivot: int) -> Tensor:
    raise NotServed("symm_mem::_async_input_mm", "a kernel that polls while it multiplies", gloo_has_it=False)


KERNELS: dict[str, Callable[..., Any]] = {
    "one_shot_all_reduce": partial(_one_shot, "one_shot_all_reduce"),
    "one_shot_all_reduce_out": partial(_one_shot, "one_shot_all_reduce_out"),
    "one_shot_all_reduce_copy": one_shot_all_reduce_copy,
    "one_shot_all_reduce_copy_out": one_shot_all_reduce_copy_out,
    "two_shot_all_reduce_": partial(_two_shot, "two_shot_all_reduce_"),
    "two_shot_all_reduce_out": two_shot_all_reduce_out,
    "multimem_all_reduce_": partial(_two_shot, "multimem_all_reduce_", wide=True),
    "multimem_one_shot_all_reduce": partial(_one_shot, "multimem_one_shot_all_reduce", wide=True),
    "multimem_one_shot_all_reduce_out": partial(_one_shot, "multimem_one_shot_all_reduce_out", wide=True),
    "multimem_one_shot_reduce_out": multimem_one_shot_reduce_out,
    "multimem_all_gather_out": multimem_all_gather_out,
    "reduce_scatter_out": reduce_scatter_out,
    "tile_reduce": tile_reduce,
    "multi_root_tile_reduce": multi_root_tile_reduce,
    "nvshmem_broadcast": nvshmem_broadcast,
    "nvshmem_all_to_all": nvshmem_all_to_all,
    "nvshmem_put": put,
    "nvshmem_get": get,
    "nvshmem_put_with_signal": put_with_signal,
    "nvshmem_wait_for_signal": wait_for_signal,
    "nccl_put": put,
    "nccl_get": get,
    "nccl_put_with_signal": nccl_put_with_signal,
    "nccl_wait_for_signal": nccl_wait_for_signal,
    "nccl_reduce_scatter_offset": nccl_reduce_scatter_offset,
    "all_to_all_vdev": routing.all_to_all_vdev,
    "all_to_all_vdev_2d": routing.all_to_all_vdev_2d,
    "all_to_all_vdev_2d_offset": routing.all_to_all_vdev_2d_offset,
    "memset32_": _words,
    "stream_write_value32_": _words,
    "get_remote_tensors": _of_python("_get_remote_tensors_default"),
    "_low_contention_all_gather": _of_python("_low_contention_all_gather"),
    "_low_contention_all_gather_ce_multicast": _of_python("_low_contention_all_gather_ce_multicast"),
    "_low_contention_all_gather_ce_multicast_out": _of_python("_low_contention_all_gather_ce_multicast_out"),
    "_low_contention_reduce_scatter": _of_python("_low_contention_reduce_scatter"),
    "fused_all_gather_matmul": _of_python("_fused_all_gather_matmul"),
    "fused_all_gather_scaled_matmul": _of_python("_fused_all_gather_scaled_matmul"),
    "fused_matmul_reduce_scatter": _of_python("_fused_matmul_reduce_scatter"),
    "fused_scaled_matmul_reduce_scatter": _of_python("_fused_scaled_matmul_reduce_scatter"),
    "_async_input_mm": async_input_mm,
    "memcpy_to_multicast_": memcpy_to_multicast,  # these two since torch 2.14
    "nccl_all_to_all_nd": routing.nccl_all_to_all_nd,
}


# Ops that take a handle: torch's dispatcher takes only one of C++, so these are replaced in `torch.ops.symm_mem`.
OF_HANDLES: dict[str, Callable[..., Any]] = {
    "nccl_put_signal": nccl_put_signal,
    "nccl_wait_signal": lambda handle, peer: handle.wait_signal(peer),
    "nccl_get_out": _of_python("_cuda_get_out"),
    "nvshmem_get_out": _of_python("_cuda_get_out"),
    "_barrier": lambda handle: handle.barrier(),
    "_rendezvous": lambda tensor, group_name=None: CPP.rendezvous(tensor, group_name),
}


def _served(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        simulation = simulation_of_this_rank()
        if simulation is None:
            detail = "this thread is no rank, and torch has no kernel of it for the CPU"
            raise NotServed(f"symm_mem::{name}", detail, gloo_has_it=False)
        with watched(memory_of(simulation), simulation.enter()):
            return kernel(*args, **kwargs)

    return call


_library: list[torch.library.Library] = []


def register_kernels() -> None:
    """Register the kernels for the CPU, once per process; those of an op that this torch lacks are never called."""
    if not _library:
        _library.append(torch.library.Library("symm_mem", "IMPL"))
        for name, kernel in KERNELS.items():
            _library[0].impl(name, _served(name, kernel), "CPU")
