"""One op, by whatever name, and all that it gives; and each part of torch that this reads.  How the shapes of an
op's tensors go together, found by trying."""

import pytest
import torch
from torch._library import custom_ops

from strategies.validation.assertions import ops
from strategies.validation.assertions.calls import SMALL_PATTERNS, build_call, schema_calls
from strategies.validation.assertions.rule import AssertedRule, NotARule
from tests.localtensor import rules_tried


def test_the_parts_of_torch_are_where_they_were():
    assert torch.ops.aten.add_.Tensor._schema.arguments[0].alias_info.is_write
    assert custom_ops.OPDEFS["ruletests::scale"]._opoverload is torch.ops.ruletests.scale.default
    assert custom_ops.OPDEFS["ruletests::scale"]._init_fn.__module__ == rules_tried.__name__


def test_an_op_gives_what_it_returns_and_what_it_writes_to():
    x, y = torch.ones(2), torch.ones(2)
    [written] = ops.Op.of("ruletests::bump").run((x, y), {})
    assert written is x
    assert x.tolist() == [2, 2]


def test_what_is_returned_is_not_reported_twice():
    x = torch.ones(2)
    assert len(ops.Op.of("aten.add_.Tensor").run((x, x), {})) == 1


def test_it_knows_the_file_of_a_custom_op():
    assert ops.Op.of("ruletests::scale").home() == (rules_tried.__name__, rules_tried.__file__)
    assert ops.Op.of("aten.neg.default").home() is None


def test_what_torch_says_of_ops():
    assert ops.Op.of("aten.bernoulli.default").random
    assert not ops.Op.of("aten.neg.default").random
    assert ops.Op.of("aten.neg.default").pointwise


@pytest.mark.parametrize("op", ["aten.neg", "aten::neg", "aten.no_such_op.default", "aten.neg.no_such", 3, "a b"])
def test_what_is_no_single_op_is_refused(op):
    with pytest.raises(NotARule, match="assert_rule: op: "):
        ops.Op.of(op)


def test_what_is_no_list_is_replaced_wherever_it_stands():
    assert ops.map_leaves([1, (2, {"k": 3})], lambda x: x + 1) == [2, (3, {"k": 4})]


def test_a_function_is_an_op_of_tensors():
    op = ops.FunctionOp(torch.add, 2)
    assert [a.name for a in op.arguments] == ["x0", "x1"]
    assert op.run((torch.ones(1), torch.ones(1)), {})[0].item() == 2


def shapes_of(op, rule):
    def make(plan, rng):
        sizes = {letter: place for place, letter in enumerate(plan.letters, 2)} | {"1": 1}
        return ops.materialized(build_call(ops.Op.of(op), plan, sizes, (torch.float64, SMALL_PATTERNS), rng.choice))

    plans, why = ops.accepted_plans(ops.Op.of(op), AssertedRule.read(rule), make)
    return {" ".join("".join(shape) or "()" for shape in plan.flat) for plan in plans}, why


def test_matrices_meet_in_one_dim():
    assert shapes_of("aten.mm.default", "R, R -> R")[0] == {"ab bn"}


def test_pointwise_operands_broadcast_but_not_where_they_are_cut():
    every = shapes_of("aten.add.Tensor", "R, R -> R")[0]
    assert {"ab ab", "ab b", "ab 1b", "ab ()"} <= every
    cut = shapes_of("aten.add.Tensor", "S(0), S(0) -> S(0)")[0]
    assert {"ab ab", "ab a1"} <= cut
    assert not {"ab 1b", "ab b"} & cut


def test_lists_have_as_many_tensors_as_the_rule_leaves():
    assert {"ab ab ab", "an0 an1 an2"} & shapes_of("aten.cat.default", "R, R, R -> R")[0]


def test_tensors_that_may_be_left_out_are_counted():
    assert all(len(one.split()) == 2 for one in shapes_of("aten.linear.default", "R, R -> R")[0])
    assert all(len(one.split()) == 3 for one in shapes_of("aten.linear.default", "R, R, R -> R")[0])


def test_why_there_is_none_is_said():
    assert shapes_of("aten.neg.default", "R, R -> R") == (set(), "its schema has no such number of tensors")
    assert shapes_of("aten.neg.default", "S(9) -> R") == (set(), "no tensor has the dims that the rule cuts")
    assert "refused all" in shapes_of("aten.mm.default", "R, R -> R")[1] or shapes_of("aten.mm.default", "R, R -> R")[0]


def test_a_square_is_a_case_of_a_rectangle():
    def plan(*shapes):
        return ops.ShapePlan(tuple(shapes[0]), tuple((f"x{i}", tuple(shape)) for i, shape in enumerate(shapes)))

    assert ops.is_case_of(plan("ab", "ba"), plan("ab", "bn"))
    assert not ops.is_case_of(plan("ab", "bn"), plan("ab", "ba"))
    assert not ops.is_case_of(plan("ab", "1b"), plan("ab", "nb"))
    assert ops.has_sharded_dims(plan("ab", "b"), AssertedRule.read("S(1), S(0) -> R"))
    assert not ops.has_sharded_dims(plan("ab", "b"), AssertedRule.read("S(1), S(1) -> R"))
    assert ops.shards_one_dim(plan("ab", "b"), AssertedRule.read("S(1), S(0) -> R"))
    assert not ops.shards_one_dim(plan("ab", "b"), AssertedRule.read("S(0), S(0) -> R"))
    assert not ops.shards_one_dim(plan("ab", "1b"), AssertedRule.read("R, S(0) -> R"))  # that dim is broadcast


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "op", ["aten.mm.default", "aten.cumsum.default", "aten.where.self", "aten.native_layer_norm.default"]
)
def test_what_is_drawn_is_taken_for_the_most_part(op):
    overload = ops.Op.of(op)
    count = {"aten.mm.default": 2, "aten.cumsum.default": 1}.get(op, 3)
    drawn, why = schema_calls(overload, AssertedRule.read(f"{', '.join('R' * count)} -> R"), torch.float64)
    assert drawn is not None, why
