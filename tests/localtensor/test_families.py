import pytest
from hypothesis import given
from hypothesis import strategies as st

from localtensor.families import family, of_lists, one_size


@st.composite
def groups(draw):
    ranks = draw(st.permutations(range(draw(st.integers(1, 9)))))
    cuts = sorted(draw(st.sets(st.integers(1, len(ranks)), max_size=4)) | {len(ranks)})
    lists = [list(ranks[a:b]) for a, b in zip([0, *cuts], cuts, strict=False)]
    return lists[: draw(st.integers(1, len(lists)))], len(ranks)


@given(groups())
def test_each_rank_finds_its_group_and_its_place(case):
    lists, world = case
    whole = of_lists(lists, world)
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
    parts = one_size(of_lists(lists, world))
    assert sorted(group for part in parts for group in part.groups) == sorted(map(tuple, lists))
    assert all(part.matrix is not None and part.matrix.tolist() == list(map(list, part.groups)) for part in parts)
    assert len({part.matrix.shape[1] for part in parts}) == len(parts)


def test_one_object_for_one_meaning():
    assert of_lists([[0, 1], [2, 3]], 4) is family(((0, 1), (2, 3)), 4)
    assert of_lists([[0, 1]], 4) is not of_lists([[0, 1]], 5)


@pytest.mark.parametrize(
    ("lists", "shown"), [([[0]], "Family(1 groups, 4 ranks)"), ([[0], [1]], "Family(2 groups, 4 ranks)")]
)
def test_it_is_printed_short(lists, shown):
    assert repr(of_lists(lists, 4)) == shown
