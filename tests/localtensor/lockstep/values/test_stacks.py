"""Cells: rows of one shape in one stack, each a dense block that lies as the row did.  What torch takes apart before
any op is dispatched: indices with an int of each rank, lists that become tensors."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from localtensor.errors import NotInLockstep
from localtensor.lockstep.values import stacks
from localtensor.lockstep.values.partition import NOWHERE, every_rank_alone, partition
from localtensor.lockstep.values.rank_int import rank_int
from localtensor.lockstep.values.stacks import (
    as_blocks,
    cells_of_rows,
    copy_as_blocks,
    deduplicate,
    dense_strides,
    has_sym_ints,
    index_by_rank,
    is_in_blocks,
    merge_alike,
    stack,
    stack_nested,
    stack_with_gaps,
    write_by_rank,
)

SHAPES = st.lists(st.integers(0, 3), max_size=4).map(tuple)


@st.composite
def laid(draw, shape=SHAPES):
    """A tensor of any shape whose dims lie in any order in memory, dense or not."""
    sizes = draw(shape)
    order = draw(st.permutations(range(len(sizes))))
    gaps = [draw(st.sampled_from([1, 1, 2])) for _ in sizes]
    whole = torch.arange(float(np.prod([size * gap for size, gap in zip(sizes, gaps, strict=True)], dtype=int)))
    whole = whole.view([sizes[dim] * gaps[dim] for dim in order])
    return whole.permute([order.index(dim) for dim in range(len(sizes))])[tuple(slice(None, None, gap) for gap in gaps)]


def on(cells, held, rank):
    cell, row = held.place(rank)
    return cells[cell][row] if held.sizes[cell] > 1 else cells[cell]


@given(x=laid())
def test_dense_strides_are_those_of_a_clone(x):
    strides, elements = dense_strides(x.shape, x.stride())
    assert elements == max(1, np.prod([max(size, 1) for size in x.shape], dtype=int))
    fresh = torch.empty_strided(x.shape, strides)
    assert fresh.untyped_storage().nbytes() == 4 * x.numel()
    if x.numel() and torch._prims_common.is_non_overlapping_and_dense_or_false(x):
        assert strides == x.stride() == x.clone().stride()


@given(x=laid(), rows=st.integers(2, 4))
def test_a_stack_has_each_row_as_it_was_and_as_it_lay(x, rows):
    given_rows = [x + row for row in range(rows)]
    made = stack(given_rows)
    assert is_in_blocks(made) or not made.numel()
    for row, want in zip(made, given_rows, strict=True):
        assert torch.equal(row, want) and row.stride() == dense_strides(want.shape, want.stride())[0]


def test_a_stack_of_lazy_conjugates_holds_their_values():
    rows = [torch.tensor([1 + 2j]).conj(), torch.tensor([3j]).conj()]
    assert stack(rows).tolist() == [[1 - 2j], [-3j]] and not stack(rows).is_conj()


@given(x=laid(), rows=st.integers(2, 4))
def test_row_by_row_puts_each_row_in_a_block_of_its_own(x, rows):
    cell = x.expand(rows, *x.shape)
    made = copy_as_blocks(cell)
    assert torch.equal(made, cell)
    assert is_in_blocks(made) or not made.numel()
    assert made.untyped_storage().nbytes() == 4 * x.numel() * rows


@pytest.mark.parametrize(
    ("cell", "wanted"),
    [
        (torch.ones(2, 3), True),
        (torch.ones(2, 3, 4).transpose(1, 2), True),
        (torch.ones(3, 2).t(), False),
        (torch.ones(3, 3)[1:], False),
        (torch.ones(2, 4)[:, 1:], True),
        (torch.ones(1, 3).expand(2, 3), False),
        (torch.ones(2, 3, 4).transpose(0, 1), False),
    ],
)
def test_is_in_blocks(cell, wanted):
    assert is_in_blocks(cell) is wanted
    assert as_blocks(cell, cell.shape[0]).data_ptr() == cell.data_ptr() if wanted else is_in_blocks(as_blocks(cell, 2))


def test_one_value_and_sparse_ones_are_left_as_they_are():
    one, sparse = torch.ones(3, 2).t(), torch.eye(2).to_sparse()
    assert as_blocks(one, 1) is one and as_blocks(sparse, 2) is sparse


def test_equal_once_compares_bits_shape_strides_and_dtype():
    nan, zeros = torch.tensor([float("nan")]), torch.zeros(2, 2)
    values = [
        nan,
        nan.clone(),
        zeros,
        zeros.clone(),
        -zeros,
        zeros.int(),
        zeros.t(),
        zeros.view(4),
        torch.ones(2, 2).t(),
    ]
    found = deduplicate(values)
    first = [next(i for i, other in enumerate(values) if other is value) for value in found]
    assert first == [0, 0, 2, 2, 4, 5, 6, 7, 8]


def test_equal_once_reads_what_many_share_once(monkeypatch):
    read, meaning = [], stacks._content_key
    monkeypatch.setattr(stacks, "_content_key", lambda x: read.append(x) or meaning(x))
    x, y = torch.ones(3), torch.ones(3)
    found = deduplicate([x, x.detach(), y, x[:], x.view(1, 3)])
    assert len(read) == 3
    assert [one is x for one in found] == [True] * 4 + [False]


def test_equal_once_takes_one_element_of_any_stride():
    found = deduplicate([torch.ones(1, 2)[:, 1], torch.ones(1, 2)[:, 0], torch.zeros(1, 2)[:, 0]])
    assert found[0] is found[1]
    assert found[2] is not found[0]


def test_equal_once_takes_a_sparse_tensor_for_equal_to_itself_only():
    sparse = torch.eye(2).to_sparse()
    assert [id(x) for x in deduplicate([sparse, sparse.clone(), sparse])][::2] == [id(sparse)] * 2
    assert deduplicate([sparse, sparse.clone()])[1] is not sparse


@given(data=st.data(), sizes=st.lists(st.integers(0, 2), min_size=1, max_size=6))
def test_gathered_gives_each_rank_its_row_and_each_shape_a_stack(data, sizes):
    pool = {size: [torch.full((size, 2), float(number)) for number in range(2)] for size in set(sizes)}
    rows = [data.draw(st.sampled_from(pool[size])) for size in sizes]
    holes = data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
    place = iter(range(len(rows)))
    row_of = [row for hole in holes for row in ([NOWHERE, next(place)] if hole else [next(place)])]
    whole = partition(row_of, [len(rows)])
    cells, held = cells_of_rows(rows, whole)
    assert len(cells) == len(set(sizes)) and held.rows == len({id(row) for row in rows})
    for rank, row in enumerate(row_of):
        assert held.row_of[rank] == NOWHERE if row == NOWHERE else torch.equal(on(cells, held, rank), rows[row])


def test_gathered_keeps_rows_of_one_shape_apart_that_lie_otherwise():
    rows = [torch.ones(2, 2), torch.ones(2, 2).t(), torch.zeros(2, 2)]
    cells, held = cells_of_rows(rows, every_rank_alone(3))
    assert [tuple(cell.shape) for cell in cells] == [(2, 2, 2), (2, 2)] and held.row_of.tolist() == [0, 2, 1]


def test_joined_stacks_cells_of_one_shape():
    cells = (torch.zeros(2), torch.ones(3, 1), torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.full((1,), 7.0))
    held = partition([0, 1, 2, 3, 4, 5, 6], [1, 3, 2, 1])
    made, whole = merge_alike(cells, held)
    assert [tuple(cell.shape) for cell in made] == [(3, 2), (4, 1)]
    for rank in range(7):
        assert torch.equal(on(made, whole, rank), on(cells, held, rank))


def test_joined_leaves_alone_what_has_no_partner():
    cells, held = (torch.zeros(2), torch.ones(3)), partition([0, 1], [1, 1])
    made, whole = merge_alike(cells, held)
    assert made is cells and whole is held


def test_joined_keeps_the_strides_of_each_row():
    turned = torch.arange(12.0).view(2, 2, 3).transpose(1, 2)
    cells = (turned, torch.ones(3, 2), torch.zeros(2, 3).t(), torch.zeros(2, 3, 2))
    held = partition([0, 1, 2, 3, 4, 5], [2, 1, 1, 2])
    made, whole = merge_alike(cells, held)
    assert [(tuple(cell.shape), cell.stride()) for cell in made] == [((3, 3, 2), (6, 1, 3)), ((3, 3, 2), (6, 2, 1))]
    for rank in range(6):
        assert torch.equal(on(made, whole, rank), on(cells, held, rank))
        assert on(made, whole, rank).stride() == on(cells, held, rank).stride()


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


TENSORS = st.sampled_from([torch.tensor([1, 0]), torch.tensor(1), [0, 1, 1], np.array([1]), torch.ones(2, 2).bool()])


@given(index=indices(), given=TENSORS, place=st.integers(0, 3))
def test_picked_beside_a_tensor_is_what_indexing_gives(index, given, place):
    x = torch.arange(16).view(2, 2, 2, 2)
    mixed = (*index[:place], given, *index[place:])
    try:
        want = x[mixed]
    except IndexError:
        return  # too many parts, or one beyond a size of 2
    assert torch.equal(index_by_rank(x, mixed), want)
    mine, right = x.clone(), x.clone()
    write_by_rank(mine, mixed, 7)
    right[mixed] = 7
    assert torch.equal(mine, right)


def test_a_stack_with_gaps_has_the_strides_of_its_rows():
    rows = [torch.arange(10.0).add(start).view(2, 5)[:, 1:] for start in (0, 1, 2)]
    made = stack_with_gaps(rows)
    assert made.shape == (3, 2, 4) and made[1].stride() == rows[1].stride() == (5, 1)
    assert all(torch.equal(mine, row) for mine, row in zip(made, rows, strict=True))
    spread = stack_with_gaps([torch.tensor([1.0, 2.0]).expand(3, 2), torch.tensor([3.0, 4.0]).expand(3, 2)])
    assert spread[1].stride() == (0, 1) and spread[1].tolist() == [[3, 4]] * 3
    assert stack_with_gaps([torch.ones(2, 3), torch.ones(2, 3)]).is_contiguous()


def test_differs_sees_an_int_of_each_rank():
    rank = rank_int([0, 1])
    assert has_sym_ints(rank) and has_sym_ints((1, rank)) and has_sym_ints((..., rank)) and has_sym_ints([0, rank])
    assert not any(has_sym_ints(index) for index in (1, (1, 2), slice(rank), None, [1], torch.tensor(1)))


def test_a_bool_is_refused_beside_an_int_of_each_rank():
    with pytest.raises(NotInLockstep, match=r"x\[...\]: True in an index beside ints of each rank: a bool adds a dim"):
        index_by_rank(torch.ones(2, 2), (..., True, rank_int([0, 1])))


def own(x):
    return x.detach() if isinstance(x, torch.Tensor) else None


def test_stacked_takes_numbers_and_tensors_in_any_nest():
    one = torch.tensor(1, requires_grad=False)
    assert stack_nested([[one, 2], (3, 4.5)], own, torch.tensor).tolist() == [[1, 2], [3, 4.5]]
    assert stack_nested([1, [2]], own, torch.tensor) is None and stack_nested("no", own, torch.tensor) is None
    weight = torch.ones(2, requires_grad=True)
    assert stack_nested(weight, own, torch.tensor).requires_grad is False
