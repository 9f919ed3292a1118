"""The watch over buffers in flight: between an asynchronous collective and its wait.

A real backend may write an output at any moment until then, and read an input at any moment.  So whoever reads
such an output or writes such a buffer has a race, even if it went well this time.
"""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils import _python_dispatch as dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from localtensor._util.call_sites import place_of
from localtensor.collectives.rendezvous import Ticket
from localtensor.errors import BufferReused, ReadBeforeWait
from localtensor.threads.simulation import Simulation

# Whether two tensors share an element.


def overlap(a: Tensor, b: Tensor) -> bool:
    """The two share an element, or a part of one.  Of strided ones whose ranges cross, only small ones are looked at one by one."""
    if a.untyped_storage()._cdata != b.untyped_storage()._cdata or not a.numel() or not b.numel():
        return False
    first, second = _range(a), _range(b)
    if first[1] <= second[0] or second[1] <= first[0]:
        return False
    if a.is_contiguous() and b.is_contiguous():
        return True
    if max(a.numel(), b.numel()) > 1 << 16:
        return first == second and a.stride() == b.stride()
    unit = min(a.element_size(), b.element_size())  # the imaginary parts of a buffer begin in the midst of its elements
    return bool(_units(a, unit) & _units(b, unit))


def _range(x: Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride()))
    start = int(x.storage_offset())
    return start * x.element_size(), (start + last + 1) * x.element_size()


def _units(x: Tensor, unit: int) -> set[int]:
    """The places in memory that the elements fill, counted in so many bytes."""
    many = x.element_size() // unit
    offsets = [int(x.storage_offset())]
    for size, stride in zip(x.shape, x.stride()):
        offsets = [offset + i * stride for offset in offsets for i in range(size)]
    return {offset * many + part for offset in offsets for part in range(many)}


class Watch(TorchDispatchMode):
    """Sees every op of one rank while something of its own is in flight; lies at the bottom of its mode stack."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()
        self._simulation = simulation
        self._inputs: dict[Ticket, list[Tensor]] = {}
        self._outputs: dict[Ticket, list[Tensor]] = {}
        self._readers = _Readers(self)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch would import its compiler at the first op, a second of time, to keep it away from here."""
        return False

    def begin(self, ticket: Ticket, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        if not self._inputs:
            _put_below(self, self._readers)
        self._inputs[ticket] = list(inputs)
        self._outputs[ticket] = list(outputs)

    def end(self, ticket: Ticket) -> None:
        if self._inputs.pop(ticket, None) is not None:
            del self._outputs[ticket]
            if not self._inputs:
                _take_out(self, self._readers)

    def close(self) -> None:
        """The rank has ended: nothing is watched any longer."""
        for ticket in list(self._inputs):
            self.end(ticket)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch._C._get_dispatch_mode(_FAKE) is not None:  # DTensor propagates shapes, and real data is on the way
            return func(*args, **kwargs)
        if any(getattr(kind, "__torch_dispatch__", None) is not _PLAIN for kind in types):
            return NotImplemented  # a DTensor, say: what it does with its local tensors comes by again
        if not _only_views(func) and not _only_shapes(func) and func.overloadpacket is not _WAIT:
            self._look(func, args, kwargs)
        return func(*args, **kwargs)

    def _look(self, func: Any, args: Any, kwargs: Any) -> None:
        for tensor, written in _arguments(func, args, kwargs):
            for ticket, held in self._outputs.items():
                if any(overlap(tensor, buffer) for buffer in held):
                    self._complain(BufferReused if written else ReadBeforeWait, ticket, str(func))
            for ticket, held in self._inputs.items() if written else ():
                if any(overlap(tensor, buffer) for buffer in held):
                    self._complain(BufferReused, ticket, str(func))

    def read_by(self, name: str, tensor: Tensor) -> None:
        """A function that no dispatch mode sees reads this tensor."""
        for ticket, held in self._outputs.items():
            if any(overlap(local, buffer) for local in _locals(tensor) for buffer in held):
                self._complain(ReadBeforeWait, ticket, name)

    def _complain(self, kind: "type[ReadBeforeWait | BufferReused]", ticket: Ticket, name: str) -> None:
        self._simulation.fail(kind(ticket.part.call(), name, place_of(sys._getframe(2))))


def _locals(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that hold a tensor's elements."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    return [getattr(tensor, name) for name in flatten()[0]] if flatten else [tensor]


_WAIT = torch.ops._c10d_functional.wait_tensor
_PLAIN = getattr(Tensor, "__torch_dispatch__", None)
_FAKE = torch._C._TorchDispatchModeKey.FAKE


def _only_views(func: Any) -> bool:
    """It makes another view of its argument, or asks for metadata: no element is read or written."""
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _only_shapes(func: Any) -> bool:
    """It makes a new tensor after its argument's shape and dtype, or compares those; the schemas do not say so.

    >>> [_only_shapes(op.default) for op in (torch.ops.aten.zeros_like, torch.ops.aten.new_ones, torch.ops.aten.clone)]
    [True, True, False]
    """
    name = func.overloadpacket.__name__
    return func.namespace == "aten" and (name.endswith("_like") or name.startswith("new_") or name in _ASK_METADATA)


_ASK_METADATA = frozenset({"is_same_size", "is_pinned", "record_stream", "_assert_tensor_metadata"})


def _only_sends(func: Any, args: Any) -> bool:
    """A send, or a broadcast on its root: the tensor stays as it is, though neither schema nor name says so."""
    if func is torch.ops.c10d.broadcast_.default:
        return bool(dist.ProcessGroup.unbox(args[1]).rank() == args[2])
    return func is torch.ops.c10d.send.default


def _arguments(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Tensor, bool]]:
    """Each tensor that the op gets, and whether it writes it.  The schemas of c10d's ops do not say: names do."""
    for index, argument in enumerate(func._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        if func.namespace == "c10d":
            written = not argument.name.startswith("input") and not _only_sends(func, args)
        else:
            written = argument.alias_info is not None and argument.alias_info.is_write
        for tensor in _tensors(value):
            yield tensor, written


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


# What reads elements without any op that a dispatch mode sees.
_QUIET_READERS = {Tensor.tolist, Tensor.numpy, Tensor.__repr__, Tensor.__format__, Tensor.__array__}


class _Readers(TorchFunctionMode):
    """Passes what a dispatch mode does not see on to the watch."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _QUIET_READERS:
            self._watch.read_by(f"Tensor.{func.__name__}", args[0])
        return func(*args, **(kwargs or {}))


def _put_below(mode: TorchDispatchMode, readers: TorchFunctionMode) -> None:
    """The modes lie under all that are active, so that `with` blocks of the user still nest."""
    above = [dispatch._pop_mode() for _ in dispatch._get_current_dispatch_mode_stack()]
    dispatch._push_mode(mode)
    for other in reversed(above):
        dispatch._push_mode(other)
    functions = [_pop_mode() for _ in _get_current_function_mode_stack()]
    _push_mode(readers)
    for one in reversed(functions):
        _push_mode(one)


def _take_out(mode: TorchDispatchMode, readers: TorchFunctionMode) -> None:
    above = [dispatch._pop_mode() for _ in dispatch._get_current_dispatch_mode_stack()]
    for other in reversed(above):
        if other is not mode:
            dispatch._push_mode(other)
    functions = [_pop_mode() for _ in _get_current_function_mode_stack()]
    for one in reversed(functions):
        if one is not readers:
            _push_mode(one)
