"""Partial values that make their total exactly, and no easier for it."""

import pytest
import torch

from localtensor.errors import NotReducible
from localtensor.layout.reductions import fold_partials as fold
from localtensor.layout.reductions import is_reducible
from localtensor.layout.spec import PARTIAL_KINDS
from localtensor.testing.hypothesis_strategies.layouts import exact_parts
from localtensor.testing.hypothesis_strategies.values import DTYPES, PATTERNS, Drawn

AVERAGED = [dtype for dtype in DTYPES if dtype.is_floating_point or dtype.is_complex]


def same(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    return True


@pytest.mark.parametrize("kind", PARTIAL_KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_parts_fold_to_the_total_to_the_last_bit_in_any_order(dtype, kind):
    if not is_reducible(kind, dtype):
        with pytest.raises(NotReducible):
            exact_parts(torch.ones(2, dtype=dtype), kind, 3, torch.Generator())
        return
    if kind == "avg" and dtype not in AVERAGED:
        return
    for number, pattern in enumerate(PATTERNS):
        if pattern == "rough" or (pattern == "extremes" and kind == "avg") or (dtype.is_complex and pattern == "inf"):
            continue
        for ranks in (1, 2, 3, 8):
            x = Drawn((4, 5), dtype, pattern, number).tensor()
            held = exact_parts(x, kind, ranks, torch.Generator().manual_seed(ranks), sparse=bool(number % 2))
            assert held.shape == (ranks, 4, 5) and held.dtype == dtype
            assert same(fold(held, kind), x) and same(fold(held.flip(0), kind), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int64], ids=str)
def test_addends_cancel_change_sign_and_are_not_zero_where_the_total_is(dtype):
    held = exact_parts(torch.zeros(50, dtype=dtype), "sum", 2, torch.Generator())
    assert (held != 0).all()
    real = held.real if dtype.is_complex else held
    assert (real > 0).any(0).all() and (real < 0).any(0).all() and (real[0] > 0).any() and (real[0] < 0).any()


def test_sparse_addends_are_zero_where_the_total_is_not():
    held = exact_parts(torch.ones(50), "sum", 3, torch.Generator(), sparse=True)
    assert (held == 0).any() and len(held.unique()) > 5


def test_addends_are_as_large_as_the_numbers_of_the_patterns():
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        assert 2 <= exact_parts(torch.zeros(50, dtype=dtype), "sum", 2, torch.Generator()).abs().max() <= 16


def test_what_has_no_exact_parts_sits_on_one_rank_alone():
    x = torch.tensor([float("nan"), float("inf"), torch.finfo(torch.float32).max, 1e-30, 1.0]).repeat(4, 1)
    held = exact_parts(x, "sum", 3, torch.Generator())
    alone = held[..., :4] != 0
    assert (alone.sum(0) == 1).all() and (held[..., 4] != 0).sum() > 6
    assert set(alone.int().argmax(0).flatten().tolist()) == {0, 1, 2}


def test_factors_have_both_signs_and_are_powers_of_two():
    for ranks in (2, 8):
        held = exact_parts(torch.full((60,), 3.0), "product", ranks, torch.Generator())
        assert (held < 0).any(1).all() and (held > 0).any(1).all()
        assert {0.5, 1, 2} <= set(held.abs().flatten().tolist())
    sparse = exact_parts(torch.full((60,), 3.0), "product", 2, torch.Generator(), sparse=True)
    assert set(sparse.abs().flatten().tolist()) == {1, 3}
    assert set((sparse.abs() == 3).int().argmax(0).tolist()) == {0, 1}


def test_factors_of_many_ranks_stay_within_the_dtype():
    x = torch.full((30,), 3.0, dtype=torch.float16)
    held = exact_parts(x, "product", 60, torch.Generator())
    assert held.isfinite().all() and torch.equal(fold(held, "product"), x)
