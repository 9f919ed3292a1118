"""What DTensor itself would do beside our plan: by both of its planners, unless one would take seconds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch.distributed.tensor import Replicate

from localtensor.errors import TorchChanged
from localtensor.layout.spec import Spec, StridedShard
from strategies.planner.audit.torch_plans import MODES, Refused, fault_of, for_dtensor, paid
from strategies.planner.steps.legal_steps import changed
from strategies.planner.steps.plan import Plan, Price, Step
from strategies.planner.steps.prices import TOPOLOGY, Topology, step_of

MOST_LAYOUTS, MOST_RANKS = 1_500, 65_536
"""Its graph-based planner takes 0.7 s for 1,240 layouts (four axes, a tensor of three dims) and 2.8 s for 3,552."""


@dataclass(frozen=True, slots=True)
class Theirs:
    """One of DTensor's planners, and its plan, its refusal, or why it was not asked."""

    mode: str
    plan: Plan | None
    refused: str = ""
    skipped: str = ""
    wrong: str = ""
    """What is wrong with the plan: a step that is not legal, or another end."""
    gathered: Plan | None = None
    """What it does on cpu, where it has no all-to-all: it gathers, and cuts.  None if the plan has none, either."""


def theirs(
    src: Spec, dst: Spec, price: Price, *, topology: Topology = TOPOLOGY, flattened: Sequence[Sequence[str]] = ()
) -> tuple[Theirs, ...]:
    """Both, greedy first.

    >>> from strategies.planner.text.parser import read
    >>> from strategies.planner.steps.prices import Time
    >>> [(one.mode, str(one.plan)) for one in theirs(*read("f32[8] @ dp=2: R -> S(0)"), Time())]
    [('greedy', 'dp: local R -> S(0)  1 us'), ('graph', 'dp: local R -> S(0)  1 us')]
    """
    made = []
    for mode in MODES:
        if why := too_much(src, dst, mode):
            made.append(Theirs(mode, None, skipped=why))
            continue
        try:
            found = for_dtensor(src, dst, mode, price=price, topology=topology, flattened=flattened)
        except TorchChanged as changed_torch:  # why: our own plan needs none of torch's private parts, and stands
            made.append(Theirs(mode, None, skipped=f"not asked: {changed_torch}"))
            continue
        if isinstance(found, Refused):
            made.append(Theirs(mode, None, refused=str(found)))
        else:
            made.append(Theirs(mode, found, wrong=fault_of(found), gathered=gathered(found, price, topology)))
    return tuple(made)


def gathered(plan: Plan, price: Price, topology: Topology = TOPOLOGY) -> Plan | None:
    """The plan with an all-gather and a cut in the place of each all-to-all; None if it has none.

    >>> from strategies.planner.text.parser import read
    >>> from strategies.planner.steps.prices import Time
    >>> src, dst = read("f32[8,8] @ dp=2: S(0) -> S(1)")
    >>> print(gathered(for_dtensor(src, dst), Time()))
    dp: all-gather S(0) -> R  128 B  5.01 us
    dp: local R -> S(1)  1 us
    """
    if all(step.kind != "all_to_all" for step in plan.steps):
        return None
    steps: list[Step] = []
    for step in plan.steps:
        if step.kind == "all_to_all":
            whole = changed(step.was, step.axes, Replicate())
            steps.append(step_of("all_gather", step.axes, step.was, whole, topology))
            steps.append(step_of("local", step.axes, whole, step.now, topology))
        else:
            steps.append(step)
    return replace(plan, steps=tuple(steps), price=paid(steps, price))


def too_much(src: Spec, dst: Spec, mode: str) -> str:
    """Why DTensor is not asked; empty if it is."""
    if src.mesh.ranks > MOST_RANKS:
        return f"not asked: a mesh of {src.mesh.ranks:,} ranks is too much for it"
    ordered = any(spec.shard_order or any(isinstance(p, StridedShard) for p in spec.placements) for spec in (src, dst))
    count = layouts(len(src.mesh.sizes), len(src.shape))
    if count <= MOST_LAYOUTS or not (mode == "graph" or ordered):
        return ""
    return f"not asked: it would look at up to {count:,} layouts, for seconds or more"


def layouts(axes: int, dims: int) -> int:
    """How many there are of R, one Partial and shards of so many dims, in any order where axes share a dim.

    >>> layouts(1, 2), layouts(2, 1), layouts(5, 2)
    (4, 10, 3552)
    """
    found = 0
    for cut in range(axes + 1):
        dealt = math.comb(cut + dims - 1, cut) if dims else int(cut == 0)
        found += dealt * math.factorial(cut) * math.comb(axes, cut) * 2 ** (axes - cut)
    return found
