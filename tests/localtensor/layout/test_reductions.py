"""In which order values are folded: eight in a row, more of them in pairs; and stacks are folded in the same order."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from localtensor.collectives.reference import all_gather, all_reduce
from localtensor.errors import DtypeNotReducible, NotReducible, UnknownReduction
from localtensor.layout import reductions
from localtensor.layout.partial_splits import partial_values
from localtensor.layout.reductions import (
    GLOO_DTYPES,
    PAIRS,
    REDUCIBLE_KINDS,
    PremulSum,
    carrier_dtype,
    check_reducible,
    dtype_kind,
    fold,
    fold_in_pairs,
    fold_in_ring,
    fold_partials,
    is_reducible,
    is_unambiguous,
)
from localtensor.layout.spec import PARTIAL_KINDS
from localtensor.lockstep.comms import stacked_collectives

NAN = math.nan
DTYPE_OF = {"bool": torch.bool, "integer": torch.int32, "float": torch.float32, "complex": torch.complex64}


def assert_same(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("op", "want"), [("sum", 12), ("product", 30), ("min", 1), ("max", 6), ("band", 0), ("bor", 7), ("bxor", 2)]
)
def test_each_fold_of_five_one_and_six(op, want):
    assert_same(fold([torch.tensor(n) for n in (5, 1, 6)], op), torch.tensor(want))


def test_the_average_is_the_sum_divided_so_it_overflows_where_the_sum_does():
    assert_same(fold([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0])], "avg"), torch.tensor([2.0, 3.5]))
    large = torch.tensor([60000.0], dtype=torch.float16)
    assert_same(fold([large, large], "avg"), torch.tensor([math.inf], dtype=torch.float16))


@pytest.mark.parametrize("ranks", [3, 5, 6, 7, 13, 14, 15, 100])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_the_average_of_complex_numbers_is_that_of_their_parts(dtype, ranks):
    each = torch.complex(torch.arange(-9.0, 9), torch.arange(18.0)).to(dtype)
    got = fold([each] * ranks, "avg")
    assert_same(got, each)
    assert_same(fold([each.conj()] * ranks, "avg"), each.conj().resolve_conj())
    third = torch.view_as_complex(torch.view_as_real(each) / 3)
    assert_same(fold([each, each * 0, each * 0], "avg"), third)


def test_the_average_has_a_gradient_in_both_parts():
    x = torch.tensor([3 + 6j], requires_grad=True)
    fold([x, torch.zeros_like(x)], "avg").backward(torch.tensor([1 + 2j]))
    assert_same(x.grad, torch.tensor([0.5 + 1j]))


@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_min_and_max_let_nan_through_whichever_rank_holds_it(op, dtype):
    first, second = torch.tensor([NAN, 1, NAN], dtype=dtype), torch.tensor([1, NAN, NAN], dtype=dtype)
    assert fold([first, second], op).isnan().all()


def test_integers_wrap_around():
    assert_same(fold([torch.tensor([100], dtype=torch.int8)] * 2, "sum"), torch.tensor([-56], dtype=torch.int8))
    assert_same(fold([torch.tensor([100], dtype=torch.uint8)] * 2, "product"), torch.tensor([16], dtype=torch.uint8))


@pytest.mark.parametrize(
    ("op", "want"),
    [
        ("sum", [False, True, True]), ("product", [False, False, True]), ("min", [False, False, True]),
        ("max", [False, True, True]), ("bxor", [False, True, False]),
    ],
)  # fmt: skip
def test_bools_stay_bools(op, want):
    held = [torch.tensor([False, False, True]), torch.tensor([False, True, True])]
    assert_same(fold(held, op), torch.tensor(want))


def test_premul_sum_rounds_the_factor_to_the_dtype_first():
    nine, factor = torch.tensor([9.0], dtype=torch.bfloat16), torch.tensor(0.1, dtype=torch.bfloat16)
    assert nine * factor != nine * 0.1
    assert_same(fold([nine, nine], PremulSum(0.1)), nine * factor * 2)


def test_floats_go_round_the_ring_so_that_rounding_is_the_same_each_time():
    big, small = torch.tensor([1e8]), torch.tensor([-1.0])
    assert_same(fold([small, -big, big], "sum"), small)  # of the first chunk, the last rank is the first
    assert_same(fold([big, -big, small], "sum"), torch.tensor([0.0]))


def test_each_chunk_starts_at_the_rank_before_its_own():
    held = [torch.full([7], float(10**rank)) for rank in range(3)]  # chunks of 4, 3 and no elements
    assert_same(fold_in_ring(lambda a, b: a * 2 + b, held), torch.tensor([421.0] * 4 + [214.0] * 3))
    rows = [torch.stack([x, x + 1]) for x in held]  # two groups at once
    assert_same(fold_in_ring(lambda a, b: a * 2 + b, rows)[0], fold_in_ring(lambda a, b: a * 2 + b, held))


@pytest.mark.parametrize("rooted", [False, True])
@pytest.mark.parametrize("ranks", [3, 4, 8])
@pytest.mark.parametrize("elements", [0, 1, 5, 8, 30, 64])
def test_chunks_that_are_folded_at_once_are_folded_in_the_same_order(monkeypatch, ranks, elements, rooted):
    held = [torch.randn(2, elements, generator=torch.Generator().manual_seed(rank)) for rank in range(ranks)]
    at_once = fold_in_ring(torch.add, held, rooted=rooted)
    monkeypatch.setattr(reductions, "MAX_COPIED", 0)
    assert_same(at_once, fold_in_ring(torch.add, held, rooted=rooted))


def test_the_kinds_of_number_are_four():
    assert [dtype_kind(d) for d in (torch.bool, torch.uint8, torch.float16, torch.complex64)] == list(DTYPE_OF)


def test_each_dtype_that_does_not_travel_has_a_carrier_that_does():
    floats = [torch.float8_e4m3fn, torch.float8_e5m2]
    for dtype in [torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.complex32, *floats]:
        assert dtype not in GLOO_DTYPES
        assert carrier_dtype(dtype) in GLOO_DTYPES
        assert dtype_kind(carrier_dtype(dtype)) == dtype_kind(dtype)


def test_the_carrier_brings_every_value_back():
    shorts = torch.arange(-(2**15), 2**15).to(torch.int16)
    assert_same(shorts.to(carrier_dtype(torch.int16)).to(torch.int16), shorts)
    eights = torch.arange(-128, 128).to(torch.int8).view(torch.float8_e5m2)
    assert_same(eights.to(carrier_dtype(torch.float8_e5m2)).to(torch.float8_e5m2).float(), eights.float())
    ints = torch.tensor([0, -1], dtype=torch.int32).view(torch.uint32)
    assert ints.to(carrier_dtype(torch.uint32)).tolist() == ints.tolist() == [0, 2**32 - 1]
    longs = torch.tensor([0, -1, 2**62]).view(torch.uint64)
    assert torch.equal(longs.to(carrier_dtype(torch.uint64)).to(torch.uint64), longs)


# What each refused pair of reduction and kind suggests, done.
REMEDIED = {
    ("avg", "bool"): lambda x: all_reduce([x.to(torch.float64)] * 2, "avg"),
    ("avg", "integer"): lambda x: (all_reduce([x.to(torch.float64)] * 2, "avg"), all_reduce([x] * 2)[0] / 2),
    ("product", "complex"): lambda x: all_gather([x, x])[0][0] * all_gather([x, x])[0][1],
    ("min", "complex"): lambda x: (all_reduce([x.abs()] * 2, "min"), all_reduce([torch.view_as_real(x)] * 2, "min")),
    ("max", "complex"): lambda x: (all_reduce([x.abs()] * 2, "max"), all_reduce([torch.view_as_real(x)] * 2, "max")),
    ("premul_sum", "bool"): lambda x: all_reduce([x * 0.5] * 2, "sum"),
    ("premul_sum", "integer"): lambda x: all_reduce([x * 0.5] * 2, "sum"),
    **{(op, kind): lambda x, op=op: all_reduce([x.real.to(torch.int64)] * 2, op)
       for op in ("band", "bor", "bxor") for kind in ("float", "complex")},
}  # fmt: skip
REFUSED = [(op, kind) for op, kinds in REDUCIBLE_KINDS.items() for kind in DTYPE_OF if kind not in kinds]
MESSAGES = {
    ("avg", "bool"): "Pass x.to(torch.float64).",
    ("avg", "integer"): "Pass x.to(torch.float64), or use 'sum' and divide.",
    ("product", "complex"): "Use all_gather and multiply on each rank.",
    ("min", "complex"): "Pass x.abs(), or torch.view_as_real(x) for each part by itself.",
    ("max", "complex"): "Pass x.abs(), or torch.view_as_real(x) for each part by itself.",
    ("premul_sum", "bool"): "Multiply by the factor on each rank, then use 'sum'.",
    ("premul_sum", "integer"): "Multiply by the factor on each rank, then use 'sum'.",
}


@pytest.mark.parametrize(("op", "kind"), REFUSED)
def test_what_has_no_meaning_is_refused_with_a_way_out_that_works(op, kind):
    x = torch.tensor([1, 0]).to(DTYPE_OF[kind])
    with pytest.raises(DtypeNotReducible) as caught:
        all_reduce([x, x], PremulSum(0.5) if op == "premul_sum" else op)
    problem = f"all_reduce: op: '{op}' of {x.dtype}: there is no {op} of {kind} tensors. "
    remedy = MESSAGES.get((op, kind), "Pass integers, as x.real.to(torch.int64) makes them.")
    assert str(caught.value) == problem + remedy
    assert REMEDIED[op, kind](x)[0] is not None


@pytest.mark.parametrize(("op", "kind"), [(op, kind) for op, kinds in REDUCIBLE_KINDS.items() for kind in kinds])
def test_what_has_a_meaning_goes_through_and_keeps_its_dtype(op, kind):
    reduction = PremulSum(2.0) if op == "premul_sum" else op
    check_reducible("all_reduce", reduction, DTYPE_OF[kind])
    x = torch.tensor([1, 0]).to(DTYPE_OF[kind])
    assert [y.dtype for y in all_reduce([x, x], reduction)] == [DTYPE_OF[kind]] * 2


@pytest.mark.parametrize("op", ["mean", "SUM", "", None, ["sum"]])
def test_an_unknown_reduction_is_refused(op):
    with pytest.raises(UnknownReduction):
        check_reducible("all_reduce", op, torch.float32)


def test_the_tables_speak_of_the_same_reductions():
    assert set(REDUCIBLE_KINDS) == {*PAIRS, "premul_sum"}


@pytest.mark.parametrize(("held", "said"), [
    ("a", "a"), ("ab", "(ab)"), ("abcdefgh", "(((((((ab)c)d)e)f)g)h)"),
    ("abcdefghi", "(((((ab)(cd))(ef))(gh))i)"), ("abcdefghij", "(((((ab)(cd))(ef))(gh))(ij))"),
])  # fmt: skip
def test_eight_are_folded_one_after_the_other_and_more_in_pairs(held, said):
    assert fold_in_pairs(lambda a, b: f"({a}{b})", held) == said


@pytest.mark.parametrize("members", [7, 8, 9, 10, 16, 17, 18, 33])
def test_a_stack_is_folded_in_the_same_order_to_the_bit(members):
    rows = torch.randn(members, 50, generator=torch.Generator().manual_seed(members)) * 1e3
    done = stacked_collectives.reduce_rows(rows, stacked_collectives.fold_plan(np.arange(members)[None]), "sum")
    assert torch.equal(done[0], fold(list(rows), "sum"))


DTYPES = [torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64]


def value(dtype, seed=0):
    rng = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 2 if dtype == torch.bool else 9, (6, 5), generator=rng)
    return raw.to(dtype) if dtype in (torch.bool, torch.uint8) else (raw - 4).to(dtype)


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("kind", PARTIAL_KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_parts_fold_to_the_total(dtype, kind, sparse, far):
    x = value(dtype)
    if not is_reducible(kind, dtype):
        with pytest.raises(NotReducible, match="is not defined"):
            partial_values(x, kind, 3, torch.Generator())
        return
    held = partial_values(x, kind, 3, torch.Generator().manual_seed(1), sparse=sparse, far=far)
    assert held.dtype == dtype and held.shape == (3, 6, 5)
    torch.testing.assert_close(fold_partials(held, kind).to(dtype), x, atol=2e-3 if far else 2e-5, rtol=2e-5)


@pytest.mark.parametrize("ranks", [3, 7, 13, 14, 15])
def test_an_average_of_whole_complex_numbers_is_exact(ranks):
    x = torch.complex(torch.arange(-9.0, 9), torch.arange(18.0))
    assert torch.equal(fold_partials(torch.stack([x] * ranks), "avg"), x)


def test_an_average_of_integers_can_be_reduced_but_is_not_agreed_on():
    assert is_reducible("avg", torch.int64) and not is_unambiguous("avg", torch.int64)
    assert (
        is_unambiguous("avg", torch.complex64)
        and is_unambiguous("sum", torch.int64)
        and is_unambiguous("max", torch.bool)
    )
    assert not is_unambiguous("max", torch.complex64) and not is_unambiguous("avg", torch.bool)


@pytest.mark.parametrize("kind", PARTIAL_KINDS)
def test_nothing_is_said_of_dtypes_that_torch_cannot_add(kind):
    assert not is_reducible(kind, torch.float8_e4m3fn) and not is_reducible(kind, torch.complex32)
    with pytest.raises(NotImplementedError):
        torch.ones(2, dtype=torch.float8_e4m3fn) + 1


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16], ids=str)
def test_an_average_of_small_integers_means_nothing_because_their_sums_wrap(dtype):
    held = torch.full((2, 1), torch.iinfo(dtype).max, dtype=dtype)
    assert fold_partials(held, "sum").item() != 2 * held[0].item()
    assert not is_reducible("avg", dtype) and is_reducible("sum", dtype)
    for refused in (lambda: fold_partials(held, "avg"), lambda: partial_values(held[0], "avg", 2, torch.Generator())):
        with pytest.raises(NotReducible, match=r"avg of torch\.\w+ is not defined"):
            refused()


def test_addends_cancel_change_sign_and_are_not_zero_where_the_total_is():
    held = partial_values(torch.zeros(50), "sum", 2, torch.Generator().manual_seed(0))
    assert (held != 0).all()
    assert (held > 0).any(0).all() and (held < 0).any(0).all()
    assert (held[0] > 0).any() and (held[0] < 0).any()


def test_sparse_addends_are_zero_where_the_total_is_not():
    held = partial_values(torch.ones(50), "sum", 3, torch.Generator().manual_seed(0), sparse=True)
    assert (held == 0).any()


def test_each_element_of_a_maximum_has_an_owner_of_its_own():
    x = torch.arange(40.0)
    held = partial_values(x, "max", 2, torch.Generator().manual_seed(0))
    assert (held == x).any(1).all()
    gaps = (x - held).amax(0)
    assert len(set(gaps.tolist())) > 30


def test_sparse_maxima_tie():
    x = torch.arange(40.0)
    held = partial_values(x, "max", 2, torch.Generator().manual_seed(0), sparse=True)
    assert ((held == x).sum(0) == 2).any()


def test_an_infinite_total_sits_on_one_rank_alone():
    held = partial_values(torch.tensor([float("inf"), 1.0]), "sum", 3, torch.Generator().manual_seed(0))
    assert torch.isinf(held[:, 0]).sum() == 1
    assert fold_partials(held, "sum")[0] == float("inf")


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("kind", ["sum", "avg", "product"])
def test_not_a_number_sits_on_one_rank_and_in_sparse_parts_on_several(kind, sparse):
    x = torch.cat([torch.full((40,), float("nan")), torch.ones(10)])
    held = partial_values(x, kind, 3, torch.Generator().manual_seed(0), sparse=sparse)
    assert (
        held.isnan().sum(0)[:40].unique().tolist() == ([1, 2, 3] if sparse else [1]) and held[:, 40:].isfinite().all()
    )
    assert held.isnan().any(1).all()
    torch.testing.assert_close(fold_partials(held, kind), x, equal_nan=True)


@pytest.mark.parametrize("kind", ["min", "max"])
@pytest.mark.parametrize("sparse", [False, True])
def test_every_rank_has_the_nan_of_an_extreme_so_that_no_backend_makes_a_number_of_it(kind, sparse):
    """gloo's minimum of a number and a NaN is the one or the other, by the order of the ranks."""
    infinite = float("inf" if kind == "max" else "-inf")
    x = torch.full((40,), float("nan")).index_fill(0, torch.arange(20), infinite)
    held = partial_values(x, kind, 3, torch.Generator().manual_seed(0), sparse=sparse)
    assert held[:, 20:].isnan().all()
    assert (held[:, :20] > 0).any() and (held[:, :20] < 0).any() and held.isfinite().sum() == 40
    torch.testing.assert_close(fold_partials(held, kind), x, equal_nan=True)


@pytest.mark.parametrize(
    ("kind", "sign", "alone"), [("max", 1, True), ("max", -1, False), ("min", -1, True), ("min", 1, False)]
)
def test_an_infinite_extreme_sits_on_one_rank_unless_no_number_is_beyond_it(kind, sign, alone):
    x = torch.tensor([sign * float("inf"), 1.0])
    held = partial_values(x, kind, 3, torch.Generator().manual_seed(0))
    assert held[:, 0].isinf().sum() == (1 if alone else 3)
    assert torch.equal(fold_partials(held, kind), x)


@pytest.mark.parametrize("kind", ["sum", "avg", "max", "min"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.int32], ids=str)
def test_far_parts_are_far_and_only_where_that_is_asked(kind, dtype):
    near, far = (
        partial_values(value(dtype), kind, 3, torch.Generator().manual_seed(1), **asked)
        for asked in ({}, {"far": True})
    )
    assert far.abs().amax() > 100 * near.abs().amax()


def test_small_integers_have_no_room_for_far_parts():
    near, far = (
        partial_values(value(torch.uint8), "max", 3, torch.Generator().manual_seed(1), far=far) for far in (False, True)
    )
    assert torch.equal(near, far)


def test_integers_do_not_wrap_past_their_ends():
    x = torch.tensor([0, 255, 7], dtype=torch.uint8)
    for kind in ("min", "max"):
        held = partial_values(x, kind, 3, torch.Generator().manual_seed(0))
        assert torch.equal(fold_partials(held, kind), x)


def test_an_integer_average_that_does_not_divide_is_not_rounded():
    assert fold_partials(torch.tensor([[1], [2]]), "avg").item() == 1.5
