"""The bound is never above what the oracle pays, and no step lowers it by more than it costs; the integers are the specs."""

import itertools
import random

import pytest
import torch

from localtensor.layout.mesh import Mesh
from localtensor.layout.spec import Spec, parse
from strategies.planner.search.edges import INF, AdmissibleHeuristic, LegalEdges, edge_memory
from strategies.planner.search.plan_cache import AStarSearch
from strategies.planner.search.state_table import STEP_BITS, BadPrice, StateTable
from strategies.planner.steps.legal_steps import legal_changes, usable_placements
from strategies.planner.steps.prices import Sent, Time, priced_step
from tests.tools.plans.oracle import Oracle
from tests.tools.plans.pairs import drawn, every_spec

CASES = [
    ((2, 3), (7, 6), ("R", "S(0)", "S(1)", "P(sum)"), ()),
    ((2, 2), (8, 4), ("R", "S(0)", "SS(0,2)", "P(sum)"), ()),
    ((2, 2), (9, 4), ("R", "S(1)", "P(avg)", "P(sum)"), ()),
    ((2, 3), (6, 5), ("R", "S(0)", "S(1)", "P(sum)"), ((0, 1),)),
    ((2, 2, 3), (12, 5), ("R", "S(0)", "P(max)"), ((0, 1), (0, 1, 2))),
    ((2, 3), (7, 5), ("R", "S(0)", "S(1)", "P(min)"), ((0, 1),)),
    ((2, 2, 3), (12, 5), ("R", "S(0)", "P(sum)"), ()),
]
IDS = ["plain", "strided", "partials", "flattened", "three axes flattened", "exchanged", "three axes"]


def table_of(src, dst, flattened, price=None):
    return StateTable(src, usable_placements(src, dst), flattened, price or Time())


@pytest.mark.parametrize(("sizes", "shape", "names", "flattened"), CASES, ids=IDS)
def test_the_steps_from_every_layout_are_those_of_the_table_of_legal_steps(sizes, shape, names, flattened):
    specs, rng = every_spec(sizes, shape, names), random.Random(4)
    for spec in specs:
        dst = rng.choice(specs)
        offered = usable_placements(spec, dst)
        table = StateTable(spec, offered, flattened, Time())
        state = table.state(spec)
        assert table.spec(state) == spec
        search = AStarSearch(table, state, table.state(dst) if _has(table, dst) else state)
        got = set()
        for there, values, cost, sort in search.edges(state, search.values(state)):
            now = table.spec(there)
            step = priced_step(sort.kind, sort.axes, spec, now)
            assert cost == (Time()(step.move) << STEP_BITS) + 1 and values == search.values(there)
            assert edge_memory(table, sort, table.piece(state), table.piece(there)) == step.memory
            got.add((sort.kind, sort.axes, repr(now)))
        assert got == {
            (change.kind, change.axes, repr(change.now)) for change in legal_changes(spec, offered, flattened)
        }


def test_a_step_along_several_axes_knows_whether_what_cuts_before_them_is_done():
    mesh, shard, pending = Mesh.of(2, 2, 3), parse("S(0)"), parse("P(max)")
    src = Spec(mesh, (pending, pending, shard), (12, 5), torch.float32)
    dst = Spec(mesh, (shard, shard, shard), (12, 5), torch.float32, ((0, (2, 0, 1)),))
    table = table_of(src, dst, ((0, 1),))
    search = AStarSearch(table, table.state(src), table.state(dst))
    found = {there: values for there, values, _, _ in search.edges(search.src, search.values(search.src))}
    assert found[search.dst] == search.values(search.dst) == 0
    assert all(values == search.values(there) for there, values in found.items())


def _has(table, spec):
    return all(p in table.placements for p in spec.placements)


@pytest.mark.parametrize("price", [Time(), Sent()], ids=["time", "bytes"])
@pytest.mark.parametrize(("sizes", "shape", "names", "flattened"), CASES, ids=IDS)
def test_the_bound_is_admissible_and_consistent_everywhere(sizes, shape, names, flattened, price):
    specs, rng = every_spec(sizes, shape, names), random.Random(1)
    offered = tuple(dict.fromkeys(map(parse, names)))
    oracle = Oracle(offered, flattened)
    costs = {spec: oracle.costs(spec, price) for spec in specs}
    for dst in rng.sample(specs, 4):
        table = StateTable(specs[0], offered, flattened, price)
        search = AStarSearch(table, table.state(specs[0]), table.state(dst))
        search.bound.solve(search.values(search.src))
        soon = {spec: search.bound.at(search.values(table.state(spec))) for spec in specs}  # some far ones are guessed
        bound = {spec: search.bound.solve(search.values(table.state(spec))) for spec in specs}
        assert bound[dst] == 0 and max(bound.values()) < INF
        for spec in specs:
            if dst in costs[spec]:
                price_of_all, count = costs[spec][dst]
                assert soon[spec] <= bound[spec] <= (price_of_all << STEP_BITS) + count, f"{spec} -> {dst}"
            for there, values, cost, _ in search.edges(table.state(spec), search.values(table.state(spec))):
                assert bound[spec] <= cost + search.bound.solve(values), f"{spec} -> {table.spec(there)} -> {dst}"


def test_the_bound_is_most_of_the_price():
    """Else it would be no use: a bound of 0 is admissible, too."""
    rng, shares = random.Random(2), []
    for _ in range(60):
        mesh = Mesh.of(*[rng.choice((2, 3, 4)) for _ in range(3)])
        src, dst = (drawn(rng, mesh, (64, 256)) for _ in range(2))
        table = table_of(src, dst, ())
        search = AStarSearch(table, table.state(src), table.state(dst))
        found = search.cheapest()
        if found.cost:
            shares.append(search.bound.at(search.values(search.src)) / found.cost)
    assert sum(shares) / len(shares) > 0.85


def test_on_five_axes_the_bound_goes_straight_to_what_is_asked():
    """What each axis costs by itself leads it: without that it settles seventeen times as many values."""
    rng, settled = random.Random(2), 0
    for _ in range(30):
        mesh = Mesh.of(*[rng.choice((2, 3, 4)) for _ in range(5)])
        src, dst = (drawn(rng, mesh, (64, 256)) for _ in range(2))
        table = table_of(src, dst, ())
        search = AStarSearch(table, table.state(src), table.state(dst))
        assert search.cheapest().cost > 0 or src == dst
        settled += len(search.bound._known)
    assert settled < 30 * 200


class Odd:
    name, grows = "odd", True

    def __init__(self, got):
        self.got = got

    def __call__(self, move):
        return self.got


@pytest.mark.parametrize("got", [0.5, -1, None, float("inf")])
def test_a_price_that_is_no_whole_number_is_refused(got):
    src, dst = (Spec(Mesh.of(2), (parse(p),), (8,), torch.float32) for p in ("S(0)", "R"))
    table = table_of(src, dst, (), Odd(got))
    with pytest.raises(
        BadPrice, match=r"^plan: price: odd: it returns .*, and a price is a whole number of 0 or more\."
    ):
        AStarSearch(table, table.state(src), table.state(dst)).cheapest()


def test_a_layout_has_one_integer_and_one_only():
    specs = every_spec((2, 2, 2), (8, 8))
    table = StateTable(specs[0], tuple(map(parse, ("R", "S(0)", "S(1)", "P(sum)"))), (), Time())
    assert len({table.state(spec) for spec in specs}) == len(specs)
    bound = AdmissibleHeuristic(table, table.state(specs[0]))
    assert all(LegalEdges(table, bound).of(table.state(spec), 0) for spec in itertools.islice(specs, 3))
