"""Pieces against what a spec says of a tensor."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from localtensor.layout.shards import split
from strategies.planner.audit.compare import compare_pieces, reduce_partials, rounding_tolerance
from strategies.planner.audit.pairs import DTYPES, draw_pairs
from strategies.planner.audit.verdict import distinct_values
from tests.tools.plans.plan_pairs import spec

SPECS = [one for pair in draw_pairs((2, 3), seed=5, budget=60) for one in (pair.src, pair.dst)]


def pieces(one, seed=0):
    return [
        piece.clone()
        for piece in split(distinct_values(one.shape, one.dtype), one, torch.Generator().manual_seed(seed))
    ]


@pytest.mark.parametrize("first", range(0, len(SPECS), 30))
def test_what_a_spec_deals_is_what_it_says(first):
    for one in SPECS[first : first + 30]:
        assert compare_pieces(pieces(one), distinct_values(one.shape, one.dtype), one).text == "", f"{one}"


@given(which=st.integers(0, len(SPECS) - 1), data=st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_one_element_that_is_changed_on_one_rank_is_seen(which, data):
    one = SPECS[which]
    held = pieces(one)
    full = [rank for rank, piece in enumerate(held) if piece.numel()]
    if not full:
        return
    rank = data.draw(st.sampled_from(full))
    flat = held[rank].reshape(-1).clone()
    place = data.draw(st.integers(0, len(flat) - 1))
    flat[place] = ~flat[place] if one.dtype == torch.bool else flat[place] * 3 + 4000
    held[rank] = flat.reshape(held[rank].shape)
    unchanged = one.dtype == torch.bool or any(kind in str(one) for kind in ("P(min)", "P(max)", "P(product)"))
    wrong = compare_pieces(held, distinct_values(one.shape, one.dtype), one)
    assert unchanged or wrong.text, f"{one}: rank {rank}, element {place}"


def test_a_shape_a_dtype_and_a_value_that_are_wrong_are_distinguished():
    one, x = spec("S(0)", (2,), (4,)), distinct_values((4,), torch.float64)
    a, b = pieces(one)
    assert compare_pieces([a, x], x, one).text == "rank 1 holds shape (4,), not (2,)"
    assert compare_pieces([a, b.float()], x, one).text == "rank 1 holds torch.float32, not torch.float64"
    found = compare_pieces([b, a], x, one)
    assert (found.text, found.ranks) == ("rank 0 holds 1 at [0], not -3; wrong in its rows 0, 1", (0, 1))


def test_every_wrong_rank_is_named():
    one, x = spec("R S(0)"), distinct_values((8, 8), torch.float64)
    held = pieces(one)
    held[3] = held[3] + 1
    assert compare_pieces(held, x, one).ranks == (3,)


def test_of_partial_values_only_what_they_make_together_counts():
    one, x = spec("P(sum) S(0)", shape=(4, 2)), distinct_values((4, 2), torch.float64)
    for seed in range(3):
        assert compare_pieces(pieces(one, seed), x, one).text == ""
    one_sided = [x[:2], x[2:], torch.zeros(2, 2, dtype=x.dtype), torch.zeros(2, 2, dtype=x.dtype)]
    assert compare_pieces(one_sided, x, one).text == ""
    assert compare_pieces([x[:2], x[2:], x[:2], torch.zeros(2, 2, dtype=x.dtype)], x, one).ranks == (0, 2)


def test_sums_of_averages_fold_over_both_axes():
    held = [torch.tensor([1.0]), torch.tensor([3.0]), torch.tensor([5.0]), torch.tensor([7.0])]
    assert [float(x) for x in reduce_partials(held, spec("P(sum) P(avg)", shape=(1,)))] == [8.0] * 4
    assert [float(x) for x in reduce_partials(held, spec("P(max) R", shape=(1,)))] == [5.0, 7.0, 5.0, 7.0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_exact_has_no_slack_and_what_rounds_has_little(dtype):
    room = rounding_tolerance([distinct_values((5,), dtype)])
    exact = not (dtype.is_floating_point or dtype.is_complex)
    assert room == 0.0 if exact else 0 < room < 1e-2


def test_nothing_held_has_no_slack_that_fails():
    assert rounding_tolerance([torch.empty(0), torch.empty(0)]) > 0


def test_the_numbers_are_all_different_and_none_is_zero():
    for shape, dtype in itertools.product(((5, 3), (8,), (3, 2, 2)), DTYPES):
        x = distinct_values(shape, dtype)
        assert (tuple(x.shape), x.dtype) == (shape, dtype)
        if dtype != torch.bool:
            assert len(set(x.reshape(-1).tolist())) == x.numel()
            assert bool((x != 0).all())
