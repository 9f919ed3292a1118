"""LocalTensor: a tensor that holds every rank's value, and each different value once."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol, SupportsIndex

import numpy as np
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

from localtensor._util import ambient
from localtensor._util.call_sites import Args, Kwargs, origin
from localtensor._util.patching import left_alone_by_the_compiler
from localtensor.collectives.compare import difference_text, same_bits, short_text
from localtensor.errors import NotHeld, NotInLockstep, NotTraceable, RanksDisagree
from localtensor.lockstep.values.formatting import format_tensor, user_place
from localtensor.lockstep.values.partition import Array, Partition, by_value, one_row_per_rank, partition
from localtensor.lockstep.values.rank_int import rank_int, rank_lists
from localtensor.lockstep.values.rng_streams import Streams
from localtensor.lockstep.values.stacks import cells_of_rows, deduplicate, has_sym_ints, index_by_rank, write_by_rank
from localtensor.lockstep.values.storage import Memory, shared_cells
from localtensor.lockstep.values.sym_nodes import RankInts

if TYPE_CHECKING:
    from localtensor.lockstep.comms.process_groups import LockstepWorld

Shapes = tuple[tuple[int, ...], ...]
_make = torch.Tensor._make_wrapper_subclass


class Mode(Protocol):
    """LocalTensorMode, to the modules that it imports."""

    world: int
    ranks: tuple[int, ...]
    everyone: Partition
    serial: int
    streams: Streams
    groups: LockstepWorld
    in_flight: list[Any]
    joined: Any
    caught: Any
    as_rank: int | None
    recorder: Any
    tracing: Any
    answers: list[bool] | None

    def run(self, func: OpOverload, args: Args, kwargs: Kwargs) -> Any: ...
    def gather(self, values: Mapping[int, Tensor]) -> LocalTensor: ...
    def rank_map(self, make: Callable[[int], Tensor]) -> LocalTensor: ...
    def disable(self) -> AbstractContextManager[None]: ...
    def running_as(self, rank: int | None) -> AbstractContextManager[None]: ...
    def check_not_in_flight(self, x: Tensor, op: str) -> None: ...
    def check_read(self, x: Tensor, op: str) -> None: ...


class LocalTensor(Tensor):
    """A tensor with a value on each rank; equal values of ranks are stored once.

    With one shape on all ranks, it looks like an ordinary tensor of that shape; where a size differs, `x.shape` has an
    int of each rank.  Made by `rank_map` and by every op that makes a tensor under a `LocalTensorMode`.

    >>> from localtensor import LocalTensorMode, rank_map
    >>> with LocalTensorMode(4):
    ...     x = rank_map(lambda rank: torch.tensor([rank // 2, 1]))
    >>> x
    LocalTensor(4 ranks, 2 different values,
      ranks 0, 1: tensor([0, 1]),
      ranks 2, 3: tensor([1, 1]))
    >>> (x * 10).on(3)
    tensor([10, 10])
    """

    _cells: tuple[Tensor, ...]
    _partition: Partition
    _memory: Memory | None
    _mode: Mode
    shape_elsewhere: tuple[int, ...] | None = None  # of what ranks outside of the mesh have, if it is a DTensor's

    def __new__(
        cls, local_tensors: Mapping[int, Tensor] | Sequence[Tensor], requires_grad: bool = False
    ) -> LocalTensor:
        """A LocalTensor of {rank: tensor}, or of a list with a tensor for each rank, as torch's own class takes."""
        given = local_tensors if isinstance(local_tensors, Mapping) else dict(enumerate(local_tensors))
        mode = ambient.lockstep() or ambient.idle_mode(max(given, default=-1) + 1)
        made: LocalTensor = mode.gather(given)
        if requires_grad:
            made.requires_grad_()
        return made

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: OpOverload, types: Sequence[type[Tensor]], args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        """Run an op outside of the mode, or under another one that leaves it to the tensor, by the mode of the tensor."""
        for kind in types:
            if kind is not LocalTensor and kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
                if issubclass(kind, FakeTensor):
                    problem = "it is used beside fake tensors, and none stands for it"
                    raise NotTraceable(str(func), "a LocalTensor", problem, "Pass it as an input.", user_place())
                return NotImplemented
        mode = ambient.lockstep() or _first_mode(args) or _first_mode((kwargs or {}).values())
        with mode.disable():
            return mode.run(func, args, kwargs or {})

    # -- values of ranks

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that hold a value."""
        return tuple(np.flatnonzero(self._partition.row_of >= 0).tolist())

    def on(self, rank: int) -> Tensor:
        """The tensor of one rank: a plain copy without autograd history.  Raises `NotHeld`."""
        check_value_may_be_read(self, "LocalTensor.on")
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            return self.__localtensor_on__(rank).clone().requires_grad_(self.requires_grad)

    def __localtensor_on__(self, rank: int) -> Tensor:
        """The tensor of one rank, not copied; `run` passes it to its rank threads."""
        held = self._partition
        if not isinstance(rank, SupportsIndex) or not 0 <= rank < held.world or held.row_of[int(rank)] < 0:
            raise NotHeld("LocalTensor.on", [rank], list(self.ranks))
        cell, row = held.place(int(rank))
        found = self._cells[cell]
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            return found[row] if held.sizes[cell] > 1 else found

    @property
    def _local_tensors(self) -> dict[int, Tensor]:
        """The tensors by rank, under the name that torch's own LocalTensor uses."""
        return {rank: self.__localtensor_on__(rank) for rank in self.ranks}

    @property
    def _ranks(self) -> frozenset[int]:
        """The ranks, under the name that torch's own LocalTensor uses."""
        return frozenset(self.ranks)

    def values(self) -> list[tuple[list[int], Tensor]]:  # type: ignore[override]  # of sparse tensors only
        """Each stored value, not copied, with the ranks that read it; sorted by first rank."""
        rows = sorted(self._partition.ranks(row) for row in range(self._partition.rows))
        return [(ranks, self.__localtensor_on__(ranks[0])) for ranks in rows]

    def reconcile(self) -> Tensor:
        """The one value of all ranks, equal bit for bit; a copy without autograd history.

        Raises `RanksDisagree`, which names the ranks that differ, where, and by how much.

        >>> from localtensor import LocalTensorMode, all_reduce, rank_map
        >>> with LocalTensorMode(4):
        ...     all_reduce(rank_map(torch.tensor), "sum").reconcile()
        tensor(6)
        """
        check_value_may_be_read(self, "LocalTensor.reconcile")
        (first, value), *others = self.values()
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            for ranks, other in others:
                if not same_bits(value, other):
                    shorts = {rank: short_text(held) for holders, held in self.values() for rank in holders}
                    how = f"rank {ranks[0]} from rank {first[0]} {difference_text(value, other)}".strip()
                    places = dict.fromkeys(shorts, origin(sys._getframe(1)).place)
                    raise RanksDisagree("value", shorts, places, how, call="LocalTensor.reconcile")
        return self.on(first[0])

    # -- methods of any tensor

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            return format_tensor(self.values(), self._partition, self.requires_grad)

    def numpy(self, *, force: bool = False) -> Array:
        """The one value of all ranks.  Raises `RanksDisagree`."""
        value = self.reconcile()
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            return value.numpy(force=force)

    def __array__(self, dtype: np.dtype[Any] | None = None, copy: bool | None = None) -> Array:
        return np.asarray(self.numpy(), dtype)  # a copy already

    def tolist(self) -> Any:
        """Lists of numbers: of ints and bools those of each rank, else the one value of all ranks.  Raises `RanksDisagree`."""
        held = self._partition
        if held.rows > 1 and self.dtype in _COUNTED and all(type(size) is int for size in self.shape):
            check_value_may_be_read(self, "LocalTensor.tolist")
            return rank_lists(self._cells, held)
        value = self.reconcile()
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            return value.tolist()

    def __format__(self, how: str) -> str:
        return format(self.item() if how and not self.dim() else str(self), how)

    def __dlpack__(self, **options: Any) -> Any:
        """The one value of all ranks, a copy.  Raises `RanksDisagree`."""
        value = self.reconcile()
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            return value.__dlpack__(**options)

    def __getitem__(self, index: Any) -> Any:
        return index_by_rank(self, index) if has_sym_ints(index) else super().__getitem__(index)

    def __setitem__(self, index: Any, value: Any) -> None:
        if has_sym_ints(index):
            write_by_rank(self, index, value)
        else:
            super().__setitem__(index, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalTensor:
        if id(self) not in memo:
            if not self.is_leaf:  # torch's own message
                raise RuntimeError("Only Tensors created explicitly by the user support the deepcopy protocol")
            with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
                alone = isinstance(self, torch.nn.Parameter)  # torch copies the memory of each weight by itself
                cells, memory = (tuple(x.clone() for x in self._cells), None) if alone else shared_cells(self, memo)
            copied = memo[id(self)] = wrap(cells, self._partition, self._mode, memory)
            copied.requires_grad_(self.requires_grad)
            copied.__dict__.update(copy.deepcopy(self._extra(), memo))
            if self.grad is not None:
                copied.grad = copy.deepcopy(self.grad, memo)
        found: LocalTensor = memo[id(self)]
        return found

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            cells, memory = shared_cells(self, None)
        return unpickled, (cells, self._partition, self.requires_grad, self._extra(), memory)

    def _extra(self) -> dict[str, Any]:
        """Attributes set by a program; such a mark makes a tensor a parameter."""
        return {name: value for name, value in self.__dict__.items() if name not in _OWN_ATTRIBUTES}

    def __coerce_same_metadata_as_tangent__(self, metadata: object, kind: type = Tensor) -> LocalTensor | None:
        """The tensor itself as a gradient in a compiled graph, where a plain tensor is expected; None where another kind is."""
        return self if kind is Tensor else None

    def data_ptr(self) -> int:
        """The address of the first value, which only views of one memory share."""
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            return self._cells[0].data_ptr()

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return self.numel() * self.element_size()

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, other: Tensor) -> None:
        """Replace the values by those of another tensor, and share its memory."""
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            self._mode.run(torch.ops.aten.set_.source_Tensor, (self, other), {})


left_alone_by_the_compiler(LocalTensor.__torch_dispatch__)
_COUNTED = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
_OWN_ATTRIBUTES = ("_cells", "_partition", "_memory", "_mode", "_traced", "shape_elsewhere")


def check_value_may_be_read(x: LocalTensor, call: str) -> None:
    """Raises `NotTraceable` while a graph is recorded, if it holds the tensor: the value would be a constant in it."""
    if x._mode.tracing is not None:
        x._mode.tracing.check_read(x, call)


def wrap(cells: tuple[Tensor, ...], partition: Partition, mode: Mode, memory: Memory | None = None) -> LocalTensor:
    """A LocalTensor of these cells; a view joins the `memory` that it shares."""
    first = cells[0]
    if type(first) is not Tensor:  # the ops of a subclass would be sent back here, and end in a native crash
        raise NotInLockstep("a LocalTensor", f"it would be made of a {type(first).__name__}")
    shape: Any = first.shape
    is_strided = first.layout is torch.strided
    stride: Any = first.stride() if is_strided else None
    offset: Any = first.storage_offset() if is_strided else None
    policy = None
    if len(cells) == 1:
        if partition.sizes[0] > 1:
            shape, stride = shape[1:], stride[1:] if stride is not None else None
    else:
        shape, stride = _sizes(partition, *_shapes(cells, partition))
        policy = "sizes" if any(type(size) is not int for size in (*shape, *(stride or ()))) else None
    x: LocalTensor = _make(
        LocalTensor, shape, strides=stride, storage_offset=offset, dtype=first.dtype, layout=first.layout,
        device=first.device, dispatch_sizes_strides_policy=policy,
    )  # fmt: skip
    x._cells = cells
    x._partition = partition
    x._mode = mode
    x._memory = None
    if memory is not None:
        memory.join(x)
    if mode.tracing is not None:
        x.__dict__["_traced"] = mode.tracing
    return x


def _shapes(cells: Sequence[Tensor], partition: Partition) -> tuple[Shapes, Shapes]:
    """The shape of each cell's rows, and their strides (empty if not strided)."""
    shapes = tuple(tuple(c.shape[1:] if k > 1 else c.shape) for c, k in zip(cells, partition.sizes, strict=True))
    if cells[0].layout is not torch.strided:
        return shapes, ()
    strides = tuple(c.stride()[1:] if k > 1 else c.stride() for c, k in zip(cells, partition.sizes, strict=True))
    return shapes, strides


@lru_cache(4096)
def _sizes(partition: Partition, shapes: Shapes, strides: Shapes) -> tuple[list[Any], list[Any] | None]:
    """The size and the stride of each dim: an int, or an int of each rank."""

    def by_rank(numbers: Shapes) -> list[Any]:
        rows = np.repeat(np.array(numbers, np.int64).reshape(len(partition.sizes), -1), partition.sizes, axis=0)
        held = partition.held
        return [rank_int(rows[:, dim][partition.row_of], held) for dim in range(rows.shape[1])]

    dims = {len(shape) for shape in shapes}
    if len(dims) > 1:
        raise NotInLockstep("a tensor", f"it has {' or '.join(map(str, sorted(dims)))} dims, depending on the rank")
    if not shapes[0]:
        return [], [] if strides else None
    return by_rank(shapes), by_rank(strides) if strides else None


def size_query(name: str, x: LocalTensor, dim: int | None = None, **options: Any) -> object:
    """The size, stride or contiguity (by the op's name) of a tensor whose shape differs between ranks."""
    shape, stride = _sizes(x._partition, *_shapes(x._cells, x._partition))
    if name == "dim":
        return len(shape)
    if name in ("sym_size", "size"):
        return tuple(shape) if dim is None else shape[dim]
    if name in ("sym_stride", "stride"):
        return tuple(stride or ()) if dim is None else (stride or [])[dim]
    if name in ("sym_numel", "numel"):
        return math.prod(shape)
    if name == "sym_storage_offset":
        return x._cells[0].storage_offset()
    with (
        torch._C._DisableTorchDispatch(),
        torch._C.DisableTorchFunction(),
    ):  # is_contiguous and its variants: whether it holds on all ranks
        pairs = zip(x._cells, x._partition.sizes, strict=True)
        return all((cell[0] if rows > 1 else cell).is_contiguous(**options) for cell, rows in pairs)


def unpickled(
    cells: tuple[Tensor, ...], held: Partition, requires_grad: bool, extra: dict[str, Any], memory: Memory | None = None
) -> LocalTensor:
    """A LocalTensor from its pickled parts, in the mode of this thread or outside of any."""
    mode = ambient.lockstep()
    if mode is None or mode.world != held.world:
        mode = ambient.idle_mode(held.world)
    plain = tuple(cell._cells[0] if isinstance(cell, LocalTensor) else cell for cell in cells)  # loaded under the mode
    x = wrap(plain, held, mode, memory if memory is not None and memory.holds(plain) else None)
    x.requires_grad_(requires_grad)
    x.__dict__.update(extra)
    return x


torch.serialization.add_safe_globals([  # for `torch.load`; the names are those of files from earlier versions
    torch.SymInt, RankInts,  # the mesh of a DTensor holds the rank's coordinate
    unpickled, partition, Memory, (unpickled, "localtensor.tensor.unpickled"), (partition, "localtensor.folding.partition"),
])  # fmt: skip


def from_ranks(values: Mapping[int, Tensor], mode: Mode) -> LocalTensor:
    """A LocalTensor of one plain tensor for each rank; equal ones are stored once."""
    ranks = sorted(values)
    rows = deduplicate([values[rank].detach() for rank in ranks])
    if all(row is rows[0] for row in rows):
        same = by_value(np.zeros(mode.world), np.isin(np.arange(mode.world), ranks))
        return wrap((rows[0].clone(),), same, mode)
    cells, held = cells_of_rows(rows, one_row_per_rank(ranks, mode.world))
    # A stack is a copy; a single row of a cell would still be the caller's own tensor.
    own = tuple(cell if size > 1 else cell.clone() for cell, size in zip(cells, held.sizes, strict=True))
    return wrap(own, held, mode)


def _first_mode(values: Iterable[Any]) -> Any:
    for value in values:
        if isinstance(value, LocalTensor):
            return value._mode
        if isinstance(value, list | tuple):
            found = _first_mode(value)
            if found is not None:
                return found
    return None
