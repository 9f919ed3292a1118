"""DeviceMesh in lockstep: coordinates of all ranks, process groups as families, and functions run by rank group.

torch builds a mesh for one rank.  Here it builds it for the mesh's lowest rank, and later questions about "this rank"
are answered for all ranks.  Each entry of `MESH_PATCHES` replaces a method of DeviceMesh; tests compare each with
torch's own, run for every rank.

A rank group is the ranks with equal ints, for functions that branch on an int that differs between ranks.  There are
few: all chunks of a dim but the last ones have one size.  The function runs once for each rank group, in the mode
narrowed to its ranks, with plain ints; stacks stay stacks.  It may communicate, in process groups within a rank group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _python_dispatch

from localtensor._util.call_sites import Fn
from localtensor.errors import NotInLockstep, RanksDiverge, ValuesDiffer
from localtensor.lockstep.comms.collectives import StackedValue, select, stacked_value
from localtensor.lockstep.comms.stacked_collectives import rows_by_cell, take_rows
from localtensor.lockstep.dispatch.dispatcher import plain_dispatch
from localtensor.lockstep.patches.rank_queries import Patch, patch_attribute
from localtensor.lockstep.values.formatting import user_place
from localtensor.lockstep.values.local_tensor import LocalTensor, Mode, wrap
from localtensor.lockstep.values.partition import NOWHERE, Array, Partition, by_value, partition, refinement
from localtensor.lockstep.values.rank_int import is_rank_int, rank_int


@contextmanager
def _building(mode: Mode, rank: int) -> Iterator[None]:
    """While inside, torch's own code runs as that rank with plain tensors, and groups become families."""
    before = mode.groups.building
    if before is None:
        mode.groups.building = []
    try:
        with mode.disable(), mode.running_as(rank):
            yield
    finally:
        mode.groups.building = before


def _init(mode: Mode, original: Fn, mesh: DeviceMesh, *args: object, **kwargs: object) -> None:
    given = kwargs.get("mesh", args[1] if len(args) > 1 else None)
    if given is None:
        given = kwargs.get("_rank_map")
    with _building(mode, 0 if given is None else int(torch.as_tensor(given).min())):
        original(mesh, *args, **kwargs)
    # Meshes of two modes, or of a mode and none, must differ: torch caches by mesh what depends on groups and ranks.
    mesh._thread_id = ("lockstep", mode.serial)  # type: ignore[assignment]
    mesh._hash = None
    if mode.recorder is not None:
        with mode.disable():
            mode.recorder.mesh_made(mesh, mesh_ranks(mesh))


def mesh_ranks(mesh: DeviceMesh) -> Array:
    """The ranks of a mesh and of its parallel meshes: int64 of shape [meshes, *mesh.shape]."""
    numbers = mesh._rank_map
    numbers = numbers.__localtensor_on__(numbers.ranks[0]) if isinstance(numbers, LocalTensor) else numbers
    with torch._C._DisableTorchDispatch():  # also where a graph is recorded, or shapes are computed
        return mesh._layout.remap_to_tensor(numbers).numpy()


def coordinates(mode: Mode, mesh: DeviceMesh) -> list[Any]:
    """The coordinate of each rank, for each axis."""
    return _places(mode, mesh)[0]


def mesh_members(mode: Mode, mesh: DeviceMesh) -> Partition | None:
    """The ranks of a mesh as a partition of one row; None if they are all ranks of the mode."""
    return _places(mode, mesh)[1]


def _places(mode: Mode, mesh: DeviceMesh) -> tuple[list[Any], Partition | None]:
    kept = mesh.__dict__.get("_lockstep_places")
    if kept is None or kept[0] is not mode.everyone or kept[1] != mode.serial:
        with mode.disable():
            whole = mesh_ranks(mesh)
        places = np.full((whole.ndim - 1, mode.world), -1)
        flat = whole.reshape(-1)
        for axis, place in enumerate(np.indices(whole.shape)[1:]):
            places[axis, flat] = place.reshape(-1)
        here = mode.everyone.row_of >= 0
        held = here & np.isin(np.arange(mode.world), flat)
        found = [rank_int(place, None if held.all() else held) for place in places]
        missing = None if held[here].all() else partition(np.where(held, 0, -1), [1])
        kept = mesh.__dict__["_lockstep_places"] = (mode.everyone, mode.serial, (found, missing))
    return kept[2]


def _coordinate(mode: Mode, original: Fn, mesh: DeviceMesh) -> object:
    return original(mesh) if mode.as_rank is not None else tuple(coordinates(mode, mesh))


def _one_coordinate(mode: Mode, original: Fn, mesh: DeviceMesh, index: int) -> object:
    return original(mesh, index) if mode.as_rank is not None else coordinates(mode, mesh)[index]


def _as_lowest(mode: Mode, original: Fn, mesh: DeviceMesh, *args: object, **kwargs: object) -> object:
    """A mesh derived from this one, built for the lowest rank like this one."""
    with _building(mode, int(mesh._rank_map.min())):
        return original(mesh, *args, **kwargs)


def _all_submeshes(mode: Mode, original: Fn, mesh: DeviceMesh, name: str) -> object:
    """All meshes along one axis, each with a group of its ranks."""
    found: Any = _as_lowest(mode, original, mesh, name)
    for one in found:
        one._dim_group_names = [mode.groups.make([mesh_ranks(one).reshape(-1).tolist()]).group_name]
    return found


def _tensor_of(mode: Mode, original: Fn, full_mesh: torch.Tensor, current_rank: int | None = None) -> object:
    if mode.as_rank is not None or current_rank is not None or full_mesh.shape[0] == 1:
        return original(full_mesh, current_rank)
    with mode.disable():
        return mode.rank_map(lambda rank: original(full_mesh, rank))


# Methods of DeviceMesh and their replacements.  Private ones tried on torch 2.11.0, 2.13.0 and 2.15.0; read in the
# sources of 2.12 and 2.14.
MESH_PATCHES: dict[str, Patch] = {
    "__init__": _init,
    "get_coordinate": _coordinate,
    "_sym_get_coordinate": _one_coordinate,
    "get_rank": lambda mode, original, mesh: mode.rank(),
    # Ranks outside of a mesh hold nothing of its tensors, and take no part in its collectives.
    "_is_current_rank_part_of_mesh": lambda mode, original, mesh: True,
    "_flatten": _as_lowest,
    "_get_all_submeshes": _all_submeshes,
    "_unflatten": _as_lowest,
    "_get_mesh_tensor_from_full_mesh": _tensor_of,
}


def _give_query(name: str, *, call: bool) -> None:
    """What a LocalTensor has for the values of its ranks, on the tensor that waits for a functional collective, too."""

    def query(x: AsyncCollectiveTensor, *args: object) -> Any:
        found = getattr(x.trigger_wait(), name)
        return found(*args) if call else found

    setattr(AsyncCollectiveTensor, name, query if call else property(query))


def install() -> None:
    """Patch DeviceMesh, and AsyncCollectiveTensor."""
    for name in ("on", "reconcile", "__localtensor_on__"):
        _give_query(name, call=True)
    for name in ("ranks", "_local_tensors", "_ranks"):
        _give_query(name, call=False)
    for name, replacement in MESH_PATCHES.items():
        if hasattr(DeviceMesh, name):
            patch_attribute(DeviceMesh, name, replacement)


# -- functions by rank group

Narrowing = Callable[[Any], Any]  # from a value of all ranks to that of a rank group


def wait_for(value: Any) -> Any:
    """The value, or each item of a list, waited for if it is an AsyncCollectiveTensor."""
    if isinstance(value, AsyncCollectiveTensor):
        return value.wait()
    if type(value) in (list, tuple):
        return type(value)(wait_for(item) for item in value)
    return value


def for_each_rank_group(mode: Mode, ints: Iterable[object], do: Callable[[Narrowing], Any]) -> Any:
    """The result of `do` for each rank; it runs once for each group of ranks with equal `ints`.

    Its argument is a function that narrows values of all ranks, tensors and ints, to the rank group.
    """
    held: Partition | None = None
    for value in ints:
        if is_rank_int(value):
            other = by_value(value.node.values, value.node.held)
            held = other if held is None else refinement(held, other)
    if held is None:
        return do(lambda value: value)
    found = []
    for row in range(held.rows):
        members = ranks_of_row(held, row)
        with narrow_mode(mode, members), without_other_modes(mode) if row else nullcontext():
            found.append(do(lambda value, members=members: narrow_value(mode, value, members)))  # type: ignore[misc]
    return join_rank_groups(mode, found, held)


@contextmanager
def without_other_modes(mode: Any) -> Iterator[None]:
    """While inside, no other dispatch mode sees the ops: CommDebugMode, for one, counts the ops of a single rank."""
    if torch._C._len_torch_dispatch_stack() < 2:
        yield
        return
    with _python_dispatch._disable_current_modes():
        _python_dispatch._push_mode(mode)
        try:
            yield
        finally:
            _python_dispatch._pop_mode()


@lru_cache(1024)
def ranks_of_row(held: Partition, row: int) -> Partition:
    """The ranks of one row, as a partition of one row."""
    return partition(np.where(held.row_of == row, 0, NOWHERE), [1])


@contextmanager
def narrow_mode(mode: Mode, members: Partition) -> Iterator[None]:
    """While inside, the mode has only the ranks of this partition."""
    before = mode.everyone, mode.groups.only
    mode.everyone = mode.groups.only = members
    try:
        yield
    finally:
        mode.everyone, mode.groups.only = before


def narrow_value(mode: Mode, value: Any, members: Partition) -> object:
    """A tensor, an int of each rank, or a list of them, on these ranks only; any other value itself."""
    if isinstance(value, LocalTensor):
        with torch._C._DisableTorchDispatch():
            return wrap(*_value_on_ranks(StackedValue(value._cells, value._partition), members), mode)
    if is_rank_int(value):
        held = members.held if value.node.held is None else members.held & value.node.held
        return rank_int(value.node.values, held)
    if type(value) in (list, tuple, torch.Size):
        return (list if type(value) is list else tuple)(narrow_value(mode, item, members) for item in value)
    return value


def _value_on_ranks(value: StackedValue, members: Partition) -> StackedValue:
    """The values of these ranks, possibly as views."""
    rows = np.where(members.row_of >= 0, value.held.row_of, NOWHERE)
    used, inverse = np.unique(rows[rows >= 0], return_inverse=True)
    row_of = np.full(len(rows), NOWHERE)
    row_of[rows >= 0] = inverse
    stacks = [take_rows(value.stack(cell), here) for cell, here in rows_by_cell(value.held, used)]
    cells = tuple(stack if len(stack) > 1 else stack[0] for stack in stacks)
    return StackedValue(cells, partition(row_of, [len(stack) for stack in stacks]))


def keep_ranks(mode: Mode, x: object, members: Partition | None) -> Any:
    """A copy of a tensor on these ranks only; x itself if `members` is None or x is no tensor."""
    if members is None or not isinstance(x, Tensor):
        return x
    with plain_dispatch():
        return wrap(*select([stacked_value(mode, x)], np.where(members.row_of >= 0, 0, NOWHERE)), mode)


def _check_alike(found: Sequence[Any], held: Partition) -> None:
    """Raises `NotInLockstep` or `ValuesDiffer` for tensors of ranks that cannot be one tensor."""
    if not all(isinstance(one, Tensor) for one in found):
        raise NotInLockstep("a tensor", "only some ranks have one")
    for row, one in enumerate(found):
        for name in ("dtype", "device", "layout", "ndim"):
            mine, theirs = getattr(one, name), getattr(found[0], name)
            if mine != theirs:
                raise ValuesDiffer("LocalTensor", name, mine, held.ranks(row)[0], theirs, held.ranks(0)[0])


def join_rank_groups(mode: Mode, found: Sequence[Any], held: Partition) -> object:
    """One value from a result for each row of a partition.  Raises `NotInLockstep` or `RanksDiverge`."""
    found = [wait_for(one) for one in found]
    first = found[0]
    if isinstance(first, Tensor):
        _check_alike(found, held)
        with torch._C._DisableTorchDispatch():
            return wrap(*select([stacked_value(mode, one) for one in found], held.row_of), mode)
    if isinstance(first, list | tuple):
        if len({len(one) for one in found}) > 1:
            raise NotInLockstep("DTensor", "ranks get lists of different lengths")
        items = [join_rank_groups(mode, column, held) for column in zip(*found, strict=True)]
        return items if isinstance(first, list) else tuple(items)
    if (type(first) is int or is_rank_int(first)) and all(isinstance(one, int | torch.SymInt) for one in found):
        values = np.zeros(held.world, np.int64)
        for row, one in enumerate(found):
            ranks = held.row_of == row
            values[ranks] = one.node.values[ranks] if is_rank_int(one) else one
        return rank_int(values, held.held)
    if any(one != first for one in found):
        by_rank = {rank: found[row] for rank, row in enumerate(held.row_of) if row >= 0}
        raise RanksDiverge("DTensor", "", by_rank, user_place())
    return first
