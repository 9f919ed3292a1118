"""Simpler pairs: each is one that DTensor can be held to, and none is the pair that it came from."""

import pytest
from torch.distributed.tensor import Shard

from localtensor.layout.spec import StridedShard
from strategies.planner.audit.pairs import as_dtensor_reads, draw_pairs, is_defined_by_torch
from strategies.planner.audit.rank_run import is_public
from strategies.planner.audit.shrink import complexity, shrink_pair, simpler_pairs, strided
from tests.tools.plans.plan_pairs import pair, spec

TURNED = ((0, (1, 0)),)


@pytest.mark.parametrize("sizes", [(2,), (2, 3), (2, 2, 2)])
def test_every_edit_makes_a_simpler_pair_of_which_torch_says_the_meaning(sizes):
    for one in draw_pairs(sizes, seed=8, budget=6):
        found = list(simpler_pairs(one, "greedy"))
        assert found
        assert all(complexity(other) < complexity(one) for other in found)
        assert len({str(other) for other in found}) == len(found)
        for side in (side for other in found for side in (other.src, other.dst)):
            assert is_defined_by_torch(side), f"{side}"


def test_the_smallest_is_that_of_which_no_edit_shows_it():
    def cuts_in_a_row(one):
        return any(len(one.src.cut_by(dim)) > 1 for dim in range(len(one.src.shape)))

    for one in (
        pair("S(1) R S(1)", "R R P(max)", (3, 2, 2), (5, 7), flattened=[("a", "b")]),
        pair("S(0) S(0)", "S(1) R"),
    ):
        found = shrink_pair(one, "greedy", cuts_in_a_row)
        assert str(found.smallest) == "f64[1] @ a:S(0), b:S(0) -> a:R, b:R on (2, 2)"


def test_nothing_simpler_that_shows_it_leaves_the_pair_as_it_is():
    one = pair("S(0) R", "R S(1)")
    found = shrink_pair(one, "greedy", lambda other: other is one)
    assert found.smallest is one
    assert found.tried > 10
    assert shrink_pair(one, "greedy", lambda other: True, tries=3).tried == 3


def test_single_steps_of_dtensors_plan_come_first():
    first = next(simpler_pairs(pair("S(0) S(0)", "R S(0)"), "greedy"))
    assert str(first) == "f64[8,8] @ a:S(0), b:R -> a:R, b:R on (2, 2)"


def test_an_order_is_written_as_a_user_can_write_it():
    turned = spec("S(0) S(0)", order=TURNED)
    written = strided(turned)
    assert written.placements == (StridedShard(0, split_factor=2), Shard(0))
    assert as_dtensor_reads(written) == turned
    assert is_public(written, spec("R R"))
    one = pair("S(0) S(0)", "R R", src_order=TURNED)
    assert complexity(pair("SS(0,2) S(0)", "R R")) < complexity(one)


def test_an_axis_less_keeps_the_order_of_the_others():
    one = pair("S(0) R S(0)", "R R R", (2, 2, 2), src_order=((0, (2, 0)),))
    found = [str(other) for other in simpler_pairs(one, "greedy") if other.mesh.sizes == (2, 2)]
    assert "f64[8,8] @ a:S(0)[1], b:S(0)[0] -> a:R, b:R on (2, 2)" in found


def test_every_smaller_size_is_tried():
    found = shrink_pair(pair("S(0)", "R", (2,), (13,)), "greedy", lambda one: one.src.shape[0] >= 7)
    assert found.smallest.src.shape == (7,)
    assert {other.src.shape for other in simpler_pairs(pair("S(0)", "R", (2,), (13,)), "greedy")} >= {
        (n,) for n in range(1, 13)
    }


def test_one_dim_becomes_smaller_and_the_others_stay():
    found = {other.src.shape for other in simpler_pairs(pair("S(0)", "R", (2,), (3, 2, 4)), "greedy")}
    assert {(2, 2, 4), (3, 1, 4), (3, 2, 3)} <= found
