import pytest
import torch

from strategies.inputs.variants import adversarial
from strategies.model.call_signature import call_kind
from tests.strategies.cases import numbers as drawn
from tests.strategies.cases import sample

X, WHOLE = drawn(4, 4), drawn(4, 4, dtype=torch.int64)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def made(one, seed=0, known=()):
    return list(adversarial.adversaries(one, adversarial.number_tensors([one, *known]), seed))


def test_equal_sizes_grow_together_and_nothing_shrinks():
    one = adversarial.grown_to_odd(sample("mm.default", drawn(4, 8), drawn(8, 4)))
    assert [tuple(t.shape) for t in one.tensors] == [(5, 9), (9, 5)]
    assert [tuple(t.shape) for t in adversarial.grown_to_odd(sample("neg.default", drawn(1, 2, 99))).tensors] == [
        (1, 5, 99)
    ]


def test_places_grow_apart_and_a_size_of_one_becomes_what_stands_beside_it():
    one = adversarial.grown_by_position(sample("add.Tensor", X, drawn(1, 4)))
    assert [tuple(t.shape) for t in one.tensors] == [(5, 7), (5, 7)]


def test_an_op_that_trusts_its_caller_keeps_its_sizes():
    index = torch.zeros(4, 4, dtype=torch.int64)
    trusting = sample("embedding_dense_backward.default", X, index[0], 9, -1, False)
    assert adversarial.keeps_sizes(trusting)
    assert {one.sample.tensors[0].shape for one in made(trusting)} == {X.shape}
    assert adversarial.keeps_sizes(sample("linalg_lu_solve.default", X, index[0], X))
    assert not adversarial.keeps_sizes(sample("gather.default", X, 0, index))
    assert not adversarial.keeps_sizes(sample("tanh_backward.default", X, X))


def test_a_call_and_its_adversaries_are_of_one_kind():
    one = sample("add.Tensor", X, X, alpha=-0.5)
    assert {call_kind(a.sample) for a in made(one)} == {call_kind(one)}
    assert {dict(a.sample.call.kwargs)["alpha"] for a in made(one)} == {-0.5, -1.5, -2.0}


def test_the_values_have_both_signs_and_one_and_ties_and_none_that_differ():
    found = {a.name: a.sample.tensors[0] for a in made(sample("neg.default", X))}
    assert bool((found["negative"] < 0).all()) and bool((found["positive"] > 0).all())
    assert bool((found["both signs"] < 0).any()) and bool((found["both signs"] > 0).any())
    assert found["ties"].unique().numel() == 2
    assert found["all equal"].unique().numel() == 1
    assert [a.name for a in made(sample("neg.default", X)) if not a.counts] == ["all equal"]


def test_indices_stay_within_what_they_were():
    index = torch.tensor([[0, 2, 1, 2], [2, 1, 0, 0]])
    for one in made(sample("gather.default", X, 0, index)):
        assert int(one.sample.tensors[1].min()) >= 0 and int(one.sample.tensors[1].max()) <= 2


def test_integers_change_their_sign_where_the_op_takes_fractions_too():
    alone = made(sample("neg.default", WHOLE.abs()))
    beside = made(sample("neg.default", WHOLE.abs()), known=[sample("neg.default", X)])
    assert all(bool((one.sample.tensors[0] >= 0).all()) for one in alone if one.counts)
    assert any(bool((one.sample.tensors[0] < 0).any()) for one in beside)


def test_one_seed_gives_the_same_calls_and_another_gives_others():
    first, again, other = (made(sample("neg.default", X), seed)[0].sample.tensors[0] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.complex64, torch.bool, torch.uint8])
@pytest.mark.parametrize(
    "values", [adversarial.redrawn, adversarial.both_signs, adversarial.ties, adversarial.with_outlier]
)
def test_values_keep_dtype_and_shape(values, dtype):
    x = torch.ones(3, 5).to(dtype)
    got = values(x, generator())
    assert (got.dtype, got.shape) == (x.dtype, x.shape)
    assert values(x[:0], generator()).shape == (0, 5)
    assert values(x[0, 0], generator()).shape == ()


def test_one_element_stands_apart():
    x = adversarial.with_outlier(X, generator()).abs().flatten().sort().values
    assert float(x[-1]) > 10 * float(x[-2])
