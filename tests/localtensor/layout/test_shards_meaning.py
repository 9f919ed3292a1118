"""Layouts that mean one thing: by hand, and against the pieces that `split` gives."""

import itertools
import math

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from localtensor.layout.mesh import Mesh
from localtensor.layout.shards import cut_order, has_one_meaning, placements_in_order, split, split_factors
from localtensor.layout.spec import Spec, StridedShard, parse, shard_cut

F32 = torch.float32


def strided(dim, factor):
    return StridedShard(dim, split_factor=factor)


def meant(*layout, rows=7, mesh=(2, 3), dtype=torch.float64):
    return has_one_meaning(tuple(map(parse, layout)), (rows, 4), dtype, mesh)


@pytest.mark.parametrize("layout", [
    ("R", "S(0)"), ("S(0)", "S(0)"), ("P(sum)", "P(sum)"), ("P(sum)", "P(avg)"), ("P(max)", "S(1)"),
    ("P(product)", "P(product)"),
], ids=str)  # fmt: skip
def test_plain_shards_and_partials_of_one_kind_have_a_meaning(layout):
    assert meant(*layout)


@pytest.mark.parametrize("layout", [("P(sum)", "P(max)"), ("P(min)", "P(max)"), ("P(avg)", "P(product)")], ids=str)
def test_kinds_of_partial_for_which_the_order_of_axes_matters_have_none(layout):
    assert not meant(*layout)


def test_a_partial_that_means_nothing_for_the_dtype_has_none():
    assert not meant("P(avg)", "R", dtype=torch.bool)
    assert not meant("P(max)", "R", dtype=torch.complex64)


def test_a_shard_of_a_dim_that_is_not_there_has_none():
    assert not meant("S(2)", "R") and not meant("SS(2,2)", "R")
    assert not has_one_meaning((Shard(-1), Replicate()), (7, 4), F32, (2, 3))


def test_a_strided_shard_has_one_where_both_ways_to_read_it_agree():
    assert meant("SS(0,3)", "S(0)") and meant("SS(0,2)", "S(0)", rows=8, mesh=(3, 2))
    assert not meant("SS(0,2)", "S(0)", rows=7, mesh=(3, 2))  # 3,1 against 1,3 rows on the last two ranks


def test_a_strided_shard_that_encodes_no_order_is_read_from_left_to_right_if_it_cuts_alone():
    assert meant("SS(0,4)", "R") and meant("SS(0,4)", "S(1)")
    assert not meant("SS(0,4)", "SS(0,4)") and not meant("SS(0,2)", "S(0)", mesh=(2, 3))


@pytest.mark.parametrize(
    ("layout", "shape", "dtype", "means"),
    [
        ((Partial("sum"), Partial("avg")), (2,), F32, True),
        ((Partial("sum"), Partial("max")), (2,), F32, False),
        ((Partial("min"), Replicate()), (2,), torch.complex64, False),
        ((Shard(0), Shard(1)), (2,), F32, False),
        ((Shard(0), Shard(0)), (5,), F32, True),
        ((strided(0, 2), Shard(0)), (6,), F32, True),
        ((strided(0, 2), Shard(0)), (7,), F32, False),
        ((strided(0, 3), Shard(0)), (6,), F32, False),
        ((strided(0, 3), Replicate()), (7,), F32, True),
    ],
)
def test_layouts_with_and_without_one_meaning(layout, shape, dtype, means):
    assert has_one_meaning(layout, shape, dtype, (3, 2)) is means


@pytest.mark.parametrize("mesh", [(2, 2), (2, 3), (3, 2), (2, 2, 2), (2, 3, 2)])
def test_every_order_of_cuts_is_written_with_factors_from_which_it_can_be_read(mesh):
    for count in range(1, len(mesh) + 1):
        for order in itertools.permutations(range(len(mesh)), count):
            made = placements_in_order(0, order, mesh)
            factors = [shard_cut(made[axis])[1] if axis in made else 0 for axis in range(len(mesh))]
            assert cut_order(factors, mesh) == order
            layout = [made.get(axis, Replicate()) for axis in range(len(mesh))]
            assert list(split_factors(layout, 0)) == factors and not any(split_factors(layout, 1))


def test_an_order_that_no_factors_encode_is_reported():
    assert cut_order((2, 1), (2, 3)) is None
    assert cut_order((0, 4), (2, 2)) is None


@pytest.mark.parametrize("mesh", [(2, 2), (2, 3), (2, 2, 2)])
@pytest.mark.parametrize("size", [24, 48])  # even on all: those are easily counted by hand
def test_cuts_in_an_order_give_each_rank_its_rows(mesh, size):
    x = torch.arange(size)
    for order in itertools.permutations(range(len(mesh))):
        layout = tuple(placements_in_order(0, order, mesh)[axis] for axis in range(len(mesh)))
        held = split(x, Spec(Mesh.of(*mesh), layout, (size,), x.dtype))
        length = size // math.prod(mesh)
        for rank, place in enumerate(itertools.product(*map(range, mesh))):
            start = 0
            for axis in order:
                start = start * mesh[axis] + place[axis]
            assert held[rank].tolist() == list(range(start * length, (start + 1) * length))


@pytest.mark.parametrize("mesh", [(3, 2), (4, 2), (2, 2, 2), (2, 3, 2)], ids=str)
def test_what_has_a_meaning_is_cut_alike_by_those_axes_in_that_order(mesh):
    """The other reading, from `split` alone: turn the axes so that those that cut first stand first."""
    found = set()
    for order, size in itertools.product(itertools.permutations(range(len(mesh))), range(15)):
        layout = tuple(placement for _, placement in sorted(placements_in_order(0, order, mesh).items()))
        held = split(torch.arange(size), Spec(Mesh.of(*mesh), layout, (size,), torch.int64))
        turned = Spec(Mesh.of(*(mesh[axis] for axis in order)), (Shard(0),) * len(mesh), (size,), torch.int64)
        ranks = torch.arange(math.prod(mesh)).reshape(mesh).permute(order).flatten().tolist()
        other = dict(zip(ranks, split(torch.arange(size), turned), strict=True))
        alike = all(torch.equal(piece, other[rank]) for rank, piece in enumerate(held))
        assert has_one_meaning(layout, (size,), torch.int64, mesh) == alike
        found.add(alike)
    assert found == {True, False}
