"""Partitions of the ranks: one object for each meaning, and how two of them fit together."""

import gc
import pickle

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from localtensor.lockstep.values.partition import (
    NOWHERE,
    by_value,
    every_rank_alone,
    everyone,
    merge_cells,
    one_cell_per_row,
    one_row_per_cell,
    one_row_per_rank,
    partition,
    refinement,
    selections,
    with_remaining_ranks,
)

WORLD = 6


@st.composite
def partitions(draw, world=WORLD, holes=True):
    """Any partition of these ranks, rows in any order; at least one rank holds something."""
    labels = draw(st.lists(st.integers(NOWHERE if holes else 0, 4), min_size=world, max_size=world))
    assume(any(label >= 0 for label in labels))
    order = draw(st.permutations(sorted({label for label in labels if label >= 0})))
    sizes, left = [], len(order)
    while left:
        sizes.append(draw(st.integers(1, left)))
        left -= sizes[-1]
    return partition([order.index(label) if label >= 0 else NOWHERE for label in labels], sizes)


def groups(held):
    """The ranks of each row."""
    return {frozenset(held.ranks(row)) for row in range(held.rows)}


def cells_of(held, values):
    """Cells whose rows hold these numbers, one for each row."""
    parts = zip(held.starts, held.sizes, strict=True)
    return [torch.tensor(values[start] if size == 1 else values[start : start + size]) for start, size in parts]


def read(held, cells, rank):
    cell, row = held.place(rank)
    return (cells[cell][row] if held.sizes[cell] > 1 else cells[cell]).item()


@given(held=partitions())
def test_one_object_for_each_meaning(held):
    again = partition(held.row_of.tolist(), list(held.sizes))
    assert again is held and pickle.loads(pickle.dumps(held)) is held
    assert not held.row_of.flags.writeable


def test_other_sizes_are_another_partition_and_what_no_one_keeps_is_forgotten():
    from localtensor.lockstep.values import partition as folding

    one, other = partition([0, 1], [2]), partition([0, 1], [1, 1])
    assert one is not other
    held = partition([0, 1, 2, 3, 4, 5, 0], [6])
    key = next(key for key, value in folding._known.items() if value is held)
    del held
    gc.collect()
    assert key not in folding._known  # not a count: the partitions of other tests are forgotten meanwhile


@given(held=partitions())
def test_each_rank_has_its_place(held):
    for rank, row in enumerate(held.row_of):
        if row == NOWHERE:
            assert not held.complete and not held.held[rank]
        else:
            cell, inside = held.place(rank)
            assert held.starts[cell] + inside == row and inside < held.sizes[cell] and rank in held.ranks(row)
    assert held.rows == sum(held.sizes) and held.world == WORLD
    assert held.complete is (held.held is None) and held.uniform == (held.complete and held.rows == 1)


@given(one=partitions(), other=partitions())
def test_common_is_the_coarsest_common_refinement(one, other):
    both = refinement(one, other)
    pairs = {}
    for rank in range(WORLD):
        a, b = one.row_of[rank], other.row_of[rank]
        if min(a, b) >= 0:
            pairs.setdefault((a, b), set()).add(rank)
    assert groups(both) == {frozenset(ranks) for ranks in pairs.values()}
    for start, size in zip(both.starts, both.sizes, strict=True):  # on each cell, either has a single cell
        ranks = [both.ranks(row)[0] for row in range(start, start + size)]
        assert len({(one.place(rank)[0], other.place(rank)[0]) for rank in ranks}) == 1
    cells = {(one.place(min(ranks))[0], other.place(min(ranks))[0]) for ranks in groups(both)}
    assert len(both.sizes) == len(cells) or one is other  # and no more cells than that takes


@given(one=partitions(), other=partitions(), third=partitions())
def test_common_of_itself_in_either_order_and_of_three(one, other, third):
    assert refinement(one, one) is one
    assert refinement(one, everyone(WORLD)) is one and refinement(everyone(WORLD), one) is one
    assert groups(refinement(one, other)) == groups(refinement(other, one))
    left, right = (refinement(refinement(one, other), third), refinement(one, refinement(other, third)))
    assert groups(left) == groups(right)


@given(one=partitions(), other=partitions())
def test_takes_reads_the_right_row_for_every_rank(one, other):
    fine = refinement(one, other)
    assume(fine.rows)
    for coarse in (one, other):
        values = list(range(100, 100 + coarse.rows))
        cells = cells_of(coarse, values)
        found = selections(fine, coarse)
        got = [take.of(cells) for take in found]
        for rank in np.flatnonzero(fine.row_of >= 0):
            cell, row = fine.place(rank)
            value = got[cell][row] if found[cell].stacked else got[cell]
            assert value.item() == read(coarse, cells, rank)
        for take, size, value in zip(found, fine.sizes, got, strict=True):
            assert take.stacked == (value.dim() == 1) and (not take.stacked or value.shape[0] == size)


@given(held=partitions())
def test_takes_of_itself_copies_nothing(held):
    cells = cells_of(held, list(range(held.rows)))
    assert all(take.of(cells) is cells[number] for number, take in enumerate(selections(held, held)))


def test_takes_says_in_the_cheapest_way_what_to_read():
    coarse = partition([0, 1, 2, 3], [3, 1])
    whole, one, several, alone = selections(partition([0, 1, 2, 6], [3, 1, 2, 1]), coarse)[0], None, None, None
    assert (whole.rows, whole.stacked) == (None, True)
    one = selections(by_value([0, 1, 2, 3]), coarse)
    assert [(take.cell, take.rows, take.stacked) for take in one] == [
        (0, 0, False), (0, 1, False), (0, 2, False), (1, None, False),
    ]  # fmt: skip
    (shared, _) = selections(partition([0, 1, 2], [2, 1]), partition([1, 1, 0], [2]))
    assert (shared.cell, shared.rows, shared.stacked) == (0, 1, False)
    several, alone = selections(partition([0, NOWHERE, 1, 2], [2, 1]), coarse)
    assert several.rows.tolist() == [0, 2] and several.stacked
    assert alone.rows is None and not alone.stacked


@given(held=partitions(), data=st.data())
def test_merged_cells_are_read_where_they_lie_now(held, data):
    kinds = tuple(data.draw(st.lists(st.integers(0, 2), min_size=len(held.sizes), max_size=len(held.sizes))))
    whole, parts = merge_cells(held, kinds)
    assert groups(whole) == groups(held)
    assert [kinds[cells[0]] for cells in parts] == list(dict.fromkeys(kinds))
    cells = cells_of(held, list(range(held.rows)))
    joined = [torch.cat([cells[cell].reshape(-1) for cell in part]).squeeze() for part in parts]
    for rank in np.flatnonzero(held.row_of >= 0):
        assert read(whole, joined, rank) == read(held, cells, rank)


def test_merged_puts_the_rows_of_a_kind_one_behind_the_other():
    held = partition([0, 1, 2, 3, 4], [1, 2, 1, 1])
    whole, parts = merge_cells(held, ("a", "b", "a", "b"))
    assert whole.row_of.tolist() == [0, 2, 3, 1, 4] and whole.sizes == (2, 3) and parts == ((0, 2), (1, 3))


@given(values=st.lists(st.integers(-2, 2), min_size=1, max_size=8))
def test_by_value_gives_equal_values_a_row_and_each_row_a_cell(values):
    held = by_value(values)
    assert held.sizes == (1,) * len(set(values))
    assert all(
        (held.row_of[a] == held.row_of[b]) == (x == y) for a, x in enumerate(values) for b, y in enumerate(values)
    )


def test_by_value_asks_only_ranks_that_hold_one():
    assert by_value([7, 3, 7, 9], [True, True, True, False]).row_of.tolist() == [1, 0, 1, NOWHERE]


@given(held=partitions())
def test_one_row_a_cell_and_rows_apart(held):
    coarse, fine = one_row_per_cell(held), one_cell_per_row(held)
    assert groups(fine) == groups(held) and fine.sizes == (1,) * held.rows
    assert coarse.sizes == (1,) * len(held.sizes) and (coarse.held is None) == (held.held is None)
    assert refinement(coarse, held).rows == held.rows


@given(one=partitions(), other=partitions())
def test_with_rest_adds_who_holds_something_only_in_the_coarser_one(one, other):
    fine = refinement(one, other)
    assume(fine.rows)
    whole = with_remaining_ranks(fine, one)
    assert ((whole.row_of >= 0) == (one.row_of >= 0)).all()
    assert whole.sizes[: len(fine.sizes)] == fine.sizes
    assert (whole.row_of[fine.row_of >= 0] == fine.row_of[fine.row_of >= 0]).all()
    values = list(range(one.rows))
    cells = cells_of(one, values)
    found = selections(whole, one)
    for rank in np.flatnonzero(one.row_of >= 0):
        cell, row = whole.place(rank)
        value = found[cell].of(cells)
        assert (value[row] if found[cell].stacked else value).item() == read(one, cells, rank)


@pytest.mark.parametrize(
    ("held", "rows", "sizes"),
    [
        (everyone(3), [0, 0, 0], (1,)),
        (every_rank_alone(3), [0, 1, 2], (3,)),
        (one_row_per_rank([0, 2], 3), [0, NOWHERE, 1], (2,)),
    ],
)
def test_the_plain_ones(held, rows, sizes):
    assert held.row_of.tolist() == rows and held.sizes == sizes


def test_repr_says_how_many_rows_each_cell_has():
    assert repr(partition([0, 1, 2], [2, 1])) == "Partition(3 ranks, rows 2 + 1)"
    assert repr(partition([NOWHERE], [])) == "Partition(1 ranks, rows none)"
