"""The calls at which a value first goes wrong: those that read what one device has, and give what it has not.

From the wrong value the op streams of the ranks are followed back, along what each op reads.  A value is accounted for if it
assembles, under some layout, to any value of one device; ops in between that are written otherwise need no counterpart.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.utils._pytree import tree_map

from localtensor._util import lazy
from localtensor.errors.base import rank_names
from localtensor.testing.compare.divergence import Divergence, Findings, Sides
from localtensor.testing.compare.explain import (
    HELD_AS_PARAMETER,
    WRONG_VALUES,
    explanations,
    names_of,
    windows,
    windows_text,
)
from localtensor.testing.compare.find_layout import assemble_layout, expected_layout, layout_of_placements
from localtensor.testing.compare.op_stream import AxisType, Op, OpStream, ValueAt
from localtensor.testing.compare.op_values import (
    MOST_STEPS,
    SAME_ELEMENTS,
    OpValues,
    Step,
    Values,
    equal_tensors,
    slack_of,
    values_of,
)
from localtensor.testing.compare.setup_lines import SEEDS, setup_lines_of
from localtensor.testing.compare.watch import DROPOUT, FORWARD, Key, Observation, region_of

MOST_SUSPECTS = 3
OVER_A_DIM = (
    "sum", "nansum", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "any", "all", "logsumexp", "var", "var_mean",
    "std", "std_mean", "linalg_vector_norm", "_softmax", "_log_softmax", "prod",
)  # fmt: skip
"""Ops that put the elements along some dims together."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """A call that goes wrong, and why in words, if that is known; `cause` if that is the cause of all that follows.

    `source` is the observation whose reduction is missing, if the pending sum that the call reads is one.
    """

    op: Op
    reason: str | None = None
    cause: bool = False
    source: Key | None = None

    def __str__(self) -> str:
        return f"{self.op}{f': {self.reason}' if self.reason else ''}"


@dataclass(frozen=True, slots=True)
class OpSearch:
    """The search for what makes a value wrong, among the values `of` both sides' op streams."""

    of: OpValues
    findings: Findings

    def find(self) -> list[Suspect]:
        """The suspects, those that explain what follows first."""
        start = self._start()
        if start is None:
            return []
        right = self.of.own_match(start)
        scaled = right is not None and right.times != 1 and self.of.key.kind in HELD_AS_PARAMETER
        if right is not None and right.layout is not None and not scaled:
            return self._of_right_value(start)
        early = self._of_ranks(start) or self._moved(start)
        if early:
            return early
        found: dict[int, Suspect] = {}
        seen, todo, path = {start}, [start], []
        while todo and len(seen) < MOST_STEPS:
            made = self.of.made(todo.pop())
            if made is None:
                continue
            at, op, reads = made
            path.append(made)
            wrong = [values for values in reads if self.of.match(values) is None]
            if not wrong:
                found[at] = self._suspect(op, reads, start, path)
                found.update(self._added(found[at], reads))
            todo += [values for values in wrong if values not in seen]
            seen.update(wrong)
        if not found:  # what is read otherwise is not made here, and may be right: local indices, say
            wrong_reads = [[one for one in reads if self.of.match(one) is None] for _, _, reads in path]
            ends = zip(path, wrong_reads, strict=True)
            found = {at: Suspect(op) for (at, op, _), wrong in ends if not any(map(self.of.made, wrong))}
        part = self._over_a_part(path)
        every = [*part, *(found[at] for at in sorted(found) if not any(one.op is found[at].op for one in part))]
        return sorted(every, key=lambda one: not one.cause)[:MOST_SUSPECTS]

    def _of_right_value(self, start: Values) -> list[Suspect]:
        """What made a value that is right but pending: the op since which it is, and reductions over another group."""
        values, made = start, self.of.made(start)
        reduced: list[Suspect] = []
        for _ in range(MOST_STEPS):
            if made is None:
                break
            _, op, reads = made
            reduced += [Suspect(op, reason, cause=True) for reason in self._of_collective(op, reads)]
            before = [one for one in reads if one != values and self.of.is_pending(one)]
            if not before and (op.name in SAME_ELEMENTS or (len(reads) == 1 and self.of.match(reads[0]) is None)):
                before = reads[:1]
            following = self.of.made(before[0]) if before else None
            if following is None:
                break
            values, made = before[0], following
        if made is None:
            return reduced
        last = Suspect(made[1])
        return [*reduced, *(self._added(last, made[2]) or {0: last}).values()]

    def _added(self, suspect: Suspect, reads: Sequence[Values]) -> dict[int, Suspect]:
        """The calls whose gradients a backward pass adds, by their places in the stream, if that is what goes wrong."""
        if suspect.cause or not self.of.in_backward or suspect.op.name not in ("add", "add_") or len(reads) < 2:
            return {}
        made = [self.of.made(values) for values in reads]
        return {one[0]: Suspect(one[1]) for one in made if one is not None}

    def _of_ranks(self, start: Values) -> list[Suspect]:
        """The last op of each rank, if the ranks do not do the same."""
        last = [stream.made_by.get(value) for stream, value in zip(self.of.streams, start, strict=True)]
        each = [None if at is None else stream.ops[at] for stream, at in zip(self.of.streams, last, strict=True)]
        names = [None if op is None else op.name for op in each]
        ranks = [names.index(name) for name in dict.fromkeys(names) if name is not None]
        if len(set(names)) < 2:
            return []
        return [Suspect(op, f"on rank {rank}") for rank in ranks if (op := each[rank]) is not None][:MOST_SUSPECTS]

    def _start(self) -> Values | None:
        found = [self._start_on(rank, stream) for rank, stream in enumerate(self.of.streams)]
        return None if None in found else tuple(x for x in found if x is not None)

    def _start_on(self, rank: int, stream: OpStream) -> int | None:
        if self.of.key in stream.marks:
            return stream.marks[self.of.key]
        one = self.of.sides.ranks[rank].seen.get(self.of.key)
        if one is None or one.value.numel() < 2:
            return None
        return next(
            (i for i in reversed(range(len(stream.values))) if equal_tensors(stream.values[i], one.value)), None
        )

    def _moved(self, start: Values) -> list[Suspect]:
        """The ops that move the elements of a right value, if only such make the wrong one of it."""
        values, ops = start, []
        while self.of.own_match(values) is None:
            made = self.of.made(values)
            if made is None or made[1].name not in SAME_ELEMENTS or not made[2]:
                return []
            ops.append(made[1])
            values = made[2][-1 if made[1].name == "copy_" else 0]
        lines = {op.places[:1]: op for op in ops}
        return [Suspect(op) for op in reversed(lines.values())][:MOST_SUSPECTS]

    def _suspect(self, op: Op, reads: Sequence[Values], start: Values, path: Sequence[Step]) -> Suspect:
        causes = itertools.chain(
            ((one, None) for one in self._of_collective(op, reads)),
            self._of_reads(op, reads, start, path),
            ((one, None) for one in self._of_slices(op, reads)),
        )
        cause, source = next(causes, (None, None))
        return Suspect(op, cause, True, source) if cause else Suspect(op, next(self._of_result(op), None))

    def _of_collective(self, op: Op, reads: Sequence[Values]) -> Iterator[str]:
        match = self.of.match(reads[0]) if reads else None
        if op.group is None or match is None or match.layout is None:
            return
        over = self.of.axes_of(op.group)
        pending, cut = set(match.layout.pending), {i for i, one in enumerate(match.layout.axes) if one.kind == "S"}
        named = names_of(self.of.sides, over)
        if "reduce" in op.name and pending and over != pending:
            yield f"it is reduced over {named} instead of {names_of(self.of.sides, pending)}: the wrong group"
        if "reduce" in op.name and not pending and over and not over & cut and "scatter" not in op.name:
            yield f"it is reduced over {named}, along which it is whole: added once too often"
        if "reduce" in op.name and not pending and over & cut:
            yield f"it is reduced over {named}, along which the ranks have different parts: the wrong group"
        if "gather" in op.name and cut and not over & cut:
            yield f"it is gathered over {named} instead of {names_of(self.of.sides, cut)}: the wrong group"

    def _of_reads(
        self, op: Op, reads: Sequence[Values], start: Values, path: Sequence[Step]
    ) -> Iterator[tuple[str, Key | None]]:
        marks = {value: key for key, value in self.of.streams[0].marks.items() if key.kind == "output"}
        for values in reads:
            match = self.of.match(values)
            if match is not None and match.stale is not None:
                yield f"it reads a stale value, that of {match.stale}", None
            axes = [] if match is None else match.pending(self.of.means)
            if op.group is not None or not axes or values[0] in self.of.streams[0].declared:
                continue
            over = names_of(self.of.sides, axes)
            if self.of.agree(start, axes):  # a reduction comes later
                later = next(
                    (one for _, one, _ in path if one.group is not None and self.of.axes_of(one.group) & set(axes)),
                    None,
                )
                if later is not None:
                    alone = f"it reads a pending sum, which is added up only later, in {later}"
                    both = f"what is whole along {over} meets a pending sum, and is counted by each rank in {later}"
                    yield both if len(reads) > 1 else alone, None
                continue
            if alone := self._made_on_some_ranks(values):
                yield f"replicas along {over} differ: {alone}", None
                continue
            made = self.of.made(values)
            of = f", of {made[1].name}, {made[1].places[0]}" if made is not None and made[1].places else ""
            yield f"an all_reduce over {over} is missing: it reads a pending sum{of}", marks.get(values[0])

    def _made_on_some_ranks(self, values: Values) -> str:
        """The op that has made a value on some ranks, where the others still have what they began with; else empty.

        Zeros there and the value here add up to it, as the parts of a sum do.
        """
        places = [stream.made_by.get(value) for stream, value in zip(self.of.streams, values, strict=True)]
        ranks = [rank for rank, at in enumerate(places) if at is not None]
        if not 0 < len(ranks) < len(places):
            return ""
        op = self.of.streams[ranks[0]].ops[places[ranks[0]] or 0]
        numbers = self.of.sides.numbers or range(len(places))
        named = ", ".join(map(str, (op.name, *op.places[:1])))
        return f"{named} has run on {rank_names([numbers[rank] for rank in ranks])} alone"

    def _of_slices(self, op: Op, reads: Sequence[Values]) -> Iterator[str]:
        """By what the result is a slice of; not of rows, which ranks may put together as they like."""
        if op.group is not None or not reads or not op.gives or self.of.is_cut_up(op, reads[0]):
            return
        held = self.of.given(op)
        for want, stale, *_ in self.of.wanted if held is not None else ():
            dims = [dim for dim in range(want.dim()) if dim or not self.of.sides.batch_axes]
            found = [windows(x, want, slack_of(want), dims) for x in held or ()]
            if not stale and all(one is not None for one in found):
                yield windows_text([one for one in found if one is not None])

    def _of_result(self, op: Op) -> Iterator[str]:
        """By what the op of the same name gives on one device."""
        held, reference = self.of.given(op), self.of.sides.reference.ops
        same = (
            [one for one in reference.ops if (one.name, one.number) == (op.name, op.number)]
            if reference is not None
            else []
        )
        want = reference.values[same[0].gives[0]] if reference is not None and same and same[0].gives else None
        if held is not None and want is not None and want.dim() == held[0].dim():
            said = next(
                explanations(
                    self.of.sides, self.findings, self.of.key._replace(kind="call"), held, want, slack_of(want)
                )
            )
            if said != WRONG_VALUES:
                yield said

    def _over_a_part(self, path: Sequence[Step]) -> list[Suspect]:
        """Ops that put the elements along a dim together, of which each rank has a part, with no reduction after them."""
        found = []
        for _, op, reads in path:
            layout = self.of.likely_layout(reads[0]) if op.name in OVER_A_DIM and reads else None
            if layout is None:
                continue
            held = self.of.held(reads[0])[0]
            dims = {dim % max(held.dim(), 1) for dim in op.dims} if op.dims else set(range(held.dim()))
            axes = [i for i, one in enumerate(layout.axes) if one.kind == "S" and one.dim in dims]
            axes = [axis for axis in axes if list(self.of.sides.mesh)[axis] not in self.of.sides.batch_axes]
            if axes and not self.of.is_reduced(op):
                over = names_of(self.of.sides, axes)
                found.append(
                    Suspect(
                        op,
                        f"an all_reduce over {over} is missing: each rank takes the {op.name.strip('_')} of its own part",
                        cause=True,
                    )
                )
        return found


@dataclass(frozen=True, slots=True)
class CloserLook:
    """The divergence, with the cause if one was found; the calls that go wrong, and those that set the module up.

    `collective` is the last one of the first rank before them, in the part of the run that was recorded.
    """

    divergence: Divergence
    calls: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    collective: str = ""


def wrong_dispatch(sides: Sides, op: Op) -> str:
    """What is wrong with DTensor's own dispatch of a call, tested on that call; empty if it is right, or not DTensor's."""
    made = op.dispatch
    if made is None:
        return ""
    numbers = sides.numbers or range(len(sides.ranks))
    if not {*made.ranks} <= {*numbers}:  # its mesh has ranks that are not compared here
        return ""
    streams = [sides.ranks[numbers.index(rank)].ops for rank in made.ranks]
    same = [
        (stream, one.dispatch)
        for stream in streams
        for one in (stream.ops if stream is not None else ())
        if (one.name, one.number) == (op.name, op.number)
    ]
    if len(same) < len(made.ranks):
        return ""
    layouts = iter(made.layouts)

    def whole(at: Any, *others: Any) -> Any:
        if not isinstance(at, ValueAt):
            return at
        placements = next(layouts)
        held = [stream.values[one.index] for (stream, _), one in zip(same, others, strict=True) if stream is not None]
        (layout,) = layout_of_placements(Observation(held[0], placements), len(made.sizes)) or (None,)
        assembled = None if layout is None else assemble_layout(held, made.sizes, layout)
        if assembled is None:
            raise ValueError(f"{placements} is not put together")
        return assembled

    given = [(one.args, one.kwargs) for _, one in same if one is not None]
    try:
        args, kwargs = tree_map(whole, given[0], *given)
    except (ValueError, TypeError):  # the ranks' calls differ, or a placement has no layout here, as P(max)
        return ""
    lazy.find_strategies()
    single_call = importlib.import_module("strategies.sweep.causes.single_call")  # it stands above this package
    said: str = single_call.wrong_call(made.func, args, kwargs, made.layouts, made.sizes)
    return said


def closer_look(sides: Sides, findings: Findings, found: Divergence) -> CloserLook:
    """What a second run of both programs, which recorded the region of the divergence, says of it."""
    values = values_of(sides, found.key)
    suspects = OpSearch(values, findings).find() if values is not None else []
    cause = next((one for one in suspects if one.cause), None)
    if cause is not None and cause.reason is not None:
        missing = "is missing" in found.what and cause.op.group is not None
        if found.what == WRONG_VALUES or missing:
            found = replace(found, what=cause.reason)
        if cause.source is not None and cause.source in findings.layouts and found.what == cause.reason:
            layout = findings.layouts[cause.source]
            expected = expected_layout(sides, findings.layouts, cause.source, layout)
            place = sides.ranks[0].seen[cause.source].place
            found = replace(found, key=cause.source, place=place, layout=str(layout), expected=expected)
    if said := next(filter(None, (wrong_dispatch(sides, one.op) for one in suspects)), ""):
        found = replace(found, what=said)
    of_parameter = region_of(found.key, {}).phase != FORWARD and found.key.kind != "gradient of the output"
    tied = [name for name, first in sides.reference.tied.items() if first == found.key.name]
    lines: list[str] = []
    setup = sides.ranks[0].setup
    own = setup.get(SEEDS if found.key.kind == DROPOUT else found.key.name, ())  # of the module itself
    if of_parameter or own or not any(one.op.places for one in suspects):
        each = [own] if found.key.kind == DROPOUT else [setup_lines_of(setup, name) for name in (found.key.name, *tied)]
        lines = list(dict.fromkeys(line for some in each for line in some))
    before = "" if values is None else _collective_before(values, [one.op for one in suspects])
    calls = tuple(f"{one}{_types_text(one.op.typed, sides.mesh)}" for one in suspects)
    return CloserLook(found, calls, tuple(lines), before)


def _types_text(typed: Sequence[AxisType], mesh: Mapping[str, int]) -> str:
    """The types that were claimed for a result, with the mesh's names of the axes.

    >>> _types_text([AxisType(((2, 1),), "default_pg", "R"), AxisType(((4, 2),), "", "S(0)")], {"dp": 4, "tp": 2})
    '; typed R along tp, S(0) along dp'
    """
    stride = 1
    names: dict[tuple[tuple[int, int], ...], str] = {}
    for name, size in reversed(list(mesh.items())):
        names[((size, stride),)] = name
        stride *= size
    words = ", ".join(f"{one.type} along {names.get(one.axis, one.name.removeprefix('mesh_'))}" for one in typed)
    return f"; typed {words}" if words else ""


def _collective_before(values: OpValues, ops: Sequence[Op]) -> str:
    """The last collective that the first rank calls before the first of these ops, with its axes and line; empty if none."""
    done = values.streams[0].ops
    at = min((i for i, one in enumerate(done) if any(one is other for other in ops)), default=0)
    last = next((one for one in reversed(done[:at]) if one.group is not None), None)
    if last is None:
        return ""
    name, _, lines = str(last).partition(", ")
    return f"{name} over {names_of(values.sides, values.axes_of(last.group or ()))}{f', {lines}' if lines else ''}"
