"""Every pair of specs on every small mesh, and some on larger ones: what the planner's plans cost and what the oracle's do.

`python -m tests.tools.plans.optimal` prints the counts; it takes minutes.
"""

from __future__ import annotations

import itertools
import random
import sys
import time

import torch

from localtensor.errors import OtherRows
from localtensor.layout.mesh import Mesh
from localtensor.layout.shard_order import ordered
from localtensor.layout.spec import Spec
from strategies.planner.search.api import NoPlan, plan_uncached
from strategies.planner.steps.legal_steps import usable_placements
from strategies.planner.steps.plan import Move, Price
from strategies.planner.steps.prices import Sent, Time, TorchPrice
from tests.tools.command_line import parser_of
from tests.tools.plans.oracle import Oracle, without_lone
from tests.tools.plans.pairs import PLAIN, drawn, every_spec

EXAMPLES = """examples:
  python -m tests.tools.plans.optimal        every pair on small meshes, and 40 draws on three axes: minutes
  python -m tests.tools.plans.optimal 120    and 120 draws

Exit code 1 if a plan costs more, or less, than the oracle's.
"""
SHAPES = ((8, 4), (5, 3), (1, 7), (0, 4), (9,), (2, 3))
NAMES = (PLAIN, ("R", "S(0)", "SS(0,2)", "P(max)"), ("R", "S(0)", "P(avg)", "P(sum)"))


class Count:
    """Each step costs the same."""

    name, grows = "steps", True

    def __call__(self, move: Move) -> int:
        return 1


class Least:
    """The more bytes the cheaper: no bound holds."""

    name, grows = "least", False

    def __call__(self, move: Move) -> int:
        return max(10**6 - move.nbytes, 0)


def prices(mesh: Mesh) -> tuple[Price, ...]:
    return Time(), Sent(), Count(), Least(), TorchPrice.of(mesh)


def pairs_that_differ(
    specs: list[Spec], price: Price, flattened: tuple[tuple[int, ...], ...] = ()
) -> tuple[int, list[str]]:
    """How many pairs there are of these specs, and those that the oracle takes to its end for another cost."""
    names = [[specs[0].mesh.names[axis] for axis in axes] for axes in flattened]
    tried, differ, oracles = 0, [], dict[object, Oracle]()
    for src in specs:
        costs: dict[object, dict[Spec, tuple[int, int]]] = {}
        for dst in specs:
            try:
                found = plan_uncached(src, dst, price, flattened=names)
            except NoPlan:
                continue
            offered = usable_placements(plain(src), plain(dst))
            if offered not in costs:
                oracle = oracles.setdefault(offered, Oracle(offered, flattened))
                costs[offered] = oracle.costs(without_lone(plain(src)), price)
            want = costs[offered][without_lone(plain(dst))]
            tried += 1
            if (found.price, len(found.steps)) != want:
                differ.append(f"{src} -> {dst} by {price.name}: {found.price} in {len(found.steps)}, the oracle {want}")
    return tried, differ


def plain(spec: Spec) -> Spec:
    try:
        return ordered(spec)
    except OtherRows:
        return spec


def with_three_axes(turns: int, seed: int = 0) -> tuple[int, list[str]]:
    """The pairs of some specs at random, on another mesh and of another shape each time."""
    rng, tried, differ = random.Random(seed), 0, list[str]()
    for turn in range(turns):
        mesh = Mesh.of(*[rng.choice((2, 3, 4)) for _ in range(3)])
        shape = tuple(rng.choice((1, 5, 8, 64)) for _ in range(2))
        some = [drawn(rng, mesh, shape) for _ in range(6)]
        count, wrong = pairs_that_differ(some, prices(mesh)[turn % 5])
        tried, differ = tried + count, differ + wrong
    return tried, differ


def main() -> int:
    parser = parser_of("plans.optimal", EXAMPLES, __doc__)
    parser.add_argument("draws", nargs="?", type=int, default=40, help="of specs on meshes of three axes (default 40)")
    asked = parser.parse_args()
    start, tried, differ = time.perf_counter(), 0, list[str]()
    meshes = [(1,), (2,), (3,), (4,), (1, 3), (2, 1), (2, 2), (2, 3), (3, 2), (2, 4), (4, 4)]
    for sizes in meshes:
        for shape, names in itertools.product(SHAPES, NAMES):
            specs = every_spec(sizes, shape, names)
            for price in prices(specs[0].mesh):
                count, wrong = pairs_that_differ(specs, price)
                tried, differ = tried + count, differ + wrong
        if len(sizes) == 2:
            for specs in (every_spec(sizes, (6, 5)), every_spec(sizes, (6, 5), NAMES[1])):
                count, wrong = pairs_that_differ(specs, Time(), ((0, 1),))
                tried, differ = tried + count, differ + wrong
        count, wrong = pairs_that_differ(every_spec(sizes, (6, 5), dtype=torch.int16), Time())
        tried, differ = tried + count, differ + wrong
        print(f"meshes up to {sizes}: {tried} pairs and prices, {len(differ)} differ", flush=True)
    count, wrong = with_three_axes(asked.draws)
    tried, differ = tried + count, differ + wrong
    print(f"with three axes: {tried} pairs and prices, {len(differ)} differ; {time.perf_counter() - start:.0f} s")
    print(*differ[:20], sep="\n")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
