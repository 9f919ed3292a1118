import pytest
import torch

from strategies.inputs import typed_values
from strategies.model.rule import Leaf, overload

LIB = torch.library.Library("drawn", "FRAGMENT")  # the ops live as long as this does


def define(schema, function):
    LIB.define(schema)
    LIB.impl(schema.split("(")[0], function, "CPU")


def only_eight_rows(x):
    if x.shape[0] != 8:
        raise ValueError("eight rows")
    return x * 2


def breaks(x):
    raise ZeroDivisionError("no refusal")


define("double(Tensor x) -> Tensor", lambda x: x * 2)
define("eight(Tensor x) -> Tensor", only_eight_rows)
define("nothing(Tensor x) -> Tensor", lambda x: torch.stack([x, x[:0]]))
define("breaks(Tensor x) -> Tensor", breaks)
define("pick(Tensor x, Tensor index, int dim) -> Tensor", lambda x, index, dim: x.clone())
define("look_up(Tensor indices, Tensor x) -> Tensor", lambda indices, x: x.clone())
define("joined(Tensor[] parts, int dim) -> Tensor", torch.cat)
define("scaled(Tensor x, float by, bool flip, *, Scalar plus, int times=3) -> Tensor",
       lambda x, by, flip, plus, times=3: x.clone())  # fmt: skip
define("shaped(Tensor x, int[] dims, int count, int? dim=None) -> Tensor", lambda x, dims, count, dim=None: x.clone())
define("added(Tensor x, Tensor? y) -> Tensor", lambda x, y: x + y)


def drawn(name, *dtypes, seed=0):
    return typed_values.schema_calls(overload(f"drawn.{name}.default"), dtypes or (torch.float64,), seed)


def assert_same_calls(ones, others):
    assert [(s.call, s.origin) for s in ones] == [(s.call, s.origin) for s in others]
    for one, other in zip(ones, others, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(one.tensors, other.tensors, strict=True))


@pytest.mark.parametrize("name", ["double", "pick", "joined", "scaled"])
def test_the_same_seed_draws_the_same_calls(name):
    dtypes = (torch.float64, torch.int64, torch.bool, torch.complex64)
    assert_same_calls(drawn(name, *dtypes, seed=5), drawn(name, *dtypes, seed=5))


def test_another_seed_draws_the_same_shapes_with_other_values():
    one, other = drawn("double", seed=1), drawn("double", seed=2)
    assert [s.arguments() for s in one] == [s.arguments() for s in other]
    assert not any(torch.equal(x.tensors[0], y.tensors[0]) for x, y in zip(one, other, strict=True))


def test_only_what_the_op_accepts_is_kept():
    assert {s.tensors[0].shape[0] for s in drawn("eight")} == {8}
    assert drawn("nothing") == []


def test_an_error_that_is_no_refusal_is_not_swallowed():
    with pytest.raises(ZeroDivisionError, match="no refusal"):
        drawn("breaks")


def test_each_dtype_is_drawn_in_the_order_of_asking():
    dtypes = (torch.int64, torch.bool, torch.complex64)
    found = [s.tensors[0].dtype for s in drawn("double", *dtypes)]
    assert found == sorted(found, key=dtypes.index) and set(found) == set(dtypes)


def test_no_more_calls_than_a_task_has_time_for():
    assert len(drawn("pick", torch.float64, torch.int64)) <= 2 * typed_values.MOST_DRAWN
    assert len(drawn("shaped")) == typed_values.MOST_DRAWN


def test_an_index_is_one_in_every_dim_of_every_tensor():
    for name, at in (("pick", 1), ("look_up", 0)):
        found = drawn(name)
        assert len({s.tensors[at].shape for s in found}) > 5
        for sample in found:
            index, x = sample.tensors[at], sample.tensors[1 - at]
            assert index.dtype == torch.int64
            assert index.min() >= 0 and index.max() < min(x.shape), sample.arguments()


def test_a_dim_is_tried_from_both_ends():
    assert {s.call.args[2] for s in drawn("pick")} == {0, 1, -1}


def test_a_list_of_tensors_holds_two():
    found = drawn("joined")
    assert found
    for sample in found:
        assert sample.call.args[0] == [Leaf(0), Leaf(1)]
        assert len(sample.tensors) == 2


def test_an_optional_tensor_is_there():
    assert all(s.call.args == (Leaf(0), Leaf(1)) for s in drawn("added"))


def test_operands_come_in_equal_shapes_and_in_others():
    assert {s.tensors[0].shape == s.tensors[1].shape for s in drawn("pick")} == {True, False}


def test_every_kind_of_scalar_has_values_and_an_optional_keyword_keeps_its_default():
    found = drawn("scaled")
    assert {s.call.args[1:] for s in found} == {(by, flip) for by in (0.5, 2.0) for flip in (False, True)}
    assert {s.call.kwargs for s in found} == {(("plus", 0.5),), (("plus", 2.0),)}


def test_lists_of_integers_hold_dims():
    assert [0] in [s.call.args[1] for s in drawn("shaped")]
    assert {s.call.args[2] for s in drawn("shaped")} == {1, 2}


def test_values_differ_from_element_to_element_and_in_sign():
    x = drawn("double")[0].tensors[0]
    assert x.unique().numel() == x.numel()
    assert (x < 0).any() and (x > 0).any()


def test_samples_of_the_users_own_are_taken_as_they_are():
    x = torch.arange(4.0, requires_grad=True)
    (one, other) = typed_values.user_samples(overload("drawn.pick.default"), [((x, x, 0), {}), ((x, x), {"dim": 1})])
    assert one.call.args == (Leaf(0), Leaf(1), 0)
    assert other.call.kwargs == (("dim", 1),)
    assert (one.origin, other.origin) == ("samples() #0", "samples() #1")
    assert torch.equal(one.tensors[0], x) and not one.tensors[0].requires_grad


def test_what_must_be_in_order_is_drawn_in_order():
    define("ordered(Tensor x, Tensor boundaries) -> Tensor", lambda x, boundaries: x.clone())
    found = [one.tensors for one in drawn("ordered", torch.float64, torch.int64)]
    assert found and all(torch.equal(bounds, bounds.sort(-1).values) for _, bounds in found)
    assert not all(torch.equal(x, x.sort(-1).values) for x, _ in found)
    assert drawn("ordered", torch.complex64)
