"""Hypothesis draws rank programs that are right by construction, and plants one fault in them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from hypothesis import strategies as st

from tests.laws.rank_programs import (
    COLLECTIVES,
    FUNCTIONAL,
    IN_PLACE,
    KINDS,
    MESSAGES,
    OBJECTS,
    REDUCING,
    ROOTED,
    SPLITS,
    Event,
    Program,
    Step,
)

MOST_RANKS, MOST_GROUPS, MOST_STEPS = 6, 3, 10
DTYPES = ("int64", "float64", "int32", "float32", "uint8")
OPS = ("sum", "max", "min", "product")
OPS_OF = {"float": (*OPS, "avg"), "int": (*OPS, "band", "bor", "bxor"), "uint": (*OPS, "band", "bor", "bxor")}


@st.composite
def programs(draw: st.DrawFn, kinds: Sequence[str] = KINDS, min_ranks: int = 1, max_ranks: int = MOST_RANKS) -> Program:
    """All ranks launch in one global order, wait later, and look at what they got later still: so none waits for ever."""
    ranks = draw(st.integers(min_ranks, max_ranks))
    everyone = tuple(range(ranks))
    some = st.sets(st.sampled_from(everyone), min_size=1).map(lambda chosen: tuple(sorted(chosen)))
    groups = (everyone, *draw(st.lists(some, max_size=MOST_GROUPS)))
    if draw(st.booleans()):  # the same few kinds again and again meet in more ways than all of them
        kinds = Random(f"{groups}/{draw(st.integers(0, 2**32))}").sample(kinds, 2)
    many, seed = draw(st.integers(1, MOST_STEPS)), draw(st.integers(0, 2**32))
    steps = [drawn_step(s, groups, kinds, Random(f"{seed}/{s}/{many}/{groups}")) for s in range(many)]
    return Program(groups, tuple(tuple(draw(timeline(rank, groups, steps))) for rank in everyone))


def drawn_step(id: int, groups: Sequence[tuple[int, ...]], kinds: Sequence[str], dice: Random) -> Step:  # noqa: A002
    """By dice, of which Hypothesis draws the seed: its own choices come in long rows of the same."""
    group = dice.randrange(len(groups))
    members = groups[group]
    kind = dice.choice([kind for kind in kinds if kind not in MESSAGES or len(members) > 1] or ["barrier"])
    dtype = dice.choice(DTYPES)
    step = Step(id, kind, group, members, dtype=dtype, shape=(dice.choice((0, 1, 2, 2, 3)), dice.randint(1, 2)),
                feed=(dice.randint(1, 9), dice.randint(0, 10)))  # fmt: skip
    if kind in REDUCING:
        step = replace(step, op=dice.choice(OPS_OF[dtype.rstrip("0123456789")]))
    if kind in ROOTED:
        step = replace(step, root=dice.choice(members))
    if kind in IN_PLACE:
        step = replace(step, layout=dice.choice(("plain", "plain", "transposed", "window")))
    if kind in SPLITS:
        step = replace(step, splits=tuple(tuple(dice.randint(0, 2) for _ in members) for _ in members))
    if kind == "permute":
        step = replace(step, order=tuple(dice.sample(range(len(members)), len(members))))
    if kind in MESSAGES:
        many = 1 if kind == "message" else dice.randint(1, 4)
        pairs = tuple((pair[0], pair[1]) for pair in (dice.sample(members, 2) for _ in range(many)))
        step = replace(step, pairs=pairs, tag=dice.randint(0, 1))
    return step


@st.composite
def as_seen(draw: st.DrawFn, step: Step) -> Step:
    """The step as one rank makes it: at once, to be waited for, or by a functional collective."""
    styles = ["sync", "async", *(["functional"] if step.kind in FUNCTIONAL and step.layout != "transposed" else [])]
    styles = ["functional"] if step.kind == "permute" else ["sync"] if step.kind in OBJECTS else styles
    style = draw(st.sampled_from(styles))
    if style == "functional":
        dim = draw(st.integers(0, 1)) if step.kind in ("all_gather_into_tensor", "reduce_scatter_tensor") else 0
        return replace(step, style=style, dim=dim, layout="plain")
    return replace(step, style=style)


@st.composite
def timeline(draw: st.DrawFn, rank: int, groups: Sequence[tuple[int, ...]], steps: Sequence[Step]) -> list[Event]:
    """The events of one rank.  An event's time is that of its step's launch or later."""
    timed: list[tuple[float, Event]] = []
    for step in steps:
        if rank not in step.involved:
            continue
        mine, now = draw(as_seen(step)), float(step.id)
        timed.append((now, Event("launch", mine)))
        if mine.style == "async":
            ways = ["wait", "wait", "poll"] + ([] if step.kind in MESSAGES else ["future"])
            now += draw(st.integers(0, 3)) + 0.3
            timed.append((now, Event("wait", mine, "wait" if step.kind == "batch" else draw(st.sampled_from(ways)))))
        elif mine.style == "functional" and draw(st.booleans()):
            now += draw(st.integers(0, 3)) + 0.3
            timed.append((now, Event("wait", mine, "functional")))
        if step.gets(rank):
            timed.append((now + draw(st.integers(0, 2)) + 0.4, Event("mix", mine)))
        if draw(st.booleans()):
            timed.append((now + 0.5, Event("local", how=str(draw(st.integers(2, 9))))))
    events = [event for _, event in sorted(timed, key=lambda at: at[0])]
    for i in range(1, len(events)):
        if may_swap(events[i - 1], events[i]) and draw(st.booleans()):
            events[i - 1], events[i] = events[i], events[i - 1]
    return [*(Event("group", how=str(g)) for g in range(1, len(groups))), *events]


def may_swap(first: Event, second: Event) -> bool:
    """Neither call waits, and they have no partner in common: their order is the rank's own affair."""
    if not first.what == second.what == "launch" or first.step.blocks or second.step.blocks:
        return False
    return not first.step.channels() & second.step.channels()


# -- faults


@dataclass(frozen=True)
class Fault:
    """A program with one fault, and who has it: the rank, and the places of its events in the faulty program."""

    name: str
    program: Program
    rank: int


Plant = Callable[[Program, int, int], Iterator[Sequence[Event]]]  # program, rank, place of an event: its events instead


def without(events: Sequence[Event], id: int, *whats: str) -> list[Event]:  # noqa: A002
    return [event for event in events if event.step is None or event.step.id != id or event.what not in whats]


def drop(program: Program, rank: int, at: int) -> Iterator[Sequence[Event]]:
    events = program.ranks[rank]
    if events[at].what == "launch":
        yield without(events, events[at].step.id, "launch", "wait", "mix")


def swap(program: Program, rank: int, at: int) -> Iterator[Sequence[Event]]:
    """This launch changes places with the next; what follows from a launch still comes after it."""
    events = list(program.ranks[rank])
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


def altered(change: Callable[[Step, Program, int], Iterator[Step]]) -> Plant:
    """One rank makes another call of it."""

    def plant(program: Program, rank: int, at: int) -> Iterator[Sequence[Event]]:
        events = program.ranks[rank]
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


def other_shape(step: Step, program: Program, rank: int) -> Iterator[Step]:
    if step.kind not in ("barrier", *OBJECTS):
        rows, columns = step.shape
        yield (
            replace(step, shape=(rows, 3 - columns))
            if step.kind in SPLITS
            else replace(step, shape=(rows + 1, columns))
        )


def other_dtype(step: Step, program: Program, rank: int) -> Iterator[Step]:
    if step.kind not in ("barrier", *OBJECTS) and step.op not in ("avg", "band", "bor", "bxor"):
        yield replace(step, dtype=DTYPES[(DTYPES.index(step.dtype) + 1) % len(DTYPES)])


def other_op(step: Step, program: Program, rank: int) -> Iterator[Step]:
    if step.kind in REDUCING:
        yield replace(step, op="max" if step.op != "max" else "sum")


def other_root(step: Step, program: Program, rank: int) -> Iterator[Step]:
    if step.kind in ROOTED and len(step.members) > 1:
        yield replace(step, root=step.members[step.members.index(step.root) - 1])


def other_kind(step: Step, program: Program, rank: int) -> Iterator[Step]:
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


def other_splits(step: Step, program: Program, rank: int) -> Iterator[Step]:
    if step.kind in SPLITS:
        me = step.members.index(rank)
        row = (step.splits[me][0] + 1, *step.splits[me][1:])
        yield replace(step, splits=(*step.splits[:me], row, *step.splits[me + 1 :]))


def other_tag(step: Step, program: Program, rank: int) -> Iterator[Step]:
    if step.kind in MESSAGES:
        yield replace(step, tag=step.tag + 2)


def other_group(step: Step, program: Program, rank: int) -> Iterator[Step]:
    if step.kind in ("barrier", "all_gather_object"):
        others = (g for g, members in enumerate(program.groups) if rank in members and g != step.group)
        yield from (replace(step, group=g, members=program.groups[g]) for g in others)


def extra(program: Program, rank: int, at: int) -> Iterator[Sequence[Event]]:
    events = program.ranks[rank]
    if events[at].what == "launch" and events[at].step.style == "sync":
        yield [*events[:at], Event("launch", replace(events[at].step, id=99)), *events[at:]]


def drop_wait(program: Program, rank: int, at: int) -> Iterator[Sequence[Event]]:
    events = program.ranks[rank]
    if events[at].what == "wait" and events[at].how != "functional":
        yield without(events, events[at].step.id, "wait")
        yield without(events, events[at].step.id, "wait", "mix")


def flight(program: Program, rank: int, at: int) -> Iterator[int]:
    """The places between the launch of an async call and its wait."""
    events = program.ranks[rank]
    if events[at].what == "launch" and events[at].step.style == "async":
        wait = next(i for i, e in enumerate(events) if e.what == "wait" and e.step == events[at].step)
        yield from {at + 1, wait}


def read_in_flight(program: Program, rank: int, at: int) -> Iterator[Sequence[Event]]:
    events = program.ranks[rank]
    step = events[at].step
    for place in flight(program, rank, at):
        if step.gets(rank) and not (step.kind == "broadcast" and rank == step.root):
            yield [*events[:place], Event("read", step), *events[place:]]


def write_in_flight(program: Program, rank: int, at: int) -> Iterator[Sequence[Event]]:
    events = program.ranks[rank]
    for place in flight(program, rank, at):
        if events[at].step.brought(rank) is not None:
            yield [*events[:place], Event("write", events[at].step), *events[place:]]


def leave(program: Program, rank: int, at: int) -> Iterator[Sequence[Event]]:
    yield [*program.ranks[rank][:at], Event("return")]


def throw(program: Program, rank: int, at: int) -> Iterator[Sequence[Event]]:
    yield [*program.ranks[rank][:at], Event("raise"), *program.ranks[rank][at:]]


def swap_groups(program: Program, rank: int, at: int) -> Iterator[Sequence[Event]]:
    events = list(program.ranks[rank])
    if at + 1 < len(events) and events[at].what == events[at + 1].what == "group":
        events[at], events[at + 1] = events[at + 1], events[at]
        yield events


def drop_group(program: Program, rank: int, at: int) -> Iterator[Sequence[Event]]:
    """A group that the rank does not use: it is not in it, say."""
    events = program.ranks[rank]
    used = {event.step.group for event in events if event.step is not None}
    if events[at].what == "group" and int(events[at].how) not in used:
        yield [*events[:at], *events[at + 1 :]]


PLANTS: dict[str, Plant] = {
    "drop": drop, "swap": swap, "shape": altered(other_shape), "dtype": altered(other_dtype), "op": altered(other_op),
    "root": altered(other_root), "kind": altered(other_kind), "splits": altered(other_splits), "tag": altered(other_tag),
    "group": altered(other_group), "extra": extra, "drop_wait": drop_wait, "read": read_in_flight, "write": write_in_flight,
    "leave": leave, "raise": throw, "swap_groups": swap_groups, "drop_group": drop_group,
}  # fmt: skip


def planted(program: Program, name: str) -> list[Fault]:
    """The program with this fault, at every place where it can have it."""
    return [
        Fault(name, program.changed(rank, events), rank)
        for rank in range(len(program.ranks))
        for at in range(len(program.ranks[rank]))
        for events in PLANTS[name](program, rank, at)
    ]


@st.composite
def faults(draw: st.DrawFn) -> Fault:
    """Of the kinds of faults that the program can have, each as likely as the next."""
    program = draw(programs(min_ranks=2))
    able: dict[str, Any] = {name: found for name in PLANTS if (found := planted(program, name))}
    return draw(st.sampled_from(able[draw(st.sampled_from(sorted(able)))]))
