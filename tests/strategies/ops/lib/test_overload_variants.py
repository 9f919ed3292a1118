"""Overloads that write what another computes: in place, into `out=`, as copies of views, on lists."""

import pytest
import torch
from torch.distributed.tensor import Partial

from strategies.model.oracle import run_oracle
from strategies.ops.lib.overload_variants import foreach_ops, on_lists, overloads_of, with_variants, writing_variants
from strategies.ops.pointwise.linear import RULES as LINEAR
from strategies.ops.pointwise.linear import RULES as POINTWISE
from strategies.ops.pointwise.monotone import RULES as MONOTONE
from strategies.ops.semantics.rule_registry import rules
from strategies.ops.validation.claims import query_of_sample
from tests.strategies.cases import numbers, sample
from tests.strategies.ops.held import assert_lines, assert_tempting, lines_of

X, Y = numbers(4), numbers(4).flip(0)
BYTES, WHOLE = torch.tensor([3, 200, 7, 90], dtype=torch.uint8), numbers(4, dtype=torch.int64)
LISTS = on_lists((*LINEAR, *POINTWISE, *MONOTONE))

MODULES = {
    "add.Tensor": {"aten.add.out", "aten.add_.Tensor"},
    "__xor__.Scalar": {"aten.__ixor__.Scalar"},
    "max.dim": {"aten.max.dim_max"},
    "gelu_backward.default": {"aten.gelu_backward.grad_input"},
    "bernoulli.p": {"aten.bernoulli.float_out", "aten.bernoulli_.float"},
    "zeros_like.default": {"aten.zeros_like.out"},
    "expand.default": {"aten.expand_copy.default", "aten.expand_copy.out"},
    "_fused_adam.default": {"aten._fused_adam.out", "aten._fused_adam_.default"},
    "add_.Tensor": set(),
    "no_such_op.default": set(),
}


@pytest.mark.parametrize("op", MODULES)
def test_the_overloads_that_write_what_an_op_computes_are_found_by_their_schemas(op):
    assert set(writing_variants(f"aten.{op}")) == MODULES[op]


def test_an_overload_with_an_entry_of_its_own_keeps_it():
    own = rules("own", "because", ["aten.add_.Tensor"], lambda query: [])
    plain = rules("plain", "because", ["aten.add.Tensor"], lambda query: [])
    found = {entry.op: entry for entry in with_variants((*own, *plain), but=["aten.add.out"])}
    assert set(found) == {"aten.add.Tensor", "aten.add_.Tensor"}
    assert found["aten.add_.Tensor"].family == "own"


def test_a_derived_rule_is_where_the_function_is_that_it_is_derived_from():
    found = with_variants(rules("plain", "because", overloads_of("neg add.Tensor"), lines_of))
    (where,) = {entry.where for entry in (*found, *on_lists(found))}
    assert "held.py" in where and len(found) == 6


def test_what_is_written_to_lies_as_the_result():
    assert {str(line) for line in lines_of(POINTWISE, sample("atan2_.default", numbers(5, 4), Y))} == {
        "S(0), R -> S(0)",
        "S(1), S(0) -> S(1)",
    }
    one = sample("div.out", X, Y + 3, out=numbers(4))
    kinds = ("sum", "avg")
    assert_lines(LINEAR, one, "S(0), S(0), S(0) -> S(0)", *(f"P({k}), R, P({k}) -> P({k})" for k in kinds))


def test_what_is_replicated_cannot_be_written_to_in_place_with_parts():
    texts = {str(line) for line in lines_of(LINEAR, sample("mul_.Tensor", X, Y))}
    assert "P(sum), R -> P(sum)" in texts and "R, P(sum) -> P(sum)" not in texts


def test_parts_are_not_cast_by_what_they_are_written_to():
    many = BYTES.repeat(8)
    narrow = sample("add.out", many, many, out=torch.zeros(32, dtype=torch.int64))
    assert_tempting(LINEAR, narrow, "P(sum), P(sum), P(sum) -> P(sum)", "the parts make")
    assert_lines(LINEAR, narrow, "S(0), S(0), S(0) -> S(0)")
    assert any("P(sum)" in str(line) for line in lines_of(LINEAR, sample("add.out", BYTES, BYTES, out=BYTES.clone())))


def test_a_rule_that_does_not_look_at_dtypes_gives_no_parts_to_an_out_of_another():
    def parts(query):
        yield query.line({0: Partial("sum"), 1: Partial("sum")}, [Partial("sum")])

    derived = with_variants(rules("plain", "because", overloads_of("add.Tensor"), parts))
    texts = {dtype: set(map(str, lines_of(derived, sample("add.out", WHOLE, WHOLE, out=torch.zeros(4, dtype=dtype)))))
             for dtype in (torch.int64, torch.float64)}  # fmt: skip
    assert texts == {torch.int64: {"P(sum), P(sum), P(sum) -> P(sum)"}, torch.float64: set()}


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_an_out_of_another_shape_is_resized_and_has_no_lines():
    assert lines_of(POINTWISE, sample("sin.out", X, out=numbers(2))) == set()


def test_a_list_op_goes_by_the_lines_of_each_element():
    one = sample("_foreach_neg.default", [numbers(5, 4), X])
    both = ["S(0), S(0) -> S(0), S(0)", "S(1), R -> S(1), R"]
    alone = ["S(0), R -> S(0), R", "R, S(0) -> R, S(0)"]
    kinds = {"P(sum)": "P(sum)", "P(avg)": "P(avg)", "P(max)": "P(min)", "P(min)": "P(max)"}
    shapes = [f"{p} -> {q}" for a, b in kinds.items() for p, q in ((f"{a}, {a}", f"{b}, {b}"), (f"{a}, R", f"{b}, R"), (f"R, {a}", f"R, {b}"))]  # fmt: skip
    assert_lines(LISTS, one, *both, *alone, *shapes)


def test_a_list_op_in_place_gives_nothing_and_leaves_its_lists_as_they_came():
    one = sample("_foreach_add_.List", [X, X.clone(), X.clone()], [Y, Y.clone(), Y.clone()])
    texts = {str(line) for line in lines_of(LISTS, one)}
    assert "S(0), S(0), S(0), S(0), S(0), S(0) -> " in texts
    assert "P(sum), P(sum), P(sum), P(sum), P(sum), P(sum) -> " in texts
    assert not any(text.startswith("R, R, R, P(avg)") for text in texts)
    assert_lines(LISTS, one, *texts)


def test_elements_that_share_a_tensor_agree_on_it():
    one = sample("_foreach_mul.Tensor", [X, Y], torch.tensor(2.0, dtype=torch.float64))
    texts = {str(line) for line in lines_of(LISTS, one)}
    assert "S(0), S(0), R -> S(0), S(0)" in texts and "R, R, P(sum) -> P(sum), P(sum)" in texts
    assert "P(sum), R, P(sum) -> P(sum), P(sum)" not in texts


def test_a_long_list_has_no_lines_for_each_element_alone():
    short, long = (len(lines_of(LISTS, sample("_foreach_sin.default", [X] * count))) for count in (2, 9))
    assert (short, long) == (3, 1)


def test_the_calls_that_a_list_op_is_can_be_asked_one_by_one():
    one = sample("_foreach_addcmul.ScalarList", [X, Y], [X, X], [Y, Y], [2.0, 3.0])
    (entry,) = (entry for entry in LISTS if entry.op == one.op)
    elements = entry.lines.elements(query_of_sample(one, run_oracle(one).raw))
    assert [e.leaves for e in elements] == [(0, 2, 4), (1, 3, 5)]
    assert [(e.query.op, e.query["value"]) for e in elements] == [
        ("aten.addcmul.default", 2.0),
        ("aten.addcmul.default", 3.0),
    ]


def test_list_ops_are_calls_of_the_op_that_takes_what_their_elements_are():
    found = foreach_ops()
    assert found["aten._foreach_add.ScalarList"] == "aten.add.Scalar"
    assert found["aten._foreach_pow.ScalarAndTensor"] == "aten.pow.Scalar"
    assert found["aten._foreach_maximum.Scalar"] == "aten.clamp_min.default"
    assert found["aten._foreach_lerp.List"] == "aten.lerp.Tensor"
