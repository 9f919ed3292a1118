"""Stacks against the plain functions, and how much is computed."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from localtensor.errors import NotInLockstep
from localtensor.layout.reductions import PAIRS, PremulSum, fold
from localtensor.lockstep.comms import stacked_collectives
from localtensor.lockstep.comms.stacked_collectives import family_of, family_of_lists, restrict_family, split_by_size
from localtensor.lockstep.values.partition import one_row_per_rank

OPS = [*PAIRS, PremulSum(0.3)]


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


@st.composite
def groups(draw):
    ranks = draw(st.permutations(range(draw(st.integers(1, 9)))))
    cuts = sorted(draw(st.sets(st.integers(1, len(ranks)), max_size=4)) | {len(ranks)})
    lists = [list(ranks[a:b]) for a, b in zip([0, *cuts], cuts, strict=False)]
    return lists[: draw(st.integers(1, len(lists)))], len(ranks)


@given(groups())
def test_each_rank_finds_its_group_and_its_place(case):
    lists, world = case
    whole = family_of_lists(lists, world)
    for rank in range(world):
        [mine] = [group for group in lists if rank in group] or [[]]
        assert list(whole.group_of(rank)) == mine
        assert whole.position[rank] == (mine.index(rank) if mine else -1)
        assert whole.sizes()[rank] == (len(mine) or -1)
        assert whole.members[rank] == bool(mine)
    assert whole.everybody == (sum(map(len, lists)) == world)
    assert (whole.matrix is None) == (len({len(group) for group in lists}) > 1)


@given(groups())
def test_groups_of_one_size_together_are_the_same_groups(case):
    lists, world = case
    parts = split_by_size(family_of_lists(lists, world))
    assert sorted(group for part in parts for group in part.groups) == sorted(map(tuple, lists))
    assert all(part.matrix is not None and part.matrix.tolist() == list(map(list, part.groups)) for part in parts)
    assert len({part.matrix.shape[1] for part in parts}) == len(parts)


def test_one_object_for_one_meaning():
    assert family_of_lists([[0, 1], [2, 3]], 4) is family_of(((0, 1), (2, 3)), 4)
    assert family_of_lists([[0, 1]], 4) is not family_of_lists([[0, 1]], 5)


@pytest.mark.parametrize(
    ("lists", "shown"), [([[0]], "GroupFamily(1 groups, 4 ranks)"), ([[0], [1]], "GroupFamily(2 groups, 4 ranks)")]
)
def test_it_is_printed_short(lists, shown):
    assert repr(family_of_lists(lists, 4)) == shown


def test_within_a_kind_of_ranks_are_the_groups_whose_ranks_all_belong_to_it():
    whole = family_of_lists([[0, 1], [2, 3], [4, 5]], 6)
    assert restrict_family(whole, one_row_per_rank([2, 3, 4, 5], 6)).groups == ((2, 3), (4, 5))
    for ranks in ([0, 1, 2], [2], [0, 2, 4]):
        with pytest.raises(NotInLockstep, match="some ranks of a group come to it in another way than the others"):
            restrict_family(whole, one_row_per_rank(ranks, 6))
    with pytest.raises(NotInLockstep):
        restrict_family(family_of_lists([[0, 1]], 3), one_row_per_rank([2], 3))
