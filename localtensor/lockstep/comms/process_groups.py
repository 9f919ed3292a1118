"""Process groups in lockstep: each mode has its own world, and each process group represents a family of groups."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, SupportsIndex

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import _random as dtensor_random

from localtensor._util import ambient
from localtensor._util.patching import IndependentWorld
from localtensor.errors import BadGroup
from localtensor.errors.base import rank_names
from localtensor.lockstep.comms.stacked_collectives import GroupFamily, family_of_lists, restrict_family
from localtensor.lockstep.values.local_tensor import Mode
from localtensor.lockstep.values.partition import Array, Partition
from localtensor.lockstep.values.rank_int import Int, is_rank_int, on_rank, rank_int, rank_values

cpp: Any = torch._C._distributed_c10d  # its stubs lag behind
# A mesh has one axis, or is named as (mesh, axis); lists hold ranks, or disjoint lists of them.
Groups = dist.ProcessGroup | str | DeviceMesh | Sequence[Any] | GroupFamily | None


class LockstepGroup(dist.ProcessGroup):
    """A process group of all ranks at once: each rank is in its own group of the family.

    `rank()` and `size()` are ints of each rank where they differ.  `by_number` marks the default group, in which a
    rank's position is its number, also where a mode has not all numbers from 0.
    """

    def __init__(self, mode: Mode, groups: Sequence[Sequence[int]], name: str, *, by_number: bool = False) -> None:
        super().__init__(0, len(groups[0]))  # type: ignore[call-arg]  # the stubs lack this signature
        self.mode, self.by_number = mode, by_number
        self._groups = list(groups)
        self._family: GroupFamily | None = None
        options = cpp.FakeProcessGroup.Options()
        options.error_on_collective = True  # what comes to it has the tensors of one rank, and it would move nothing
        backend = cpp.FakeProcessGroup._create_internal(0, len(groups[0]), options)
        for device in ("cpu", "cuda"):
            self._register_backend(torch.device(device), dist.ProcessGroup.BackendType.CUSTOM, backend)
        self._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
        self._set_group_name(name)  # type: ignore[arg-type]

    @property
    def family(self) -> GroupFamily:
        """All its groups; while a function runs for some ranks only, the groups of those."""
        if self._family is None:
            self._family = family_of_lists(self._groups, self.mode.world)
        only = self.mode.groups.only
        return self._family if only is None else restrict_family(self._family, only)

    def add(self, members: Sequence[int]) -> None:
        """Add a group of other ranks."""
        self._groups.append(members)
        self._family = None

    def places(self) -> Array:
        """Each rank's position in its group, -1 outside of all: int64 of shape [world]."""
        return np.arange(self.mode.world) if self.by_number else self.family.position

    def place(self, root: int) -> int:
        """The position in the group of a root that is given as torch's group rank."""
        known = self.by_number and 0 <= root < self.mode.world and not self.mode.everyone.complete
        return int(self.family.position[root]) if known else root

    def rank(self) -> Any:
        """The position of each rank in its group, -1 outside of all."""
        if self.mode.as_rank is not None:
            return int(self.places()[self.mode.as_rank])
        return rank_int(self.places(), self.mode.everyone.held)

    def size(self) -> Any:
        """The number of ranks in each rank's group."""
        if self.family.matrix is not None:
            return self.family.matrix.shape[1]
        if self.mode.as_rank is not None:
            return int(self.family.sizes()[self.mode.as_rank])
        return rank_int(self.family.sizes(), self.mode.everyone.held)


class GroupRankMap(Mapping[Any, Any]):
    """Map from a global rank, or an int of each rank, to the position in its group; iterates over the group's ranks.

    A rank in no group maps itself to -1.
    """

    def __init__(self, group: LockstepGroup) -> None:
        self.group = group

    def __getitem__(self, rank: Any) -> Int:
        if rank not in self:
            raise KeyError(rank)
        places, queried = self.group.places(), rank_values(rank, self.group.mode.world)
        return int(places[int(rank)]) if queried is None else rank_int(places[queried], rank.node.held)

    def __contains__(self, rank: Any) -> bool:
        group, queried = self.group, rank_values(rank, self.group.mode.world)
        if queried is None:
            inside = 0 <= int(rank) < group.mode.world and bool(group.places()[int(rank)] >= 0)
            return inside or int(rank) == group.mode.as_rank
        held = rank.node.held
        mine, queried = (
            (np.arange(group.mode.world), queried) if held is None else (np.flatnonzero(held), queried[held])
        )
        within = ((queried >= 0) & (queried < group.mode.world)).all()
        return bool((queried == mine).all() or (within and (group.places()[queried] >= 0).all()))

    def __iter__(self) -> Iterator[Any]:
        family = self.group.family
        if len(family.groups) == 1:
            return iter(family.groups[0])
        if self.group.mode.as_rank is not None:
            return iter(family.group_of(self.group.mode.as_rank))
        if family.matrix is None:
            raise BadGroup(
                "get_process_group_ranks",
                "group",
                repr(family),
                "its groups are of different sizes",
                "Ask for the ranks of one group at a time, inside localtensor.run.",
            )
        columns = family.matrix[family.index].T
        return iter([rank_int(column, family.member_mask) for column in columns])

    def __len__(self) -> int:
        return len(list(iter(self)))


class _GroupTable(dict[Any, Any]):
    """torch's table of groups, which refuses a group of another mode or of a real backend."""

    def get(self, group: object, otherwise: object = None) -> object:
        if group not in self:
            raise _foreign_group_error(group)
        return self[group]


def _foreign_group_error(group: object) -> BadGroup:
    name = group if isinstance(group, str) else getattr(group, "group_name", None)
    return BadGroup(
        "collective",
        "group",
        f"group={name or group!r}",
        "it is not of this LocalTensorMode",
        "Make it inside the mode, with init_device_mesh, new_group or lists of ranks.",
    )


class LockstepWorld(IndependentWorld):
    """The process groups of one mode."""

    # An attribute, where torch has a property: each call of torch.distributed reads it several times.
    default_pg: Any = None

    def __init__(self, mode: Mode, serial: int) -> None:
        super().__init__()
        self.mode, self.serial = mode, serial
        self.numbers = itertools.count()
        self._own_pg_map = _GroupTable()  # as _util/patching.py keeps it
        self.by_name: dict[str, LockstepGroup] = {}
        self._tracker: tuple[Any] | None = None  # DTensor's state of random ops outside of the mode
        self.lasting = False  # the groups stay when the mode is left, for when it is entered again
        self.implicit = False  # the default group was made by the mode, not by the program
        self.only: Partition | None = None  # the ranks for which a function runs, see patches/device_mesh.py
        # The families of the mesh that is being built, and their ranks.
        self.building: list[tuple[LockstepGroup, set[int]]] | None = None

    def open(self) -> None:
        """Make the default group of all ranks, as init_process_group does.  DTensor's first random op agrees on a state anew."""
        self.implicit = True
        self._tracker, dtensor_random._rng_tracker = (dtensor_random._rng_tracker,), None
        if self.default_pg is None:
            self.default_pg = self.make([list(self.mode.ranks)], by_number=True)

    def leave(self) -> None:
        """The mode is left: forget all groups that are not `lasting`."""
        if not self.lasting:
            self.close()
        self.pg_coalesce_state.clear()
        if self._tracker is not None:  # not where entering the mode has failed
            (dtensor_random._rng_tracker,), self._tracker = self._tracker, None

    def close(self) -> None:
        """Forget all groups."""
        for name in list(self.by_name):
            self.forget(name)
        self.default_pg = None

    def forget(self, name: str) -> None:
        """Forget the group of this name; nothing happens if there is none."""
        group = self.by_name.pop(name, None)
        if group is not None:
            cpp._unregister_process_group(name)
            for table in (self.pg_map, self.pg_names, self.pg_group_ranks, self.pg_backend_config, self.pg_to_tag):
                table.pop(group, None)
            for groups in self.tags_to_pg.values():
                if group in groups:
                    groups.remove(group)

    def make(self, groups: Sequence[Sequence[int]], *, by_number: bool = False) -> LockstepGroup:
        """A process group for these groups of ranks; each rank is in its own."""
        name = f"lockstep{self.serial}:{next(self.numbers)}"
        group = LockstepGroup(self.mode, groups, name, by_number=by_number)
        self.by_name[name] = group
        tables: Any = self  # torch types a store, and lists of ranks, which are not needed here
        tables.pg_map[group] = ("gloo", None)
        tables.pg_names[group] = name
        tables.pg_group_ranks[group] = GroupRankMap(group)
        self.pg_backend_config[group] = "cpu:gloo,cuda:nccl"
        self.pg_to_tag[group] = f"ptd:{name}"
        self.tags_to_pg.setdefault(f"ptd:{name}", []).append(group)
        self.tags_to_pg.setdefault("", []).append(group)
        cpp._register_process_group(name, group)
        return group

    def new_group(self, ranks: Sequence[Any] | None) -> LockstepGroup:
        """The process group for `new_group(ranks)`; while a mesh is built, disjoint groups of one size become one family.

        Where `ranks` holds ints of each rank, each rank gets its own group.
        """
        if ranks is not None and any(is_rank_int(rank) for rank in ranks):
            tables = {tuple(sorted(on_rank(x, rank) for x in ranks)) for rank in self.mode.ranks}
            return self.family_group("new_group", sorted(tables))
        members = list(self.mode.ranks) if ranks is None else sorted(int(rank) for rank in ranks)
        self.check("new_group", [members])
        if self.building is None:
            return self.make([members])
        last = self.building[-1] if self.building else None
        if last is not None and len(last[0]._groups[0]) == len(members) and last[1].isdisjoint(members):
            last[0].add(members)
            last[1].update(members)
            return last[0]
        self.building.append((self.make([members]), set(members)))
        return self.building[-1][0]

    def family_group(self, call: str, groups: Sequence[Sequence[int]]) -> LockstepGroup:
        """A process group for these groups after `check`.  Raises `BadGroup`."""
        self.check(call, groups)
        return self.make(groups)

    def check(self, call: str, groups: Sequence[Sequence[int]]) -> None:
        """Raises `BadGroup` unless the groups hold different ranks of the mode, and none is empty."""
        row_of = self.mode.everyone.row_of
        flat = [rank for members in groups for rank in members]
        known = all(isinstance(rank, SupportsIndex) and 0 <= rank < len(row_of) and row_of[rank] >= 0 for rank in flat)
        if not flat or not all(groups) or not known or len(set(flat)) < len(flat):
            problem = f"they must be different ranks of this mode, which has {rank_names(self.mode.ranks)}"
            shown = f"ranks={[list(members) for members in groups] if len(groups) > 1 else [*groups[:1]]}"
            raise BadGroup(call, "ranks", shown, problem, "Name each rank at most once, and leave no group empty.")


class RoutedWorld(c10d._World):
    """torch's world: the groups of the calling thread's mode, or torch's own where the thread has none."""

    def __init__(self, original: c10d._World) -> None:
        object.__setattr__(self, "_original", original)

    def __getattribute__(self, name: str) -> Any:
        if name in ("_original", "__class__", "__dict__"):
            return object.__getattribute__(self, name)
        modes = ambient.here.modes
        return getattr(modes[-1].groups if modes else object.__getattribute__(self, "_original"), name)

    def __setattr__(self, name: str, value: object) -> None:
        mode = ambient.lockstep()
        setattr(object.__getattribute__(self, "_original") if mode is None else mode.groups, name, value)


class RankLists:
    """Groups given as lists of ranks; a root is a position in its list."""

    def __init__(self, family: GroupFamily) -> None:
        self.family = family

    def place(self, root: int) -> int:
        return root


def resolve_group(mode: Mode, group: Any) -> LockstepGroup | RankLists:
    """The groups of a collective, given as a process group, its name, a mesh of one axis, (mesh, axis), or lists.

    None is all ranks.  Raises `BadGroup` for a group of another mode, and for a mesh without that axis or with several.
    """
    kind = type(group)
    if kind is torch.ScriptObject:
        group = dist.ProcessGroup.unbox(group)
    elif group is None:
        return mode.groups.default_pg or RankLists(family_of_lists([mode.ranks], mode.world))
    elif kind is tuple and len(group) == 2 and hasattr(group[0], "get_group"):
        group = _group_of_mesh_axis(*group)
    elif kind is list or kind is tuple:
        lists = group if group and isinstance(group[0], list | tuple | range) else [group]
        mode.groups.check("collective", lists)
        return RankLists(family_of_lists(lists, mode.world))
    elif hasattr(group, "get_group"):
        group = _group_of_mesh_axis(group, None)
    name = group if isinstance(group, str) else getattr(group, "group_name", None)
    found: LockstepGroup | None = mode.groups.by_name.get(name or "")
    if found is None:
        raise _foreign_group_error(group)
    return found


def _group_of_mesh_axis(mesh: DeviceMesh, axis: int | str | None) -> dist.ProcessGroup:
    """The group of a mesh axis; None is the only axis."""
    names = tuple(mesh.mesh_dim_names or range(mesh.ndim))
    if axis is None and mesh.ndim > 1:
        problem = "a mesh has a group along each of its axes, and which one is meant is not said"
        raise BadGroup("collective", "group", f"group={mesh}", problem, f"Name one: (mesh, {names[0]!r}).")
    try:
        return mesh.get_group(axis)
    except (LookupError, AssertionError) as error:  # torch's errors for an unknown axis
        shown, remedy = f"group=({mesh}, {axis!r})", f"Its axes are {', '.join(map(repr, names))}."
        raise BadGroup("collective", "group", shown, "the mesh has no such axis", remedy) from error
