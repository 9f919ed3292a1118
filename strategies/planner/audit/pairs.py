"""Random pairs of specs for DTensor's own redistribution, and DTensor's plans in terms of our steps and prices.

Only pairs that torch defines are drawn. A strided shard means what `distribute_tensor` deals, whether or not the pieces
are even. Several strided shards on one dim are drawn only where they encode an order, and kinds of Partial are mixed
only where they commute: torch rejects the others by design.

A transform of DTensor may take two collectives: a strided shard goes to another shard by way of Replicate, and so does
a partial value to a strided shard; on a device without all-to-all (gloo), a shard is gathered and sliced.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.placement_types import Placement

from localtensor import layout
from localtensor.layout import PARTIAL_KINDS, Mesh, Spec, StridedShard, is_unambiguous, shard_cut
from strategies.base.signals import quiet
from strategies.planner.steps.alpha_beta import REPLICATE, partials_commute
from strategies.planner.steps.legal_steps import legal_changes, placement_letter, why_illegal, with_placement
from strategies.planner.steps.plan import Plan, Price, RedistributionStep, axes_text, placement_text
from strategies.planner.steps.prices import TOPOLOGY, Time, Topology, priced_step
from strategies.torch_api.redistribute_plans import PlannerRefusal, Transform, planned_transforms
from strategies.torch_api.specs import NoSuchSpec, with_decoded_order

SHAPES: tuple[tuple[int, ...], ...] = (
    (8, 8), (8, 8), (12, 12), (7, 6), (5, 3), (9,), (3,), (1, 4), (2, 5), (4, 2, 6), (6, 0), (16,), (13, 2),
)  # fmt: skip
"""Even on most meshes, uneven, smaller than the mesh, of one row, empty."""
DTYPES = (torch.float64, torch.float64, torch.float32, torch.int64, torch.bool, torch.complex64)


@dataclass(frozen=True, slots=True)
class Pair:
    """Source and destination, and the sets of axes for which there is a flattened submesh."""

    src: Spec
    dst: Spec
    flattened: tuple[tuple[str, ...], ...] = ()

    @property
    def mesh(self) -> Mesh:
        return self.src.mesh

    def __str__(self) -> str:
        also = "".join(f", {'+'.join(names)} flattened" for names in self.flattened)
        return f"{self.src} -> {str(self.dst).partition(' @ ')[2]} on {self.mesh.sizes}{also}"


def draw_pairs(sizes: Sequence[int], *, seed: int, budget: int) -> Iterator[Pair]:
    """At most `budget` distinct pairs on a mesh of these sizes; the same for a seed in any process.

    >>> [str(pair) for pair in draw_pairs((2,), seed=0, budget=1)] == [str(p) for p in draw_pairs((2,), seed=0, budget=1)]
    True
    """
    rng = random.Random(f"plans {seed} {tuple(sizes)}")
    mesh, found = Mesh.of(*sizes), set[str]()
    for _ in range(20 * budget):  # on a mesh of one axis there are not so many
        if len(found) == budget:
            return
        pair = _random_pair(rng, mesh)
        if pair is not None and repr(pair) not in found:
            found.add(repr(pair))
            yield pair


def _random_pair(rng: random.Random, mesh: Mesh) -> Pair | None:
    shape, dtype = rng.choice(SHAPES), rng.choice(DTYPES)
    src = _random_spec(rng, mesh, shape, dtype, None)
    dst = _random_spec(rng, mesh, shape, dtype, src)
    flattened: tuple[tuple[str, ...], ...] = ()
    if len(mesh.sizes) > 1 and rng.random() < 0.3:
        sets = [names for n in range(2, len(mesh.sizes) + 1) for names in itertools.combinations(mesh.names, n)]
        flattened = (rng.choice(sets),)
    return Pair(src, dst, flattened) if is_defined_by_torch(src) and is_defined_by_torch(dst) and src != dst else None


def is_defined_by_torch(spec: Spec) -> bool:
    """Whether torch defines the spec: Partials that may be mixed, and sharded dims with an order that torch can read.

    Where strided shards encode an order and the pieces are uneven, torch has two readings. Such specs count as defined:
    the pieces that `distribute_tensor` deals are the input of the redistribution, and its expected result.
    """
    sizes = spec.mesh.sizes
    plain = tuple(Shard(cut[0]) if (cut := shard_cut(p)) is not None else p for p in spec.placements)
    if not layout.has_one_meaning(plain, spec.shape, spec.dtype, sizes):
        return False
    factors = [layout.split_factors(spec.placements, dim) for dim in range(len(spec.shape))]
    several = [each for each in factors if max(each) > 1 and sum(map(bool, each)) != 1]
    return all(layout.cut_order(each, sizes) is not None for each in several)


def _random_spec(rng: random.Random, mesh: Mesh, shape: tuple[int, ...], dtype: torch.dtype, src: Spec | None) -> Spec:
    offered = [kind for kind in PARTIAL_KINDS if is_unambiguous(kind, dtype)]
    mixed = partials_commute(Partial("sum"), Partial("avg"), dtype) and rng.random() < 0.2
    kinds = ("sum", "avg") if mixed else (rng.choice(offered),)
    form = rng.choice(("any", "any", "nested", "nested", "strided"))
    beside = [REPLICATE, REPLICATE, *map(Shard, range(len(shape))), *[Partial(kind) for kind in kinds]]
    placements: list[Placement] = [rng.choice(beside) for _ in mesh.sizes]
    dim = rng.randrange(len(shape))
    axes = rng.sample(range(len(mesh.sizes)), rng.randint(min(2, len(mesh.sizes)), len(mesh.sizes)))
    order: tuple[tuple[int, tuple[int, ...]], ...] = ()
    if form == "strided":
        placements = [p if p != Shard(dim) else REPLICATE for p in placements]
        for axis, placement in _strided_shards(rng, dim, axes, mesh).items():
            placements[axis] = placement
    elif form == "nested":
        for axis in axes:
            placements[axis] = Shard(dim)
    for axis, was in enumerate(src.placements if src is not None else ()):
        if isinstance(was, Partial) and isinstance(placements[axis], Partial) and placements[axis] != was:
            placements[axis] = REPLICATE  # no kind of Partial turns into another
    spec = Spec(mesh, tuple(placements), shape, dtype)
    if form == "nested" and rng.random() < 0.4:
        stack = list(spec.cut_by(dim))
        rng.shuffle(stack)
        order = ((dim, tuple(stack)),)
    return Spec(mesh, spec.placements, shape, dtype, order)


def _strided_shards(rng: random.Random, dim: int, axes: Sequence[int], mesh: Mesh) -> dict[int, Placement]:
    """Strided shards that encode an order; or a single one, as views create it."""
    if rng.random() < 0.3:
        return {axes[0]: StridedShard(dim, split_factor=rng.choice((2, 3)))}
    return layout.placements_in_order(dim, axes, mesh.sizes)


MODES = ("greedy", "graph")
"""DTensor's planners: the default, and the one under `use_min_cost_redistribution_plan`."""


@dataclass(frozen=True, slots=True)
class NoDTensorPlan:
    """DTensor has no plan: the first line of its error."""

    text: str

    def __str__(self) -> str:
        return self.text


def dtensor_plan(
    src: Spec,
    dst: Spec,
    mode: str = "greedy",
    *,
    price: Price | None = None,
    topology: Topology = TOPOLOGY,
    flattened: Sequence[Sequence[str]] = (),
    all_to_all: bool = True,
) -> Plan | NoDTensorPlan:
    """The plan of DTensor of this torch for a redistribution, priced as our own plans are; `first_fault` checks it.

    `mode` is one of `MODES`; a ValueError for another. DTensor uses its graph-based planner in either mode where there
    are strided shards or shard orders. `all_to_all` is False for a device that has none, such as cpu. DTensor skips
    steps along axes of one rank: they take no time, and do not count in the price.

    Raises `TorchChanged` where the planner of this torch has another interface than the versions that were read.

    >>> from localtensor.layout import parse
    >>> src, dst = (Spec(Mesh.of(dp=4), (parse(p),), (1024, 1024), torch.float32) for p in ("S(0)", "S(1)"))
    >>> print(dtensor_plan(src, dst))
    dp: all-to-all S(0) -> S(1)  786.4 kB  77.9 us
    """
    if mode not in MODES:
        raise ValueError(f"DTensor has no planner called {mode!r}; there are {', '.join(MODES)}")
    axes = [tuple(src.mesh.axis(name) for name in names) for names in flattened]
    try:
        with quiet():
            found = planned_transforms(src, dst, graph=mode == "graph", flattened=axes)
    except PlannerRefusal as refusal:
        return NoDTensorPlan(str(refusal))
    price = price or Time(topology)
    steps: list[RedistributionStep] = []
    spec = as_dtensor_reads(src)
    for transform in found:
        for kind, now in _collectives(transform, src, all_to_all):
            after = with_placement(spec, transform.axes, now)
            step = priced_step(kind, transform.axes, spec, after, topology)
            steps.append(step if _has_ranks(step) else replace(step, seconds=0.0))
            spec = after
    return Plan(src, dst, tuple(steps), dtensor_price(steps, price), price.name, f"DTensor's own, {mode}", 0)


def dtensor_price(steps: Sequence[RedistributionStep], price: Price) -> int:
    """The price of DTensor's steps, without those along axes of one rank, which it skips."""
    return sum(price(step.move) for step in steps if _has_ranks(step))


def _has_ranks(step: RedistributionStep) -> bool:
    """Whether a step is along an axis of more than one rank."""
    return any(step.was.mesh.sizes[axis] > 1 for axis in step.axes)


def first_fault(plan: Plan) -> str:
    """The first step that is not legal, or the end of the plan if it is a wrong one; empty if the plan is right.

    >>> from localtensor.layout import parse
    >>> wrong = Spec(Mesh.of(2, 2), (parse("S(0)"), parse("S(0)")), (8,), torch.float32)
    >>> step = priced_step("all_gather", (0,), wrong, with_placement(wrong, (0,), REPLICATE))
    >>> first_fault(Plan(wrong, step.now, (step,), 0, "", "", 0))
    'step 1, S(0) -> R on a: b cuts what a has left of dim 0: what is cut last is undone first'
    """
    for number, step in enumerate(plan.steps, 1):
        now = step.now.placements[step.axes[0]]
        if all(change.now != step.now for change in legal_changes(step.was, (now,), (step.axes,))):
            reason = why_illegal(step.was, step.axes[0], now) if len(step.axes) == 1 else ""
            where = axes_text(plan.src, step.axes)
            moved = f"{placement_text(step.was, step.axes[0])} -> {placement_text(step.now, step.axes[0])}"
            return f"step {number}, {moved} on {where}: {reason or 'this cannot be done along these axes at once'}"
    end = plan.steps[-1].now if plan.steps else as_dtensor_reads(plan.src)
    return "" if end == as_dtensor_reads(plan.dst) else f"it ends at {end}"


def as_dtensor_reads(spec: Spec) -> Spec:
    """The spec as DTensor's planners read it: a shard order in place of strided shards, if all of these encode one.

    >>> from localtensor.layout import parse
    >>> as_dtensor_reads(Spec(Mesh.of(2, 2), (parse("SS(0,2)"), parse("S(0)")), (8,), torch.float32))
    f32[8] @ a:S(0)[1], b:S(0)[0]
    """
    if spec.shard_order or not any(isinstance(p, StridedShard) for p in spec.placements):
        return spec
    try:
        return with_decoded_order(spec)
    except NoSuchSpec:
        return spec


_SINGLE_COLLECTIVE = {
    "RS": "local", "RSS": "local", "RP": "local", "SR": "all_gather", "SSR": "all_gather", "SP": "local",
    "PR": "all_reduce", "PS": "reduce_scatter",
}  # fmt: skip
"""Transforms that DTensor carries out in one collective; the others go by way of Replicate."""


def _collectives(transform: Transform, src: Spec, all_to_all: bool) -> Iterator[tuple[str, Placement]]:
    """The collectives of one transform, each with the placement after it."""
    was, now = transform.was, transform.now
    if all(src.mesh.sizes[axis] == 1 for axis in transform.axes):
        yield "local", now
        return
    kind = _SINGLE_COLLECTIVE.get(placement_letter(was) + placement_letter(now))
    if kind is None and all_to_all and type(was) is Shard and type(now) is Shard:
        kind = "all_to_all"
    if kind is not None:
        yield kind, now
        return
    yield _SINGLE_COLLECTIVE[placement_letter(was) + "R"], REPLICATE
    yield "local", now
