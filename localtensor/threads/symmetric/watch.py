"""The dispatch mode that reports each access of one rank to symmetric memory, exact to the element.

It sees every op: also those with `out=`, in-place ones, copies, and the reads behind `item()`.  `tolist`, `numpy` and the
like read without an op; a function mode reports them.  What is written later through a numpy array is not seen.
"""

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_map_only

from localtensor._util.call_sites import Args, Kwargs, origin
from localtensor.threads.buffer_watch import (
    FAKE_KEY,
    TENSOR_DISPATCH,
    ReaderWatch,
    is_view_op,
    reads_metadata_only,
    restack,
    tensor_uses,
    tensors_in,
)
from localtensor.threads.simulation import Simulation
from localtensor.threads.symmetric.accesses import Footprint, footprint_of, footprint_of_elements
from localtensor.threads.symmetric.memory import SymmetricMemory, Use

_OUR_KERNELS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
"""Where `register_kernels` has put them; they serve tensors of any device."""


class _Argument(NamedTuple):
    """A tensor argument of an op: its position and name, and whether the op reads and writes it."""

    position: int
    name: str
    reads: bool
    writes: bool


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# In-place ops that do not read what they write, or only in part.
_OVERWRITING = _names(
    "copy_ fill_ zero_ normal_ uniform_ random_ bernoulli_ exponential_ cauchy_ geometric_ log_normal_ set_ resize_"
    " index_put_ _index_put_impl_ index_copy_ index_fill_ masked_fill_ masked_scatter_ scatter_ put_"
    " _foreach_copy_ _foreach_zero_"
)
# Ops that only move what they read, or choose from it: bytes that no rank has written may be among them.
_MOVING = _names(
    "copy_ clone _to_copy cat stack copy split_with_sizes_copy _unsafe_view where masked_fill _foreach_copy_ _chunk_cat"
    " repeat flip roll constant_pad_nd index_put slice_scatter select_scatter diagonal_scatter"
    " index index_select gather take embedding masked_select narrow_copy slice_copy select_copy diagonal_copy"
)
_REDUCING = _names("allreduce_ allreduce_coalesced_ reduce_")  # they read what they write
_GIVING_AWAY = _names("Tensor.numpy Tensor.__array__ Tensor.__dlpack__")
_ITEM = torch.ops.aten._local_scalar_dense.default
_COMMUNICATION = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor"})


@functools.cache
def _arguments(func: OpOverload) -> tuple[_Argument, ...] | None:
    """The tensor arguments of an op that touches elements; None if their use depends on the call."""
    if is_view_op(func) or reads_metadata_only(func) or torch.Tag.inplace_view in func.tags:
        return ()
    if func.namespace == "symm_mem":  # its kernel reports what it does
        return ()
    if func.namespace == "c10d":
        return None
    overwriting = func.overloadpacket.__name__ in _OVERWRITING
    found = []
    for position, argument in enumerate(func._schema.arguments):
        if "Tensor" in str(argument.type):
            writes = argument.alias_info is not None and argument.alias_info.is_write
            reads = not writes or not (overwriting or argument.is_out)
            found.append(_Argument(position, argument.name, reads, writes))
    return tuple(found)


class SymmetricWatch(TorchDispatchMode):
    """Reports each access of one rank; sits at the bottom of the rank's mode stack."""

    def __init__(self, memory: SymmetricMemory, rank: int) -> None:
        super().__init__()
        self._memory, self._rank = memory, rank
        self._readers = ReaderWatch(self)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: otherwise torch imports its compiler at the first op."""
        return False

    def begin(self) -> None:
        """Watch the calling thread from now on, below the modes that are active."""
        restack(self, self._readers, add=True)

    def end(self) -> None:
        """Leave the calling thread, which ends: what its mode stack holds would be freed when Python may be gone."""
        restack(self, self._readers, add=False)

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        if torch._C._get_dispatch_mode(FAKE_KEY) is not None:  # shape propagation: no data is read
            return func(*args, **kwargs)
        if any(getattr(kind, "__torch_dispatch__", None) is not TENSOR_DISPATCH for kind in types):
            return NotImplemented  # DTensor and the like: their ops on local tensors arrive here later
        uses = self._uses(func, args, kwargs)
        if func is _ITEM:
            self._memory.synchronize(self._rank)
        if uses:
            in_flight = func.namespace == "c10d"
            name, line = func.overloadpacket.__name__, origin(sys._getframe(1)).line
            self._memory.touch(self._rank, name, uses, line, in_flight=in_flight)
        if func.namespace == "symm_mem" and any(x.is_cuda for x in tensors_in((*args, *kwargs.values()))):
            return func.redispatch(_OUR_KERNELS, *args, **kwargs)  # CUDA's own want memory that torch has exchanged
        return func(*args, **kwargs)

    def _uses(self, func: OpOverload, args: Args, kwargs: Kwargs) -> list[Use]:
        arguments = _arguments(func)
        uses: list[Use] = []
        if arguments is None:
            for tensor, writes in tensor_uses(func, args, kwargs):
                reads = not writes or func.overloadpacket.__name__ in _REDUCING
                self._add(uses, func, (args, kwargs), tensor, _Argument(-1, "", reads, writes))
            return uses
        for argument in arguments:
            at = argument.position
            value = args[at] if at < len(args) else kwargs.get(argument.name)
            if isinstance(value, Tensor):
                self._add(uses, func, (args, kwargs), value, argument)
            elif isinstance(value, list | tuple):
                for tensor in tensors_in(value):
                    self._add(uses, func, (args, kwargs), tensor, argument)
        return uses

    def _add(
        self, uses: list[Use], func: OpOverload, call: tuple[Args, Kwargs], tensor: Tensor, argument: _Argument
    ) -> None:
        if tensor.layout != torch.strided:
            return
        area = self._memory.areas.get(int(tensor.untyped_storage()._cdata))
        if area is None:
            return
        name = func.overloadpacket.__name__
        choose = _CHOSEN.get(name) if argument.position == 0 else None
        where = footprint_of(tensor) if choose is None else _chosen_part(tensor, choose, *call)
        if where is not None:
            moves = name in _MOVING or func.namespace in _COMMUNICATION
            uses.append(Use(area, where, argument.reads, argument.writes, moves))

    def check_read(self, name: str, tensor: Tensor) -> None:
        """Report a read by a function that no dispatch mode sees."""
        if tensor.layout == torch.strided and not hasattr(tensor, "__tensor_flatten__"):
            area = self._memory.areas.get(int(tensor.untyped_storage()._cdata))
            where = None if area is None else footprint_of(tensor)
            if area is not None and where is not None:
                use = Use(area, where, reads=True, writes=False, moves=name in _GIVING_AWAY)
                self._memory.touch(self._rank, name, [use], origin(sys._getframe(1)).line)


def watch_of(memory: SymmetricMemory, rank: int) -> SymmetricWatch:
    """The watch of the calling thread of the rank, which reports from the first call on."""
    number = memory.simulation.run_token.here()
    watch: SymmetricWatch | None = memory.watches.get(number)
    if watch is None:
        memory.sharing.add(rank)
        watch = memory.watches[number] = SymmetricWatch(memory, rank)
        watch.begin()
    return watch


@contextmanager
def helper_watched(simulation: Simulation, rank: int, number: int) -> Iterator[None]:
    """Inside the block, all of a helper thread, its accesses are reported, if its rank has used symmetric memory."""
    if simulation.memory is not None and rank in simulation.memory.sharing:
        watch_of(simulation.memory, rank)
    try:
        yield
    finally:
        if simulation.memory is not None:
            simulation.memory.leave(rank, number)


@contextmanager
def watched(memory: SymmetricMemory, rank: int) -> Iterator[None]:
    """Inside the block of a kernel, where torch has switched the modes off, the rank's accesses are reported."""
    watch = watch_of(memory, rank)
    if watch in _get_current_dispatch_mode_stack():
        yield
    else:
        with watch:
            yield


# Which elements an op with an index touches of its first argument.  Each function gets that argument's stand-in, of the
# same shape, and the other arguments: for a reading op positions, for a writing op bools, where it puts True.
_Chooser = Callable[..., Tensor]


def _read(op: Any) -> _Chooser:
    def chosen(x: Tensor, *rest: Any, **kwargs: Any) -> Tensor:
        marks = torch.zeros(x.numel(), dtype=torch.bool, device="cpu")
        marks[op(torch.arange(x.numel(), device="cpu").view(x.shape), *rest, **kwargs).reshape(-1)] = True
        return marks.view(x.shape)

    return chosen


def _written(put: Callable[..., object]) -> _Chooser:
    def chosen(x: Tensor, *rest: Any, **kwargs: Any) -> Tensor:
        marks = torch.zeros(x.shape, dtype=torch.bool, device="cpu")
        put(marks, *rest)
        return marks

    return chosen


_true = torch.tensor(True)
_scatter = _written(lambda marks, dim, index, *rest: marks.scatter_(dim, index, True))
_index_fill = _written(lambda marks, dim, index, *rest: marks.index_fill_(dim, index, True))
_index_put = _written(lambda marks, indices, *rest: torch.ops.aten.index_put_(marks, indices, _true))
_masked = _written(lambda marks, mask, *rest: marks.masked_fill_(mask, True))
_CHOSEN: dict[str, _Chooser] = {
    "index": _read(torch.ops.aten.index),
    "index_select": _read(torch.index_select),
    "gather": _read(lambda x, dim, index, **kwargs: torch.gather(x, dim, index)),
    "take": _read(torch.take),
    "embedding": _read(lambda x, index, *rest, **kwargs: torch.index_select(x, 0, index.reshape(-1))),
    "masked_select": _read(torch.masked_select),
    "narrow_copy": _read(torch.narrow),
    "slice_copy": _read(torch.ops.aten.slice),
    "select_copy": _read(torch.select),
    "diagonal_copy": _read(torch.diagonal),
    "index_put_": _index_put,
    "_index_put_impl_": _index_put,
    "index_copy_": _index_fill,
    "index_fill_": _index_fill,
    "index_add_": _index_fill,
    "index_reduce_": _index_fill,
    "scatter_": _scatter,
    "scatter_add_": _scatter,
    "scatter_reduce_": _scatter,
    "masked_fill_": _masked,
    "masked_scatter_": _masked,
    "put_": _written(lambda marks, index, *rest: marks.put_(index, torch.ones_like(index, dtype=torch.bool))),
}


def _chosen_part(tensor: Tensor, choose: _Chooser, args: Args, kwargs: Kwargs) -> Footprint | None:
    """The elements that an op with an index touches; all of them if the index does not fit, which the op will say."""
    try:
        rest = tree_map_only(Tensor, Tensor.cpu, (args[1:], kwargs))  # the stand-ins are on the CPU
        return footprint_of_elements(tensor, choose(tensor, *rest[0], **rest[1]))
    except (RuntimeError, IndexError):
        return footprint_of(tensor)
