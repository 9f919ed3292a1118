"""One rank's lane of a recording: its open spans, its memory, and the modelled time that it has computed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from localtensor.collectives.trace.events import MODULES, OP, Event, MemorySample, Recording
from localtensor.collectives.trace.memory import Memory


class Lane:
    """Adds events of one rank to a recording.  Only one thread at a time uses it."""

    def __init__(self, recording: Recording, rank: int) -> None:
        self.recording, self.rank = recording, rank
        self.memory: Any = Memory()
        self.busy = 0.0  # modelled seconds of compute
        self.stack: list[Event] = []
        self._sampled = 0

    @property
    def module(self) -> str:
        """The module that runs, or whose gradients are computed; empty outside of any."""
        return next((event.name for event in reversed(self.stack) if event.kind in MODULES), "")

    def inside(self, *kinds: str) -> Event | None:
        """The innermost open span of these kinds."""
        return next((event for event in reversed(self.stack) if event.kind in kinds), None)

    def moment(self, kind: str, name: str, **named: Any) -> Event:
        """Adds an event that takes no time."""
        now = time.perf_counter_ns()
        event = Event(kind, name, self.rank, now, now, self.module, self.busy, self.busy, **named)
        self.recording.events.append(event)
        return event

    def begin(self, kind: str, name: str, *, below: int | None = None, **named: Any) -> Event:
        """Opens a span; with `below`, around the open spans from that position on."""
        event = self.moment(kind, name, **named)
        event.end = -1
        if below is None or below >= len(self.stack):
            self.stack.append(event)
        else:
            event.start, event.busy_start = self.stack[below].start, self.stack[below].busy_start
            event.module = self.stack[below].module
            self.stack.insert(below, event)
        self._sample(event.start)
        return event

    def end(self, event: Event) -> None:
        """Closes a span; one that is closed already stays as it is."""
        if event.end >= 0:
            return
        event.end, event.busy_end = time.perf_counter_ns(), self.busy
        if self.stack[-1] is event:
            self.stack.pop()
        else:
            at = self.stack.index(event)
            for inner in self.stack[:at:-1]:
                if inner.kind == OP:  # run by a handler of DTensor's own, whose end is not seen
                    self.end(inner)
            self.stack.remove(event)
        self._sample(event.end)

    @contextmanager
    def span(self, kind: str, name: str, **named: Any) -> Iterator[Event]:
        """A span around the block; one that an exception leaves is unfinished."""
        event = self.begin(kind, name, **named)
        try:
            yield event
        except BaseException:  # why: Abort ends a rank, too; it is raised again
            event.facts["unfinished"] = True
            raise
        finally:
            self.end(event)

    def close(self) -> None:
        """Closes all spans: the rank's program has ended inside of them."""
        for event in reversed(self.stack[:]):
            event.facts["unfinished"] = True
            self.end(event)
        self.recording.peaks[self.rank] = replace(self.memory.peak)
        self.recording.busy[self.rank] = self.busy

    def _sample(self, at: int) -> None:
        if self.memory.now != self._sampled:
            self._sampled = self.memory.now
            self.recording.memory.append(MemorySample(self.rank, at, dict(self.memory.by_kind)))
