"""Ops that give a tensor another shape or another memory, in place: the tensor becomes what a view op would give."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from localtensor.errors import NotInLockstep
from localtensor.lockstep.values.local_tensor import LocalTensor, wrap
from localtensor.lockstep.values.partition import by_value, common, rows_apart
from localtensor.lockstep.values.rank_int import is_rank_int, on_rank
from localtensor.lockstep.values.storage import Memory, make_finer, memory_of

aten = torch.ops.aten
Reshape: TypeAlias = Callable[..., Any]

# In place, and the view that the tensor becomes.
VIEWS = {
    "aten::t_": aten.t.default,
    "aten::transpose_": aten.transpose.int,
    "aten::unsqueeze_": aten.unsqueeze.default,
    "aten::squeeze_": aten.squeeze.default,
    "aten::squeeze_.dim": aten.squeeze.dim,
    "aten::squeeze_.dims": aten.squeeze.dims,
    "aten::as_strided_": aten.as_strided.default,
}


def reshaped(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """The op, whose first argument is a LocalTensor; the answer is that tensor."""
    x, name = args[0], func.name()
    if name in VIEWS:
        become(x, mode.run(VIEWS[name], args, kwargs))
    elif name == "aten::set_.source_Tensor":
        take_over(x, args[1])
    elif name in ("aten::resize_", "aten::resize_as_"):
        like = args[1].size() if name == "aten::resize_as_" else args[1]
        _resize(x, like, **kwargs)
    elif name.startswith("aten::set_"):
        _lie_in(x, func, args[1:], kwargs)
    elif name != "aten::detach_":  # that is autograd's
        raise NotInLockstep(name, "it gives a tensor another shape in place, in a way that is not known here")
    return x


def become(x: LocalTensor, other: LocalTensor) -> None:
    """The tensor is, from now on, what the other is; it lies in the same memory."""
    torch.Tensor.data.__set__(x, other)  # type: ignore[attr-defined]
    x._cells, x._partition = other._cells, other._partition


def take_over(x: LocalTensor, other: Tensor) -> None:
    """The tensor shares memory with the other from now on, and with nothing that it shared memory with."""
    if isinstance(other, LocalTensor):
        alias = x._mode.run(aten.alias.default, (other,), {})  # with cells of its own
        memory = alias._memory
    else:
        alias, memory = wrap((other.detach(),), x._mode.everyone, x._mode), Memory(outside=True)
    become(x, alias)
    memory.join(x)


_in_storage: dict[int, weakref.ref[Memory]] = {}  # by the address of a storage that was named


def _lie_in(x: LocalTensor, func: Any, args: Any, kwargs: Any) -> None:
    """The tensor lies in a storage that the program has in its hands, as it has while it loads a file."""
    storage = args[0] if args else torch.UntypedStorage(device=x.device)
    try:
        storage.data_ptr()
    except RuntimeError:  # there are no bytes behind it
        raise NotInLockstep(str(func), "the storage is that of a LocalTensor: each rank has its own") from None
    with torch._C._DisableTorchDispatch():
        cell = func(torch.empty(0, dtype=x.dtype, device=x.device), *args, **kwargs)
    become(x, wrap((cell,), x._mode.everyone, x._mode))
    found = _in_storage.get(storage._cdata)
    memory = found and found()
    if not memory or any(y._cells[0].untyped_storage()._cdata != storage._cdata for y in memory.members()):
        memory = Memory()
        for key in [key for key, one in _in_storage.items() if one() is None]:
            del _in_storage[key]
        _in_storage[storage._cdata] = weakref.ref(memory)
    memory.join(x)


def refit(func: Any, x: LocalTensor, results: Sequence[Any]) -> None:
    """A tensor that was given as out= has the shape that the op gave to its cells; `results` are the op's, by cell.

    Raises `NotInLockstep` if the rows of a stack were given another shape: they lie too close for that.
    """
    for cell, rows, done in zip(x._cells, x._partition.sizes, results, strict=False):  # who was not written comes last
        shapes = {done.shape[rows > 1 :]} if isinstance(done, Tensor) else {row.shape for row in done}
        if rows > 1 and shapes != {cell.shape[1:]}:
            why = "its out= holds values that differ by rank, and has another shape than is written: pass one of that shape"
            raise NotInLockstep(str(func), why)
    shape = x.shape
    if all(type(size) is int for size in shape):
        pairs = zip(x._cells, x._partition.sizes, strict=True)
        if {tuple(cell.shape[rows > 1 :]) for cell, rows in pairs} != {tuple(shape)}:
            become(x, wrap(x._cells, x._partition, x._mode))


def _resize(x: LocalTensor, size: Any, **options: Any) -> None:
    final = rows_apart(x._partition)
    for one in size:
        if is_rank_int(one):
            final = common(final, by_value(one.node.values, one.node.held))
    make_finer(x, final)
    memory_of(x)
    cells = []
    for cell, old in enumerate(x._cells):
        rank = final.ranks(cell)[0]
        with torch._C._DisableTorchDispatch():
            cells.append(old.detach().resize_([on_rank(one, rank) for one in size], **options))
    become(x, wrap(tuple(cells), final, x._mode))
