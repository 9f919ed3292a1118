"""A recording in the Chrome trace event format, which Perfetto and chrome://tracing open.

The rules are those of the "Trace Event Format" document, and what the importers of the two viewers make of it: times are
microseconds, of which the viewers keep nanoseconds; X is a span with its duration, i a moment, C a counter, M a name of a process
or thread, s and f the two ends of an arrow with one `id`, each of which lies in the span that it belongs to.  Spans of a thread are
apart or one inside of the other to the nanosecond, since Perfetto drops any other.  Process 1 has the real time of the simulation,
one thread a rank, process 2 the modelled time of a cluster.

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
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import chain, islice
from typing import IO, Any

import numpy as np

from localtensor.collectives.rendezvous import Contribution
from localtensor.collectives.trace.events import (
    CALL,
    ERROR,
    MODULES,
    OP,
    RANDOM,
    REDISTRIBUTIONS,
    WAIT,
    Event,
    Recording,
    TracedSpec,
    axis_text,
)
from localtensor.collectives.trace.memory import KINDS

REAL, MODELLED = 1, 2
"""The two processes of a trace: real time of the simulation, and modelled time of a cluster."""
FIRST_THREAD = 1000
"""The thread of the first lane: no thread has the number of a process, which Perfetto takes for its main thread, or of another."""
COLOURS = {
    "forward": "good", "backward": "rail_idle", "op": "grey", "written redistribution": "rail_response",
    "implicit redistribution": "terrible", "call": "thread_state_iowait", "wait": "bad", "garbage collection": "black",
}  # fmt: skip
DURATION = ',"dur":%.3f'
_AT_ONCE = 256  # lines that are written together

quoted = lru_cache(1 << 14)(json.dumps)
"""A string as JSON."""


def write_chrome(recording: Recording, file: IO[str], more: Iterable[str] = ()) -> None:
    """Writes the trace as JSON, an event a line; `more` are events in the same form, of another clock."""
    file.write('{"displayTimeUnit":"ns","otherData":')
    about = {"made by": "localtensor", "ranks": recording.world or recording.ranks}
    file.write(json.dumps(about | ({"error": recording.problem} if recording.problem else {})))
    file.write(',"traceEvents":[\n')
    separator = ""
    events = chain(trace_events(recording), more)
    while batch := list(islice(events, _AT_ONCE)):
        file.write(separator + ",\n".join(batch))
        separator = ",\n"
    file.write("\n]}\n")


def trace_events(recording: Recording) -> Iterator[str]:
    """The events of the real clock as JSON, one or several lines at a time."""
    yield from names_of(REAL, "ranks: real time of the simulation", FIRST_THREAD, recording.lanes)
    began, forms = recording.began, _Forms()
    for event in sorted(recording.noted, key=lambda event: (event.start, -event.end)):
        yield forms.text(event, event.start - began)
    texts = [(forms.of_op(form), FIRST_THREAD + form.rank) for form in recording.ops.forms]
    times = recording.ops.rows()
    starts, lengths = times[:, 1] - began, np.maximum(times[:, 2] - times[:, 1], 1)
    rows = zip(map(texts.__getitem__, times[:, 0].tolist()), (starts / 1000).tolist(), (lengths / 1000).tolist())
    while batch := [text % (thread, start, length) for (text, thread), start, length in islice(rows, _AT_ONCE)]:
        yield ",\n".join(batch)
    number = 0
    for event in recording.of(WAIT):
        late = event.late
        if late is not None and late.rank != event.rank and late.start >= event.start:
            number += 2
            ends = ((FIRST_THREAD + one.rank, one.start - began) for one in (event, late))
            yield from arrow(REAL, number, *ends)
    yield from _memory(recording)
    if recording.problem:
        name = quoted(recording.problem.partition("\n")[0])
        where = f'"pid":{REAL},"tid":{FIRST_THREAD},"ts":{(recording.ended - began) / 1000:.3f}'
        yield f'{{"name":{name},"ph":"i","s":"g","cat":"{ERROR}",{where}}}'


def _memory(recording: Recording) -> Iterator[str]:
    """The bytes of each rank by kind.

    Each event counts all kinds that the rank ever holds: chrome://tracing takes the kinds of a counter from its first
    event, and Perfetto keeps the last value of one that is left out.
    """
    for rank, lane in enumerate(recording.lanes):
        rows = recording.samples(rank)
        times, sizes = ((rows[:, 0] - recording.began) / 1000).tolist(), rows[:, 1:]
        kinds = sizes.any(axis=0).nonzero()[0]
        form = _form_of_sample(rank, lane, kinds.tolist())
        samples = zip(times, *sizes[:, kinds].T.tolist())
        while batch := [form % sample for sample in islice(samples, _AT_ONCE)]:
            yield ",\n".join(batch)


def _form_of_sample(rank: int, lane: str, kinds: list[int]) -> str:
    """The text of a rank's samples, into which the time and the bytes of these kinds go by `%`."""
    name = quoted(f"memory of {lane}").replace("%", "%%")
    sizes = ",".join([f"{quoted(KINDS[kind])}:%d" for kind in kinds])
    return f'{{"name":{name},"ph":"C","pid":{REAL},"tid":{FIRST_THREAD + rank},"ts":%.3f,"args":{{{sizes}}}}}'


def names_of(process: int, name: str, first: int, threads: list[str]) -> Iterator[str]:
    """The names of a process and of its threads, of which the first has the number `first`, and which come in this order."""
    rows = [("process", first, name, process), *(("thread", first + n, one, n) for n, one in enumerate(threads))]
    for what, thread, text, order in rows:
        where = f'"ph":"M","pid":{process},"tid":{thread}'
        yield f'{{"name":"{what}_name",{where},"args":{{"name":{quoted(text)}}}}}'
        yield f'{{"name":"{what}_sort_index",{where},"args":{{"sort_index":{order}}}}}'


def span_text(head: str, start: int, end: int, args: str) -> str:
    """A span from `start` to `end`, in nanoseconds: at least one, since a span without a duration cannot be seen."""
    return f'{head},"ts":{start / 1000:.3f},"dur":{max(end - start, 1) / 1000:.3f}{args}}}'


def arrow(process: int, number: int, start: tuple[int, int], end: tuple[int, int]) -> Iterator[str]:
    """An arrow from a wait to the call of the rank that it waits for; an end is a thread and its nanoseconds."""
    common = f'{{"name":"waits for","cat":"waits for","id":{number},"pid":{process}'
    yield f'{common},"ph":"s","tid":{start[0]},"ts":{start[1] / 1000:.3f}}}'
    yield f'{common},"ph":"f","bp":"e","tid":{end[0]},"ts":{end[1] / 1000:.3f}}}'


class Heads:
    """What events of one kind and name have in common, as JSON."""

    def __init__(self, process: int) -> None:
        self._process = process
        self._known: dict[tuple[str, str], str] = {}

    def form(self, event: Event) -> str:
        """The beginning of an event, up to its time, into which the thread goes by `%`.

        A redistribution's name says which it is: Perfetto colours by names.
        """
        kind, name = event.kind, event.name
        key = (kind, name)
        head = self._known.get(key)
        if head is None:
            shown = f"{kind.partition(' ')[0]} {name}" if kind in REDISTRIBUTIONS else name
            phase = '"ph":"i","s":"t"' if kind in (RANDOM, ERROR) else '"ph":"X"'
            colour = f',"cname":"{COLOURS[kind]}"' if kind in COLOURS else ""
            head = f'{{"name":{quoted(shown)},"cat":"{kind}",{phase},"pid":{self._process}'.replace("%", "%%")
            head = self._known[key] = f'{head},"tid":%d{colour}'
        return head


class _Forms:
    """The texts of events, into which thread and times go by `%`.  Those that are alike are made once, for all ranks."""

    def __init__(self) -> None:
        # By ids, of what the recording keeps alive: the hash of a place or a spec is computed in Python.
        self._forms: dict[tuple[Any, ...], str] = {}
        self._lines: dict[int, str] = {}
        self._specs: dict[int, str] = {}  # of a spec, or of a tuple of them
        self._calls: dict[tuple[Any, ...], str] = {}
        self._heads = Heads(REAL)

    def text(self, event: Event, start: int) -> str:
        """The text of an event that begins so many nanoseconds after the recording."""
        kind, thread = event.kind, FIRST_THREAD + event.rank
        if kind == OP and event._facts is None:  # most of the events
            return self.of_op(event) % (thread, start / 1000, max(event.end - event.start, 1) / 1000)
        number: tuple[int, ...] = ()
        key: tuple[Any, ...] = (kind, event.name, id(event.place), event.module, event.bytes)
        if kind == CALL and event.part is not None:
            key += (self._call(event.part),)
            number = () if event.part.number < 0 else (event.part.number,)  # in lockstep calls have none
        elif kind == WAIT and event.late is not None:
            key += (event.late.rank,)
        elif event.takes or event.gives:
            key += (self._texts(event.takes), self._texts(event.gives))
        if event._facts:
            key += tuple(event._facts.items())
        form = self._forms.get(key)
        if form is None:
            form = self._forms[key] = self._form(event)
        if kind in (RANDOM, ERROR):
            return form % (thread, start / 1000)
        return form % (thread, start / 1000, max(event.end - event.start, 1) / 1000, *number)

    def of_op(self, event: Event) -> str:
        """The text of an op without facts."""
        key = (event.name, id(event.place), event.module, self._texts(event.takes), self._texts(event.gives))
        form = self._forms.get(key)
        if form is None:
            form = self._forms[key] = self._form(event)
        return form

    def _form(self, event: Event) -> str:
        head, args = self._heads.form(event), self._args(event).replace("%", "%%")
        part = event.part
        if event.kind == CALL and part is not None and part.number >= 0:
            args += ',"number":%d'
        args = f',"args":{{{args}}}' if args else ""
        return f'{head},"ts":%.3f{"" if event.kind in (RANDOM, ERROR) else DURATION}{args}}}'

    def _args(self, event: Event) -> str:
        """What a viewer shows of an event beside its name and times: the members of `args` as JSON."""
        kind, place, parts = event.kind, event.place, []
        if place is not None:
            line = self._lines.get(id(place))
            if line is None:
                line = self._lines[id(place)] = f'"line":{quoted(str(place))}'
            parts.append(line)
        if event.module and kind not in MODULES:
            parts.append(f'"module":{quoted(event.module)}')
        if event.late is not None and kind == WAIT:
            parts.append(f'"for":"rank {event.late.rank}"')
        if kind in REDISTRIBUTIONS:
            parts.append(f'"bytes":{event.bytes}')
        for name, value in event.facts.items():
            parts.append(f"{quoted(name)}:{quoted(value) if type(value) is str else json.dumps(value)}")
        for name, specs in (("takes", event.takes), ("gives", event.gives)):
            if specs:
                parts.append(f'"{name}":{quoted(self._texts(specs))}')
        if event.part is not None and kind == CALL:
            parts.append(self._call(event.part))
        return ",".join(parts)

    def _texts(self, specs: tuple[Any, ...]) -> str:
        """Specs as text."""
        text = self._specs.get(id(specs))
        if text is None:
            text = self._specs[id(specs)] = ", ".join(map(self._spec, specs))
        return text

    def _spec(self, spec: Any) -> str:
        text = self._specs.get(id(spec))
        if text is None:
            text = self._specs[id(spec)] = str(TracedSpec.of(spec))
        return text

    def _call(self, part: Contribution) -> str:
        """The members of a call."""
        key = (part.group.ranks, part.tensors, part.layout, part.op, part.root, part.peer, part.implicit)
        known = self._calls.get(key)
        if known is None:
            known = self._calls[key] = _call_text(part)
        return known


def _call_text(part: Contribution) -> str:
    """The members of a call."""
    call, axis = part.call(), part.group.axis()
    found: dict[str, Any] = {"axis": axis_text(part), "bytes": call.bytes, "tensors": ", ".join(call.tensors)}
    found |= {} if axis is None else {"group": ",".join(map(str, call.group))}
    found |= {name: value for name in ("op", "root", "peer") if (value := getattr(call, name)) is not None}
    found |= {"implicit": True} if call.implicit else {}
    return json.dumps(found, separators=(",", ":"))[1:-1]
