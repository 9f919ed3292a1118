import pytest
import torch

from strategies.validation.difference import tensor_text


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
