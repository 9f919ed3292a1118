"""torch's own cost as a price: the same number as torch's, for every step that torch takes."""

import importlib
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh

from localtensor.layout.mesh import Mesh
from localtensor.layout.spec import Spec, StridedShard, parse, short
from strategies.planner.search.api import plan
from strategies.planner.steps.legal_steps import LEGAL, legal_changes
from strategies.planner.steps.plan import Move
from strategies.planner.steps.prices import TorchPrice, move_of

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
