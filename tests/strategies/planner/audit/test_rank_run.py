"""What one rank does with a pair: by the user's door, or by DTensor's own."""

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import _redistribute

import localtensor as lt
from localtensor.layout.shards import split
from strategies.base.signals import quiet
from strategies.planner.audit.rank_run import (
    distributed_piece,
    dtensor_planner,
    is_public,
    redistribute_piece,
    result_of_rank,
)
from strategies.planner.audit.verdict import PairRun, distinct_values
from strategies.torch_api.mesh_and_caches import world_mesh_with_submeshes
from tests.tools.plans.plan_pairs import pair, spec

TURNED = ((0, (1, 0)),)


@pytest.mark.parametrize("part", [
    lambda: _redistribute.redistribute_local_tensor, lambda: _redistribute.use_min_cost_redistribution_plan,
    lambda: DeviceMesh._flatten,
])  # fmt: skip
def test_torch_still_has_the_private_parts_of_this_package(part):
    assert callable(part())


def test_a_user_can_ask_for_all_but_shard_orders_and_new_partials():
    assert is_public(spec("S(0) P(sum)"), spec("R P(sum)"))
    assert is_public(spec("SS(0,2) S(0)"), spec("S(0) S(0)"))
    assert not is_public(spec("R R"), spec("P(sum) R"))
    assert not is_public(spec("S(0) S(0)", order=TURNED), spec("R R"))
    assert not is_public(spec("R R"), spec("S(0) S(0)", order=TURNED))


def on_ranks(one, work, mode="greedy"):
    with quiet(), dtensor_planner(mode):
        return list(
            lt.run(
                lambda: work(world_mesh_with_submeshes(one.mesh, one.flattened)),
                ranks=one.mesh.ranks,
                leftovers="ignore",
            )
        )


@pytest.mark.parametrize("one", [
    pair("S(0) R", "R S(1)"), pair("S(0) S(0)", "S(0) S(0)", src_order=TURNED), pair("P(sum) R", "S(0) P(sum)"),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("mode", ["greedy", "graph"])
def test_every_rank_ends_with_its_piece(one, mode):
    job = PairRun.of(one)
    held = on_ranks(one, lambda mesh: redistribute_piece(job.part(mode, job.pieces[mesh.get_rank()]), mesh), mode)
    assert [tuple(x.shape) for x in held] == [tuple(x.shape) for x in split(job.whole, one.dst, torch.Generator())]


def test_the_planner_is_chosen_for_all_ranks_and_given_back():
    before = _redistribute._FORCE_MIN_COST_REDISTRIBUTION_PLAN
    with dtensor_planner("graph"):
        assert _redistribute._FORCE_MIN_COST_REDISTRIBUTION_PLAN is True
    with dtensor_planner("greedy"):
        assert not _redistribute._FORCE_MIN_COST_REDISTRIBUTION_PLAN
    assert before == _redistribute._FORCE_MIN_COST_REDISTRIBUTION_PLAN


def test_what_dtensor_raises_is_reported_and_not_raised():
    one = pair("R R", "P(product) R")
    job = PairRun.of(one)
    told = on_ranks(one, lambda mesh: result_of_rank(job.part("greedy", job.pieces[0]), mesh))
    assert all("product" in each.error and each.piece is None for each in told)


@pytest.mark.parametrize(
    "one", [spec("S(0) S(0)", shape=(7, 2)), spec("SS(0,2) S(0)"), spec("S(0) S(0)", order=TURNED)], ids=str
)
def test_the_referee_deals_by_torchs_own_words_what_our_split_deals(one):
    whole = distinct_values(one.shape, one.dtype)
    moved = pair("R R", "R S(0)")
    held = on_ranks(moved, lambda mesh: distributed_piece(whole, one, mesh))
    assert all(torch.equal(got, want) for got, want in zip(held, split(whole, one), strict=True))
    assert on_ranks(moved, lambda mesh: distributed_piece(whole, spec("P(sum) R"), mesh)) == [None] * 4


def test_a_flattened_submesh_of_some_axes_is_there():
    def flat(mesh):
        return sorted(mesh._get_root_mesh()._flatten_mapping) if hasattr(mesh, "_get_root_mesh") else ["b_c"]

    assert on_ranks(pair("R R R", "R R S(0)", (2, 2, 2), flattened=[("b", "c")]), flat)[0] == ["b_c"]
