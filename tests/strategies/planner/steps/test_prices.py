"""What steps cost, and that the price of the cheapest plan is a distance.  torch's own cost as a price: the same
number as torch's, for every step that torch takes."""

import importlib
import itertools
import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh

from localtensor.layout import NETWORK, Network
from localtensor.layout.mesh import Mesh
from localtensor.layout.shard_order import lies_alike
from localtensor.layout.shards import split
from localtensor.layout.spec import Spec, StridedShard, parse, short
from strategies.planner.search.api import NoPlan, plan
from strategies.planner.search.metric_check import check_metric
from strategies.planner.steps.alpha_beta import partials_commute
from strategies.planner.steps.legal_steps import LEGAL, legal_changes, usable_placements
from strategies.planner.steps.plan import PICO, Move
from strategies.planner.steps.prices import (
    TOPOLOGY,
    Sent,
    Time,
    Topology,
    TorchPrice,
    bytes_sent,
    largest_piece,
    move_of,
    peak_memory,
    priced_step,
)

KINDS = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce", "local")
F32 = torch.float32
LINKS = st.builds(Network, st.floats(0, 1e-3), st.floats(0, 1e-8))


def spec(text, sizes=(2, 2), shape=(8, 6), dtype=F32, order=()):
    return Spec(Mesh.of(*sizes), tuple(map(parse, text.split())), shape, dtype, order)


@given(link=LINKS, kind=st.sampled_from(KINDS), ranks=st.integers(2, 99), nbytes=st.integers(0, 2**40))
def test_a_collective_costs_never_less_with_more_bytes_or_more_ranks(link, kind, ranks, nbytes):
    cost = link.seconds(kind, ranks, nbytes)
    assert 0 <= cost <= link.seconds(kind, ranks, nbytes + 1000)
    assert cost <= link.seconds(kind, ranks + 1, nbytes)


@given(link=LINKS, ranks=st.integers(1, 99), nbytes=st.integers(0, 2**40))
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(link, ranks, nbytes):
    halves = [link.seconds(kind, ranks, nbytes) for kind in ("reduce_scatter", "all_gather")]
    assert link.seconds("all_reduce", ranks, nbytes) == sum(halves)


@pytest.mark.parametrize(("kind", "was", "now", "nbytes", "goes"), [  # 8 x 6 floats on 2 x 3 ranks, along the second
    ("all_gather", "R S(0)", "R R", 3 * 3 * 6 * 4, 2 * 3 * 6 * 4),  # 3 rows of 8 on the first rank
    ("all_gather", "S(0) S(0)", "S(0) R", 3 * 2 * 6 * 4, 2 * 2 * 6 * 4),
    ("reduce_scatter", "R P(sum)", "R S(0)", 3 * 3 * 6 * 4, 2 * 3 * 6 * 4),
    ("all_reduce", "S(1) P(max)", "S(1) R", 8 * 3 * 4, 2 * 8 * 3 * 4 * 2 // 3),
    ("all_to_all", "R S(0)", "R S(1)", 3 * 6 * 4, 3 * 6 * 4 * 2 // 3),
    ("local", "R R", "R S(0)", 3 * 6 * 4, 0),
    ("local", "R S(0)", "R P(sum)", 8 * 6 * 4, 0),
])  # fmt: skip
def test_the_bytes_of_a_step_are_those_of_the_largest_pieces(kind, was, now, nbytes, goes):
    step = priced_step(kind, (1,), spec(was, (2, 3)), spec(now, (2, 3)))
    assert step.move.ranks == 3
    assert step.move.nbytes == nbytes
    assert step.sent == goes
    assert step.seconds == TOPOLOGY.seconds(step.move)


def test_a_step_is_reported_by_the_kinds_of_its_placements_and_by_an_even_piece():
    move = move_of("all_to_all", (1,), spec("S(0) SS(0,2)", (2, 3)), spec("S(0) S(1)", (2, 3)))
    assert (move.was, move.now) == ("SS", "S")
    assert move.even == 8 * 6 * 4 / 6
    assert move_of("all_reduce", (0, 1), spec("P(avg) P(avg)"), spec("R R")).ranks == 4


@settings(max_examples=40)
@given(data=st.data(), rows=st.integers(0, 9), sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_the_largest_piece_is_the_largest_that_there_is(data, rows, sizes):
    offered = ["R", "S(0)", "SS(0,2)", "SS(0,3)", "S(1)", "P(sum)"]
    one = spec(" ".join(data.draw(st.sampled_from(offered)) for _ in sizes), tuple(sizes), (rows, 3))
    pieces = split(torch.zeros(rows, 3), one, torch.Generator().manual_seed(0))
    assert largest_piece(one) == max(piece.numel() * 4 for piece in pieces)


def test_time_is_whole_picoseconds_and_never_less_than_the_clock_says():
    topology = Topology((Network(1.5e-12, 0.0),), Network(0.25e-12, 0.0))
    assert Time(topology)(Move("all_gather", (0,), 2, 0, 0.0)) == 2
    assert Time(topology)(Move("local", (0,), 2, 0, 0.0)) == 1
    assert Time(topology)(Move("all_gather", (0,), 1, 0, 0.0)) == 1  # one rank talks to nobody: it copies
    assert Time(topology)(Move("all_gather", (1,), 2, 0, 0.0)) == 5 * PICO // 10**6  # no link of its own


def test_clocks_that_differ_have_names_that_differ():
    topologies = [Topology(), Topology((Network(),)), Topology(memory=Network(0.0, 0.0))]
    assert len({Time(topology).name for topology in topologies}) == 3
    assert Sent().name not in {Time(topology).name for topology in topologies}


def test_axes_of_which_a_topology_says_nothing_have_the_usual_link():
    slow = Network(1.0, 1e-3)
    assert Topology((slow,)).link((0,)) == slow and Topology((slow,)).link((2,)) == Network()
    assert Topology((slow,)).link((1, 2)) == Network() and Topology((slow,)).link((0, 2)) == slow


def test_no_one_sends_less_than_its_share_and_one_rank_sends_nothing():
    for kind in KINDS[:4]:
        assert bytes_sent(Move(kind, (0,), 3, 100, 0.0)) == (134 if kind == "all_reduce" else 67)
        assert bytes_sent(Move(kind, (0,), 1, 100, 0.0)) == 0


@pytest.mark.parametrize(("kind", "nbytes", "most"), [
    ("all_gather", 40, 10 + 10 + 40 + 40), ("reduce_scatter", 40, 10 + 40 + 40 + 40), ("all_reduce", 40, 10 + 40),
    ("all_to_all", 40, 10 + 10 + 40 + 40), ("local", 40, 10 + 40),
])  # fmt: skip
def test_the_memory_of_a_step_is_what_it_has_what_it_makes_and_buffers(kind, nbytes, most):
    assert peak_memory(Move(kind, (0,), 4, nbytes, 0.0), 10, 40) == most


# -- what no collective reduces


@pytest.mark.parametrize(("ends", "dtype", "exchanged"), [
    ("P(max)", F32, True), ("P(sum)", F32, False), ("P(max)", torch.int32, False), ("P(sum)", torch.int16, True),
    ("P(product)", torch.complex64, True),
])  # fmt: skip
def test_a_move_knows_whether_its_parts_are_exchanged(ends, dtype, exchanged):
    one, whole, cut = (spec(text, (3,), (7, 5), dtype) for text in (ends, "R", "S(0)"))
    assert move_of("all_reduce", (0,), one, whole).exchanged == exchanged
    assert move_of("reduce_scatter", (0,), one, cut).exchanged == exchanged
    assert not move_of("all_gather", (0,), cut, whole).exchanged
    assert not move_of("local", (0,), cut, one).exchanged


def test_what_is_exchanged_costs_an_all_to_all_and_takes_all_parts_at_once():
    one, whole, cut = (spec(text, (4,), (7, 5)) for text in ("P(max)", "R", "S(0)"))
    reduced, scattered = priced_step("all_reduce", (0,), one, whole), priced_step("reduce_scatter", (0,), one, cut)
    mine, share, rows = 7 * 5 * 4, 9 * 4, 2 * 5 * 4  # 35 elements are four times 9, less one
    assert reduced.move.nbytes == 4 * share and scattered.move.nbytes == 4 * rows
    both = [NETWORK.seconds(kind, 4, 4 * share) for kind in ("all_to_all", "all_gather")]
    assert reduced.seconds == sum(both) > NETWORK.seconds("all_reduce", 4, 4 * share)
    assert (
        scattered.seconds == NETWORK.seconds("all_to_all", 4, 4 * rows) > NETWORK.seconds("reduce_scatter", 4, 4 * rows)
    )
    assert reduced.memory == 2 * mine + 4 * share + share
    assert scattered.memory == 2 * mine + 4 * rows + rows
    assert reduced.sent == 2 * 3 * share and scattered.sent == 3 * rows


# -- the short way to a price


@settings(max_examples=60)
@given(
    kind=st.sampled_from(KINDS), axes=st.sampled_from([(0,), (1,), (2,), (0, 1)]), ranks=st.integers(1, 64),
    nbytes=st.integers(0, 2**40), latency=st.floats(0, 1e-3), per_byte=st.floats(0, 1e-8), exchanged=st.booleans(),
)  # fmt: skip
def test_the_short_way_to_a_price_says_what_the_long_one_says(kind, axes, ranks, nbytes, latency, per_byte, exchanged):
    exchanged = exchanged and kind in ("all_reduce", "reduce_scatter")
    topology = Topology((Network(latency, per_byte), Network(per_byte=per_byte)), Network(latency, 1e-12))
    for price in (Time(topology), Sent()):
        move = Move(kind, axes, ranks, nbytes, 0.0, exchanged=exchanged)
        assert price.along(kind, axes, ranks, exchanged)(nbytes) == price(move)


# -- the price of the cheapest plan is a distance

ENDS = ("R", "S(0)", "S(1)", "SS(0,2)", "P")


@st.composite
def triples(draw):
    """Three specs of one tensor.  An axis has one kind of Partial: from one to another there is no plan at all."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    shape = draw(st.tuples(st.integers(0, 9), st.integers(1, 70)))
    dtype = draw(st.sampled_from([F32, torch.int64, torch.bool]))
    known = ["sum", "max"] if dtype != F32 else ["sum", "avg", "max"]
    kinds = [draw(st.sampled_from(known)) for _ in sizes]

    def one():
        texts = [draw(st.sampled_from(ENDS)) for _ in sizes]
        placements = tuple(parse(f"P({kind})" if p == "P" else p) for p, kind in zip(texts, kinds, strict=True))
        plain = Spec(Mesh.of(*sizes), placements, shape, dtype)
        cut = [plain.cut_by(dim) for dim in range(2)]
        order = tuple((dim, tuple(draw(st.permutations(axes)))) for dim, axes in enumerate(cut) if len(axes) > 1)
        return Spec(plain.mesh, placements, shape, dtype, order)

    three = one(), one(), one()
    assume(all(map(means_something, three)))
    return three


def means_something(one):
    return all(partials_commute(a, b, one.dtype) for a, b in itertools.combinations(one.placements, 2))


def prices(mesh):
    return [Time(), Time(SLOW), Sent(), TorchPrice(mesh.sizes, 2, strided=True)]


SLOW = Topology((Network(0.0, 1e-9), Network(1e-3, 0.0), Network(2e-6, 3e-11)), Network(0.0, 1e-12))


def distance(src, dst, price, limit=None):
    try:
        return plan(src, dst, price, memory=limit).price
    except NoPlan:
        return math.inf


@given(three=triples(), which=st.integers(0, 3))
def test_the_price_of_the_cheapest_plan_obeys_the_triangle_inequality(three, which):
    a, b, c = three
    price = prices(a.mesh)[which]
    assert 0 <= distance(a, c, price) <= distance(a, b, price) + distance(b, c, price) < math.inf


@given(three=triples(), which=st.integers(0, 3))
def test_what_costs_nothing_is_nothing_or_is_nothing_to_that_price(three, which):
    one, other, _ = three
    price = prices(one.mesh)[which]
    assert plan(one, one, price).steps == ()
    assert distance(one, one, price) == 0
    found = plan(one, other, price)
    assert (found.price == 0) == all(price(step.move) == 0 for step in found.steps)
    assert found.steps or lies_alike(one, other)


@pytest.mark.few(2)
@pytest.mark.parametrize(("sizes", "rows"), [((2, 2), 1), ((2, 2), 2), ((3, 2), 4), ((2, 2), 0)])
def test_so_it_does_where_different_specs_lie_alike(sizes, rows):
    """All triples: what is as short as that may be told in several ways, and none of them may be dearer."""
    some = tuple(map(parse, ("R", "S(0)", "SS(0,2)", "P(sum)")))
    for price in (Time(), Sent()):
        found = check_metric(price, Mesh.of(*sizes), (rows,), placements=some, orders=True)
        assert found.triples >= 16**3
        assert found.worst[:3] == ()
        assert found.holds


@given(three=triples(), limit=st.integers(0, 20_000))
def test_with_a_memory_limit_it_is_a_distance_too_that_may_be_infinite(three, limit):
    a, b, c = three
    assert distance(a, c, Time(), limit) <= distance(a, b, Time(), limit) + distance(b, c, Time(), limit)
    assert distance(a, c, Time()) <= distance(a, c, Time(), limit)


def test_it_is_not_symmetric_since_to_cut_is_to_copy_and_to_put_together_is_to_talk():
    whole, cut = spec("R R"), spec("S(0) R")
    assert plan(whole, cut).price < plan(cut, whole).price
    assert plan(whole, cut, Sent()).price == 0


def test_a_shard_in_the_way_steps_aside_as_a_partial_value_where_that_sends_least():
    """Else the way by `S(1) P(sum)` would be cheaper than the cheapest."""
    found = plan(spec("R S(1)", shape=(8, 8)), spec("S(1) S(1)", shape=(8, 8)), Sent())
    assert [step.kind for step in found.steps].count("reduce_scatter") == 1
    assert found.price == 64


@pytest.mark.parametrize(("src", "dst", "dtype", "kinds"), [
    ("S(0)", "R", F32, ["P(sum)"]), ("P(max)", "R", F32, ["P(max)", "P(sum)"]), ("S(0)", "P(min)", F32, ["P(min)", "P(sum)"]),
    ("P(max)", "R", torch.int32, ["P(max)"]), ("P(max)", "R", torch.int16, ["P(max)", "P(sum)"]),
    ("P(avg)", "R", F32, ["P(avg)", "P(sum)"]), ("S(0)", "P(avg)", F32, ["P(avg)", "P(sum)"]), ("S(0)", "R", torch.bool, ["P(sum)"]),
    ("S(0)", "R", torch.float8_e5m2, []),
])  # fmt: skip
def test_every_plan_is_offered_a_partial_value_that_a_shard_may_become(src, dst, dtype, kinds):
    one, other = spec(src, (4,), dtype=dtype), spec(dst, (4,), dtype=dtype)
    offered = usable_placements(one, other)
    assert [short(p) for p in offered if short(p).startswith("P")] == kinds
    steps = [change for change in legal_changes(one, offered) if short(change.now.placements[0]).startswith("P")]
    assert bool(steps) == (src == "S(0)" and bool(kinds))


PARTS = {  # read on torch 2.13; 2.11 to 2.15 have them, too
    "torch.distributed.tensor._collective_utils.one_step_redistribute_cost": "the cost of one step of a plan",
    "torch.distributed.tensor._collective_utils.MeshTopoInfo": "what torch takes a mesh for: links and hosts",
    "torch.distributed.tensor._dtensor_spec.DTensorSpec": "what torch is asked with",
    "torch.distributed.tensor._dtensor_spec.TensorMeta": "the shape and the dtype in it",
    "torch.distributed.device_mesh._mesh_resources": "num_devices_per_host: which axes leave a host",
}
TAKEN = {("R", "S"), ("R", "SS"), ("R", "P"), ("S", "R"), ("S", "S"), ("P", "R"), ("P", "S"), ("SS", "R")}
"""The steps of torch's planner."""
OURS = {("S", "P"), ("SS", "P"), ("S", "SS"), ("SS", "S"), ("SS", "SS"), ("P", "SS")}
OFFERED = tuple(map(parse, ("R", "S(0)", "S(1)", "P(sum)", "P(avg)", "SS(0,2)")))


def part(name):
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(module), last)


@pytest.mark.parametrize("name", PARTS)
def test_the_private_part_is_there(name):
    assert part(name) is not None


def torch_says(was, now, per_host):
    """torch's function on two specs of ours, on hosts with so many devices."""
    cost, topo, make, meta, meshes = map(part, PARTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meshes, "num_devices_per_host", lambda kind: per_host)
        patch.setattr(topo, "build_from_mesh", staticmethod(topo.build_from_mesh.__wrapped__))  # it remembers meshes
        mesh = DeviceMesh("cpu", torch.arange(was.mesh.ranks).view(was.mesh.sizes), _init_backend=False, _rank=0)
        of = meta(torch.Size(was.shape), torch.empty(was.shape, device="meta").stride(), was.dtype)
        return cost(*(make(mesh, spec.placements, of) for spec in (was, now)))


@st.composite
def specs(draw):
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    placements = tuple(draw(st.sampled_from(OFFERED)) for _ in sizes)
    shape = draw(st.tuples(st.integers(1, 5000), st.integers(1, 300)))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.complex128]))
    return Spec(Mesh.of(*sizes), placements, shape, dtype)


def kinds(was, now, axis):
    return tuple("SS" if type(p) is StridedShard else short(p)[0] for p in (was.placements[axis], now.placements[axis]))


@given(was=specs(), per_host=st.integers(1, 16))
def test_each_step_that_torch_takes_costs_what_torch_says(was, per_host):
    price = TorchPrice(was.mesh.sizes, per_host)
    for change in legal_changes(was, OFFERED):
        [axis] = change.axes
        if kinds(was, change.now, axis) in TAKEN:
            said = torch_says(was, change.now, per_host)
            assert math.isfinite(said)
            assert price(move_of(change.kind, change.axes, was, change.now)) == round(said * 1e6)


def test_every_kind_of_step_is_either_torchs_or_told_as_ours():
    steps = {(row.was, row.now) for row in LEGAL if row.kind}
    assert steps == TAKEN | OURS
    assert not TAKEN & OURS


def move(was, now, axes=(0,), ranks=4, even=2.0**20):
    return Move("any", axes, ranks, 0, even, was, now)


@pytest.mark.parametrize("strided", [True, False])
@pytest.mark.parametrize("held", ["S", "SS"])
def test_no_cheapest_plan_makes_partial_values_of_a_shard(held, strided):
    price = TorchPrice((4,), strided=strided)
    assert price(move(held, "P")) > price(move(held, "R")) + price(move("R", "P"))


def test_a_strided_shard_that_torch_takes_for_one_costs_what_a_shard_does():
    assert TorchPrice((4,), strided=True)(move("SS", "R")) == TorchPrice((4,))(move("S", "R"))
    assert TorchPrice((4,), strided=False)(move("SS", "R")) == 0


@pytest.mark.parametrize("strided", [True, False])
def test_a_detour_by_a_strided_shard_is_cheaper_only_where_torch_gathers_it_for_nothing(strided):
    held, by, whole = (Spec(Mesh.of(8), (parse(p),), (4096, 4096), torch.float32) for p in ("S(0)", "SS(1,3)", "R"))
    price = TorchPrice((8,), strided=strided)
    direct, first, second = (plan(*ends, price).price for ends in ((held, whole), (held, by), (by, whole)))
    assert (direct <= first + second) == strided


@pytest.mark.parametrize(("was", "now"), [("S", "R"), ("P", "S"), ("P", "R"), ("S", "S"), ("S", "SS"), ("P", "SS")])
def test_axes_that_are_flattened_cost_what_one_axis_of_their_slowest_link_does(was, now):
    together = TorchPrice((2, 3, 4), per_host=12)(move(was, now, (0, 2), 8))
    assert together == TorchPrice((8,), per_host=4)(move(was, now, (0,), 8))


def test_every_step_has_a_price_and_one_axis_of_one_rank_is_begun_as_torch_has_it():
    for was, now in TAKEN | OURS:
        price = TorchPrice((1, 4))(move(was, now, (0,), 1))
        assert type(price) is int
        assert price >= 0
    assert TorchPrice((1,))(move("S", "R", ranks=1)) == 6_600_000


def test_hosts_and_strided_shards_are_in_its_name():
    prices = [TorchPrice(*given) for given in (((2, 2), 4, True), ((2, 2), 2, True), ((4,), 4, True), ((4,), 4, False))]
    assert len({price.name for price in prices}) == 4
    assert TorchPrice.of(Mesh.of(dp=2, tp=2), 4).sizes == (2, 2)
