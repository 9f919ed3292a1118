import math

import pytest
import torch

from strategies.inputs.variants.adversarial import VALUES, values_generator
from tests.strategies.cases import numbers, sample

KIND = {kind.name: kind for kind in VALUES}
X = numbers(4, 6)
INDEX = torch.tensor([3, 1, 2, 0])


def made(name, one, seed=3):
    return KIND[name].make(one, values_generator(name, seed))


def test_specials_are_a_nan_and_both_infinities():
    (x,) = made("specials", sample("relu.default", X))
    assert (x.isnan().sum(), (x == math.inf).sum(), (x == -math.inf).sum()) == (1, 1, 1)


def test_holes_are_nan_alone():
    (x,) = made("holes", sample("relu.default", X))
    assert (int(x.isnan().sum()), int(x.isinf().sum())) == (8, 0)
    (few,) = made("holes", sample("relu.default", numbers(5)))
    assert few.isnan().sum() == 2


@pytest.mark.parametrize("one", [
    sample("relu.default", numbers(4, dtype=torch.int64)),
    sample("relu.default", numbers(3)),
    sample("special_chebyshev_polynomial_t.default", X, X),
    sample("bucketize.Tensor", INDEX, torch.arange(5.0)),
], ids=lambda one: one.op)  # fmt: skip
def test_where_there_is_nothing_to_sprinkle_on_there_are_no_specials(one):
    assert made("specials", one) is None
    assert made("holes", one) is None


@pytest.mark.parametrize("name", list(KIND))
def test_floats_of_one_byte_with_which_torch_does_not_compute_stay_what_they_are(name):
    one = sample(
        "_scaled_mm.default", *(x.to(torch.float8_e4m3fn) for x in (numbers(16, 16), numbers(16, 16).t())), X, X
    )
    small = (made(name, one) or one.tensors)[:2]
    assert all(a is b for a, b in zip(small, one.tensors, strict=False))


@pytest.mark.parametrize("name", list(KIND))
def test_the_samples_own_tensors_stay_as_they_are_and_so_do_shapes_and_dtypes(name):
    one = sample("index_add.default", numbers(4, 6), 0, INDEX, numbers(4, 6, seed=1))
    before = [x.clone() for x in one.tensors]
    other = made(name, one) or one.tensors
    assert all(torch.equal(x, y) for x, y in zip(one.tensors, before, strict=True))
    assert [(x.shape, x.dtype) for x in other] == [(x.shape, x.dtype) for x in before]


@pytest.mark.parametrize("name", list(KIND))
def test_the_same_seed_gives_the_same_values(name):
    one = sample("masked_fill.Scalar", X, X > 0, 2.0)
    first, second = made(name, one), made(name, one)
    assert (first is None) == (second is None)
    assert all(
        torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(first or (), second or (), strict=True)
    )


@pytest.mark.parametrize(("name", "place"), [("ascending", 11), ("descending", 0), ("middle", 5)])
def test_the_maximum_of_every_row_and_column_stands_where_it_should(name, place):
    (x,) = made(name, sample("relu.default", numbers(12, 12)))
    assert set(x.argmax(0).tolist()) | set(x.argmax(1).tolist()) == {place}
    assert torch.equal(x.flatten().sort().values, numbers(12, 12).flatten().sort().values)


@pytest.mark.parametrize(("name", "holds"), [
    ("ties", lambda x: set(x.flatten().tolist()) == {-1.0, 0.0, 1.0}),
    ("all equal", lambda x: bool((x == 1).all())),
    ("zeros", lambda x: bool((x == 0).all())),
    ("positive", lambda x: bool((x > 0).all())),
    ("negative", lambda x: bool((x < 0).all())),
    ("fading", lambda x: float(x[-1].abs().max()) < 0.05 * float(x[0].abs().max())),
])  # fmt: skip
def test_floats_are_what_their_name_says(name, holds):
    assert all(holds(x) for x in made(name, sample("add.Tensor", X, X + 1)))


def test_masks_are_all_true_or_all_false_and_the_rest_stays():
    one = sample("masked_fill.Scalar", X, X > 0, 2.0)
    assert [made(name, one)[1].unique().tolist() for name in ("all true", "all false")] == [[True], [False]]
    assert made("all true", one)[0] is one.tensors[0]
    assert made("all true", sample("relu.default", X)) is None


def test_only_gradients_that_are_alike_everywhere_are_varied():
    one = sample("tanh_backward.default", torch.ones(4), torch.ones(4))
    grad, out = made("cotangents", one)
    assert len(set(grad.tolist())) == 4 and out is one.tensors[1]
    assert made("cotangents", sample("tanh_backward.default", numbers(4), torch.ones(4))) is None


def test_indices_are_repeated_where_that_has_one_meaning():
    _, index, _ = made("repeated indices", sample("index_add.default", X, 0, INDEX, X))
    assert set(index.tolist()) == {3, 0}
    place = [torch.tensor([3, 1, 2])]
    assert made("repeated indices", sample("index_put.default", X, place, X[:3])) is None
    assert made("repeated indices", sample("index_put.default", X, place, X[:3], True)) is not None
    assert made("repeated indices", sample("scatter.src", X, 0, INDEX[:, None], X)) is None
    assert made("repeated indices", sample("scatter_add.default", X, 0, INDEX[:, None], X)) is not None


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.uint8], ids=str)
def test_integers_near_the_ends_of_their_dtype_leave_the_least_one_out(dtype):
    (x,) = made("limits", sample("bitwise_not.default", torch.zeros(200, dtype=dtype)))
    ends = torch.iinfo(dtype)
    assert int(x.max()) == ends.max
    assert int(x.min()) == (ends.min + 1 if dtype.is_signed else 0)


@pytest.mark.parametrize("one", [
    sample("index_select.default", X, 0, INDEX),
    sample("bincount.default", INDEX),
    sample("repeat_interleave.Tensor", INDEX),
    sample("_fake_quantize_learnable_per_tensor_affine.default", X, X[0, :1], X[0, :1], 0, 9),
    sample("special_hermite_polynomial_h.default", X, torch.tensor([2])),
], ids=lambda one: one.op)  # fmt: skip
@pytest.mark.parametrize("name", ["limits", "few integers"])
def test_integers_that_are_no_numbers_stay(name, one):
    assert made(name, one) is None


def test_few_integers_are_ties():
    (x,) = made("few integers", sample("bitwise_not.default", torch.arange(30)))
    assert set(x.tolist()) == {-1, 0, 1}
