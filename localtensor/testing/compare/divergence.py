"""The first observation, in the causal order of the run on one device, that no allowed layout explains; and why, in words."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.distributed.tensor import Partial

from localtensor._util.events import Place
from localtensor.layout.tolerance import is_inexact, max_abs, measured_slack
from localtensor.testing.compare.explain import (
    HELD_AS_PARAMETER,
    counted_too_often,
    equal_along,
    explanations,
    halo_layout,
    pending_source,
)
from localtensor.testing.compare.find_layout import (
    Expected,
    MeshLayout,
    expected_layout,
    find_layout,
    layout_of_placements,
    values_text,
)
from localtensor.testing.compare.watch import (
    AFTER,
    ARGUMENTS,
    DROPOUT,
    GRADIENT_OF_OUTPUT,
    IN_STEP,
    OF_MODULES,
    Key,
    Observation,
    Watch,
)
from localtensor.testing.compare_dropout import drops_otherwise
from localtensor.testing.compare_tolerance import is_noise, parts_of_whole

ONE_DEVICE = "one device"
MOST_AFTER = 400  # values after the first divergence that are compared
ROUNDINGS = 64
"""Roundings of a declared dtype of less precision that a right value may be away."""

INSIDE = "values between modules that the ranks have otherwise, and all that comes of them is right"
WITHIN_THE_STEP = "values within the step that the ranks have otherwise, whose parameters are right after it"
MOSTLY_JUMP = "values whose elements mostly jump when inputs move by one unit in the last place"


@dataclass(frozen=True)
class Divergence:
    """The first difference: what of (`key`), the user's line, the layout that was found if any, and what it looks like.

    `expected` is the layout that it should have instead, if that is known.
    """

    key: Key
    place: Place | None
    layout: str | None
    what: str
    values: str
    expected: Expected | None = None


@dataclass
class Findings:
    """What was compared, in order, with the layout of each; what was not, and why; the first divergence if there is one.

    `differing` are the values that differ: the first, and those of the first `MOST_AFTER` after it.
    """

    layouts: dict[Key, MeshLayout] = field(default_factory=dict)
    not_compared: dict[Key, str] = field(default_factory=dict)
    divergence: Divergence | None = None
    differing: list[Key] = field(default_factory=list)
    part: tuple[int, ...] = ()  # the ranks that have the value of the divergence, if not all have it


@dataclass(frozen=True)
class Sides:
    """Everything that was seen: one device, how far a right value may be from its own by key, and each rank."""

    reference: Watch
    slacks: Mapping[Key, Tensor]
    ranks: tuple[Watch, ...]
    mesh: Mapping[str, int]
    batch_axes: tuple[str, ...]
    name: str = ONE_DEVICE  # of the reference, in words
    numbers: tuple[int, ...] = ()  # of the ranks, if they are a part of the mesh
    blocks: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # the shares of the parts of fused parameters
    others: tuple[Watch, ...] = ()  # the ranks of the mesh that are not in this part of it
    settled: Mapping[Key, MeshLayout] = field(default_factory=dict)  # what the ranks hold as parts of the reference's
    notes: tuple[str, ...] = ()  # of how the tolerance was measured

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.mesh.values())

    @property
    def declared(self) -> torch.dtype | None:
        """The dtype of less precision in which the parallel program says that it computes (FSDP2's mixed precision)."""
        return self.ranks[0].declared

    @property
    def microbatches(self) -> int:
        """Into how many parts a pipeline of the ranks cuts its rows; 1 without one."""
        return self.ranks[0].microbatches

    def part_of(self, ranks: Sequence[int]) -> Sides | None:
        """The sides with these ranks only, if they are those at one place along some axes of the mesh; None if not."""
        every = torch.arange(len(self.ranks)).reshape(self.sizes)
        at = torch.stack([(every == rank).nonzero()[0] for rank in ranks])
        found = [len(at[:, axis].unique()) for axis in range(every.dim())]
        whole = all(n in (1, size) for n, size in zip(found, self.sizes, strict=True))
        if not whole or torch.Size(found).numel() != len(ranks):
            return None
        mesh = dict(zip(self.mesh, found, strict=True))
        others = tuple(one for rank, one in enumerate(self.ranks) if rank not in ranks)
        here = tuple(self.ranks[rank] for rank in ranks)
        return replace(self, ranks=here, mesh=mesh, numbers=tuple(ranks), others=others)

    def calls(self, key: Key) -> tuple[int, int]:
        """How often the module was called in this step, on one device and on a rank."""
        counts = self.reference.calls[key.step, key.name], self.ranks[0].calls[key.step, key.name]
        return counts if key.kind in OF_MODULES else (0, 0)

    def slack(self, key: Key) -> Tensor:
        """How far a right value may be from the one device's: measured."""
        want = self.reference.seen[key].value
        slack = self.slacks.get(key, measured_slack(want, ()))
        slack = torch.zeros(()) if slack is None else slack
        if self.declared is not None and key.kind not in ("parameter", "buffer") and want.is_floating_point():
            slack = slack + ROUNDINGS * torch.finfo(self.declared).eps * float(max_abs(want))
        if key.kind == AFTER:
            slack = self._where_the_gradient_vanishes(key, slack)
        return slack

    def _where_the_gradient_vanishes(self, key: Key, slack: Tensor) -> Tensor:
        """Optimizers that divide by the gradient's size may move such an element either way: it shows nothing."""
        for step in range(key.step + 1):
            gradient = Key(step, "gradient", key.name)
            if gradient in self.reference.seen:
                value = self.reference.seen[gradient].value
                slack = torch.where(value.abs() <= 10 * self.slack(gradient), torch.inf, slack)
        return slack


Suspects = dict[tuple[int, str], Divergence]  # by step and parameter: a fault only if that differs after the step


def first_divergence(sides: Sides) -> Findings:
    """Goes through the observations of one device in order, and stops at the first that differs.

    A gradient that is pending, or that of one of several copies of a tied parameter, and what an optimizer keeps, are a fault
    only if the parameter differs after the step: some programs reduce in the step.  What the optimizer keeps for a step that
    does not follow is one, too.  A value between modules is a fault only if something that comes of it differs.
    """
    findings = Findings()
    suspects: Suspects = {}
    kept: list[Divergence] = []
    for key in sides.reference.seen:
        one, part, there = _held(sides, key)
        if why := _not_compared(part, sides, findings, key, one):
            findings.not_compared[key] = why
            continue
        layout, problem = _layout_and_problem(part, findings, key, one, there)
        if key.kind == DROPOUT and layout is None:
            findings.not_compared[key] = "inputs of dropouts that the ranks have in other parts"
            continue
        if layout is not None and problem is None:
            findings.layouts[key] = layout
            suspects.pop((key.step, key.name), None) if key.kind == AFTER else None
            continue
        if key.name == ARGUMENTS and not sides.reference.writes_to(key):
            findings.not_compared[key] = f"arguments that the ranks write to, and {sides.name} does not"
            continue
        if part.calls(key)[0] > 1 and part.batch_axes:
            findings.not_compared[key] = "calls of a module that is called several times, perhaps on other rows"
            continue
        found = _divergence(part, findings, key, there, layout, problem)
        in_step = key.kind == IN_STEP or key.kind.startswith("optimizer's")
        waits = in_step or (key.kind == "gradient" and (found.what == problem or bool(untied(sides, key.name))))
        if waits and key._replace(kind=AFTER) in sides.reference.seen:
            suspects.setdefault((key.step, key.name), found)
            findings.not_compared[key] = WITHIN_THE_STEP
            kept = [*kept, found] if layout is None and key.kind.startswith("optimizer's") else kept
            continue
        findings.divergence = next(_wrong_after_step(sides, findings, suspects), found)
        findings.not_compared.pop(found.key, None)
        findings.differing.append(findings.divergence.key)
        break
    else:
        last = max((key.step for key in sides.reference.seen if key.kind == AFTER), default=0)
        wrong = itertools.chain(_wrong_after_step(sides, findings, suspects), (x for x in kept if x.key.step == last))
        findings.divergence = next(wrong, None) or _computed_again(sides)
    if findings.divergence is not None:
        findings.not_compared = {key: why for key, why in findings.not_compared.items() if why != WITHIN_THE_STEP}
        have = tuple(rank for rank, one in enumerate(sides.ranks) if findings.divergence.key in one.seen)
        findings.part = have if len(have) < len(sides.ranks) else ()
        _compare_the_rest(sides, findings)
        inside = findings.divergence.key.is_inside
        if inside and all(key.is_inside or key in findings.layouts for key in sides.reference.seen):
            findings.not_compared |= dict.fromkeys(findings.differing, INSIDE)
            findings.divergence, findings.differing, findings.part = None, [], ()
    return findings


def _wrong_after_step(sides: Sides, findings: Findings, suspects: Suspects) -> Iterator[Divergence]:
    """Those of the suspects whose parameter differs after the step; it may come after the first that does."""
    for (step, name), found in suspects.items():
        after = Key(step, AFTER, name)
        one, part, there = _held(sides, after)
        layout, problem = _layout_and_problem(part, findings, after, one, there)
        if layout is None or problem is not None:
            yield found


def _compare_the_rest(sides: Sides, findings: Findings) -> None:
    """What comes after the first divergence: which of it differs, too."""
    done = Findings(dict(findings.layouts), dict(findings.not_compared))
    rest = [key for key in sides.reference.seen if key not in findings.layouts and key not in findings.not_compared]
    for key in rest[:MOST_AFTER]:
        one, part, there = _held(sides, key)
        if not there or _not_compared(part, sides, done, key, one):
            continue
        layout, problem = _layout_and_problem(part, done, key, one, there)
        if layout is None or problem is not None:
            findings.differing += [key] if key not in findings.differing else []
        else:
            done.layouts[key] = findings.layouts[key] = layout


def _held(sides: Sides, key: Key) -> tuple[Observation, Sides, list[Observation]]:
    """What one device has, the sides with the ranks that have it too (all, or those of a stage, say), and what these hold."""
    each = [rank.seen.get(key) for rank in sides.ranks]
    ranks = [rank for rank, one in enumerate(each) if one is not None]
    of_module = key.kind in (*OF_MODULES, "loss", "buffer")
    keep = [rank for rank, one in enumerate(sides.ranks) if Key(0, "parameter", key.name) in one.seen]
    some = 0 < len(ranks) < len(each) and (sides.microbatches > 1 or (not of_module and keep == ranks))
    part = sides.part_of(ranks) if some else None
    return sides.reference.seen[key], part or sides, [one for one in each if one is not None]


def _layout_and_problem(
    sides: Sides, findings: Findings, key: Key, one: Observation, there: Sequence[Observation]
) -> tuple[MeshLayout | None, str | None]:
    """The layout of what the ranks hold, None if it has none, and why it is wrong nevertheless."""
    gradient = key._replace(kind="gradient")
    if key.kind == AFTER:
        for other in untied(sides, key.name):
            copies = [x for rank in (*sides.ranks, *sides.others) if (x := rank.seen.get(key._replace(name=other)))]
            if copies and _layout_of(sides, findings, key, one, copies[: len(sides.ranks)]) is None:
                return None, None
    same = key.kind == IN_STEP and one is sides.reference.seen.get(gradient) and gradient in findings.layouts
    if same and all(rank.seen.get(gradient) is rank.seen[key] for rank in sides.ranks):
        return findings.layouts[gradient], None
    layout = _layout_of(sides, findings, key, one, there) if there else None
    if key.kind == DROPOUT and layout is not None:
        whole = [axis for axis, at in enumerate(layout.axes) if at.kind != "S" and sides.sizes[axis] > 1]
        return layout, _drops_otherwise(sides, findings, key, whole)
    if layout is None and key.kind == "input" and there:
        layout = halo_layout(sides, [x.value for x in there], one.value, sides.slack(key))
    return layout, _not_allowed(sides, key, layout) if layout is not None else None


def _not_compared(part: Sides, sides: Sides, findings: Findings, key: Key, one: Observation) -> str | None:
    """Why this value cannot be compared on a part of the ranks; None if it can."""
    alone, many = part.calls(key)
    if many and alone != many:
        return f"calls of a module that is called a different number of times on {sides.name}"
    slack = sides.slacks.get(key)
    if slack is not None and slack.numel() and one.value.numel() and is_noise(one.value, slack):
        return MOSTLY_JUMP
    missing = [str(rank) for rank, x in enumerate(part.ranks) if key not in x.seen]
    if not missing:
        return None
    if len(missing) < len(part.ranks):
        return f"values that ranks {', '.join(missing)} do not have"
    if key.kind == "gradient" and any(key._replace(kind=IN_STEP) in rank.seen for rank in sides.ranks):
        return "gradients after a backward pass that was not seen, as a pipeline's; those in the step are compared"
    known = key.kind == "gradient" and Key(0, "parameter", key.name) in findings.layouts and bool(one.value.any())
    is_end = (key.kind, key.name) == ("output", "") and many and sides.microbatches == 1
    return None if known or is_end else "values that no rank has"


def _layout_of(
    sides: Sides, findings: Findings, key: Key, one: Observation, held: Sequence[Observation]
) -> MeshLayout | None:
    if key in sides.settled and len(held) == len(sides.ranks):
        return sides.settled[key]
    factors = [1.0]
    if key.kind == GRADIENT_OF_OUTPUT:  # of a mean over the rank's own part of the batch
        parts = torch.Size([sides.mesh[axis] for axis in _mean_axes(sides, findings, key.step)]).numel()
        factors += sorted({float(a * b) for a in {1, parts} for b in {1, sides.microbatches}} - {1.0})
    said = layout_of_placements(held[0], len(sides.sizes))
    tensors = [x.value for x in held]
    if sides.declared is not None and all(x.dtype == sides.declared for x in tensors) and key.kind != "parameter":
        tensors = [x.to(one.value.dtype) for x in tensors]
    blocks = sides.blocks.get(key.name, ())
    slack = sides.slack(key)
    want, counts = one.value, key.kind == "buffer" and not is_inexact(one.value)
    if counts:  # perhaps of the rank's own part
        tensors, want = [x.double() for x in tensors], want.double()
    found = find_layout(tensors, sides.sizes, want, slack, first=said, factors=factors, blocks=blocks)
    if found is not None or len(tensors) < len(sides.ranks):
        return found
    uneven = parts_of_whole(tensors, sides.sizes, one.value, slack)
    return None if uneven is None else uneven[0]


def _drops_otherwise(sides: Sides, findings: Findings, key: Key, same: Sequence[int]) -> str | None:
    """What is wrong with the ranks' draws for a dropout whose input they hold alike along these axes."""
    drawn = [rank.seen[key].drawn for rank in sides.ranks]
    alone = sides.reference.seen[key].drawn
    loss = Key(key.step, "loss", "")
    if any(one is None for one in drawn) or alone is None:
        return None
    own = {*sides.batch_axes}
    if loss in sides.reference.seen and all(loss in rank.seen for rank in sides.ranks):  # means of the ranks' own parts
        held = [rank.seen[loss] for rank in sides.ranks]
        layout = _layout_of(sides, findings, loss, sides.reference.seen[loss], held)
        own |= {list(sides.mesh)[axis] for axis in (layout.pending if layout is not None else ())}
    axes = [axis for axis in same if list(sides.mesh)[axis] not in own]
    return drops_otherwise([x for x in drawn if x is not None], alone, sides.name, list(sides.mesh.items()), axes)


def _computed_again(sides: Sides) -> Divergence | None:
    """A dropout that activation checkpointing computes again with other numbers, on some rank."""
    found = next((one for rank in sides.ranks if (one := rank.drawn_otherwise_again()) is not None), None)
    what = "it is computed again in the backward pass, and drops other elements: the generator's state is not kept"
    return None if found is None else Divergence(*found, None, what, "")


def untied(sides: Sides, name: str) -> list[str]:
    """The other names of a parameter that one device uses several times, by which ranks have copies of their own."""
    every = (*sides.ranks, *sides.others)
    names = (other for other, first in sides.reference.tied.items() if first == name)
    return [other for other in names if not any(rank.tied.get(other) == name for rank in every)]


def _mean_axes(sides: Sides, findings: Findings, step: int) -> tuple[str, ...]:
    """The axes along which each rank's loss is the mean over a part of its own."""
    loss = findings.layouts.get(Key(step, "loss", ""))
    pending = [name for axis, name in enumerate(sides.mesh) if loss is not None and axis in loss.pending]
    return tuple(name for name in sides.mesh if name in sides.batch_axes or name in pending)


def _not_allowed(sides: Sides, key: Key, layout: MeshLayout) -> str | None:
    """Why a layout that fits is wrong nevertheless: a reduction that is not done any more."""
    one = sides.ranks[0].seen[key]
    if not layout.pending or any(isinstance(placement, Partial) for placement in one.placements or ()):
        return None  # a DTensor that says so is reduced where it is used
    over = ", ".join(list(sides.mesh)[axis] for axis in layout.pending)
    if key.kind in HELD_AS_PARAMETER:
        return f"an all_reduce of the gradient over {over} is missing"
    counts = key.step and all(axis.op != "avg" for axis in layout.axes)
    if key.kind == "parameter" or (key.kind == "buffer" and not counts):
        return f"the {key.kind} differs between the ranks along {over}"
    is_end = key.kind == "output" and key.name == "" and Key(key.step, "loss", "") not in sides.reference.seen
    return f"an all_reduce over {over} is missing" if is_end else None


def _divergence(
    sides: Sides,
    findings: Findings,
    key: Key,
    held: Sequence[Observation],
    layout: MeshLayout | None,
    problem: str | None,
) -> Divergence:
    want, slack = sides.reference.seen[key].value, sides.slack(key)
    if not held:
        lost = ("a gradient", "one") if key.kind == "gradient" else ("this result", "it")
        what = f"no rank has {lost[0]}, and {sides.name} has {lost[1]}"
        return Divergence(key, sides.ranks[0].place_of_parameter(key.name), None, what, "")
    tensors = [x.value for x in held]
    if layout is not None and equal_along(sides, tensors, layout.pending):
        layout = problem = None  # nothing is pending: it is a part of the sum on every rank, that is, too small
    values = "" if key.kind == DROPOUT else values_text(sides, tensors, want, slack)
    added = next(counted_too_often(sides, key, tensors, want, slack), None)
    source = None if problem or added else pending_source(sides, findings, key)
    if source is not None:
        over = ", ".join(list(sides.mesh)[axis] for axis in findings.layouts[source].pending)
        mean = all(list(sides.mesh)[axis] in sides.batch_axes for axis in findings.layouts[source].pending)
        parts = torch.Size([sides.sizes[axis] for axis in findings.layouts[source].pending]).numel()
        factor = f", or it is {parts} times too small, as the ranks' mean counts" if mean else ""
        what = f"an all_reduce over {over} is missing{factor}: it is a pending sum, and {key} is wrong"
        place = sides.ranks[0].seen[source].place
        layout = findings.layouts[source]
        expected = expected_layout(sides, findings.layouts, source, layout)
        return Divergence(source, place, str(layout), what, values, expected)
    what = problem or next(explanations(sides, findings, key, tensors, want, slack))
    place = held[0].place or sides.ranks[0].place_of_parameter(key.name)
    expected = None if layout is None else expected_layout(sides, findings.layouts, key, layout)
    return Divergence(key, place, None if layout is None else str(layout), what, values, expected)
