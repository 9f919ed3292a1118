import pytest
import torch

from localtensor.errors import NotReducible
from localtensor.layout.reductions import fold_partials as fold
from localtensor.layout.reductions import is_reducible, is_unambiguous, partial_values
from localtensor.layout.spec import PARTIAL_KINDS

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
    torch.testing.assert_close(fold(held, kind).to(dtype), x, atol=2e-3 if far else 2e-5, rtol=2e-5)


@pytest.mark.parametrize("ranks", [3, 7, 13, 14, 15])
def test_an_average_of_whole_complex_numbers_is_exact(ranks):
    x = torch.complex(torch.arange(-9.0, 9), torch.arange(18.0))
    assert torch.equal(fold(torch.stack([x] * ranks), "avg"), x)


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
    assert fold(held, "sum").item() != 2 * held[0].item()
    assert not is_reducible("avg", dtype) and is_reducible("sum", dtype)
    for refused in (lambda: fold(held, "avg"), lambda: partial_values(held[0], "avg", 2, torch.Generator())):
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
    assert fold(held, "sum")[0] == float("inf")


@pytest.mark.parametrize("kind", PARTIAL_KINDS)
def test_not_a_number_sits_on_one_rank_alone(kind):
    x = torch.tensor([float("nan"), 1.0])
    held = partial_values(x, kind, 3, torch.Generator().manual_seed(0))
    assert held[:, 0].isnan().sum() == 1 and held.isfinite().sum() == 5
    torch.testing.assert_close(fold(held, kind), x, equal_nan=True)


@pytest.mark.parametrize("kind", ["min", "max"])
@pytest.mark.parametrize("sparse", [False, True])
def test_where_the_extreme_is_no_number_the_others_are_on_both_sides_of_zero(kind, sparse):
    x = torch.full((40,), float("nan")).index_fill(0, torch.tensor([0]), float("inf" if kind == "max" else "-inf"))
    held = partial_values(x, kind, 3, torch.Generator().manual_seed(0), sparse=sparse)
    assert (held > 0).any() and (held < 0).any() and held.isfinite().sum() == 80
    assert fold(held, kind)[0] == x[0] and fold(held, kind).isnan().sum() == 39


@pytest.mark.parametrize(
    ("kind", "sign", "alone"), [("max", 1, True), ("max", -1, False), ("min", -1, True), ("min", 1, False)]
)
def test_an_infinite_extreme_sits_on_one_rank_unless_no_number_is_beyond_it(kind, sign, alone):
    x = torch.tensor([sign * float("inf"), 1.0])
    held = partial_values(x, kind, 3, torch.Generator().manual_seed(0))
    assert held[:, 0].isinf().sum() == (1 if alone else 3)
    assert torch.equal(fold(held, kind), x)


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
        assert torch.equal(fold(held, kind), x)


def test_an_integer_average_that_does_not_divide_is_not_rounded():
    assert fold(torch.tensor([[1], [2]]), "avg").item() == 1.5
