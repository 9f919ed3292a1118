"""Faults on purpose: a drawn rank program, right by construction, and one thing in it that is not."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from tests.properties.programs.model import COLLECTIVES, MESSAGES, OBJECTS, REDUCING, ROOTED, SPLITS, Event, Step
from tests.properties.programs.program import RankProgram
from tests.properties.programs.strategy import DTYPES, rank_programs

ANY = rank_programs(10, ranks=(2, 3, 4, 5, 6), for_gloo=False, closed=False)
"""RankPrograms that leave their groups behind, as a rank with a fault does anyway."""

# -- faults


@dataclass(frozen=True)
class Fault:
    """A program with one fault, and who has it: the rank, and the places of its events in the faulty program."""

    name: str
    program: RankProgram
    rank: int


Plant = Callable[
    [RankProgram, int, int], Iterator[Sequence[Event]]
]  # program, rank, place of an event: its events instead


def without(events: Sequence[Event], id: int, *whats: str) -> list[Event]:  # noqa: A002
    return [event for event in events if event.step is None or event.step.id != id or event.what not in whats]


def drop(program: RankProgram, rank: int, at: int) -> Iterator[Sequence[Event]]:
    events = program.events[rank]
    if events[at].what == "launch":
        yield without(events, events[at].step.id, "launch", "wait", "mix")


def swap(program: RankProgram, rank: int, at: int) -> Iterator[Sequence[Event]]:
    """This launch changes places with the next; what follows from a launch still comes after it."""
    events = list(program.events[rank])
    later = next((i for i in range(at + 1, len(events)) if events[i].what == "launch"), None)
    if events[at].what != "launch" or later is None:
        return
    events[at], events[later] = events[later], events[at]
    moved, ids, held = [], set(), []
    for event in events:
        early = event.what in ("wait", "mix") and event.step.id not in ids
        (held if early else moved).append(event)
        if event.what == "launch":
            ids.add(event.step.id)
            moved += [one for one in held if one.step.id in ids]
            held = [one for one in held if one.step.id not in ids]
    yield moved


def altered(change: Callable[[Step, RankProgram, int], Iterator[Step]]) -> Plant:
    """One rank makes another call of it."""

    def plant(program: RankProgram, rank: int, at: int) -> Iterator[Sequence[Event]]:
        events = program.events[rank]
        if events[at].what != "launch":
            return
        step = events[at].step
        for other in change(step, program, rank):
            out = [replace(e, step=other) if e.step is not None and e.step.id == step.id else e for e in events]
            if not other.gets(rank):
                out = without(out, step.id, "mix")
            elif not step.gets(rank):
                last = max(i for i, e in enumerate(out) if e.step is not None and e.step.id == step.id)
                out.insert(last + 1, Event("mix", other))
            yield out

    return plant


def other_shape(step: Step, program: RankProgram, rank: int) -> Iterator[Step]:
    if step.kind not in ("barrier", *OBJECTS):
        rows, columns = step.shape
        yield (
            replace(step, shape=(rows, 3 - columns))
            if step.kind in SPLITS
            else replace(step, shape=(rows + 1, columns))
        )


def other_dtype(step: Step, program: RankProgram, rank: int) -> Iterator[Step]:
    if step.kind not in ("barrier", *OBJECTS) and step.op not in ("avg", "band", "bor", "bxor"):
        yield replace(step, dtype=DTYPES[(DTYPES.index(step.dtype) + 1) % len(DTYPES)])


def other_op(step: Step, program: RankProgram, rank: int) -> Iterator[Step]:
    if step.kind in REDUCING:
        yield replace(step, op="max" if step.op != "max" else "sum")


def other_root(step: Step, program: RankProgram, rank: int) -> Iterator[Step]:
    if step.kind in ROOTED and len(step.members) > 1:
        yield replace(step, root=step.members[step.members.index(step.root) - 1])


def other_kind(step: Step, program: RankProgram, rank: int) -> Iterator[Step]:
    if step.kind in COLLECTIVES and step.style != "functional":
        style = "sync" if step.style == "sync" else "async"
        kind = (
            "barrier"
            if step.kind not in ("barrier", "all_reduce")
            else "all_gather"
            if step.kind != "barrier"
            else "broadcast"
        )
        yield replace(step, kind=kind, style=style, root=step.members[0], layout="plain", op="sum", splits=())


def other_splits(step: Step, program: RankProgram, rank: int) -> Iterator[Step]:
    if step.kind in SPLITS:
        me = step.members.index(rank)
        row = (step.splits[me][0] + 1, *step.splits[me][1:])
        yield replace(step, splits=(*step.splits[:me], row, *step.splits[me + 1 :]))


def other_tag(step: Step, program: RankProgram, rank: int) -> Iterator[Step]:
    if step.kind in MESSAGES:
        yield replace(step, tag=step.tag + 2)


def other_group(step: Step, program: RankProgram, rank: int) -> Iterator[Step]:
    if step.kind in ("barrier", "all_gather_object"):
        others = (g for g, members in enumerate(program.groups) if rank in members and g != step.group)
        yield from (replace(step, group=g, members=program.groups[g]) for g in others)


def extra(program: RankProgram, rank: int, at: int) -> Iterator[Sequence[Event]]:
    events = program.events[rank]
    if events[at].what == "launch" and events[at].step.style == "sync":
        yield [*events[:at], Event("launch", replace(events[at].step, id=99)), *events[at:]]


def drop_wait(program: RankProgram, rank: int, at: int) -> Iterator[Sequence[Event]]:
    events = program.events[rank]
    if events[at].what == "wait" and events[at].how != "functional":
        yield without(events, events[at].step.id, "wait")
        yield without(events, events[at].step.id, "wait", "mix")


def flight(program: RankProgram, rank: int, at: int) -> Iterator[int]:
    """The places between the launch of an async call and its wait."""
    events = program.events[rank]
    if events[at].what == "launch" and events[at].step.style == "async":
        wait = next(i for i, e in enumerate(events) if e.what == "wait" and e.step == events[at].step)
        yield from {at + 1, wait}


def read_in_flight(program: RankProgram, rank: int, at: int) -> Iterator[Sequence[Event]]:
    events = program.events[rank]
    step = events[at].step
    for place in flight(program, rank, at):
        if step.gets(rank) and not (step.kind == "broadcast" and rank == step.root):
            yield [*events[:place], Event("read", step), *events[place:]]


def write_in_flight(program: RankProgram, rank: int, at: int) -> Iterator[Sequence[Event]]:
    events = program.events[rank]
    for place in flight(program, rank, at):
        if events[at].step.brought(rank) is not None:
            yield [*events[:place], Event("write", events[at].step), *events[place:]]


def leave(program: RankProgram, rank: int, at: int) -> Iterator[Sequence[Event]]:
    yield [*program.events[rank][:at], Event("return")]


def throw(program: RankProgram, rank: int, at: int) -> Iterator[Sequence[Event]]:
    yield [*program.events[rank][:at], Event("raise"), *program.events[rank][at:]]


def swap_groups(program: RankProgram, rank: int, at: int) -> Iterator[Sequence[Event]]:
    events = list(program.events[rank])
    if at + 1 < len(events) and events[at].what == events[at + 1].what == "group":
        events[at], events[at + 1] = events[at + 1], events[at]
        yield events


def drop_group(program: RankProgram, rank: int, at: int) -> Iterator[Sequence[Event]]:
    """A group that the rank does not use: it is not in it, say."""
    events = program.events[rank]
    used = {event.step.group for event in events if event.step is not None}
    if events[at].what == "group" and int(events[at].how) not in used:
        yield [*events[:at], *events[at + 1 :]]


PLANTS: dict[str, Plant] = {
    "drop": drop, "swap": swap, "shape": altered(other_shape), "dtype": altered(other_dtype), "op": altered(other_op),
    "root": altered(other_root), "kind": altered(other_kind), "splits": altered(other_splits), "tag": altered(other_tag),
    "group": altered(other_group), "extra": extra, "drop_wait": drop_wait, "read": read_in_flight, "write": write_in_flight,
    "leave": leave, "raise": throw, "swap_groups": swap_groups, "drop_group": drop_group,
}  # fmt: skip


def planted(program: RankProgram, name: str) -> list[Fault]:
    """The program with this fault, at every place where it can have it."""
    return [
        Fault(name, program.changed(rank, events), rank)
        for rank in range(program.ranks)
        for at in range(len(program.events[rank]))
        for events in PLANTS[name](program, rank, at)
    ]


@st.composite
def faults(draw: st.DrawFn) -> Fault:
    """Of the kinds of faults that the program can have, each as likely as the next."""
    program = draw(ANY)
    able: dict[str, Any] = {name: found for name in PLANTS if (found := planted(program, name))}
    return draw(st.sampled_from(able[draw(st.sampled_from(sorted(able)))]))
