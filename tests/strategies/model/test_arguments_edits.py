import pytest
import torch

from strategies.model.arguments import (
    counts_dims,
    named_arguments,
    scalar_arguments,
    with_arguments_changed,
    with_scalars_changed,
    with_value_at,
)
from strategies.model.rule import Leaf
from tests.strategies.cases import numbers, sample

SUM = sample("sum.dim_IntList", numbers(2, 3), [0, -1], True, dtype=torch.float32)
CAT = sample("cat.default", [numbers(2), numbers(3), numbers(4)], 0)


def test_spots_are_all_values_but_tensors_with_the_names_of_their_arguments():
    assert [(s.path, s.name, s.value) for s in scalar_arguments(SUM.call)] == [
        ((1, 0), "dim", 0), ((1, 1), "dim", -1), ((2,), "keepdim", True), (("dtype",), "dtype", torch.float32)
    ]  # fmt: skip
    assert [s.path for s in scalar_arguments(CAT.call)] == [(1,)]
    assert [name for _, name, _ in named_arguments(CAT.call)] == ["tensors", "dim"]


def test_one_value_is_put_and_the_rest_stays():
    assert with_value_at(SUM.call, (1, 1), 1).args == (Leaf(0), [0, 1], True)
    assert with_value_at(SUM.call, ("dtype",), None).kwargs == (("dtype", None),)
    assert with_value_at(SUM.call, (1,), [0]).args[1] == [0]
    assert SUM.call.args[1] == [0, -1]


def test_values_change_by_their_name_one_by_one_or_list_by_list():
    assert with_scalars_changed(SUM.call, lambda name, v: v + 5 if name == "dim" else v).args[1:] == ([5, 4], True)
    assert with_arguments_changed(SUM.call, lambda name, v: v[:1] if name == "dim" else v).args[1:] == ([0], True)
    assert with_scalars_changed(CAT.call, lambda name, v: v) == CAT.call


@pytest.mark.parametrize(("name", "want"), [
    ("dim", True), ("dims", True), ("dim0", True), ("start_dim", True), ("axis", True), ("batch_dims", True),
    ("size", False), ("kernel_size", False), ("diagonal", False),
])  # fmt: skip
def test_which_arguments_hold_dims(name, want):
    assert counts_dims(name) is want
