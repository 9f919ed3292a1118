"""Collectives of torch.distributed on LocalTensors: c10d ops, functional collectives, and DTensor's own op.

The arguments of c10d ops are read by collectives/c10d_table.py, as for rank threads, so that a call means the same.
The Work of an asynchronous collective in lockstep: complete at once, but its buffers stay in use until wait().
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed import Work
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from localtensor._util.call_sites import Args, Fn, Kwargs, origin
from localtensor._util.events import Call, Place
from localtensor.collectives import c10d_table
from localtensor.collectives.argument_checks import flat_tensors
from localtensor.collectives.c10d_table import COLLECTIVE_OPS, CallArguments, argument_positions, plain_argument
from localtensor.errors import CollectiveFailed, NotHeld, NotInLockstep, OutsideWrite
from localtensor.layout.reductions import reduction_name
from localtensor.layout.spec import shape_text
from localtensor.lockstep.comms import c10d_kernels, collectives
from localtensor.lockstep.comms.collectives import StackedValue, check_arguments, stacked, stacked_value
from localtensor.lockstep.comms.process_groups import resolve_group
from localtensor.lockstep.comms.stacked_collectives import GroupFamily
from localtensor.lockstep.dispatch.dispatcher import dtype_and_shape, plain_dispatch
from localtensor.lockstep.values.local_tensor import LocalTensor, Mode, wrap
from localtensor.lockstep.values.storage import overwrite


class LockstepWork(Work):
    """The Work of all ranks in one collective.

    Until it is waited for, the tensors that it reads must not be written, and its outputs neither read nor written.
    """

    def __init__(self, mode: Mode, kind: str, brought: CallArguments, family: GroupFamily) -> None:
        super().__init__()
        self._mode = mode
        self.reads = flat_tensors(brought.reads)
        self.outputs = list(brought.writes)
        self._described: Any = (kind, brought, family, origin(sys._getframe(4)).place)
        mode.in_flight.append(self)

    def calls(self) -> list[Call]:
        """The call of each rank, for errors."""
        kind, brought, family, place = self._described
        return calls_of_ranks(kind, brought, family, place, [rank for group in family.groups for rank in group])

    def wait(self, timeout: object = None) -> bool:
        if self in self._mode.in_flight:
            self._mode.in_flight.remove(self)
            self.reads, self._described = [], None
        return True

    def synchronize(self) -> None:
        self.wait()

    block_current_stream = synchronize

    def is_completed(self) -> bool:
        """True, and the outputs can be used: torch's documentation asks for no wait() after that."""
        return self.wait()

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def result(self) -> list[Tensor]:
        self.wait()
        return self.outputs

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self.result())
        return future


def share_memory(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are one object, or views of one memory."""
    if x is y:
        return True
    mine, theirs = _outside_address(x), _outside_address(y)
    if mine is not None or theirs is not None:
        return mine is not None and mine == theirs
    memory = getattr(x, "_memory", None)
    return memory is not None and memory is getattr(y, "_memory", None)


def _outside_address(x: Tensor) -> int | None:
    """The address of the memory of a tensor made outside of the mode; None if it was made inside."""
    if isinstance(x, LocalTensor):
        if x._memory is None or not x._memory.outside:
            return None
        x = x._cells[0]
    return x.untyped_storage().data_ptr()


def calls_of_ranks(
    kind: str, brought: CallArguments, family: GroupFamily, place: Place | None, ranks: Sequence[int]
) -> list[Call]:
    """The calls of these ranks in a collective, for errors."""
    op = None if brought.op is None else reduction_name(brought.op)
    found = []
    for rank in ranks:
        group = family.group_of(rank)
        root = None if brought.root is None else group[brought.root]
        mine = [x.__localtensor_on__(rank) if isinstance(x, LocalTensor) else x for x in flat_tensors(brought.reads)]
        texts = tuple(shape_text(x.shape, x.dtype) for x in mine)
        found.append(Call(rank, kind, "lockstep", group, 0, texts, op=op, root=root, place=place))
    return found


POINT_TO_POINT = "who sends to whom differs from rank to rank"


def run_c10d_op(mode: Mode, func: OpOverload, args: Args, kwargs: Kwargs) -> object:
    """Run a c10d op for all groups of its process group's family."""
    name = func._schema.name.removeprefix("c10d::")
    if name == "check_for_nan":
        return None
    if name not in COLLECTIVE_OPS:
        raise NotInLockstep(f"torch.distributed ({name})", POINT_TO_POINT)
    positions = _positions.get(name)
    if positions is None:
        positions = _positions[name] = argument_positions(name, func._schema)
    at, when, count = positions
    rest = [*args[:at], *args[at + 1 :]][:count]
    for place, argument in enumerate(rest):
        if type(argument) is torch.ScriptObject:
            rest[place] = plain_argument(argument)
    later = when is not None and (len(args) <= when or bool(args[when]))
    work = run_collective(mode, name, args[at], rest, later=later and origin(sys._getframe(2)).returns_work)
    served = COLLECTIVE_OPS[name]
    if served.kind == "monitored_barrier":
        return None
    boxed = c10d_table.completed_work() if work is None else work.boxed()
    return boxed if served.returns is None else (rest[served.returns], boxed)


_positions: dict[str, tuple[int, int | None, int]] = {}
"""By the name of an op what `argument_positions` has found."""


def run_collective(mode: Mode, name: str, group: Any, arguments: Sequence[Any], *, later: bool) -> LockstepWork | None:
    """Run the c10d op of this name; returns a Work if the caller has to wait for it."""
    group = resolve_group(mode, group)
    family, served = group.family, COLLECTIVE_OPS[name]
    meant, brought = served.read_call(arguments)
    if brought.root is not None and not mode.everyone.complete:
        brought.root = group.place(brought.root)
    check_arguments(meant.kind, brought, family)
    for x in flat_tensors(brought.reads) if mode.in_flight else ():
        mode.check_read(x, meant.kind)
    for buffer in brought.writes if mode.in_flight else ():
        mode.check_not_in_flight(buffer, meant.kind)
    with plain_dispatch():
        values = c10d_kernels.run_kernel(mode, meant, brought, family)
        write_results(mode, brought.writes, values, meant.kind, brought, family)
    if mode.recorder is not None:
        place = origin(sys._getframe(2)).place
        sent = brought.writes if meant.kind == "scatter" else brought.reads  # a piece, as a rank has it that is no root
        mode.recorder.called(meant.kind, flat_tensors(sent), family.groups, place)
    return LockstepWork(mode, meant.kind, brought, family) if later else None


# -- writes


def write_results(
    mode: Mode, buffers: Sequence[Tensor], values: Sequence[StackedValue], kind: str, brought: CallArguments, family: GroupFamily,
) -> None:  # fmt: skip
    """Write a value to each buffer.  A buffer from outside the mode takes one only if all ranks agree on it."""
    free = mode.tracing is None and not mode.joined.pairs
    for buffer, (cells, held) in zip(buffers, values, strict=True):
        if free and type(buffer) is LocalTensor and len(cells) == len(buffer._cells) == 1:
            mine, old = buffer._partition, buffer._cells[0]
            fits = old.dtype == cells[0].dtype and old.numel() * held.rows == cells[0].numel() * mine.rows
            inside = buffer._memory is None or not buffer._memory.outside
            if fits and inside and (mine is held or (mine.complete and held.complete)):
                overwrite(buffer, cells, held)
                continue
        _write_result(mode, buffer, stacked((cells, held)), kind, brought, family)


def _write_result(
    mode: Mode, buffer: Tensor, value: StackedValue, kind: str, brought: CallArguments, family: GroupFamily
) -> None:
    if mode.tracing is not None:
        mode.tracing.check_write(kind)
    old = stacked_value(mode, buffer)
    if value.held is not old.held and not (value.held.complete and old.held.complete):
        has, gets = old.held.row_of >= 0, value.held.row_of >= 0
        if (gets & ~has).any():
            raise NotHeld(kind, np.flatnonzero(gets & ~has).tolist(), np.flatnonzero(has).tolist())
        if (has & ~gets).any():  # ranks in no group keep their tensors
            _check_fits(old, value, kind, brought, family)
            value = collectives.select([value, old], np.where(has, np.where(gets, 0, 1), -1))
    _check_fits(old, value, kind, brought, family)
    if mode.joined.pairs and not _is_same(old, value):
        mode.joined.check_write(buffer, kind)
    if isinstance(buffer, LocalTensor):
        outside = buffer._memory is not None and buffer._memory.outside
        if not outside or value.held.rows * buffer._partition.rows == 1:
            overwrite(buffer, value.cells, value.held)
            return
    elif value.held is mode.everyone or value.held.row_of.tobytes() == mode.everyone.row_of.tobytes():
        buffer.detach().copy_(value.cells[0].reshape(buffer.shape))
        return
    raise OutsideWrite(kind, origin(sys._getframe(2)).place, dtype_and_shape(buffer))


def _is_same(old: StackedValue, value: StackedValue) -> bool:
    """Whether a collective leaves a buffer as it was, as a broadcast of what all ranks have."""
    rows = {(mine, new): rank for rank, (mine, new) in enumerate(zip(old.held.row_of, value.held.row_of)) if new >= 0}
    return all(torch.equal(old.on(rank).flatten(), value.on(rank).flatten()) for rank in rows.values())


def _check_fits(old: StackedValue, value: StackedValue, kind: str, brought: CallArguments, family: GroupFamily) -> None:
    """Raises `CollectiveFailed` unless each rank's buffer has as many elements as its result, of the same dtype."""
    if old.cells[0].dtype == value.cells[0].dtype:
        if len(old.cells) == len(value.cells) == 1:
            if old.cells[0].numel() * value.held.rows == value.cells[0].numel() * old.held.rows:
                return
        elif not (_numels(old) != _numels(value))[value.held.row_of >= 0].any():
            return
    both = (old.held.row_of >= 0) & (value.held.row_of >= 0)
    differ = both & ((_numels(old) != _numels(value)) | (old.cells[0].dtype != value.cells[0].dtype))
    rank = int(np.flatnonzero(differ)[0])
    mine, result = old.on(rank), value.on(rank)
    got, want = f"{tuple(mine.shape)} of {mine.dtype}", f"{tuple(result.shape)} of {result.dtype}"
    detail = f"rank {rank} offers a buffer of shape {got} for a result of shape {want}"
    raise CollectiveFailed([calls_of_ranks(kind, brought, family, origin(sys._getframe(3)).place, [rank])[0]], detail)


def _numels(value: StackedValue) -> Any:
    """The number of elements that each rank holds."""
    sizes = [cell.numel() // rows for cell, rows in zip(value.cells, value.held.sizes, strict=True)]
    return np.repeat(sizes, value.held.sizes)[value.held.row_of]


# -- functional collectives: they return a new tensor


# By the name of the op without its suffixes; the arguments behind the value and the family are the op's own.
_FUNCTIONAL: dict[str, Callable[..., StackedValue]] = {
    "all_reduce": collectives.all_reduce,
    "broadcast": lambda value, family, root: collectives.broadcast(value, family, root=root),
    "all_gather_into_tensor": lambda value, family, size: collectives.all_gather_into_tensor(value, family),
    "reduce_scatter_tensor": lambda value, family, op, size: collectives.reduce_scatter(value, family, op),
    "all_to_all_single": lambda value, family, got, sent: collectives.all_to_all_single(
        collectives.make_contiguous(value), family, list(sent), list(got)
    ),
    "shard_dim_alltoall": collectives.shard_dim_alltoall,
}


def run_functional_op(mode: Mode, func: OpOverload, args: Args, kwargs: Kwargs) -> object:
    """Run one of torch's functional collectives."""
    name = func._schema.name.split("::")[1]
    if name == "_wrap_tensor_autograd":
        return AsyncCollectiveTensor(args[0])  # as on a rank: the first op that reads it waits for it
    if name in c10d_table.WAITS:
        return args[0]
    base = name.removesuffix("_out").removesuffix("_").removesuffix("_coalesced")
    if base not in _FUNCTIONAL:
        raise NotInLockstep(f"torch.ops.{func}", POINT_TO_POINT)
    many = isinstance(args[0], list | tuple)
    sources = list(args[0]) if many else [args[0]]
    targets = [kwargs["out"]] if "out" in kwargs else sources if name.endswith("_") else []
    values = _functional_values(mode, base, sources, targets, args)
    if not targets:
        found = [wrap(*value, mode) for value in values]
        return found if many else found[0]
    return args[0] if name.endswith("_") else targets[0]


def _functional_values(
    mode: Mode, base: str, sources: list[Tensor], targets: list[Tensor], args: Args
) -> list[StackedValue]:
    group = resolve_group(mode, args[-1])
    rest, op, root = list(args[1:-1]), None, None
    if "reduce" in base:
        op = rest[0] = rest[0].lower()
    elif base == "broadcast":
        root = rest[0] = group.place(rest[0])
    brought = CallArguments(sources, targets, op=op, root=root)
    check_arguments(base, brought, group.family)
    for x in sources if mode.in_flight else ():
        mode.check_read(x, base)
    for target in targets:
        mode.check_not_in_flight(target, base)
    with plain_dispatch():
        values = [_FUNCTIONAL[base](stacked_value(mode, x), group.family, *rest) for x in sources]
        write_results(mode, targets, values[: len(targets)], base, brought, group.family)
    if mode.recorder is not None:
        mode.recorder.called(base, sources, group.family.groups, origin(sys._getframe(2)).place)
    return values


@lru_cache(256)
def op_handler(namespace: str) -> Fn | None:
    """The function that runs the ops of a namespace; None for namespaces without collectives."""
    if namespace == "c10d":
        return run_c10d_op
    if namespace in ("_c10d_functional", "_c10d_functional_autograd", "_dtensor"):
        return run_functional_op
    return None
