"""LocalTensorMode: one control flow for all ranks, whose tensors hold every rank's value."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch._ops import HigherOrderOperator, OpOverload
from torch.distributed.tensor import DTensor
from torch.fx.experimental import proxy_tensor
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from localtensor import errors
from localtensor._util import ambient
from localtensor._util.call_sites import Args, Fn, Kwargs, origin
from localtensor._util.patching import left_alone_by_the_compiler
from localtensor.errors.runs import MOST_RANKS
from localtensor.lockstep import text_uses as text_uses  # noqa: PLC0414  # it refuses texts of ints of each rank
from localtensor.lockstep.caught_errors import CaughtErrors
from localtensor.lockstep.comms import c10d_dispatch
from localtensor.lockstep.comms.c10d_dispatch import share_memory
from localtensor.lockstep.comms.process_groups import LockstepWorld
from localtensor.lockstep.dispatch import decompositions, dispatcher
from localtensor.lockstep.patches import branches as branches  # noqa: PLC0414  # it takes over conditions
from localtensor.lockstep.patches import (
    compiling,
    distributed_calls,
    dtensor,
    nn_modules,
    rank_queries,
    shard_offsets,
    tracing,
)
from localtensor.lockstep.values.joined_tensors import JoinedTensors
from localtensor.lockstep.values.local_tensor import LocalTensor as LocalTensor  # noqa: PLC0414  # re-exported
from localtensor.lockstep.values.local_tensor import from_ranks, size_query
from localtensor.lockstep.values.partition import Partition, everyone, partition
from localtensor.lockstep.values.rank_int import rank_int
from localtensor.lockstep.values.rng_streams import Streams

_SIZE_NAMES = (
    "dim", "sym_size", "size", "sym_stride", "stride", "sym_numel", "numel", "sym_storage_offset", "is_contiguous",
    "sym_is_contiguous", "is_contiguous.memory_format", "is_strides_like_format", "is_non_overlapping_and_dense",
    "sym_size.int", "sym_stride.int",
)  # fmt: skip
_SIZES = frozenset(f"aten::{name}" for name in _SIZE_NAMES)

_EQUAL = torch.ops.aten.equal.default
_PLAIN = Tensor.__torch_dispatch__  # of types without their own dispatch, such as Parameter
_get_mode, _FAKE = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.FAKE

# torch keeps these flags once per process and restores the former value, which is wrong where threads take turns.
_FLAGS = [
    name
    for name in (
        "_is_in_torch_dispatch_mode",
        "_is_in_non_infra_torch_dispatch_mode",
        "_is_in_any_mode_without_ignore_compile_internals",
    )
    if hasattr(_python_dispatch, name)
]


_INSTALLING = threading.RLock()  # the patches are cached functions, which two threads could enter at once


class LocalTensorMode(TorchDispatchMode):
    """All ranks at once, in one thread: under this mode every tensor holds each rank's value, equal ones once.

    `ranks` is their number, or the ranks themselves.  A default process group of all of them exists inside, and
    `init_device_mesh`, `new_group` and DTensor work as in a job of so many processes.  A tensor made outside is the
    same on every rank, and can be written only with such values.  Every rank's random stream starts with the
    generator's state when the mode is entered; the generator is restored when it ends.

    `trace` names a file for a trace of what runs inside, as of `run`; True records it without a file, as `recording`.

    Raises `NoRanks`, `CannotWrite`, `WrongType`; `ModeBusy` on entering it in a rank of `run`, or while another thread is in one.

    >>> with LocalTensorMode(1024):
    ...     x = rank_map(torch.tensor)
    ...     torch.distributed.all_reduce(x)
    >>> x
    LocalTensor(1024 ranks, the same on all: tensor(523776))
    """

    def __init__(self, ranks: int | Iterable[int], *, trace: str | os.PathLike[str] | bool | None = None) -> None:
        super().__init__()
        self.ranks = _validated_ranks(ranks)
        self.world = self.ranks[-1] + 1
        rows = np.full(self.world, -1)
        rows[list(self.ranks)] = 0
        self.everyone: Partition = partition(rows, [1]) if len(self.ranks) < self.world else everyone(self.world)
        self.serial = ambient.next_serial()
        self.streams = Streams(self.everyone)
        self.in_flight: list[Any] = []
        self.joined = JoinedTensors()
        self.caught = CaughtErrors()
        self.as_rank: int | None = None  # the rank as which torch's own code runs
        self._paused = False
        self.answers: list[bool] | None = None  # of ranks, to whether their shards are equal
        self.tracing: Any = None  # the graph that `make_fx` is recording under this mode
        self.compilers: list[Any] = []  # of Dynamo, each with the callback in whose place it compiles
        self._outer: Any = None  # the enclosing mode, and whether it was paused
        self.groups = LockstepWorld(self, self.serial)
        self.recorder: Any = None
        if trace is not None and trace is not False:
            from localtensor.lockstep.recorder import LockstepRecorder  # lazy: few programs are recorded

            self.recorder = LockstepRecorder(self.ranks, trace)

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler, which takes seconds

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether `torch.compile` compiles under this mode; else what it has made runs as it is written, op by op."""
        return compiling.supported()

    def __enter__(self) -> LocalTensorMode:
        outer = ambient.lockstep()
        ambient.open_mode(self, errors.ModeBusy)
        # On a GPU, torch runs backward in a thread of its own, which is not in this mode.
        self._backward_threads = torch.autograd.set_multithreading_enabled(False)
        try:
            with _INSTALLING:
                rank_queries.install()
                distributed_calls.install()
                dtensor.install()
                tracing.install()
                compiling.install()
            self.streams.of()
            self.groups.open()
            super().__enter__()
            self._outer = None if outer is None else (outer, outer._paused)
            if outer is not None:
                outer._paused = True  # an op that this mode passes on is not for the enclosing one either
            if self.recorder is not None:
                self.recorder.begin()
        except BaseException:  # why: it is re-raised; after any interrupt this thread is not in the mode
            self._backward_threads.__exit__(None, None, None)
            self.groups.leave()
            ambient.close_mode(self)
            raise
        return self

    @property
    def recording(self) -> Any:
        """What a mode with `trace` has recorded; None without."""
        return None if self.recorder is None else self.recorder.recording

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        halfway = branches.leave(self)
        try:
            super().__exit__(kind, error, trace)
            if self.recorder is not None:
                self.recorder.end(error)
        finally:
            self._backward_threads.__exit__(None, None, None)
            for _, compiler in self.compilers:
                compiler.forget()
            self.compilers.clear()
            self.groups.leave()
            if ambient.close_mode(self) and not torch._C._len_torch_dispatch_stack():
                for flag in _FLAGS:
                    setattr(_python_dispatch, flag, False)
            if self._outer is not None:
                self._outer[0]._paused, self._outer = self._outer[1], None
            self.streams.close()
            left, self.in_flight = self.in_flight, []
        caught, self.caught = self.caught, CaughtErrors()
        if kind is None:
            caught.check(halfway)
            if left:
                raise errors.WorkNotWaited([call for work in left for call in work.calls()])

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type[Tensor]], args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        if torch.is_inference_mode_enabled() and _views(func) and args and not args[0].is_inference():
            # torch links the view to its tensor, which it cannot do with a tensor that is made in this mode.
            with torch.inference_mode(False), torch.no_grad():
                return self.__torch_dispatch__(func, types, args, kwargs)
        if self._paused:
            return func(*args, **(kwargs or {}))
        if self.tracing is not None and self.tracing.records() and func.name() not in _SIZES:
            return tracing.record(self, func, types, args, kwargs or {})
        for each in types:
            if each is not LocalTensor and each.__torch_dispatch__ is not _PLAIN:
                if self.recorder is not None and self.recorder.takes_op(each):
                    return self.recorder.op_of_dtensors(self, func, args, kwargs or {})
                if func is _EQUAL and issubclass(each, DTensor) and self.answers is None:
                    return dtensor.equal(self, func, args, kwargs or {})
                # Under a fake mode torch computes shapes only.
                return (
                    tracing.run_faked(self, func, types, args, kwargs or {})
                    if _get_mode(_FAKE) is not None
                    else NotImplemented
                )
        if LocalTensor not in types and _get_mode(_FAKE) is not None:
            return tracing.run_faked(self, func, types, args, kwargs or {})
        return self.run(func, args, kwargs or {})

    def run(self, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
        """Run the op on every rank.  Raises `NotTraceable` where a graph is recorded in which the op would be missing."""
        known = _routes.get(id(func))  # the hash of an op is a function of Python
        if known is None:
            known = _routes[id(func)] = (func, _route(func))
        route = known[1]
        if proxy_tensor._CURRENT_MAKE_FX_TRACER is not None and func.name() not in _SIZES:
            return tracing.run_traced(self, route, func, args, kwargs)
        before = None if self.recorder is None or func.name() in _SIZES else self.recorder.ops
        try:
            done = route(self, func, args, kwargs)
        except RuntimeError as error:
            decompositions.refuse_lost_collective(error, str(func))
            raise
        if before is not None:
            self.recorder.ran(func, args, kwargs, done, before)
        return done

    # -- making LocalTensors

    def rank_map(self, make: Callable[[int], Tensor]) -> LocalTensor:
        """The LocalTensor of `make(rank)` for each rank, called with that rank's random stream.

        Raises `ValuesDiffer` if ranks give different dtypes, devices, layouts or numbers of dims; `NotATensor`.
        """
        _check_callable("rank_map", "make", make, "of a rank")
        return self.gather(self._as_each(self.ranks, make, lambda rank: (rank,)), "rank_map")

    def tensor_map(self, x: Tensor, change: Callable[[int, Tensor], Tensor | None]) -> LocalTensor:
        """The LocalTensor of `change(rank, tensor)` for each rank; a rank for which that is None holds nothing.

        A plain tensor is the same on every rank.  Raises `ValuesDiffer` as `rank_map`; `NotHeld` if nothing is left.
        """
        _check_callable("tensor_map", "change", change, "of a rank and its tensor")
        ranks, on = (x.ranks, x.__localtensor_on__) if isinstance(x, LocalTensor) else (self.ranks, lambda rank: x)
        found = self._as_each(ranks, change, lambda rank: (rank, on(rank)))
        return self.gather({rank: value for rank, value in found.items() if value is not None}, "tensor_map")

    def _as_each(self, ranks: Iterable[int], do: Callable[..., Any], args: Callable[[int], Any]) -> dict[int, Any]:
        """The results of `do(*args(rank))` by rank, with that rank's random stream and the mode paused."""
        found = {}
        tracing.check_ranks_apart(self)
        with self.streams.by_rank() as at, self.disable():
            for rank in ranks:
                at(rank)
                try:
                    with self.running_as(rank):
                        found[rank] = do(*args(rank))
                except RuntimeError as error:
                    decompositions.refuse_lost_collective(error, "a collective in a function of one rank")
                    raise
        return found

    def gather(self, values: Mapping[int, Tensor], call: str = "LocalTensor") -> LocalTensor:
        """The LocalTensor of these ranks' plain tensors.  Raises `ValuesDiffer`, `NotATensor`, `NotHeld`."""
        if not values:
            raise errors.NotHeld(call, self.ranks, ())
        if not set(values) <= set(self.ranks):
            raise errors.NotHeld(call, set(values) - set(self.ranks), self.ranks)
        values = {rank: value.on(rank) if isinstance(value, LocalTensor) else value for rank, value in values.items()}
        first = min(values)
        for rank, value in sorted(values.items()):
            if not isinstance(value, Tensor):
                raise errors.NotATensor(call, type(value).__name__, rank)
            for name in ("dtype", "device", "layout", "ndim"):
                mine, theirs = getattr(value, name), getattr(values[first], name)
                if mine != theirs:
                    raise errors.ValuesDiffer(call, name, mine, rank, theirs, first)
        with torch._C._DisableTorchDispatch():
            made = from_ranks(values, self)
        if self.recorder is not None:
            self.recorder.see(made)
        return made

    # -- scoped state

    @contextmanager
    def disable(self) -> Iterator[None]:
        """While inside, the mode is paused: plain tensors stay plain."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    @contextmanager
    def running_as(self, rank: int | None) -> Iterator[None]:
        """While inside, `get_rank()` is that rank: for code that runs as one rank with the same meaning on all."""
        before, self.as_rank = self.as_rank, rank
        try:
            yield
        finally:
            self.as_rank = before

    def rank(self) -> int | torch.SymInt:
        """The number of each rank; that of `running_as` while inside it."""
        return rank_int(np.arange(self.world), self.everyone.held) if self.as_rank is None else self.as_rank

    def check_not_in_flight(self, x: Tensor, op: str) -> None:
        """Raises `BufferReused` if an unfinished collective reads or writes this tensor's memory."""
        for work in self.in_flight:
            if any(share_memory(x, y) for y in (*work.reads, *work.outputs)):
                raise errors.BufferReused(work.calls()[0], op, origin(sys._getframe(1)).place)

    def check_read(self, x: Tensor, op: str) -> None:
        """Raises `ReadBeforeWait` if an unfinished collective writes this tensor's memory."""
        for work in self.in_flight:
            if any(share_memory(x, y) for y in work.outputs):
                raise errors.ReadBeforeWait(work.calls()[0], op, origin(sys._getframe(1)).place)


left_alone_by_the_compiler(LocalTensorMode.__torch_dispatch__)


def _validated_ranks(ranks: object) -> tuple[int, ...]:
    if isinstance(ranks, int) and not isinstance(ranks, bool) and 0 < ranks <= MOST_RANKS << 4:
        return tuple(range(ranks))
    found = list(ranks) if isinstance(ranks, Iterable) and not isinstance(ranks, str) else []
    if not found or not all(isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0 for rank in found):
        raise errors.NoRanks("LocalTensorMode", ranks)
    return tuple(sorted(set(found)))


@lru_cache(None)
def _views(func: Any) -> bool:
    """Whether the op returns views of its first argument."""
    returns = func._schema.returns if isinstance(func, OpOverload) else ()
    return any(one.alias_info is not None and not one.alias_info.is_write for one in returns)


_routes: dict[int, tuple[Any, Fn]] = {}


def _route(func: OpOverload | HigherOrderOperator) -> Fn:
    if isinstance(func, HigherOrderOperator):
        return decompositions.run_as_written
    if func.namespace in ("profiler", "prim"):
        return lambda mode, func, args, kwargs: func(*args, **kwargs)
    if func.namespace == "localtensor":
        return shard_offsets.run_node
    if func.name() in _SIZES:
        return lambda mode, func, args, kwargs: size_query(func._schema.name.removeprefix("aten::"), *args)
    run_op = decompositions.run_custom_op(dispatcher.run_op) if func._schema.name in OPDEFS else dispatcher.run_op
    return nn_modules.OP_HANDLERS.get(func.name()) or c10d_dispatch.op_handler(func.namespace) or run_op


def current_mode(call: str) -> LocalTensorMode:
    """The mode of this thread.  Raises `NoMode` outside of any."""
    mode = ambient.lockstep()
    if mode is None:
        raise errors.NoMode(call, origin(sys._getframe(2)).place)
    return mode  # type: ignore[no-any-return]


def rank_map(make: Callable[[int], Tensor]) -> LocalTensor:
    """The LocalTensor of `make(rank)` for each rank of the mode; see `LocalTensorMode.rank_map`.

    >>> with LocalTensorMode(2):
    ...     rank_map(lambda rank: torch.full((2,), rank))
    LocalTensor(2 ranks, 2 different values,
      rank 0: tensor([0, 0]),
      rank 1: tensor([1, 1]))
    """
    return current_mode("rank_map").rank_map(make)


def tensor_map(x: Tensor, change: Callable[[int, Tensor], Tensor | None]) -> LocalTensor:
    """The LocalTensor of `change(rank, tensor)` for each rank; see `LocalTensorMode.tensor_map`.

    >>> with LocalTensorMode(2):
    ...     tensor_map(rank_map(torch.tensor), lambda rank, x: x + 10 if rank else None)
    LocalTensor(rank 1 of 2, the same on all: tensor(11))
    """
    return current_mode("tensor_map").tensor_map(x, change)


ambient.set_idle_mode_factory(LocalTensorMode)


def _check_callable(call: str, argument: str, value: object, of: str) -> None:
    if not callable(value):
        raise errors.WrongType(call, argument, value, "it is not a function", f"Pass a function {of}.")
