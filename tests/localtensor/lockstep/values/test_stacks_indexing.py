"""What torch takes apart before any op is dispatched: indices with an int of each rank, lists that become tensors."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from localtensor.errors import NotInLockstep
from localtensor.lockstep.values.rank_int import rank_int
from localtensor.lockstep.values.stacks import has_sym_ints, index_by_rank, stack_nested

PARTS = st.one_of(st.integers(-2, 1), st.none(), st.builds(slice, st.integers(-2, 2), st.integers(0, 3)))


@st.composite
def indices(draw):
    """An index of ints, slices and None, perhaps with an ellipsis, for a tensor of three dims of size 2 or more."""
    parts = [draw(PARTS) for _ in range(draw(st.integers(0, 4)))]
    while sum(one is not None for one in parts) > 3:
        parts.pop()
    if draw(st.booleans()):
        parts.insert(draw(st.integers(0, len(parts))), Ellipsis)
    return tuple(parts)


@given(index=indices())
def test_picked_is_what_indexing_gives_and_a_view(index):
    x = torch.arange(24).view(2, 3, 4)
    got, want = index_by_rank(x, index), x[index]
    assert torch.equal(got, want) and got.stride() == want.stride() and got.data_ptr() == want.data_ptr()


def test_differs_sees_an_int_of_each_rank():
    rank = rank_int([0, 1])
    assert has_sym_ints(rank) and has_sym_ints((1, rank)) and has_sym_ints((..., rank))
    assert not any(has_sym_ints(index) for index in (1, (1, 2), slice(rank), None, [1], torch.tensor(1)))


@pytest.mark.parametrize("other", [torch.tensor([0]), [0], True])
def test_what_is_no_plain_index_is_refused_beside_an_int_of_each_rank(other):
    with pytest.raises(NotInLockstep, match=f"beside a {type(other).__name__}"):
        index_by_rank(torch.ones(2, 2), (..., other, rank_int([0, 1])))


def test_stacked_takes_numbers_and_tensors_in_any_nest():
    one = torch.tensor(1, requires_grad=False)
    assert stack_nested([[one, 2], (3, 4.5)], torch.Tensor, torch.tensor).tolist() == [[1, 2], [3, 4.5]]
    assert (
        stack_nested([1, [2]], torch.Tensor, torch.tensor) is None
        and stack_nested("no", torch.Tensor, torch.tensor) is None
    )
    weight = torch.ones(2, requires_grad=True)
    assert stack_nested(weight, torch.Tensor, torch.tensor).requires_grad is False
