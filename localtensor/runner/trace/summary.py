"""A recorded run in twelve lines."""

from __future__ import annotations

from collections import Counter, defaultdict

from localtensor._util.units import bytes_text, time_text
from localtensor.collectives.trace.clock import Modelled
from localtensor.collectives.trace.events import ERROR, GC, RANDOM, REDISTRIBUTIONS, SAVE, Recording
from localtensor.runner.trace.tables import implicit, traffic_by, waits

MOST = 3  # entries of a line
WIDTH = 118


def summary_lines(recording: Recording, clock: Modelled) -> list[str]:
    """The lines of the summary; what is modelled is called so."""
    rows = [
        ("run", _run(recording)),
        ("modelled", _modelled(clock)),
        ("communication", _traffic(recording, 2)),
        ("by axis", _traffic(recording, 1)),
        ("by module", _traffic(recording, 0)),
        ("redistributions", _redistributions(recording)),
        ("largest implicit", _largest(recording)),
        ("waits, modelled", _waits(recording)),
        ("longest wait", _longest(recording)),
        ("memory", _memory(recording)),
        ("at its peak", _peak(recording)),
        ("besides", _besides(recording)),
    ]
    return [_cut(f"{name:16}  {text}") for name, text in rows]


def _cut(text: str) -> str:
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 3]}..."


def _run(recording: Recording) -> str:
    seconds = (recording.ended - recording.began) / 1e9
    ends = "ended" if recording.problem is None else f"failed: {recording.problem.partition(chr(10))[0]}"
    return f"{recording.world or recording.ranks} ranks, {recording.count} events in {time_text(seconds)}; {ends}"


def _modelled(clock: Modelled) -> str:
    most = max(clock.compute, default=0.0)
    text = f"{time_text(clock.seconds)} on the cluster; a rank computes {time_text(most)} at most"
    return f"{text}; ranks are idle {clock.idle_share:.0%} of the time"


def axes_texts(clock: Modelled) -> list[str]:
    """What the topology and the run do not have in common."""
    found = []
    if clock.unused_axes:
        found.append(f"no call of the run is along {', '.join(clock.unused_axes)}, which the topology names")
    if clock.unnamed_axes:
        found.append(f"the topology does not name {', '.join(clock.unnamed_axes)}, whose calls have the links of nodes")
    return found


def _traffic(recording: Recording, column: int) -> str:
    found = traffic_by(recording, column)
    if not found:
        return "none"
    parts = [f"{name or 'outside of modules'} {bytes_text(one.bytes)} in {one.calls}" for name, one in found.items()]
    return ", ".join(parts[:MOST]) + (f", {len(parts) - MOST} more" if len(parts) > MOST else "")


def _redistributions(recording: Recording) -> str:
    moved = [event for event in recording.of(*REDISTRIBUTIONS) if event.bytes]
    times, size = Counter(event.kind for event in moved), Counter[str]()
    for event in moved:
        size[event.kind] += event.bytes
    parts = [f"{times[kind]} {kind.split()[0]}, {bytes_text(size[kind])}" for kind in REDISTRIBUTIONS]
    return "; ".join(parts)


def _largest(recording: Recording) -> str:
    found = implicit(recording)
    if not found:
        return "none"
    return f"{bytes_text(found[0].bytes)} in {found[0].times}, {found[0].place}: {found[0].spec}"


def _waits(recording: Recording) -> str:
    found = waits(recording)
    late: dict[int, float] = defaultdict(float)
    for one in found:
        late[one.late] += 0.0 if one.late == one.rank else one.seconds
    text = f"{time_text(sum(one.seconds for one in found))} of all ranks"
    if late and max(late.values()) > 0:
        rank = max(late, key=lambda rank: late[rank])
        text += f"; the others wait for rank {rank} most, {time_text(late[rank])}"
    return text


def _longest(recording: Recording) -> str:
    found = [one for one in waits(recording) if one.longest is not None]
    if not found:
        return "none"
    one = max(found, key=lambda one: one.longest_seconds)
    longest = one.longest
    if longest is None or longest.part is None:
        return "none"
    whom = "" if one.late == one.rank else f" for rank {one.late}"
    return f"{time_text(one.longest_seconds)}: rank {one.rank}{whom}, {longest.part.kind} along {longest.axis}, {longest.place}"


def _memory(recording: Recording) -> str:
    if not recording.peaks:
        return "not measured"
    rank = max(range(len(recording.peaks)), key=lambda rank: recording.peaks[rank].bytes)
    least = min(peak.bytes for peak in recording.peaks)
    peak = recording.peaks[rank]
    where = f"in {peak.module}" if peak.module else "outside of modules"
    return (
        f"rank {rank} holds most, {bytes_text(peak.bytes)} {where}; the least of a rank's peaks is {bytes_text(least)}"
    )


def _peak(recording: Recording) -> str:
    if not recording.peaks:
        return "not measured"
    peak = max(recording.peaks, key=lambda peak: peak.bytes)
    parts = sorted(((size, kind) for kind, size in peak.by_kind.items() if size), reverse=True)
    return ", ".join(f"{kind} {bytes_text(size)}" for size, kind in parts) or "nothing"


def _besides(recording: Recording) -> str:
    pauses = recording.of(GC)
    pause = sum(event.nanoseconds for event in pauses) / 1e9
    parts = [f"{len(recording.of(RANDOM))} random draws", f"{len(recording.of(SAVE))} checkpoint saves"]
    parts += [f"{len(pauses)} garbage collections of {time_text(pause)}", f"{len(recording.of(ERROR))} ranks raised"]
    return ", ".join(parts)
