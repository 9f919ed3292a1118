"""Comparison of a redistribution: its result with the definition, and DTensor's plans with ours.

The ranks must hold `split(x, spec)`, except for partial values: a sum can be split in many ways, so the ranks of
partial axes are reduced first, and the reduced values are compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate

from localtensor.errors import TorchChanged
from localtensor.layout import Spec, StridedShard, local_shapes, split, within_slack
from localtensor.layout import fold_partials as fold
from strategies.planner.audit.pairs import MODES, NoDTensorPlan, dtensor_plan, dtensor_price, first_fault
from strategies.planner.steps.legal_steps import with_placement
from strategies.planner.steps.plan import Plan, Price, RedistributionStep
from strategies.planner.steps.prices import TOPOLOGY, Topology, priced_step


@dataclass(frozen=True, slots=True)
class Outcome:
    """An outcome: `right`, `wrong`, `refused` (every rank raises), or `stops` (some rank raises alone, or hangs)."""

    kind: str
    text: str = ""
    ranks: tuple[int, ...] = ()


CORRECT = Outcome("right")


def compare_pieces(held: Sequence[Tensor], want: Tensor, spec: Spec) -> Outcome:
    """Whether `held` are the pieces of `want` under this spec; if not, the first difference, and its ranks."""
    shapes = local_shapes(spec)
    bad = [rank for rank, (piece, shape) in enumerate(zip(held, shapes, strict=True)) if tuple(piece.shape) != shape]
    if bad:
        wrong = f"rank {bad[0]} holds shape {tuple(held[bad[0]].shape)}, not {shapes[bad[0]]}"
        return Outcome("wrong", wrong, tuple(bad))
    bad = [rank for rank, piece in enumerate(held) if piece.dtype != want.dtype]
    if bad:
        return Outcome("wrong", f"rank {bad[0]} holds {held[bad[0]].dtype}, not {want.dtype}", tuple(bad))
    whole = reduce_partials(held, spec)
    plain = replace(spec, placements=tuple(Replicate() if isinstance(p, Partial) else p for p in spec.placements))
    tolerance = torch.tensor(rounding_tolerance([*held, want]), dtype=torch.float64)
    wanted = split(want, plain)
    pairs = enumerate(zip(whole, wanted, strict=True))
    bad = [rank for rank, (got, ask) in pairs if not within_slack(got, ask, tolerance).all()]
    if not bad:
        return CORRECT
    return Outcome("wrong", _first_difference(whole[bad[0]], wanted[bad[0]], tolerance, bad[0]), tuple(bad))


def reduce_partials(held: Sequence[Tensor], spec: Spec) -> list[Tensor]:
    """For each rank, the reduced value of the ranks that differ from it on partial axes only."""
    level = list(held)
    for axis, placement in enumerate(spec.placements):
        if isinstance(placement, Partial):
            after = list(level)
            for group in spec.mesh.groups(spec.mesh.names[axis]):
                total = fold(torch.stack([level[rank] for rank in group]), placement.reduce_op)
                for rank in group:
                    after[rank] = total
            level = after
    return level


def rounding_tolerance(pieces: Sequence[Tensor]) -> float:
    """The tolerance for sums of such pieces: rounding of their largest element; 0 for exact dtypes."""
    if not (pieces[0].dtype.is_floating_point or pieces[0].dtype.is_complex):
        return 0.0
    largest = max((float(piece.abs().max()) for piece in pieces if piece.numel()), default=0.0)
    return 256 * torch.finfo(pieces[0].dtype).eps * max(largest, 1.0)


def _first_difference(got: Tensor, want: Tensor, tolerance: Tensor, rank: int) -> str:
    wrong = ~within_slack(got, want, tolerance)
    place = tuple(wrong.nonzero()[0].tolist())
    rows = sorted({int(where[0]) for where in wrong.nonzero()}) if got.ndim else []
    which = f"; wrong in its rows {', '.join(map(str, rows))}" if rows else ""
    return f"rank {rank} holds {got[place].item():.6g} at {list(place)}, not {want[place].item():.6g}{which}"


MOST_LAYOUTS, MOST_RANKS = 1_500, 65_536
"""Beyond these, DTensor's graph-based planner is skipped: it takes 0.7 s for 1,240 layouts (four axes, a tensor of
three dims) and 2.8 s for 3,552."""


@dataclass(frozen=True, slots=True)
class DTensorPlan:
    """One of DTensor's planners with its plan, its error, or the reason why it was skipped."""

    mode: str
    plan: Plan | None
    refused: str = ""
    skipped: str = ""
    wrong: str = ""
    """The fault of the plan: a step that is not legal, or a wrong end."""
    gathered: Plan | None = None
    """The plan on cpu, where DTensor has no all-to-all: it gathers, and slices. None if the plan has no all-to-all."""


def dtensor_plans(
    src: Spec, dst: Spec, price: Price, *, topology: Topology = TOPOLOGY, flattened: Sequence[Sequence[str]] = ()
) -> tuple[DTensorPlan, ...]:
    """The plans of both of DTensor's planners, greedy first.

    >>> from strategies.planner.text.parser import read
    >>> from strategies.planner.steps.prices import Time
    >>> [(one.mode, str(one.plan)) for one in dtensor_plans(*read("f32[8] @ dp=2: R -> S(0)"), Time())]
    [('greedy', 'dp: local R -> S(0)  1 us'), ('graph', 'dp: local R -> S(0)  1 us')]
    """
    made = []
    for mode in MODES:
        if why := why_skipped(src, dst, mode):
            made.append(DTensorPlan(mode, None, skipped=why))
            continue
        try:
            found = dtensor_plan(src, dst, mode, price=price, topology=topology, flattened=flattened)
        except TorchChanged as changed_torch:  # why: our own plan needs none of torch's private parts, and stands
            made.append(DTensorPlan(mode, None, skipped=f"not asked: {changed_torch}"))
            continue
        if isinstance(found, NoDTensorPlan):
            made.append(DTensorPlan(mode, None, refused=str(found)))
        else:
            gathered = without_all_to_all(found, price, topology)
            made.append(DTensorPlan(mode, found, wrong=first_fault(found), gathered=gathered))
    return tuple(made)


def without_all_to_all(plan: Plan, price: Price, topology: Topology = TOPOLOGY) -> Plan | None:
    """The plan with an all-gather and a slice in place of each all-to-all; None if it has none.

    >>> from strategies.planner.text.parser import read
    >>> from strategies.planner.steps.prices import Time
    >>> src, dst = read("f32[8,8] @ dp=2: S(0) -> S(1)")
    >>> print(without_all_to_all(dtensor_plan(src, dst), Time()))
    dp: all-gather S(0) -> R  128 B  5.01 us
    dp: local R -> S(1)  1 us
    """
    if all(step.kind != "all_to_all" for step in plan.steps):
        return None
    steps: list[RedistributionStep] = []
    for step in plan.steps:
        if step.kind == "all_to_all":
            whole = with_placement(step.was, step.axes, Replicate())
            steps.append(priced_step("all_gather", step.axes, step.was, whole, topology))
            steps.append(priced_step("local", step.axes, whole, step.now, topology))
        else:
            steps.append(step)
    return replace(plan, steps=tuple(steps), price=dtensor_price(steps, price))


def why_skipped(src: Spec, dst: Spec, mode: str) -> str:
    """The reason why DTensor's planner is skipped; empty if it is not."""
    if src.mesh.ranks > MOST_RANKS:
        return f"not asked: a mesh of {src.mesh.ranks:,} ranks is too much for it"
    ordered = any(spec.shard_order or any(isinstance(p, StridedShard) for p in spec.placements) for spec in (src, dst))
    count = layout_count(len(src.mesh.sizes), len(src.shape))
    if count <= MOST_LAYOUTS or not (mode == "graph" or ordered):
        return ""
    return f"not asked: it would look at up to {count:,} layouts, for seconds or more"


def layout_count(axes: int, dims: int) -> int:
    """The number of layouts of R, one Partial and shards of so many dims, in any order where axes share a dim.

    >>> layout_count(1, 2), layout_count(2, 1), layout_count(5, 2)
    (4, 10, 3552)
    """
    found = 0
    for cut in range(axes + 1):
        dealt = math.comb(cut + dims - 1, cut) if dims else int(cut == 0)
        found += dealt * math.factorial(cut) * math.comb(axes, cut) * 2 ** (axes - cut)
    return found
