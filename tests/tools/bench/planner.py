"""Plans searched from nothing: ours beside torch's graph-based and greedy planners, on the same pairs, in one run.

Pairs are random: meshes of one to five axes of 2 to 4 ranks, tensors of 2 or 3 dims of 64, 256, 1024 or 4096 rows, half
of the pairs with Partials, all of them of different specs in the default order of shards, which is all that the greedy
planner knows.  The planners are asked in turns for each pair, and of each its best time counts; times are those of the
processor.  Ours includes the checks, the bound, the search, and the steps with their bytes, seconds and memory;
torch's is its transform infos alone.

*From nothing* each planner knows nothing of the mesh or the tensor.  *Ready* means that it has planned this pair before
but does not remember the plan: torch then has its planner of this mesh and tensor, and we have the table of ours.

Ours is timed by the clock of its default topology.  What the plans cost by torch's own count is compared with a
search of ours by that price.  `python -m tests.tools.bench.planner` prints it all.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from torch.distributed.tensor import _redistribute

from localtensor.layout.mesh import Mesh
from localtensor.layout.spec import Spec
from strategies.planner.search.api import PLAN_CACHE, plan, plan_uncached
from strategies.planner.steps.plan import Plan
from strategies.planner.steps.prices import TorchPrice
from tests.tools.plans import graph_based
from tests.tools.plans.pairs import drawn

TARGETS = {2: 5, 4: 50, 5: 100}
"""How many times faster from nothing, by the number of mesh axes; the median of the pairs' own ratios counts."""
PAIRS = {1: 40, 2: 60, 3: 40, 4: 16, 5: 12}
TURNS = {1: 7, 2: 7, 3: 5, 4: 2, 5: 1}
"""How often torch is asked for each pair: what takes a second once is asked once."""
QUICK = 0.01
"""Seconds: what takes less is asked three times in each turn."""
CHEAPER = 1e-3
"""Microseconds by torch's count that are more than rounding."""


LEGEND = (
    "faster: than the graph-based planner, median of the pairs' own ratios; medians: ratio of the medians; ready: where both "
    "have planned the pair before and forgotten the plan; layouts, theirs: looked at; dearer: ours, by torch's own count; "
    "greedy so: plans of the greedy planner that cost more than ours, by that count"
)


@dataclass(frozen=True, slots=True)
class Pair:
    """What was measured of one pair: milliseconds, layouts, and microseconds by torch's count."""

    src: Spec
    ours: float
    graph: float
    ours_ready: float
    graph_ready: float
    greedy: float
    cached: float
    our_states: int
    their_states: int
    our_cost: float
    their_cost: float
    greedy_cost: float


@dataclass(frozen=True, slots=True)
class Row:
    """The pairs of one number of axes: medians, and how often ours is cheaper by torch's count."""

    axes: int
    pairs: int
    ranks: str
    elements: str
    ours: float
    graph: float
    times: float
    """The median of the ratios of the pairs; beside it the ratio of the medians, and both where planners are ready."""
    times_of_medians: float
    times_ready: float
    greedy: float
    cached: float
    our_states: float
    their_states: float
    cheaper: int
    dearer: int
    greedy_dearer: int


@dataclass(frozen=True, slots=True)
class Found:
    rows: tuple[Row, ...]

    @property
    def passed(self) -> bool:
        """Whether no plan is dearer by torch's own count; a time never fails it."""
        return not any(row.dearer for row in self.rows)

    def figures(self) -> dict[str, Any]:
        return {"rows": [asdict(row) | {"ratio": row.times} for row in self.rows]}


def compare(console: Console, most: int = 5) -> Found:
    """The planners on meshes of up to so many axes."""
    rows = []
    with graph_based.fake_ranks(4**5):
        for axes in range(1, most + 1):
            console.print(f"{PAIRS[axes]} pairs on {axes} axes", style="dim")
            rows.append(row(axes))
    return Found(tuple(rows))


def row(axes: int) -> Row:
    rng = random.Random(axes)
    found = [beside(*pair(rng, axes, partial=bool(turn % 2)), TURNS[axes]) for turn in range(PAIRS[axes])]

    def median(of: Callable[[Pair], float]) -> float:
        return statistics.median(map(of, found))

    ours, graph = median(lambda one: one.ours), median(lambda one: one.graph)
    ranks, elements = [one.src.mesh.ranks for one in found], [math.prod(one.src.shape) for one in found]
    return Row(
        axes, len(found), f"{min(ranks)} - {max(ranks)}", f"{min(elements):.0e} - {max(elements):.0e}", ours, graph,
        median(lambda one: one.graph / one.ours), graph / ours, median(lambda one: one.graph_ready / one.ours_ready),
        median(lambda one: one.greedy), median(lambda one: one.cached), median(lambda one: one.our_states),
        median(lambda one: one.their_states), sum(one.our_cost < one.their_cost - CHEAPER for one in found),
        sum(one.our_cost > one.their_cost + CHEAPER for one in found),
        sum(one.our_cost < one.greedy_cost - CHEAPER for one in found),
    )  # fmt: skip


def pair(rng: random.Random, axes: int, *, partial: bool) -> tuple[Spec, Spec]:
    """Two different specs of a tensor."""
    while True:
        mesh = Mesh.of(*[rng.choice((2, 3, 4)) for _ in range(axes)])
        shape = tuple(rng.choice((64, 256, 1024, 4096)) for _ in range(rng.choice((2, 3))))
        src, dst = (drawn(rng, mesh, shape, partial=partial, ordered=False) for _ in range(2))
        if src != dst:
            return src, dst


def beside(src: Spec, dst: Spec, turns: int) -> Pair:
    """All that is measured of one pair."""
    mesh = graph_based.mesh_of(src.mesh)
    was, now = (graph_based.their_spec(spec, mesh) for spec in (src, dst))
    plan(src, dst)
    calls = (
        lambda: plan_uncached(src, dst), lambda: graph_based.search(was, now), lambda: ready(src, dst),
        lambda: graph_based.search(was, now, afresh=False), lambda: graph_based.search(was, now, graph=False),
    )  # fmt: skip
    times = best(calls, turns)
    [cached] = best([lambda: [plan(src, dst) for _ in range(1000)]], 3)
    price = TorchPrice.of(src.mesh, graph_based.devices_in_a_host())
    mine = sum(price.microseconds(step.move) for step in plan_uncached(src, dst, price).steps)
    theirs, greedy = (
        graph_based.microseconds(graph_based.along(was, graph_based.search(was, now, graph=graph, afresh=False)))
        for graph in (True, False)
    )
    states = plan_uncached(src, dst).states, states_of(was, now)
    return Pair(src, *times, cached / 1000, *states, mine, theirs, greedy)


def ready(src: Spec, dst: Spec) -> Plan:
    """As `plan_uncached`, but with the table that a search for this tensor left."""
    return plan_uncached(src, dst, make=PLAN_CACHE.table)


def states_of(was: Any, now: Any) -> int:
    """The layouts whose steps torch's search asks for."""
    planner, count = _redistribute.DTensorRedistributePlanner(was.mesh, was.tensor_meta), 0
    ask = planner.get_next_state

    def counted(*args: Any) -> Any:
        nonlocal count
        count += 1
        return ask(*args)

    planner.get_next_state = counted
    planner.generate_graph_based_transform_infos(was, now, was.shape)
    return count


def best(calls: Sequence[Callable[[], Any]], turns: int) -> list[float]:
    """Milliseconds of the processor in the best of some turns; all are called in each."""
    found = [math.inf] * len(calls)
    for _ in range(turns):
        for place, call in enumerate(calls):
            for _ in range(3 if found[place] < QUICK else 1):
                start = time.process_time()
                call()
                found[place] = min(found[place], time.process_time() - start)
    return [seconds * 1e3 for seconds in found]


def show(console: Console, found: Found) -> None:
    table = Table(title="Plans searched from nothing, medians in ms", title_justify="left")
    for name in ("axes", "pairs", "ours", "graph", "greedy", "faster", "medians", "ready", "target", "layouts", "theirs",
                 "dearer", "greedy so"):  # fmt: skip
        table.add_column(name, justify="right", no_wrap=True)
    for row in found.rows:
        table.add_row(
            str(row.axes), str(row.pairs), f"{row.ours:.3f}", f"{row.graph:.3g}", f"{row.greedy:.3f}", f"{row.times:.1f}",
            f"{row.times_of_medians:.1f}", f"{row.times_ready:.1f}", str(TARGETS.get(row.axes, "-")),
            f"{row.our_states:.0f}", f"{row.their_states:.0f}", str(row.dearer), str(row.greedy_dearer),
        )  # fmt: skip
    console.print(table)
    console.print(LEGEND, style="dim")


if __name__ == "__main__":
    told = Console(width=200)
    show(told, compare(told))
