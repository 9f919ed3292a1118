"""A recorded run as one HTML page: a time line, and tables of communication, redistributions, memory and waits."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from localtensor._util.html_page import STYLE, render_page
from localtensor._util.units import bytes_text, time_text
from localtensor.collectives.trace.clock import Modelled
from localtensor.collectives.trace.events import CALL, IMPLICIT, PASS, RANDOM, Event, Recording
from localtensor.collectives.trace.memory import KINDS
from localtensor.runner.trace.summary import axes_texts, summary_lines
from localtensor.runner.trace.tables import implicit, traffic, traffic_by, waits

_HERE = Path(__file__).parents[2] / "templates"
MOST_BARS = 10_000  # of one clock: of more spans the shortest are drawn together, and the page says so
PARTS = 400  # of the whole time: the short spans of a lane that begin in one part are one bar
MOST_ROWS = 60
MOST_IMPLICIT = 10
DEEPEST = 5  # rows of nested spans in a lane
ROW, GAP = 14, 10  # pixels
SAME = 1e-12  # seconds: sums of the same numbers differ by less
WIDTH = 1200  # pixels: the drawing before any zoom
Span = tuple[float, float, Event]
"""The seconds at which an event begins and ends, and the event."""
_CLASSES = {
    "forward": "forward", "backward": "backward", "optimizer step": "step", "wait": "wait", "call": "call",
    "implicit redistribution": "implicit", "written redistribution": "written", "op": "op", "garbage collection": "gc",
    "checkpoint save": "step", "backward pass": "pass",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Bar:
    """A span in a drawing: `begin` and `end` are shares of the whole time, `y` is in pixels."""

    begin: float
    end: float
    y: float
    look: str
    label: str
    tip: str


@dataclass(frozen=True, slots=True)
class TimeLine:
    """The spans of all ranks on one clock; `lanes` are names with their tops in pixels, `seconds` is the whole.

    `together` spans, of at most `short` seconds each, are drawn together.
    """

    clock: str
    seconds: float
    height: float
    lanes: list[tuple[str, float]]
    bars: list[Bar]
    together: int
    short: float


def page_of(recording: Recording, clock: Modelled, planned: Callable[[str], str] | None = None) -> str:
    """The page; `planned` gives the planner's steps for a redistribution as text."""
    found = implicit(recording)[:MOST_IMPLICIT]
    of_all = traffic(recording)
    axes = list(traffic_by(recording, 1))
    by_module: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for (module, axis, kind), one in of_all.items():
        by_module[module][axis].append(f"{kind} {bytes_text(one.bytes)} in {one.calls}")
    return render_page(
        _HERE / "run.html.j2", (STYLE,), _HERE / "run.js",
        recording=recording, summary=[line.split("  ", 1) for line in summary_lines(recording, clock)],
        lines=[_time_line(recording, "modelled", clock.seconds), _time_line(recording, "real", _real_seconds(recording))],
        topology=axes_texts(clock), axes=axes, modules=list(by_module.items())[:MOST_ROWS], more_modules=max(len(by_module) - MOST_ROWS, 0),
        found=[(one, "" if planned is None else planned(one.spec)) for one in found],
        peaks=list(enumerate(recording.peaks)), kinds=[kind for kind in KINDS if _is_held(recording, kind)],
        held=_by_module(recording), waits=waits(recording)[:MOST_ROWS], width=WIDTH, row=ROW,
        bytes_text=bytes_text, time_text=time_text,
    )  # fmt: skip


def _real_seconds(recording: Recording) -> float:
    return (recording.ended - recording.began) / 1e9


def _is_held(recording: Recording, kind: str) -> bool:
    return any(peak.by_kind.get(kind) for peak in recording.peaks)


def _by_module(recording: Recording) -> list[tuple[str, int]]:
    """The memory at the peak of the rank that holds most, by the module that allocated it."""
    if not recording.peaks:
        return []
    peak = max(recording.peaks, key=lambda peak: peak.bytes)
    found = sorted(((size, module) for module, size in peak.by_module.items() if size), reverse=True)
    return [(module, size) for size, module in found[:MOST_ROWS]]


def _time_line(recording: Recording, clock: str, seconds: float) -> TimeLine:
    """The drawing on the modelled clock, or on the real one."""
    spans = [span for span in (_span(recording, event, clock) for event in recording.events) if span is not None]
    spans.sort(key=lambda span: span[1] - span[0], reverse=True)
    by_lane: dict[tuple[int, bool], tuple[list[Span], list[Span]]] = defaultdict(lambda: ([], []))
    for number, span in enumerate(spans):
        by_lane[span[2].rank, clock == "modelled" and span[2].kind == CALL][number >= MOST_BARS].append(span)
    bars: list[Bar] = []
    lanes: list[tuple[str, float]] = []
    top = float(GAP)
    for rank in range(recording.ranks):
        for network in (False, True):
            mine = by_lane.get((rank, network))
            if mine is None:
                continue
            lanes.append((f"{recording.lanes[rank]}{' network' if network else ''}", top))
            rows = _rows(sorted(mine[0], key=_order))
            bars += [_bar(span, row, top, seconds) for span, row in rows]
            top += ROW * (max((row for _, row in rows), default=-1) + 1)
            if mine[1]:
                bars += _together(mine[1], top, seconds)
                top += ROW
            top += 2 if not network and (rank, True) in by_lane else GAP
    short = spans[MOST_BARS:]
    return TimeLine(clock, seconds, top, lanes, bars, len(short), short[0][1] - short[0][0] if short else 0.0)


def _together(spans: list[Span], top: float, seconds: float) -> Iterator[Bar]:
    """Bars for short spans of one lane, in a row of their own: one for those that begin in the same part of the time."""
    parts: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        parts[int(span[0] / seconds * PARTS)].append(span)
    for part in parts.values():
        begin, end = min(span[0] for span in part), max(span[1] for span in part)
        whole = sum(span[1] - span[0] for span in part)
        names = Counter(span[2].name for span in part).most_common(5)
        tip = [f"{len(part)} short spans, {time_text(whole)}", *(f"{count} {name}" for name, count in names)]
        yield Bar(begin / seconds, end / seconds, top, "many", f"{len(part)} short", "\n".join(tip))


def _span(recording: Recording, event: Event, clock: str) -> Span | None:
    """The seconds at which an event begins and ends; None for one that is not drawn."""
    if event.kind in (RANDOM, PASS) or (event.facts.get("ready", False) and clock == "real"):
        return None
    if clock == "modelled":
        return (event.begins, event.ends, event) if event.ends > event.begins >= 0 else None
    begin, end = (event.start - recording.began) / 1e9, (event.end - recording.began) / 1e9
    return (begin, end, event) if end > begin else None


def _order(span: Span) -> tuple[float, float, int]:
    """Of spans that begin at once, the longer first, and of equal ones the one that really began first."""
    return round(span[0], 12), round(-span[1], 12), span[2].start


def _rows(spans: list[Span]) -> list[tuple[Span, int]]:
    """A row for each span: the first that is free where it begins, so that what is inside of another lies below it."""
    found = []
    ends: list[float] = []
    for span in spans:
        begin, end, _ = span
        while ends and ends[-1] <= begin + SAME:
            ends.pop()
        row = min(len(ends), DEEPEST - 1)
        found.append((span, row))
        ends.append(end)
    return found


def _bar(span: Span, row: int, top: float, seconds: float) -> Bar:
    begin, end, event = span
    label = event.name
    if event.part is not None:
        label += f" {event.axis}" if event.part.peer is None else f" rank {event.part.peer}"
    parts = [label, time_text(end - begin)]
    if event.part is not None:
        parts.append(", ".join(event.part.call().tensors) or "no tensors")
        parts.append(bytes_text(event.part.bytes))
    if event.late is not None and event.late.rank != event.rank:
        parts.append(f"the last is rank {event.late.rank}")
    if event.kind == IMPLICIT or "reason" in event.facts:
        parts.append(f"{event.kind}: {event.facts['reason']}; {bytes_text(event.bytes)}")
    if event.place is not None:
        parts.append(str(event.place))
    return Bar(begin / seconds, end / seconds, top + ROW * row, _CLASSES.get(event.kind, "op"), label, "\n".join(parts))
