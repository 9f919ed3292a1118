"""What a process has once and each rank should have for itself is swapped when one rank hands over to another.

    with OutsideState():
        states = [RankState(rank, ranks, seed=0) for rank in range(ranks)]
        switch(None, states[0])       # rank 0 runs
        switch(states[0], states[1])  # rank 1 runs

`SLOTS` lists what is swapped; threads/state/special_slots.py lists what is not, and why.  Only one rank may run at a time, and
whoever calls `switch` must be the one thread that runs.  A hand-over between ranks that changed nothing takes some
microseconds: switches are polled and put only where they differ, names are swapped by reference.

A module that is imported during the run is swapped from the next hand-over on.  What its own import did (a filter,
an environment variable) stays with the rank that imported it first, because Python imports a module only once.
"""

import sys
import warnings
from types import TracebackType
from typing import Any

import torch

from localtensor.threads.state.generators import GENERATORS
from localtensor.threads.state.slots import FLAGS, NAMES, Flags, Names
from localtensor.threads.state.special_slots import SPECIALS

_ALL_SPECIALS = [make() for make in (*GENERATORS, *SPECIALS)]
SLOTS: dict[str, Any] = {slot.name: slot for slot in (*FLAGS, *NAMES, *_ALL_SPECIALS)}


class _SlotPlan:
    """The slots whose modules are there, flat, so that a hand-over is a few plain loops.  It only ever grows."""

    def __init__(self) -> None:
        flags = [flag for slot in FLAGS for flag in slot.flags]
        self.gets, self.puts = [flag.get for flag in flags], [flag.put for flag in flags]
        self.plain: list[tuple[dict[str, Any], str]] = []
        self.owned: list[tuple[dict[str, Any], str]] = []
        self.specials: list[Any] = []
        # What a rank begins with that has not met the slot before; for an owned value also the place of its twin.
        self.fresh_plain: list[Any] = []
        self.fresh_owned: list[tuple[Any, int | None]] = []
        self.waiting: list[Names] = list(NAMES)
        self.specials_waiting: list[Any] = list(_ALL_SPECIALS)
        self.modules = 0  # how many were imported when this last looked
        self.cuda_waits = False

    def grow(self) -> None:
        """Slots whose module has been imported since are in the plan."""
        for slot in [slot for slot in self.waiting if slot.module in sys.modules]:
            try:
                space = slot.space()
            except AttributeError:  # it is just being imported, or this torch has no such thing
                continue
            self._add(slot, space)
            self.waiting.remove(slot)
        for special in [special for special in self.specials_waiting if special.ready()]:
            if hasattr(special, "bind"):
                special.bind()
            self.specials.append(special)
            self.specials_waiting.remove(special)
        self.modules = len(sys.modules)
        built = torch.backends.cuda.is_built()
        self.cuda_waits = built and any(special.name == "cuda_generators" for special in self.specials_waiting)

    def _add(self, slot: Names, space: dict[str, Any]) -> None:
        for name in (*slot.plain, *slot.older):
            if name in space:
                self.plain.append((space, name))
                self.fresh_plain.append(slot.fresh(space[name]))
        for name in slot.owned:
            if name in space:
                twins = [at for at, (other, key) in enumerate(self.owned) if other[key] is space[name]]
                self.owned.append((space, name))
                self.fresh_owned.append((slot.fresh(space[name].copy()), twins[0] if twins else None))

    def news(self) -> bool:
        """Whether `grow` may find something: something was imported, or CUDA initialised, since it last looked."""
        return len(sys.modules) != self.modules or (self.cuda_waits and torch.cuda.is_initialized())


_PLAN = _SlotPlan()


class _State:
    """One value for each slot of the plan."""

    __slots__ = ("flags", "owned", "plain", "specials")

    def __init__(self) -> None:
        if _PLAN.news():
            _PLAN.grow()
        self.flags: list[Any] = []
        self.plain: list[Any] = []
        self.owned: list[Any] = []
        self.specials: list[Any] = []

    def save(self) -> None:
        self.flags = [get() for get in _PLAN.gets]
        self.plain = [space[name] for space, name in _PLAN.plain]
        self.owned = [space[name] for space, name in _PLAN.owned]
        self.specials = [special.save() for special in _PLAN.specials]

    def meet_new_slots(self) -> None:
        """Values for the slots that have joined the plan since this state was last saved."""
        self.plain += _PLAN.fresh_plain[len(self.plain) :]
        for fresh, twin in _PLAN.fresh_owned[len(self.owned) :]:
            self.owned.append(fresh.copy() if twin is None else self.owned[twin])


class RankState(_State):
    """What belongs to one rank: at first, the caller's state, its generators seeded alike on all ranks.

    Make those of a run while the caller's state is still there: before any of them is switched to.
    """

    __slots__ = ("rank", "ranks", "seed")

    def __init__(self, rank: int, ranks: int, seed: int) -> None:
        super().__init__()
        self.rank, self.ranks, self.seed = rank, ranks, seed
        self.save()
        held = self.owned
        firsts = [[other is value for other in held].index(True) for value in held]
        self.owned = []
        for at, first in enumerate(firsts):  # names of one dict in the caller are names of one dict here
            self.owned.append(held[at].copy() if first == at else self.owned[first])
        self.specials = [special.initial(self) for special in _PLAN.specials]

    def meet_new_slots(self) -> None:
        super().meet_new_slots()
        for special in _PLAN.specials[len(self.specials) :]:
            self.specials.append(getattr(special, "late", special.initial)(self))


def switch(old: RankState | None, new: RankState | None) -> None:
    """What the running rank has is in `old`, and what `new` holds is what the process has."""
    plan = _PLAN
    if plan.news():
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
        new.meet_new_slots()
        for special, want, held in zip(plan.specials[known:], new.specials[known:], specials[known:]):
            special.load(want, held)
    if plain != new.plain:
        for (space, name), value in zip(plan.plain, new.plain):
            space[name] = value
    for (space, name), value in zip(plan.owned, new.owned):
        space[name] = value


def _put(flags: list[Any]) -> None:
    """Each switch is as wanted; some setters warn, and nobody asked for those warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for get, put, want in zip(_PLAN.gets, _PLAN.puts, flags):
            if get() != want:
                put(want)


class OutsideState(_State):
    """The caller's state, back as it was when the block ends, however it ends."""

    def __enter__(self) -> "OutsideState":
        self.save()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        held = _State()
        held.save()
        _load(self, held.flags, held.plain, held.owned, held.specials)
        for special in _PLAN.specials:
            if hasattr(special, "over"):
                special.over()

    def meet_new_slots(self) -> None:
        """What the caller had of slots that were not ready then; where nobody can say, what there is now stays."""
        super().meet_new_slots()
        for special in _PLAN.specials[len(self.specials) :]:
            self.specials.append(getattr(special, "outside", special.save)())


def slot_value(name: str) -> Any:
    """What the process has in a slot now; None while the slot's module is not imported.

    >>> slot_value("default_dtype")
    [torch.float32]
    """
    slot = SLOTS[name]
    if isinstance(slot, Flags):
        return slot.save()
    if isinstance(slot, Names):
        if slot.module not in sys.modules:
            return None
        space = slot.space()
        return {key: space[key] for key in (*slot.plain, *slot.older, *slot.owned) if key in space}
    return slot.save() if slot in _PLAN.specials else None
