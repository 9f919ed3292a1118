"""A modelled clock of a recorded run: what the ranks would take on a cluster, by counted work and links of given speed.

Compute is what `Rates` make of the counted operations and bytes, in the order in which each rank ran them.  A collective
starts when its last rank has called it and the group's earlier one has ended, and takes what the latency-bandwidth model says;
a rank goes on past a wait when that is over.  So a wait is as long as the ranks make it, and what overlaps does not cost.

| call                         | seconds of p ranks, with m bytes that a rank has in the whole (see `localtensor.layout.links`)   |
|------------------------------|--------------------------------------------------------------------------------------------------|
| all_reduce, all_gather, ...  | as the planner prices them                                                                       |
| broadcast, reduce            | scatter and all_gather, or their reverse: as an all_reduce                                       |
| scatter, gather              | as an all_gather, since the root handles all pieces                                              |
| barrier                      | lg p * latency                                                                                   |
| send and receive             | latency + m * per_byte                                                                           |
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from localtensor.collectives.rendezvous import Contribution
from localtensor.collectives.trace.chrome import FIRST_THREAD, MODELLED, Heads, arrow, names_of, quoted, span_text
from localtensor.collectives.trace.events import CALL, OP, REDISTRIBUTIONS, WAIT, Event, Recording
from localtensor.layout.links import Links

_LIKE = {"broadcast": "all_reduce", "reduce": "all_reduce", "scatter": "all_gather", "gather": "all_gather"}
_PIECES = ("all_gather", "all_gather_into_tensor", "scatter", "gather")
"""Calls whose bytes are those of a piece: a rank has one of each rank in the whole."""


@dataclass(slots=True)
class Modelled:
    """What the clock gives: seconds of the whole, and by rank seconds of compute and of waiting."""

    seconds: float = 0.0
    compute: list[float] = field(default_factory=list)
    waiting: list[float] = field(default_factory=list)
    unused_axes: tuple[str, ...] = ()
    unnamed_axes: tuple[str, ...] = ()

    @property
    def idle_share(self) -> float:
        """The share of all ranks' time in which they do not compute: the bubble of a pipeline."""
        whole = self.seconds * len(self.compute)
        return 1 - sum(self.compute) / whole if whole else 0.0


def set_clock(recording: Recording, links: Links, *, ops: bool = True) -> Modelled:
    """Sets `begins` and `ends` of all events of a recording, or of all but single ops, which are most.

    `unused_axes` of the result are mesh axes that the links name and that no call of the run has, `unnamed_axes` those of
    calls that the links do not name, if they name any: these calls have the links within and between nodes.
    """
    clock = _Clock(recording, links)
    points: list[tuple[int, int]] = []  # twice the time, and one more for an end; the event's number
    events = recording.events if ops else recording.noted
    for number, event in enumerate(events):
        if ops or event.kind != OP:
            points.append((2 * event.start, number))
            points.append((2 * max(event.end, event.start) + 1, number))
    points.sort()
    begin, end = clock.begin, clock.end
    for time, number in points:
        (end if time & 1 else begin)(events[number])
    ends = (busy + idle for busy, idle in zip(recording.busy, clock.idle, strict=True))
    done = Modelled(max(ends, default=0.0), list(recording.busy), [0.0] * recording.ranks)
    for event in events:
        done.seconds = max(done.seconds, event.ends)
        if event.kind == WAIT:
            done.waiting[event.rank] += event.ends - event.begins
    parts = [event.part for event in recording.of(CALL) if event.part is not None]
    seen = sorted({axis for part in parts if (axis := part.group.axis()) is not None})
    named = [name for name, _ in links.axes]
    done.unused_axes = tuple(name for name in named if name not in seen)
    done.unnamed_axes = tuple(axis for axis in seen if axis not in named) if named else ()
    return done


class _Clock:
    """The state of the ranks while their events are gone through in order."""

    def __init__(self, recording: Recording, links: Links) -> None:
        self.links = links
        self.idle = [0.0] * recording.ranks  # seconds that each rank has waited
        self.done: dict[int, float] = {}  # the end of each exchange
        self.free: dict[tuple[int, str], float] = {}  # when the channel of a rank and axis is
        self.parts: dict[int, list[Event]] = {}
        self.sizes: dict[int, int] = {}
        for event in recording.of(CALL):
            self.sizes[event.exchange] = self.sizes.get(event.exchange, 0) + 1

    def begin(self, event: Event) -> None:
        event.begins = event.busy_start + self.idle[event.rank]
        if event.kind != CALL:
            return
        event.ends = event.begins
        if event.exchange < 0:
            return
        event.posted = event.begins
        parts = self.parts.setdefault(event.exchange, [])
        parts.append(event)
        if len(parts) == self.sizes[event.exchange]:
            self._transfer(parts)

    def _transfer(self, parts: list[Event]) -> None:
        last = parts[-1].part
        if last is None:
            return
        channels = [(event.rank, _channel(event)) for event in parts]
        start = max(event.posted for event in parts)
        start = max([start, *(self.free.get(channel, 0.0) for channel in channels)])
        end = start + self.seconds(last)
        for event, channel in zip(parts, channels):
            event.begins, event.ends = start, end
            self.free[channel] = end
        self.done[parts[0].exchange] = end

    def end(self, event: Event) -> None:
        if event.kind == CALL:
            return
        now = event.busy_end + self.idle[event.rank]
        if event.kind == WAIT and event.exchange in self.done:
            later = max(self.done[event.exchange] - now, 0.0)
            self.idle[event.rank] += later
            now += later
        event.ends = now

    def seconds(self, part: Contribution) -> float:
        """The time of a transfer."""
        if part.kind in ("send", "recv"):
            ends = (part.rank, part.rank if part.peer is None else part.peer)
            link = self.links.between(ends, part.group.axis())
            return link.latency + part.bytes * link.per_byte
        ranks = len(part.group.ranks)
        if ranks == 1:
            return 0.0
        link = self.links.between(part.group.ranks, part.group.axis())
        if part.kind in ("barrier", "monitored_barrier"):
            return math.ceil(math.log2(ranks)) * link.latency
        nbytes = part.bytes * (ranks if part.kind in _PIECES else 1)
        return link.seconds(_priced(part.kind), ranks, nbytes)


def _channel(event: Event) -> str:
    """The channel of a call: calls of one group follow each other; so do sends, and receives, by the other end."""
    part = event.part
    if part is None or part.kind not in ("send", "recv"):
        return event.axis
    return f"{part.kind} {part.peer}"


def _priced(kind: str) -> str:
    """The collective whose price applies, by the names of c10d's variants."""
    for name in ("reduce_scatter", "all_gather", "all_reduce", "all_to_all"):
        if kind.startswith(name):
            return name
    return _LIKE.get(kind, "all_reduce")


def last_calls(recording: Recording) -> dict[int, Event]:
    """By exchange, the call that comes last on the modelled clock."""
    last: dict[int, Event] = {}
    for event in recording.of(CALL):
        if event.exchange >= 0:
            before = last.get(event.exchange)
            if before is None or event.posted > before.posted:
                last[event.exchange] = event
    return last


def modelled_events(recording: Recording) -> Iterator[str]:
    """The events of the modelled clock in the Chrome trace format: a thread for each rank, and one for each of its channels.

    Of single ops only those are there that the real clock has, too: modules, redistributions, waits, transfers.  An arrow
    goes from a wait that begins before the last rank has called to the transfer of that rank.
    """
    first = FIRST_THREAD + len(recording.lanes)
    threads: dict[tuple[int, str], int] = {}
    calls = [event for event in recording.of(CALL) if event.part is not None and event.ends > event.begins]
    for rank in range(recording.ranks):
        threads[rank, ""] = first + len(threads)
        for channel in sorted({_channel(event) for event in calls if event.rank == rank}):
            threads[rank, channel] = first + len(threads)
    names = [f"{recording.lanes[rank]}{' network: ' if channel else ''}{channel}" for rank, channel in threads]
    yield from names_of(MODELLED, "ranks: modelled time of a cluster", first, names)
    spans = [
        (round(event.begins * 1e9), round(event.ends * 1e9), event)
        for event in recording.noted  # the log has nothing but ops
        if event.ends > event.begins and event.kind != OP
    ]
    last, heads = last_calls(recording), Heads(MODELLED)
    arrows: list[tuple[tuple[int, int], tuple[int, int]]] = []  # after all spans, as each belongs to one that is there
    for start, end, event in sorted(spans, key=lambda span: (span[0], -span[1])):
        thread = threads[event.rank, _channel(event) if event.kind == CALL else ""]
        late = last.get(event.exchange) if event.kind == WAIT else None
        if late is not None and (late.rank == event.rank or late.posted <= event.begins):
            late = None  # all have called: the wait is for the transfer
        yield span_text(heads.form(event) % thread, start, end, _args(event, late))
        if late is not None and late.ends > late.begins >= event.begins:
            arrows.append(((thread, start), (threads[late.rank, _channel(late)], round(late.begins * 1e9))))
    for number, (start_of, end_of) in enumerate(arrows):
        yield from arrow(MODELLED, 2 * number + 1, start_of, end_of)


def _args(event: Event, late: Event | None) -> str:
    """What a viewer shows of a span: of a transfer its bytes, of a redistribution the reason, of a wait the late rank."""
    if event.kind == CALL and event.part is not None:
        return f',"args":{{"bytes":{event.part.bytes}}}'
    if event.kind in REDISTRIBUTIONS:
        return f',"args":{{"reason":{quoted(event.facts["reason"])},"bytes":{event.bytes}}}'
    if event.kind == WAIT:
        return f',"args":{{"for":"{"the transfer" if late is None else f"rank {late.rank}"}"}}'
    return ""
