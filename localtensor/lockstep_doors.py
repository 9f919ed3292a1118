"""The doors of torch through which a program asks who it is: each asks the thread's mode first.

Installed once, when the first mode is entered; in a thread without a mode they are what they were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed import distributed_c10d as c10d

from localtensor import _context
from localtensor.errors import TorchChanged
from localtensor.lockstep_groups import LockstepGroup, RoutedWorld
from localtensor.rank_ints import values_of
from localtensor.stand_ins import must_fit, named
from localtensor.worlds import innermost

_installed: list[bool] = []

Door = Callable[..., Any]  # (mode, original, *args, **kwargs)


def install() -> None:
    """All doors ask the mode, from now on."""
    if _installed:
        return
    _installed.append(True)
    c10d._world = RoutedWorld(c10d._world)
    for name, ours in _GROUPS.items():
        decorated = getattr(c10d, name, None)
        if decorated is not None:
            _within(decorated, ours)
    for owner, name, ours in _RANDOM:
        if hasattr(owner, name):
            route(owner, name, ours)


def route(owner: Any, name: str, ours: Door) -> None:
    """`owner.name` asks the thread's mode first."""
    raw = vars(owner).get(name, getattr(owner, name)) if isinstance(owner, type) else getattr(owner, name)
    made = router(raw.__func__ if isinstance(raw, staticmethod) else raw, ours)
    setattr(owner, name, staticmethod(made) if isinstance(raw, staticmethod) else made)


def router(original: Any, ours: Door) -> Any:
    """A function that is ours in a thread with a mode, else the original."""

    def routed(*args: Any, **kwargs: Any) -> Any:
        mode = _context.lockstep()
        return original(*args, **kwargs) if mode is None else ours(mode, original, *args, **kwargs)

    for name in ("__name__", "__qualname__", "__doc__", "__module__", "__signature__"):
        if hasattr(original, name):
            setattr(routed, name, getattr(original, name))
    return routed


def _within(decorated: Any, ours: Door) -> None:
    """Within torch's logging decorators, so that whoever has imported the function by name reaches ours."""
    original = innermost(decorated)
    while decorated is not original:
        for cell in decorated.__closure__ or ():
            if cell.cell_contents is original:
                cell.cell_contents = router(original, ours)
                decorated.__wrapped__ = cell.cell_contents
                return
        decorated = decorated.__wrapped__
    raise TorchChanged(f"torch.distributed.{original.__name__}", "it is no longer wrapped in torch's logging decorators")


def _init_process_group(mode: Any, original: Any, *args: Any, **kwargs: Any) -> None:
    asked = named(original, args, kwargs)
    asked.pop("rank", None) if values_of(asked.get("rank"), mode.world) is not None else None
    must_fit(asked, asked.get("rank", -1), mode.world)
    if mode.groups.default_pg is None:
        mode.groups.open()


def _new_group(mode: Any, original: Any, *args: Any, **kwargs: Any) -> LockstepGroup:
    made: LockstepGroup = mode.groups.new_group(named(original, args, kwargs).get("ranks"))
    return made


def _subgroups(mode: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
    lists = [list(ranks) for ranks in named(original, args, kwargs)["ranks_per_subgroup_list"]]
    for ranks in lists:
        mode.groups.check(ranks)
    return mode.groups.make(lists), [mode.groups.make([ranks]) for ranks in lists]


def _split_group(mode: Any, original: Any, *args: Any, **kwargs: Any) -> LockstepGroup:
    asked = named(original, args, kwargs)
    parent = asked.get("parent_pg") or mode.groups.default_pg
    members = parent.family.groups[0]
    lists = [[members[place] for place in sorted(split)] for split in asked["split_ranks"]]
    for ranks in lists:
        mode.groups.check(ranks)
    made: LockstepGroup = mode.groups.make(lists)
    return made


def _destroy(mode: Any, original: Any, group: Any = None) -> None:
    if group is None or group is mode.groups.default_pg:
        mode.groups.close()
        mode.groups.default_pg = None
    else:
        mode.groups.forget(group.group_name)


_GROUPS: dict[str, Door] = {
    "init_process_group": _init_process_group,
    "new_group": _new_group,
    "split_group": _split_group,
}


def _manual_seed(mode: Any, original: Any, seed: Any) -> Any:
    by_rank = values_of(seed, mode.world)
    if by_rank is None:
        mode.streams.of().forget()
        return original(seed)
    states = {int(one): torch.Generator().manual_seed(int(one)).get_state() for one in np.unique(by_rank)}
    mode.streams.of().set(np.array(by_rank), states)
    return torch.default_generator


def _get_rng_state(mode: Any, original: Any) -> Any:
    stream = mode.streams.of()
    return mode.gather({r: stream.state_on(r) for r in mode.ranks}) if stream.states else original()


def _set_rng_state(mode: Any, original: Any, new_state: Any) -> None:
    from localtensor.tensor import LocalTensor

    if not isinstance(new_state, LocalTensor):
        mode.streams.of().forget()
        original(new_state)
        return
    held = new_state._partition
    states = {row: new_state.__localtensor_on__(held.ranks(row)[0]).clone() for row in range(held.rows)}
    mode.streams.of().set(np.array(held.row_of), states)


_RANDOM: list[tuple[Any, str, Door]] = [
    (torch.random, "_manual_seed_impl", _manual_seed),
    (torch, "get_rng_state", _get_rng_state),
    (torch.random, "get_rng_state", _get_rng_state),
    (torch, "set_rng_state", _set_rng_state),
    (torch.random, "set_rng_state", _set_rng_state),
    (c10d, "new_subgroups_by_enumeration", _subgroups),
    (torch.distributed, "new_subgroups_by_enumeration", _subgroups),
    (c10d, "destroy_process_group", _destroy),
    (torch.distributed, "destroy_process_group", _destroy),
]
__all__: Sequence[str] = ("install", "route", "router")
