import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from strategies.model.arguments import (
    argument_names,
    argument_values,
    call_with,
    counts_dims,
    is_index,
    is_index_dtype,
    named_arguments,
    repeats_sizes,
    scalar_arguments,
    trusts_caller,
    with_arguments_changed,
    with_scalars_changed,
    with_tensors,
    with_value_at,
)
from strategies.model.rule import Leaf, call_of, overload
from tests.strategies.cases import numbers, sample

X = numbers(4, 6)


class Received(TorchDispatchMode):
    """The last call, as a rule would see it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.call, _ = call_of(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("one", [
    sample("sum.dim_IntList", X, dim=[0], keepdim=True),
    sample("sum.dim_IntList", X, [0], False),
    sample("sum.dim_IntList", X, [0], False, dtype=None),
    sample("sum.dim_IntList", X, None, True, dtype=torch.float32),
    sample("amax.default", X, []),
    sample("add.Tensor", X, X, alpha=1),
    sample("add.Tensor", X, X, alpha=1.0),
    sample("add.Tensor", X, other=X, alpha=2),
    sample("index.Tensor", X, [None, torch.tensor([1])]),
    sample("clamp.Tensor", X, None, X),
], ids=lambda one: f"{one.op}{one.arguments()}")  # fmt: skip
def test_a_call_is_made_as_the_dispatcher_hands_it_on(one):
    with Received() as validated:
        one.call(one.tensors)
    assert call_with(one, argument_values(one), "again").call == validated.call


def test_keepdim_by_position_and_by_keyword_are_one_call_to_a_rule():
    by_place, by_name = sample("sum.dim_IntList", X, [0], True), sample("sum.dim_IntList", X, [0], keepdim=True)
    assert by_place.call != by_name.call
    assert (
        call_with(by_place, argument_values(by_place), "").call == call_with(by_name, argument_values(by_name), "").call
    )


def test_all_arguments_are_known_by_name_with_their_defaults():
    given = argument_values(sample("sum.dim_IntList", X, [0]))
    assert given["self"] is not None and torch.equal(given["self"], X)
    assert (given["dim"], given["keepdim"], given["dtype"]) == ([0], False, None)


def test_a_tensor_that_is_put_in_or_left_out_numbers_the_others_anew():
    one = sample("clamp.Tensor", X, X - 1, X + 1)
    less = call_with(one, argument_values(one) | {"min": None}, "min=None")
    assert less.call.args == (Leaf(0), None, Leaf(1))
    assert less.tensors[1] is one.tensors[2]
    assert less.origin == "test, min=None"


def test_each_tensor_knows_its_argument():
    assert argument_names(sample("index_put.default", X, [None, torch.tensor([1])], X[:, :1])) == (
        "self",
        "indices",
        "values",
    )
    assert argument_names(sample("exp.out", X, out=X)) == ("self", "out")


def test_other_tensors_leave_the_call_as_it_is():
    one = sample("add.Tensor", X, X)
    other = with_tensors(one, {1: X + 1}, "moved")
    assert other.call == one.call and other.tensors[0] is one.tensors[0]
    assert torch.equal(other.tensors[1], X + 1)


@pytest.mark.parametrize(("op", "trusting"), [
    ("aten._softmax.default", True), ("aten.native_layer_norm.default", True), ("aten.tanh_backward.default", True),
    ("aten.segment_reduce.default", True), ("aten.linalg_ldl_solve.default", True), ("aten.lu_unpack.default", True),
    ("aten.gather.default", False), ("aten.nll_loss_forward.default", False), ("aten.add_.Tensor", False),
])  # fmt: skip
def test_ops_that_do_not_check_what_they_are_given_are_known(op, trusting):
    assert overload(op) is not None
    assert trusts_caller(op) is trusting


def test_ratios_say_once_more_what_the_sizes_say():
    assert repeats_sizes("scales_h") and repeats_sizes("scales") and not repeats_sizes("output_size")


def test_places_are_integers_in_arguments_of_that_name():
    assert is_index("target") and is_index("indices") and not is_index("self")
    assert is_index_dtype(torch.tensor([1])) and not is_index_dtype(torch.tensor([True])) and not is_index_dtype(X)


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
