"""A recording in the Chrome trace event format, which Perfetto and chrome://tracing open.

The rules are those of the "Trace Event Format" document: times are microseconds; X is a span with its duration, i a moment, C a
counter, M a name of a process or thread, s and f the two ends of an arrow with one `id`, each of which lies in the span that it
belongs to.  Process 1 has the real time of the simulation, one thread a rank.

| event                        | ph     | cat                  | args                                                         |
|------------------------------|--------|----------------------|--------------------------------------------------------------|
| module, op, redistribution   | X      | its kind             | the user's line; placements; the reason                      |
| collective or message        | X      | call                 | kind, axis, bytes, tensors, group, line                      |
| wait                         | X      | wait                 | the rank that is waited for; an arrow goes to its call       |
| random draw, error           | i      | its kind             | what is drawn; the message                                   |
| memory                       | C      |                      | bytes by kind                                                |
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import IO, Any

from localtensor._util.events import place_text
from localtensor.collectives.rendezvous import Contribution
from localtensor.collectives.trace.events import (
    CALL,
    ERROR,
    MODULES,
    RANDOM,
    REDISTRIBUTIONS,
    WAIT,
    Event,
    Recording,
    axis_text,
    layouts_text,
)

REAL, MODELLED = 1, 2
"""The two processes of a trace: real time of the simulation, and modelled time of a cluster."""
COLOURS = {
    "forward": "good", "backward": "rail_idle", "op": "grey", "written redistribution": "rail_response",
    "implicit redistribution": "terrible", "call": "thread_state_iowait", "wait": "bad", "garbage collection": "black",
}  # fmt: skip
_OWN = frozenset({"posted"})  # a fact for the clocks
_AT_ONCE = 256  # events that are encoded together, since a call of the encoder takes as long as an event
_SHORTEST = 0.001  # microseconds: a span without a duration cannot be seen


def write_chrome(recording: Recording, file: IO[str], more: Iterable[dict[str, Any]] = ()) -> None:
    """Writes the trace as JSON, an event a line; `more` are events in the same form, of another clock."""
    file.write('{"displayTimeUnit":"ns","otherData":')
    about = {"made by": "localtensor", "ranks": recording.world or recording.ranks}
    file.write(json.dumps(about | ({"error": recording.problem} if recording.problem else {})))
    file.write(',"traceEvents":[\n')
    encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
    separator = ""
    events = chain(trace_events(recording), more)
    while batch := list(islice(events, _AT_ONCE)):
        # In a string the quote would have a backslash: this is between two events.
        file.write(separator + encode(batch)[1:-1].replace(',{"name"', ',\n{"name"'))
        separator = ",\n"
    file.write("\n]}\n")


def trace_events(recording: Recording) -> Iterator[dict[str, Any]]:
    """The events of the real clock."""
    yield from names_of(REAL, "ranks: real time of the simulation", recording.lanes)

    def at(event: Event) -> tuple[float, float]:
        return (event.start - recording.began) / 1000, event.nanoseconds / 1000

    texts: dict[tuple[int, ...], str] = {}
    for event in sorted(recording.events, key=lambda event: (event.start, -event.end)):
        yield _chrome_event(event, recording.began, texts)
    yield from _arrows(recording, at)
    for sample in recording.memory:
        held = {kind: size for kind, size in sample.held.items() if size} or {"other": 0}
        name = f"memory of {recording.lanes[sample.rank]}"
        when = round((sample.at - recording.began) / 1000, 3)
        yield {"name": name, "ph": "C", "pid": REAL, "tid": sample.rank, "ts": when, "args": held}
    if recording.problem:
        when = round((recording.ended - recording.began) / 1000, 3)
        name = recording.problem.partition("\n")[0]
        yield {"name": name, "ph": "i", "s": "g", "cat": ERROR, "pid": REAL, "tid": 0, "ts": when}


def names_of(process: int, name: str, threads: list[str]) -> Iterator[dict[str, Any]]:
    """The names of a process and of its threads, which come in this order."""
    yield {"name": "process_name", "ph": "M", "pid": process, "tid": 0, "args": {"name": name}}
    yield {"name": "process_sort_index", "ph": "M", "pid": process, "tid": 0, "args": {"sort_index": process}}
    for number, thread in enumerate(threads):
        yield {"name": "thread_name", "ph": "M", "pid": process, "tid": number, "args": {"name": thread}}
        yield {"name": "thread_sort_index", "ph": "M", "pid": process, "tid": number, "args": {"sort_index": number}}


def _chrome_event(event: Event, began: int, texts: dict[tuple[int, ...], str]) -> dict[str, Any]:
    kind = event.kind
    made: dict[str, Any] = {
        "name": event.name, "cat": kind, "pid": REAL, "tid": event.rank, "ts": round((event.start - began) / 1000, 3),
    }  # fmt: skip
    if kind in (RANDOM, ERROR):
        made["ph"], made["s"] = "i", "t"
    else:
        made["ph"], made["dur"] = "X", max(round(event.nanoseconds / 1000, 3), _SHORTEST)
    if kind in COLOURS:
        made["cname"] = COLOURS[kind]
    args = args_of(event, texts)
    if args:
        made["args"] = args
    return made


def _arrows(recording: Recording, at: Callable[[Event], tuple[float, float]]) -> Iterator[dict[str, Any]]:
    """An arrow from each wait to the call of the rank that it waits for."""
    number = 0
    for event in recording.of(WAIT):
        late = event.late
        if late is None or late.rank == event.rank or late.start < event.start:
            continue
        number += 1
        common = {"name": "waits for", "cat": "waits for", "id": number, "pid": REAL}
        yield common | {"ph": "s", "tid": event.rank, "ts": round(at(event)[0], 3)}
        yield common | {"ph": "f", "bp": "e", "tid": late.rank, "ts": round(at(late)[0], 3)}


def args_of(event: Event, texts: dict[tuple[int, ...], str]) -> dict[str, Any]:
    """What a viewer shows of an event beside its name and time; `texts` keeps those of specs by their ids."""
    found: dict[str, Any] = {}
    if event.place is not None:
        found["line"] = place_text(event.place)
    if event.module and event.kind not in MODULES:
        found["module"] = event.module
    if event.kind == CALL and event.part is not None:
        found |= _args_of_call(event.part)
    if event.kind == WAIT and event.late is not None:
        found["for"] = f"rank {event.late.rank}"
    if event.kind in REDISTRIBUTIONS:
        found["bytes"] = event.bytes
    for name, value in event.facts.items():
        if name not in _OWN:
            found[name] = value
    for name, specs in (("takes", event.takes), ("gives", event.gives)):
        if specs:
            key = tuple(map(id, specs))
            if key not in texts:
                texts[key] = layouts_text(specs)
            found[name] = texts[key]
    return found


def _args_of_call(part: Contribution) -> dict[str, Any]:
    call = part.call()
    found: dict[str, Any] = {"axis": axis_text(part), "bytes": call.bytes, "tensors": ", ".join(call.tensors)}
    found |= {"group": ",".join(map(str, call.group)), "number": call.number}
    found |= {name: value for name in ("op", "root", "peer") if (value := getattr(call, name)) is not None}
    return found | ({"implicit": True} if call.implicit else {})
