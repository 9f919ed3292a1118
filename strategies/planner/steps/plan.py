"""A plan as a value: the collectives that take a tensor from one spec to another, their costs, and how they were found.

| collective       | what a rank has                            | m of the cost table (`strategies.planner.steps.alpha_beta`) |
|------------------|--------------------------------------------|-------------------------------------------------------------|
| all_gather       | its piece, afterwards all pieces           | ranks times the largest piece                               |
| reduce_scatter   | a partial value, afterwards its piece      | ranks times the largest piece                               |
| all_reduce       | a partial value, afterwards the value      | what it has                                                 |
| all_to_all       | its piece, afterwards another              | the largest piece before                                    |
| local            | its piece, afterwards less or more         | the largest piece afterwards                                |

Uneven pieces are padded to the largest, except by all_to_all, which takes sizes. Values that collectives do not reduce
(`strategies.planner.steps.legal_steps.collectives_reduce`) are exchanged: a reduce_scatter is then an all_to_all, and
an all_reduce an all_to_all and an all_gather, of a rank's data in as many equal parts as there are ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from localtensor._util.units import bytes_text, time_text
from localtensor.layout import Spec, short
from strategies.planner.text.ascii import PlanStage, layout_text
from strategies.planner.text.svg import svg

PICO = 1_000_000_000_000
"""Prices are whole picoseconds or bytes: integer sums do not depend on their order, so a price is exactly a metric."""


@dataclass(frozen=True, slots=True)
class Move:
    """The argument of a price: one collective, independent of the plan that it is part of."""

    kind: str
    """all_gather, reduce_scatter, all_reduce, all_to_all, or local, as is any step along axes of one rank."""
    axes: tuple[int, ...]
    """The mesh axes whose ranks communicate; more than one where they are flattened into one group."""
    ranks: int
    """The number of ranks that communicate: the product of the sizes of these axes."""
    nbytes: int
    """The m of the table above, in bytes."""
    even: float
    """The bytes of a rank's piece before, as if all dims were sharded evenly: the only size in torch's own cost."""
    was: str = ""
    """-"""
    now: str = ""
    """The placement along these axes before and after: `R`, `S`, `SS` or `P`."""
    exchanged: bool = False
    """Whether no collective reduces this as defined: then parts are exchanged, and each rank reduces its own."""


class Price(Protocol):
    """The cost of a step: a whole number, never negative. A plan costs the sum of its steps."""

    @property
    def name(self) -> str:
        """The name that plans and errors show; not a key of the plan cache."""

    @property
    def grows(self) -> bool:
        """Whether more bytes never cost less: if so, the search can prune."""

    def __call__(self, move: Move) -> int:
        """The price of a move: picoseconds, bytes, or a unit of the user's own."""


@dataclass(frozen=True, slots=True)
class RedistributionStep:
    """One collective or local operation of a plan, on the whole tensor."""

    move: Move
    was: Spec
    now: Spec
    sent: int
    """Bytes that the busiest sender sends."""
    seconds: float
    """By the plan's topology, whatever price the plan was searched by."""
    memory: int
    """The peak memory of a rank during the step, in bytes: its input, its output, and buffers."""

    @property
    def kind(self) -> str:
        return self.move.kind

    @property
    def axes(self) -> tuple[int, ...]:
        return self.move.axes

    @property
    def columns(self) -> tuple[str, str, str, str, str, str]:
        """As text: axes, collective, placements before and after, bytes sent (empty for a local step), time."""
        was, now = placements_text(self.was, self.axes), placements_text(self.now, self.axes)
        sent = "" if self.kind == "local" else bytes_text(self.sent)
        return axes_text(self.was, self.axes), self.kind.replace("_", "-"), was, now, sent, time_text(self.seconds)

    def __str__(self) -> str:
        """`dp: all-gather S(0) -> R  12.0 MB  38 us`."""
        where, kind, was, now, sent, seconds = self.columns
        return f"{where}: {kind} {was} -> {now}{sent and f'  {sent}'}  {seconds}"


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps from one spec to another; none if the specs are equivalent."""

    src: Spec
    dst: Spec
    steps: tuple[RedistributionStep, ...]
    price: int
    """The total that was minimized, in the unit of the price `by`."""
    by: str
    """The name of the price that was minimized."""
    why: str
    """How it was found, in a sentence."""
    states: int
    """The number of layouts that the search expanded."""

    @property
    def sent(self) -> int:
        """Bytes that a rank sends: the sum over the steps of the busiest sender's."""
        return sum(step.sent for step in self.steps)

    @property
    def seconds(self) -> float:
        return sum((step.seconds for step in self.steps), 0.0)

    @property
    def memory(self) -> int:
        """Peak memory of a rank in bytes, its piece before and after included; 0 for a plan without steps."""
        return max((step.memory for step in self.steps), default=0)

    @property
    def stages(self) -> tuple[PlanStage, ...]:
        """The layouts to draw: the first one, and the one after each step."""
        after = (PlanStage(step.now, str(step), () if step.kind == "local" else step.axes) for step in self.steps)
        return (PlanStage(self.src), *after)

    @property
    def total(self) -> str:
        """A summary line: the number of steps, the bytes that a rank sends, the time, and the peak memory.

        >>> import torch
        >>> from localtensor.layout import Mesh, parse
        >>> spec = Spec(Mesh.of(2), (parse("R"),), (8,), torch.float32)
        >>> Plan(spec, spec, (), 0, "time", "", 1).total
        'total: nothing to do'
        """
        if not self.steps:
            return "total: nothing to do"
        count = f"{len(self.steps)} step{'s' * (len(self.steps) != 1)}"
        costs = f"{bytes_text(self.sent)} sent, {time_text(self.seconds)}, {bytes_text(self.memory)} in use at most"
        return f"total: {count}, {costs}"

    def __str__(self) -> str:
        return "\n".join(map(str, self.steps)) or "nothing to do"

    def _repr_svg_(self) -> str:
        """The picture that a notebook shows."""
        return svg(self.stages, f"{self.src} -> {layout_text(self.dst)}")


def placement_text(spec: Spec, axis: int) -> str:
    """The placement on an axis, with its position in the shard order where the dim is not sharded from left to right.

    >>> from localtensor.layout import Mesh, parse
    >>> import torch
    >>> spec = Spec(Mesh.of(2, 2), (parse("S(0)"), parse("S(0)")), (8,), torch.float32, ((0, (1, 0)),))
    >>> placement_text(spec, 0), placement_text(spec, 1)
    ('S(0)[1]', 'S(0)[0]')
    """
    turns = {axis: f"[{turn}]" for _, axes in spec.shard_order for turn, axis in enumerate(axes)}
    return short(spec.placements[axis]) + turns.get(axis, "")


def placements_text(spec: Spec, axes: Sequence[int] | None = None) -> str:
    """The placements on these axes, or on all: `R,S(0)`."""
    return ",".join(placement_text(spec, axis) for axis in (range(len(spec.placements)) if axes is None else axes))


def axes_text(spec: Spec, axes: Sequence[int]) -> str:
    """The names of these axes: `dp,tp`."""
    return ",".join(spec.mesh.names[axis] for axis in axes)
