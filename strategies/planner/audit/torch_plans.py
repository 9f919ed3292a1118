"""DTensor's own plans as plans of ours: the same steps, the same prices, and what is wrong with them, if anything.

A transform of DTensor may be two collectives in truth: a strided shard goes to another shard by way of a replica, a
partial to a strided shard likewise; and where a device has no all-to-all (gloo), a shard is gathered and cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from localtensor.layout.spec import Spec, StridedShard
from strategies.base.uninterrupted import quiet
from strategies.planner.steps.alpha_beta import REPLICATE
from strategies.planner.steps.legal_steps import changed, changes, letter, refusal_of
from strategies.planner.steps.plan import Plan, Price, Step, placed
from strategies.planner.steps.prices import TOPOLOGY, Time, Topology, step_of
from strategies.torch_api.redistribute_plans import Refusal, Transform, transforms
from strategies.torch_api.specs import NoSuchSpec, decoded

MODES = ("greedy", "graph")
"""DTensor's planners: what it does by itself, and under `use_min_cost_redistribution_plan`."""


@dataclass(frozen=True, slots=True)
class Refused:
    """DTensor has no plan: the first line of what it raises."""

    text: str

    def __str__(self) -> str:
        return self.text


def for_dtensor(
    src: Spec,
    dst: Spec,
    mode: str = "greedy",
    *,
    price: Price | None = None,
    topology: Topology = TOPOLOGY,
    flattened: Sequence[Sequence[str]] = (),
    all_to_all: bool = True,
) -> Plan | Refused:
    """What DTensor of this torch does for a redistribution, priced as our own plans are; `fault_of` judges it.

    `mode` is one of `MODES`; a ValueError for another.  DTensor takes its graph-based planner in either mode where
    there are strided shards or shard orders.  `all_to_all` is False for a device that has none, such as cpu.  A step along
    axes of one rank is nothing but a new name, which DTensor skips: it takes no time, and is not in the price.

    Raises `TorchChanged` where the planner of this torch is not asked as those that were read.

    >>> import torch
    >>> from localtensor.layout.mesh import Mesh
    >>> from localtensor.layout.spec import parse
    >>> src, dst = (Spec(Mesh.of(dp=4), (parse(p),), (1024, 1024), torch.float32) for p in ("S(0)", "S(1)"))
    >>> print(for_dtensor(src, dst))
    dp: all-to-all S(0) -> S(1)  786.4 kB  77.9 us
    """
    if mode not in MODES:
        raise ValueError(f"DTensor has no planner called {mode!r}; there are {', '.join(MODES)}")
    axes = [tuple(src.mesh.axis(name) for name in names) for names in flattened]
    try:
        with quiet():
            found = transforms(src, dst, graph=mode == "graph", flattened=axes)
    except Refusal as refusal:
        return Refused(str(refusal))
    price = price or Time(topology)
    steps: list[Step] = []
    spec = as_read(src)
    for transform in found:
        for kind, now in _stages(transform, src, all_to_all):
            after = changed(spec, transform.axes, now)
            step = step_of(kind, transform.axes, spec, after, topology)
            steps.append(step if _moves(step) else replace(step, seconds=0.0))
            spec = after
    return Plan(src, dst, tuple(steps), paid(steps, price), price.name, f"DTensor's own, {mode}", 0)


def paid(steps: Sequence[Step], price: Price) -> int:
    """What DTensor pays for its steps by a price, of which it skips those along axes of one rank."""
    return sum(price(step.move) for step in steps if _moves(step))


def _moves(step: Step) -> bool:
    return any(step.was.mesh.sizes[axis] > 1 for axis in step.axes)


def fault_of(plan: Plan) -> str:
    """The first step that is not legal, or where the plan ends if that is not where it should; empty if it is right.

    >>> import torch
    >>> from localtensor.layout.mesh import Mesh
    >>> from localtensor.layout.spec import parse
    >>> wrong = Spec(Mesh.of(2, 2), (parse("S(0)"), parse("S(0)")), (8,), torch.float32)
    >>> step = step_of("all_gather", (0,), wrong, changed(wrong, (0,), REPLICATE))
    >>> fault_of(Plan(wrong, step.now, (step,), 0, "", "", 0))
    'step 1, S(0) -> R on a: b cuts what a has left of dim 0: what is cut last is undone first'
    """
    for number, step in enumerate(plan.steps, 1):
        now = step.now.placements[step.axes[0]]
        if all(change.now != step.now for change in changes(step.was, (now,), (step.axes,))):
            reason = refusal_of(step.was, step.axes[0], now) if len(step.axes) == 1 else ""
            where = ",".join(plan.src.mesh.names[axis] for axis in step.axes)
            moved = f"{placed(step.was, step.axes[0])} -> {placed(step.now, step.axes[0])}"
            return f"step {number}, {moved} on {where}: {reason or 'this cannot be done along these axes at once'}"
    end = plan.steps[-1].now if plan.steps else as_read(plan.src)
    return "" if end == as_read(plan.dst) else f"it ends at {end}"


def as_read(spec: Spec) -> Spec:
    """The spec as DTensor's planners read it: a shard order in place of strided shards, if all of these encode one.

    >>> import torch
    >>> from localtensor.layout.mesh import Mesh
    >>> from localtensor.layout.spec import parse
    >>> as_read(Spec(Mesh.of(2, 2), (parse("SS(0,2)"), parse("S(0)")), (8,), torch.float32))
    f32[8] @ a:S(0)[1], b:S(0)[0]
    """
    if spec.shard_order or not any(isinstance(p, StridedShard) for p in spec.placements):
        return spec
    try:
        return decoded(spec)
    except NoSuchSpec:
        return spec


_KINDS = {
    "RS": "local", "RSS": "local", "RP": "local", "SR": "all_gather", "SSR": "all_gather", "SP": "local",
    "PR": "all_reduce", "PS": "reduce_scatter",
}  # fmt: skip
"""What DTensor does in one collective; the rest goes by way of a replica."""


def _stages(transform: Transform, src: Spec, all_to_all: bool) -> Iterator[tuple[str, Placement]]:
    """The collectives of one transform, each with the placement after it."""
    was, now = transform.was, transform.now
    if all(src.mesh.sizes[axis] == 1 for axis in transform.axes):
        yield "local", now
        return
    kind = _KINDS.get(letter(was) + letter(now))
    if kind is None and all_to_all and type(was) is Shard and type(now) is Shard:
        kind = "all_to_all"
    if kind is not None:
        yield kind, now
        return
    yield _KINDS[letter(was) + "R"], REPLICATE
    yield "local", now
