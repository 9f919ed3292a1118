"""Tensors by pattern: what each holds, and that sums of them are exact.  Partial values that make their total
exactly, and no easier for it."""

import itertools

import pytest
import torch

from localtensor.errors import NotReducible
from localtensor.layout.reductions import fold_partials as fold
from localtensor.layout.reductions import is_reducible
from localtensor.layout.spec import PARTIAL_KINDS
from localtensor.testing.hypothesis_strategies.layouts import exact_parts
from localtensor.testing.hypothesis_strategies.values import (
    DTYPES,
    PATTERNS,
    USUAL,
    BadDraw,
    Drawn,
    exact_bound,
    exact_unit,
)

EXACT = [pattern for pattern in USUAL if pattern != "extremes"]
FLOATS = [dtype for dtype in DTYPES if dtype.is_floating_point]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_is_the_same_each_time_and_belongs_to_the_caller(dtype, pattern):
    for shape in ((), (0, 3), (4, 5)):
        drawn = Drawn(shape, dtype, pattern, 3)
        one, other = drawn.tensor(), drawn.tensor()
        assert one.shape == shape and one.dtype == dtype and one.is_contiguous()
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        assert not one.numel() or one.data_ptr() != other.data_ptr()


@pytest.mark.parametrize("pattern", EXACT)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_number_of_an_exact_pattern_is_a_multiple_of_the_unit_within_the_bound(dtype, pattern):
    for seed in range(20):
        x = Drawn((6, 5), dtype, pattern, seed).tensor()
        x = torch.view_as_real(x) if dtype.is_complex else x.double()
        assert (x.abs() <= exact_bound(dtype)).all() and (x.double() / exact_unit(dtype) % 1 == 0).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_sums_over_eight_ranks_are_exact_in_any_order(dtype):
    for pattern, seed in itertools.product(EXACT, range(5)):
        ranks = [Drawn((7,), dtype, pattern, seed + rank).tensor() for rank in range(8)]
        one, other = torch.zeros(7, dtype=dtype), torch.zeros(7, dtype=dtype)
        for x, y in zip(ranks, reversed(ranks), strict=True):
            one, other = one + x, other + y
        assert torch.equal(one, other) and torch.equal(one.double(), sum(x.double() for x in ranks))


def test_what_the_patterns_hold():
    def held(pattern, dtype=torch.float32, seed=0):
        return Drawn((3, 4), dtype, pattern, seed).tensor()

    assert not held("zeros").any() and (held("ones") == 1).all() and (held("ones", torch.complex64) == 1).all()
    assert held("arange").flatten().tolist() == list(range(12))
    assert Drawn((11,), torch.bfloat16, "arange").tensor().tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1]
    assert (held("alternating").flatten().sign() == torch.tensor([1, -1] * 6)).all()
    assert set(held("ties").unique().tolist()) == {-1, 2}
    assert set(held("small", torch.int8).unique().tolist()) <= set(range(-4, 5))
    assert (held("one_big").abs() == 1024).sum() == 1 and (held("one_big").abs() <= 4).sum() == 11
    assert len(held("normal").unique()) > 9 and 0.5 < held("normal").std() < 2
    assert held("nan").isnan().any() and not held("nan").isinf().any() and held("nan").isfinite().any()
    assert held("inf").isinf().any() and not held("inf").isnan().any()
    assert len(held("rough", torch.float64).mul(2**20).frac().unique()) == 12


def test_extremes_are_the_ends_of_the_dtype():
    floats = Drawn((200,), torch.float16, "extremes").tensor()
    assert {65504.0, -65504.0, 0.0, 6.103515625e-05} <= set(floats.tolist())
    assert {-128, 127} <= set(Drawn((50,), torch.int8, "extremes").tensor().tolist())
    assert {-(2**63), 2**63 - 1} <= set(Drawn((50,), torch.int64, "extremes").tensor().tolist())


def test_what_has_no_sign_has_none():
    for pattern in USUAL:
        assert (Drawn((9,), torch.uint8, pattern, 1).tensor().int() <= (255 if pattern == "extremes" else 64)).all()
        assert Drawn((9,), torch.bool, pattern, 1).tensor().dtype == torch.bool


def test_its_print_makes_it_again():
    drawn = Drawn((2, 3), torch.bfloat16, "normal", 7, requires_grad=True)
    assert repr(drawn) == "Drawn((2, 3), torch.bfloat16, 'normal', 7, requires_grad=True)"
    assert eval(repr(drawn), {"Drawn": Drawn, "torch": torch}) == drawn
    assert drawn.tensor().requires_grad
    assert Drawn([2, 3], torch.int8, "ones") == Drawn((2, 3), torch.int8, "ones")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (((-1,), torch.int8, "ones"), r"^draws.Drawn: shape: shape=\(-1,\): it is no tuple of sizes of 0 or more\. "),
        ((None, torch.int8, "ones"), "^draws.Drawn: shape: "),
        (((2,), None, "ones"), "^draws.Drawn: dtype: "),
        (((2,), torch.quint8, "ones"), "^draws.Drawn: dtype: dtype=torch.quint8: it is not drawn here"),
        (((2,), torch.int8, "gaussian"), "^draws.Drawn: pattern: pattern=.*: there is no 'gaussian'"),
        (
            ((2,), torch.int8, "ones", 0, True),
            "^draws.Drawn: requires_grad: .*: a tensor of torch.int8 has no gradient",
        ),
    ],
)
def test_what_makes_no_tensor_is_refused(arguments, text):
    with pytest.raises(BadDraw, match=text):
        Drawn(*arguments)


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
