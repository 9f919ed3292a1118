import pytest
import torch

pytest.importorskip("spmd_types")

from strategies.model.rule import Sample
from strategies.validation.finding import OverloadTask
from strategies.validation.overload import validate_overload
from strategies.validation.sources.functions import FunctionCall, gradient_sample, sample_of
from strategies.validation.sources.registry import source_named
from tests.strategies.cases import silent


def results(label, *args, ranks=(2, 3), gradient=False, **kwargs):
    """The sound and the wrong rules of one call, in short form."""
    source = source_named("spmd_types")
    call = FunctionCall(label, source.functions()[label], args, kwargs)
    assert source.labels
    sample: Sample = sample_of("spmd_types", call)
    if gradient:
        inexact = tuple(i for i, x in enumerate(sample.tensors) if x.is_floating_point())
        sample = gradient_sample("spmd_types", call, sample, inexact)
    task = OverloadTask(sample.op, (sample,), tuple((n,) for n in ranks), 0, source="spmd_types")
    found = validate_overload(task, silent)
    assert not any(one.crashed for one in found)
    sound = {name for one in found for name in one.sound}
    wrong = {name for one in found for name in one.suspects}
    return [{name.partition(": ")[2] for name in names} for names in (sound - wrong, wrong)]


X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
ODD = torch.randn(5, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def test_sums_and_products_are_sound():
    sound, wrong = results("torch.add", X, X)
    assert not wrong and {"R, R -> R", "P(sum), P(sum) -> P(sum)", "S(0), S(0) -> S(0)", "S(1), S(1) -> S(1)"} <= sound
    sound, wrong = results("torch.mul", X, X)
    assert not wrong and "P(sum), R -> P(sum)" in sound and "P(sum), P(sum) -> P(sum)" not in sound


def test_gradients_follow_from_replicated_and_invariant_inputs():
    sound, wrong = results("torch.mul", X, X, gradient=True)
    assert not wrong
    assert "R, R, P(sum) -> P(sum), P(sum)" in sound  # R: each rank's gradient is a part
    assert "R, R, R -> R, R" in sound  # I: each rank has the whole gradient
    assert "P(sum), R, R -> R, P(sum)" in sound


def test_a_contraction_of_a_sharded_dim_gives_parts():
    sound, wrong = results("torch.matmul", X, X.T.contiguous())
    assert not wrong and {"S(1), S(0) -> P(sum)", "S(0), R -> S(0)", "R, S(1) -> S(1)"} <= sound


def test_in_place_and_out_keep_the_layout():
    sound, wrong = results("torch.Tensor.add_", X, X)
    assert not wrong and "S(0), S(0) -> S(0)" in sound
    sound, wrong = results("torch.add", X, X, out=torch.zeros_like(X))
    assert not wrong and "P(sum), P(sum), P(sum) -> P(sum)" in sound and "R, R, P(sum) -> R" not in sound | wrong


def test_views_take_the_sizes_of_the_pieces():
    sound, wrong = results("torch.Tensor.view", X, 6, 2, 2, ranks=(2,))
    assert not wrong and {"S(0) -> S(0)", "P(sum) -> P(sum)"} <= sound


def test_uneven_shards_of_any_sizes_are_sound():
    sound, wrong = results("torch.flatten", ODD)
    assert not wrong and "S(0) -> S(0)" in sound


def test_a_nansum_of_parts_is_found_wrong_forward_and_backward():
    for gradient in (False, True):
        x = X.clone()
        x[0, 0] = torch.nan
        assert any(name.startswith("P(sum)") for name in results("torch.nansum", x, gradient=gradient)[1])


def test_an_index_in_parts_is_found_wrong():
    index = torch.tensor([0, 3, 1])
    assert "P(sum), P(sum) -> P(sum)" in results("torch.index_select", X, 0, index)[1]
