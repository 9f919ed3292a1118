"""The ops of one part of a run, in order, below autograd: what each reads and gives, and the user's lines that call it.

Recorded in a second run, for one region only: a module's forward pass, a backward pass, or an optimizer's step.  An op of
the backward pass has the lines of the forward op that it belongs to.

Private parts of torch, which tests/localtensor/testing/compare/test_op_stream.py guards:

| part                                                                | torch | tried on |
|---------------------------------------------------------------------|-------|----------|
| _C._autograd._get_sequence_nr, Node._sequence_nr: forward of a node | 2.13  | 2.13     |
| _C._current_autograd_node                                           | 2.13  | 2.13     |
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from localtensor._util.call_sites import WORKER_LOOP, is_user_file
from localtensor._util.events import Place
from localtensor.collectives.c10d_table import COLLECTIVE_OPS, WAITS, argument_positions, plain_argument
from localtensor.testing.compare.watch import Key, Watch

MOST_LINES = 4  # lines of the user's stack that an op keeps
FUNCTIONAL = "_c10d_functional"
WITH_BIAS = ("addmm", "addmv", "baddbmm")
"""Ops whose first argument is added: a program may add it later, so the result without it is kept as well."""


@dataclass(frozen=True, slots=True)
class ValueAt:
    """A tensor in the arguments of a recorded call: the index of its value."""

    index: int


@dataclass(frozen=True, slots=True)
class Dispatch:
    """A call that DTensor has dispatched: the op and its arguments, with `ValueAt` for tensors, and the layout of each.

    `ranks` are those of the mesh, in its order, and `sizes` its axes.
    """

    func: Any
    args: Any
    kwargs: Any
    layouts: tuple[tuple[Any, ...], ...]
    ranks: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AxisType:
    """The type of a tensor along a mesh axis, such as R or S(0); `axis` are sizes and strides, and `name` the checker's own."""

    axis: tuple[tuple[int, int], ...]
    name: str
    type: str


@dataclass(frozen=True, slots=True)
class Op:
    """The `number`-th op of this name: indices of the values that it reads and gives, and lines, innermost first.

    `group` are the ranks of a collective; `dims` the dims that a call names, as `sum` does; `dispatch` is the call on DTensors.
    `typed` is what `claimed_types` says of the first result.
    """

    name: str
    number: int
    reads: tuple[int, ...]
    gives: tuple[int, ...]
    places: tuple[Place, ...]
    group: tuple[int, ...] | None = None
    dims: tuple[int, ...] = ()
    dispatch: Dispatch | None = None
    typed: tuple[AxisType, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}{f', {lines_text(self.places)}' if self.places else ''}"


@dataclass(slots=True)
class OpStream:
    """The ops and their values; `made_by` says which op made a value, and `marks` which value an observation has."""

    ops: list[Op] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    made_by: dict[int, int] = field(default_factory=dict)
    marks: dict[Key, int] = field(default_factory=dict)
    declared: set[int] = field(default_factory=set)  # values that are parts of a DTensor


def lines_text(places: Sequence[Place]) -> str:
    """Lines of a stack, innermost first.

    >>> lines_text([Place("a.py", 3, "f"), Place("b.py", 9, "g")])
    'a.py:3 in f, from b.py:9 in g'
    """
    return ", from ".join(map(str, places))


def user_places(frame: FrameType | None) -> tuple[Place, ...]:
    """The user's innermost lines on a frame's stack, innermost first; those that call a backward pass are left out."""
    found: list[Place] = []
    while frame is not None and len(found) < MOST_LINES:
        code = frame.f_code
        if code.co_name in ("_engine_run_backward", WORKER_LOOP):
            break
        if is_user_file(code.co_filename) and not code.co_name.startswith("__torch_"):
            place = Place(code.co_filename, frame.f_lineno, code.co_name)
            found += [place] if all((one.file, one.line) != (place.file, place.line) for one in found) else []
        frame = frame.f_back
    return tuple(found)


class OpRecorder(TorchDispatchMode):
    """Records the ops that run while it is entered and `active()` holds; the lines of all others, for the backward pass."""

    def __init__(self, active: Callable[[], bool]) -> None:
        super().__init__()
        self.stream, self.active = OpStream(), active
        self._index: dict[tuple[Any, ...], int] = {}  # of tensors, by where they lie
        self._alive: list[Tensor] = []  # so that no address is used twice
        self._late: dict[int, Tensor] = {}  # results of collectives, which may not be there yet
        self._writer: dict[int, int] = {}  # the op that wrote a storage last, for its other views
        self._numbers: Counter[str] = Counter()
        self._nodes: dict[int, tuple[Place, ...]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        node = torch._C._current_autograd_node()
        if node is None:  # forward: the node of this op, if it has one, is the youngest
            places = user_places(sys._getframe(1))
            self._nodes.setdefault(torch._C._autograd._get_sequence_nr() - 1, places)
        if not self.active():
            return func(*args, **kwargs)
        if node is not None:
            own = user_places(sys._getframe(1))
            forward = self._nodes.get(node._sequence_nr(), ())
            places = (*own[: 1 if forward else MOST_LINES], *forward)[:MOST_LINES]
        name, reads, group = _call_of(func, args, kwargs)
        waits = name in WAITS
        read = () if waits else self._read(reads, look=not func.is_view)
        done = func(*args, **kwargs)
        if waits:
            read = self._read(reads)
        self._gives(func, name, (args, kwargs), (reads, read), done, places, group)
        return done

    def _read(self, tensors: Sequence[Tensor], *, look: bool = True) -> tuple[int, ...]:
        """The values that an op reads; with `look` it reads the elements, so that results of collectives are there."""
        found = []
        for x in tensors:
            key = _where(x)
            if key is None:
                continue
            if key not in self._index:
                index = self._index[key] = self._add(x)
                if (writer := self._writer.get(key[0])) is not None:
                    self.stream.made_by[index] = writer
            index = self._index[key]
            if look and index in self._late:  # and so are the other views of its memory
                for other in [i for i, late in self._late.items() if (_where(late) or key)[0] == key[0]]:
                    self.stream.values[other] = _copied(self._late.pop(other))
            found.append(index)
        return tuple(found)

    def _gives(
        self, func: Any, name: str, given: tuple[Any, Any], read: tuple[Sequence[Tensor], tuple[int, ...]], done: Any,
        places: tuple[Place, ...], group: tuple[int, ...] | None,
    ) -> None:  # fmt: skip
        args, kwargs = given
        results = _results_of(func, args, done)
        known = {_where(x) for x in read[0]}
        written = func._schema.is_mutable or func.namespace == "c10d"
        if not written and results and all(_where(x) in known for x in results):
            return  # another name of the same tensor
        number, at = self._numbers[name], len(self.stream.ops)
        gives = []
        for x in results:
            key = _where(x)
            if key is None:
                continue
            index = self._index[key] = self._add(x)
            gives.append(index)
            self.stream.made_by[index] = at
            if group is not None or (func.is_view and any(i in self._late for i in read[1])):
                self._late[index] = x
            if written:
                for other in [one for one in self._index if one[0] == key[0] and one != key]:
                    del self._index[other]
                self._writer[key[0]] = at
        if name in WITH_BIAS and len(gives) == 1 and isinstance(args[0], Tensor) and not isinstance(done, DTensor):
            self._add(done - args[0])
        self._numbers[name] += 1
        dispatch = self._dispatch(func, args, kwargs)
        dims = _dims_of(func, args, kwargs)
        self.stream.ops.append(Op(name, number, read[1], tuple(gives), places, group, dims, dispatch))

    def _dispatch(self, func: Any, args: Any, kwargs: Any) -> Dispatch | None:
        """The call, if all its tensors are DTensors of one mesh whose values are known."""
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        given = [x for x in tensors if isinstance(x, DTensor)]
        if not given or len(given) < len(tensors) or any(x.device_mesh != given[0].device_mesh for x in given):
            return None
        if func._schema.is_mutable:  # what it has read is overwritten
            return None
        known = {id(x): self._index.get(_where(x) or ()) for x in tensors}
        if None in known.values():
            return None
        mesh = given[0].device_mesh
        args, kwargs = tree_map(lambda x: ValueAt(known[id(x)] or 0) if isinstance(x, Tensor) else x, (args, kwargs))
        ranks = tuple(int(rank) for rank in mesh.mesh.flatten().tolist())
        return Dispatch(func, args, kwargs, tuple(x.placements for x in given), ranks, tuple(mesh.shape))

    def _add(self, x: Tensor) -> int:
        self._alive.append(x)
        self.stream.values.append(_copied(x))
        if isinstance(x, DTensor):
            self.stream.declared.add(len(self.stream.values) - 1)
        return len(self.stream.values) - 1

    def mark(self, key: Key, x: Tensor) -> None:
        """Notes that an observation is of this tensor."""
        where = _where(x)
        if where is not None and self.active():
            if where not in self._index:
                self._index[where] = self._add(x)
            self.stream.marks[key] = self._index[where]

    def finish(self) -> OpStream:
        """The stream, when the program has ended."""
        for index, x in self._late.items():
            self.stream.values[index] = _copied(x)
        ops = self.stream.ops
        ops[:] = [replace(one, typed=claimed_types(self._alive[one.gives[0]])) if one.gives else one for one in ops]
        self._late, self._alive, self._index = {}, [], {}
        return self.stream


def _copied(x: Tensor) -> Tensor:
    """A copy of a rank's elements, of which no mode of the program's learns: a collective may be writing them."""
    with _disable_current_modes():
        return _local(x).detach().clone()


def claimed_types(x: Tensor) -> tuple[AxisType, ...]:
    """The types that `spmd_types` has given to a tensor, axis by axis; none if it has none."""
    package: Any = sys.modules.get("spmd_types")
    if package is None or not hasattr(x, "_local_type"):
        return ()
    found = {axis: repr(one) for axis, one in package.get_local_type(x).items()}
    for dim, entry in enumerate(package.get_partition_spec(x) or ()):
        found |= dict.fromkeys(entry if isinstance(entry, tuple) else () if entry is None else (entry,), f"S({dim})")
    return tuple(AxisType(tuple(axis.layout.sizes_and_strides), str(axis), one) for axis, one in found.items())


def _local(x: Tensor) -> Tensor:
    x = x.detach()
    x = x._local_tensor if isinstance(x, DTensor) else x
    return x.wait() if hasattr(x, "wait") else x


def _where(x: Tensor) -> tuple[Any, ...] | None:
    """Where a tensor lies, and how: two tensors of one place are one value.  None for those without elements."""
    local = x._local_tensor if isinstance(x, DTensor) else x
    local = getattr(local, "elem", local)  # of a functional collective's result, which waits when it is read
    if local.layout != torch.strided or not local.numel() or type(local) not in (Tensor, torch.nn.Parameter):
        return None
    return (local.untyped_storage().data_ptr(), local.storage_offset(), tuple(local.shape), local.stride(), local.dtype)


def _call_of(func: Any, args: Any, kwargs: Any) -> tuple[str, list[Tensor], tuple[int, ...] | None]:
    """The name of an op, the tensors that it reads, and the ranks of a collective."""
    name = func._schema.name.partition("::")[2]
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    if func.namespace == "c10d" and name in COLLECTIVE_OPS:
        at, _, count = argument_positions(name, func._schema)
        rest = [plain_argument(one) for one in (*args[:at], *args[at + 1 :])][:count]
        op = COLLECTIVE_OPS[name]
        group = tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(args[at])))
        return op.kind, [x for x in tree_leaves(op.read(*rest).reads) if isinstance(x, Tensor)], group
    if func.namespace == FUNCTIONAL and name not in WAITS:
        named = next((x for x in reversed(args) if isinstance(x, str)), None)
        ranks = None if named is None else tuple(dist.get_process_group_ranks(_group_of(named)))
        return name.rstrip("_"), tensors, ranks
    return name, tensors, None


def _group_of(name: str) -> Any:
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def _dims_of(func: Any, args: Any, kwargs: Any) -> tuple[int, ...]:
    """The dims that a call names; none if it takes all."""
    named = {**dict(zip((one.name for one in func._schema.arguments), args, strict=False)), **kwargs}
    dims = named.get("dim")
    return (dims,) if isinstance(dims, int) else tuple(dims) if isinstance(dims, list | tuple) else ()


def _results_of(func: Any, args: Any, done: Any) -> list[Tensor]:
    """The tensors that a call has given or written."""
    name = func._schema.name.partition("::")[2]
    if func.namespace == "c10d" and name in COLLECTIVE_OPS:
        at, _, count = argument_positions(name, func._schema)
        rest = [plain_argument(one) for one in (*args[:at], *args[at + 1 :])][:count]
        return [x for x in tree_leaves(COLLECTIVE_OPS[name].read(*rest).writes) if isinstance(x, Tensor)]
    pairs = zip(func._schema.arguments, args, strict=False)
    written = [x for one, x in pairs if one.alias_info is not None and one.alias_info.is_write]
    return [x for x in tree_leaves((written, done)) if isinstance(x, Tensor)]


@contextmanager
def recorded(watch: Watch) -> Iterator[None]:
    """Records the ops of the watch's region inside the block, if it has one, as `watch.ops`."""
    if watch.region is None:
        yield
        return
    watch.recorder = recorder = OpRecorder(watch.active)
    try:
        with recorder:
            yield
    finally:
        watch.recorder, watch.ops = None, recorder.finish()
