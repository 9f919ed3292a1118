"""Calls drawn from a schema: the same in any process, by type and by name."""

import sys

import pytest
import torch

from strategies.inputs.schema_binding import Unbound
from strategies.inputs.typed_values import FIRST_DTYPES, MOST, draw_calls
from strategies.model.rule import Leaf
from tests.tools import warm


def shown(found):
    return [(s.arguments(), [t.tolist() for t in s.tensors]) for s in found]


def test_the_same_seed_draws_the_same_calls_in_any_process():
    code = (
        "import torch; from strategies.inputs.typed_values import draw_calls\n"
        "print([(s.arguments(), [t.tolist() for t in s.tensors]) for s in draw_calls('aten.lerp.Scalar')])"
    )
    other = warm.run([sys.executable, "-c", code], check=True, timeout=60)
    assert other.stdout.strip() == str(shown(draw_calls("aten.lerp.Scalar")))


def test_another_seed_draws_other_calls():
    assert shown(draw_calls("aten.lerp.Scalar", seed=1)) != shown(draw_calls("aten.lerp.Scalar"))


def test_every_dtype_that_the_op_takes_is_drawn():
    dtypes = {s.tensors[0].dtype for s in draw_calls("aten.clip.default")}
    assert dtypes == {torch.float64, torch.int64}
    assert len(draw_calls("aten.clip.default")) <= len(FIRST_DTYPES) * MOST


def test_an_op_that_takes_no_usual_dtype_is_drawn_others():
    assert {s.tensors[0].dtype for s in draw_calls("aten._scaled_mm.default")} == {torch.float8_e4m3fn}


def test_lists_are_of_unequal_sizes_and_equally_long():
    found = draw_calls("aten._foreach_addcmul_.Tensor")
    lists = [[v for v in s.call.args if isinstance(v, (list, tuple))] for s in found]
    assert lists
    assert all(len({len(one) for one in call}) == 1 for call in lists)
    assert any(len({s.tensors[leaf.index].shape for leaf in call[0]}) > 1 for s, call in zip(found, lists, strict=True))


def test_a_fused_optimizer_gets_positive_squares_and_steps_without_dims():
    for one in draw_calls("aten._fused_adam_.default", ["float64"]):
        squares, steps = one.call.args[3], one.call.args[5]
        assert all(bool((one.tensors[leaf.index] > 0).all()) for leaf in (*squares, *steps))
        assert {one.tensors[leaf.index].ndim for leaf in steps} == {0}


def test_an_op_of_three_spatial_dims_gets_a_batch_of_volumes():
    assert {s.tensors[0].ndim for s in draw_calls("aten._upsample_nearest_exact3d.default")} == {5}


def test_integers_hold_no_zero_that_something_may_divide_by():
    found = draw_calls("aten.true_divide.Tensor", ["int64"])
    assert all(bool((t != 0).all()) for s in found for t in s.tensors)


def test_arguments_are_tensors_numbers_or_plain_values():
    args = [v for s in draw_calls("aten.native_dropout.default") for v in s.call.args]
    assert any(type(v) is Leaf for v in args)
    assert any(isinstance(v, float) for v in args)


def test_an_op_that_refuses_all_says_so_in_its_words():
    with pytest.raises(Unbound, match=r"it refuses all \d+ calls drawn for it: .*NotImplementedError"):
        draw_calls("aten._scaled_dot_product_flash_attention.default")
