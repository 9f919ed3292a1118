"""The table of legal steps between specs of one tensor (`LEGAL`), with the reasons why the others are illegal.

A dim that several axes shard is a stack of cuts: each axis cuts what the axes before it leave. So only the last cut of
a dim, the innermost, can be undone or moved, and a new cut is always the last. This holds for uneven and for strided
shards, too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from localtensor.layout import GLOO_DTYPES, Spec, StridedShard, is_standard, is_unambiguous, shard_cut, short
from strategies.planner.steps.alpha_beta import REPLICATE, partials_commute


@dataclass(frozen=True, slots=True)
class StepRule:
    """The step from one kind of placement to another along one axis: its collective, or why there is none."""

    was: str
    now: str
    kind: str
    """Empty where there is no such step."""
    reason: str


LEGAL: tuple[StepRule, ...] = (
    StepRule("R", "S", "local", "each rank keeps its rows"),
    StepRule("R", "SS", "local", "each rank keeps its rows"),
    StepRule("R", "P", "local", "one rank keeps the value, the others hold what changes nothing"),
    StepRule("S", "R", "all_gather", "each rank gets all rows; a rank with an empty shard takes part, too"),
    StepRule("SS", "R", "all_gather", "each rank gets all rows, and puts them in order"),
    StepRule("S", "S", "all_to_all", "of what it has, each rank sends every other its piece along the other dim"),
    StepRule("S", "SS", "all_to_all", "each rank sends every other the rows that are to be its own"),
    StepRule("SS", "S", "all_to_all", "each rank sends every other the rows that are to be its own"),
    StepRule("SS", "SS", "all_to_all", "each rank sends every other the rows that are to be its own"),
    StepRule("S", "P", "local", "each rank puts its rows among values that change nothing"),
    StepRule("SS", "P", "local", "each rank puts its rows among values that change nothing"),
    StepRule("P", "R", "all_reduce", "the parts are reduced, and each rank gets the value"),
    StepRule("P", "S", "reduce_scatter", "the parts are reduced, and each rank gets its rows"),
    StepRule("P", "SS", "reduce_scatter", "the parts are reduced, and each rank gets its rows"),
    StepRule("P", "P", "", "no kind of Partial turns into another: the parts of a sum are not those of a maximum"),
)
"""The steps along one axis; R to R is no step. Along several axes at once, which must be flattened into one group:
all-reduce, all-gather, reduce-scatter and all-to-all, where all these axes have the same placement."""
_RULES = {(row.was, row.now): row for row in LEGAL}


@dataclass(frozen=True, slots=True)
class SpecChange:
    """One legal step from a spec."""

    kind: str
    axes: tuple[int, ...]
    now: Spec


def placement_letter(placement: Placement) -> str:
    """`R`, `S`, `SS` or `P`: the kind of a placement in the table.

    >>> placement_letter(Shard(1)), placement_letter(Partial("max"))
    ('S', 'P')
    """
    if isinstance(placement, Partial):
        return "P"
    if isinstance(placement, Replicate):
        return "R"
    return "SS" if isinstance(placement, StridedShard) else "S"


def why_illegal(was: Spec, axis: int, now: Placement) -> str:
    """The reason why this is no step along one axis; empty if it is one.

    >>> from localtensor.layout import Mesh
    >>> nested = Spec(Mesh.of(2, 2), (Shard(0), Shard(0)), (8,), torch.float32)
    >>> why_illegal(nested, 0, REPLICATE)
    'b cuts what a has left of dim 0: what is cut last is undone first'
    >>> why_illegal(nested, 1, REPLICATE)
    ''
    """
    held = was.placements[axis]
    if held == now and shard_cut(held) == shard_cut(now):
        return "the axis already has this placement"
    row = _RULES[placement_letter(held), placement_letter(now)]
    if not row.kind:
        return row.reason
    cut, names = shard_cut(held), was.mesh.names
    if cut is not None and (inner := _innermost(was, cut[0], axis)) != axis:
        return f"{names[inner]} cuts what {names[axis]} has left of dim {cut[0]}: what is cut last is undone first"
    return _why_not_partial(was, axis, now) if isinstance(now, Partial) else ""


def _innermost(spec: Spec, dim: int, axis: int) -> int:
    """The axis that cuts the dim last; `axis` itself if those after it have one rank each, which leaves all rows."""
    return [other for other in spec.cut_by(dim) if other == axis or spec.mesh.sizes[other] > 1][-1]


def why_not_made(reduction: str, dtype: torch.dtype, cut: bool) -> str:
    """The reason why no partial values of this reduction can be made of a value; `cut` if the value is a shard.

    >>> why_not_made("sum", torch.float32, True), why_not_made("max", torch.complex64, False)
    ('', 'P(max) means nothing for torch.complex64')
    """
    if not is_unambiguous(reduction, dtype):
        return f"P({reduction}) means nothing for {dtype}"
    if reduction == "product" and dtype.is_complex:
        return "no complex number leaves all others as they are: an infinite one times 1 is not a number"
    if reduction == "avg" and cut:
        return "an average of parts of which all but one are empty is that part divided, and not the part"
    return ""


def collectives_reduce(reduction: str, dtype: torch.dtype) -> bool:
    """Whether collectives reduce this as defined; if not, parts are exchanged, and each rank reduces them itself.

    They do not for: the minimum and maximum of floats, where gloo propagates a NaN or not by the order of the ranks;
    the product of complex numbers, which neither gloo nor NCCL has; and dtypes that gloo does not carry, such as
    two-byte integers.

    >>> collectives_reduce("sum", torch.bfloat16), collectives_reduce("max", torch.bfloat16), collectives_reduce("sum", torch.int16)
    (True, False, False)
    """
    if dtype not in GLOO_DTYPES or (reduction in ("min", "max") and dtype.is_floating_point):
        return False
    return not (reduction == "product" and dtype.is_complex)


def _why_not_partial(was: Spec, axis: int, now: Partial) -> str:
    """The reason why axis `axis` cannot become partial here; empty if it can."""
    if reason := why_not_made(now.reduce_op, was.dtype, shard_cut(was.placements[axis]) is not None):
        return reason
    others = [p for i, p in enumerate(was.placements) if i != axis and isinstance(p, Partial)]
    if mixed := [p for p in others if not partials_commute(p, now, was.dtype)]:
        return f"{short(mixed[0])} and {short(now)} do not commute: which is reduced first would matter"
    return ""


def with_placement(was: Spec, axes: Sequence[int], now: Placement) -> Spec:
    """The spec with this placement on these axes, which cut last, in this order, if they shard."""
    placements = list(was.placements)
    for axis in axes:
        placements[axis] = now
    orders = {dim: tuple(axis for axis in was.cut_by(dim) if axis not in axes) for dim in range(len(was.shape))}
    if (cut := shard_cut(now)) is not None:
        orders[cut[0]] += tuple(axes)
    return replace(was, placements=tuple(placements), shard_order=tuple((d, o) for d, o in orders.items() if o))


def usable_placements(src: Spec, dst: Spec) -> tuple[Placement, ...]:
    """The placements that a plan may use: R, a shard of any dim, strided shards of the destination, and partial values.

    A shard that blocks a step may become a partial value for free, and return by a reduce-scatter, which is cheaper
    than to be gathered. So every plan may use at least one kind of Partial that collectives reduce, and the kinds of
    both ends, which may have to commute with it. Otherwise a path by a third spec could be cheaper than the cheapest
    plan.

    >>> from localtensor.layout import Mesh
    >>> was, now = (Spec(Mesh.of(2), (p,), (8,), torch.float32) for p in (Shard(0), REPLICATE))
    >>> [short(p) for p in usable_placements(was, now)]
    ['R', 'S(0)', 'P(sum)']
    """
    others = [p for p in dst.placements if not _always_offered(p) and isinstance(p, Partial | StridedShard)]
    others += [p for p in src.placements if not _always_offered(p) and isinstance(p, Partial) and is_standard(p)]
    kinds = [p.reduce_op for p in others if isinstance(p, Partial)]
    if not any(kind != "avg" and collectives_reduce(kind, src.dtype) for kind in kinds):
        others += [Partial("sum")] if is_unambiguous("sum", src.dtype) else []
    return (REPLICATE, *map(Shard, range(len(src.shape))), *dict.fromkeys(others))


def _always_offered(placement: Placement) -> bool:
    """Whether `usable_placements` offers it in any case. Compares exact types, which is fast."""
    return type(placement) is Shard or type(placement) is Replicate


def legal_changes(
    was: Spec, offered: Sequence[Placement], flattened: Sequence[Sequence[int]] = ()
) -> Iterator[SpecChange]:
    """Every legal step from a spec, always in the same order.

    `flattened` lists the sets of axes for which there is one group of all their ranks.
    """
    for axis in range(len(was.placements)):
        for now in offered:
            if not why_illegal(was, axis, now):
                kind = _RULES[placement_letter(was.placements[axis]), placement_letter(now)].kind
                alone = was.mesh.sizes[axis] == 1
                yield SpecChange("local" if alone else kind, (axis,), with_placement(was, (axis,), now))
    for axes in flattened:
        yield from _flattened_changes(was, tuple(sorted(axes)), offered)


def _flattened_changes(was: Spec, axes: tuple[int, ...], offered: Sequence[Placement]) -> Iterator[SpecChange]:
    held = [was.placements[axis] for axis in axes]
    if all(isinstance(p, Partial) for p in held):
        yield from _flattened_changes_to(was, axes, offered, ("all_reduce", "reduce_scatter"), None, ())
        return
    dims = {p.dim for p in held if type(p) is Shard}
    if len(dims) != 1 or any(type(p) is not Shard for p in held):
        return
    dim, sizes = dims.pop(), was.mesh.sizes
    stack = tuple(axis for axis in was.cut_by(dim) if sizes[axis] > 1 or axis in axes)[-len(axes) :]
    if set(stack) == set(axes):
        yield from _flattened_changes_to(was, axes, offered, ("all_gather", "all_to_all"), dim, stack)


def _flattened_changes_to(
    was: Spec, axes: tuple[int, ...], offered: Sequence[Placement], kinds: tuple[str, str], dim: int | None,
    stack: tuple[int, ...],
) -> Iterator[SpecChange]:  # fmt: skip
    """The steps to R by the first kind, and to shards by the second, in every order but the present one."""
    for now in offered:
        if isinstance(now, Replicate):
            yield SpecChange(kinds[0], axes, with_placement(was, axes, now))
        elif type(now) is Shard:
            for order in itertools.permutations(axes):
                if now.dim != dim or order != stack:
                    yield SpecChange(kinds[1], axes, with_placement(was, order, now))


def ranks_along(sizes: Sequence[int], axes: Sequence[int]) -> int:
    """The number of ranks along these axes together, on a mesh of these sizes."""
    return math.prod(sizes[axis] for axis in axes)
