"""torch.distributed's groups in lockstep: a world of its own for each mode, whose groups are families."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from localtensor import _context
from localtensor.errors import BadGroup
from localtensor.families import Family, of_lists
from localtensor.own_world import OwnWorld
from localtensor.rank_ints import on_rank, rank_int, values_of

cpp: Any = torch._C._distributed_c10d  # its stubs lag behind

# Private part of torch: why it is needed.  Tried on torch 2.13.0; read in the sources of 2.11 to 2.15.
PRIVATE = {
    "torch.distributed.distributed_c10d._world": "which groups there are; ours answers for each thread by its mode",
    "torch.distributed.distributed_c10d._World": "the class of that",
    "torch._C._distributed_c10d.FakeProcessGroup._create_internal": "a Backend that does nothing, under each group",
    "torch._C._distributed_c10d._register_process_group": "functional collectives know a group by its name",
    "torch._C._distributed_c10d._unregister_process_group": "no name is left when the mode ends",
}


class LockstepGroup(dist.ProcessGroup):
    """A process group as all ranks have it at once: each rank is in its own of the family's groups.

    `rank()` and `size()` are ints for each rank where they differ.
    """

    def __init__(self, mode: Any, whole: Family, name: str) -> None:
        super().__init__(0, len(whole.groups[0]))
        self.mode, self.family, self.name_in_mode = mode, whole, name
        make = getattr(cpp.FakeProcessGroup, "_create_internal", cpp.FakeProcessGroup)
        backend = make(0, len(whole.groups[0]))
        for device in ("cpu", "cuda"):
            self._register_backend(torch.device(device), dist.ProcessGroup.BackendType.CUSTOM, backend)
        self._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
        self._set_group_name(name)

    def rank(self) -> Any:
        """This rank's place in its group, -1 outside of all."""
        if self.mode.standing is not None:
            return int(self.family.position[self.mode.standing])
        return rank_int(self.family.position, self.mode.everyone.held)

    def size(self) -> Any:
        """How many ranks its group has."""
        if self.family.matrix is not None:
            return self.family.matrix.shape[1]
        sizes = np.array([len(group) for group in self.family.groups])
        return rank_int(np.where(self.family.members, sizes[self.family.index], -1), self.mode.everyone.held)


class Places(Mapping[Any, Any]):
    """Global rank to place in its own group, and an int for each rank likewise; iterates over this group's ranks."""

    def __init__(self, group: LockstepGroup) -> None:
        self.group = group

    def __getitem__(self, rank: Any) -> Any:
        whole, asked = self.group.family, values_of(rank, self.group.family.world)
        if asked is not None:
            return rank_int(whole.position[asked], self.group.mode.everyone.held)
        if not (0 <= int(rank) < whole.world) or whole.position[int(rank)] < 0:
            raise KeyError(rank)
        return int(whole.position[int(rank)])

    def __contains__(self, rank: Any) -> bool:
        whole, asked = self.group.family, values_of(rank, self.group.family.world)
        if asked is not None:
            return bool((whole.position[asked] >= 0).all())
        return 0 <= int(rank) < whole.world and bool(whole.position[int(rank)] >= 0)

    def __iter__(self) -> Iterator[Any]:
        whole = self.group.family
        if len(whole.groups) == 1:
            return iter(whole.groups[0])
        if self.group.mode.standing is not None:
            return iter(whole.group_of(self.group.mode.standing))
        if whole.matrix is None or not whole.everybody:
            raise BadGroup(
                "get_process_group_ranks", "group", repr(whole), "its members differ from rank to rank",
                "Ask for the ranks of one group at a time, inside localtensor.run.",
            )  # fmt: skip
        return iter([rank_int(whole.matrix[whole.index, place]) for place in range(whole.matrix.shape[1])])

    def __len__(self) -> int:
        return len(self.group.family.groups[0])


class LockstepWorld(OwnWorld):
    """The groups of one mode, and how they are made."""

    def __init__(self, mode: Any, serial: int) -> None:
        super().__init__()
        self.mode, self.serial = mode, serial
        self.numbers = itertools.count()
        self.by_name: dict[str, LockstepGroup] = {}
        self.building: list[LockstepGroup] | None = None  # the families of the mesh that is being built

    def open(self) -> None:
        """There is a default group of all ranks, as after init_process_group."""
        self.default_pg = self.make([range(self.mode.world)] if self.mode.everyone.complete else [self.mode.ranks])

    def close(self) -> None:
        for name in list(self.by_name):
            self.forget(name)

    def forget(self, name: str) -> None:
        group = self.by_name.pop(name, None)
        if group is not None:
            cpp._unregister_process_group(name)
            for table in (self.pg_map, self.pg_names, self.pg_group_ranks, self.pg_backend_config, self.pg_to_tag):
                table.pop(group, None)
            for groups in self.tags_to_pg.values():
                if group in groups:
                    groups.remove(group)

    def make(self, groups: Iterable[Sequence[int]]) -> LockstepGroup:
        """A process group of these groups of ranks, of which each rank is in its own."""
        whole = of_lists([list(group) for group in groups], self.mode.world)
        name = f"lockstep{self.serial}:{next(self.numbers)}"
        group = LockstepGroup(self.mode, whole, name)
        self.by_name[name] = group
        self.pg_map[group] = ("gloo", None)
        self.pg_names[group] = name
        self.pg_group_ranks[group] = Places(group)
        self.pg_backend_config[group] = "cpu:gloo,cuda:nccl"
        self.pg_to_tag[group] = f"ptd:{name}"
        self.tags_to_pg.setdefault(f"ptd:{name}", []).append(group)
        self.tags_to_pg.setdefault("", []).append(group)
        cpp._register_process_group(name, group)
        return group

    def new_group(self, ranks: Sequence[int] | None) -> LockstepGroup:
        """What `new_group(ranks)` gives; while a mesh is built, disjoint groups of one size become one family."""
        members = list(self.mode.ranks) if ranks is None else sorted(int(rank) for rank in ranks)
        self.check(members)
        if self.building is None:
            return self.make([members])
        last = self.building[-1] if self.building else None
        if last is not None and len(last.family.groups[0]) == len(members) and not last.family.members[members].any():
            last.family = of_lists([*last.family.groups, members], self.mode.world)
            return last
        self.building.append(self.make([members]))
        return self.building[-1]

    def check(self, members: Sequence[int]) -> None:
        """Raises `BadGroup` if they are not different ranks of the mode."""
        if not members or len(set(members)) < len(members) or not set(members) <= set(self.mode.ranks):
            problem = f"they must be different ranks of this mode, which has {len(self.mode.ranks)}"
            raise BadGroup("new_group", "ranks", f"ranks={members}", problem, "Name each rank at most once.")


class RoutedWorld(c10d._World):
    """Whose groups are meant: those of the calling thread's mode, or torch's own where it has none."""

    def __init__(self, original: Any) -> None:
        object.__setattr__(self, "_original", original)

    def __getattribute__(self, name: str) -> Any:
        if name in ("_original", "__class__", "__dict__"):
            return object.__getattribute__(self, name)
        mode = _context.lockstep()
        return getattr(object.__getattribute__(self, "_original") if mode is None else mode.groups, name)

    def __setattr__(self, name: str, value: Any) -> None:
        mode = _context.lockstep()
        setattr(object.__getattribute__(self, "_original") if mode is None else mode.groups, name, value)


def family_of(mode: Any, group: Any) -> Family:
    """The groups that a collective is about: a process group, its name, a mesh axis, or lists of ranks.

    Raises `BadGroup` if it is not of this mode.
    """
    if group is None:
        return mode.groups.default_pg.family  # type: ignore[no-any-return]
    if isinstance(group, tuple) and len(group) == 2 and hasattr(group[0], "get_group"):
        group = group[0].get_group(group[1])
    elif hasattr(group, "get_group"):
        group = group.get_group()
    if isinstance(group, list):
        lists = group if group and isinstance(group[0], list | tuple | range) else [group]
        for ranks in lists:
            mode.groups.check(list(ranks))
        return of_lists(lists, mode.world)
    if isinstance(group, torch.ScriptObject):
        group = dist.ProcessGroup.unbox(group)
    name = group if isinstance(group, str) else getattr(group, "group_name", None)
    found = mode.groups.by_name.get(name)
    if found is None:
        raise BadGroup(
            "collective", "group", f"group={name or group!r}", "it is not of this LocalTensorMode",
            "Make it inside the mode, with init_device_mesh, new_group or lists of ranks.",
        )  # fmt: skip
    return found.family  # type: ignore[no-any-return]


__all__ = ["LockstepGroup", "LockstepWorld", "RoutedWorld", "family_of", "on_rank"]
