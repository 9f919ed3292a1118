"""The stand-in for CUDA's pool of symmetric memory in a rank where there is no GPU.

What an op makes inside `torch.cuda.use_mem_pool(symm_mem.get_mem_pool(device))` lies in symmetric memory: the op runs, and
its results move there.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from localtensor._util.ambient import simulation_of_this_rank
from localtensor._util.call_sites import Args, Kwargs
from localtensor.errors import NotServed
from localtensor.threads.buffer_watch import is_view_op, tensors_in
from localtensor.threads.symmetric.handle import CPP
from localtensor.threads.symmetric.memory import Buffer, SymmetricMemory, memory_of
from localtensor.threads.symmetric.watch import watch_of

_MEMORY_ALONE = ("empty", "new_empty")  # what begins so has no values


class RankPool:
    """One rank's pool of symmetric memory, as torch.cuda.MemPool.  Memory of tensors that are gone is used again."""

    def __init__(self, memory: SymmetricMemory, rank: int) -> None:
        self._memory, self._rank = memory, rank
        self._buffers: list[
            tuple[Buffer, torch.UntypedStorage]
        ] = []  # each with a storage for this rank's tensors alone

    def allocate(self, x: Tensor) -> Tensor:
        """A tensor in symmetric memory with the sizes, the strides and the dtype of this one, without its values."""
        shape = (x.shape, x.stride(), x.dtype)
        for buffer, storage in self._buffers:
            if buffer.fits(*shape) and torch._C._storage_Use_Count(storage._cdata) == 1:  # no tensor lies in it
                buffer.forget()
                return buffer.tensor(*shape, storage)
        made = self._memory.allocate(self._rank, *shape, x.device, int(CPP.signal_pad_size))
        new: Any = self._memory.buffer_of(made)
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            storage = torch.from_numpy(new.memory.numpy()).untyped_storage()
        self._memory.areas[int(storage._cdata)] = new
        self._buffers.append((new, storage))
        return new.tensor(*shape, storage)  # type: ignore[no-any-return]


class _Allocating(TorchDispatchMode):
    """Moves what each op makes into a pool."""

    def __init__(self, pool: RankPool) -> None:
        super().__init__()
        self._pool = pool

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        made = func(*args, **(kwargs or {}))
        if is_view_op(func) or func.namespace != "aten":
            return made
        given = {int(x.untyped_storage()._cdata) for x in tensors_in((*args, *(kwargs or {}).values()))}

        def moved(x: Tensor) -> Tensor:
            plain = type(x) is Tensor and x.layout == torch.strided and x.device.type in ("cpu", "cuda")
            if not plain or int(x.untyped_storage()._cdata) in given:
                return x
            place = self._pool.allocate(x)
            return place if func.overloadpacket.__name__.startswith(_MEMORY_ALONE) else place.copy_(x)

        return tree_map_only(Tensor, moved, made)


def pool_of_rank() -> RankPool:
    """The pool of the calling rank."""
    simulation: Any = simulation_of_this_rank()
    memory, rank = memory_of(simulation), simulation.enter()
    watch_of(memory, rank)
    pool: RankPool = memory.pools.setdefault(rank, RankPool(memory, rank))
    return pool


@contextmanager
def use_mem_pool(pool: object, device: object = None) -> Iterator[None]:
    """torch.cuda.use_mem_pool, of the pool that `symm_mem.get_mem_pool` returns."""
    if not isinstance(pool, RankPool):
        raise NotServed("torch.cuda.use_mem_pool", "this machine has no GPU", gloo_has_it=False)
    with _Allocating(pool):
        yield
