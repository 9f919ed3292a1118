"""Plans searched from nothing: ours beside torch's graph-based and greedy planners, on the same pairs, in one run.

Pairs are random: meshes of one to five axes of 2 to 4 ranks, tensors of 2 or 3 dims, half of the pairs with Partials, all
of them of different specs in the default order of shards, which is all that the greedy planner knows.  Each planner is
asked several times for each pair, and its best time counts; times are those of the processor.  Ours includes the
checks, the bound, the search, and the steps with their bytes, seconds and memory; torch's is its transform infos alone.

Ours is timed by the clock of its default topology.  What the plans cost by torch's own count is compared with a
search of ours by that price.  `python -m tests.bench.planner` prints it all.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from torch.distributed.tensor import _redistribute

from localtensor.mesh import Mesh
from localtensor.placement import Spec
from strategies.planner import plan, searched
from strategies.price_torch import TorchPrice
from tests.plans import graph_based
from tests.plans.pairs import drawn

TARGETS = {2: 5, 4: 50, 5: 100}
"""How many times faster by the number of mesh axes."""
PAIRS = {1: 40, 2: 60, 3: 40, 4: 16, 5: 6}
TURNS = {1: 7, 2: 7, 3: 5, 4: 2, 5: 1}
"""How often torch is asked for each pair: what takes a second once is asked once."""
CHEAPER = 1e-3
"""Microseconds by torch's count that are more than rounding."""


@dataclass(frozen=True, slots=True)
class Row:
    """Medians over the pairs of one number of axes, in milliseconds."""

    axes: int
    ours: float
    graph: float
    greedy: float
    cached: float
    our_states: float
    their_states: float
    cheaper: int
    dearer: int
    greedy_dearer: int
    pairs: int

    @property
    def ratio(self) -> float:
        return self.graph / self.ours


@dataclass(frozen=True, slots=True)
class Found:
    rows: tuple[Row, ...]

    @property
    def passed(self) -> bool:
        fast = all(row.ratio >= TARGETS.get(row.axes, 0) for row in self.rows)
        return fast and not any(row.dearer for row in self.rows)

    def figures(self) -> dict[str, Any]:
        return {"rows": [asdict(row) | {"ratio": row.ratio} for row in self.rows]}


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
    columns = list(zip(*found, strict=True))
    medians = [statistics.median(column) for column in columns[:6]]
    costs = list(zip(*columns[6:], strict=True))
    cheaper = sum(mine < theirs - CHEAPER for mine, theirs, _ in costs)
    dearer = sum(mine > theirs + CHEAPER for mine, theirs, _ in costs)
    greedy = sum(mine < greedy - CHEAPER for mine, _, greedy in costs)
    return Row(axes, *medians, cheaper, dearer, greedy, len(found))


def pair(rng: random.Random, axes: int, *, partial: bool) -> tuple[Spec, Spec]:
    """Two different specs of a tensor."""
    while True:
        mesh = Mesh.of(*[rng.choice((2, 3, 4)) for _ in range(axes)])
        shape = tuple(rng.choice((64, 256, 1024, 4096)) for _ in range(rng.choice((2, 3))))
        src, dst = (drawn(rng, mesh, shape, partial=partial, ordered=False) for _ in range(2))
        if src != dst:
            return src, dst


def beside(src: Spec, dst: Spec, turns: int) -> tuple[float, ...]:
    """Milliseconds of ours, graph-based, greedy and ours from the cache; states of both; costs by torch's count."""
    mesh = graph_based.mesh_of(src.mesh)
    was, now = (graph_based.their_spec(spec, mesh) for spec in (src, dst))
    plan(src, dst)
    times = (
        best(lambda: searched(src, dst), max(turns, 5)),
        best(lambda: graph_based.search(was, now), turns),
        best(lambda: graph_based.search(was, now, graph=False), turns),
        best(lambda: [plan(src, dst) for _ in range(1000)], 3) / 1000,
    )
    price = TorchPrice.of(src.mesh, graph_based.devices_in_a_host())
    mine = sum(price.microseconds(step.move) for step in searched(src, dst, price).steps)
    theirs, greedy = (
        graph_based.microseconds(graph_based.along(was, graph_based.search(was, now, graph=graph)))
        for graph in (True, False)
    )
    return *times, searched(src, dst).states, states_of(was, now), mine, theirs, greedy


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


def best(call: Callable[[], Any], turns: int) -> float:
    """Milliseconds of the processor in the best of some turns."""
    found = []
    for _ in range(turns):
        start = time.process_time()
        call()
        found.append(time.process_time() - start)
    return min(found) * 1e3


def show(console: Console, found: Found) -> None:
    table = Table(title="Plans searched from nothing, medians in ms", title_justify="left")
    for name in ("axes", "ours", "graph-based", "greedy", "times faster", "target", "from the cache", "layouts, ours", "theirs",
                 "cheaper by torch's count", "dearer", "than greedy, cheaper"):  # fmt: skip
        table.add_column(name, justify="right")
    for row in found.rows:
        table.add_row(
            str(row.axes), f"{row.ours:.2f}", f"{row.graph:.2f}", f"{row.greedy:.3f}", f"{row.ratio:.0f}",
            str(TARGETS.get(row.axes, "-")), f"{row.cached * 1e3:.2f} us", f"{row.our_states:.0f}", f"{row.their_states:.0f}",
            f"{row.cheaper} of {row.pairs}", str(row.dearer), f"{row.greedy_dearer} of {row.pairs}",
        )  # fmt: skip
    console.print(table)


if __name__ == "__main__":
    told = Console(width=170)
    show(told, compare(told))
