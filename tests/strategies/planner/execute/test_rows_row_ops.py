"""Rows as tensors: cut out, packed, put together again, and set among values that change nothing."""

import pytest
import torch

from localtensor.layout.reductions import fold_partials as fold
from localtensor.layout.reductions import is_unambiguous
from localtensor.layout.spec import PARTIAL_KINDS
from strategies.planner.execute.rows import (
    BlockPiece,
    copy_rows_to,
    flattened,
    neutral_element,
    pack,
    pad_rows,
    rows_after_cuts,
    spaced_runs,
    take_rows,
    transfers,
    unpack,
)
from tests.strategies.planner.execute.random_specs import DTYPES

SPECIAL = [3.0, float("nan"), float("inf"), float("-inf"), -0.0]


def _dealt(shape, dim, factor, ranks):
    pieces = [BlockPiece(dim, rows_after_cuts(shape[dim], ((factor, ranks, place),))) for place in range(ranks)]
    return transfers(shape, None, pieces)


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize(("factor", "ranks"), [(1, 2), (1, 4), (2, 2), (3, 2), (2, 3), (5, 4)])
def test_what_is_packed_is_unpacked_even_in_slots_of_one_size(dim, factor, ranks):
    x = torch.arange(5 * 7 * 3).view(5, 7, 3)
    found = _dealt((5, 7, 3), dim, factor, ranks)
    most = max(part.rows for part in found)
    for rows in (None, most, most + 1):
        flat = pack(x, found, rows)
        assert flat.numel() == (x.numel() if rows is None else x.numel() // x.shape[dim] * rows * ranks)
        assert torch.equal(unpack(flat, found, (5, 7, 3), rows), x)


def test_what_lies_in_order_is_not_copied():
    x = torch.arange(12).view(4, 3)
    found = _dealt((4, 3), 0, 1, 2)
    flat = pack(x, found, 2)
    assert flat.data_ptr() == x.data_ptr()
    assert unpack(flat, found, (4, 3), 2).data_ptr() == x.data_ptr()
    assert pack(x.t().contiguous().t(), found, 2).data_ptr() != x.data_ptr()
    assert pack(x, _dealt((4, 3), 1, 1, 3), 1).data_ptr() != x.data_ptr()


def test_one_element_is_flat_whatever_its_stride():
    assert flattened(torch.zeros(1, 2)[:, 1]).stride() == (1,)
    assert flattened(torch.arange(4).view(2, 2).t()).tolist() == [0, 2, 1, 3]
    x = torch.arange(4).view(2, 2)
    assert flattened(x).data_ptr() == x.data_ptr()


def test_rows_of_a_strided_shard_are_one_view_however_many_blocks_it_has():
    runs = rows_after_cuts(4000, ((1000, 2, 1),))
    assert len(runs) == 1000
    assert spaced_runs(runs) == ((2, 2, 4, 1000),)
    x = torch.arange(4000)
    assert torch.equal(take_rows(x, 0, runs), x.view(1000, 2, 2)[:, 1].flatten())
    again = torch.zeros_like(x)
    copy_rows_to(take_rows(x, 0, runs), 0, runs, again)
    assert torch.equal(again, x * (x % 4 >= 2))


def test_a_short_piece_is_filled_with_zeros_and_a_full_one_is_not_copied():
    x = torch.ones(2, 3)
    assert pad_rows(x, 0, 3).tolist() == [1] * 6 + [0] * 3
    assert pad_rows(x, 0, 2).data_ptr() == x.data_ptr()


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(kind, dtype) for kind in PARTIAL_KINDS for dtype in DTYPES if kind != "avg" and is_unambiguous(kind, dtype)],
)
def test_the_neutral_value_changes_nothing_nan_infinity_and_minus_zero_included(kind, dtype):
    x = torch.tensor(SPECIAL if dtype.is_floating_point else [0, 1, 3]).to(dtype)
    if not dtype.is_floating_point and not dtype.is_complex and dtype != torch.bool:
        x = torch.cat([x, torch.tensor([torch.iinfo(dtype).min, torch.iinfo(dtype).max], dtype=dtype)])
    other = torch.full_like(x, neutral_element(kind, dtype))
    pair = {"sum": torch.add, "product": torch.mul, "min": torch.minimum, "max": torch.maximum}
    for one, two in ((x, other), (other, x)):
        torch.testing.assert_close(fold(torch.stack([one, two]), kind), x, rtol=0, atol=0, equal_nan=True)
        if dtype.is_floating_point:
            assert torch.equal(pair[kind](one, two).nan_to_num().signbit(), x.nan_to_num().signbit())
