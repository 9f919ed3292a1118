"""What a tensor may lie like, so that it has one meaning; and the axes of a mesh."""

import itertools

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from localtensor.layout.spec import StridedShard, shorts
from localtensor.testing.hypothesis_strategies import layouts

F32 = torch.float32


def strided(dim, factor):
    return StridedShard(dim, split_factor=factor)


def test_options_are_those_of_the_kinds_and_mean_something_for_the_dtype():
    def of(ndim, dtype, *kinds, pending=""):
        return shorts(layouts.placement_options(ndim, dtype, kinds, pending))

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
        found = layouts.aligned_options(ndim, dtype, kinds, pending, 3)
        places = {
            option: place for place, option in reversed(list(enumerate(layouts.placement_options(3, None, kinds))))
        }
        assert len(found) == len(places)
        assert set(found) == set(layouts.placement_options(ndim, dtype, kinds, pending))
        assert all(found[places[option]] == option for option in found)


def test_what_has_two_meanings_is_fixed_to_plain_shards():
    nested = (strided(0, 2), Shard(0))
    assert layouts.unambiguous_layout(nested, (7,), F32, (3, 2)) == (Shard(0), Shard(0))
    assert layouts.unambiguous_layout(nested, (6,), F32, (3, 2)) == nested


def test_other_orders_are_all_but_from_left_to_right_of_each_dim_that_axes_share():
    every = set(itertools.permutations(range(3)))
    assert {order for _, order in layouts.other_cut_orders((Shard(0),) * 3)} == every - {(0, 1, 2)}
    assert layouts.other_cut_orders((Shard(0), Replicate(), Shard(0))) == ((0, (2, 0)),)
    assert layouts.other_cut_orders((Shard(1), Shard(0), Shard(1), Shard(0))) == ((1, (2, 0)), (0, (3, 1)))
    assert layouts.other_cut_orders((Shard(0), Shard(1))) == layouts.other_cut_orders((strided(0, 2), Shard(0))) == ()


@pytest.mark.parametrize("ranks", [(1, 8), (3, 7), (6, 6), (5, 5), (1, 30), (17, 30)], ids=str)
def test_whatever_is_chosen_for_the_axes_the_ranks_stay_within_their_limits(ranks):
    found = set()
    for many in set(layouts.ranks_between(*ranks)):
        for half in ("lower", "upper"):
            for first in layouts.sizes_left(ranks[0], many, 1, half):
                for second in layouts.sizes_left(ranks[0], many, first, half):
                    found.add((first, second, many // (first * second)))
    assert {ranks[0] <= a * b * c <= ranks[1] for a, b, c in found} == {True}
    assert (1, 1, ranks[1]) in found and (ranks[1], 1, 1) in found
