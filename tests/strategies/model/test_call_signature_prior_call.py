import math

import pytest
import torch

from strategies.model.call_signature import argument_text, parse_prior_call, prior_call_text, prior_calls
from strategies.model.rule import Leaf
from tests.strategies.cases import numbers, sample

X = numbers(4, 3)


@pytest.mark.parametrize("one", [
    sample("sum.dim_IntList", X, [1], True),
    sample("sum.dim_IntList", X, [0], dtype=torch.float32),
    sample("clamp.default", X, -math.inf, None),
    sample("add.Tensor", X, X, alpha=-2.5),
    sample("mul.Scalar", X, 1 - 2j),
    sample("cat.default", [X, X], -1),
    sample("new_zeros.default", X, [2, 2], device=torch.device("cpu"), layout=torch.strided),
    sample("clone.default", X, memory_format=torch.contiguous_format),
], ids=lambda one: f"{one.op} {one.call.args[1:]}")  # fmt: skip
def test_the_text_of_a_call_is_that_call(one):
    assert parse_prior_call(one.op, prior_call_text(one.call)) == one.call


def test_nan_is_nan_again():
    assert math.isnan(parse_prior_call("aten.clamp.default", "again(x0, nan)").args[1])


@pytest.mark.parametrize("text", [
    "again(x0, __import__('os'))", "again(open('a'))", "print(x0)", "again(y0)", "again(x0.shape)", "x0",
    "again(", f"again({'(' * 3000}", f"again({'[' * 150}", "again(x0, '\0')",
])  # fmt: skip
def test_other_text_is_refused(text):
    with pytest.raises(ValueError, match=r"no argument of a call|no call that came before|no Python"):
        parse_prior_call("aten.neg.default", text)


def test_tuples_keep_their_kind():
    assert argument_text((1,)) == "(1,)" and argument_text([Leaf(2)]) == "[x2]" and argument_text(()) == "()"


def test_calls_that_could_have_come_before_differ_in_arguments_alone():
    one = sample("sum.dim_IntList", X, [1])
    seen = [
        sample("sum.dim_IntList", X, [1]), sample("sum.dim_IntList", X + 1, [0]), sample("sum.dim_IntList", X, [0]),
        sample("sum.dim_IntList", X[:2], [0], True), sample("sum.dim_IntList", X.float(), [0], True),
        sample("mean.dim", X, [0], True), sample("sum.dim_IntList", X, [1], dtype=torch.float32),
    ]  # fmt: skip
    assert list(prior_calls(one, seen)) == ["again(x0, [0])", "again(x0, [1], dtype=torch.float32)"]
