"""The handle that `symm_mem.rendezvous` returns: torch's `_SymmetricMemory` of one rank; and what kernels begin with."""

import operator
import sys
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from localtensor._util.call_sites import origin
from localtensor.collectives.rendezvous import TimeLimit
from localtensor.errors import (
    ForeignHandle,
    NoTime,
    NotServed,
    NotSymmetric,
    OutsideBuffer,
    UnknownReduction,
    WrongType,
)
from localtensor.threads.symmetric.memory import Area, Buffer
from localtensor.threads.symmetric.signals import Meeting
from localtensor.threads.symmetric.watch import watch_of

CPP: Any = torch._C._distributed_c10d._SymmetricMemory


class SymmetricHandle:
    """What one rank may do with the buffers of its group; `rank` and peers are numbers in the group."""

    def __init__(self, meeting: Meeting, rank: int, offset: int) -> None:
        self._meeting = meeting
        self.rank, self.world_size = rank, len(meeting.buffers)
        self.offset = offset  # bytes from the start of the buffer to the tensor of the rendezvous
        self._own: Buffer = meeting.buffers[rank]

    @property  # type: ignore[misc]  # what isinstance() asks, after the type
    def __class__(self) -> type:
        return CPP  # type: ignore[no-any-return]

    @property
    def buffer_size(self) -> int:
        return self._own.size

    @property
    def signal_pad_size(self) -> int:
        return int(self._own.pad.memory.numel())

    @property
    def device(self) -> torch.device:
        return self._own.memory.device

    @property
    def multicast_ptr(self) -> int:
        """0: as on a device without multicast."""
        return 0

    def boxed(self) -> "SymmetricHandle":
        return self

    def get_buffer(self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int | None = 0) -> Tensor:
        """A tensor in the buffer of a peer; the offset is in elements.  Raises `OutsideBuffer`, `NoSuchPeer`."""
        buffer = self._meeting.buffers[self.peer_number("get_buffer", "rank", rank)]
        return view("get_buffer", buffer, sizes, dtype, whole("get_buffer", "storage_offset", storage_offset or 0))

    def get_remote_tensor(self, peer: int, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The tensor of a peer that lies where this handle's tensor lies.  Raises `OutsideBuffer`, `NoSuchPeer`."""
        call = "get_remote_tensor"
        buffer = self._meeting.buffers[self.peer_number(call, "peer", peer)]
        _check_dtype(call, dtype)
        if self.offset % dtype.itemsize:
            values = f"{dtype}, of {dtype.itemsize} bytes"
            problem = f"the tensor of this handle begins at byte {self.offset}, where such an element cannot begin"
            raise OutsideBuffer(call, "dtype", values, problem)
        return view(call, buffer, sizes, dtype, self.offset // dtype.itemsize)

    def get_signal_pad(
        self, rank: int, sizes: Sequence[int] = (), dtype: torch.dtype | None = None, storage_offset: int | None = 0
    ) -> Tensor:
        """The signal pad of a peer, or a part of it, as uint32 unless `dtype` is given."""
        call = "get_signal_pad"
        pad, dtype = self._meeting.buffers[self.peer_number(call, "rank", rank)].pad, dtype or torch.uint32
        _check_dtype(call, dtype)
        start = whole(call, "storage_offset", storage_offset or 0)
        rest = (pad.memory.numel() // dtype.itemsize - start,)
        return view(call, pad, sizes or rest, dtype, start)

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        """Wait until all ranks of the group have called it on this channel."""
        self._call("barrier", self._meeting.barrier, channel, timeout_ms)

    def put_signal(self, dst_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """Signal a peer, as soon as it has consumed the signal before."""
        self._call("put_signal", self._meeting.put_signal, channel, timeout_ms, ("dst_rank", dst_rank))

    def wait_signal(self, src_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """Wait for the signal of a peer, and consume it."""
        self._call("wait_signal", self._meeting.wait_signal, channel, timeout_ms, ("src_rank", src_rank))

    def _call(
        self, name: str, call: Callable[..., None], channel: int, timeout_ms: int, peer: tuple[str, int] | None = None
    ) -> None:
        peers = [] if peer is None else [self.peer_number(name, *peer)]
        channel, milliseconds = whole(name, "channel", channel), whole(name, "timeout_ms", timeout_ms)
        self._meeting.check_channel(name, channel)
        if milliseconds < 0:
            raise NoTime(f"symm_mem.{name}", "timeout_ms", timeout_ms)
        simulation = self._meeting.memory.simulation
        if simulation.enter() != self._meeting.group.ranks[self.rank]:
            raise ForeignHandle(name, self._meeting.group.ranks[self.rank], simulation.rank())
        watch_of(self._meeting.memory, simulation.rank())  # this may be another thread than that of the rendezvous
        simulation.pause()
        limit = TimeLimit(milliseconds / 1000) if milliseconds else None
        call(self.rank, *peers, channel, limit, origin(sys._getframe(2)).line)

    def peer_number(self, call: str, argument: str, peer: int) -> int:
        """The number of a peer.  Raises `WrongType`, `NoSuchPeer`."""
        number = whole(call, argument, peer)
        self._meeting.check_peer(call, argument, number)
        return number

    def __getattr__(self, name: str) -> Any:
        if name in _POINTERS:
            detail = "a pointer is for a kernel, and an access by pointer cannot be seen here: use get_buffer"
            raise NotServed(f"symm_mem: {name}", detail, gloo_has_it=False)
        raise AttributeError(f"'_SymmetricMemory' object has no attribute {name!r}")


_POINTERS = frozenset(
    {
        "buffer_ptrs",
        "buffer_ptrs_dev",
        "signal_pad_ptrs",
        "signal_pad_ptrs_dev",
        "get_multimem_cft_handle",  # these two since 2.15
        "get_peer_cft_handle",
    }
)


def whole(call: str, argument: str, value: object) -> int:
    """The value as an int.  Raises `WrongType`."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise WrongType(f"symm_mem.{call}", argument, value, "it is not a whole number", "Pass an int.") from None


def _check_dtype(call: str, dtype: object) -> None:
    """Raises `WrongType`."""
    if not isinstance(dtype, torch.dtype):
        raise WrongType(f"symm_mem.{call}", "dtype", dtype, "it is not a torch.dtype", "Pass one, as torch.float32.")


def view(call: str, area: Area, sizes: Sequence[int], dtype: torch.dtype, start: int) -> Tensor:
    """A contiguous tensor in a buffer or pad, from element `start` on.  Raises `OutsideBuffer`, `WrongType`."""
    _check_dtype(call, dtype)
    if not isinstance(sizes, tuple | list):
        raise WrongType(f"symm_mem.{call}", "sizes", sizes, "it is not a tuple of ints", "Pass the shape, as (4,).")
    size, wanted = area.memory.numel(), (start + prod(sizes)) * dtype.itemsize
    if start < 0 or wanted > size or any(count < 0 for count in sizes):
        what = f"{tuple(sizes)} of {dtype} from element {start} on"
        kind = "buffer" if isinstance(area, Buffer) else "signal pad"
        problem = (
            f"the requested part ends at byte {wanted}, and the allocated {kind} of rank {area.rank} has {size} bytes"
        )
        raise OutsideBuffer(call, "sizes", what, problem)
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        strides = torch._prims_common.make_contiguous_strides_for(tuple(sizes))
        empty = torch.empty(0, dtype=dtype, device=area.memory.device)
        return empty.set_(area.memory.untyped_storage(), start, tuple(sizes), strides)


def handle_of(call: str, tensor: Tensor, group_name: str, name: str = "input", op: str = "sum") -> SymmetricHandle:
    """The handle of a symmetric tensor of the group.  Raises `NotSymmetric`, and `UnknownReduction` for all but sums."""
    if op != "sum":
        raise UnknownReduction(f"symm_mem.{call}", op, "'sum'")
    handle: SymmetricHandle | None = CPP.rendezvous(tensor, group_name)
    if handle is None:
        raise NotSymmetric(call, name, f"{name} of shape {tuple(tensor.shape)}", "it was not made by symm_mem.empty")
    return handle


def peers_of(handle: SymmetricHandle, x: Tensor) -> list[Tensor]:
    """What lies where `x` lies, on each rank of the group."""
    return [handle.get_remote_tensor(peer, x.shape, x.dtype) for peer in range(handle.world_size)]
