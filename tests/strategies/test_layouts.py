"""Layouts that mean one thing, by hand and against the pieces that ranks are given."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.distributed.tensor import Shard

from localtensor.errors import BadPlacement
from localtensor.placement import parse, shorts
from strategies.layouts import cuts, has_meaning, in_order, on_axes, order_of, read_layout
from strategies.pieces import held_of
from strategies.programs import Program
from tests.strategies.cases import numbers, sample


def meant(text, size=7, mesh=(2, 3), dtype=torch.float64):
    return has_meaning(read_layout(text), numbers(size, 4, dtype=dtype), mesh)


@pytest.mark.parametrize("text", [
    "(R, S(0))", "(S(0), S(0))", "(P(sum), P(sum))", "(P(sum), P(avg))", "(P(max), S(1))", "(P(product), P(product))",
])  # fmt: skip
def test_plain_shards_and_partials_of_one_kind_have_a_meaning(text):
    assert meant(text)


@pytest.mark.parametrize("text", ["(P(sum), P(max))", "(P(min), P(max))", "(P(avg), P(product))"])
def test_kinds_of_partial_for_which_the_order_of_axes_matters_have_none(text):
    assert not meant(text)


def test_a_partial_that_means_nothing_for_the_dtype_has_none():
    assert not meant("(P(avg), R)", dtype=torch.bool)
    assert not meant("(P(max), R)", dtype=torch.complex64)


def test_a_shard_of_a_dim_that_is_not_there_has_none():
    assert not meant("(S(2), R)")


def test_a_strided_shard_has_one_where_both_ways_to_read_it_agree():
    assert meant("(SS(0,3), S(0))") and meant("(SS(0,2), S(0))", size=8, mesh=(3, 2))
    assert not meant("(SS(0,2), S(0))", size=7, mesh=(3, 2))  # 3,1 against 1,3 rows on the last two ranks


def test_a_strided_shard_that_encodes_no_order_is_read_from_left_to_right_if_it_cuts_alone():
    assert meant("(SS(0,4), R)") and meant("(SS(0,4), S(1))")
    assert not meant("(SS(0,4), SS(0,4))") and not meant("(SS(0,2), S(0))", mesh=(2, 3))


@pytest.mark.parametrize("mesh", [(2, 2), (2, 3), (3, 2), (2, 2, 2), (2, 3, 2)])
def test_every_order_of_cuts_is_written_with_factors_from_which_it_can_be_read(mesh):
    for count in range(1, len(mesh) + 1):
        for order in itertools.permutations(range(len(mesh)), count):
            made = in_order(0, order, mesh)
            factors = [cuts(made[axis])[1] if axis in made else 0 for axis in range(len(mesh))]
            assert order_of(factors, mesh) == order


@pytest.mark.parametrize("mesh", [(2, 2), (2, 3), (2, 2, 2)])
@pytest.mark.parametrize("size", [24, 48])  # even on all: those are easily counted by hand
def test_cuts_in_an_order_give_each_rank_its_rows(mesh, size):
    x = torch.arange(float(size))
    for order in itertools.permutations(range(len(mesh))):
        layout = tuple(in_order(0, order, mesh)[axis] for axis in range(len(mesh)))
        (held,) = held_of(Program(sample("relu.default", x), mesh, (layout,)))
        length = size // math.prod(mesh)
        for rank, place in enumerate(itertools.product(*map(range, mesh))):
            start = 0
            for axis in order:
                start = start * mesh[axis] + place[axis]
            assert held[rank].tolist() == list(range(start * length, (start + 1) * length))


def test_what_has_a_meaning_is_what_the_ranks_are_given():
    x = torch.arange(7.0)
    (held,) = held_of(Program(sample("relu.default", x), (2, 3), ((parse("SS(0,3)"), Shard(0)),)))
    assert [piece.tolist() for piece in held] == [[0, 1], [3, 4], [6], [2], [5], []]


def test_an_order_that_no_factors_encode_is_told():
    assert order_of((2, 1), (2, 3)) is None
    assert order_of((0, 4), (2, 2)) is None


def test_a_layout_on_fewer_axes_keeps_the_order_of_cuts():
    whole = read_layout("(SS(0,4), SS(0,2), S(0))")  # the last axis first, then the middle one
    assert shorts(on_axes(whole, (2, 2, 2), (0, 1), (2, 2))) == "SS(0,2), S(0)"
    assert shorts(on_axes(whole, (2, 2, 2), (0, 2), (2, 3))) == "SS(0,3), S(0)"
    assert shorts(on_axes(whole, (2, 2, 2), (1,), (2,))) == "S(0)"


def test_on_fewer_axes_what_is_no_shard_stays():
    assert shorts(on_axes(read_layout("(P(sum), S(0), R)"), (2, 2, 2), (0, 2), (2, 2))) == "P(sum), R"
    assert shorts(on_axes(read_layout("(SS(0,4), R)"), (2, 2), (0,), (2,))) == "SS(0,4)"


@pytest.mark.parametrize("text", ["S(0)", "R", "(S(0), R)", "(SS(1,2), P(avg), R)", "(R)"])
def test_a_layout_is_read_as_it_is_written(text):
    assert shorts(read_layout(text)) == text.removeprefix("(").removesuffix(")" if text.startswith("(") else "")


def test_what_is_no_layout_is_refused():
    with pytest.raises(BadPlacement, match="no placement"):
        read_layout("(S(0), -)")
