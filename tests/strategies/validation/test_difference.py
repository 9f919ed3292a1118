import pytest
import torch

from localtensor.layout import parse
from strategies.model.rule import Rule
from strategies.validation.difference import non_arithmetic_partial, not_gathered, tensor_text


@pytest.mark.parametrize(("value", "shown"), [
    (torch.tensor([[1.5, -2.0]]), "[1.5, -2] of shape (1, 2)"),
    (torch.tensor(True), "[True] of shape ()"),
    (torch.arange(30), f"[{', '.join(map(str, range(24)))}, ...] of shape (30,)"),
    (torch.tensor([1 + 2j]), "[1+2j] of shape (1,)"),
    (torch.empty(0, 3), "[] of shape (0, 3)"),
    (None, "None"),
], ids=["float", "bool", "long", "complex", "empty", "none"])  # fmt: skip
def test_a_tensor_is_shown_on_one_line(value, shown):
    assert tensor_text(value) == shown


def test_a_tensor_whose_memory_was_freed_is_shown_too():
    freed = torch.ones(2, 3)
    freed.untyped_storage().resize_(0)
    assert tensor_text(freed) == "no values, of shape (2, 3)"


@pytest.mark.parametrize(("inputs", "outputs", "dtype", "said"), [
    ("P(sum)", "P(sum)", torch.bool, "P(sum) of torch.bool"), ("P(max)", "P(max)", torch.bool, ""),
    ("S(0)", "P(sum)", torch.bool, ""), ("S(0)", "P(product)", torch.complex64, "P(product) of torch.complex64"),
    ("P(product)", "R", torch.complex64, ""), ("S(0)", "P(max)", torch.complex64, ""), ("P(sum)", "P(sum)", torch.float32, ""),
])  # fmt: skip
def test_a_partial_value_that_is_not_to_be_computed_with_is_named(inputs, outputs, dtype, said):
    x = torch.ones(2, dtype=dtype)
    assert non_arithmetic_partial(Rule("aten.neg.default", (parse(inputs),), (parse(outputs),)), [x], [x]) == said


@pytest.mark.parametrize(("placement", "dtype", "said"), [
    ("P(avg)", torch.int64, "P(avg)"), ("P(product)", torch.complex64, "P(product)"), ("P(max)", torch.complex64, "P(max)"),
    ("P(avg)", torch.bool, "P(avg)"), ("P(sum)", torch.bool, ""), ("P(avg)", torch.float32, ""), ("P(sum)", torch.int64, ""),
    ("S(0)", torch.int64, ""),
])  # fmt: skip
def test_a_partial_input_that_dtensor_cannot_gather_is_named(placement, dtype, said):
    placed = parse("R"), parse(placement)
    assert (
        not_gathered(Rule("aten.add.Tensor", placed, (placed[0],)), [torch.ones(2), torch.ones(2, dtype=dtype)]) == said
    )
