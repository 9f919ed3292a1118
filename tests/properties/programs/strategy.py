"""A Hypothesis strategy of whole rank programs that are right by construction.

All ranks launch in one global order, wait later, and read their results later still, so that none waits for ever.
Programs shrink in this order: fewer ranks, fewer groups, fewer ops, an all-reduce in place of another op, the sum,
int64, smaller shapes, no async work, no delays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from localtensor.errors.base import Refusal
from tests.properties.programs.model import (
    FUNCTIONAL,
    IN_PLACE,
    KINDS,
    MESSAGES,
    OBJECTS,
    REDUCING,
    ROOTED,
    SPLITS,
    Event,
    Step,
)
from tests.properties.programs.program import RankProgram

RANKS, MOST_GROUPS, MOST_OPS = (1, 2, 3, 4), 3, 8
DTYPES = ("int64", "float64", "int32", "float32", "uint8")
"""Of the tensors that are communicated."""
OPS = ("sum", "max", "min", "product")
OPS_OF = {"float": OPS, "int": (*OPS, "band", "bor", "bxor"), "uint": (*OPS, "band", "bor", "bxor")}
"""Reductions by the kind of dtype; gloo has no average."""
LOCAL = "local"
"""An op without communication."""


class NoProgram(Refusal, call="rank_programs", values="{argument}={value!r}"):
    """Invalid arguments of `rank_programs`."""


def rank_programs(
    max_ops: int = MOST_OPS,
    *,
    ranks: int | Sequence[int] = RANKS,
    kinds: Sequence[str] = (*KINDS, LOCAL),
    for_gloo: bool = True,
    closed: bool = True,
) -> st.SearchStrategy[RankProgram]:
    """Programs of 1 to `max_ops` collectives, messages and local ops; see `RankProgram`.

    ranks      the possible numbers of ranks, the simplest first; or one number.
    kinds      of ops: names of torch.distributed's collectives, "permute", "message" (a send and its receive),
               "batch" (`batch_isend_irecv`) and "local"; the simplest first.
    for_gloo   whether programs use only what gloo supports: it has no average, some works have no future, and some
               are never complete before they are waited for.
    closed     whether a program destroys the groups that it made, after a barrier.

    Raises `NoProgram`, an error of this project, for numbers below 1 and for unknown kinds.
    """
    counts = (ranks,) if isinstance(ranks, int) else tuple(ranks)
    if isinstance(max_ops, bool) or not isinstance(max_ops, int) or max_ops < 1:
        raise NoProgram("max_ops", max_ops, "a program has at least one op", "Give 1 or more.")
    if not counts or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in counts):
        remedy = "Give counts of 1 or more, as in ranks=(2, 3)."
        raise NoProgram("ranks", ranks, "a program has at least one rank", remedy)
    unknown = [kind for kind in kinds if kind not in (*KINDS, LOCAL)]
    if unknown or not kinds:
        problem = f"no op is called {unknown[0]!r}" if unknown else "there is no kind to draw"
        raise NoProgram("kinds", tuple(kinds), problem, f"Choose from {', '.join((*KINDS, LOCAL))}.")
    return _programs(max_ops, counts, tuple(kinds), for_gloo, closed)


@st.composite
def _programs(
    draw: st.DrawFn, max_ops: int, ranks: tuple[int, ...], kinds: tuple[str, ...], for_gloo: bool, closed: bool
) -> RankProgram:
    everyone = tuple(range(draw(st.sampled_from(ranks))))
    some = st.sets(st.sampled_from(everyone), min_size=1).map(lambda chosen: tuple(sorted(chosen)))
    groups = (everyone, *draw(st.lists(some, max_size=MOST_GROUPS)))
    if draw(st.booleans()):  # a few repeated kinds interact in more ways than all kinds
        kinds = tuple(draw(st.lists(st.sampled_from(kinds), min_size=2, max_size=2)))
    drawn = draw(st.lists(_steps(groups, kinds, for_gloo), min_size=1, max_size=max_ops))
    steps = [replace(step, id=number) for number, step in enumerate(drawn)]
    timelines = [draw(_timeline(rank, steps, for_gloo)) for rank in everyone]
    made = [Event("group", how=str(g)) for g in range(1, len(groups))]
    if not (closed and made):
        return RankProgram(groups, tuple((*made, *timeline) for timeline in timelines))
    own = [" ".join(f"g{g}," for g in range(1, len(groups)) if rank in groups[g]) for rank in everyone]
    ends = [Event("close", how=names) for names in own]
    return RankProgram(groups, tuple((*made, *timeline, end) for timeline, end in zip(timelines, ends)))


@st.composite
def _steps(draw: st.DrawFn, groups: Sequence[tuple[int, ...]], kinds: Sequence[str], for_gloo: bool) -> Step:
    group = draw(st.integers(0, len(groups) - 1))
    members = groups[group]
    able = [kind for kind in kinds if kind not in MESSAGES or len(members) > 1] or ["barrier"]
    kind = draw(st.sampled_from(able))
    feed = (draw(st.integers(1, 9)), draw(st.integers(0, 9)))
    if kind in (LOCAL, "barrier"):
        return Step(0, kind, group, members, feed=feed)
    if kind in OBJECTS:
        return Step(0, kind, group, members, feed=feed, root=draw(st.sampled_from(members)))
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.sampled_from((1, 2, 0, 3))), draw(st.integers(1, 2))
    step = Step(0, kind, group, members, dtype=dtype, shape=shape, feed=feed)
    if kind in REDUCING:
        ops = OPS_OF[dtype.rstrip("0123456789")]
        step = replace(step, op=draw(st.sampled_from(ops if for_gloo or "float" not in dtype else (*ops, "avg"))))
    if kind in ROOTED:
        step = replace(step, root=draw(st.sampled_from(members)))
    if kind in IN_PLACE:
        step = replace(step, layout=draw(st.sampled_from(("plain", "transposed", "window"))))
    if kind in SPLITS:
        rows = st.tuples(*(st.integers(0, 2) for _ in members))
        step = replace(step, splits=draw(st.tuples(*(rows for _ in members))))
    if kind == "permute":
        step = replace(step, order=tuple(draw(st.permutations(range(len(members))))))
    if kind in MESSAGES:
        between = st.permutations(members).map(lambda turned: (turned[0], turned[1]))
        pairs = draw(st.lists(between, min_size=1, max_size=1 if kind == "message" else 4))
        step = replace(step, pairs=tuple(pairs), tag=draw(st.integers(0, 1)))
    return step


@st.composite
def _on_one_rank(draw: st.DrawFn, step: Step) -> Step:
    """The step as one rank calls it: synchronous, asynchronous, or by a functional collective."""
    styles = ["sync", "async", *(["functional"] if step.kind in FUNCTIONAL and step.layout != "transposed" else [])]
    styles = ["functional"] if step.kind == "permute" else ["sync"] if step.kind in OBJECTS else styles
    style = draw(st.sampled_from(styles))
    if style == "functional":
        dim = draw(st.integers(0, 1)) if step.kind in ("all_gather_into_tensor", "reduce_scatter_tensor") else 0
        return replace(step, style=style, dim=dim, layout="plain")
    return replace(step, style=style)


@st.composite
def _timeline(draw: st.DrawFn, rank: int, steps: Sequence[Step], for_gloo: bool) -> tuple[Event, ...]:
    """The events of one rank.  An event's time is that of its step's launch or later."""
    timed: list[tuple[float, Event]] = []
    for step in steps:
        if rank not in step.involved:
            continue
        if step.kind == LOCAL:
            timed.append((float(step.id), Event("local", how=str(step.feed[0] + 1))))
            continue
        mine, now = draw(_on_one_rank(step)), float(step.id)
        timed.append((now, Event("launch", mine)))
        if mine.style == "async":
            ways = ["wait", *([] if for_gloo else ["poll"]), *([] if for_gloo or step.kind in MESSAGES else ["future"])]
            now += draw(st.integers(0, 3)) + 0.3
            timed.append((now, Event("wait", mine, "wait" if step.kind == "batch" else draw(st.sampled_from(ways)))))
        elif mine.style == "functional" and draw(st.booleans()):
            now += draw(st.integers(0, 3)) + 0.3
            timed.append((now, Event("wait", mine, "functional")))
        if step.gets(rank):
            timed.append((now + draw(st.integers(0, 2)) + 0.4, Event("mix", mine)))
    events = [event for _, event in sorted(timed, key=lambda at: at[0])]
    for i in range(1, len(events)):
        if _may_swap(events[i - 1], events[i]) and draw(st.booleans()):
            events[i - 1], events[i] = events[i], events[i - 1]
    return tuple(events)


def _may_swap(first: Event, second: Event) -> bool:
    """Whether two launches may be exchanged on one rank: neither blocks, and they share no channel."""
    if not first.what == second.what == "launch" or first.call.blocks or second.call.blocks:
        return False
    return not first.call.channels() & second.call.channels()
