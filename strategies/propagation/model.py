"""The result of a propagation: immutable values that threads share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch.distributed.tensor.placement_types import Placement

from localtensor.layout import Mesh, Spec, local_shapes, short, shorts
from strategies.model.rule import Call
from strategies.planner.steps.alpha_beta import AxisStep

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
