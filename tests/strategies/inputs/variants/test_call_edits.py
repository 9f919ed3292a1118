import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from strategies.inputs.variants.call_edits import (
    counts_dims,
    named_arguments,
    scalar_arguments,
    with_arguments_changed,
    with_call,
    with_scalars_changed,
    with_tensors,
    with_value_at,
    without_tensors,
)  # fmt: skip
from strategies.model.call_signature import holds_tensor
from strategies.model.oracle import run_oracle
from strategies.model.rule import Leaf, Program
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


def test_tensors_go_and_the_others_are_numbered_anew():
    program = Program(CAT, (2,), ((Shard(0),), (Replicate(),), (Shard(0),)))
    left = without_tensors(program, with_value_at(CAT.call, (0,), [Leaf(0), Leaf(2)]), [1])
    assert left.sample.call.args == ([Leaf(0), Leaf(1)], 0)
    assert [len(x) for x in left.sample.tensors] == [2, 4] and left.inputs == ((Shard(0),), (Shard(0),))
    assert run_oracle(left.sample).outputs[0].shape == (6,)


def test_tensors_and_calls_are_replaced_in_a_copy():
    program = Program(CAT, (2,), ((Replicate(),),) * 3)
    other = with_tensors(program, {1: numbers(7)})
    assert [len(x) for x in other.sample.tensors] == [2, 7, 4] and other.sample.origin == "test"
    assert with_call(program, with_value_at(CAT.call, (1,), -1)).sample.call.args[1] == -1
    assert [len(x) for x in program.sample.tensors] == [2, 3, 4]


@pytest.mark.parametrize(("name", "want"), [
    ("dim", True), ("dims", True), ("dim0", True), ("start_dim", True), ("axis", True), ("batch_dims", True),
    ("size", False), ("kernel_size", False), ("diagonal", False),
])  # fmt: skip
def test_which_arguments_hold_dims(name, want):
    assert counts_dims(name) is want


def test_what_holds_tensor():
    assert holds_tensor(Leaf(0)) and holds_tensor([None, Leaf(1)])
    assert not holds_tensor([1, 2]) and not holds_tensor(None)
