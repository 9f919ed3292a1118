"""Replacements of torch.cuda's streams, events and pool of symmetric memory in a rank where there is no GPU.

An op runs when it is issued; a stream counts for the order of accesses only.  So the values are those of a run in which
each op ends before the next one begins, and a race between streams is found all the same.  What an op makes inside
`torch.cuda.use_mem_pool(symm_mem.get_mem_pool(device))` lies in symmetric memory: the op runs, and its results move there.
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
from localtensor.threads.symmetric.order import Clock, Host, Lane
from localtensor.threads.symmetric.watch import watch_of


def _host() -> Host:
    simulation = simulation_of_this_rank()
    if simulation is None:
        raise NotServed("torch.cuda.Stream", "this thread is no rank, and this machine has no GPU", gloo_has_it=False)
    host: Host = memory_of(simulation).order.hosts[simulation.rank()]
    return host


class RankStream:
    """A stream of one rank, as torch.cuda.Stream."""

    device, device_index, device_type, priority = torch.device("cuda", 0), 0, 1, 0

    def __init__(self, device: object = None, priority: int = 0, lane: Lane | None = None, **kwargs: object) -> None:
        if lane is None:
            _host()
            simulation = simulation_of_this_rank()
            lane = memory_of(simulation).order.new_lane(simulation.rank())  # type: ignore[arg-type, union-attr]
        self.lane, self.priority = lane, priority
        self._before: list[Lane] = []

    @property
    def stream_id(self) -> int:
        return self.lane.number

    cuda_stream = stream_id

    def wait_stream(self, other: "RankStream") -> None:
        """What is issued to this stream from now on happens after what was issued to the other so far."""
        self.lane.follow_host()
        self.lane.learn(other.lane.publish())

    def wait_event(self, event: "RankEvent") -> None:
        self.lane.follow_host()
        self.lane.learn(event.clock)

    def record_event(self, event: "RankEvent | None" = None) -> "RankEvent":
        event = event or RankEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        _host().learn(self.lane.publish())

    def query(self) -> bool:
        """True, as its ops have run: the rank goes on knowing that, as after `synchronize`."""
        self.synchronize()
        return True

    def __enter__(self) -> "RankStream":
        host = _host()
        self._before.append(host.current)
        host.current = self.lane
        return self

    def __exit__(self, *error: object) -> None:
        _host().current = self._before.pop()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RankStream) and self.lane is other.lane

    def __hash__(self) -> int:
        return hash((RankStream, self.lane.number))


class RankEvent:
    """An event of one rank, as torch.cuda.Event."""

    def __init__(self, enable_timing: bool = False, **kwargs: object) -> None:
        self.clock: Clock = {}

    def record(self, stream: RankStream | None = None) -> None:
        self.clock = (_host().current if stream is None else stream.lane).publish()

    def wait(self, stream: RankStream | None = None) -> None:
        lane = _host().current if stream is None else stream.lane
        lane.follow_host()
        lane.learn(self.clock)

    def synchronize(self) -> None:
        _host().learn(self.clock)

    def query(self) -> bool:
        """True, as what is before it has run: the rank goes on knowing that, as after `synchronize`."""
        self.synchronize()
        return True

    def elapsed_time(self, end: "RankEvent") -> float:
        raise NotServed("torch.cuda.Event.elapsed_time", "ops take no time of a GPU here", gloo_has_it=False)


class StreamContext:
    """`with torch.cuda.stream(stream)`; with None it does nothing."""

    def __init__(self, stream: RankStream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.__enter__()

    def __exit__(self, *error: object) -> None:
        if self.stream is not None:
            self.stream.__exit__(*error)


def current_stream(device: object = None) -> RankStream:
    return RankStream(lane=_host().current)


def default_stream(device: object = None) -> RankStream:
    return RankStream(lane=_host().default)


def set_stream(stream: RankStream) -> None:
    _host().current = stream.lane


def synchronize(device: object = None) -> None:
    """Wait for all streams of the rank."""
    host = _host()
    simulation: Any = simulation_of_this_rank()
    for lane in memory_of(simulation).order.lanes:
        if lane.host is host:
            host.learn(lane.publish())


def sleep(cycles: int) -> None:
    """torch.cuda._sleep: orders nothing."""
    _host()


def set_device(device: object) -> None:
    """torch.cuda.set_device: a rank has the device that it names."""
    _host()


def record_stream(tensor: torch.Tensor, stream: object) -> None:
    """Tensor.record_stream: no memory is given back while a stream may use it; it orders nothing."""
    if not isinstance(stream, RankStream):
        torch._C.TensorBase.record_stream(tensor, stream)  # type: ignore[arg-type]


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
