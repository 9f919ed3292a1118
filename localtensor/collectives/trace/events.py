"""The events of a run: spans and moments of one rank, in order, with what they are of."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from localtensor._util.events import Place
from localtensor.collectives.rendezvous import Contribution
from localtensor.collectives.trace.memory import KINDS, Memory, MemoryOfRanks, Peak
from localtensor.layout.spec import shape_text, short

FORWARD, BACKWARD, PASS, STEP = "forward", "backward", "backward pass", "optimizer step"
OP, WRITTEN, IMPLICIT = "op", "written redistribution", "implicit redistribution"
CALL, WAIT, RANDOM, GC, SAVE, ERROR = "call", "wait", "random draw", "garbage collection", "checkpoint save", "error"
MODULES = (FORWARD, BACKWARD)
REDISTRIBUTIONS = (WRITTEN, IMPLICIT)
_START = attrgetter("start")
_NO_FACTS: Mapping[str, Any] = MappingProxyType({})


@dataclass(slots=True, eq=False)
class Event:
    """A span of one rank; a moment has its end where it starts.

    `start` and `end` are nanoseconds of real time, of the clock of the recording; `busy_start` and `busy_end` are the
    modelled seconds that the rank has computed until then.  `module` is the module that runs, or whose gradients are
    computed.  `part` is the call of a collective or message, or the one that is waited for; `exchange` numbers what the
    parts of several ranks have in common; `late` is, of a call or a wait, the last part to arrive.  `takes` and `gives` are the
    specs of an op's DTensors.  `begins` and `ends` are seconds of the modelled clock, and -1 without one; of a call they are
    those of the transfer, and `posted` is when the rank makes the call.
    """

    kind: str
    name: str
    rank: int
    start: int
    end: int = -1
    module: str = ""
    busy_start: float = 0.0
    busy_end: float = 0.0
    place: Place | None = None
    part: Contribution | None = None
    exchange: int = -1
    late: Event | None = None
    bytes: int = 0
    takes: tuple[Any, ...] = ()
    gives: tuple[Any, ...] = ()
    begins: float = -1.0
    ends: float = -1.0
    posted: float = -1.0
    _facts: dict[str, Any] | None = None  # few events have any, and a dict for each takes time

    @property
    def facts(self) -> Mapping[str, Any]:
        """What else is known of the event, by name."""
        return _NO_FACTS if self._facts is None else self._facts

    def note(self, name: str, value: Any) -> None:
        """Adds a fact."""
        if self._facts is None:
            self._facts = {}
        self._facts[name] = value

    def anew(self, start: int, busy: float) -> Event:
        """An event like this one that starts there, with what it takes; its end is open."""
        return Event(
            self.kind, self.name, self.rank, start, -1, self.module, busy, busy, self.place, self.part, takes=self.takes
        )

    @property
    def nanoseconds(self) -> int:
        return max(self.end - self.start, 0)

    @property
    def axis(self) -> str:
        """The mesh axis of a call; the ranks of its group where no mesh has such an axis."""
        return "" if self.part is None else axis_text(self.part)


def axis_text(part: Contribution) -> str:
    """The mesh axis along which a call's group lies, or the group's ranks."""
    return part.group.axis() or "ranks " + ",".join(map(str, part.group.ranks))


class MemorySample(NamedTuple):
    """The bytes that a rank holds at a time, by kind of tensor."""

    rank: int
    at: int
    held: dict[str, int]


_ROW = 4


class OpLog:
    """Ops that were run before on the same specs, which are most events: their times, and a form that they share.

    A form is an event that has all that is known of such an op but its times; its `busy_end` is the modelled seconds that it takes.
    An object for each op would take longer than the rest of its record, and the garbage collector would go through all of them.
    """

    def __init__(self) -> None:
        self.forms: list[Event] = []
        self.times: array[int] = array(
            "q"
        )  # the form's number, start, end, and the length of the memory's log then, in a row
        self.busy: array[float] = array("d")  # modelled seconds of the rank at the start

    def __len__(self) -> int:
        return len(self.busy)

    def form(self, like: Event, seconds: float) -> int:
        """The number of a new form."""
        form = like.anew(0, 0.0)
        form.gives, form.busy_end = like.gives, seconds
        self.forms.append(form)
        return len(self.forms) - 1

    def rows(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The numbers of `times`: int64 [ops, 4]."""
        return np.array(self.times, np.int64).reshape(-1, _ROW)

    def events(self) -> list[Event]:
        """An event for each op."""
        made, numbers = [], iter(self.times)
        for number, start, end, _, busy in zip(numbers, numbers, numbers, numbers, self.busy):
            form = self.forms[number]
            event = form.anew(start, busy)
            event.end, event.gives, event.busy_end = end, form.gives, busy + form.busy_end
            made.append(event)
        return made

    def clear(self) -> None:
        """Forgets the ops; the forms keep their numbers."""
        del self.times[:], self.busy[:]

    def looks(self, rank: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """When the memory of a rank was looked at, at the ends of its ops, and how long its log was: int64 [looks, 2]."""
        rows, ranks = self.rows(), np.array([form.rank for form in self.forms], np.int64)
        return rows[ranks[rows[:, 0]] == rank, 2:]


@dataclass(slots=True)
class Recording:
    """The events of a run on so many `ranks`, in the order in which they began.

    `noted` are all events that are not in the log `ops`.

    `problem` is the error in which the run has ended.  `lanes` are the names of the ranks' lanes; `busy` the modelled seconds that each
    has computed in all.
    """

    ranks: int
    lanes: list[str] = field(default_factory=list)
    world: int = 0  # how many ranks there are, if one lane has all of them
    noted: list[Event] = field(default_factory=list)
    ops: OpLog = field(default_factory=OpLog)
    held: dict[int, Memory | MemoryOfRanks] = field(default_factory=dict)  # by rank
    peaks_of_world: list[Peak] | None = None  # if one lane has all ranks
    busy: list[float] = field(default_factory=list)
    problem: str | None = None
    began: int = 0
    ended: int = 0

    @property
    def events(self) -> list[Event]:
        """All events, in the order in which they began."""
        if len(self.ops):
            for rank, memory in self.held.items():
                memory.add_looks(self.ops.looks(rank))
            self.noted = sorted(self.noted + self.ops.events(), key=_START)
            self.ops.clear()
        return self.noted

    @property
    def count(self) -> int:
        """How many events there are."""
        return len(self.noted) + len(self.ops)

    def of(self, *kinds: str) -> list[Event]:
        """The events of these kinds."""
        return [event for event in (self.events if OP in kinds else self.noted) if event.kind in kinds]

    @property
    def peaks(self) -> list[Peak]:
        """The memory of each rank at its peak."""
        if self.peaks_of_world is not None:
            return self.peaks_of_world
        return [self.held[rank].peak for rank in range(self.ranks)]

    @property
    def memory(self) -> list[MemorySample]:
        """The memory of all ranks, in the order in which it was looked at."""
        rows = [(rank, row) for rank in self.held for row in self.samples(rank).tolist()]
        return [
            MemorySample(rank, row[0], dict(zip(KINDS, row[1:])))
            for rank, row in sorted(rows, key=lambda one: one[1][0])
        ]

    def samples(self, rank: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The memory of a rank, in the order in which it was looked at: time and bytes by kind, int64 [samples, 1 + kinds]."""
        return self.held[rank].samples(self.ops.looks(rank))


_shape_text = lru_cache(1 << 12)(shape_text)


@dataclass(frozen=True, slots=True)
class TracedSpec:
    """A tensor's shape, dtype and placements.

    >>> import torch
    >>> from torch.distributed.tensor import Replicate, Shard
    >>> str(TracedSpec((4, 2), torch.float32, (Shard(0), Replicate())))
    'f32[4,2] S(0),R'
    """

    shape: tuple[int, ...]
    dtype: Any
    placements: tuple[Any, ...]

    @classmethod
    def of(cls, spec: Any) -> TracedSpec:
        """The layout of a DTensorSpec."""
        meta = spec.tensor_meta
        return cls((), None, spec.placements) if meta is None else cls(meta.shape, meta.dtype, spec.placements)

    def __str__(self) -> str:
        of = "" if self.dtype is None else f"{_shape_text(self.shape, self.dtype)} "
        return f"{of}{placements_text(self.placements)}"


@lru_cache(1 << 12)
def placements_text(placements: tuple[Any, ...]) -> str:
    """Placements in short form, as S(0),R."""
    return ",".join(map(short, placements))
