"""Tables of a recorded run: communication by module and axis, implicit redistributions, waits, memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from localtensor._util.events import Place
from localtensor._util.units import bytes_text
from localtensor.collectives.trace.clock import last_calls
from localtensor.collectives.trace.events import CALL, IMPLICIT, WAIT, Event, Recording
from localtensor.collectives.trace.memory import Peak
from localtensor.errors import Refusal, WrongType


@dataclass(slots=True)
class Traffic:
    """Calls of one kind: how many, and the bytes that were passed to them, of all ranks together."""

    calls: int = 0
    bytes: int = 0

    def add(self, event: Event) -> None:
        self.calls += 1
        self.bytes += event.bytes


def traffic(recording: Recording) -> dict[tuple[str, str, str], Traffic]:
    """The communication by module, axis and kind of call, the most bytes first."""
    found: dict[tuple[str, str, str], Traffic] = defaultdict(Traffic)
    for event in recording.of(CALL):
        found[event.module, event.axis, event.name].add(event)
    return dict(sorted(found.items(), key=lambda item: -item[1].bytes))


def traffic_by(recording: Recording, column: int) -> dict[str, Traffic]:
    """The communication by module (0), axis (1) or kind of call (2), the most bytes first."""
    found: dict[str, Traffic] = defaultdict(Traffic)
    for key, one in traffic(recording).items():
        found[key[column]].calls += one.calls
        found[key[column]].bytes += one.bytes
    return dict(sorted(found.items(), key=lambda item: -item[1].bytes))


@dataclass(slots=True)
class Moved:
    """Implicit redistributions of one line: the layouts as text, why, how often, and the bytes of all ranks."""

    spec: str
    reason: str
    place: Place | None
    times: int = 0
    bytes: int = 0


def implicit(recording: Recording) -> list[Moved]:
    """The implicit redistributions that communicate, by line and layout, the most bytes first."""
    found: dict[tuple[str, str, str], Moved] = {}
    for event in recording.of(IMPLICIT):
        if event.bytes:
            spec, reason = event.facts["spec"], event.facts["reason"]
            one = found.setdefault((spec, reason, str(event.place)), Moved(spec, reason, event.place))
            one.times += 1
            one.bytes += event.bytes
    return sorted(found.values(), key=lambda one: -one.bytes)


@dataclass(slots=True)
class Waited:
    """What one rank waits for another: how often, and seconds of the modelled clock; `longest` is the longest wait."""

    rank: int
    late: int
    times: int = 0
    seconds: float = 0.0
    longest: Event | None = field(default=None, repr=False)  # it leads to all calls of its group
    longest_seconds: float = 0.0


def waits(recording: Recording) -> list[Waited]:
    """Who waits how long for whom, on the modelled clock, the longest first.

    Until the last rank calls, a rank waits for that one; from then on for the transfer, which counts for itself.
    """
    found: dict[tuple[int, int], Waited] = {}
    last = last_calls(recording)
    for event in recording.of(WAIT):
        call = last.get(event.exchange)
        late = event.rank if call is None else call.rank
        called = event.begins if call is None else call.posted
        for_late = 0.0 if late == event.rank else min(max(called - event.begins, 0.0), event.ends - event.begins)
        for whom, seconds in ((late, for_late), (event.rank, event.ends - event.begins - for_late)):
            if seconds <= 0:
                continue
            one = found.setdefault((event.rank, whom), Waited(event.rank, whom))
            one.times += 1
            one.seconds += seconds
            if one.longest is None or seconds > one.longest_seconds:
                one.longest, one.longest_seconds = event, seconds
    return sorted(found.values(), key=lambda one: -one.seconds)


class NoPeak(Refusal, IndexError, argument="rank", values="{rank}"):
    """A rank that the run has not."""

    PROBLEM = "the run has {ranks} ranks"
    REMEDY = "Name a rank from 0 to {last}."


class RunMemory:
    """The memory that each rank of a recorded run has held, in bytes."""

    def __init__(self, peaks: Sequence[Peak]) -> None:
        self._peaks = peaks

    def __repr__(self) -> str:
        return f"RunMemory(peaks: {', '.join(bytes_text(peak.bytes) for peak in self._peaks)})"

    def peak(self, rank: int) -> int:
        """The most bytes that this rank has held at once.  Raises `NoPeak`, `WrongType`."""
        return self._of("peak", rank).bytes

    def at_peak(self, rank: int) -> Peak:
        """What this rank held then: bytes by kind of tensor and by module, and the module that ran.

        Raises `NoPeak`, `WrongType`.
        """
        return self._of("at_peak", rank)

    def _of(self, call: str, rank: int) -> Peak:
        if isinstance(rank, bool) or not isinstance(rank, int):
            raise WrongType(f"memory.{call}", "rank", rank, "it is no int", "Pass the number of a rank.")
        if not 0 <= rank < len(self._peaks):
            raise NoPeak(f"memory.{call}", rank, len(self._peaks), len(self._peaks) - 1)
        return self._peaks[rank]
