"""The cheapest plan from one spec to another: a shortest path over the specs that legal steps connect."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

from torch.distributed.tensor import Partial

from localtensor.errors.base import LocalTensorError, refusal
from localtensor.placement import Spec, short
from strategies.cost import commute
from strategies.plans import Plan, Price, Step
from strategies.pricing import TOPOLOGY, Time, Topology, step_of
from strategies.steps import changes, targets


class NoPlan(LocalTensorError):
    """There is no way from one spec to another, or none within the memory that is allowed."""

    def __init__(self, argument: str, values: str, problem: str, remedy: str) -> None:
        super().__init__(refusal("plan", argument, values, problem, remedy))


def plan(
    src: Spec,
    dst: Spec,
    price: Price | None = None,
    *,
    topology: Topology = TOPOLOGY,
    memory: int | None = None,
    flattened: Sequence[Sequence[str]] = (),
) -> Plan:
    """The cheapest steps from one spec to another of the same tensor on the same mesh, always the same ones.

    Raises `NoPlan`.  `memory` is the most bytes that a rank may have in use; `flattened` names sets of axes
    that have a group of all their ranks.

    >>> import torch
    >>> from localtensor.mesh import Mesh
    >>> from localtensor.placement import parse
    >>> src, dst = (Spec(Mesh.of(dp=4), (parse(p),), (1024, 1024), torch.float32) for p in ("S(0)", "S(1)"))
    >>> print(plan(src, dst))
    dp: all-to-all S(0) -> S(1)  786.4 kB  77.9 us
    """
    _check(src, dst)
    price = price or Time(topology)
    axes = [tuple(src.mesh.axis(name) for name in names) for names in flattened]
    offered, count = targets(src, dst), itertools.count()
    queue: list[tuple[int, int, int, Spec, tuple[Step, ...]]] = [(0, 0, next(count), src, ())]
    done: set[str] = set()
    while queue:
        cost, _, _, spec, steps = heapq.heappop(queue)
        if spec == dst:
            return Plan(src, dst, steps, cost, price.name, f"the cheapest of all ways; {len(done)} looked at", len(done))
        if repr(spec) in done:
            continue
        done.add(repr(spec))
        for change in changes(spec, offered, axes):
            step = step_of(change.kind, change.axes, spec, change.now, topology)
            if memory is None or step.memory <= memory:
                more = (cost + price(step.move), len(steps) + 1, next(count), change.now, (*steps, step))
                heapq.heappush(queue, more)
    raise NoPlan("memory", f"{memory} bytes", "no plan stays within it", "Allow more.")


def _check(src: Spec, dst: Spec) -> None:
    shown = f"{src} -> {dst}"
    if (src.mesh, src.shape, src.dtype) != (dst.mesh, dst.shape, dst.dtype):
        raise NoPlan("src, dst", shown, "they are not of one tensor on one mesh", "Give both the same of these.")
    for spec in (src, dst):
        pending = [p for p in spec.placements if isinstance(p, Partial)]
        for one, other in itertools.combinations(pending, 2):
            if not commute(one, other, spec.dtype):
                problem = f"{short(one)} and {short(other)} do not commute: which is reduced first would matter"
                raise NoPlan("src" if spec is src else "dst", str(spec), problem, "Reduce one of them first.")
    for was, now in zip(src.placements, dst.placements, strict=True):
        if isinstance(was, Partial) and isinstance(now, Partial) and was != now:
            problem = f"{short(was)} does not turn into {short(now)}: these are parts of different things"
            raise NoPlan("dst", shown, problem, "Plan to R first, and from there.")
