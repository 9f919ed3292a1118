"""What a tensor may lie like, so that it has one meaning; and the axes of a mesh."""

import itertools

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from localtensor.placement import StridedShard, shorts
from localtensor.testing.drawn_layouts import has_meaning, in_order, mended, options, order_of, orders, steady
from localtensor.testing.drawn_meshes import ranks_between, sizes_left

F32 = torch.float32


def strided(dim, factor):
    return StridedShard(dim, split_factor=factor)


def test_options_are_those_of_the_kinds_and_mean_something_for_the_dtype():
    def of(ndim, dtype, *kinds, pending=""):
        return shorts(options(ndim, dtype, kinds, pending))

    assert of(2, F32, "R", "S") == "R, S(0), S(1)"
    assert of(0, F32, "R", "S", "SS") == "R"
    assert of(1, torch.int64, "S", "P") == "S(0), P(sum), P(min), P(max), P(product)"
    assert of(0, torch.bool, "P") == "P(sum), P(min), P(max), P(product)"
    assert of(0, torch.complex64, "P") == "P(sum), P(avg), P(product)"
    assert of(1, None, "SS", "P(max)") == "P(max), SS(0,2), SS(0,3)"
    assert of(0, F32, "P", pending="avg") == "P(sum), P(avg)"
    assert of(0, F32, "P", pending="max") == "P(max)"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64], ids=str)
@pytest.mark.parametrize("pending", ["", "max", "sum"])
def test_an_option_keeps_its_place_whatever_the_tensor_is(dtype, pending):
    kinds = ("R", "S", "P", "SS")
    for ndim in range(4):
        found = steady(ndim, dtype, kinds, pending, 3)
        places = {option: place for place, option in reversed(list(enumerate(options(3, None, kinds))))}
        assert len(found) == len(places)
        assert set(found) == set(options(ndim, dtype, kinds, pending))
        assert all(found[places[option]] == option for option in found)


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
    assert has_meaning(layout, shape, dtype, (3, 2)) is means


def test_what_has_two_meanings_is_mended_to_plain_shards():
    nested = (strided(0, 2), Shard(0))
    assert mended(nested, (7,), F32, (3, 2)) == (Shard(0), Shard(0))
    assert mended(nested, (6,), F32, (3, 2)) == nested


@pytest.mark.parametrize("mesh", [(2, 3), (3, 2), (2, 2, 2), (2, 1, 3)], ids=str)
def test_split_factors_tell_the_order_in_which_they_were_made(mesh):
    plain = (Shard(0),) * len(mesh)
    assert {order for _, order in orders(plain)} == set(itertools.permutations(range(len(mesh)))) - {
        tuple(range(len(mesh)))
    }
    for dim, order in orders(plain):
        factors = [p.split_factor if isinstance(p, StridedShard) else 1 for p in in_order(plain, dim, order, mesh)]
        told = order_of(factors, mesh)
        assert in_order(plain, 0, told, mesh) == in_order(plain, dim, order, mesh)


@pytest.mark.parametrize("ranks", [(1, 8), (3, 7), (6, 6), (5, 5), (1, 30), (17, 30)], ids=str)
def test_whatever_is_chosen_for_the_axes_the_ranks_stay_within_their_limits(ranks):
    found = set()
    for many in set(ranks_between(*ranks)):
        for half in ("lower", "upper"):
            for first in sizes_left(ranks[0], many, 1, half):
                for second in sizes_left(ranks[0], many, first, half):
                    found.add((first, second, many // (first * second)))
    assert {ranks[0] <= a * b * c <= ranks[1] for a, b, c in found} == {True}
    assert (1, 1, ranks[1]) in found and (ranks[1], 1, 1) in found
