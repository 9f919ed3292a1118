"""What of torch is replaced while a simulation runs, so that programs on symmetric memory run on its ranks.

torch's `_SymmetricMemory` is a class of C++ whose static methods serve `torch.distributed._symmetric_memory`.  They are
replaced on the class itself, so that no import of a program matters.  Where this machine has no GPU, torch.cuda's streams
and events are replaced as well: torch's own pipelines use them, and so do programs.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed._symmetric_memory as symm_mem

from localtensor._util.ambient import simulation_of_this_rank
from localtensor._util.call_sites import origin
from localtensor._util.patching import replaced
from localtensor.errors import NotServed
from localtensor.threads.symmetric import cuda
from localtensor.threads.symmetric.handle import CPP, SymmetricHandle
from localtensor.threads.symmetric.kernels import OF_HANDLES, register_kernels
from localtensor.threads.symmetric.memory import SymmetricMemory, memory_of
from localtensor.threads.symmetric.watch import watch_of

MODULE = "torch.distributed._symmetric_memory"
MICRO_PIPELINE = "torch._inductor.fx_passes.micro_pipeline_tp"

# Private part of torch: why it is needed.  Tried on torch 2.12.1 to 2.15.0, and on 2.11.0 with a GPU, before the pools.
SYMMETRIC_PRIVATE = {
    "torch._C._distributed_c10d._SymmetricMemory": "its static methods allocate and exchange symmetric memory",
    "torch.cuda.is_current_stream_capturing": "torch's workspace asks it, and without a GPU it raises",
    "torch.cuda._sleep": "torch's pipelines call it",
    "torch._C._storage_Use_Count": "whether a tensor still lies in memory of a pool",
    "torch.distributed._symmetric_memory.torch": "since 2.14 its streams are torch.accelerator's, which want a GPU",
    "torch.distributed._symmetric_memory._should_use_implicit_mempool": "on a GPU, `empty` takes a pool that we do not have",
}


def _here() -> tuple[SymmetricMemory, int] | None:
    """The symmetric memory of the run and the calling rank; None in a thread that is no rank."""
    simulation = simulation_of_this_rank()
    return None if simulation is None else (memory_of(simulation), simulation.enter())


def _empty(
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    group_name: str | None = None,
    alloc_id: int | None = None,
) -> torch.Tensor:
    memory, rank = _here()  # type: ignore[misc]
    if torch.device(device).type not in ("cpu", "cuda"):
        detail = f"memory of a device {torch.device(device).type!r} is not simulated"
        raise NotServed("symm_mem.empty", detail, gloo_has_it=False)
    watch_of(memory, rank)
    made = memory.allocate(rank, size, stride, dtype, torch.device(device), int(CPP.signal_pad_size), alloc_id)
    memory.buffer_of(made).group_name = group_name  # type: ignore[union-attr]
    return made


def _rendezvous(tensor: torch.Tensor, group_name: str | None = None) -> SymmetricHandle | None:
    memory, rank = _here()  # type: ignore[misc]
    meeting = memory.rendezvous(rank, tensor, group_name, origin(sys._getframe(1)).line)
    if meeting is None:
        return None
    watch_of(memory, rank)
    offset = int(tensor.storage_offset()) * tensor.element_size()
    return SymmetricHandle(meeting, meeting.group.ranks.index(rank), offset)


def _set_backend(name: str) -> None:
    memory, rank = _here()  # type: ignore[misc]
    if name not in BACKENDS:
        raise RuntimeError(f"SymmetricMemory: unknown backend {name!r}; it is one of {', '.join(BACKENDS)}")
    if rank in memory.sharing and memory.backends.get(rank, BACKENDS[0]) != name:
        raise RuntimeError("SymmetricMemory: the backend cannot be changed once symmetric memory has been allocated")
    memory.backends[rank] = name


BACKENDS = ("CUDA", "NVSHMEM", "NCCL")  # the default first


def _get_backend(device: torch.device) -> str:
    memory, rank = _here()  # type: ignore[misc]
    return memory.backends.get(rank, BACKENDS[0])


def _is_symmetric(tensor: torch.Tensor) -> bool:
    memory, _ = _here()  # type: ignore[misc]
    return memory.buffer_of(tensor) is not None


def _write_words(tensor: torch.Tensor, offset: int, val: int, count: int = 1) -> torch.Tensor:
    """Write a 32-bit value to `count` elements from `offset` on: an ordinary write, to a signal pad a signal.

    Raises RuntimeError, as torch does.
    """
    problem = (
        "input must be a flat, contiguous uint32 tensor"
        if tensor.dim() != 1 or not tensor.is_contiguous() or tensor.dtype != torch.uint32
        else f"offset must be greater than or equal to 0 (got {offset})"
        if offset < 0
        else f"count must be a positive integer (got {count})"
        if count < 1
        else f"val must be in the range of [0, {2**32 - 1}] (uint32_t)"
        if not 0 <= val < 2**32
        else f"offset + count ({offset + count}) exceeded the numel of the input ({tensor.numel()})"
        if offset + count > tensor.numel()
        else ""
    )
    if problem:
        raise RuntimeError(f"symm_mem::memset32_: {problem}.")
    tensor.view(torch.int32)[offset : offset + count].fill_(val - (1 << 32) if val >= 1 << 31 else val)
    return tensor


def _no_pool(device: object) -> object:
    raise NotServed("symm_mem.get_mempool_allocator", "there is no memory pool of a GPU", gloo_has_it=False)


_STATICS: dict[str, Callable[..., Any]] = {
    "set_group_info": lambda *args, **kwargs: None,
    "empty_strided_p2p": _empty,
    "rendezvous": _rendezvous,
    "has_multicast_support": lambda *args, **kwargs: False,
    "set_backend": _set_backend,
    "get_backend": _get_backend,
    "is_symm_mem_tensor": _is_symmetric,
    "memset32": _write_words,
    "stream_write_value32": _write_words,
    "get_mempool_allocator": _no_pool,
}


def _served(original: Callable[..., Any], ours: Callable[..., Any]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        return (original if simulation_of_this_rank() is None else ours)(*args, **kwargs)

    return staticmethod(call)


class _HandleOp:
    """An op that takes a handle: a rank calls `ours`; anything else of the op is torch's, which its compiler lists."""

    def __init__(self, original: Any, ours: Callable[..., Any]) -> None:
        self._original, self._ours = original, ours

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self._original if simulation_of_this_rank() is None else self._ours)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def _for_caller(module: str, original: Callable[[], Any], answer: object) -> Callable[[], Any]:
    """`original`, except for one module of torch while it is called by a rank."""

    def call() -> Any:
        asked_there = sys._getframe(1).f_globals.get("__name__") == module
        return answer if asked_there and simulation_of_this_rank() is not None else original()

    return call


def _pool(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def call(device: Any) -> Any:
        return original(device) if simulation_of_this_rank() is None else cuda.pool_of_rank()

    return call


_STREAMS: dict[str, Any] = {
    "Stream": cuda.RankStream,
    "Event": cuda.RankEvent,
    "StreamContext": cuda.StreamContext,
    "stream": cuda.StreamContext,
    "current_stream": cuda.current_stream,
    "default_stream": cuda.default_stream,
    "set_stream": cuda.set_stream,
    "set_device": cuda.set_device,
    "synchronize": cuda.synchronize,
    "_sleep": cuda.sleep,
    "use_mem_pool": cuda.use_mem_pool,
    "is_current_stream_capturing": lambda: False,
}


class _TorchOfRanks:
    """What torch's module of symmetric memory has for `torch`: for a rank with its streams, for others torch itself."""

    def __init__(self, original: Any, ours: dict[str, Any]) -> None:
        self._original, self._ours = original, ours

    def __getattr__(self, name: str) -> Any:
        if name in self._ours and simulation_of_this_rank() is not None:
            return self._ours[name]
        return getattr(self._original, name)


_ACCELERATOR = {
    "current_accelerator": lambda check_available=False: torch.device("cuda"),  # since 2.15: whether a group is served
    "current_stream": cuda.current_stream,
    "current_device_index": lambda: 0,
    "is_available": lambda: False,
}
_STREAMS_OF_MODULE = {
    "accelerator": _TorchOfRanks(torch.accelerator, _ACCELERATOR),
    "Stream": cuda.RankStream,
    "Event": cuda.RankEvent,
}


@contextmanager
def symmetric_memory_patched() -> Iterator[None]:
    """Inside the block ranks have symmetric memory; any other thread has torch's own."""
    register_kernels()
    with ExitStack() as stack:
        size = CPP.signal_pad_size
        stack.callback(lambda: setattr(CPP, "signal_pad_size", size))
        for name, ours in _STATICS.items():
            if name in vars(CPP):
                original = getattr(CPP, name)
                stack.enter_context(replaced(CPP, name, _served(original, ours)))
        for name, ours in OF_HANDLES.items():
            if hasattr(torch.ops.symm_mem, name):
                original = getattr(torch.ops.symm_mem, name)
                stack.enter_context(replaced(torch.ops.symm_mem, name, _HandleOp(original, ours)))
        if not torch.cuda.is_available():
            for name, ours in _STREAMS.items():
                stack.enter_context(replaced(torch.cuda, name, ours))
            stack.enter_context(replaced(torch.Tensor, "record_stream", cuda.record_stream))
            if hasattr(symm_mem, "get_mem_pool"):
                stack.enter_context(replaced(symm_mem, "get_mem_pool", _pool(symm_mem.get_mem_pool)))
            # torch's workspace of symmetric memory names its device by it.
            device = _for_caller(MODULE, torch.cuda.current_device, 0)
            stack.enter_context(replaced(torch.cuda, "current_device", device))
            if "accelerator" in symm_mem.get_symm_mem_workspace.__code__.co_names:
                stack.enter_context(replaced(symm_mem, "torch", _TorchOfRanks(torch, _STREAMS_OF_MODULE)))
        if hasattr(symm_mem, "_should_use_implicit_mempool"):  # CUDA's pool, which the simulation does not need
            pooled = _for_caller(MODULE, symm_mem._should_use_implicit_mempool, False)
            stack.enter_context(replaced(symm_mem, "_should_use_implicit_mempool", pooled))
        # The pass that makes fused ops does nothing without NCCL.
        has_nccl = _for_caller(MICRO_PIPELINE, torch.distributed.is_nccl_available, True)
        stack.enter_context(replaced(torch.distributed, "is_nccl_available", has_nccl))
        yield
