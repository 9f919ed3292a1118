"""DeviceMesh in lockstep: every rank's coordinates at once, and groups that are families.

torch builds a mesh for one rank.  It does so here too, for the lowest of the mesh's ranks; what it then asks about
"this rank" is answered for all of them.  Each entry of `MESH` is a method of DeviceMesh; the test of this room
compares each with torch's own, run for every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from localtensor.lockstep.patches.rank_queries import Door, route
from localtensor.lockstep.values.partition import Partition, partition
from localtensor.lockstep.values.rank_int import rank_int


@contextmanager
def _building(mode: Any, rank: int) -> Iterator[None]:
    """While inside, torch's own code is that rank, its tensors are plain, and groups become families."""
    before = mode.groups.building
    if before is None:
        mode.groups.building = []
    try:
        with mode.disable(), mode.standing_at(rank):
            yield
    finally:
        mode.groups.building = before


def _init(mode: Any, original: Any, mesh: DeviceMesh, *args: Any, **kwargs: Any) -> None:
    with _building(mode, _lowest(args, kwargs)):
        original(mesh, *args, **kwargs)
    # Two modes' meshes are not equal, nor is one from outside: torch keeps by mesh what depends on groups and ranks.
    mesh._thread_id = ("lockstep", mode.serial)  # type: ignore[assignment]
    mesh._hash = None


def _lowest(args: Any, kwargs: Any) -> int:
    """The lowest rank of the mesh that is asked for."""
    given = kwargs.get("mesh", args[1] if len(args) > 1 else None)
    if given is None:
        given = kwargs.get("_rank_map")
    return 0 if given is None else int(torch.as_tensor(given).min())


def ranks_of(mesh: DeviceMesh) -> Any:
    """All ranks of a mesh and of those beside it that lie alike: int64 of shape [meshes, *mesh.shape]."""
    return mesh._layout.remap_to_tensor(mesh._rank_map).numpy()


def coordinates(mode: Any, mesh: DeviceMesh) -> list[Any]:
    """For each axis, the coordinate of each rank."""
    return _places(mode, mesh)[0]


def members(mode: Any, mesh: DeviceMesh) -> Partition | None:
    """The ranks that are in a mesh, as a partition of one row; None if all ranks of the mode are."""
    return _places(mode, mesh)[1]


def _places(mode: Any, mesh: DeviceMesh) -> tuple[list[Any], Partition | None]:
    kept = mesh.__dict__.get("_lockstep_places")
    if kept is None or kept[0] is not mode.everyone or kept[1] != mode.serial:
        with mode.disable():
            whole = ranks_of(mesh)
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


def _coordinate(mode: Any, original: Any, mesh: DeviceMesh) -> Any:
    return original(mesh) if mode.standing is not None else tuple(coordinates(mode, mesh))


def _one_coordinate(mode: Any, original: Any, mesh: DeviceMesh, index: int) -> Any:
    return original(mesh, index) if mode.standing is not None else coordinates(mode, mesh)[index]


def _rank(mode: Any, original: Any, mesh: DeviceMesh) -> Any:
    return mode.rank()


def _is_part(mode: Any, original: Any, mesh: DeviceMesh) -> bool:
    """The ranks outside of a mesh do not take part in what is done on it, and hold nothing of it."""
    return True


def _as_lowest(mode: Any, original: Any, mesh: DeviceMesh, *args: Any, **kwargs: Any) -> Any:
    """Meshes made of this one are made for the lowest rank, as this one was."""
    with _building(mode, int(mesh._rank_map.min())):
        return original(mesh, *args, **kwargs)


def _tensor_of(mode: Any, original: Any, full_mesh: torch.Tensor, current_rank: int | None = None) -> Any:
    if mode.standing is not None or current_rank is not None or full_mesh.shape[0] == 1:
        return original(full_mesh, current_rank)
    with mode.disable():
        return mode.rank_map(lambda rank: original(full_mesh, rank))


# Method of DeviceMesh, and what serves it.  Private ones tried on torch 2.11.0, 2.13.0 and 2.15.0; read in the sources of 2.12 and 2.14.
MESH: dict[str, Door] = {
    "__init__": _init,
    "get_coordinate": _coordinate,
    "_sym_get_coordinate": _one_coordinate,
    "get_rank": _rank,
    "_is_current_rank_part_of_mesh": _is_part,
    "_flatten": _as_lowest,
    "_unflatten": _as_lowest,
    "_get_mesh_tensor_from_full_mesh": _tensor_of,
}


def install() -> None:
    """DeviceMesh asks the thread's mode, from now on."""
    for name, ours in MESH.items():
        if hasattr(DeviceMesh, name):
            route(DeviceMesh, name, ours)
