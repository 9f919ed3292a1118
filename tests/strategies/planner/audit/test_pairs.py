"""Pairs on a given mesh: the same for a seed, no two alike, and only such as torch says the meaning of."""

import pytest
import torch
from torch.distributed.tensor import Partial

from localtensor.layout.shards import has_one_meaning
from localtensor.layout.spec import StridedShard
from strategies.planner.audit import pairs
from strategies.planner.audit.pairs import DTYPES, draw_pairs, is_defined_by_torch
from tests.tools.plans.plan_pairs import pair
from tests.tools.plans.plan_pairs import spec as lying

MESHES = ((2,), (3,), (2, 3), (2, 2, 2))


@pytest.mark.parametrize("sizes", MESHES)
def test_a_seed_draws_the_same_pairs_and_another_draws_others(sizes):
    first = [repr(one) for one in draw_pairs(sizes, seed=0, budget=30)]
    assert first == [repr(one) for one in draw_pairs(sizes, seed=0, budget=30)]
    assert first != [repr(one) for one in draw_pairs(sizes, seed=1, budget=30)]
    assert len(set(first)) == 30


@pytest.mark.parametrize("sizes", MESHES)
def test_of_every_pair_torch_says_the_meaning(sizes):
    for one in draw_pairs(sizes, seed=3, budget=100):
        for spec in (one.src, one.dst):
            assert is_defined_by_torch(spec), f"{one}: {spec}"
        turned = [(a, b) for a, b in zip(one.src.placements, one.dst.placements, strict=True) if isinstance(a, Partial)]
        assert all(not isinstance(b, Partial) or a == b for a, b in turned), f"{one} turns a Partial into another"
        assert one.src != one.dst


def test_torch_says_the_meaning_of_uneven_strided_shards_that_encode_an_order_and_of_one_alone():
    assert is_defined_by_torch(lying("SS(0,2) S(0)", (3, 2), (7,)))
    assert is_defined_by_torch(lying("SS(0,3) R", (2, 2), (7,)))
    assert not is_defined_by_torch(lying("SS(0,3) SS(0,2)", (2, 2), (12,)))
    assert not is_defined_by_torch(lying("SS(0,3) S(0)", (2, 2), (12,)))
    assert not is_defined_by_torch(lying("P(sum) P(max)"))
    assert is_defined_by_torch(lying("P(sum) P(avg)"))


def test_rare_things_come_often():
    drawn = list(draw_pairs((2, 3), seed=0, budget=200))
    specs = [spec for one in drawn for spec in (one.src, one.dst)]
    assert sum(bool(one.flattened) for one in drawn) > 20
    assert sum(bool(spec.shard_order) for spec in specs) > 10
    assert sum(any(isinstance(p, StridedShard) for p in spec.placements) for spec in specs) > 30
    assert sum(any(isinstance(p, Partial) for p in spec.placements) for spec in specs) > 60
    assert {spec.dtype for spec in specs} == set(DTYPES)
    assert sum(0 in spec.shape for spec in specs) > 5


def test_strided_shards_of_which_torch_has_two_readings_come_too():
    drawn = draw_pairs((3, 2), seed=0, budget=300)
    specs = [spec for one in drawn for spec in (one.src, one.dst)]
    assert sum(not has_one_meaning(spec.placements, spec.shape, spec.dtype, (3, 2)) for spec in specs) >= 3


def test_where_there_are_few_pairs_few_come_and_it_ends(monkeypatch):
    monkeypatch.setattr(pairs, "SHAPES", ((4,),))
    monkeypatch.setattr(pairs, "DTYPES", (torch.bool,))
    assert len(list(draw_pairs((2,), seed=0, budget=3))) == 3
    assert list(draw_pairs((2,), seed=0, budget=0)) == []
    assert 10 < len(list(draw_pairs((2,), seed=0, budget=100))) < 100


def test_a_pair_prints_its_mesh_once_in_full():
    one = pair("S(0) S(0)", "R P(sum)", flattened=[("a", "b")], src_order=((0, (1, 0)),))
    assert str(one) == "f64[8,8] @ a:S(0)[1], b:S(0)[0] -> a:R, b:P(sum) on (2, 2), a+b flattened"
