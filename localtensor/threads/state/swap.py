"""The swap of per-process state at a hand-over between ranks, so that each rank has its own.

    with OutsideState():
        states = [RankState(rank, ranks, seed=0) for rank in range(ranks)]
        switch(None, states[0])       # rank 0 runs
        switch(states[0], states[1])  # rank 1 runs

`SLOTS` lists what is swapped; special_slots.py lists what is not, and why.  Only one rank may run at a time, and only
its thread may call `switch`.  A hand-over between ranks that changed nothing takes some microseconds: switches are read
and set only where they differ, names are swapped by reference.

The state of a module that is imported during the run is swapped from the next hand-over on.  What its import itself did
(a filter, an environment variable) stays with the first rank that imported it, because Python imports a module only once.
"""

import sys
import warnings
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from localtensor.threads.state.generators import GENERATORS
from localtensor.threads.state.patched_attributes import PatchSlot
from localtensor.threads.state.slots import FLAGS, NAMES, NameSlot
from localtensor.threads.state.special_slots import SPECIALS, ClassTables, WarningsSlot

_ALL_SPECIALS = [make() for make in (*GENERATORS, *SPECIALS)]
SLOTS: dict[str, Any] = {slot.name: slot for slot in (*FLAGS, *NAMES, *_ALL_SPECIALS)}


class _SlotPlan:
    """The slots whose modules are imported, as flat lists, so that a hand-over is a few plain loops.  It only grows."""

    def __init__(self) -> None:
        flags = [flag for slot in FLAGS for flag in slot.flags]
        self.gets, self.puts = [flag.get for flag in flags], [flag.put for flag in flags]
        self.plain: list[tuple[dict[str, Any], str]] = []
        self.owned: list[tuple[dict[str, Any], str]] = []
        self.specials: list[Any] = []
        # The first values of a rank that is new to a slot; for an owned value also the index of its alias.
        self.fresh_plain: list[Any] = []
        self.fresh_owned: list[tuple[Any, int | None]] = []
        self.named = {(id(c10d), "_world")} | {(id(warnings), name) for name in WarningsSlot.wanted}
        self.patched = [special.places for special in _ALL_SPECIALS if isinstance(special, PatchSlot)]
        self.waiting: list[NameSlot] = list(NAMES)
        self.specials_waiting: list[Any] = list(_ALL_SPECIALS)
        self.modules = 0  # the number of imported modules at the last check
        self.cuda_waits = False

    def grow(self) -> None:
        """Add the slots whose module has been imported since."""
        for slot in [slot for slot in self.waiting if slot.module in sys.modules]:
            try:
                space = slot.space()
            except AttributeError:  # being imported, or absent in this torch
                continue
            self._add(slot, space)
            self.named.update((id(sys.modules[slot.module]), name) for name in (*slot.plain, *slot.older, *slot.owned))
            self.waiting.remove(slot)
        for special in [special for special in self.specials_waiting if special.ready()]:
            if hasattr(special, "bind"):
                special.bind()
            if isinstance(special, ClassTables):
                self.named.update((id(special.owner), table) for table in special.tables)
            self.specials.append(special)
            self.specials_waiting.remove(special)
        self.modules = dict.__len__(sys.modules)
        built = torch.backends.cuda.is_built()
        self.cuda_waits = built and any(special.name == "cuda_generators" for special in self.specials_waiting)

    def _add(self, slot: NameSlot, space: dict[str, Any]) -> None:
        for name in (*slot.plain, *slot.older):
            if name in space:
                self.plain.append((space, name))
                self.fresh_plain.append(slot.fresh(space[name]))
        for name in slot.owned:
            if name in space:
                twins = [at for at, (other, key) in enumerate(self.owned) if other[key] is space[name]]
                self.owned.append((space, name))
                self.fresh_owned.append((slot.fresh(space[name].copy()), twins[0] if twins else None))

    def has_new(self) -> bool:
        """Whether `grow` may add slots: a module was imported, or CUDA initialised, since the last check."""
        return dict.__len__(sys.modules) != self.modules or (self.cuda_waits and torch.cuda.is_initialized())


_PLAN = _SlotPlan()


def swapped_spaces() -> set[int]:
    """The ids of the namespaces in which a hand-over puts values."""
    return {id(space) for space, _ in (*_PLAN.plain, *_PLAN.owned)} | {id(vars(warnings)), id(vars(c10d))}


def is_swapped(owner: object, name: str) -> bool:
    """Whether a slot, or threads/run.py, swaps this name of a module or class."""
    place = (id(owner), name)
    return place in _PLAN.named or any(place in places for places in _PLAN.patched)


class _State:
    """A value for each slot of the plan."""

    __slots__ = ("flags", "owned", "plain", "specials")

    def __init__(self) -> None:
        if _PLAN.has_new():
            _PLAN.grow()
        self.flags: list[Any] = []
        self.plain: list[Any] = []
        self.owned: list[Any] = []
        self.specials: list[Any] = []

    def save_names(self) -> None:
        self.flags = [get() for get in _PLAN.gets]
        self.plain = [space[name] for space, name in _PLAN.plain]
        self.owned = [space[name] for space, name in _PLAN.owned]

    def save(self) -> None:
        self.save_names()
        self.specials = [special.save() for special in _PLAN.specials]

    def add_new_slots(self) -> None:
        """Add values for the slots that have joined the plan since this state was saved."""
        self.plain += _PLAN.fresh_plain[len(self.plain) :]
        for fresh, twin in _PLAN.fresh_owned[len(self.owned) :]:
            self.owned.append(fresh.copy() if twin is None else self.owned[twin])


class RankState(_State):
    """The state of one rank: at first the caller's state, with generators seeded equally on all ranks.

    Make the states of a run before switching to any of them, while the process still has the caller's state.
    """

    __slots__ = ("rank", "ranks", "seed")

    def __init__(self, rank: int, ranks: int, seed: int) -> None:
        super().__init__()
        self.rank, self.ranks, self.seed = rank, ranks, seed
        self.save_names()
        held = self.owned
        firsts = [[other is value for other in held].index(True) for value in held]
        self.owned = []
        for at, first in enumerate(firsts):  # aliases of one dict in the caller stay aliases
            self.owned.append(held[at].copy() if first == at else self.owned[first])
        self.specials = [special.initial(self) for special in _PLAN.specials]

    def add_new_slots(self) -> None:
        super().add_new_slots()
        for special in _PLAN.specials[len(self.specials) :]:
            self.specials.append(getattr(special, "late", special.initial)(self))


def switch(old: RankState | None, new: RankState | None) -> None:
    """Save the process's state to `old`, and load the state of `new` (None: the caller, kept elsewhere)."""
    plan = _PLAN
    if plan.has_new():
        plan.grow()
    flags = [get() for get in plan.gets]
    plain = [space[name] for space, name in plan.plain]
    owned = [space[name] for space, name in plan.owned]
    specials = [special.save() for special in plan.specials]
    if old is not None:
        old.flags, old.plain, old.owned, old.specials = flags, plain, owned, specials
    if new is not None:
        _load(new, flags, plain, owned, specials)


def _load(new: _State, flags: list[Any], plain: list[Any], owned: list[Any], specials: list[Any]) -> None:
    plan = _PLAN
    if flags != new.flags:
        _put(new.flags)
    for special, want, held in zip(plan.specials, new.specials, specials):
        special.load(want, held)
    if len(new.plain) < len(plain) or len(new.owned) < len(owned) or len(new.specials) < len(specials):
        known = len(new.specials)
        new.add_new_slots()
        for special, want, held in zip(plan.specials[known:], new.specials[known:], specials[known:]):
            special.load(want, held)
    if plain != new.plain:
        for (space, name), value in zip(plan.plain, new.plain):
            space[name] = value
    for (space, name), value in zip(plan.owned, new.owned):
        space[name] = value


def _put(flags: list[Any]) -> None:
    """Set each switch that differs, without the warnings of some setters."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for get, put, want in zip(_PLAN.gets, _PLAN.puts, flags):
            if get() != want:
                put(want)


class OutsideState(_State):
    """The caller's state, restored at the end of the block."""

    def __enter__(self) -> "OutsideState":
        self.save()
        return self

    def __exit__(self, *error: object) -> None:
        held = _State()
        held.save()
        _load(self, held.flags, held.plain, held.owned, held.specials)
        for special in _PLAN.specials:
            if hasattr(special, "over"):
                special.over()

    def add_new_slots(self) -> None:
        """Add the caller's values of new slots; where they are unknown, the current values stay."""
        super().add_new_slots()
        for special in _PLAN.specials[len(self.specials) :]:
            self.specials.append(getattr(special, "outside", special.save)())
