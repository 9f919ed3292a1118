"""Expansion of one-axis lines to a whole mesh: only combinations that are right by construction, the cheapest first.

The axes are expanded from left to right, as tensors are distributed.  The first axis takes a line of the whole call.
That gives each coordinate of the axis a call of its own, on its pieces; the second axis takes a line that is offered
for every one of these calls, with uneven and empty pieces; and so on.  So the ranks of the last axis together hold what
the axis before it needs: `localtensor.layout.shards.assemble` assembles tensors in that order.

Partials of two kinds on one tensor (P(sum), P(max)) would be right in that order only.  A spec has no order in which
its axes are reduced, so such combinations are excluded, unless the two kinds commute (`alpha_beta.commute`).

The search is by cost: it continues the cheapest prefix first, so the first combination found is the cheapest.  It looks
at no more than `limit` prefixes.  If they do not suffice, it completes the cheapest one, and `Found.unseen` says so.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from localtensor.layout import Mesh, Network, Spec, local_shapes, shard_cut, short, shorts
from strategies.model.rule import Call
from strategies.ops.semantics.local_call import LocalCall, LocalCallKey, distinct_local_calls, why_inapplicable
from strategies.ops.semantics.rule_registry import OptionalPlacements, OwnArguments, PlacementRule, RuleQuery
from strategies.planner.steps.alpha_beta import AxisStep, MovedTensor, partials_commute, redistribute_axis
from strategies.propagation.symbolic import examples

Grid = tuple[tuple[Placement, ...] | None, ...]
"""For each tensor its placements by axis; None for a result that is masked or is no tensor."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """A combination that was not chosen: the placements of inputs and results, and its cost, or why it is excluded."""

    inputs: Grid
    outputs: Grid
    seconds: float | None = None
    reason: str = ""

    def __str__(self) -> str:
        why = self.reason or f"{microseconds(self.seconds or 0.0)}"
        return f"{grid_text(self.inputs)} -> {grid_text(self.outputs)}: {why}"


@dataclass(frozen=True, slots=True)
class Propagation:
    """How a call runs on a mesh.

    `given` are the specs of the call's tensors by leaf number, `inputs` those that they are redistributed to, and
    `outputs` those of its results, None for one that is masked or no tensor.  `steps` are the redistribution steps of
    each input, `seconds` their cost by the model of `strategies.planner.steps.alpha_beta`.  Each rank runs
    `local_call(rank)` on its pieces.
    """

    call: Call
    mesh: Mesh
    given: tuple[Spec, ...]
    inputs: tuple[Spec, ...]
    outputs: tuple[Spec | None, ...]
    steps: tuple[tuple[AxisStep, ...], ...]
    seconds: float
    calls: tuple[Call, ...]
    whose: tuple[int, ...]
    """By rank number, which of `calls` it runs."""
    others: tuple[Alternative, ...]
    source: str
    """The rule, its reason and its file and line."""
    unseen: str = ""
    """A note that the search was cut short; else empty."""

    @property
    def redistributes(self) -> tuple[int, ...]:
        """The inputs, by leaf number, that are redistributed."""
        return tuple(leaf for leaf, steps in enumerate(self.steps) if steps)

    def local_call(self, rank: int) -> Call:
        """The call that the rank runs, with a `Leaf` for its piece of each tensor.  Raises `BadMesh` for an unknown rank."""
        self.mesh.coordinate(rank)
        return self.calls[self.whose[rank]]

    def local_shapes(self, output: int = 0) -> tuple[tuple[int, ...], ...]:
        """The shape of each rank's piece of one result, by rank number; none where it is masked."""
        spec = self.outputs[output]
        return () if spec is None else tuple(local_shapes(spec))

    def on(self, mesh: Mesh) -> Propagation:
        """The same propagation on a mesh of the same sizes with other axis names."""
        if mesh == self.mesh:
            return self

        given, inputs = (tuple(replace(spec, mesh=mesh) for spec in specs) for specs in (self.given, self.inputs))
        outputs = tuple(spec and replace(spec, mesh=mesh) for spec in self.outputs)
        return replace(self, mesh=mesh, given=given, inputs=inputs, outputs=outputs)

    def explain(self, others: int = 5) -> str:
        """The choice in a few lines, with at most `others` of the alternatives."""
        lines = [f"{self.call.op} on {self.mesh}, {microseconds(self.seconds)}, by {self.source}"]
        for leaf, (given, want, steps) in enumerate(zip(self.given, self.inputs, self.steps, strict=True)):
            lines.append(f"  input {leaf}: {given!r}" + (f", wanted {_layout_text(want)}" if steps else ""))
            names = self.mesh.names
            lines += [f"    {step}".replace(f"axis {step.axis}:", f"{names[step.axis]}:", 1) for step in steps]
        for number, spec in enumerate(self.outputs):
            lines.append(f"  output {number}: {spec!r}" if spec else f"  output {number}: none")
        if len(self.calls) > 1:
            lines.append(f"  the ranks make {len(self.calls)} different calls")
        if self.others[:others]:
            lines.append("  not chosen:")
            lines += [f"    {other}" for other in self.others[:others]]
        if len(self.others) > others:
            lines.append(f"    and {len(self.others) - others} more")
        return "\n".join([*lines, *([f"  {self.unseen}"] if self.unseen else [])])

    def __str__(self) -> str:
        return self.explain()


def _layout_text(spec: Spec) -> str:
    return ", ".join(f"{name}:{short(p)}" for name, p in zip(spec.mesh.names, spec.placements, strict=True))


def microseconds(seconds: float) -> str:
    """`12.3 us`; nothing is `free`."""
    return f"{seconds * 1e6:.1f} us" if seconds else "free"


def grid_text(grid: Sequence[tuple[Placement, ...] | None]) -> str:
    """`(S(0), R), -`: the placements of each tensor by axis, without brackets on a mesh of one axis."""
    return ", ".join("-" if row is None else f"({shorts(row)})" if len(row) > 1 else shorts(row) for row in grid)


LIMIT = 512
"""The default for the largest number of prefixes that a search looks at."""
MAX_ALTERNATIVES = 32
"""The largest number of alternatives of each kind that are kept with an answer."""

Pair = tuple[OptionalPlacements, OptionalPlacements]
LineSource = Callable[[RuleQuery, int], tuple[PlacementRule, ...]]
"""The lines that a rule has for one call on an axis of so many ranks, whether or not they fit."""


@dataclass(frozen=True, slots=True)
class ExpansionProblem:
    """One call on a mesh: the placements of its tensors, which of them must not move, and the lines of its rule."""

    whole: LocalCall
    sizes: tuple[int, ...]
    given: tuple[tuple[Placement, ...], ...]
    written: tuple[tuple[int, int | None], ...]
    """The tensors that the call writes to, each with the number of the result that it becomes."""
    offer: LineSource
    own: OwnArguments
    network: Network
    movable: bool = False
    """Whether written tensors may move all the same: to find out where they should have been."""


@dataclass(frozen=True, slots=True)
class PartialExpansion:
    """A line for each of the first axes, with the steps, the pieces and the cost that follow from them."""

    lines: tuple[PlacementRule, ...]
    held: tuple[MovedTensor, ...]
    steps: tuple[tuple[AxisStep, ...], ...]
    pieces: tuple[LocalCall, ...]
    seconds: float

    @property
    def inputs(self) -> Grid:
        return _grid([line.inputs for line in self.lines], len(self.held))

    @property
    def outputs(self) -> Grid:
        return _grid([line.outputs for line in self.lines], len(self.lines[0].outputs) if self.lines else 0)

    @property
    def order(self) -> tuple[float, int, int, str]:
        """The sort key: cost, then fewer redistribution steps, then more sharded results, then the text."""
        sharded = sum(shard_cut(p) is not None for line in self.lines for p in line.outputs)
        return (
            self.seconds,
            sum(map(len, self.steps)),
            -sharded,
            f"{grid_text(self.inputs)} -> {grid_text(self.outputs)}",
        )


@dataclass(frozen=True, slots=True)
class Expansion:
    """The cheapest combination, if there is any, the alternatives, and a note if the search was cut short."""

    best: PartialExpansion | None
    others: tuple[Alternative, ...]
    unseen: str


@dataclass
class _Search:
    problem: ExpansionProblem
    limit: int
    known: dict[tuple[LocalCallKey, int], dict[Pair, list[PlacementRule]]] = field(default_factory=dict)
    excluded: dict[Alternative, None] = field(default_factory=dict)
    visited: int = 0

    def run(self) -> Expansion:
        problem, start = self.problem, _start(self.problem)
        count = itertools.count()
        queue = [(start.order, next(count), start)]
        done: list[PartialExpansion] = []
        while queue and not (done and queue[0][0][:2] > done[0].order[:2]) and self.visited < self.limit:
            beginning = heapq.heappop(queue)[2]
            self.visited += 1
            if len(beginning.lines) == len(problem.sizes):
                done.append(beginning)
            else:
                for longer in self.continued(beginning):
                    heapq.heappush(queue, (longer.order, next(count), longer))
        unseen = ""
        if self.visited >= self.limit and queue:
            looked_at = f"{self.visited} beginnings were (limit={self.limit})"
            unseen = f"not all was looked at: {looked_at}; another may cost less"
        if not done and queue:
            done = [*self.completed([entry[2] for entry in queue])]
        done.sort(key=lambda beginning: beginning.order)
        return Expansion(done[0] if done else None, self.others(done[1:], queue), unseen)

    def completed(self, open_ones: Sequence[PartialExpansion]) -> Iterator[PartialExpansion]:
        """One whole combination, from the longest and then cheapest of these prefixes that has one."""
        for beginning in sorted(open_ones, key=lambda b: (-len(b.lines), b.order)):
            stack = [beginning]
            while stack:
                last = stack.pop()
                if len(last.lines) == len(self.problem.sizes):
                    yield last
                    return
                stack += sorted(self.continued(last), key=lambda b: b.order, reverse=True)

    def continued(self, beginning: PartialExpansion) -> Iterator[PartialExpansion]:
        """The prefix with each line for the next axis that is right there."""
        problem, axis = self.problem, len(beginning.lines)
        ranks = problem.sizes[axis]
        for line, *_ in self.lines(beginning.pieces[0], ranks).values():
            reason = self.wrong(beginning, line, axis)
            if reason:
                self.exclude(beginning, line, reason)
            else:
                yield self.with_line(beginning, line, axis)

    def with_line(self, beginning: PartialExpansion, line: PlacementRule, axis: int) -> PartialExpansion:
        problem = self.problem
        held, steps, seconds = [], [], beginning.seconds
        for tensor, want, before in zip(beginning.held, line.inputs, beginning.steps, strict=True):
            now, more = redistribute_axis(tensor, axis, want or Replicate(), problem.sizes, problem.network)
            held.append(now)
            steps.append((*before, *more))
            seconds += math.fsum(step.seconds for step in more)
        last = axis + 1 == len(problem.sizes)
        left = () if last else distinct_local_calls(beginning.pieces, line, problem.sizes[axis], problem.own)
        return PartialExpansion((*beginning.lines, line), tuple(held), tuple(steps), left, seconds)

    def lines(self, piece: LocalCall, ranks: int) -> dict[Pair, list[PlacementRule]]:
        """The lines offered for a piece, grouped by placements: lines may differ in their `cut` alone."""
        key = piece.key, ranks
        if key not in self.known:
            self.known[key] = found = dict[Pair, list[PlacementRule]]()
            for line in self.problem.offer(piece.query, ranks):
                found.setdefault((line.inputs, line.outputs), []).append(line)
        return self.known[key]

    def wrong(self, beginning: PartialExpansion, line: PlacementRule, axis: int) -> str:
        """Why the line cannot be taken next; or empty."""
        problem, ranks = self.problem, self.problem.sizes[axis]
        for leaf, result in problem.written:
            if not problem.movable and line.inputs[leaf] != problem.given[leaf][axis]:
                return f"tensor {leaf} is written to, and lies {short(problem.given[leaf][axis])}"
            if result is not None and line.outputs[result] not in (None, line.inputs[leaf]):
                return f"tensor {leaf} is written to, and would become {short(line.outputs[result])}"
        for piece in beginning.pieces:
            same = self.lines(piece, ranks).get((line.inputs, line.outputs))
            if not same:
                return f"not offered for the piece {piece.query.tensors}"
            if all(why_inapplicable(other, piece.query, ranks) for other in same):
                return why_inapplicable(same[0], piece.query, ranks)
        return self.mixed(beginning, line)

    def mixed(self, beginning: PartialExpansion, line: PlacementRule) -> str:
        """Why two reductions of one tensor do not commute; or empty."""
        query = self.problem.whole.query
        rows = [(*one.inputs, *one.outputs) for one in (*beginning.lines, line)]
        for meta, (*before, last) in zip((*query.tensors, *query.outputs), zip(*rows, strict=True), strict=True):
            for one in before:
                if meta is not None and not partials_commute(one or Replicate(), last or Replicate(), meta.dtype):
                    return f"{short(one)} and {short(last)} of one tensor do not commute"
        return ""

    def exclude(self, beginning: PartialExpansion, line: PlacementRule, reason: str) -> None:
        if len(self.excluded) < MAX_ALTERNATIVES:
            inputs = _grid([*(one.inputs for one in beginning.lines), line.inputs], len(line.inputs))
            outputs = _grid([*(one.outputs for one in beginning.lines), line.outputs], len(line.outputs))
            self.excluded.setdefault(Alternative(inputs, outputs, None, reason))

    def others(
        self, done: Sequence[PartialExpansion], queue: Sequence[tuple[object, int, PartialExpansion]]
    ) -> tuple[Alternative, ...]:
        """The complete combinations, then the prefixes that cost too much already, then the wrong ones."""
        rest = sorted((entry[2] for entry in queue), key=lambda b: b.order)
        axes = len(self.problem.sizes)
        found = [
            Alternative(
                b.inputs,
                b.outputs,
                b.seconds,
                ""
                if len(b.lines) == axes
                else f"{microseconds(b.seconds)} or more, for the first {len(b.lines)} axes alone",
            )
            for b in [*done, *rest]
            if b.lines
        ]
        return (*found[:MAX_ALTERNATIVES], *self.excluded)


def expand(problem: ExpansionProblem, limit: int = LIMIT) -> Expansion:
    """The cheapest combination of lines, one for each axis, that is right for every piece."""
    return _Search(problem, limit).run()


def _start(problem: ExpansionProblem) -> PartialExpansion:
    pairs = zip(problem.whole.query.tensors, problem.given, strict=True)
    held = [MovedTensor(examples(meta.shape), meta.dtype, given) for meta, given in pairs]
    return PartialExpansion((), tuple(held), ((),) * len(held), (problem.whole,), 0.0)


def _grid(rows: Sequence[Sequence[Placement | None]], tensors: int) -> Grid:
    """Placements by axis for each tensor; None for one that a line masks."""
    columns = list(zip(*rows, strict=True)) if rows else [()] * tensors
    return tuple(None if any(p is None for p in column) else tuple(p for p in column if p) for column in columns)
