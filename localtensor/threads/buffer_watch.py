"""Race detection for buffers in flight, between an asynchronous collective and its wait.

Until the wait, a real backend may write an output or read an input at any moment.  So reading such an output, or
writing either buffer, is a race, even if the result is right this time.

A write that torch does not see, through a numpy array or from C, shows in the buffers' checksums at the wait.  A read of
that kind leaves no trace, and is not reported; pickling is seen as it takes the storage.
"""

import ctypes
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils import _python_dispatch as dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from localtensor._util.call_sites import Args, Fn, Kwargs, place_of_frame
from localtensor.collectives.c10d_table import WAITS
from localtensor.collectives.rendezvous import Ticket
from localtensor.errors import BufferReused, ReadBeforeWait
from localtensor.threads.simulation import Simulation


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors share an element, or a part of one.

    Strided tensors with overlapping ranges are compared element by element if they are small; large ones overlap only
    if range and strides are equal.
    """
    if a.untyped_storage()._cdata != b.untyped_storage()._cdata or not a.numel() or not b.numel():
        return False
    first, second = _byte_range(a), _byte_range(b)
    if first[1] <= second[0] or second[1] <= first[0]:
        return False
    if a.is_contiguous() and b.is_contiguous():
        return True
    if max(a.numel(), b.numel()) > 1 << 16:
        return first == second and a.stride() == b.stride()
    unit = min(a.element_size(), b.element_size())  # an imaginary part begins in the middle of an element
    return bool(_memory_units(a, unit) & _memory_units(b, unit))


def _byte_range(x: Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride()))
    start = int(x.storage_offset())
    return start * x.element_size(), (start + last + 1) * x.element_size()


def _memory_units(x: Tensor, unit: int) -> set[int]:
    """The memory that the elements occupy, as the numbers of units of `unit` bytes."""
    count = x.element_size() // unit
    offsets = [int(x.storage_offset())]
    for size, stride in zip(x.shape, x.stride()):
        offsets = [offset + i * stride for offset in offsets for i in range(size)]
    return {offset * count + part for offset in offsets for part in range(count)}


SUMMED_BYTES = 1 << 16  # a larger buffer has the sum of its words for a checksum, which takes a fifth of the time


def checksum(x: Tensor) -> int | None:
    """A checksum of the elements of a CPU tensor; None for one on another device, with gaps, or without memory.

    >>> checksum(torch.zeros(4)) == checksum(torch.zeros(4)), checksum(torch.zeros(4)) == checksum(torch.ones(4))
    (True, False)
    """
    if x.device.type != "cpu" or x.layout != torch.strided or x.is_quantized:
        return None
    size = x.numel() * x.element_size()
    first, last = _byte_range(x)
    if not size or last - first != size or last > x.untyped_storage().nbytes():
        return None
    memory = memoryview((ctypes.c_char * size).from_address(x.data_ptr())).cast("B")
    if size <= SUMMED_BYTES:
        return zlib.adler32(memory)
    words = size // 8 * 8
    return int(np.frombuffer(memory[:words], np.int64).sum()) ^ zlib.adler32(memory[words:])


class _Buffers(NamedTuple):
    """The buffers of one call in flight, and their checksums when it began, inputs first."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    checksums: list[int | None]
    storages: set[int]


class BufferWatch(TorchDispatchMode):
    """Checks every op of one rank while it has buffers in flight; sits at the bottom of the rank's mode stack."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()
        self._simulation = simulation
        self._held: dict[Ticket, _Buffers] = {}
        self._by_storage: dict[
            int, dict[Ticket, _Buffers]
        ] = {}  # so that an op is not compared with all that is in flight
        self._readers = ReaderWatch(self)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: otherwise torch imports its compiler at the first op, which takes a second, to skip this mode."""
        return False

    def begin(self, ticket: Ticket, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        both = [*inputs, *outputs]
        buffers = _Buffers(list(inputs), list(outputs), [checksum(x) for x in both], {storage_of(x) for x in both})
        if not self._held:
            restack(self, self._readers, add=True)
        self._held[ticket] = buffers
        for storage in buffers.storages:
            self._by_storage.setdefault(storage, {})[ticket] = buffers

    def end(self, ticket: Ticket, *, written_by_peer: Callable[[Tensor], bool] | None = None) -> None:
        """Stop watching the buffers of a ticket.

        With `written_by_peer`, a buffer whose content has changed is an error, unless another rank has the same memory
        and its result has been written there.
        """
        held = self._held.pop(ticket, None)
        if held is None:
            return
        for storage in held.storages:
            del self._by_storage[storage][ticket]
            if not self._by_storage[storage]:
                del self._by_storage[storage]
        if not self._held:
            restack(self, self._readers, add=False)
        if written_by_peer is None:
            return
        with torch._C.DisableTorchFunction():  # the user's modes must not see this
            for buffer, before in zip((*held.inputs, *held.outputs), held.checksums, strict=True):
                if before is not None and checksum(buffer) not in (before, None) and not written_by_peer(buffer):
                    call, place = ticket.part.call(), place_of_frame(sys._getframe(1))
                    self._simulation.fail(BufferReused(call, None, place))

    def close(self) -> None:
        """Stop watching: the rank has ended."""
        for ticket in list(self._held):
            self.end(ticket)

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        if torch._C._get_dispatch_mode(FAKE_KEY) is not None:  # shape propagation: no data is read
            return func(*args, **kwargs)
        if any(getattr(kind, "__torch_dispatch__", None) is not TENSOR_DISPATCH for kind in types):
            return NotImplemented  # DTensor and the like: their ops on local tensors arrive here later
        if not is_view_op(func) and not reads_metadata_only(func) and func.overloadpacket not in _WAITS:
            self._check_op(func, args, kwargs)
        return func(*args, **kwargs)

    def _check_op(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        for tensor, written in tensor_uses(func, args, kwargs):
            for ticket, held in self._by_storage.get(storage_of(tensor), {}).items():
                if any(overlap(tensor, buffer) for buffer in held.outputs):
                    self._fail(BufferReused if written else ReadBeforeWait, ticket, str(func))
                if written and any(overlap(tensor, buffer) for buffer in held.inputs):
                    self._fail(BufferReused, ticket, str(func))

    def check_read(self, name: str, tensor: Tensor) -> None:
        """Check a read by a function that no dispatch mode sees."""
        for local in _plain_tensors(tensor):
            for ticket, held in self._by_storage.get(storage_of(local), {}).items():
                if any(overlap(local, buffer) for buffer in held.outputs):
                    self._fail(ReadBeforeWait, ticket, name)

    def _fail(self, kind: type[ReadBeforeWait | BufferReused], ticket: Ticket, name: str) -> None:
        self._simulation.fail(kind(ticket.part.call(), name, place_of_frame(sys._getframe(2))))


def storage_of(x: Tensor) -> int:
    """The number of a tensor's storage; 0 for a tensor without one, such as a sparse one."""
    return int(x.untyped_storage()._cdata) if x.layout == torch.strided else 0


def _plain_tensors(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that hold a tensor's elements."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    return [getattr(tensor, name) for name in flatten()[0]] if flatten else [tensor]


_WAITS = [getattr(torch.ops._c10d_functional, name, None) for name in WAITS]
TENSOR_DISPATCH = getattr(Tensor, "__torch_dispatch__", None)
FAKE_KEY = torch._C._TorchDispatchModeKey.FAKE


def is_view_op(func: OpOverload) -> bool:
    """Whether the op makes a view of its argument, or reads metadata: no element is read or written."""
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def reads_metadata_only(func: OpOverload) -> bool:
    """Whether the op uses only shape and dtype of its argument, which the schemas do not say.

    >>> [reads_metadata_only(op.default) for op in (torch.ops.aten.zeros_like, torch.ops.aten.new_ones, torch.ops.aten.clone)]
    [True, True, False]
    """
    name = func.overloadpacket.__name__
    return func.namespace == "aten" and (name.endswith("_like") or name.startswith("new_") or name in _METADATA_OPS)


_METADATA_OPS = frozenset({"is_same_size", "is_pinned", "record_stream", "_assert_tensor_metadata"})


def _sends_only(func: OpOverload, args: Sequence[Any]) -> bool:
    """Whether the op is a send, or a broadcast on its root: it does not write, though neither schema nor name says so."""
    if func is torch.ops.c10d.broadcast_.default:
        return bool(dist.ProcessGroup.unbox(args[1]).rank() == args[2])
    return func is torch.ops.c10d.send.default


def tensor_uses(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[Tensor, bool]]:
    """Each tensor argument, and whether the op writes it: by alias info, or for c10d's ops by the argument's name."""
    for index, argument in enumerate(func._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        if func.namespace == "c10d":
            written = not argument.name.startswith("input") and not _sends_only(func, args)
        else:
            written = argument.alias_info is not None and argument.alias_info.is_write
        for tensor in tensors_in(value):
            yield tensor, written


def tensors_in(value: object) -> Iterator[Tensor]:
    """The tensors of an argument: of itself, or of nested lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


# These read elements without any op that a dispatch mode sees, or give them away, to be read later.
_UNDISPATCHED_READERS = {
    Tensor.tolist,
    Tensor.numpy,
    Tensor.__repr__,
    Tensor.__format__,
    Tensor.__array__,
    Tensor.__dlpack__,
    Tensor.__deepcopy__,
}


_PICKLING = Tensor._reduce_ex_internal.__code__


def _is_pickled(frame: FrameType | None) -> bool:
    """Whether the storage is taken to be written to a file: by torch.save, pickle, and what sends objects to other ranks."""
    for _ in range(3):
        if frame is None or frame.f_code is _PICKLING:
            break
        frame = frame.f_back
    return frame is not None and frame.f_code is _PICKLING


class ReaderWatch(TorchFunctionMode):
    """Reports reads that a dispatch mode does not see to the watch, by its `check_read(name, tensor)`."""

    def __init__(self, watch: Any) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self, func: Fn, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        if func in _UNDISPATCHED_READERS:
            self._watch.check_read(f"Tensor.{func.__name__}", args[0])
        elif func is Tensor.untyped_storage and _is_pickled(sys._getframe(1)):
            self._watch.check_read("pickle", args[0])
        return func(*args, **(kwargs or {}))


def restack(mode: TorchDispatchMode, readers: TorchFunctionMode, *, add: bool) -> None:
    """Put the modes below all active ones, so that the user's `with` blocks nest; without `add`, remove them."""
    above = [dispatch._pop_mode() for _ in dispatch._get_current_dispatch_mode_stack()]
    functions = [_pop_mode() for _ in _get_current_function_mode_stack()]
    if add:
        dispatch._push_mode(mode)
        _push_mode(readers)
    for other in reversed(above):
        if other is not mode:
            dispatch._push_mode(other)
    for one in reversed(functions):
        if one is not readers:
            _push_mode(one)
