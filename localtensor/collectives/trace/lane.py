"""One rank's lane of a recording: its open spans, its memory, and the modelled time that it has computed."""

from __future__ import annotations

from time import perf_counter_ns
from typing import Any

from localtensor._util.events import Place
from localtensor.collectives.rendezvous import Contribution
from localtensor.collectives.trace.events import BACKWARD, FORWARD, MODULES, OP, PASS, STEP, Event, Recording
from localtensor.collectives.trace.memory import ACTIVATIONS, OTHER, STATE, Memory, MemoryOfRanks

_MADE_INSIDE = {STEP: STATE, FORWARD: ACTIVATIONS, BACKWARD: ACTIVATIONS, PASS: ACTIVATIONS}
"""What an op makes inside of a span: in an optimizer's step its state, in a module what the backward pass needs."""


class Span:
    """A span of a lane around a block: a class takes less time than a generator."""

    __slots__ = ("_event", "_facts", "_lane", "_of")

    def __init__(self, lane: Lane, kind: str, name: str, place: Place | None, facts: dict[str, Any]) -> None:
        self._lane, self._of, self._facts = lane, (kind, name, place), facts

    def __enter__(self) -> Event:
        event = self._event = self._lane.begin(*self._of)
        event._facts = self._facts or None
        return event

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if kind is not None:
            self._event.note("unfinished", True)
        self._lane.end(self._event)


class Lane:
    """Adds events of one rank to a recording.  Only one thread at a time uses it.

    `module` is the module that runs, or whose gradients are computed, and empty outside of any; `makes` is the kind of
    memory of what an op makes now.  `op` is an op of a known form that runs, with its start and the modelled seconds until then: it
    becomes an event where open spans are asked for or an error leaves it, and else a row of the recording's log.
    """

    def __init__(self, recording: Recording, rank: int) -> None:
        self.recording, self.rank = recording, rank
        self.memory: Memory | MemoryOfRanks = Memory()
        recording.held[rank] = self.memory
        self.busy = 0.0  # modelled seconds of compute
        self.stack: list[Event] = []
        self.module, self.makes = "", OTHER
        self.op: tuple[Event, int, float] | None = None
        self._shared: dict[tuple[int, ...], tuple[Any, ...]] = {}  # specs by their ids, which live as long

    def inside(self, *kinds: str) -> Event | None:
        """The innermost open span of these kinds."""
        if self.op is not None:
            self.opened(self.op)
        for event in reversed(self.stack):
            if event.kind in kinds:
                return event
        return None

    def moment(self, kind: str, name: str, place: Place | None = None, part: Contribution | None = None) -> Event:
        """Adds an event that takes no time."""
        now = perf_counter_ns()
        event = Event(kind, name, self.rank, now, now, self.module, self.busy, self.busy, place, part)
        self.recording.noted.append(event)
        return event

    def begin(
        self,
        kind: str,
        name: str,
        place: Place | None = None,
        part: Contribution | None = None,
        below: int | None = None,
    ) -> Event:
        """Opens a span; with `below`, around the open spans from that position on."""
        stack, start = self.stack, perf_counter_ns()
        event = Event(kind, name, self.rank, start, -1, self.module, self.busy, self.busy, place, part)
        self.recording.noted.append(event)
        if below is None or below >= len(stack):
            stack.append(event)
        else:
            event.start, event.busy_start = stack[below].start, stack[below].busy_start
            event.module = stack[below].module
            stack.insert(below, event)
        if kind in _MADE_INSIDE:
            if stack[-1] is event:
                self.module, self.makes = name if kind in MODULES else self.module, _MADE_INSIDE[kind]
            else:
                self._look()
        self.memory.look(start)
        return event

    def end(self, event: Event) -> None:
        """Closes a span; one that is closed already stays as it is."""
        if event.end >= 0:
            return
        event.end, event.busy_end = perf_counter_ns(), self.busy
        if self.stack[-1] is event:
            self.stack.pop()
        else:
            at = self.stack.index(event)
            for inner in self.stack[:at:-1]:
                if inner.kind == OP:  # run by a handler of DTensor's own, whose end is not seen
                    self.end(inner)
            self.stack.remove(event)
        if event.kind in _MADE_INSIDE:
            self._look()
        self.memory.look(event.end)

    def shared(self, specs: list[Any]) -> tuple[Any, ...]:
        """These specs as a tuple, the same one each time: what writes the events knows them by it."""
        found = tuple(specs)
        return self._shared.setdefault(tuple(map(id, found)), found)

    def opened(self, op: tuple[Event, int, float]) -> Event:
        """The event of an op of a known form that runs, which is made if it is not there."""
        form, start, busy = op
        event = next((one for one in reversed(self.stack) if one.start == start and one.kind == OP), None)
        if event is None:
            self.op, event = None, form.anew(start, busy)
            self.recording.noted.append(event)
            self.stack.append(event)
        return event

    def begin_op(self, name: str, place: Place | None) -> Event:
        """As `begin` of an op, which is most of what is recorded: the memory is sampled at its end."""
        busy = self.busy
        event = Event(OP, name, self.rank, perf_counter_ns(), -1, self.module, busy, busy, place)
        self.recording.noted.append(event)
        self.stack.append(event)
        return event

    def end_op(self, event: Event) -> None:
        """As `end` of an op."""
        stack = self.stack
        if stack[-1] is not event:
            self.end(event)
            return
        stack.pop()
        event.end, event.busy_end = perf_counter_ns(), self.busy
        self.memory.look(event.end)

    def _look(self) -> None:
        """Takes `module` and `makes` from the open spans."""
        self.module, self.makes = "", OTHER
        for event in self.stack:
            kind = event.kind
            if kind in _MADE_INSIDE:
                self.makes = _MADE_INSIDE[kind]
                if kind in MODULES:
                    self.module = event.name

    def span(self, kind: str, name: str, place: Place | None = None, **facts: Any) -> Span:
        """A span around a block, with facts; one that an exception leaves is unfinished."""
        return Span(self, kind, name, place, facts)

    def close(self) -> None:
        """Closes all spans: the rank's program has ended inside of them."""
        if self.op is not None:
            self.opened(self.op)
        for event in reversed(self.stack[:]):
            event.note("unfinished", True)
            self.end(event)
        self.memory.close()
        self.recording.busy[self.rank] = self.busy
