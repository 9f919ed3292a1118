import pytest
from hypothesis import given
from hypothesis import strategies as st

from localtensor.errors import NotInLockstep
from localtensor.lockstep.comms.stacked_collectives import family_of, family_of_lists, restrict_family, split_by_size
from localtensor.lockstep.values.partition import one_row_per_rank


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
