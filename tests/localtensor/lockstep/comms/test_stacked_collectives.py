"""Stacks against the plain functions, and how much is computed."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from localtensor.layout.reductions import FOLDS, PremulSum, fold
from localtensor.lockstep.comms import stacked_collectives

OPS = [*FOLDS, PremulSum(0.3)]


@st.composite
def stacks(draw):
    rows, groups, members = draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.integers(1, 7))
    ids = np.array([[draw(st.integers(0, rows - 1)) for _ in range(members)] for _ in range(groups)])
    return torch.randn(rows, 3, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))), ids


@given(stacks(), st.sampled_from(OPS))
def test_each_group_folds_into_what_the_plain_fold_gives(case, op):
    x, ids = case
    x = (x * 3).int() if op in ("band", "bor", "bxor") else x
    plan = stacked_collectives.fold_plan(ids)
    done = stacked_collectives.reduce_rows(x, plan, op)
    for group, place in zip(ids, plan.places, strict=True):
        assert torch.equal(done[place], fold([x[row] for row in group], op))
    assert done.shape[0] == plan.rows <= len(np.unique(ids, axis=0))


@pytest.mark.parametrize("members", [7, 13, 15])
def test_the_average_of_complex_stacks_is_that_of_the_plain_fold_to_the_bit(members):
    x = torch.complex(torch.arange(-8.0, 8), torch.arange(16.0)).reshape(2, 8)
    plan = stacked_collectives.fold_plan(np.array([[0] * members, [0] * (members - 1) + [1]]))
    done = stacked_collectives.reduce_rows(x, plan, "avg")
    assert torch.equal(done[plan.places[0]], x[0])
    assert torch.equal(done[plan.places[1]], fold([x[0]] * (members - 1) + [x[1]], "avg"))


@given(stacks())
def test_gathered_and_exchanged(case):
    x, ids = case
    plan = stacked_collectives.gather_plan(ids)
    done = stacked_collectives.gather_rows(x, plan)
    assert done.shape[0] == plan.rows == len(np.unique(ids, axis=0))
    members = ids.shape[1]
    pieces = x[:, None, :] * torch.arange(1, members + 1)[None, :, None]
    crossed, places = stacked_collectives.exchange_rows(pieces, plan), stacked_collectives.member_rows(plan)
    for number, group in enumerate(ids):
        assert torch.equal(done[plan.places[number]], x[torch.from_numpy(group)])
        for mine in range(members):
            want = torch.stack([pieces[row][mine] for row in group])
            assert torch.equal(crossed[places[number, mine]], want)


@pytest.mark.parametrize("members", [2, 1024, 1000])
def test_equal_operands_are_folded_once(members):
    alike, different = np.zeros((1, members), int), np.arange(members)[None]
    counts = [
        sum(_rows(level.left) for level in stacked_collectives.fold_plan(ids).levels) for ids in (alike, different)
    ]
    assert counts[0] <= 2 * members.bit_length() and counts[1] == members - 1


def _rows(rows):
    return len(range(rows.start, rows.stop, rows.step)) if isinstance(rows, slice) else len(rows)


def test_rows_in_even_steps_are_views():
    x = torch.arange(6)
    assert (
        stacked_collectives.take_rows(x, stacked_collectives.row_index([1, 3, 5]))._is_view()
        and stacked_collectives.take_rows(x, stacked_collectives.row_index([4]))._is_view()
    )
    assert stacked_collectives.take_rows(x, stacked_collectives.row_index([5, 0])).tolist() == [5, 0]
