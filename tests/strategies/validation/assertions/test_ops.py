"""One op, by whatever name, and all that it gives; and each part of torch that this reads."""

import pytest
import torch
from torch._library import custom_ops

from strategies.validation.assertions.ops import FunctionOp, Op, map_leaves
from strategies.validation.assertions.rule import NotARule
from tests.localtensor import rules_tried


def test_the_parts_of_torch_are_where_they_were():
    assert torch.ops.aten.add_.Tensor._schema.arguments[0].alias_info.is_write
    assert custom_ops.OPDEFS["ruletests::scale"]._opoverload is torch.ops.ruletests.scale.default
    assert custom_ops.OPDEFS["ruletests::scale"]._init_fn.__module__ == rules_tried.__name__


def test_an_op_gives_what_it_returns_and_what_it_writes_to():
    x, y = torch.ones(2), torch.ones(2)
    [written] = Op.of("ruletests::bump").run((x, y), {})
    assert written is x
    assert x.tolist() == [2, 2]


def test_what_is_returned_is_not_told_twice():
    x = torch.ones(2)
    assert len(Op.of("aten.add_.Tensor").run((x, x), {})) == 1


def test_it_knows_the_file_of_a_custom_op():
    assert Op.of("ruletests::scale").home() == (rules_tried.__name__, rules_tried.__file__)
    assert Op.of("aten.neg.default").home() is None


def test_what_torch_says_of_ops():
    assert Op.of("aten.bernoulli.default").random
    assert not Op.of("aten.neg.default").random
    assert Op.of("aten.neg.default").pointwise


@pytest.mark.parametrize("op", ["aten.neg", "aten::neg", "aten.no_such_op.default", "aten.neg.no_such", 3, "a b"])
def test_what_is_no_single_op_is_refused(op):
    with pytest.raises(NotARule, match="assert_rule: op: "):
        Op.of(op)


def test_what_is_no_list_is_replaced_wherever_it_stands():
    assert map_leaves([1, (2, {"k": 3})], lambda x: x + 1) == [2, (3, {"k": 4})]


def test_a_function_is_an_op_of_tensors():
    op = FunctionOp(torch.add, 2)
    assert [a.name for a in op.arguments] == ["x0", "x1"]
    assert op.run((torch.ones(1), torch.ones(1)), {})[0].item() == 2
